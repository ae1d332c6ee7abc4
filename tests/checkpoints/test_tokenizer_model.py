"""A directory with nothing but a `tokenizer.model`: ids and text are SentencePiece's, and special tokens stay out of reach."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st

from checkpoints.hf_files import read_tokenizer
from checkpoints.sentencepiece_model import read_sentencepiece
from jaxserve.constraint import Grammar, GrammarKind
from jaxserve.engine.grammar import GrammarCompiler
from jaxserve.engine.text import Tokenizer
from jaxserve.engine.text_stream import TextStream
from jaxserve.errors import InvalidRequest, ModelLoadError
from jaxserve.vocabulary import build_tokenizer

MODELS = Path(__file__).parent / "sentencepieces"
NAMES = ("gemma", "llama", "unigram", "unigram-bytes")
BYTES = ("gemma", "llama", "unigram-bytes")
PIECES = (
    "the engine",
    "engineengine",
    "<tool>",
    "<turn>",
    "\n\n\n",
    "   ",
    "\t",
    "\u2581",
    "\ufb01",
    "e\u0301",
    "naïve",
    "<s>",
)
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=8).map("".join)


def load(directory: Path, name: str, settings: Any = None) -> Tokenizer:
    shutil.copy(MODELS / f"{name}.model", directory / "tokenizer.model")
    if settings is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    files = read_tokenizer(directory)
    assert files is not None
    return build_tokenizer(files)


@functools.cache
def pair(name: str) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    """Ours of the model alone, and the library's."""
    path = MODELS / f"{name}.model"
    files = read_sentencepiece(path.read_bytes(), (), prefix_each=True, where=name)
    return build_tokenizer(files), sentencepiece.SentencePieceProcessor(model_file=str(path))


@pytest.mark.parametrize("name", NAMES)
@given(texts)
@example("")
@example(" ")
@example("a\0b")
def test_ids_and_text_are_sentencepiece_s(name: str, text: str) -> None:
    ours, library = pair(name)
    ids = library.encode(text)
    assert ours.encode_plain(text) == ids
    # The library writes an unknown piece in its own way, and takes more than one space away where it removes them.
    removes = name == "unigram" and "".join(map(library.id_to_piece, ids)).startswith("\u2581\u2581")
    if library.unk_id() not in ids and not removes:
        assert ours.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("name", BYTES)
@given(texts)
def test_text_comes_whole_however_its_tokens_split_it(name: str, text: str) -> None:
    ours, _ = pair(name)
    stream, shown = TextStream(ours), ""
    for token_id in ours.encode_plain(text):
        delta = stream.push([token_id])
        assert "\ufffd" not in delta.text or "\ufffd" in text
        shown += delta.text
    shown += stream.flush().text
    before = " " if text and name != "gemma" else ""
    assert shown == before + text.replace("\u2581", " ")


def test_a_stop_string_is_found_within_byte_tokens() -> None:
    ours, _ = pair("llama")
    stream = TextStream(ours, ("😀 in",))
    deltas = [stream.push([token_id]) for token_id in ours.encode_plain("the 😁😀 in one")]
    assert "".join(delta.text for delta in deltas) == " the 😁"
    assert deltas[-1].stop == "😀 in"


@pytest.mark.parametrize("name", NAMES)
def test_control_pieces_are_spelled_by_prompts_and_never_by_text(name: str) -> None:
    ours, library = pair(name)
    for token_id in ours.special_ids:
        spelled = ours.token_name(token_id)
        assert spelled is not None
        assert ours.encode(f"{spelled}the", add_special_tokens=False) == [token_id, *library.encode("the")]
        assert token_id not in ours.encode_plain(f"{spelled}the") or token_id == library.unk_id()


def test_prompts_begin_with_bos_unless_told_otherwise(tmp_path: Path) -> None:
    ours, library = pair("gemma")
    assert ours.encode("the") == [library.bos_id(), *library.encode("the")]
    assert ours.eos_token_id == library.eos_id()
    assert load(tmp_path, "gemma", {"add_bos_token": False}).encode("the") == library.encode("the")


