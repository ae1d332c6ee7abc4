"""Reading a JSON body field by field, so that every error names the field, what it must be and what was found.

Owns types, ranges, unknown fields and fields that only work at a value which changes nothing. Knows no field by name.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxserve.errors import InvalidRequest

MAX_SHOWN = 60


def describe(value: Any) -> str:
    """A JSON value for an error message: its type and the beginning of it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return f"string {value!r}" if len(value) <= MAX_SHOWN else f"string {value[:MAX_SHOWN]!r}..."
    if isinstance(value, (list, dict)):
        return f"{'array' if isinstance(value, list) else 'object'} of {len(value)}"
    return f"{'integer' if isinstance(value, int) else 'number'} {repr(value)[:MAX_SHOWN]}"


def invalid(name: str, expected: str, found: Any) -> InvalidRequest:
    """The error for a field of the wrong type or value."""
    return InvalidRequest(f"{name} must be {expected}, found {describe(found)}", param=name)


def parse_json(data: bytes) -> Any:
    """The value that `data` spells.

    Raises:
        InvalidRequest: it is not JSON in UTF-8, or nested too deeply to read.
    """
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        raise InvalidRequest(f"the body is not JSON: {error}") from None


def check_text(name: str, text: str) -> str:
    """`text`, which must be whole characters.

    Raises:
        InvalidRequest: JSON can spell half of a surrogate pair, which no encoding of text can.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise InvalidRequest(f"{name} must be text, found half of a surrogate pair ({found})", param=name) from None
    return text


class Body:
    """The fields of a JSON object. A field that is absent or null has its default.

    Args:
        value: the parsed body, or an object inside it.
        known: names of all fields that may be there.
        where: what the object is called in errors; "" for the body itself.

    Raises:
        InvalidRequest: `value` is no object, or has an unknown field (the nearest known one is named).
    """

    def __init__(self, value: Any, known: Collection[str], *, where: str = "") -> None:
        if not isinstance(value, Mapping):
            what = where or "the body"
            raise InvalidRequest(f"{what} must be a JSON object, found {describe(value)}", param=where or None)
        self._values = value
        self._where = where
        for name in value:
            if name not in known:
                near = difflib.get_close_matches(name[:64].lower(), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise InvalidRequest(f"unknown field {self.path(name)!r:.200}{hint}", param=self.path(name)[:200])

    def path(self, name: str) -> str:
        """The field's name as errors have it, such as `stream_options.include_usage`."""
        return f"{self._where}.{name}" if self._where else name

    def get(self, name: str) -> Any:
        """The value as it is, or None."""
        return self._values.get(name)

    def require(self, name: str, expected: str) -> Any:
        """The value, which must be there."""
        value = self._values.get(name)
        if value is None:
            found = "null" if name in self._values else "nothing"
            raise InvalidRequest(f"{self.path(name)} must be {expected}, found {found}", param=self.path(name))
        return value

    def integer(self, name: str, default: int | None = None, *, low: int | None = None, high: int | None = None) -> Any:
        """An integer in `low..high`; numbers with a point and booleans are none."""
        value = self._values.get(name)
        if value is None:
            return default
        in_range = type(value) is int and (low is None or value >= low) and (high is None or value <= high)
        if not in_range:
            limits = [f"at least {low}"] if low is not None else []
            limits += [f"at most {high}"] if high is not None else []
            raise invalid(self.path(name), " ".join(["an integer", " and ".join(limits)]).rstrip(), value)
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self._values.get(name)
        if value is None:
            return default
        try:
            number = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise invalid(self.path(name), "a finite number", value)
        return number

    def boolean(self, name: str) -> bool:
        """A boolean, by default false."""
        value = self._values.get(name)
        if value is None:
            return False
        if type(value) is not bool:
            raise invalid(self.path(name), "true or false", value)
        return value

    def string(self, name: str) -> str | None:
        """A string of whole characters, or None."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise invalid(self.path(name), "a string", value)
        return check_text(self.path(name), value)

    def refuse_unless(self, name: str, no_op: Iterable[Any]) -> None:
        """Accept only null or one of `no_op`, at which a field that is not implemented changes nothing.

        Raises:
            InvalidRequest: the value asks for something.
        """
        value = self._values.get(name)
        if value is None or any(type(value) is type(accepted) and value == accepted for accepted in no_op):
            return
        accepted = " or ".join(map(json.dumps, [*no_op, None]))
        raise InvalidRequest(
            f"{self.path(name)} is not supported other than as {accepted}, found {describe(value)}", param=self.path(name)
        )
