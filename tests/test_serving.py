"""What `serving` puts together, with the engine left out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve import launch, serving
from jaxserve.config import HttpConfig, ServeConfig
from jaxserve.engine.constraints import Constraints
from jaxserve.server.service import ServerParts


def test_a_server_has_what_its_engine_brought_and_grammars_are_prepared_before_it_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SimpleNamespace(
        **dict.fromkeys(("core", "limits", "tokenizer", "adapters", "adapter_source")),
        model_name="m",
        constraints=object(),
        sampling_defaults={"temperature": 0.5},
    )
    options: dict[str, Any] = {}
    parts: list[ServerParts] = []

    def build_engine(config: ServeConfig, **given: Any) -> SimpleNamespace:
        options.update(given)
        return engine

    def serve(build: Callable[[], ServerParts], http: HttpConfig) -> int:
        parts.append(build())
        return 0

    monkeypatch.setattr(launch, "build_engine", build_engine)
    monkeypatch.setattr(serving.app, "serve", serve)
    assert serving.serve(ServeConfig(model="m", http=HttpConfig(port=0))) == 0
    assert options["meanwhile"] is Constraints.prepare
    assert parts[0].constraints is engine.constraints
    assert parts[0].sampling_defaults == {"temperature": 0.5}
