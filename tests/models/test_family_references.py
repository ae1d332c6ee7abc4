"""Tiny models of every family give the logits that `transformers` gave: over a prompt whole, in chunks, and over decodes, past
their windows, on one device and on several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxserve.models import families
from jaxserve.models.families import FAMILIES, model_config_from_hf
from tests.cached import CACHED
from tests.paged_model import UNOPTIMISED, PagedModel, load_tiny_model
from tests.references.load import FAMILY_NAMES, MIXTURE_NAMES, FamilyReference, load_family, load_mixture

pytestmark = CACHED

TOLERANCE = 2e-4
CHUNK = 7
QUICK = ("gemma3-rope_parameters-tp1",)
SHARDED = {
    "gemma2-caps_windows": (1, 2),  # norms before and after
    "olmo2-three_groups": (1, 2, 4),  # a norm over the heads of all devices, and a device without any
    "phi3-partial": (1, 2),  # products of several in one
    "qwen3-biases_windows": (1, 4),
    "granite-biases": (1, 4),
}
"""Models whose structure meets the mesh differently from Llama's."""


def models() -> Iterator[object]:
    for name in FAMILY_NAMES:
        for tensor_parallel in SHARDED.get(name, (1,)):
            test_id = f"{name}-tp{tensor_parallel}"
            yield pytest.param((name, tensor_parallel), id=test_id, marks=[pytest.mark.slow] * (test_id not in QUICK))


@pytest.fixture(scope="module", params=models())
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[FamilyReference, PagedModel]:
    name, tensor_parallel = request.param
    reference = load_family(name)
    folder = tmp_path_factory.mktemp("family")
    return reference, load_tiny_model(
        reference, folder, tensor_parallel, capacity=reference.context, compiler_options=UNOPTIMISED
    )


def test_logits_and_greedy_tokens_agree(loaded: tuple[FamilyReference, PagedModel]) -> None:
    reference, model = loaded
    model.restart()
    prompt, decoded = np.split(reference.input_ids, [reference.num_prompt])
    logits = model.feed_all(prompt, width=len(prompt))
    logits = np.concatenate([logits, *(model.feed([token], width=1) for token in decoded)])
    np.testing.assert_allclose(logits, reference.logits, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(logits[reference.num_prompt - 1 : -1].argmax(-1), decoded)


def test_logits_agree_in_chunks(loaded: tuple[FamilyReference, PagedModel]) -> None:
    """In the program of the whole prompt, since what a chunk is told apart by is how many tokens it has, not room for."""
    reference, model = loaded
    model.restart()
    prompt = reference.input_ids[: reference.num_prompt]
    chunks = (prompt[start : start + CHUNK] for start in range(0, len(prompt), CHUNK))
    logits = np.concatenate([model.feed(chunk, width=len(prompt)) for chunk in chunks])
    np.testing.assert_allclose(logits, reference.logits[: len(prompt)], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_gemma_in_bfloat16_is_near(tmp_path: Path) -> None:
    """Its norms' weights count from 1, and would lose their last bits if the sum were kept in bfloat16."""
    reference = load_family("gemma3-rope_parameters")
    model = load_tiny_model(reference, tmp_path, dtype="bfloat16", capacity=reference.context)
    assert model.params.layers[0].norms.dtype == model.params.layers[0].query_key_norms.dtype == np.float32
    assert model.params.layers[0].qkv.dtype == model.params.embedding.dtype == "bfloat16"
    logits = model.feed_all(reference.input_ids[: reference.num_prompt], width=reference.num_prompt)
    difference = np.sqrt(np.mean((logits - reference.logits[: reference.num_prompt]) ** 2))
    assert 1e-3 < difference < 0.06, "not bfloat16" if difference < 1e-3 else "too far"


# --- what there is ----------------------------------------------------------------------------------------------------


def test_every_family_has_references() -> None:
    configs = [*(load_family(name).config for name in FAMILY_NAMES), *(load_mixture(name).config for name in MIXTURE_NAMES)]
    assert {model_config_from_hf(config).family for config in configs} == set(FAMILIES)


def test_references_are_well_formed() -> None:
    for name in FAMILY_NAMES:
        reference = load_family(name)
        leads = np.sort(reference.logits[reference.num_prompt - 1 : -1], axis=-1)
        assert reference.logits.shape == (len(reference.input_ids), reference.config["vocab_size"])
        assert len(reference.input_ids) - reference.num_prompt == 32
        assert (leads[:, -1] - leads[:, -2]).min() > 100 * TOLERANCE, "greedy tokens have no near-ties"
        assert all(np.array_equal(values, values.astype(np.float16)) for values in reference.weights.values())


def test_a_family_is_a_small_file() -> None:
    folder = Path(families.__file__).parent
    for family in FAMILIES.values():
        source = folder / f"{family.read.__module__.rpartition('.')[2]}.py"
        assert len(source.read_text(encoding="utf-8").splitlines()) < 150, source


def test_the_readme_shows_the_last_one_as_it_is() -> None:
    folder = Path(families.__file__).parent
    readme = (folder.parent.parent / "README.md").read_text(encoding="utf-8")
    assert f"```python\n{(folder / 'olmo3.py').read_text(encoding='utf-8')}```" in readme
