"""Add up the parts that `gpu_kernel.py` leaves of a block, in Mosaic GPU.

Owns the softmax over parts (as in flash-decoding) and the sinks. Knows nothing of keys and values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.gpu_kernel import Parts
from pallas_kernels.paged_attention.gpu_worker import LOG2_E, MASKED, NUM_CONSUMERS, ROWS

ROWS_AT_ONCE = 8
PARTS_AT_ONCE = 4
WARPGROUP = 128


def merge(
    parts: Parts,
    first_part: Int[Array, "K blocks"],
    num_parts: Int[Array, "K blocks"],
    value_scales: Float[Array, " K"],
    sinks: Float[Array, " N"],
    *,
    shares_tiles: bool,
    group: int,
    used_rows: int,
    out_dtype: Any,
    interpret: Any = None,
) -> Float[Array, "K blocks rows width"]:
    """Outputs of each block's first `used_rows` rows, in its first columns; zeros where there are no parts.

    Args:
        first_part, num_parts: of each block. Where consumers share tiles, each has every second part, for 64 rows each.
        sinks: a score in the softmax that has no value; minus infinity for none.
    """
    num_kv_heads, num_blocks = first_part.shape
    width = parts.outputs.shape[2]
    assert width % WARPGROUP == 0
    at_once = min(ROWS_AT_ONCE, used_rows)
    row_groups = -(-used_rows // at_once)
    plan = jnp.stack([first_part, num_parts], axis=-1).astype(jnp.int32)

    def body(out_ref_in: Any, sum_ref: Any, plan_ref: Any, scale_ref: Any, sinks_ref: Any, out_ref: Any) -> None:
        head, block, row_group = (lax.axis_index(name) for name in ("head", "block", "rows"))
        first, count = plan_ref[head, block, 0], plan_ref[head, block, 1]
        value_scale = scale_ref[head]
        first_row = row_group * at_once
        if shares_tiles:
            stride = NUM_CONSUMERS
            first = first + lax.div(first_row, ROWS)
            count = lax.div(count, NUM_CONSUMERS)
            row_in_part = lax.rem(first_row, ROWS)
        else:
            stride, row_in_part = 1, first_row
        rows = range(at_once)
        sink_of = [sinks_ref[head * group + lax.rem(first_row + row, group)] * LOG2_E for row in rows]

        def turn(number: Any, carry: Any) -> Any:
            best, total, acc = carry
            index = [number * PARTS_AT_ONCE + i for i in range(PARTS_AT_ONCE)]
            part = [first + stride * jnp.minimum(i, count - 1) for i in index]
            sums = [
                [jnp.where(i < count, sum_ref[p, row_in_part + row], MASKED) for i, p in zip(index, part, strict=True)]
                for row in rows
            ]
            values = [[out_ref_in[p, row_in_part + row] for p in part] for row in rows]
            new_best, new_total, new_acc = [], [], []
            for row in rows:
                now = best[row]
                for one in sums[row]:
                    now = jnp.maximum(now, one)
                shrink = jnp.exp2(best[row] - now)
                row_total, row_acc = total[row] * shrink, acc[row] * shrink
                for one, value in zip(sums[row], values[row], strict=True):
                    weight = jnp.exp2(one - now)
                    row_total, row_acc = row_total + weight, row_acc + value * weight
                new_best.append(now)
                new_total.append(row_total)
                new_acc.append(row_acc)
            return new_best, new_total, new_acc

        nothing = jnp.zeros((width,), jnp.float32)
        layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // WARPGROUP)
        nothing = plgpu.layout_cast(nothing, layout)
        # A sink is there from the start, with no value.
        best = [jnp.maximum(sink, MASKED) for sink in sink_of]
        total = [jnp.exp2(sink - first_best) for sink, first_best in zip(sink_of, best, strict=True)]
        turns = lax.div(count + (PARTS_AT_ONCE - 1), PARTS_AT_ONCE)
        best, total, acc = lax.fori_loop(0, turns, turn, (best, total, [nothing] * at_once))
        for row in rows:
            scale = value_scale / jnp.maximum(total[row], 1e-30)
            out_ref[head, block, first_row + row] = (acc[row] * scale).astype(out_dtype)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_kv_heads, num_blocks, row_groups * at_once, width), out_dtype),
        grid=(num_kv_heads, num_blocks, row_groups),
        grid_names=("head", "block", "rows"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="merge_parts",
        interpret=interpret,
    )(parts.outputs, parts.log_sums, plan, value_scales, sinks)
