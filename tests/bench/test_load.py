"""The bench of loading: a small model of each format through the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import load


@pytest.mark.slow
@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_a_round_measures_disk_load_and_memory(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    }
    monkeypatch.setattr(load, "SHAPE", small)
    assert load.main(["--gib", "0.02", "--rounds", "1", "--format", form, "--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("1 rounds, medians")
    assert [line.split("  ")[1] for line in lines[1:]] == [
        "the disk alone",
        "loading from it",
        "loading out of cache",
        "peak memory",
    ]
    assert list(tmp_path.iterdir()) == []
