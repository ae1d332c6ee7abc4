"""Rows that every implementation of `sample` is tested on. Benchmarks take them too. Knows no implementation."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One row's."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


SETTINGS = (
    Settings(),
    Settings(temperature=0.3),
    Settings(temperature=100.0),
    Settings(top_k=1),
    Settings(top_k=7),
    Settings(top_k=128),
    Settings(top_k=300),
    Settings(top_k=10**6),
    Settings(top_p=0.6),
    Settings(top_p=0.01),
    Settings(top_p=0.999),
    Settings(min_p=0.2),
    Settings(min_p=1.0),
    Settings(temperature=1.7, top_k=30, top_p=0.8, min_p=0.02),
    Settings(temperature=0.6, top_k=5, top_p=0.95),
    Settings(temperature=50.0, top_k=400, top_p=0.9),
)


def make_logits(num_rows: int, vocab: int, seed: int = 0, levels: int | None = None) -> Array:
    """Normal logits of deviation 3, each twentieth minus infinity; of so many different values if `levels` says so, so that
    nearly all are ties."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (num_rows, vocab))
    if levels is not None:
        logits = np.round(logits * levels / 12)
    # The first stays: not all of a row may be forbidden.
    logits[:, 1:][rng.random((num_rows, vocab - 1)) < 0.05] = -np.inf
    return jnp.asarray(logits, jnp.float32)


def arguments(settings: list[Settings] | tuple[Settings, ...], uniform: np.ndarray) -> dict[str, Array]:
    """`draw`'s arguments but for the logits, one row for each of `settings`."""
    return {
        "temperature": jnp.asarray([row.temperature for row in settings], jnp.float32),
        "min_p": jnp.asarray([row.min_p for row in settings], jnp.float32),
        "top_k": jnp.asarray([row.top_k for row in settings], jnp.int32),
        "top_p": jnp.asarray([row.top_p for row in settings], jnp.float32),
        "uniform": jnp.asarray(uniform, jnp.float32),
    }


def distribution(logits: np.ndarray, row: Settings) -> np.ndarray:
    """The exact one of a row, in float64."""
    weights = np.exp((logits - logits.max()).astype(np.float64) / row.temperature)
    weights = np.where(weights >= np.float32(row.min_p), weights, 0)
    if row.top_k:
        weights = np.where(weights >= np.sort(weights)[::-1][min(row.top_k, len(weights)) - 1], weights, 0)
    if row.top_p < 1:
        order = np.sort(weights)[::-1]
        smallest = order[np.argmax(np.cumsum(order) >= row.top_p * weights.sum())]
        weights = np.where(weights >= smallest, weights, 0)
    return weights / weights.sum()


def misfit(logits: np.ndarray, row: Settings, uniform: float, token: int) -> float:
    """How far `uniform` lies outside the token's interval of the running sum; infinite where it may not be drawn at all."""
    expected = distribution(logits, row)
    if not expected[token] > 0:
        return np.inf
    end = np.cumsum(expected)[token]
    return max(0.0, end - expected[token] - uniform, uniform - end)
