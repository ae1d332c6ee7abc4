"""The bodies of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, which are vLLM's."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from jaxserve.server.schema.body import Body, noun, only

MAX_NAME_CHARACTERS = 256
MAX_PATH_CHARACTERS = 4096

Name = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_NAME_CHARACTERS,
        description="What requests have as `model`.",
        extra=noun("a name of 1 to 256 characters", "names"),
    ),
]


class LoadAdapterRequest(Body, frozen=True, kw_only=True):
    """A body of `/v1/load_lora_adapter`."""

    lora_name: Name
    lora_path: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=MAX_PATH_CHARACTERS,
            description="A PEFT directory within the server's folder of adapters, from there or whole.",
            extra=noun("a path of 1 to 4096 characters", "paths"),
        ),
    ]
    load_inplace: Annotated[bool, only(False)] | None = None


class UnloadAdapterRequest(Body, frozen=True, kw_only=True):
    """A body of `/v1/unload_lora_adapter`."""

    lora_name: Name
    lora_int_id: Annotated[int, Meta(description="Not used; the name is enough.")] | None = None
