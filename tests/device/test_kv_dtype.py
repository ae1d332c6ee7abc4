"""KV pages in other data types than the model's: how far logits move, that batching still changes nothing, what pools take."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from checkpoints.checkpoint import open_checkpoint
from jaxserve.config import EngineConfig
from jaxserve.device.abstract import page_bytes
from jaxserve.device.build import build_runner
from jaxserve.device.kv_scales import HEADROOM, NUM_TOKENS, largest_by_head, measure_scales, scales_of_checkpoint
from jaxserve.device.runner import DeviceRunner
from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig
from jaxserve.models.families import FAMILIES, model_config_from_hf
from jaxserve.models.params import map_specs, random_params
from jaxserve.models.sharding import make_mesh
from jaxserve.weights import read_kv_scales
from pallas_kernels.kv_update import LARGEST
from tests.cached import CACHED
from tests.near_ties import assert_same_outputs
from tests.paged_model import PagedModel
from tests.real_engines import TINY_MODEL, _spread, mixed_requests, run, run_alone, tiny_runner
from tests.references.load import load_demo, load_tiny, write_hf_directory

pytestmark = CACHED

FLOAT32 = np.dtype(np.float32)
EIGHT_BITS = ("int8", "float8_e4m3fn")
TOKENS = np.random.default_rng(1).integers(0, TINY_MODEL.vocab_size, 200)


def tiny_params(tensor_parallel: int = 1, model: ModelConfig = TINY_MODEL) -> object:
    mesh = make_mesh(tensor_parallel)
    return random_params(map_specs(_spread, FAMILIES[model.family].specs(model)), mesh, FLOAT32, seed=0)


def logits(kv_dtype: str, kv_scales: jax.Array | None) -> np.ndarray:
    """Of `TOKENS`, in chunks."""
    model = PagedModel(
        TINY_MODEL, tiny_params(), 1, dtype="float32", capacity=len(TOKENS), kv_dtype=kv_dtype, kv_scales=kv_scales
    )
    return model.feed_all(TOKENS, width=32)


def scales(kv_dtype: str) -> jax.Array:
    return measure_scales(TINY_MODEL, tiny_params(), make_mesh(1), FLOAT32, jnp.dtype(kv_dtype))


SLOW = pytest.mark.slow
KINDS = [("int8", 0.09), pytest.param("bfloat16", 0.02, marks=SLOW), pytest.param("float8_e4m3fn", 0.3, marks=SLOW)]

# --- accuracy ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("kv_dtype", "bound"), KINDS)
def test_logits_move_by_little(kv_dtype: str, bound: float) -> None:
    """Logits of this model lie 1 apart."""
    expected = logits("float32", None)
    assert 0.5 < expected.std() < 2
    found = logits(kv_dtype, scales(kv_dtype) if kv_dtype in EIGHT_BITS else None)
    error = np.sqrt(np.mean((found - expected) ** 2))
    assert bound / 4 < error < bound, "below a quarter of the bound, the bound says nothing"


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1 / 4, 8], ids=["cut off", "coarse"])
def test_with_scales_that_do_not_fit_logits_move_by_more(factor: float) -> None:
    expected = logits("float32", None)
    error = np.sqrt(np.mean((logits("int8", factor * scales("int8")) - expected) ** 2))
    assert error > 0.3


@pytest.mark.slow
def test_the_demo_model_says_nearly_the_same(demo_model_path: Path) -> None:
    """By the mean divergence of the next token's distribution from that with KV in float32, and by greedy tokens."""
    plain = PagedModel.load(demo_model_path, capacity=320)
    tokens = load_demo("english").input_ids
    expected = log_softmax(plain.feed_all(tokens, width=128).astype(np.float64), axis=1)
    for kv_dtype, most, least_same in (("int8", 0.008, 0.93), ("float8_e4m3fn", 0.012, 0.91)):
        kv_scales = measure_scales(plain.config, plain.params, make_mesh(1), FLOAT32, jnp.dtype(kv_dtype))
        narrow = PagedModel(
            plain.config, plain.params, 1, dtype="float32", capacity=320, kv_dtype=kv_dtype, kv_scales=kv_scales
        )  # fmt: skip
        found = log_softmax(narrow.feed_all(tokens, width=128).astype(np.float64), axis=1)
        assert 0 < np.mean(np.sum(np.exp(expected) * (expected - found), axis=1)) < most, kv_dtype
        assert np.mean(expected.argmax(axis=1) == found.argmax(axis=1)) > least_same, kv_dtype


