"""What `launch` puts together for a server, with the engine left out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve import launch
from jaxserve.config import HttpConfig, ServeConfig
from jaxserve.engine.constraints import Constraints
from jaxserve.server.service import ServerParts


def test_what_grammars_need_is_made_before_a_server_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(
        **dict.fromkeys(("core", "limits", "tokenizer", "adapters", "adapter_source")), model_name="m", constraints=object()
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
    monkeypatch.setattr(launch.app, "serve", serve)
    assert launch.serve(ServeConfig(model="m", http=HttpConfig(port=0))) == 0
    assert options["meanwhile"] is Constraints.prepare
    assert parts[0].constraints is engine.constraints
