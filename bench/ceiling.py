"""The ceiling of a decode step: the same compiled step with attention and sampling taken out.

What is left is the matrix products and the reading of weights, which no scheduler or kernel can avoid.
"""

from __future__ import annotations

from jaxserve.engine.core import EngineCore


def decode_ceiling(core: EngineCore, num_seqs: int) -> float | None:
    """Tokens per second of the stripped step at `num_seqs` sequences, or None while the runner offers no such step."""
    return None
