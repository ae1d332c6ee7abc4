"""A server process with a fake model: `python -m tests.server.fake_server --step-seconds 0.01 ...`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from dataclasses import replace

from jaxserve.config import HttpConfig
from jaxserve.server.app import serve
from jaxserve.server.service import ServerParts
from tests.engine import tiny_tokenizers as tiny
from tests.engine.engines import LIMITS, fake_engine


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("load", "step", "drain"):
        parser.add_argument(f"--{name}-seconds", type=float, default=0.0)
    parser.add_argument("--max-seqs", type=int, default=LIMITS.max_seqs)
    parser.add_argument("--max-queue-requests", type=int, default=1024)
    parser.add_argument("--state-dir", default="")
    parser.add_argument("--fail", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    def build() -> ServerParts:
        time.sleep(args.load_seconds)
        if args.fail:
            raise RuntimeError("the weights are missing")
        limits = replace(LIMITS, max_seqs=args.max_seqs)
        fake = fake_engine(limits, step_seconds=args.step_seconds)
        return ServerParts(core=fake.core, limits=fake.runner.limits, tokenizer=tiny.byte_level(), model_name="tiny")

    config = HttpConfig(
        port=0, drain_seconds=args.drain_seconds, max_queue_requests=args.max_queue_requests, state_dir=args.state_dir
    )
    return serve(build, config)


if __name__ == "__main__":
    sys.exit(main())
