"""The doctor: what it says without any compiler, and with them."""

from __future__ import annotations

import pytest

from pallas_kernels import doctor
from pallas_kernels.aot import TARGETS, Figures
from tests.kernels.ladder.compiled import require


def test_it_says_what_is_chosen_here_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--no-compile"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "(cpu)" in lines[0]
    for kernel in doctor.KERNELS:
        impl = "cpu" if "cpu" in kernel.implementations else "xla"
        assert lines[lines.index(kernel.name) + 1].startswith(f"  here   {impl}: ")


def test_it_names_what_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "missing", lambda target: f"nothing for {target.name}")
    assert doctor.main(["--target", "v5e", "--target", "h200"]) == 0
    out = capsys.readouterr().out
    assert "  v5e    tpu: not compiled: nothing for v5e" in out
    assert "not compiled: nothing for h200" in out


def test_a_program_that_does_not_compile_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "missing", lambda target: "")
    monkeypatch.setattr(doctor, "compile_jobs", lambda jobs: [Figures(error="too large\nin detail")] * len(jobs))
    assert doctor.main(["--target", "v6e"]) == 1
    assert "FAILED: too large\n" in capsys.readouterr().out


def test_help_names_the_targets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        doctor.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in TARGETS)


@pytest.mark.slow
def test_it_reads_the_compilers_figures(capsys: pytest.CaptureFixture[str]) -> None:
    require("v5e")
    assert doctor.main(["--target", "v5e"]) == 0
    out = capsys.readouterr().out
    assert "paged_attention: " in out
    assert "MiB updated in place" in out


@pytest.mark.slow
def test_it_shows_registers_of_gpu_kernels_also_where_they_are_not_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    require("h200")
    assert doctor.main(["--target", "h200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (quantised,) = (line for line in lines if "quant_matmul_w4: " in line)
    assert quantised.startswith("         gpu, not chosen: compiled; ")
    assert " 0 bytes spilled, " in quantised
    (attention,) = (line for line in lines if ", paged_attention: " in line)
    assert attention.startswith("         gpu, not chosen: compiled; ")


@pytest.mark.parametrize(("device_kind", "impl"), [("NVIDIA H200", "gpu"), ("NVIDIA A100-SXM4-80GB", "xla")])
def test_kernels_for_gpus_are_for_hopper(device_kind: str, impl: str) -> None:
    kernel = next(kernel for kernel in doctor.KERNELS if kernel.name == "grouped_matmul")
    assert kernel.choose("gpu", device_kind)[0] == impl
