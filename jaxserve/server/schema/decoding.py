"""From the bytes of a body to a struct, or to an error that names the field, what it must be and what was found.

The decoder stops at the first thing that is wrong and says where. The rest of the message is found here, once a body has
failed: what was expected, from the type at that place, and what is there, from the body read again without a type. Knows no
field by name.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import inspect as types

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.body import accepted_of, is_one_of
from jaxserve.server.schema.words import expected_of, fits, found_of, plural_of

MAX_DEPTH = 64
"""Objects and arrays inside each other, in a value whose shape is the caller's."""

MAX_NAME = 200

BYTES_PER_BRACKET = 8
"""A large body has at most one bracket or brace for so many bytes; text, code and token ids have fewer. One made of only
small arrays takes many times its size and, while it is decoded, the interpreter from everyone."""

MAX_EXPLAINED_BYTES = 512 * 1024
"""What is wrong with a larger body is said in the decoder's words: for better ones, all of it would be read again, slowly."""

_PLACE = re.compile(r" - at `(?:key` in `)?(\$[^`]*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\]")
_MISSING = re.compile(r"^Object missing required field `(\w+)`")
_IN_KEY = " - at `key` in `"


def decode[B: msgspec.Struct](data: bytes | Mapping[str, Any], cls: type[B]) -> B:
    """The struct that a body spells, as JSON in UTF-8 or already parsed.

    Raises:
        InvalidRequest: it is no JSON, nested too deeply, or not as `cls` has it.
    """
    if isinstance(data, bytes):
        check_crumbs(data)
    try:
        return _decoder(cls).decode(data) if isinstance(data, bytes) else msgspec.convert(data, cls)
    except msgspec.ValidationError as error:
        if isinstance(data, bytes) and len(data) > MAX_EXPLAINED_BYTES:
            raise _in_brief(str(error)) from None
        # Whether all of it is JSON comes first: the decoder reads no further than the first wrong field.
        value = parse_json(data) if isinstance(data, bytes) else data
        raise _explain(str(error), value, _type_of(cls)) from None
    except msgspec.DecodeError as error:
        value = parse_json(data) if isinstance(data, bytes) else data
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def decode_part[B: msgspec.Struct](where: str, value: Mapping[str, Any], cls: type[B]) -> B:
    """The struct that an object inside a body spells; `where` is what errors call it.

    Raises:
        InvalidRequest: it is not as `cls` has it.
    """
    try:
        return msgspec.convert(value, cls)
    except msgspec.ValidationError as error:
        raise _explain(str(error), value, types.type_info(cls), where) from None


@functools.cache
def _decoder[B: msgspec.Struct](cls: type[B]) -> msgspec.json.Decoder[B]:
    return msgspec.json.Decoder(cls)


@functools.cache
def _type_of(cls: type) -> types.Type:
    """As `inspect` has it, which takes milliseconds to make."""
    return types.type_info(cls)


def invalid(name: str, expected: str, found: Any) -> InvalidRequest:
    """The error for a field whose value is wrong in a way that its type cannot say."""
    return InvalidRequest(f"{name} must be {expected}, found {found_of(found)}", param=name)