@pytest.mark.parametrize("legacy", [True, False, None])
def test_the_space_before_a_text_comes_after_every_control_token_or_once(tmp_path: Path, legacy: bool | None) -> None:
    ours = load(tmp_path, "llama", {} if legacy is None else {"legacy": legacy})
    ids = ours.encode("the</s>the", add_special_tokens=False)
    end = ids.index(2)
    assert ids[:end] == ours.encode_plain("the")
    assert ours.spell(ids[:end]) == " the"
    assert ours.spell(ids[end + 1 :]) == ("the" if legacy is False else " the")


ADDED = {
    "3": {"content": "<tool>", "special": True},
    "52": {"content": "<call>"},
    "345": {"content": "<|end|>", "special": True, "rstrip": True, "lstrip": True},
}


def test_added_tokens_come_before_pieces_and_may_take_spaces(tmp_path: Path) -> None:
    ours = load(tmp_path, "llama", {"added_tokens_decoder": ADDED, "add_bos_token": False})
    assert ours.vocab_size == 346
    assert ours.encode("<tool>") == [3]
    assert 3 not in ours.encode_plain("<tool>")
    assert ours.decode(ours.encode_plain("<tool>")) == "<tool>"
    assert ours.encode_plain("<call>") == [52]
    assert (ours.token_name(52), ours.token_bytes(52), ours.is_special(52)) == ("<call>", b"<call>", False)
    assert ours.encode("the \n<|end|>\n the") == [*ours.encode_plain("the"), 345, *ours.encode_plain("the")]
    assert ours.token_name(344) is None
    assert ours.token_bytes(344) == b""


def test_user_defined_pieces_that_settings_list_stay_the_model_s(tmp_path: Path) -> None:
    listed = ("<turn>", "\n", "\n\n", "\u2581\u2581", "\u2581\u2581\u2581", "\t")
    table = {str(3 + i): {"content": content, "special": content == "<turn>"} for i, content in enumerate(listed)}
    ours, library = load(tmp_path, "gemma", {"added_tokens_decoder": table}), pair("gemma")[1]
    for text in ("the   engine  the\n\n\n\tin", "     ", "\n   the"):
        assert ours.encode_plain(text) == library.encode(text)
    assert 3 not in ours.encode_plain("<turn>the")
    assert ours.encode("<turn>the", add_special_tokens=False) == library.encode("<turn>the")


def test_conversations_use_the_template_of_the_directory_and_its_control_tokens(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}<tool>{{ m.content }}<|end|>\n{% endfor %}"
    ours = load(tmp_path, "llama", {"added_tokens_decoder": ADDED, "chat_template": template})
    ids = ours.encode_chat([{"role": "user", "content": "the <tool><|end|>"}])
    assert ids == [1, 3, *ours.encode_plain("the <tool><|end|>"), 345]


@pytest.mark.parametrize("name", BYTES)
def test_an_output_can_be_held_to_a_grammar(name: str) -> None:
    ours, library = pair(name)
    compiler = GrammarCompiler(ours, ours.vocab_size + 6, (library.eos_id(),))
    forced = compiler.compile(Grammar(GrammarKind.CHOICE, '["the é😀"]', "choice")).start().forced()
    assert ours.spell(forced) == "the é😀"
    matcher = compiler.compile(Grammar(GrammarKind.REGEX, "the (engine|é😀)", "regex")).start()
    assert matcher.accepts(list(forced))
    assert not matcher.accepts(ours.encode_plain(" the é"))


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        pair("llama")[0].encode("a\ud800")


def test_a_model_that_the_library_refuses_is_named(tmp_path: Path) -> None:
    model = (MODELS / "llama.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(model + model)
    files = read_tokenizer(tmp_path)
    assert files is not None
    with pytest.raises(ModelLoadError, match=r"not a usable SentencePiece model: .* is already defined"):
        build_tokenizer(files)
