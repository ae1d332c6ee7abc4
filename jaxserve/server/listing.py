"""Lists in pages, as the API has them, and the query strings that ask for one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.decoding import decode


def parse_query[Q: msgspec.Struct](query: Mapping[str, str], cls: type[Q]) -> Q:
    """What a query string asks for.

    Raises:
        InvalidRequest: naming a field that is wrong or unknown.
    """
    values: dict[str, Any] = dict(query)
    limit = values.get("limit", "")
    if limit.isascii() and limit.isdecimal() and len(limit) < 10:
        values["limit"] = int(limit)
    return decode(values, cls)


def list_object[T](
    items: Sequence[T], *, limit: int, after: str | None, id_of: Callable[[T], str], show: Callable[[T], Any]
) -> dict[str, Any]:
    """At most `limit` of `items`, from behind the one with the id `after`.

    Raises:
        InvalidRequest: none of them has that id.
    """
    start = 0
    if after is not None:
        places = [i for i, item in enumerate(items) if id_of(item) == after]
        if not places:
            raise InvalidRequest(f"after must be the id of one in this list, found {after!r:.100}", param="after")
        start = places[0] + 1
    shown = items[start : start + limit]
    return {
        "object": "list",
        "data": [show(item) for item in shown],
        "first_id": id_of(shown[0]) if shown else "",
        "last_id": id_of(shown[-1]) if shown else "",
        "has_more": start + len(shown) < len(items),
    }
