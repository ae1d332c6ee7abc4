"""`quant_matmul` on NVIDIA Hopper GPUs: lays weights out, cuts a product into tiles, and adds up what was split.

Few tokens: what counts are the weights' bytes, so the inputs are split until every multiprocessor reads some, and the parts
are added up afterwards. Many tokens: tiles of outputs that a multiprocessor's tensor cores keep busy with, and no splits.

Activations are bfloat16, or 8 bits per token. With those, weights of 8 bits and a scale a row are multiplied as integers, and
other weights by the activations in bfloat16, which is exact.

Owns the choice of sizes, and what is refused; `gpu_kernel.py` has what runs on a multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import pytree
from pallas_kernels.quant_matmul.gpu_kernel import (
    BLOCK,
    FEW_SUMS,
    NUM_CONSUMERS,
    STRETCH,
    Config,
    product,
    shared_memory_bytes,
    swizzle_bytes,
)
from pallas_kernels.quant_matmul.weights import Form, QuantActivations, QuantWeights, check_rows, dequantize_rows, form_of

NUM_MULTIPROCESSORS = 132
"""Of an H100 or H200."""
SHARED_MEMORY = (232_448, 115_712)
"""Bytes that a worker may use on Hopper, where one or two of them share a multiprocessor."""
TOKENS = (8, 16, 32, 48, 64, 96, 128)
"""Of a tile."""
MAX_STAGES = 8
MIN_STRETCHES = 4
"""Tiles of inputs that are worth a split of their own."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes to try in place of those chosen (0).

    Attributes:
        tokens: of a tile at most; a multiple of 8.
        blocks: wgmma products, of 64 rows, that a warpgroup does for each tile: 1 or 2.
        splits: parts of the inputs.
        stages: slots of the ring.
    """

    tokens: int = 0
    blocks: int = 0
    splits: int = 0
    stages: int = 0


@pytree.dataclass
class Laid:
    """Weights in whole tiles, padded with zeros.

    Attributes:
        values: int8, or int4, which XLA keeps two to a byte on a GPU.
        scales: rows side by side, as a tile reads them; in 16 bits where they were given so, which saves a tenth of all bytes
            where groups are small.
    """

    values: Num[Array, "padded_out padded_in"]
    scales: Float[Array, "padded_G padded_out"]
    offsets: Float[Array, "out G"] | None
    form: Form = pytree.static()
    tuning: Tuning = pytree.static()


def lay_out(weights: QuantWeights, **options: int) -> Laid:
    """See `pallas_kernels.quant_matmul.lay_out`; options are those of `Tuning`."""
    form, tuning = form_of(weights), Tuning(**options)
    rows, inputs = -form.num_out % (NUM_CONSUMERS * BLOCK), -form.num_in % STRETCH
    groups = inputs // form.group if _group(form) else 0
    offsets = None if weights.offsets is None else weights.offsets.astype(jnp.float32)
    values = weights.values.astype(jnp.int4 if form.bits == 4 else jnp.int8)
    scales = weights.scales if weights.scales.dtype in (jnp.bfloat16, jnp.float16) else weights.scales.astype(jnp.float32)
    return Laid(
        values=jnp.pad(values, ((0, rows), (0, inputs))),
        scales=jnp.pad(scales, ((0, rows), (0, groups))).T,
        offsets=offsets,
        form=form,
        tuning=tuning,
    )


def quant_matmul(
    x: Float[Array, "in T"] | QuantActivations, weights: Laid, *, interpret: Any = None, num_workers: int = NUM_MULTIPROCESSORS
) -> Float[Array, "out T"]:
    """See `pallas_kernels.quant_matmul.quant_matmul`.

    Args:
        num_workers: multiprocessors to fill.
        interpret: `InterpretGPUParams` for a machine without a GPU.

    Raises:
        ValueError: activations of another dtype, or sizes asked for that do not fit.
    """
    form, quantised = weights.form, isinstance(x, QuantActivations)
    values = x.values if isinstance(x, QuantActivations) else x
    if values.dtype not in (jnp.bfloat16, jnp.int8):
        raise ValueError(
            f"quant_matmul on GPU: expected activations in bfloat16, or 8 bits per token, found {values.dtype}; "
            'cast them, or use impl "xla"'
        )
    inputs = values.astype(jnp.bfloat16) if quantised and _group(form) else values
    num_tokens = inputs.shape[1]
    config = _config(weights, num_tokens, inputs.dtype, num_workers, interpret)
    padding = -num_tokens % config.tokens
    inputs = jnp.pad(inputs, ((0, weights.values.shape[1] - form.num_in), (0, padding)))
    token_scales = jnp.pad(x.scales.astype(jnp.float32), (0, padding)) if isinstance(x, QuantActivations) else None
    whole = config.splits == 1 and weights.offsets is None
    out = product(
        inputs if config.tokens_last else inputs.T,
        weights.values,
        weights.scales,
        token_scales,
        dtype=jnp.dtype(x.dtype) if whole else jnp.float32,
        config=config,
    )
    out = (out[0] if config.splits == 1 else out.sum(axis=0))[: form.num_out, :num_tokens]
    if weights.offsets is not None:
        sums = values.astype(jnp.float32).reshape(form.num_groups, form.group, -1).sum(axis=1)
        if isinstance(x, QuantActivations):
            sums = sums * x.scales.astype(jnp.float32)
        out = out + jnp.matmul(weights.offsets, sums, precision="highest")
    return out.astype(x.dtype)


def take_rows(weights: Laid, rows: Int[Array, " R"]) -> Float[Array, "R in"]:
    """See `pallas_kernels.quant_matmul.take_rows`."""
    check_rows(weights.form)
    values, scales = (part.at[rows].get(mode="promise_in_bounds") for part in (weights.values, weights.scales[0]))
    return dequantize_rows(values[:, : weights.form.num_in], scales)


def _group(form: Form) -> int:
    """Inputs whose sums have a scale of their own; 0 where a row's wait for the end."""
    return form.group if form.num_groups > 1 or form.bits == 4 else 0


