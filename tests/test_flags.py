"""Flags: one for each field, documented by it, merged over a TOML file."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import pytest

from jaxserve.config import EngineConfig, HttpConfig, ServeConfig
from jaxserve.errors import ConfigError
from jaxserve.flags import (
    add_engine_flags,
    add_http_flags,
    add_model_flags,
    attribute_docs,
    integer,
    serve_config_from_args,
)


def parse(*argv: str) -> ServeConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    for add in (add_model_flags, add_engine_flags, add_http_flags):
        add(parser)
    return serve_config_from_args(parser.parse_args(argv))


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "serving.toml"
    path.write_text(text)
    return str(path)


def test_no_flags_give_the_defaults() -> None:
    assert parse("--model", "m") == ServeConfig(model="m")


def test_every_kind_of_flag() -> None:
    config = parse(
        *("--model", "m", "--max-seqs", "4", "--kv-memory", "2GiB", "--dtype", "bfloat16", "--no-overlap"),
        *("--drain-seconds", "1.5", "--host", "0.0.0.0"),
    )
    assert config.engine == EngineConfig(max_seqs=4, kv_memory=2 << 30, dtype="bfloat16", overlap=False)
    assert config.http == HttpConfig(drain_seconds=1.5, host="0.0.0.0")


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = toml(tmp_path, 'model = "a"\n[engine]\nmax_seqs = 4\nmax_context = 99\noverlap = false\n[http]\nport = 1\n')
    assert parse("--config", path).engine.max_seqs == 4
    config = parse("--config", path, "--model", "b", "--max-seqs", "8", "--overlap")
    assert config.model == "b"
    assert config.engine == EngineConfig(max_seqs=8, max_context=99)
    assert config.http == HttpConfig(port=1)


def test_file_and_flags_make_one_valid_config(tmp_path: Path) -> None:
    """Neither is checked alone: 600 sequences need the file's larger step."""
    path = toml(tmp_path, 'model = "a"\n[engine]\nmax_step_tokens = 1024\n')
    assert parse("--config", path, "--max-seqs", "600").engine.max_seqs == 600


@pytest.mark.parametrize(
    ("text", "argv", "message"),
    [
        ("", [], "no model is named"),
        ('model = "a"\n[engine]\nmax_seq = 4\n', [], "unknown key 'max_seq'; did you mean 'max_seqs'?"),
        ('model = "a"\nengine = 4\n', ["--max-seqs", "2"], "engine must be a table, found 4"),
        ('model = "a"\nengine = 4\n', [], "engine must be a table, found 4"),
        ("model = ", [], "is not valid TOML"),
        ('model = "a"\n', ["--max-seqs", "0"], "max_seqs must be at least 1, found 0"),
        ('model = "a"\n', ["--dtype", "int8"], "dtype must be auto, float32 or bfloat16, found 'int8'"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, text: str, argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        parse("--config", toml(tmp_path, text), *argv)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        parse("--config", str(tmp_path / "none.toml"))


@pytest.mark.parametrize(("text", "value"), [("12", 12), ("-1", -1), ("65_536", 65536), ("3KiB", 3072), ("2 GiB", 2 << 30)])
def test_integers(text: str, value: int) -> None:
    assert integer(text) == value


@pytest.mark.parametrize("text", ["", "4k", "GiB", "1.5GiB", "0x10", "ten"])
def test_bad_integers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected an integer"):
        integer(text)


@pytest.mark.parametrize("kind", [EngineConfig, HttpConfig])
def test_every_flag_is_documented_by_its_field(kind: type) -> None:
    assert set(attribute_docs(kind)) == {item.name for item in fields(kind)}


def test_help_names_flags_not_fields() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    text = " ".join(parser.format_help().split())
    assert "token budget of a step; at least --max-seqs; default: 512" in text
    assert "0 sizes the pool from --kv-memory" in text
    assert "`" not in text
