"""Write a step's K and V into the paged pool.

Owns the signature; in-place update is the caller's donation of the pool.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout as ArrayLayout
from jax.experimental.layout import with_layout_constraint
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.page_layout import Layout, keys_of, values_of

IMPLEMENTATIONS = ("xla", "cpu", "tpu")
ROW_MAJOR = ArrayLayout(major_to_minor=(0, 1, 2, 3))

_FLOAT8_MAX = float(jnp.finfo(jnp.float8_e4m3fn).max)
LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): _FLOAT8_MAX, jnp.dtype(jnp.uint8): _FLOAT8_MAX}
"""Pools in eight bits, and the largest value that each stores. Only these have scales. Those in uint8 hold float8 by its bits,
as `choose.pool_dtype` has it."""


def kv_update(
    pages: Num[Array, "*P K B D2"],
    keys: Float[Array, "T K D"],
    values: Float[Array, "T K D"],
    page_ids: Int[Array, " T"],
    page_offsets: Int[Array, " T"],
    *,
    layout: Layout = "rows",
    kv_scales: Float[Array, "K 2"] | None = None,
    impl: str = "xla",
) -> Num[Array, "*P K B D2"]:
    """Store token `t` at position `page_offsets[t]` of page `page_ids[t]`.

    Keys come rotated: fused in here, rotation could save no more than XLA takes for that of K, by its estimates for v5e under
    1% of an 8B model's step, and `jaxserve.models.layers.rotate_tokens_first` saves as much without a kernel.

    A page id of `P` or more drops the token: that is how padding is written nowhere. No two real tokens share a place.

    Args:
        pages: of one dimension or two, whose ids count through both. In "rows", rows may be wider than K and V, as
            `choose.pool_width` has it; what is past them becomes zero. "cpu" has none that are wider.
        kv_scales: of pages in eight bits (`LARGEST`): K of head `k` is divided by `kv_scales[k, 0]` and V by
            `kv_scales[k, 1]`, rounded to the nearest stored value, and cut off at the largest.
        impl: "xla"; "cpu" for pools in "rows" on CPUs; or "tpu" for pools in "rows" whose width is a multiple of 128.

    Raises:
        ValueError: there is no such `impl`, or it does not take this layout.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"kv_update has no implementation {impl!r}; there are {', '.join(IMPLEMENTATIONS)}")
    if impl != "xla" and layout != "rows":
        raise ValueError(f'kv_update for {impl.upper()}: expected pages in "rows", found {layout!r}; use impl "xla"')
    if kv_scales is not None:
        keys, values = (part / kv_scales[None, :, i, None] for i, part in enumerate((keys, values)))
    if impl == "cpu":
        from pallas_kernels.kv_update import cpu  # what other platforms need not import

        return cpu.update(pages, _store_as(keys, pages), _store_as(values, pages), page_ids, page_offsets)
    shape, pages = pages.shape, pages.reshape(-1, *pages.shape[-3:])
    if layout == "halves":
        parts = _store_as(keys, pages), _store_as(values, pages)
        return _update_halves(pages, *parts, page_ids, page_offsets).reshape(shape)
    # Pads and a sum instead of a concatenation: XLA's CPU backend compiles each concatenation anew, 0.15 s a layer.
    dim, width = keys.shape[-1], pages.shape[-1]
    rows = jnp.pad(keys, ((0, 0), (0, 0), (0, width - dim))) + jnp.pad(values, ((0, 0), (0, 0), (dim, width - 2 * dim)))
    rows = _store_as(rows, pages)
    if impl == "tpu":
        from pallas_kernels.kv_update import tpu  # what other platforms need not import

        return tpu.update(pages, rows, page_ids, page_offsets).reshape(shape)
    return pages.at[page_ids, :, page_offsets].set(rows, mode="drop").reshape(shape)


def _store_as(values: Float[Array, "T K width"], pages: Num[Array, "*P K B D2"]) -> Num[Array, "T K width"]:
    """Values in the pool's data type: the nearest that it has, the largest for what is larger still."""
    if pages.dtype == jnp.int8:
        values = jnp.round(values)
    largest = LARGEST.get(pages.dtype)
    if largest is not None:
        values = jnp.clip(values, -largest, largest)  # float8 has no infinity: what is too large would be no number
    if pages.dtype == jnp.uint8:
        return lax.bitcast_convert_type(values.astype(jnp.float8_e4m3fn), jnp.uint8)
    return values.astype(pages.dtype)


def _update_halves(
    pages: Num[Array, "P K B D2"],
    keys: Num[Array, "T K D"],
    values: Num[Array, "T K D"],
    page_ids: Int[Array, " T"],
    page_offsets: Int[Array, " T"],
) -> Num[Array, "P K B D2"]:
    shape = pages.shape
    if keys.shape[0] == 1:
        # A scatter of one token XLA's CPU backend turns into a conditional update of a copy of the whole pool.
        keys, values = jnp.pad(keys, ((0, 1), (0, 0), (0, 0))), jnp.pad(values, ((0, 1), (0, 0), (0, 0)))
        page_ids, page_offsets = jnp.pad(page_ids, (0, 1), constant_values=shape[0]), jnp.pad(page_offsets, (0, 1))
    # Unsigned, so that twice any id is no id that exists.
    halves, page_offsets = 2 * page_ids.astype(jnp.uint32), page_offsets.astype(jnp.uint32)
    pages = keys_of(pages).at[halves, :, page_offsets].set(keys, mode="drop").reshape(shape)
    pages = values_of(pages).at[halves + 1, :, :, page_offsets].set(values, mode="drop").reshape(shape)
    # An axis of one head may lie anywhere: left to choose, XLA's CPU backend puts it where it is not in the pool that came,
    # and copies the whole pool for that.
    return with_layout_constraint(pages, ROW_MAJOR) if shape[1] == 1 else pages