# --- scales -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("float8_e4m3fn", marks=SLOW)])
def test_scales_leave_headroom_over_what_was_measured(kv_dtype: str) -> None:
    tokens = np.random.default_rng(0).integers(0, TINY_MODEL.vocab_size, NUM_TOKENS, dtype=np.int32)
    largest = np.asarray(largest_by_head(TINY_MODEL, tiny_params(), make_mesh(1), FLOAT32, tokens))
    stored = largest / np.asarray(scales(kv_dtype))
    np.testing.assert_allclose(stored * HEADROOM[jnp.dtype(kv_dtype)], LARGEST[jnp.dtype(kv_dtype)], rtol=1e-5)
    assert len(np.unique(largest)) == largest.size, "each head of each layer has its own"


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [2, 4])
def test_scales_are_the_same_on_more_devices(tensor_parallel: int) -> None:
    expected = np.asarray(scales("int8"))
    mesh = make_mesh(tensor_parallel)
    found = np.asarray(measure_scales(TINY_MODEL, tiny_params(tensor_parallel), mesh, FLOAT32, jnp.dtype(jnp.int8)))
    np.testing.assert_allclose(found[:, : TINY_MODEL.num_kv_heads], expected, rtol=1e-4)
    assert (found[:, TINY_MODEL.num_kv_heads :] == 1).all(), "heads that are padding hold zeros"


def checkpoint_with_scales(folder: Path, *, layers: int | None = None) -> Path:
    """A tiny checkpoint that brings scales for its first `layers` layers, all of them where None."""
    reference = load_tiny("gqa_tied")
    count = reference.config["num_hidden_layers"] if layers is None else layers
    own = {
        f"model.layers.{layer}.self_attn.{part}_scale": np.full(shape, 0.5 + layer + (part == "v") / 4, np.float32)
        for layer in range(count)
        for part, shape in (("k", ()), ("v", (1,)))
    }
    return write_hf_directory(dataclasses.replace(reference, weights=reference.weights | own), folder / "scaled")


def test_a_checkpoints_own_scales_are_taken_for_all_heads(tmp_path: Path) -> None:
    with open_checkpoint(checkpoint_with_scales(tmp_path)) as checkpoint:
        model = model_config_from_hf(checkpoint.config)
        found = np.asarray(read_kv_scales(checkpoint, model, make_mesh(4)))
    assert found.shape == (model.num_layers, 4, 2)
    for layer in range(model.num_layers):
        assert (found[layer, : model.num_kv_heads] == [0.5 + layer, 0.75 + layer]).all()


@pytest.mark.parametrize("wrong", [[1.0, 2.0], [0.0]], ids=str)
def test_scales_that_cannot_be_meant_are_refused(wrong: list[float]) -> None:
    with pytest.raises(ConfigError, match="layer 1: v_scale of the checkpoint: expected 1 or 3 numbers above 0"):
        scales_of_checkpoint(TINY_MODEL, make_mesh(1), [(np.ones(1), np.ones(3)), (np.ones(3), np.array(wrong))])


def test_scales_of_some_layers_are_none(tmp_path: Path) -> None:
    with open_checkpoint(checkpoint_with_scales(tmp_path, layers=1)) as checkpoint:
        assert read_kv_scales(checkpoint, model_config_from_hf(checkpoint.config), make_mesh(1)) is None


# --- the engine -------------------------------------------------------------------------------------------------------

ENGINE = EngineConfig(dtype="float32", max_seqs=16, max_step_tokens=64, max_context=512, num_pages=512, page_size=8)


@pytest.fixture(scope="module")
def runner() -> DeviceRunner:
    return tiny_runner(dataclasses.replace(ENGINE, kv_dtype="int8"))


@pytest.mark.slow
def test_with_int8_a_batch_gives_what_each_gives_alone(runner: DeviceRunner) -> None:
    """Where rounding of a product moves K past the middle between two stored values, logits move by more than rounding."""
    requests = mixed_requests(TOKENS, max_prompt=120, min_output=8)
    alone = run_alone(runner, requests[:12], overlap=False)
    assert len({token for output in alone.values() for token in output.tokens}) > TINY_MODEL.vocab_size // 4
    for prefixes in (False, True):
        found = run(runner, requests, prefixes=prefixes).outputs
        assert_same_outputs(alone, {key: found[key] for key in alone}, tolerance=5e-3, max_near_ties=1)
    assert runner.compiles_since_ready == 0


@pytest.mark.parametrize(
    ("kv_dtype", "times"), [("float32", 1), ("bfloat16", 2), ("int8", 4), pytest.param("fp8", 4, marks=SLOW)]
)
def test_the_same_memory_holds_more_pages(kv_dtype: str, times: int) -> None:
    mesh = make_mesh(1)
    page = page_bytes(TINY_MODEL, ENGINE.page_size, mesh, FLOAT32)
    engine = dataclasses.replace(ENGINE, kv_dtype=kv_dtype, num_pages=0, kv_memory=100 * page)
    runner = build_runner(engine, TINY_MODEL, mesh, FLOAT32)
    assert runner.limits.num_pages == 100 * times
    assert runner.kv_bytes == 100 * page


@pytest.mark.parametrize("kv_dtype", ["int4", "float16", "float8_e4m3fn"])
def test_other_data_types_are_refused(kv_dtype: str) -> None:
    with pytest.raises(ConfigError, match="must be auto, float32, bfloat16, int8 or fp8"):
        EngineConfig(kv_dtype=kv_dtype)
