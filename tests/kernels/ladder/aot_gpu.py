"""Compile GPU kernels for an H200 on a machine without one, and read what the assembler says of them.

    python -m tests.kernels.ladder.aot_gpu NAME...

Run in a process of its own: some of the compiler's errors end it. Prints a line of JSON after the assembler's output for
each configuration. Needs the CUDA plugin (extra `aot`), but neither a GPU nor NVIDIA's libraries.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

HEADS: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16}
DECODES, DRAFTS, PROMPT = {"singles": 16}, {"chunks": 16, "chunk_tokens": 80}, {"chunks": 1, "chunk_tokens": 8192}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "decodes": HEADS | DECODES,
    "drafts": HEADS | DRAFTS,
    "prompt": HEADS | PROMPT,
    # Not with the heads of those above: what is compiled already is not compiled again.
    "decodes_and_chunks": HEADS | DECODES | DRAFTS | {"num_heads": 15, "num_kv_heads": 5},
    "decodes_of_float8": HEADS | DECODES | {"kv_dtype": "float8_e4m3fn"},
    "prompt_of_float8": HEADS | PROMPT | {"kv_dtype": "float8_e4m3fn"},
    "decodes_of_int8": HEADS | DECODES | {"kv_dtype": "int8"},
    "prompt_of_everything": HEADS | PROMPT | {"window": 1000, "soft_cap": 30.0, "sinks": True},
    "decodes_of_everything": HEADS | DECODES | {"window": 1000, "soft_cap": 30.0, "sinks": True, "kv_dtype": "float8_e4m3fn"},
    **{f"decodes_of_dim{dim}": HEADS | DECODES | {"head_dim": dim} for dim in (64, 80, 96, 256)},
    **{f"prompt_of_dim{dim}": HEADS | PROMPT | {"head_dim": dim} for dim in (64, 80, 96, 256)},
    "decodes_of_dim256_float8": HEADS | DECODES | {"head_dim": 256, "kv_dtype": "float8_e4m3fn"},
    "prompt_of_dim256_in_a_window": HEADS | PROMPT | {"head_dim": 256, "window": 1000},
    **{f"decodes_of_page{page}": HEADS | DECODES | {"page_size": page} for page in (8, 32, 64, 128)},
    "prompt_of_page128": HEADS | PROMPT | {"page_size": 128},
    "drafts_of_nine_over_three": HEADS | DRAFTS | {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "decodes_of_one_kv_head": HEADS | DECODES | {"num_heads": 100, "num_kv_heads": 1},
}


def compile_for_h200(function: Any, *args: Any) -> Any:
    """`function` compiled for an H200; `args` are shapes.

    Args:
        args: pytrees of `jax.ShapeDtypeStruct`.
    """
    import dataclasses

    import jax
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

    from pallas_kernels.aot import TARGETS, target_devices

    placed = SingleDeviceSharding(target_devices(TARGETS["h200"], 1)[0])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), args)
    device: dict[str, Any] = {"device_kind": "NVIDIA H200", "num_cores": 132}
    if "platform" in {field.name for field in dataclasses.fields(AbstractDevice)}:  # since jax 0.12
        device["platform"] = "gpu"
    # Kernels ask the device in context how much shared memory it has.
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=AbstractDevice(**device))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).lower(*args).compile()


def compile_attention(
    *, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, singles: int = 0, chunks: int = 0,
    chunk_tokens: int = 0, kv_dtype: str = "bfloat16", window: int | None = None, soft_cap: float | None = None,
    sinks: bool = False,
) -> Any:  # fmt: skip
    """Attention of one step, of `singles` decodes and `chunks` rows of `chunk_tokens` tokens in all."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.paged_attention import gpu

    num_tokens, num_rows = singles + chunk_tokens, singles + chunks

    def attend(queries: Any, pages: Any, table: Any, offsets: Any, lengths: Any, of_heads: Any, scales: Any) -> Any:
        work = gpu.schedule(
            table, offsets, lengths, num_tokens=num_tokens, num_single=singles, page_size=page_size, window=window
        )
        options = {"soft_cap": soft_cap, "sinks": of_heads, "kv_scales": scales}
        return gpu.paged_attention(queries, pages, work, scale=head_dim**-0.5, **options)

    def shape(*extents: int, dtype: Any = "int32") -> Any:
        return jax.ShapeDtypeStruct(extents, jnp.dtype(dtype))

    return compile_for_h200(
        attend,
        shape(num_tokens, num_heads, head_dim, dtype="bfloat16"),
        shape(4096, num_kv_heads, page_size, 2 * head_dim, dtype=kv_dtype),
        shape(num_rows, -(-8192 // page_size)),
        shape(num_rows + 1),
        shape(num_rows),
        shape(num_heads, dtype="float32") if sinks else None,
        shape(num_kv_heads, 2, dtype="float32") if kv_dtype != "bfloat16" else None,
    )


def main() -> None:
    """Compile each configuration that is named."""
    for name in sys.argv[1:]:
        found: dict[str, Any] = {"name": name}
        try:
            compiled = compile_attention(**CONFIGURATIONS[name])
            memory = compiled.memory_analysis()
            found |= {"temp_bytes": memory.temp_size_in_bytes, "output_bytes": memory.output_size_in_bytes}
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
