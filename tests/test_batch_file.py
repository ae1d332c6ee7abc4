"""Input lines of every format, and files of every sort."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve import batch_file
from jaxserve.batch_file import (
    CHAT_URL,
    COMPLETIONS_URL,
    InputFile,
    InputLine,
    custom_id_of,
    may_want_grammars,
    parse_json_line,
    parse_text_line,
)
from jaxserve.errors import ConfigError, InvalidRequest


def batch(**changes: Any) -> bytes:
    line = {"custom_id": "a", "method": "POST", "url": CHAT_URL, "body": {"messages": []}} | changes
    return json.dumps({key: value for key, value in line.items() if value is not ...}).encode()


# --- lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'"a prompt"', InputLine(7, None, COMPLETIONS_URL, {"prompt": "a prompt"}, False)),
        (b' "\\u00e9\\n" \r', InputLine(7, None, COMPLETIONS_URL, {"prompt": "é\n"}, False)),
        (b'{"prompt": "p", "top_p": 0.5}', InputLine(7, None, COMPLETIONS_URL, {"prompt": "p", "top_p": 0.5}, False)),
        (b'{"prompt": [1, 2], "custom_id": "x"}', InputLine(7, "x", COMPLETIONS_URL, {"prompt": [1, 2]}, False)),
        (b'{"messages": [1]}', InputLine(7, None, CHAT_URL, {"messages": [1]}, False)),
        (batch(), InputLine(7, "a", CHAT_URL, {"messages": []}, True)),
        (batch(url=COMPLETIONS_URL, body={}), InputLine(7, "a", COMPLETIONS_URL, {}, True)),
        ('"\\ud83d\\ude00 😀"'.encode(), InputLine(7, None, COMPLETIONS_URL, {"prompt": "😀 😀"}, False)),
    ],
)
def test_json_lines(line: bytes, expected: InputLine) -> None:
    assert parse_json_line(7, line) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b'{"prompt": "a"} extra', "not JSON"),
        (b'{"prompt": "a', "not JSON"),
        (b'{"prompt": "a", "top_p": NaN}', "NaN is not JSON"),
        (b'{"prompt": "a", "top_p": -Infinity}', "-Infinity is not JSON"),
        (b'"a\nb"', "not JSON"),
        (b"1" * 5000, "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1, 2]", "expected a JSON string or object, found list"),
        (b"null", "found NoneType"),
        (b'"\xff"', "not UTF-8: invalid start byte at byte 1"),
        (b'"\\ud800"', "half of a surrogate pair"),
        (b'{"custom_id": "\\uDC00", "prompt": "a"}', "half of a surrogate pair"),
        (b"{}", "expected one of: prompt, messages"),
        (b'{"prompt": "a", "messages": []}', "expected one of: prompt, messages"),
        (b'{"prompt": "a", "custom_id": 7}', "custom_id must be a string that is not empty, found 7"),
        (b'{"prompt": "a", "custom_id": ""}', "custom_id must be"),
        (batch(custom_id=...), "custom_id is missing"),
        (batch(method=...), "method is missing"),
        (batch(url=...), "url is missing"),
        (batch(body=...), "body is missing"),
        (batch(method="GET"), "method must be POST, found 'GET'"),
        (batch(url="/v1/embeddings"), "url must be one of"),
        (batch(body=[1]), "body must be an object, found list"),
        (batch(model="m"), "unknown field 'model'"),
    ],
)
def test_bad_json_lines(line: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_json_line(7, line)
    assert message in str(caught.value)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_a_line_or_an_invalid_request(line: bytes) -> None:
    for parse in (parse_json_line, parse_text_line):
        with suppress(InvalidRequest):
            assert parse(1, line).number == 1
    custom_id_of(line)


def test_text_lines() -> None:
    assert parse_text_line(3, b'{"not": "json"}').body == {"prompt": '{"not": "json"}'}
    assert parse_text_line(3, "日本 ".encode()).body == {"prompt": "日本 "}
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        parse_text_line(3, b"\xc3")


@pytest.mark.parametrize(
    ("line", "custom_id"),
    [(batch(url="/nowhere"), "a"), (b'{"custom_id": 3}', None), (b'{"custom_id": "a"', None), (b"[]", None), (b"\xff", None)],
)
def test_custom_id_of_bad_lines(line: bytes, custom_id: str | None) -> None:
    assert custom_id_of(line) == custom_id


# --- files ------------------------------------------------------------------------------------------------------------


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    return path


def test_lines_are_numbered_and_blank_ones_left_out(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf\n  \t\r\n"a"\r\n\n\x0c\n"b"'
    file = InputFile(write(tmp_path, content))
    assert list(file.lines()) == [(3, b'"a"'), (6, b'"b"')]
    assert (file.num_lines, file.num_requests, file.first_request) == (6, 2, 3)
    assert file.sha256 == hashlib.sha256(content).hexdigest()


def test_the_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    assert list(InputFile(write(tmp_path, b'\xef\xbb\xbf"a"\n')).lines()) == [(1, b'"a"')]


@pytest.mark.parametrize("content", [b"", b"\n", b"\n\n"])
def test_a_file_without_requests(tmp_path: Path, content: bytes) -> None:
    file = InputFile(write(tmp_path, content))
    assert list(file.lines()) == []
    assert (file.num_lines, file.num_requests, file.first_request) == (len(content), 0, 0)


@pytest.mark.parametrize("length", range(8, 33))
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, end: bytes
) -> None:
    monkeypatch.setattr(batch_file, "MAX_LINE_BYTES", 10)
    content = b"x" * length + b"\n" + b"next" + end
    file = InputFile(write(tmp_path, content))
    (_, first), second = file.lines()
    assert second == (2, b"next")
    assert file.sha256 == hashlib.sha256(content).hexdigest()
    if length <= 10:
        assert parse_text_line(1, first).body["prompt"] == "x" * length
    else:
        assert len(first) == 11
        for parse in (parse_text_line, parse_json_line):
            with pytest.raises(InvalidRequest, match="longer than 10 bytes"):
                parse(1, first)


def test_a_file_that_changes_during_the_run_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, b'"a"\n"b"\n')
    file = InputFile(path)
    path.write_bytes(b'"a"\n"c"\n')
    lines = file.lines()
    assert next(lines) == (1, b'"a"')
    assert next(lines) == (2, b'"c"')
    with pytest.raises(ConfigError, match="changed during the run"):
        next(lines)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl: No such file"):
        InputFile(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="not a regular file"):
        InputFile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        InputFile(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = write(tmp_path, b'"a"\n')
    path.chmod(0)
    with pytest.raises(ConfigError, match="Permission denied"):
        InputFile(path)


def test_fields_that_restrict_outputs_are_seen_from_afar(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    for content, expected in (
        ("", False),
        ('{"prompt": "the tools"}\n' * 3, False),
        ('{"a": 1}\n{"response_format": {}}', True),
    ):
        path.write_text(content)
        assert may_want_grammars(path) == expected
    with pytest.raises(ConfigError, match="nowhere: No such file"):
        may_want_grammars(tmp_path / "nowhere")
