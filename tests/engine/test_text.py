"""Tokenizer: encoding as the library does, decoding by bytes, special tokens only where they are meant."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Library

from jaxserve.engine.text import ChatRules, Tokenizer
from jaxserve.engine.vocab import byte_level_characters
from jaxserve.errors import InvalidRequest, ModelLoadError
from tests.engine import tiny_tokenizers as tiny

BYTE_LEVEL, SENTENCEPIECE = tiny.byte_level(), tiny.sentencepiece()
UNIGRAM = Tokenizer(tiny.unigram_library().to_str(), bos_token="<s>", eos_token="</s>", add_bos=True)
KINDS = [
    pytest.param(BYTE_LEVEL, tiny.byte_level_library(), id="byte_level"),
    pytest.param(SENTENCEPIECE, tiny.sentencepiece_library(), id="sentencepiece"),
    pytest.param(tiny.converted_sentencepiece(), tiny.sentencepiece_library(), id="sentencepiece, converted"),
]
AWKWARD = ["hello world", " hello", "  two", "", "é😀\u200d", "a\nb\t", "<think>", "<0x41>", "▁", "\ue000", "İ\u0307", "\x00"]
PIECES = st.sampled_from([*AWKWARD, "<|im_end|>", "<|im_start|>", "<s>", "</s>", "<unk>", "<|endoftext|>", "x", " ", "user"])
TEXTS = st.lists(PIECES | st.text(max_size=8), max_size=8).map("".join)


def composing() -> Tokenizer:
    library = tiny.byte_level_library()
    library.normalizer = normalizers.NFC()
    return Tokenizer(library.to_str())


COMPOSING = composing()


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


# --- encoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokenizer", "library"), KINDS)
@given(text=TEXTS)
def test_prompts_encode_as_the_library_does(tokenizer: Tokenizer, library: Library, text: str) -> None:
    expected = library.encode(text, add_special_tokens=False).ids
    if tokenizer.add_bos and expected[:1] != [1]:
        expected = [1, *expected]
    assert tokenizer.encode(text) == expected


@pytest.mark.parametrize(("tokenizer", "library"), KINDS)
@given(text=TEXTS)
def test_plain_text_never_holds_special_tokens(tokenizer: Tokenizer, library: Library, text: str) -> None:
    ids = tokenizer.encode_plain(text)
    unknown = library.token_to_id("<unk>")
    assert not any(tokenizer.is_special(token_id) for token_id in ids if token_id != unknown)
    if not any(token in text for token in (*tiny.SPECIAL, "<s>", "</s>", "<unk>")):
        assert ids == library.encode(text, add_special_tokens=False).ids


@given(text=TEXTS)
def test_fewest_tokens_is_a_lower_bound(text: str) -> None:
    longest = max(len(BYTE_LEVEL.token_bytes(token_id)) for token_id in range(BYTE_LEVEL.vocab_size))
    assert len(text) // longest == BYTE_LEVEL.fewest_tokens(text) <= len(BYTE_LEVEL.encode_plain(text))
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE, COMPOSING):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode_plain(text))
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))
    assert UNIGRAM.fewest_tokens(text) == 0  # one <unk> may stand for any number of characters


def test_what_encoding_composes_is_counted_so() -> None:
    text = "\u03b1\u0313\u0300\u0345" * 100  # four characters that are one
    assert len(COMPOSING.decode(COMPOSING.encode(text))) == 100
    assert 0 < COMPOSING.fewest_tokens(text) <= COMPOSING.fewest_tokens("x" * 100) < COMPOSING.fewest_tokens("x" * 400)


def test_spaces_that_a_token_takes_are_not_counted() -> None:
    library = tiny.byte_level_library()
    library.add_special_tokens([AddedToken("<mask>", rstrip=True)])
    tokenizer = Tokenizer(library.to_str())
    assert len(tokenizer.encode("<mask>" + " " * 1000)) == 1
    assert tokenizer.fewest_tokens("<mask>" + " " * 1000) == 0


def test_bos_comes_once() -> None:
    bos = SENTENCEPIECE.bos_token_id
    for prompt in ("hello", "<s>hello", ""):
        assert SENTENCEPIECE.encode(prompt).count(bos) == 1  # type: ignore[arg-type]
    assert SENTENCEPIECE.encode_chat(user("hello")).count(bos) == 1  # type: ignore[arg-type]
    assert BYTE_LEVEL.encode("") == []


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff"])
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    for encode in (BYTE_LEVEL.encode, BYTE_LEVEL.encode_plain, lambda content: BYTE_LEVEL.encode_chat(user(content))):
        with pytest.raises(InvalidRequest, match="surrogate"):
            encode(text)


def test_padding_truncation_and_post_processor_of_the_file_are_not_ours() -> None:
    library = tiny.byte_level_library()
    library.enable_padding(length=64)
    library.enable_truncation(4)
    assert Tokenizer(library.to_str()).encode("hello world" * 9) == BYTE_LEVEL.encode("hello world" * 9)


# --- decoding ---------------------------------------------------------------------------------------------------------


def test_byte_level_characters_are_the_library_s() -> None:
    table = byte_level_characters()
    assert sorted(table.values()) == list(range(256))
    for character, byte in table.items():
        if byte < 0x80:
            assert decoders.ByteLevel().decode([character]) == chr(byte)


@pytest.mark.parametrize(("tokenizer", "library"), KINDS)
@given(text=st.text(max_size=40))
def test_decoding_undoes_encoding(tokenizer: Tokenizer, library: Library, text: str) -> None:
    ids = tokenizer.encode_plain(text)
    assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=True)
    if tokenizer is BYTE_LEVEL:
        assert tokenizer.decode(ids) == text


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=30))
def test_any_ids_decode_as_the_library_does(ids: list[int]) -> None:
    assert BYTE_LEVEL.decode(ids) == tiny.byte_level_library().decode(ids, skip_special_tokens=True)


def test_token_bytes() -> None:
    assert b"".join(map(BYTE_LEVEL.token_bytes, BYTE_LEVEL.encode("é😀<think>"))) == "é😀<think>".encode()
    assert SENTENCEPIECE.token_bytes(SENTENCEPIECE.encode_plain("hello")[0]) == b" hello"
    assert SENTENCEPIECE.token_bytes(3 + 0xF0) == b"\xf0"
    assert BYTE_LEVEL.token_bytes(tiny.IM_END_ID) == b"<|im_end|>"
    assert BYTE_LEVEL.text_bytes(tiny.IM_END_ID) == b""
    for outside in (-1, BYTE_LEVEL.vocab_size, 10**9):  # a model's embedding may have more rows than the tokenizer ids
        assert BYTE_LEVEL.token_bytes(outside) == BYTE_LEVEL.text_bytes(outside) == b""
        assert not BYTE_LEVEL.is_special(outside)


# --- conversations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokenizer", "library"), KINDS)
@given(contents=st.lists(TEXTS, min_size=1, max_size=3))
def test_conversations_encode_as_rendered_text_does(tokenizer: Tokenizer, library: Library, contents: list[str]) -> None:
    special = [token for token in (*tiny.SPECIAL, "<s>", "</s>", "<unk>") if library.token_to_id(token) is not None]
    for token in special:
        contents = [content.replace(token, "") for content in contents]
    if any(token in content for token in special for content in contents):
        return  # taking one out spelled another
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    rendered = tokenizer.render_chat(messages)
    assert tokenizer.encode_chat(messages) == library.encode(rendered, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", [tiny.byte_level, tiny.sentencepiece, tiny.converted_sentencepiece])
@given(content=TEXTS)
def test_look_alikes_in_content_stay_text(kind: Callable[[], Tokenizer], content: str) -> None:
    tokenizer = BYTE_LEVEL if kind is tiny.byte_level else SENTENCEPIECE

    def controls(ids: list[int]) -> list[int]:
        return [token_id for token_id in ids if tokenizer.is_special(token_id) and tokenizer.token_bytes(token_id) != b"<unk>"]

    ids = tokenizer.encode_chat(user(content))
    assert controls(ids) == controls(tokenizer.encode_chat(user("x")))
    if tokenizer is BYTE_LEVEL:
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.render_chat(user(content))


def test_look_alikes_in_a_unigram_vocabulary_stay_text() -> None:
    assert UNIGRAM.encode("a</s>") == [1, *tiny.unigram_library().encode("a</s>", add_special_tokens=False).ids]
    ids = UNIGRAM.encode_plain("hello </s>!")
    assert UNIGRAM.decode(ids) == "hello </s>!"
    assert 2 not in ids
    assert UNIGRAM.decode(UNIGRAM.encode_plain("hello hello")) == "hello hello"


def test_the_template_s_own_error_is_a_request_error() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        SENTENCEPIECE.encode_chat([*user("a"), *user("b")])
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequest, match="only user and assistant") as caught:
        SENTENCEPIECE.render_chat([{"role": "system", "content": "x"}])
    assert caught.value.param == "messages"


def test_without_a_template_there_is_no_chat() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        tiny.byte_level(None).encode_chat(user("x"))


def test_templates_may_trim_and_quote_content_with_look_alikes() -> None:
    tokenizer = tiny.byte_level("{{ messages[0].content | trim }}<|im_end|>{{ messages[0] | tojson }}")
    ids = tokenizer.encode_chat([{"content": "  <|im_end|> é "}])
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == '<|im_end|> é<|im_end|>{"content": "  <|im_end|> é "}'
    assert ids.count(tiny.IM_END_ID) == 1


def names(ids: list[int]) -> str:
    return b"".join(map(BYTE_LEVEL.token_bytes, ids)).decode()


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        # Parts of a message, messages, and what a template writes itself, side by side.
        (
            "{% for part in messages[0].content %}{{ part.text }}{% endfor %}",
            [{"content": [{"text": "<|im_"}, {"text": "end|>"}]}],
        ),
        ("{{ messages[0].content + messages[1].content }}", [{"content": "a<"}, {"content": "|im_end|>b"}]),
        ("{{ '<' + messages[0].content }}", [{"content": "|im_end|> x"}]),
        ("{{ messages[0].content + '>' }}", [{"content": "x <|im_end|"}]),
        ("{{ '<' + messages[0].content + '>' }}", [{"content": "|im_end|"}]),
        # Names within data, and data as JSON in ASCII.
        ("{{ messages[0].content | tojson }}", [{"content": {"<|im_end|>": "<|im_end|>"}}]),
        ("{{ messages[0].content | tojson(ensure_ascii=true) }}", [{"content": ["é<|im_end|>", "<|im_"]}]),
        ("{{ messages[0].content | lower | trim }}", [{"content": " <|im_end|>  "}]),
    ],
)
def test_no_piece_of_a_message_becomes_part_of_a_special_token(source: str, messages: list[dict[str, object]]) -> None:
    tokenizer = tiny.byte_level(source)
    ids = tokenizer.encode_chat(messages)
    assert not any(map(tokenizer.is_special, ids))
    assert names(ids) == tokenizer.render_chat(messages)


def test_special_tokens_in_messages_where_the_server_says_so() -> None:
    tokenizer = BYTE_LEVEL.with_rules(ChatRules(special_tokens_in_messages=True))
    content = "a<|im_end|>b"
    assert tokenizer.encode_chat(user(content)).count(tiny.IM_END_ID) == 2
    assert tokenizer.encode_chat(user(content)) == BYTE_LEVEL.encode(tokenizer.render_chat(user(content)))
    assert BYTE_LEVEL.encode_chat(user(content)).count(tiny.IM_END_ID) == 1


def test_bos_is_added_where_that_is_asked_for() -> None:
    template = "{{ messages[0].content }}"
    tokenizer = tiny.sentencepiece(template)
    bos = tokenizer.bos_token_id
    assert bos not in tokenizer.encode_chat(user("hello"))
    assert tokenizer.encode_chat(user("hello"), add_special_tokens=True) == [bos, *tokenizer.encode_chat(user("hello"))]
    assert tokenizer.encode("hello", add_special_tokens=False) == tokenizer.encode("hello")[1:]
    assert SENTENCEPIECE.encode_chat(user("hello"), add_special_tokens=True) == SENTENCEPIECE.encode_chat(user("hello"))


def test_tools_may_have_a_template_of_their_own() -> None:
    library = tiny.byte_level_library().to_str()
    tokenizer = Tokenizer(library, chat_template="plain", tool_template="{{ tools | length }} tools")
    assert tokenizer.render_chat(user("a")) == tokenizer.render_chat(user("a"), tools=[]) == "plain"
    assert tokenizer.render_chat(user("a"), tools=[{}, {}]) == "2 tools"
    assert tokenizer.decode(tokenizer.encode_chat(user("a"), tools=[{}])) == "1 tools"
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(library, tool_template="x").render_chat(user("a"))


def test_a_template_of_the_request_s_own() -> None:
    source = "{{ messages[0].content }}{{ eos_token }}"
    with pytest.raises(InvalidRequest, match="--trust-request-chat-template") as caught:
        BYTE_LEVEL.encode_chat(user("a"), chat_template=source)
    assert caught.value.param == "chat_template"
    tokenizer = BYTE_LEVEL.with_rules(ChatRules(trust_request_chat_template=True))
    assert tokenizer.encode_chat(user("<|im_end|>"), chat_template=source) == [*BYTE_LEVEL.encode_plain("<|im_end|>"), 2]
    assert tokenizer.encode_chat(user("a")) == BYTE_LEVEL.encode_chat(user("a"))
    for broken in ("{% for %}", "{{ x", "{% include 'x' %}" + "{% if a %}" * 300):
        with pytest.raises(InvalidRequest, match="chat_template: ") as caught:
            tokenizer.encode_chat(user("a"), chat_template=broken)
        assert caught.value.param == "chat_template"


@pytest.mark.parametrize("depth", [60, 100, 5000])
def test_deeply_nested_messages_are_refused(depth: int) -> None:
    nested: object = "x"
    for _ in range(depth):
        nested = [nested]
    tokenizer = tiny.byte_level("{{ extra | tojson | length }}")
    if depth < 64:
        assert tokenizer.decode(tokenizer.encode_chat(user("a"), extra=nested)) == str(2 * depth + 3)
        return
    for options, name in (({"extra": nested}, "extra"), ({"messages": [{"content": nested}]}, "messages")):
        with pytest.raises(InvalidRequest, match=f"{name} must be nested at most 64 levels deep"):
            tokenizer.encode_chat(**({"messages": user("a")} | options))  # type: ignore[arg-type]


# --- files that cannot be used ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"model": {}}', '{"model": {"vocab": 3}, "decoder": {}}'])
def test_broken_tokenizer_files(text: str) -> None:
    with pytest.raises(ModelLoadError, match="tokenizer"):
        Tokenizer(text)


def test_unsupported_tokenizers_are_refused() -> None:
    library = Library(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ModelLoadError, match="no decoder"):
        Tokenizer(library.to_str())
    library.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        Tokenizer(library.to_str())
    with pytest.raises(ModelLoadError, match="<bos>"):
        Tokenizer(tiny.byte_level_library().to_str(), bos_token="<bos>", add_bos=True)
    with pytest.raises(ModelLoadError, match=r"chat template, line 2"):
        tiny.byte_level("\n{% for %}")


# --- data beside the checkout -----------------------------------------------------------------------------------------


def test_hostile_strings_survive_a_conversation(shared: Path) -> None:
    for text in json.loads((shared / "data/fuzz/blns.json").read_text()):
        ids = BYTE_LEVEL.encode_chat(user(text))
        assert b"".join(map(BYTE_LEVEL.token_bytes, ids)).decode() == BYTE_LEVEL.render_chat(user(text))
