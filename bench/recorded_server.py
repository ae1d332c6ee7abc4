"""`jaxserve serve` that notes what each step took, and fits a cost to that in the end.

`python -m bench.recorded_server --help` says more.

Owns the recording. Everything else is `jaxserve.launch`'s.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.calibrate import origin_of
from jaxserve.device.buckets import choose_bucket
from jaxserve.errors import JaxserveError
from jaxserve.flags import add_engine_flags, add_http_flags, add_model_flags, serve_config_from_args
from jaxserve.host.cost import BucketFor, work_of
from jaxserve.host.cost_file import format_cost
from jaxserve.host.fit import Sample, fit_cost, spread_of
from jaxserve.plan import StepPlan


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; write the costs. 2 where a flag, file or model is at fault, or too little was served."""
    args = _parse(argv)
    samples: list[Sample] = []
    kv_bytes_per_token, window = 0.0, 0
    try:
        config = serve_config_from_args(args)
        from jaxserve import launch
        from jaxserve.server import app
        from jaxserve.server.service import ServerParts

        def build() -> ServerParts:
            nonlocal kv_bytes_per_token, window
            engine = launch.build_engine(config)
            limits, before = engine.limits, engine.core.on_step
            kv_bytes_per_token = engine.runner.kv_bytes / (limits.num_pages * limits.page_size)
            window = limits.window or 0
            bucket_for: BucketFor = partial(choose_bucket, engine.runner.buckets)

            def note(plan: StepPlan, seconds: float) -> None:
                samples.append(Sample(work_of(plan, bucket_for), seconds))
                if before is not None:
                    before(plan, seconds)

            engine.core.on_step = note
            return ServerParts(core=engine.core, limits=limits, tokenizer=engine.tokenizer, model_name=engine.model_name)

        code = app.serve(build, config.http)
        cost = fit_cost(samples)
    except JaxserveError as error:
        print(f"bench.recorded_server: error: {error}", file=sys.stderr)
        return 2
    args.record.parent.mkdir(parents=True, exist_ok=True)
    origin = origin_of(config.model, cost, samples, kv_bytes_per_token)
    origin = replace(origin, window=window, spread=spread_of(cost, samples))
    args.record.write_text(format_cost(cost, origin))
    print(f"costs of {len(samples)} steps written to {args.record}", file=sys.stderr)
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.recorded_server", description="Serve, and fit step costs to it.")
    add_model_flags(parser)
    parser.add_argument("--record", type=Path, default=Path("results/cost.toml"), metavar="FILE", help="default: %(default)s")
    add_engine_flags(parser)
    add_http_flags(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
