"""`jaxserve serve` that notes each step, and writes the notes in the end: `python -m bench.recorded_server --help`.

Owns what is put between core and runner. The notes are `bench.step_log`'s, everything else `jaxserve.launch`'s.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.costs import kv_bytes_per_token
from bench.step_log import RecordedRunner, StepLog
from jaxserve.device.buckets import choose_bucket
from jaxserve.errors import JaxserveError
from jaxserve.flags import add_engine_flags, add_http_flags, add_model_flags, serve_config_from_args

if TYPE_CHECKING:
    from jaxserve.launch import Engine
    from jaxserve.server.service import ServerParts


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; write the log. 2 where a flag, file or model is at fault."""
    args = _parse(argv)
    recorded: list[tuple[Engine, RecordedRunner]] = []
    try:
        config = serve_config_from_args(args)
        from jaxserve import launch, serving
        from jaxserve.server import app

        def build() -> ServerParts:
            engine = launch.build_engine(config)
            runner = RecordedRunner(engine.runner)
            engine.core._runner = runner
            recorded.append((engine, runner))
            return serving.parts_of(engine)

        code = app.serve(build, config.http)
    except JaxserveError as error:
        print(f"bench.recorded_server: error: {error}", file=sys.stderr)
        return 2
    for engine, runner in recorded:
        log = log_of(engine, runner)
        log.write(args.record)
        print(f"{len(log.steps)} steps written to {args.record}", file=sys.stderr)
    return code


def log_of(engine: Engine, runner: RecordedRunner) -> StepLog:
    """What was noted of an engine."""
    return StepLog(
        steps=runner.steps(partial(choose_bucket, engine.runner.buckets)),
        kv_bytes_per_token=kv_bytes_per_token(engine.runner.kv_bytes, engine.runner.limits),
        window=engine.runner.limits.window or 0,
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.recorded_server", description="Serve, and note each step.")
    add_model_flags(parser)
    parser.add_argument("--record", type=Path, default=Path("results/steps.json"), metavar="FILE", help="default: %(default)s")
    add_engine_flags(parser)
    add_http_flags(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
