"""Config and tokenizer files of a Hugging Face directory, in the forms that are met."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.checkpoint import CheckpointError, TokenizerFiles
from checkpoints.hf_files import read_config, read_tokenizer, write_config, write_tokenizer

BOS_FIRST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A"}}],
}
PLAIN = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}]}


def directory(path: Path, settings: Any = None, tokenizer: Any = None, **files: str) -> Path:
    (path / "tokenizer.json").write_text(json.dumps(tokenizer if tokenizer is not None else {}))
    if settings is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def read(path: Path, *args: Any, **files: str) -> TokenizerFiles:
    found = read_tokenizer(directory(path, *args, **files))
    assert found is not None
    return found


def test_generation_config_has_the_last_word_on_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1, "x": 3}))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 7], "bos_token_id": None, "temperature": 1})
    )
    assert read_config(tmp_path) == {"eos_token_id": [2, 7], "bos_token_id": 1, "x": 3}


def test_no_tokenizer_files_is_no_tokenizer(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path) is None


def test_a_tokenizer_alone_is_enough(tmp_path: Path) -> None:
    assert read(tmp_path) == TokenizerFiles(tokenizer_json="{}")


def test_sentencepiece_is_given_as_bytes_and_only_without_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x00\xff")
    assert read_tokenizer(tmp_path) == TokenizerFiles(sentencepiece=b"\x00\xff")
    assert read(tmp_path).sentencepiece is None


@pytest.mark.parametrize("form", ["<s>", {"content": "<s>", "lstrip": False, "__type": "AddedToken"}])
def test_tokens_are_strings_or_objects(tmp_path: Path, form: Any) -> None:
    assert read(tmp_path, {"bos_token": form, "eos_token": None}).bos_token == "<s>"


@pytest.mark.parametrize("form", [3, ["<s>"], {"content": 3}])
def test_other_tokens_are_refused(tmp_path: Path, form: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: bos_token must be a string or an object"):
        read(tmp_path, {"bos_token": form})


@pytest.mark.parametrize(
    ("settings", "processor", "expected"),
    [
        ({"bos_token": "<s>", "add_bos_token": True}, PLAIN, True),
        ({"bos_token": "<s>", "add_bos_token": False}, BOS_FIRST, False),
        ({"bos_token": "<s>"}, BOS_FIRST, True),
        ({"bos_token": "<s>"}, {"type": "Sequence", "processors": [{"type": "ByteLevel"}, BOS_FIRST]}, True),
        ({"bos_token": "<s>"}, PLAIN, False),
        ({"bos_token": "<b>"}, BOS_FIRST, False),
        ({"bos_token": "<s>"}, None, False),
        ({"add_bos_token": True}, BOS_FIRST, False),
        ({"bos_token": "<s>"}, {"type": "Sequence", "processors": 3}, False),
    ],
)
def test_add_bos_is_what_the_tokenizer_would_do(tmp_path: Path, settings: Any, processor: Any, expected: bool) -> None:
    assert read(tmp_path, settings, {"post_processor": processor}).add_bos is expected


@pytest.mark.parametrize(
    ("template", "default", "tools"),
    [
        ("T", "T", None),
        ([{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}], "T", "U"),
        ([{"name": "tool_use", "template": "U"}], None, "U"),
        (None, None, None),
    ],
)
def test_chat_templates_are_strings_or_lists(tmp_path: Path, template: Any, default: str | None, tools: str | None) -> None:
    found = read(tmp_path, {"chat_template": template})
    assert (found.chat_template, found.tool_template) == (default, tools)


def test_a_template_file_wins(tmp_path: Path) -> None:
    assert read(tmp_path, {"chat_template": "T"}, chat_template__jinja="F\r\n").chat_template == "F\r\n"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("G")
    assert read(tmp_path, {"chat_template": [{"name": "tool_use", "template": "U"}]}).tool_template == "G"


@pytest.mark.parametrize("template", [3, [{"name": "default", "template": 3}], {"default": "T"}])
def test_other_chat_templates_are_refused(tmp_path: Path, template: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template must be"):
        read(tmp_path, {"chat_template": template})


@pytest.mark.parametrize("text", ["[]", "{", "\x00", '{"a": 1', "[" * 100_000])
def test_a_broken_tokenizer_json_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: (not valid JSON|expected a JSON object)"):
        read_tokenizer(tmp_path)


texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    st.builds(
        TokenizerFiles,
        tokenizer_json=st.dictionaries(texts, texts).map(json.dumps),
        chat_template=st.none() | texts,
        tool_template=st.none() | texts,
        bos_token=texts,
        eos_token=st.none() | texts,
        add_bos=st.booleans(),
    )
)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, files: TokenizerFiles) -> None:
    path = tmp_path_factory.mktemp("t")
    write_tokenizer(path, files)
    assert read_tokenizer(path) == files


@given(st.dictionaries(texts, st.none() | st.integers() | texts | st.lists(st.integers())))
def test_a_config_is_read_back(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("c")
    write_config(path, config)
    assert read_config(path) == config
