"""What every struct of a body has in common: unknown fields are refused, and so are fields that do not work yet.

Knows no field by name.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec import inspect as types


class Body(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A JSON object of a request.

    Raises:
        ValueError: with the name of a field that asks for what is not implemented. `decode` makes the error of it.
    """

    def __post_init__(self) -> None:
        for name, accepted in limited_fields(type(self)):
            value = getattr(self, name)
            if value is not None and not is_one_of(value, accepted):
                raise ValueError(name)


def only(*accepted: Any) -> Meta:
    """Marks a field that is not implemented: it may be null, or one of the values at which it changes nothing."""
    spelled = ", ".join(map(json.dumps, accepted))
    description = f"Not implemented: refused unless null{f' or {spelled}' if accepted else ''}."
    return Meta(description=description, extra={"only": accepted}, extra_json_schema={"enum": [*accepted, None]})


Refused = Annotated[Any, only()]
"""A field that is not implemented, and changes nothing only if it is null."""


def noun(singular: str, plural: str) -> dict[str, Any]:
    """For `Meta(extra=...)`: what errors call such a value, where its type alone says too little."""
    return {"noun": (singular, plural)}


def is_one_of(value: Any, accepted: Sequence[Any]) -> bool:
    """Whether `value` is among `accepted`, telling true from 1."""
    return any(value == candidate and isinstance(value, bool) == isinstance(candidate, bool) for candidate in accepted)


@functools.cache
def limited_fields(cls: type) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """The fields of a struct that were marked with `only`, and the values that they may have."""
    info = types.type_info(cls)
    assert isinstance(info, types.StructType)
    limits = ((field.name, accepted_of(field.type)) for field in info.fields)
    return tuple((name, accepted) for name, accepted in limits if accepted is not None)


def accepted_of(node: types.Type) -> tuple[Any, ...] | None:
    """The values beside null that a field marked with `only` may have; None if it was not."""
    return (node.extra or {}).get("only") if isinstance(node, types.Metadata) else None
