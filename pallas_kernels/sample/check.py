"""An implementation against the exact distribution on every case, for whoever has the hardware: `check("tpu")`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from pallas_kernels.sample import draw
from pallas_kernels.sample.cases import SETTINGS, arguments, make_logits, misfit

VOCABULARIES = (12, 700, 20_000, 262_144)
TOLERANCE = 2e-5
"""Of a probability: what float32 sums of a large vocabulary are off."""


def check(impl: str, vocabularies: Sequence[int] = VOCABULARIES) -> dict[str, tuple[float, bool]]:
    """How far the worst row's uniform number lies outside its token's interval, by vocabulary, and whether that passes."""
    found = {}
    for vocab in vocabularies:
        logits = make_logits(len(SETTINGS), vocab)
        uniform = np.random.default_rng(vocab).random(len(SETTINGS)).astype(np.float32)
        run = jax.jit(lambda logits, settings: draw(logits, **settings, impl=impl))
        tokens = np.asarray(run(logits, arguments(SETTINGS, uniform)))
        rows = zip(np.asarray(logits), SETTINGS, uniform, tokens, strict=True)
        error = max(misfit(values, asked, float(number), int(token)) for values, asked, number, token in rows)
        found[str(vocab)] = error, error <= TOLERANCE
    return found
