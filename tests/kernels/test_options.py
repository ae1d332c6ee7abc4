"""Tuned options of attention: taken from a file for the kind of device, changing no value; a bad file costs its options."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.device import build
from jaxserve.models.sharding import make_mesh
from pallas_kernels import doctor, tuned
from pallas_kernels import paged_attention as package
from pallas_kernels.page_layout import from_rows
from pallas_kernels.paged_attention import IMPLEMENTATIONS, cases
from pallas_kernels.paged_attention.cases import Case, Inputs, make_inputs, real_tokens
from pallas_kernels.paged_attention.choose import Shape
from pallas_kernels.paged_attention.options import choose_options
from tests.cached import CACHED
from tests.kernels.ladder.interpret import run_interpreted
from tests.real_engines import TINY_MODEL

pytestmark = CACHED

SHAPE = Shape(num_heads=9, num_kv_heads=3, head_dim=8, page_size=8, dtype=jnp.float32, kv_dtype=jnp.float32)


def write(folder: Path, text: str) -> Path:
    path = tuned.file_of(folder, "cpu")
    path.write_text(text)
    return path


def test_options_are_read_for_the_kind_of_device(tmp_path: Path) -> None:
    path = tuned.save(tmp_path, "cpu", "paged_attention.xla", {"rows_per_turn": 4, "chunk_tile": 32})
    choice = choose_options(tmp_path, "cpu", "xla", SHAPE)
    assert choice.options == {"rows_per_turn": 4, "chunk_tile": 32}
    assert str(path) in choice.source
    assert not choice.problem


def test_options_of_other_devices_and_implementations_are_not_taken(tmp_path: Path) -> None:
    tuned.save(tmp_path, "TPU v6 lite", "paged_attention.xla", {"rows_per_turn": 4})
    tuned.save(tmp_path, "cpu", "paged_attention.tpu", {"tile_tokens": 64})
    choice = choose_options(tmp_path, "cpu", "xla", SHAPE)
    assert choice.options == {}
    assert "nothing is tuned for paged_attention.xla on cpu" in choice.source
    assert not choice.problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('["paged_attention.xla"]\nrows_per_turn = 4, 5', "cannot be read: .*cpu.toml"),
        ('["paged_attention.xla"]\nrows_per_turn = "many"', "cannot be read: .*whole numbers"),
        ('["paged_attention.xla"]\nrows_per_round = 4', "names rows_per_round; this version has rows_per_turn, chunk_tile"),
        ('["paged_attention.xla"]\nrows_per_turn = 0', "does not compile with .*: ZeroDivisionError"),
    ],
)
def test_a_bad_file_is_said_and_costs_only_its_options(tmp_path: Path, text: str, problem: str) -> None:
    write(tmp_path, text)
    choice = choose_options(tmp_path, "cpu", "xla", SHAPE)
    assert choice.options == {}
    assert choice.source == "the defaults"
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(choice.problem)


def test_an_engine_compiles_with_them_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"max_seqs": 4, "max_step_tokens": 64, "max_context": 160, "num_pages": 100, "page_size": 8}
    engine = EngineConfig(dtype="float32", attention="xla", **sizes)
    monkeypatch.setattr(build, "default_folder", lambda: tmp_path)
    caplog.set_level(logging.INFO)

    def build_again() -> object:
        caplog.clear()
        return build.build_runner(engine, TINY_MODEL, make_mesh(1), np.dtype(np.float32))._attention_options

    assert build_again() == {}
    assert "nothing is tuned for paged_attention.xla on cpu" in caplog.text
    path = tuned.save(tmp_path, "cpu", "paged_attention.xla", {"chunk_tile": 16})
    assert build_again() == {"chunk_tile": 16}
    assert str(path) in caplog.text
    write(tmp_path, "nonsense")
    assert build_again() == {}
    assert [record.levelname for record in caplog.records if "cannot be read" in record.message] == ["WARNING"]


def test_the_doctor_says_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "default_folder", lambda: tmp_path)
    monkeypatch.setattr(doctor, "choose", lambda *_: ("xla", "the kernels for CPUs have no sizes"))
    path = tuned.save(tmp_path, "cpu", "paged_attention.xla", {"rows_per_turn": 8})
    assert doctor.main(["--no-compile"]) == 0
    assert f"sizes: {{'rows_per_turn': 8}} of {path}" in capsys.readouterr().out
    write(tmp_path, "nonsense")
    assert doctor.main(["--no-compile"]) == 0
    assert "sizes: tuned options cannot be read: " in capsys.readouterr().out


CASE = Case(
    name="mixed", num_heads=6, num_kv_heads=2, head_dim=64, page_size=8, singles=(170, 3, 41, 1), chunks=((30, 40), (9, 9))
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("impl", "options"),
    [("xla", {"rows_per_turn": 2, "chunk_tile": 8, "chunk_block": 16}), ("tpu", {"tile_tokens": 16, "block_tokens": 128})],
    ids=["xla", "tpu"],
)
def test_options_change_the_work_and_no_value(impl: str, options: dict[str, int]) -> None:
    inputs = make_inputs(CASE, 0)
    work = cases.plan(package, inputs, impl=impl, options=options)
    assert jax.tree.structure(work) != jax.tree.structure(cases.plan(package, inputs, impl=impl))

    def attend(inputs: Inputs) -> jax.Array:
        laid_out = dataclasses.replace(inputs, pages=from_rows(inputs.pages, IMPLEMENTATIONS[impl].layout))
        return cases.attend(package, laid_out, cases.plan(package, inputs, impl=impl, options=options), impl=impl)

    expected = cases.attend(package, inputs, cases.plan(package, inputs, impl="reference"), impl="reference")
    found = run_interpreted(jax.jit(attend), inputs, dma_mode="on_wait")
    real = real_tokens(inputs)
    np.testing.assert_allclose(np.asarray(found)[real], np.asarray(expected)[real], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("options", [{"tile_tokens": 48}, {"tile_tokens": 0}, {"block_tokens": 64}], ids=str)
def test_sizes_that_the_tpu_kernel_cannot_have_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        cases.plan(package, make_inputs(CASE, 0), impl="tpu", options=options)
