"""The kernel lab: what may be asked of it, that it finds wrong variants, and what it writes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import bench.kernels.attention
import bench.kernels.subjects  # noqa: F401
from bench.kernels import __main__ as lab
from bench.kernels.measure import Limits
from bench.kernels.registry import SUBJECTS, LabError, find, plan, variant
from bench.kernels.report import Result, roofline, table, winner
from pallas_kernels import tuned

LIMITS = Limits("Some Device v1", bandwidth=1e10, matrix_rate=1e11)


@pytest.fixture(autouse=True)
def _no_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Limits that need no measuring, a folder for tuned settings, and no variant left behind."""
    monkeypatch.setattr("bench.kernels.measure.limits", lambda platform: LIMITS)
    monkeypatch.setattr("bench.kernels.measure.FLUSH_BYTES", {"cpu": 4096})
    monkeypatch.setattr("bench.kernels.measure._last_level_cache", lambda: 0)
    monkeypatch.setattr(lab, "CONFIGS", tmp_path / "configs")
    for subject in SUBJECTS.values():
        monkeypatch.setattr(subject, "variants", dict(subject.variants))


def run(tmp_path: Path, *arguments: str) -> int:
    return lab.main([*arguments, "--repeats", "3", "--output", str(tmp_path / "out")])


def rows_of(tmp_path: Path, name: str) -> list[dict[str, str]]:
    with (tmp_path / "out" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


MINE = """
import jax.numpy as jnp
from bench.kernels.registry import variant

@variant("softmax")
def mine(x, *, block=4):
    parts = x.reshape(x.shape[0], block, -1)
    best = parts.max(axis=(1, 2), keepdims=True)
    weights = jnp.exp(parts - best)
    return (weights / weights.sum(axis=(1, 2), keepdims=True)).reshape(x.shape)

@variant("softmax")
def careless(x):
    return jnp.exp(x) / 1000

@variant("softmax")
def broken(x):
    raise NotImplementedError("not yet")
"""


def test_your_own_softmax_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A right variant is timed for each setting, a wrong one is found out, a broken one does not stop the others."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    sweep = ["--sweep", "block=2,8", "rows=3", "width=64"]
    assert run(tmp_path, "softmax", "--load", str(file), "--variant", "mine", "careless", "broken", *sweep) == 1
    shown = capsys.readouterr().out
    assert "WRONG, so not timed" in shown
    assert "failed: NotImplementedError: not yet" in shown
    rows = rows_of(tmp_path, "softmax-cpu")
    assert [row["variant"] for row in rows] == ["mine block=2", "careless", "broken", "mine block=8"]
    assert {row["shape"] for row in rows} == {"demo rows=3 width=64"}
    assert [row["passed"] for row in rows] == ["True", "False", "", "True"]
    assert [bool(row["seconds"]) for row in rows] == [True, False, False, True]
    assert float(rows[0]["num_bytes"]) == 2 * 3 * 64 * 4

    report = json.loads((tmp_path / "out" / "softmax-cpu.json").read_text())
    assert report["limits"]["bandwidth"] == LIMITS.bandwidth
    assert len(report["results"]) == 4
    drawing = ElementTree.parse(tmp_path / "out" / "softmax-cpu.svg")
    assert len(drawing.findall(".//{*}circle")) == 2


def test_the_winner_is_kept_for_the_kind_of_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quant_matmul", "--variant", "xla", "--sweep", "num_out=32", "num_in=64", "tile_weights=64,1024"]
    assert run(tmp_path, *arguments, "--save") == 0
    assert "kept {'tile_weights': " in capsys.readouterr().out
    kept = tuned.load(tmp_path / "configs", LIMITS.device_kind)
    assert kept["quant_matmul.xla"]["tile_weights"] in (64, 1024)
    assert tuned.load(tmp_path / "configs", "Another Device") == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "sweep"),
    [
        ("quant_matmul", ["num_out=64", "num_in=128", "num_tokens=1,9", "bits=4", "group=32"]),
        ("sample", ["rows=3", "vocab=1000"]),
        ("grouped_matmul", ["rows=9", "num_groups=4", "num_out=64", "num_in=32"]),
        ("paged_attention", ["batch=2", "context=40", "page=8,16"]),
        ("softmax", ["rows=2", "width=96"]),
    ],
)
def test_every_variant_that_runs_here_is_right(tmp_path: Path, kernel: str, sweep: list[str]) -> None:
    assert run(tmp_path, kernel, "--sweep", *sweep) == 0
    rows = rows_of(tmp_path, f"{kernel}-cpu")
    assert rows
    assert all(row["passed"] == "True" and float(row["seconds"]) > 0 for row in rows)


