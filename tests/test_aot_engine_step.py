"""The whole engine step, compiled ahead of time for devices that are not here: what it copies, says to others, and takes.

One table of steps; each is compiled in a subprocess and then asserted upon from all sides.
"""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax.numpy as jnp
import pytest

from pallas_kernels.aot import TARGETS, Figures, Job
from tests.kernels.ladder.compiled import compile_all, job, require
from tests.kernels.ladder.programs import MODELS

pytestmark = pytest.mark.slow

PAGE_SIZE = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step to compile: decodes alone, or with a chunk of 512 tokens."""

    target: str
    model: str
    tensor_parallel: int
    num_pages: int
    impl: str = "tpu"
    chunk_tokens: int = 0
    kv_dtype: str = "bfloat16"
    expert_parallel: int = 1
    weight_dtype: str = "auto"

    def __str__(self) -> str:
        kind = "chunk" if self.chunk_tokens else "decodes"
        mesh = f"tp{self.tensor_parallel}" + (f"ep{self.expert_parallel}" if self.expert_parallel > 1 else "")
        weights = "" if self.weight_dtype == "auto" else f"-{self.weight_dtype}"
        return f"{self.target}-{self.model}{weights}-{mesh}-{self.impl}-{self.kv_dtype}-{kind}"

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.expert_parallel


def steps(target: str, impl: str, kv_dtype: str) -> tuple[Step, ...]:
    """Both models on one device, four and eight, the last with KV in `kv_dtype`."""
    demo = partial(Step, target=target, impl=impl, model="demo", num_pages=4096)
    llama = partial(Step, target=target, impl=impl, model="8b")
    return (
        demo(tensor_parallel=1, chunk_tokens=512),
        demo(tensor_parallel=4),
        demo(tensor_parallel=8),
        llama(tensor_parallel=1, num_pages=1024),
        llama(tensor_parallel=4, num_pages=4096, chunk_tokens=512),
        llama(tensor_parallel=8, num_pages=8192, kv_dtype=kv_dtype),
    )


def mixture(target: str, impl: str, num_devices: int, *, model: str = "30b-a3b", chunk_tokens: int = 0) -> Step:
    """A mixture of 30 billion weights, its experts split by their width over two devices, whole over the rest. What fits on
    four devices fits on eight, where six of its layers show the same programs in an eighth of the compiling."""
    return Step(
        target=target,
        impl=impl,
        model=model,
        tensor_parallel=2,
        expert_parallel=num_devices // 2,
        num_pages=1024,
        chunk_tokens=chunk_tokens,
    )


TOO_LARGE = (
    Step(target="v5e", model="8b", tensor_parallel=1, num_pages=1024, chunk_tokens=0),  # 15 GiB of weights
    Step(target="v5e", model="8b", tensor_parallel=4, num_pages=2**15),  # 64 GiB of KV over four
    mixture("v5e", "tpu", 4),  # 14.2 GiB of weights and 1.5 of KV on each
)

QUANTISED = (
    Step(target="v5e", model="8b", weight_dtype="int8", tensor_parallel=1, num_pages=1024),  # too large in bfloat16
    Step(target="v6e", model="8b, 4 layers", weight_dtype="int4", tensor_parallel=4, num_pages=4096, chunk_tokens=512),
    Step(target="h200", model="8b, 4 layers", weight_dtype="int4", tensor_parallel=1, num_pages=1024, impl="gpu"),
    Step(target="h200", model="8b, 4 layers", weight_dtype="int8", tensor_parallel=8, num_pages=4096, impl="gpu"),
    Step(target="h200", model="8b, 4 layers", weight_dtype="int8", tensor_parallel=1, num_pages=1024, impl="xla"),
)

FITTING = (
    *(step for step in steps("v5e", "tpu", "bfloat16") if step not in TOO_LARGE),
    *steps("v6e", "tpu", "int8"),
    *steps("h200", "gpu", "float8_e4m3fn"),
    Step(target="h200", model="demo", tensor_parallel=1, num_pages=4096, impl="xla"),
    Step(target="v5e", model="gemma3", tensor_parallel=1, num_pages=2048, chunk_tokens=512),
    Step(target="h200", impl="gpu", model="gemma3", tensor_parallel=1, num_pages=2048, chunk_tokens=512),
    *QUANTISED,
    mixture("v5e", "tpu", 8),
    mixture("v6e", "tpu", 4, chunk_tokens=512),
    mixture("v6e", "tpu", 8, model="30b-a3b, 6 layers"),
    mixture("h200", "gpu", 4),
    mixture("h200", "gpu", 8, model="30b-a3b, 6 layers"),
)


@cache
def compiled() -> dict[Step, Figures]:
    """All steps, some at a time."""
    steps = (*FITTING, *TOO_LARGE)
    for target in {step.target for step in steps}:
        require(target)
    return dict(zip(steps, compile_all([as_job(step) for step in steps]), strict=True))


def as_job(step: Step) -> Job:
    return job(
        step.target,
        "tests.kernels.ladder.programs:engine_step",
        num_devices=step.num_devices,
        model=step.model,
        impl=step.impl,
        num_pages=step.num_pages,
        page_size=PAGE_SIZE,
        chunk_tokens=step.chunk_tokens,
        kv_dtype=step.kv_dtype,
        expert_parallel=step.expert_parallel,
        weight_dtype=step.weight_dtype,
    )


def kv_bytes(step: Step) -> int:
    """Bytes of the KV pools on one device, heads padded to whole ones."""
    model = MODELS[step.model]
    heads = -(-model.num_kv_heads // step.num_devices)
    return model.num_layers * step.num_pages * heads * PAGE_SIZE * 2 * model.head_dim * jnp.dtype(step.kv_dtype).itemsize


@pytest.mark.parametrize("step", FITTING, ids=str)
def test_the_step_updates_kv_in_place_and_talks_no_more_than_it_must(step: Step) -> None:
    figures = compiled()[step]
    assert not figures.error, figures.error
    target, model = TARGETS[step.target], MODELS[step.model]

    # Everything that is donated comes back in its place: the pools, and the slots, which are some megabytes.
    assert kv_bytes(step) <= figures.alias_bytes <= kv_bytes(step) + 16 * 2**20
    assert figures.temp_bytes < 0.05 * target.hbm_bytes, f"{figures.temp_bytes >> 20} MiB"
    assert figures.argument_bytes + figures.temp_bytes + figures.code_bytes < target.hbm_bytes

    # A sum after attention and one after the MLP or experts in each layer, one for the embedding, and the logits put together;
    # that once more with chunks, in a loop that runs where log probabilities of a prompt are wanted.
    num_gathers = 2 if step.chunk_tokens else 1
    expected = {"all-reduce": 2 * model.num_layers + 1, "all-gather": num_gathers} if step.num_devices > 1 else {}
    assert figures.collectives == expected


@pytest.mark.parametrize("step", TOO_LARGE, ids=str)
def test_what_does_not_fit_in_hbm_is_found_out(step: Step) -> None:
    error = compiled()[step].error
    assert "hbm" in error.lower(), error
