"""Mixtures of experts: what `transformers` computes, on every mesh; who else is in the step changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve.config import EngineConfig
from jaxserve.device.build import choose_experts_impl
from jaxserve.errors import ConfigError
from jaxserve.model_config import ExpertsConfig, ModelConfig
from jaxserve.models.families import FAMILIES, model_config_from_hf
from jaxserve.models.moe import lay_out, mixture, route
from jaxserve.models.params import abstract_params, random_params
from jaxserve.models.sharding import DEVICES, make_mesh
from pallas_kernels.grouped_matmul.choose import choose
from tests.cached import CACHED
from tests.paged_model import PagedModel, load_tiny_model
from tests.references.load import MIXTURE_NAMES, TinyReference, load_mixture, router_gap

pytestmark = CACHED

TOLERANCE = 2e-4
MESHES = {"one": (1, 1), "tp2": (2, 1), "ep2": (1, 2), "tp2ep2": (2, 2)}
HALF_SPLIT = ("mixtral_window", "qwen2")
"""Those that run on the meshes of one axis too: one expert a token and one KV head; a shared MLP."""
QUICK = ("qwen2-tp2ep2",)


def models() -> Iterator[object]:
    for name in MIXTURE_NAMES:
        for mesh in MESHES if name in HALF_SPLIT else ("one", "tp2ep2"):
            test_id = f"{name}-{mesh}"
            yield pytest.param((name, mesh), id=test_id, marks=[pytest.mark.slow] * (test_id not in QUICK))


def load(name: str, folder: Path, mesh: str = "one", **options: Any) -> PagedModel:
    tensor, expert = MESHES[mesh]
    return load_tiny_model(load_mixture(name), folder, tensor, capacity=96, expert_parallel=expert, **options)


@pytest.fixture(scope="module", params=models())
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyReference, PagedModel]:
    name, mesh = request.param
    return load_mixture(name), load(name, tmp_path_factory.mktemp("moe"), mesh)


def test_logits_and_tokens_agree(loaded: tuple[TinyReference, PagedModel]) -> None:
    """In one chunk, in chunks of 7 that are padded, and 32 decodes; the window of the one that has one is crossed."""
    reference, model = loaded
    agree = partial(np.testing.assert_allclose, rtol=0, atol=TOLERANCE)
    model.restart()
    agree(model.feed_all(reference.input_ids, width=7), reference.logits)
    model.restart()
    logits = model.feed_all(reference.input_ids, width=48)
    agree(logits, reference.logits)
    last = logits[-1]
    for token, gap in zip(reference.greedy_tokens, reference.greedy_gaps, strict=True):
        runner_up, best = np.sort(last)[-2:]
        assert last.argmax() == token
        assert best - runner_up == pytest.approx(gap, abs=2 * TOLERANCE)
        (last,) = model.feed([token], width=1)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "tpu"])
def test_other_products_agree(impl: str, tmp_path: Path) -> None:
    """On the mesh that splits and pads most. What TPUs compile runs anywhere; its matrices lie the other way round."""
    reference, model = load_mixture("qwen3_mixed"), load("qwen3_mixed", tmp_path, "tp2ep2", experts_impl=impl)
    logits = model.feed_all(reference.input_ids, width=48)
    np.testing.assert_allclose(logits, reference.logits, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_bfloat16_is_near(tmp_path: Path) -> None:
    """But for the tokens that it sends elsewhere: gaps between scores are smaller than its precision."""
    reference, model = load_mixture("mixtral"), load("mixtral", tmp_path, dtype="bfloat16")
    differences = np.abs(model.feed_all(reference.input_ids, width=48) - reference.logits).max(axis=1)
    assert 1e-3 < np.median(differences) < 0.1


def test_references_are_well_formed() -> None:
    families = {load_mixture(name).config["model_type"] for name in MIXTURE_NAMES}
    assert families == {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe"}
    for name in MIXTURE_NAMES:
        reference = load_mixture(name)
        assert reference.logits.shape == (48, reference.config["vocab_size"])
        assert len(reference.greedy_tokens) == 32
        assert reference.greedy_gaps.min() > 50 * TOLERANCE
        assert router_gap(name) > 2e-3


# --- one layer --------------------------------------------------------------------------------------------------------

EXPERTS = ExpertsConfig(num=6, per_token=2, width=10, renormalise=False)
MODEL = ModelConfig(
    family="olmoe", vocab_size=64, hidden_size=16, intermediate_size=10, num_layers=1, num_heads=2, num_kv_heads=2,
    head_dim=8, max_position=64, experts=EXPERTS,
)  # fmt: skip


@pytest.fixture(scope="module")
def run() -> Any:
    """The mixture of one layer on one device, as a function of activations `[E, T]` and which tokens are real."""
    mesh = make_mesh(1)
    layer = random_params(FAMILIES["olmoe"].specs(MODEL), mesh, np.dtype("float32"), 0).layers[0].mlp
    layer = dataclasses.replace(layer, router=20 * layer.router, gate=9 * layer.gate, up=9 * layer.up, down=9 * layer.down)
    layer = jax.device_get(layer)
    share = partial(mixture, config=EXPERTS, activation="silu", impl="xla")
    whole = PartitionSpec()
    mapped = jax.jit(jax.shard_map(share, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))
    return layer, lambda h, real: np.asarray(mapped(layer, jnp.asarray(h, jnp.float32), jnp.asarray(real)))


def by_definition(layer: Any, h: np.ndarray) -> np.ndarray:
    """Token by token, in float64."""
    out = np.zeros_like(h, dtype=np.float64)
    for token, x in enumerate(h.T.astype(np.float64)):
        scores = layer.router.astype(np.float64) @ x
        chances = np.exp(scores) / np.exp(scores).sum()
        for expert in np.argsort(-scores)[: EXPERTS.per_token]:
            gate = layer.gate[expert] @ x
            out[:, token] += chances[expert] * (layer.down[expert] @ (gate / (1 + np.exp(-gate)) * (layer.up[expert] @ x)))
    return out


def test_a_token_gets_the_same_alone_among_others_and_beside_padding(run: Any) -> None:
    layer, compute = run
    rng = np.random.default_rng(1)
    h = rng.standard_normal((16, 24))
    together = compute(h, np.ones(24, bool))
    np.testing.assert_allclose(together, by_definition(layer, h), rtol=0, atol=1e-5)

    order = rng.permutation(24)
    np.testing.assert_array_equal(compute(h[:, order], np.ones(24, bool)), together[:, order])

    real = rng.random(24) < 0.5
    wild = np.where(real, h, 1e18 * h)
    among_padding = compute(wild, real)
    np.testing.assert_array_equal(among_padding[:, real], together[:, real])
    assert (among_padding[:, ~real] == 0).all()

    for token in (0, 7):
        alone = compute(h[:, [token]], np.ones(1, bool))
        np.testing.assert_allclose(alone[:, 0], together[:, token], rtol=0, atol=1e-6)


@pytest.mark.parametrize("renormalise", [False, True])
def test_weights_are_of_all_scores_or_of_the_chosen_alone(renormalise: bool) -> None:
    router, h = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]), np.array([[1.0, -1.0], [0.5, 2.0]])
    config = ExpertsConfig(num=3, per_token=2, width=1, renormalise=renormalise)
    chosen, weights = route(jnp.asarray(router, jnp.float32), jnp.asarray(h, jnp.float32), config)
    np.testing.assert_array_equal(chosen, [[1, 0], [0, 2]])
    expected = np.exp([[1.0, 0.5], [2.0, 0.0]])
    sums = expected.sum(axis=1) if renormalise else np.exp(router @ h).sum(axis=0)
    np.testing.assert_allclose(weights, expected / sums[:, None], rtol=1e-6)


def test_matrices_are_laid_out_as_the_products_want_them() -> None:
    mesh = make_mesh(2, 2)
    specs = FAMILIES["olmoe"].specs(MODEL)
    abstract = abstract_params(specs, mesh, np.dtype("float32"))
    assert lay_out(abstract, "xla") is abstract
    params = random_params(specs, mesh, np.dtype("float32"), 0)
    before = np.asarray(params.layers[0].mlp.down)
    after, expected = lay_out(params, "tpu").layers[0].mlp, lay_out(abstract, "tpu").layers[0].mlp
    np.testing.assert_array_equal(after.down, before.swapaxes(1, 2))
    for name in ("gate", "up", "down"):
        found, wanted = getattr(after, name), getattr(expected, name)
        assert (found.shape, found.sharding) == (wanted.shape, wanted.sharding)
    assert after.gate.sharding.spec == PartitionSpec("expert", None, "tensor")
    assert after.down.sharding.spec == PartitionSpec("expert", "tensor", None)
    assert params.layers[0].mlp.down.is_deleted()
    assert abstract.layers[0].qkv.sharding.spec[0] == DEVICES


# --- settings ---------------------------------------------------------------------------------------------------------


def test_expert_parallel_is_refused_where_there_are_no_experts() -> None:
    dense = dataclasses.replace(MODEL, experts=None)
    with pytest.raises(ConfigError, match="expert_parallel is 2 but the model has no experts; raise tensor_parallel"):
        choose_experts_impl(dense, make_mesh(1, 2), np.dtype("float32"))
    assert choose_experts_impl(MODEL, make_mesh(1, 2), np.dtype("float32")) == "xla"
    with pytest.raises(ConfigError, match="expert_parallel must be at least 1, found 0"):
        EngineConfig(expert_parallel=0)


def test_each_platform_gets_the_product_that_is_fast_there() -> None:
    shapes = ((32, 768, 2048), (32, 2048, 768))
    assert choose("tpu", "TPU v6 lite", shapes, jnp.bfloat16)[0] == "tpu"
    assert choose("gpu", "NVIDIA H200", shapes, np.dtype(jnp.bfloat16))[0] == "gpu"
    assert choose("gpu", "NVIDIA A100", shapes, jnp.bfloat16) == ("xla", "jax's kernel is for Hopper, and this is NVIDIA A100")
    assert "multiples of 128 x 64, found 2048 x 96" in choose("gpu", "NVIDIA H200", ((16, 2048, 96),), jnp.bfloat16)[1]
    assert choose("gpu", "NVIDIA H200", shapes, np.dtype("float32"))[0] == "xla"


def test_active_weights_count_the_experts_that_a_token_meets() -> None:
    dense = dataclasses.replace(MODEL, experts=None)
    assert dense.active_weights == 16 * (2 * 4 * 8 + 3 * 10)
    assert MODEL.active_weights == 16 * (2 * 4 * 8 + 6 + 3 * 2 * 10)
    half = dataclasses.replace(EXPERTS, layers=(True, False), shared_width=5)
    mixed = dataclasses.replace(MODEL, num_layers=2, experts=half)
    assert mixed.active_weights == 16 * (2 * 4 * 8 + (6 + 3 * (2 * 10 + 5) + 3 * 10) / 2)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0: not supported with the family olmoe"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window = True: not supported with the family qwen3_moe"),
        ("qwen3", {"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers, found 3"),
        ("qwen3", {"num_experts": 6, "num_experts_per_tok": 7}, "at most all 6 of them, found 7"),
        ("qwen2", {"num_experts": None, "num_local_experts": 0}, "num_local_experts must be a positive integer, found 0"),
    ],
)
def test_configs_that_are_wrong_or_not_supported_are_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config_from_hf(load_mixture(name).config | change)
