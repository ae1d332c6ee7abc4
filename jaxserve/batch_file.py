"""Files of batches, offline and over HTTP: lines with a request each, in three formats, and lines with what came of them.

Owns what a line may be, and reading a file of any size without holding it. Knows the API's URLs, and of its fields no more
than the names of some: a body is checked where it is turned into a request. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jaxserve.errors import ConfigError, InvalidRequest

MAX_LINE_BYTES = 16 * 1024 * 1024
COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
URLS = (COMPLETIONS_URL, CHAT_URL)
GRAMMAR_FIELDS = ("response_format", "structured_outputs", "tools")

_BATCH_KEYS = ("custom_id", "method", "url", "body")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class InputLine:
    """One request.

    Attributes:
        number: of the line in the file, from 1.
        custom_id: the caller's name for it, or None.
        url: one of `URLS`.
        body: as the API has it, unchecked.
        is_batch: whether the line is in OpenAI's batch format, and so its result.
    """

    number: int
    custom_id: str | None
    url: str
    body: dict[str, Any]
    is_batch: bool


class InputFile:
    """A file of requests, read twice and never held: once for its hash and size, once for its lines.

    Attributes:
        sha256: hex digest of the content.
        num_lines: all lines, and so the highest line number.
        num_requests: lines that are not blank.
        first_request: number of the first line that is not blank; 0 if there is none.

    Raises:
        ConfigError: when the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_lines = self.num_requests = self.first_request = 0
        if path.exists() and not path.is_file():
            raise ConfigError(f"input {path} is not a regular file; the run reads it twice")
        digest = hashlib.sha256()
        for number, line in self._read(digest):
            self.num_lines = number
            if line.strip():
                self.num_requests += 1
                self.first_request = self.first_request or number
        self.sha256 = digest.hexdigest()

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines that are not blank with their numbers; one over `MAX_LINE_BYTES` is cut to one byte more than that.

        Raises:
            ConfigError: after the last line, if the content is no longer what it was; or when it cannot be read.
        """
        digest = hashlib.sha256()
        for number, line in self._read(digest):
            if line.strip():
                yield number, line
        if digest.hexdigest() != self.sha256:
            raise ConfigError(f"input {self.path} changed during the run; run again with --restart once it is still")

    def _read(self, digest: Any) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                for number, chunk in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                    digest.update(chunk)
                    _skip_rest_of_line(file, chunk, digest)
                    line = chunk.rstrip(b"\r\n")
                    yield number, line.removeprefix(_BOM) if number == 1 else line
        except OSError as error:
            raise ConfigError(f"input {self.path}: {error.strerror}") from None


def may_want_grammars(path: Path) -> bool:
    """Whether any body in the file has one of the fields that restrict outputs; a name of one within a text counts too.

    Raises:
        ConfigError: when the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return False
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return any(content.find(f'"{name}"'.encode()) >= 0 for name in GRAMMAR_FIELDS)
    except OSError as error:
        raise ConfigError(f"input {path}: {error.strerror}") from None


def _skip_rest_of_line(file: BinaryIO, chunk: bytes, digest: Any) -> None:
    while len(chunk) > MAX_LINE_BYTES and not chunk.endswith(b"\n"):
        chunk = file.readline(MAX_LINE_BYTES + 1)
        digest.update(chunk)


def parse_text_line(number: int, line: bytes) -> InputLine:
    """A line that is a prompt as it stands.

    Raises:
        InvalidRequest: when it is too long or not UTF-8.
    """
    return InputLine(number, None, COMPLETIONS_URL, {"prompt": _decode(line)}, False)


def parse_json_line(number: int, line: bytes) -> InputLine:
    """A line that is a JSON string (a prompt), an object of a request's own fields, or a request in batch format.

    Raises:
        InvalidRequest: when it is too long, not UTF-8, not JSON, or none of these.
    """
    value = _parse_json(_decode(line))
    if isinstance(value, str):
        return InputLine(number, None, COMPLETIONS_URL, {"prompt": value}, False)
    if not isinstance(value, dict):
        raise InvalidRequest(f"expected a JSON string or object, found {type(value).__name__}")
    custom_id = _custom_id(value)
    if "body" in value or "url" in value:
        return _parse_batch(number, value, URLS)
    body = {key: item for key, item in value.items() if key != "custom_id"}
    if ("prompt" in body) == ("messages" in body):
        raise InvalidRequest("expected one of: prompt, messages, or the batch format's custom_id, method, url and body")
    return InputLine(number, custom_id, COMPLETIONS_URL if "prompt" in body else CHAT_URL, body, False)


def parse_batch_line(number: int, line: bytes, url: str) -> InputLine:
    """A line in batch format, and nothing else, whose request is for `url`.

    Raises:
        InvalidRequest: when it is too long, not UTF-8, not JSON, or not such a line; with the key at fault, if it is one.
    """
    value = _parse_json(_decode(line))
    if not isinstance(value, dict):
        raise InvalidRequest(f"expected a JSON object, found {type(value).__name__}")
    return _parse_batch(number, value, (url,))


def answered(result_id: str, custom_id: str | None, request_id: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """The output line in batch format for a line that was answered, be it with an error: a status and a body, as over HTTP."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": result_id, "custom_id": custom_id, "response": response, "error": None}


def unanswered(result_id: str, custom_id: str | None, code: str, message: str) -> dict[str, Any]:
    """The output line in batch format for a line that nobody got to."""
    return {"id": result_id, "custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}


def custom_id_of(line: bytes) -> str | None:
    """The custom_id of a line that is otherwise wrong, so that its error can carry it."""
    with suppress(InvalidRequest):
        value = _parse_json(_decode(line))
        if isinstance(value, dict) and isinstance(value.get("custom_id"), str):
            return value["custom_id"]
    return None


def _parse_batch(number: int, value: dict[str, Any], urls: Sequence[str]) -> InputLine:
    for key in _BATCH_KEYS:
        if value.get(key) is None:
            raise InvalidRequest(f"{key} is missing", param=key)
    unknown = sorted(set(value) - set(_BATCH_KEYS))
    if unknown:
        raise InvalidRequest(f"unknown field {unknown[0]!r}; a batch line has {', '.join(_BATCH_KEYS)}", param=unknown[0])
    custom_id = _custom_id(value)
    if value["method"] != "POST":
        raise InvalidRequest(f"method must be POST, found {value['method']!r:.100}", param="method")
    if value["url"] not in urls:
        expected = urls[0] if len(urls) == 1 else f"one of {', '.join(urls)}"
        raise InvalidRequest(f"url must be {expected}, found {value['url']!r:.100}", param="url")
    if not isinstance(value["body"], dict):
        raise InvalidRequest(f"body must be an object, found {type(value['body']).__name__}", param="body")
    return InputLine(number, custom_id, value["url"], value["body"], True)


def _custom_id(value: dict[str, Any]) -> str | None:
    custom_id = value.get("custom_id")
    if custom_id is not None and (not isinstance(custom_id, str) or not custom_id):
        raise InvalidRequest(f"custom_id must be a string that is not empty, found {custom_id!r:.100}", param="custom_id")
    return custom_id


def _decode(line: bytes) -> str:
    if len(line) > MAX_LINE_BYTES:
        raise InvalidRequest(f"longer than {MAX_LINE_BYTES:,} bytes")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"not UTF-8: {error.reason} at byte {error.start}") from None


def _parse_json(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise InvalidRequest("holds half of a surrogate pair (\\ud800 to \\udfff), which is not a character") from None
    except ValueError as error:
        raise InvalidRequest(f"not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("not usable JSON: nested too deeply") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
