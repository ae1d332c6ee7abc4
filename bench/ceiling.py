"""The ceiling of a decode step: the same compiled step with attention and sampling taken out.

What is left is the matrix products and the reading of weights, which no scheduler or kernel can avoid.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.ours import Sizes

NO_ATTENTION = "none"


def _no_attention(queries: Any, pages: Any, work: Any, *, scale: float, **rest: Any) -> Any:
    del pages, work, rest
    return queries * scale


def _first_logit(logits: Any, rows: Any, state: Any) -> Any:
    """In place of sampling. The barrier keeps the compiler from computing one logit only."""
    import jax
    import jax.numpy as jnp

    from jaxserve.device.sampler import Sampled
    from jaxserve.request import MAX_LOGPROBS

    del rows, state
    num_rows, num_top = logits.shape[1], min(MAX_LOGPROBS, logits.shape[0])
    return Sampled(
        tokens=jax.lax.optimization_barrier(logits)[0].astype(jnp.int32),
        logprob=jnp.zeros((num_rows,)),
        top_ids=jnp.zeros((num_rows, num_top), jnp.int32),
        top_logprobs=jnp.zeros((num_rows, num_top)),
    )


def decode_ceiling(runner: Sizes, num_seqs: int, *, num_steps: int = 20, rounds: int = 3) -> list[float]:
    """Tokens per second of the stripped step at `num_seqs` sequences, for each round; nothing for a runner without a device.

    No sequence may be live.
    """
    from jaxserve.device.runner import DeviceRunner
    from pallas_kernels.paged_attention import IMPLEMENTATIONS, reference

    if not isinstance(runner, DeviceRunner):
        return []
    # Writing K and V belongs to the ceiling, and is done as the real one does.
    real = IMPLEMENTATIONS[runner.attention_impl]
    IMPLEMENTATIONS[NO_ATTENTION] = replace(real, schedule=reference.schedule, paged_attention=_no_attention)
    bucket = min(b for b in runner.buckets if not b.has_chunks and b.num_single >= num_seqs)
    seconds = runner.time_variant(bucket, NO_ATTENTION, _first_logit, num_steps=num_steps, rounds=rounds)
    return [num_seqs / value for value in seconds]
