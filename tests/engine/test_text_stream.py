"""TextStream against a slow oracle: decode all bytes at once, then find the stop string."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.text import Tokenizer
from jaxserve.engine.text_stream import TextDelta, TextStream
from tests.engine import tiny_tokenizers as tiny

BYTE_LEVEL, SENTENCEPIECE = tiny.byte_level(), tiny.sentencepiece()
TOKENIZERS = [pytest.param(BYTE_LEVEL, id="byte_level"), pytest.param(SENTENCEPIECE, id="sentencepiece")]

# Few characters, so that stop strings match, overlap and nest; all of one, two, three and four bytes.
TEXTS = st.text(alphabet="abé€😀 ", max_size=30)
STOPS = st.lists(st.text(alphabet="abé€😀 \ufffd", min_size=1, max_size=5), max_size=4).map(tuple)


def byte_id(byte: int) -> int:
    """The byte-level token of one byte."""
    return next(i for i in range(3, 259) if BYTE_LEVEL.token_bytes(i) == bytes([byte]))


BYTE_IDS = [byte_id(byte) for byte in range(256)]
IDS = st.one_of(
    TEXTS.map(BYTE_LEVEL.encode_plain),
    st.lists(st.sampled_from([BYTE_IDS[b] for b in (*b"ab ", *"é€😀".encode(), 0xFF, 0xC0, 0x80, 0xED)]), max_size=20),
    st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=20),
)


def oracle(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Cut before the stop string that is complete first; of several that end together, the longest."""
    for end in range(len(text) + 1):
        matched = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if matched:
            return text[: end - max(matched)], True
    return text, False


def stream_all(stream: TextStream, ids: list[int], sizes: list[int]) -> list[TextDelta]:
    deltas: list[TextDelta] = []
    position = 0
    while position < len(ids) and not (deltas and deltas[-1].stopped):
        size = sizes[len(deltas) % len(sizes)] if sizes else 1
        deltas.append(stream.push(ids[position : position + size]))
        position += size
    return [*deltas, stream.flush()]


SIZES = st.lists(st.integers(1, 4), max_size=4)


@given(ids=IDS, stops=STOPS, sizes=SIZES)
def test_joined_deltas_are_the_whole_text_cut_at_the_stop(ids: list[int], stops: tuple[str, ...], sizes: list[int]) -> None:
    whole = b"".join(map(BYTE_LEVEL.text_bytes, ids)).decode("utf-8", "replace")
    deltas = stream_all(TextStream(BYTE_LEVEL, stops), ids, sizes)
    expected, stopped = oracle(whole, stops)
    assert "".join(delta.text for delta in deltas) == expected
    assert deltas[-1].stopped == stopped


@given(text=TEXTS, stops=STOPS, sizes=SIZES)
def test_sentencepiece_streams_too(text: str, stops: tuple[str, ...], sizes: list[int]) -> None:
    ids = SENTENCEPIECE.encode_plain(text)
    deltas = stream_all(TextStream(SENTENCEPIECE, stops), ids, sizes)
    # An output continues its prompt, so the space that encoding put first is text.
    expected, _ = oracle(" " + text if ids else text, stops)
    assert "".join(delta.text for delta in deltas) == expected


@given(ids=IDS, stops=STOPS, sizes=SIZES)
def test_nothing_is_given_out_that_may_have_to_be_taken_back(ids: list[int], stops: tuple[str, ...], sizes: list[int]) -> None:
    """Whatever comes next, what is out stays a prefix of the answer; and no more than that is held back."""
    stream = TextStream(BYTE_LEVEL, stops)
    out = ""
    for position, token_id in enumerate(ids):
        out += stream.push([token_id]).text
        data = b"".join(map(BYTE_LEVEL.text_bytes, ids[: position + 1]))
        whole_characters = max((data[:end].decode("utf-8", "replace") for end in _stable_ends(data)), key=len, default="")
        text, stopped = oracle(whole_characters, stops)
        if stopped:
            assert out == text
            return
        if len(data) > 1 and data[-2] == 0xED and data[-1] >= 0xA0:
            # CPython's decoder waits for the third byte of an encoded surrogate, although it is invalid already.
            assert text.startswith(out)
            continue
        held = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        assert out == text[: len(text) - held]