def _config(weights: Laid, num_tokens: int, x_dtype: Any, num_workers: int, interpret: Any) -> Config:
    """Sizes for so many tokens, less those that were asked for."""
    form, asked = weights.form, weights.tuning
    num_out, num_in = weights.values.shape
    most = asked.tokens or TOKENS[-1]
    if most not in TOKENS or asked.blocks not in (0, 1, 2) or num_out % (NUM_CONSUMERS * BLOCK * (asked.blocks or 1)):
        raise ValueError(
            f"quant_matmul on GPU: no tiles of {asked} for {num_out} rows; there are tiles of {TOKENS} tokens, and 1 block, "
            f"or 2 for multiples of {2 * NUM_CONSUMERS * BLOCK} rows"
        )
    token_tiles = -(-num_tokens // most)
    tokens = next(width for width in TOKENS if width * token_tiles >= num_tokens)
    rows = NUM_CONSUMERS * BLOCK
    group = _group(form)
    # Twice the rows halve the activations' way from the cache, where there are tiles enough for all, and registers.
    twice = num_out % (2 * rows) == 0 and num_out // (2 * rows) * token_tiles >= num_workers and tokens > 64 and not group
    blocks = asked.blocks or (2 if twice else 1)
    num_tiles, stretches = num_out // (rows * blocks) * token_tiles, num_in // STRETCH
    splits = asked.splits or max(1, min(num_workers // num_tiles, stretches // MIN_STRETCHES))
    config = Config(
        group=group,
        blocks=blocks,
        tokens=tokens,
        tokens_last=x_dtype == jnp.bfloat16 and tokens * 2 % swizzle_bytes(group, 2) == 0,
        splits=min(splits, stretches),
        stages=0,
        num_workers=num_workers,
    )
    workers_on_one = 2 if config.sums <= FEW_SUMS else 1
    config = replace(config, num_workers=workers_on_one * num_workers)
    room = SHARED_MEMORY[workers_on_one - 1]
    for stages in (asked.stages,) if asked.stages else range(MAX_STAGES, 1, -1):
        candidate = replace(config, stages=stages)
        if shared_memory_bytes(candidate, x_dtype, weights.values.dtype, weights.scales.dtype, jnp.float32) <= room:
            return replace(candidate, interpret=interpret)
    raise ValueError(
        f"quant_matmul on GPU: no ring of {asked.stages or 2} tiles fits in {room} bytes of shared memory with {asked}"
    )
