"""Config and tokenizer files of a Hugging Face directory, in the forms that are met."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.checkpoint import AddedToken, CheckpointError, TokenizerFiles
from checkpoints.hf_files import read_config, read_tokenizer, write_config, write_tokenizer

MODELS = Path(__file__).parent / "sentencepieces"
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


def config_with(path: Path, config: Any, generation: Any = None, **files: Any) -> dict[str, Any]:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return read_config(path)


@pytest.mark.parametrize(
    ("of_config", "of_generation", "expected"),
    [
        (2, [2, 7], [2, 7]),
        (9, [2, 7], [2, 7, 9]),
        ([9, 2], 7, [7, 9, 2]),
        (2, 2, 2),
        (2, None, 2),
        (None, 7, 7),
    ],
)
def test_what_ends_a_text_in_either_file_ends_it(tmp_path: Path, of_config: Any, of_generation: Any, expected: Any) -> None:
    found = config_with(tmp_path, {"eos_token_id": of_config}, {"eos_token_id": of_generation})
    assert found == {"eos_token_id": expected}


def test_the_rest_of_generation_config_is_kept_apart(tmp_path: Path) -> None:
    found = config_with(tmp_path, {"eos_token_id": 2, "temperature": 3}, {"eos_token_id": 2, "temperature": 1, "top_k": None})
    assert found == {"eos_token_id": 2, "temperature": 3, "generation_config": {"temperature": 1}}


def test_generation_config_has_the_last_word_on_what_begins_one(tmp_path: Path) -> None:
    assert config_with(tmp_path, {"bos_token_id": 1, "x": 3}, {"bos_token_id": 5}) == {"bos_token_id": 5, "x": 3}
    assert config_with(tmp_path, {"bos_token_id": 1}, {"bos_token_id": None}) == {"bos_token_id": 1}


def test_end_tokens_of_the_text_model_are_merged_too(tmp_path: Path) -> None:
    found = config_with(tmp_path, {"text_config": {"eos_token_id": 1, "bos_token_id": 2}}, {"eos_token_id": [1, 106]})
    ids = {"eos_token_id": [1, 106], "bos_token_id": 2}
    assert found == {**ids, "text_config": ids}


TOKENIZER = {"added_tokens": [{"id": 9, "content": "<|end|>", "special": True}], "model": {"vocab": {"</s>": 2, "7": 5}}}


@pytest.mark.parametrize(("value", "expected"), [("<|end|>", 9), ("</s>", 2), ("7", 7), (["<|end|>", 2, "</s>"], [9, 2, 2])])
def test_end_tokens_may_be_given_by_their_text(tmp_path: Path, value: Any, expected: Any) -> None:
    assert config_with(tmp_path, {"eos_token_id": value}, tokenizer=TOKENIZER)["eos_token_id"] == expected


def test_a_text_that_is_no_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id: '<\|eot\|>' is neither a token id nor a token of"):
        config_with(tmp_path, {"eos_token_id": "<|eot|>"}, tokenizer=TOKENIZER)


def test_no_tokenizer_files_is_no_tokenizer(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path) is None


def test_a_tokenizer_alone_is_enough(tmp_path: Path) -> None:
    assert read(tmp_path) == TokenizerFiles(tokenizer_json="{}")


def test_sentencepiece_is_read_only_without_tokenizer_json(tmp_path: Path) -> None:
    shutil.copy(MODELS / "gemma.model", tmp_path / "tokenizer.model")
    found = read_tokenizer(tmp_path)
    assert found is not None
    assert found.sentencepiece == (MODELS / "gemma.model").read_bytes()
    assert (found.bos_token, found.eos_token, found.add_bos, found.prefix_each) == ("<bos>", "<eos>", True, True)
    assert read(tmp_path).sentencepiece is None


SETTINGS: dict[str, Any] = {
    "bos_token": {"content": "<s>"},
    "eos_token": None,
    "add_bos_token": False,
    "legacy": False,
    "chat_template": "T",
    "added_tokens_decoder": {
        "341": {"content": "<|end|>", "rstrip": True, "special": True},
        "3": {"content": "<call>"},
    },
}


def test_settings_go_with_sentencepiece_as_with_tokenizer_json(tmp_path: Path) -> None:
    shutil.copy(MODELS / "llama.model", tmp_path / "spiece.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    found = read_tokenizer(tmp_path)
    assert found is not None
    assert (found.bos_token, found.eos_token, found.add_bos, found.prefix_each) == ("<s>", None, False, False)
    assert found.chat_template == "T"
    assert found.added_tokens == (
        AddedToken(token_id=3, content="<call>"),
        AddedToken(token_id=341, content="<|end|>", special=True, rstrip=True),
    )
    (tmp_path / "again").mkdir()
    write_tokenizer(tmp_path / "again", found)
    assert read_tokenizer(tmp_path / "again") == found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"added_tokens_decoder": 3}, "added_tokens_decoder must be an object, found 3"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, r"added_tokens_decoder\['x'\] must be an id with an object"),
        (
            {"added_tokens_decoder": {"999999999999": {"content": "a"}}},
            r"added_tokens_decoder\['999999999999'\] must be an id with an object",
        ),
        ({"added_tokens_decoder": {"3": "a"}}, r"added_tokens_decoder\['3'\] must be an id with an object"),
        (
            {"added_tokens_decoder": {"3": {"content": "a", "single_word": True}}},
            r"added_tokens_decoder\['3'\]: single_word is not supported",
        ),
    ],
)
def test_other_added_tokens_are_refused(tmp_path: Path, settings: Any, message: str) -> None:
    shutil.copy(MODELS / "llama.model", tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: " + message):
        read_tokenizer(tmp_path)


def test_added_tokens_may_be_in_a_file_of_their_own_as_they_were_once(tmp_path: Path) -> None:
    shutil.copy(MODELS / "llama.model", tmp_path / "tokenizer.model")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 341, "<|im_start|>": 340, "<call>": 342}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["<|im_start|>"]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    found = read_tokenizer(tmp_path)
    assert found is not None
    assert found.eos_token == "<|im_end|>"
    assert found.added_tokens == (
        AddedToken(token_id=340, content="<|im_start|>", special=True),
        AddedToken(token_id=341, content="<|im_end|>", special=True),
        AddedToken(token_id=342, content="<call>"),
    )
    (tmp_path / "added_tokens.json").write_text('{"<call>": "x"}')
    with pytest.raises(CheckpointError, match=r"added_tokens\.json: '<call>' must have an id, found 'x'"):
        read_tokenizer(tmp_path)


def test_a_tokenizer_json_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert read(tmp_path, None, None, tokenizer__json="\ufeff{}").tokenizer_json == "{}"


@pytest.mark.parametrize("model", [b"\x00\xff", b"", b"{}", b"version https://git-lfs", b"\x0a\xff\x01"])
def test_what_is_no_sentencepiece_model_is_named(tmp_path: Path, model: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: not a SentencePiece model: "):
        read_tokenizer(tmp_path)


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


def test_templates_whose_names_are_none_do_no_harm(tmp_path: Path) -> None:
    named = [{"name": ["x"], "template": "T"}, {"name": "default", "template": "U"}]
    assert read(tmp_path, {"chat_template": named}).chat_template == "U"


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
