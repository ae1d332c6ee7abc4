"""Draws from filtered distributions: temperature, min-p, top-k and top-p over a large vocabulary.

Owns the signature and the choice of implementation; the definition is `reference.py`. Knows no requests, seeds or
penalties: a row brings its logits, its four settings and a uniform number.

What the filters keep, in order: `min_p` keeps tokens whose probability is at least that fraction of the most likely one's;
`top_k` the k most likely; `top_p` the most likely of those whose renormalised probabilities first sum to p. Tokens as
likely as the last one kept are kept too. The draw is the inverse of the running sum, in the vocabulary's order, at the
row's uniform number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.late import late
from pallas_kernels.sample import reference, xla

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "reference": reference.draw,
    "xla": xla.draw,
    "tpu": late(f"{__name__}.tpu", "draw"),
}
"""By name. An experiment adds its own in one line; "reference" is the definition, "xla" serves CPU and GPU."""

REFUSED = {
    "gpu": "a row of 262,144 weights, 1 MiB, does not fit what a multiprocessor has, so that a kernel would read it anew at "
    "each step of its bisections, 31 a filter, or 16 of two bits; what XLA compiles for a GPU mostly reads rows 9 times and "
    "writes them twice, with every multiprocessor at work on each"
}
"""Implementations that somebody might look for, and why there are none."""


def draw(
    logits: Float[Array, "R V"],
    *,
    temperature: Float[Array, " R"],
    min_p: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    uniform: Float[Array, " R"],
    impl: str,
) -> Int[Array, " R"]:
    """Draw one token a row: of one with logits that are no numbers, any.

    Args:
        logits: float32; minus infinity for tokens that must not be drawn, but not for all of a row.
        temperature: above 0.
        min_p: 0 keeps all.
        top_k: 0 keeps all.
        top_p: above 0; 1 or more keeps all.
        uniform: in [0, 1).
        impl: a key of `IMPLEMENTATIONS`.

    Raises:
        ValueError: there is no such `impl`.
    """
    if impl not in IMPLEMENTATIONS:
        why = f": {REFUSED[impl]}" if impl in REFUSED else ""
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"sample has no implementation {impl!r}; there are {known} (xla runs anywhere){why}")
    function = IMPLEMENTATIONS[impl]
    drawn = function(logits, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p, uniform=uniform)
    # The search for a running sum of no numbers ends where it will.
    return jnp.minimum(drawn, logits.shape[1] - 1)
