"""`python -m jaxserve.offline` over a toy engine, in a process of its own that tests can kill.

    python -m tests.offline.child STEP_SECONDS LOG [flags]

Appends the id of each request that the engine is given to LOG.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jaxserve.config import ServeConfig
from jaxserve.offline.cli import main
from jaxserve.request import Request
from tests.offline.toy import ToyEngine, toy_engine


def run(step_seconds: float, log: Path, argv: list[str]) -> int:
    def build(config: ServeConfig) -> ToyEngine:
        engine = toy_engine(step_seconds=step_seconds, max_seqs=config.engine.max_seqs)
        add = engine.core.add

        def logged_add(request: Request) -> None:
            with log.open("a") as file:
                file.write(f"{request.request_id}\n")
            add(request)

        engine.core.add = logged_add  # type: ignore[method-assign]
        return engine

    return main(argv, build_engine=build)


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