def unknown_field(where: str, name: str, known: Collection[str]) -> InvalidRequest:
    """The error for a field that an object does not have, with the nearest that it has.

    Args:
        where: what the object is called in errors; "" for the body itself.
    """
    near = difflib.get_close_matches(name[:64].lower(), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    path = _join(where, name)
    return InvalidRequest(f"unknown field {path!r:.200}{hint}", param=path[:MAX_NAME])


def check_depth(name: str, value: Any, limit: int = MAX_DEPTH) -> None:
    """Refuse a value that is nested more deeply than `limit`.

    Raises:
        InvalidRequest: naming `name`.
    """
    level = [value]
    for _ in range(limit):
        level = [part for outer in level for part in _parts(outer)]
        if not level:
            return
    raise InvalidRequest(f"{name} must have at most {limit} objects and arrays inside each other", param=name)


def _parts(value: Any) -> list[Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [part for part in parts if isinstance(part, (dict, list))] if parts else []


def parse_json(data: bytes) -> Any:
    """The value that `data` spells.

    Raises:
        InvalidRequest: it is not JSON in UTF-8 or nested too deeply, or it has a number or a text that JSON should not spell.
    """
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    for path, leaf in _leaves("", value):
        if isinstance(leaf, str):
            check_text(path, leaf)
        elif isinstance(leaf, float) and not math.isfinite(leaf):
            raise InvalidRequest(f"{path} must be a finite number, found {found_of(leaf)}", param=path or None)
    return value


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    todo = [(path, value)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, dict):
            yield from ((path, key) for key in value)
            todo += [(_join(path, key), part) for key, part in reversed(value.items())]
        elif isinstance(value, list):
            todo += [(f"{path}[{i}]", part) for i, part in reversed([*enumerate(value)])]
        else:
            yield path, value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def check_text(name: str, text: str) -> str:
    """`text`, which must be whole characters.

    Raises:
        InvalidRequest: JSON can spell half of a surrogate pair, which no encoding of text can.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at character {error.start}"
        where = name.encode("utf-8", "replace").decode() or "the body"
        raise InvalidRequest(f"{where} must be text, found half of a surrogate pair ({found})", param=name or None) from None
    return text


# --- from a failure to its explanation --------------------------------------------------------------------------------


def check_crumbs(data: bytes) -> None:
    """Refuse a large body that is made of small arrays or objects.

    Raises:
        InvalidRequest: it has more brackets than one for every `BYTES_PER_BRACKET` bytes.
    """
    if len(data) <= MAX_EXPLAINED_BYTES:
        return
    found, limit = data.count(b"[") + data.count(b"{"), len(data) // BYTES_PER_BRACKET
    if found > limit:
        raise InvalidRequest(f"the body has {found} brackets in {len(data)} bytes; in one as large, {limit} are the most")


def _in_brief(message: str) -> InvalidRequest:
    place = _PLACE.search(message)
    path = place[1].removeprefix("$").removeprefix(".") if place else ""
    return InvalidRequest(f"{path or 'the body'}: {message:.{MAX_NAME}}", param=path[:MAX_NAME] or None)


def _explain(message: str, value: Any, root: types.Type, where: str = "") -> InvalidRequest:
    """What to say of a body, or of the part of it that is at `where`, that the decoder refused with `message`."""
    place = _PLACE.search(message)
    path, value, node = _follow(where, place[1] if place else "$", value, root)
    if _IN_KEY in message and isinstance(value, dict):
        return _explain_key(path, value, node)
    struct = _variant_for(node, value)
    if isinstance(struct, types.StructType) and isinstance(value, dict):
        # Without its tag there is no telling which struct an object is meant to be.
        if (missing := _MISSING.match(message)) is not None:
            return _missing_field(path, missing[1], node, struct)
        error = _unknown_field(path, value, struct) or _limited_field(path, value, struct)
        if error is not None:
            return error
    if not path:
        return InvalidRequest(f"the body must be a JSON object, found {found_of(value)}")
    return invalid(path, expected_of(node), value)


def _follow(path: str, place: str, value: Any, node: types.Type) -> tuple[str, Any, types.Type]:
    """The field that the decoder calls `place`, within `path`: its name as errors have it, its value and its type."""
    for name, index in _STEP.findall(place):
        variant = _variant_for(node, value)
        if isinstance(variant, types.StructType) and isinstance(value, dict) and name:
            node = _tag_type(node) if name == variant.tag_field else _fields(variant)[name]
            path, value = _join(path, name), value.get(name)
        elif isinstance(variant, types.ListType) and isinstance(value, list) and index:
            path, value, node = f"{path}[{index}]", value[int(index)], variant.item_type
        elif isinstance(variant, types.DictType) and isinstance(value, dict):
            node = variant.value_type
            key = next((key for key, part in value.items() if not fits(part, node)), "")
            path, value = _join(path, key[:MAX_NAME]), value.get(key)
        else:
            break
    return path, value, node


def _variants(node: types.Type) -> list[types.Type]:
    if isinstance(node, types.Metadata):
        return _variants(node.type)
    if isinstance(node, types.UnionType):
        return [variant for part in node.types for variant in _variants(part)]
    return [node]


def _variant_for(node: types.Type, value: Any) -> types.Type | None:
    """Of the types that a place may have, the one that `value` was read as; None for simple ones."""
    variants = _variants(node)
    if isinstance(value, list):
        return next((variant for variant in variants if isinstance(variant, types.ListType)), None)
    if not isinstance(value, dict):
        return None
    objects = [variant for variant in variants if isinstance(variant, (types.StructType, types.DictType))]
    tagged = [variant for variant in objects if isinstance(variant, types.StructType) and variant.tag_field]
    of_tag = [variant for variant in tagged if value.get(variant.tag_field) == variant.tag]
    return next(iter([*of_tag, *objects]), None)


def _fields(struct: types.StructType) -> dict[str, types.Type]:
    return {field.encode_name: field.type for field in struct.fields}


def _tag_type(node: types.Type) -> types.Type:
    """The type of the field that tells the structs of a union apart."""
    return types.LiteralType(tuple(variant.tag for variant in _variants(node) if isinstance(variant, types.StructType)))


def _explain_key(path: str, value: dict[str, Any], node: types.Type) -> InvalidRequest:
    variant = _variant_for(node, value)
    assert isinstance(variant, types.DictType)
    key = next((key for key in value if not fits(key, variant.key_type)), "")
    plural = plural_of(variant.key_type)
    return InvalidRequest(f"{path} must have {plural} as keys, found {found_of(key)}", param=path)


def _unknown_field(path: str, value: dict[str, Any], struct: types.StructType) -> InvalidRequest | None:
    known = [*_fields(struct), *([struct.tag_field] if struct.tag_field else [])]
    return next((unknown_field(path, name, known) for name in value if name not in known), None)


def _limited_field(path: str, value: dict[str, Any], struct: types.StructType) -> InvalidRequest | None:
    for name, node in _fields(struct).items():
        found = value.get(name)
        if found is not None and (accepted := accepted_of(node)) is not None and not is_one_of(found, accepted):
            return _not_supported(_join(path, name), accepted, found)
    return None


def _not_supported(path: str, accepted: Sequence[Any], found: Any) -> InvalidRequest:
    spelled = " or ".join(map(json.dumps, [*accepted, None]))
    return InvalidRequest(f"{path} is not supported other than as {spelled}, found {found_of(found)}", param=path)


def _missing_field(path: str, name: str, node: types.Type, struct: types.StructType) -> InvalidRequest:
    field = _tag_type(node) if name == struct.tag_field else _fields(struct)[name]
    return InvalidRequest(f"{_join(path, name)} must be {expected_of(field)}, found nothing", param=_join(path, name))