def _stable_ends(data: bytes) -> list[int]:
    """Lengths of prefixes whose decoding is the same whatever follows: two different continuations agree on it."""
    ends = []
    for end in range(max(0, len(data) - 4), len(data) + 1):
        prefix = data[:end].decode("utf-8", "replace")
        if all((data + more).decode("utf-8", "replace").startswith(prefix) for more in (b"", b"a", *CONTINUATIONS)):
            ends.append(end)
    return ends


CONTINUATIONS = tuple(bytes([a, *b]) for a in (0x80, 0x90, 0xA0, 0xBF) for b in ((), (0x80,), (0x80, 0x80)))


@given(ids=IDS, stops=STOPS, sizes=SIZES, min_tokens=st.integers(0, 12))
def test_stop_strings_count_after_min_tokens(
    ids: list[int], stops: tuple[str, ...], sizes: list[int], min_tokens: int
) -> None:
    one_by_one = stream_all(TextStream(BYTE_LEVEL, stops, min_tokens=min_tokens), ids, [])
    grouped = stream_all(TextStream(BYTE_LEVEL, stops, min_tokens=min_tokens), ids, sizes)
    text = "".join(delta.text for delta in one_by_one)
    assert "".join(delta.text for delta in grouped) == text
    whole = b"".join(map(BYTE_LEVEL.text_bytes, ids)).decode("utf-8", "replace")
    # Half a character at the very end is text of the token that began it.
    free = whole if len(ids) <= min_tokens else TextStream(BYTE_LEVEL).push(ids[:min_tokens]).text
    assert text.startswith(free)
    assert text == free + oracle(whole[len(free) :], stops)[0]


@given(ids=IDS, stops=STOPS, sizes=SIZES)
def test_every_token_is_accounted_for_once(ids: list[int], stops: tuple[str, ...], sizes: list[int]) -> None:
    stream = TextStream(BYTE_LEVEL, stops)
    deltas = stream_all(stream, ids, sizes)
    offsets = [offset for delta in deltas for offset in delta.offsets]
    text = "".join(delta.text for delta in deltas)
    starts = [len(TextStream(BYTE_LEVEL).push(ids[:i]).text) for i in range(len(ids))]
    if deltas[-1].stopped:
        assert offsets == [start for start in starts[: stream.num_tokens] if start < len(text)]
    else:
        assert offsets == starts
    out = 0
    for delta in deltas[:-1]:
        out += len(delta.text)
        assert all(offset < out for offset in delta.offsets)


@given(ids=IDS, stops=STOPS, sizes=SIZES, min_tokens=st.integers(0, 12))
def test_a_stop_string_that_is_to_stay_is_the_end(
    ids: list[int], stops: tuple[str, ...], sizes: list[int], min_tokens: int
) -> None:
    cut = TextStream(BYTE_LEVEL, stops, min_tokens=min_tokens)
    kept = TextStream(BYTE_LEVEL, stops, min_tokens=min_tokens, include_stop=True)
    without, deltas = stream_all(cut, ids, []), stream_all(kept, ids, sizes)
    text = "".join(delta.text for delta in without)
    assert deltas[-1].stop == without[-1].stop
    assert "".join(delta.text for delta in deltas) == text + (without[-1].stop or "")
    assert kept.num_tokens == cut.num_tokens
    offsets = [offset for delta in deltas for offset in delta.offsets]
    starts = [len(TextStream(BYTE_LEVEL).push(ids[:i]).text) for i in range(kept.num_tokens)]
    assert offsets == starts  # the tokens of a stop string that stays are accounted for, too


SHOWN = frozenset({tiny.IM_END_ID, 10**6})


