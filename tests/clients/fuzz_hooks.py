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