def test_an_interrupt_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    here = lab._here

    def second_is_interrupted(*arguments: Any) -> Result:
        if done:
            raise KeyboardInterrupt
        done.append(here(*arguments))
        return done[0]

    monkeypatch.setattr(lab, "_here", second_is_interrupted)
    assert run(tmp_path, "softmax", "--sweep", "rows=2", "width=32") == 1
    assert len(rows_of(tmp_path, "softmax-cpu")) == 1
    assert len(json.loads((tmp_path / "out" / "softmax-cpu.json").read_text())["results"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sofmax"], "no kernel 'sofmax'; there are grouped_matmul, paged_attention, quant_matmul, sample, softmax"),
        (["softmax", "--shape", "huge"], "no shape 'huge'; there are demo, wide, attention"),
        (["softmax", "--variant", "mine"], "no variant 'mine'; there are plain, unshifted"),
        (["softmax", "--sweep", "block=1"], "nothing named block to set; there are ['dtype', 'rows', 'width']"),
        (["softmax", "--sweep", "rows"], "expected KEY=VALUE"),
        (["softmax", "--load", "nowhere.py"], "no such Python file"),
        (["softmax", "--target", "abacus"], "expected cpu, gpu, tpu or aot:DEVICE"),
        (["softmax", "--target", "gpu"], "to compile for another device take --target aot:DEVICE"),
        (["softmax", "--target", "aot:abacus"], "no such device; there are aot:v5e"),
        (["sample", "--variant", "tpu_kernel"], "no variant of sample runs on cpu"),
        (["softmax", "--save", "--variant", "plain", "--sweep", "rows=1", "width=8"], "has no options set"),
    ],
)
def test_nonsense_is_answered_with_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_listing_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.main([]) == 0
    shown = capsys.readouterr().out
    for name, subject in SUBJECTS.items():
        assert f"{name}\n" in shown
        assert all(f"variant {one}" in shown for one in subject.variants)


def test_sweeps_multiply_and_do_not_repeat_what_they_do_not_touch() -> None:
    @variant("softmax")
    def sized(x: Any, *, block: int = 1) -> Any:
        return x

    sweeps = lab.combinations(["rows=1,2", "block=3,4"])
    assert len(sweeps) == 4
    trials = plan(find("softmax"), platform="cpu", shapes=["demo"], variants=["plain", "sized"], sweeps=sweeps)
    found = [(trial.shape_name, str(trial)) for trial in trials]
    assert sorted(found) == sorted(
        [(f"demo rows={rows}", name) for rows in (1, 2) for name in ("plain", "sized block=3", "sized block=4")]
    )
    assert trials[0].shape.rows == 1


def test_values_are_read_as_what_they_look_like() -> None:
    (found,) = lab.combinations(["a=3", "b=0.5", "c=none", "d=true", "e=bfloat16"])
    assert found == {"a": 3, "b": 0.5, "c": None, "d": True, "e": "bfloat16"}


def test_only_what_is_right_can_win() -> None:
    results = [
        Result("s", "wrong", error=1.0, passed=False),
        Result("s", "slow", error=0.0, passed=True, seconds=2.0, share=0.1, num_bytes=8, operations=8),
        Result("s", "fast", error=0.0, passed=True, seconds=1.0, share=0.2, num_bytes=8, operations=8),
        Result("s", "compiled", temp_bytes=5, code_bytes=7, bundles=9, spills=0),
    ]
    best = winner(results)
    assert best is not None
    assert best.variant == "fast"
    (marked,) = [line for line in table(results).splitlines() if line.startswith("*")]
    assert "fast" in marked
    assert winner(results[:1]) is None
    assert roofline("t", 1e9, 1e9, results[:1]) == ""


def test_registers_of_gpu_kernels_are_shown() -> None:
    result = Result("s", "ahead", temp_bytes=5, code_bytes=7, bundles=0, spills=12, registers=80, shared_bytes=4096)
    assert table([result]).endswith("5 bytes of temporaries, 7 of code, 80 registers, 12 bytes spilled, 4,096 shared")


def test_tuned_settings_of_other_kernels_stay(tmp_path: Path) -> None:
    tuned.save(tmp_path, "TPU v5 lite", "quant_matmul.tpu", {"rows": 128})
    path = tuned.save(tmp_path, "TPU v5 lite", "sample.tpu", {"chunk": 512})
    assert path.name == "tpu-v5-lite.toml"
    assert tuned.load(tmp_path, "TPU v5 lite") == {"quant_matmul.tpu": {"rows": 128}, "sample.tpu": {"chunk": 512}}
    path.write_text('["quant_matmul.tpu"]\nrows = "many"\n')
    with pytest.raises(ValueError, match="must hold whole numbers"):
        tuned.load(tmp_path, "TPU v5 lite")


def test_unknown_subjects_cannot_be_registered_for() -> None:
    with pytest.raises(LabError, match="no kernel 'soft'"):
        variant("soft")(lambda x: x)
