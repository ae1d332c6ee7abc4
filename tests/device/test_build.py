"""How memory is divided into pages: one pool for all layers, or two."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.device.build import build_runner
from jaxserve.model_config import ModelConfig
from jaxserve.models.sharding import make_mesh
from jaxserve.plan import RunnerLimits
from tests.real_engines import TINY_MODEL

WINDOW = 512
ENGINE = EngineConfig(dtype="float32", max_seqs=4, max_step_tokens=256, max_context=4096, page_size=64, kv_memory=4 << 20)
PAGE_BYTES = 64 * 3 * 2 * 8 * 4  # of a layer


def windowed(*layers: bool) -> ModelConfig:
    return dataclasses.replace(TINY_MODEL, num_layers=len(layers), window=WINDOW, windowed=layers)


def limits(model: ModelConfig, **changes: Any) -> RunnerLimits:
    """Of a runner, whose pools are of these sizes and take no more memory than they may."""
    runner = build_runner(dataclasses.replace(ENGINE, **changes), model, make_mesh(1), np.dtype(np.float32))
    sizes = runner.limits
    of_layers = [sizes.local_pages or sizes.num_pages if windowed else sizes.num_pages for windowed in model.windowed]
    assert runner.kv_bytes == PAGE_BYTES * sum(of_layers) <= changes.get("kv_memory", ENGINE.kv_memory)
    return sizes


def test_one_pool_where_all_layers_have_the_window() -> None:
    """A row of 256 tokens sees and writes 767 positions, in 13 pages at most: no more than four times those can be used."""
    sizes = limits(windowed(True, True))
    assert (sizes.num_pages, sizes.window, sizes.local_pages) == (4 * 13, WINDOW, 0)


def test_two_pools_where_some_have_it() -> None:
    """Each sequence sees 10 pages at most, and a step's chunks are in 4 more; the other layers have what that leaves."""
    sizes = limits(windowed(True, True, True, False))
    assert (sizes.window, sizes.local_window, sizes.local_pages) == (None, WINDOW, 4 * (7 + 3) + 4)
    assert sizes.num_pages == (4 << 20) // PAGE_BYTES - 3 * 44
    assert limits(windowed(True, True, True, False), num_pages=50).num_pages == 50


def test_what_others_cannot_use_is_for_prefixes_of_those_with_the_window() -> None:
    sizes = limits(windowed(True, True, True, False), kv_memory=800 * PAGE_BYTES)
    assert (sizes.num_pages, sizes.local_pages) == (4 * 64, (800 - 4 * 64) // 3)


@pytest.mark.parametrize(
    "changes",
    [
        *({"max_context": 512}, {"num_pages": 40}, {"kv_memory": 1 << 20}, {"kv_memory": 1 << 26}),
        *({"host_kv_memory": 1 << 20}, {"pin_prefix": "x.txt"}),
    ],
    ids=["no_context_beyond", "few_pages", "little_memory", "much_memory", "host_tier", "pinned_prefix"],
)
def test_one_pool_where_two_would_be_no_better_or_cannot_be(changes: dict) -> None:
    sizes = limits(windowed(True, True, True, False), **changes)
    assert (sizes.local_pages, sizes.local_window) == (0, None)