@given(ids=IDS, stops=STOPS, sizes=SIZES)
def test_names_of_special_tokens_are_text_where_they_are_to_be_shown(
    ids: list[int], stops: tuple[str, ...], sizes: list[int]
) -> None:
    for shown in (SHOWN, BYTE_LEVEL.special_ids):
        named = [BYTE_LEVEL.token_bytes(i) if i in shown or not BYTE_LEVEL.is_special(i) else b"" for i in ids]
        deltas = stream_all(TextStream(BYTE_LEVEL, stops, shown_special=shown), ids, sizes)
        whole = b"".join(named).decode("utf-8", "replace")
        assert "".join(delta.text for delta in deltas) == oracle(whole, stops)[0]


def test_the_name_of_a_shown_token_comes_at_once_and_may_stop() -> None:
    ids = [*BYTE_LEVEL.encode_plain("hi"), tiny.IM_START_ID, tiny.IM_END_ID]
    stream = TextStream(BYTE_LEVEL, shown_special=SHOWN)
    assert [stream.push([token_id]).text for token_id in ids] == ["h", "i", "", "<|im_end|>"]
    stream = TextStream(BYTE_LEVEL, ("im_",), shown_special=SHOWN)
    assert [stream.push([token_id]).text for token_id in ids] == ["h", "", "", "i<|"]


def test_a_character_over_four_tokens_comes_whole() -> None:
    ids = [BYTE_IDS[byte] for byte in "😀".encode()]
    stream = TextStream(BYTE_LEVEL)
    assert [stream.push([token_id]).text for token_id in ids] == ["", "", "", "😀"]


def test_invalid_bytes_come_as_soon_as_they_are_certain() -> None:
    stream = TextStream(BYTE_LEVEL)
    assert [stream.push([BYTE_IDS[byte]]).text for byte in b"\xf0\x9fa\xff"] == ["", "", "\ufffda", "\ufffd"]
    assert stream.push([BYTE_IDS[0xE2]]).text == ""
    assert stream.flush().text == "\ufffd"


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["A B C D", "EFGHI", "J K"], ("DEFGHIJ",), ["A B C ", "", ""]),
        (["N O", " ", "P ", "Q R"], ("O P Q",), ["N ", "", "", ""]),
        (["?", "\n", "Alice"], ("\n",), ["?", "", ""]),
        (["DE", "DEF"], ("DEF",), ["", "DE"]),
        (["aab", "aabaaa"], ("aabaaa",), ["", "aab"]),
        (["abcd"], ("abcd", "c"), ["ab"]),
        (["xab"], ("ab", "xab", "b"), [""]),
        (["ab", "x"], ("abc",), ["", "abx"]),
    ],
)
def test_stop_strings(pieces: list[str], stops: tuple[str, ...], expected: list[str]) -> None:
    stream = TextStream(BYTE_LEVEL, stops)
    deltas = [stream.push(BYTE_LEVEL.encode_plain(piece)) for piece in pieces]
    assert [delta.text for delta in deltas] == expected
    stopped = any(stop in "".join(pieces) for stop in stops)
    assert deltas[-1].stopped == stopped
    assert stream.flush().text == ""


def test_tokens_after_the_stop_are_not_counted() -> None:
    stream = TextStream(BYTE_LEVEL, ("lo",))
    stream.push(BYTE_LEVEL.encode_plain("x hello"))
    stream.push(BYTE_LEVEL.encode_plain("world"))
    assert stream.num_tokens == len(BYTE_LEVEL.encode_plain("x hello"))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_special_tokens_give_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_id is not None
    stream = TextStream(tokenizer, ("<",))
    assert stream.push([tokenizer.eos_token_id, *tokenizer.encode_plain("a"), tokenizer.eos_token_id]).text.strip() == "a"
    assert not stream.flush().stopped


@pytest.mark.parametrize("stops", [(), ("a" * 200 + "b", "é" * 100)], ids=["no_stop", "long_stops"])
def test_cost_per_token_does_not_grow(stops: tuple[str, ...]) -> None:
    """The second half of a long output costs what the first half did; decoding anew each time would cost three times it."""
    ids = BYTE_LEVEL.encode_plain("a")
    stream = TextStream(BYTE_LEVEL, stops)
    halves = []
    for _ in range(2):
        started = time.process_time()
        for _ in range(40_000):
            stream.push(ids)
        halves.append(time.process_time() - started)
    assert halves[1] < 2 * halves[0] + 0.1
