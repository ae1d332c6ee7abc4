"""Two values of 4 bits in a byte. Within a group of `g` inputs, byte `j` holds input `j` in its low half and `j + g/2` in its
high half, so that neither half needs its inputs in another order, and any split at whole groups stays one."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int8


def pack_int4(values: Int8[Array, "out in"], group: int) -> Int8[Array, "out half_in"]:
    """Pack values of -8..7."""
    num_out, num_in = values.shape
    halves = values.reshape(num_out, num_in // group, 2, group // 2)
    packed = (halves[:, :, 0] & 15) | lax.shift_left(halves[:, :, 1], jnp.int8(4))
    return packed.reshape(num_out, num_in // 2)


def low_half(packed: Array) -> Array:
    """Values in the low halves; the dtype stays, and its sign fills."""
    up = packed.dtype.itemsize * 8 - 4
    return lax.shift_right_arithmetic(lax.shift_left(packed, packed.dtype.type(up)), packed.dtype.type(up))


def high_half(packed: Array) -> Array:
    """Values in the high halves of sign-extended bytes."""
    return lax.shift_right_arithmetic(packed, packed.dtype.type(4))


def unpack_int4(packed: Int8[Array, "out half_in"], group: int) -> Int8[Array, "out in"]:
    """What `pack_int4` packed."""
    num_out, half_in = packed.shape
    bytes_of = packed.reshape(num_out, -1, group // 2)
    return jnp.stack([low_half(bytes_of), high_half(bytes_of)], axis=2).reshape(num_out, 2 * half_in)
