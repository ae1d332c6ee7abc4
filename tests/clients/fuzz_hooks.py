"""What schemathesis is told beside the description: the model's name, without which no call would get past the first check."""

from __future__ import annotations

from typing import Any

import schemathesis

MODEL = "tiny"


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """`body` for the model that there is, if it names one, except some that are to be refused for it."""
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) % 8 != 7:
        return body | {"model": MODEL}
    return body


@schemathesis.hook
def filter_body(context: Any, body: Any) -> bool:
    """Whether `body` is one that gets sent: a form has no null and no empty list, so that a field made wrong
    by one of them would be left out, and what arrives would be right."""
    if "multipart/form-data" not in context.operation.get_request_payload_content_types():
        return True
    return not isinstance(body, dict) or not any(value is None or value == [] or value == {} for value in body.values())
