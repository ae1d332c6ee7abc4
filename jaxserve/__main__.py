"""The command line: `jaxserve serve --model M ...`, also as `python -m jaxserve`.

Owns subcommands and exit codes. Flags come from `jaxserve.flags`; what a subcommand needs is imported when it runs, so that
`--help` and a mistyped flag do not wait for JAX.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxserve import __version__
from jaxserve.errors import JaxserveError
from jaxserve.flags import add_engine_flags, add_http_flags, add_model_flags, serve_config_from_args

SERVE_DESCRIPTION = """\
Serve a model over HTTP, as the OpenAI API has it: /v1/models, /v1/completions and /v1/chat/completions, with streaming,
and /v1/files and /v1/batches, which outlive the server in --state-dir.
/health answers while the process can serve, /ready once every program is compiled; these two take no API key. /metrics is for
Prometheus. Requests beyond the queue's bounds, or too late for --slo-ttft-ms, are answered 429 with Retry-After.
SIGTERM stops new requests, lets running ones finish, and exits 0.
"""
SERVE_EXAMPLES = """\
examples:
  jaxserve serve --model smollm2-135m-instruct
  jaxserve serve --model ./model.gguf --port 9000 --max-seqs 64
  jaxserve serve --config configs/serving/laptop.toml
  jaxserve serve --model ./model.gguf --api-keys-file keys.toml --slo-ttft-ms 2000 --request-timeout 120
  jaxserve serve --model ./model.gguf --host 0.0.0.0 --certfile chain.pem --keyfile key.pem --api-keys-file keys.toml
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 2 where a flag, file or model is at fault, 130 after Ctrl-C."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except JaxserveError as error:
        print(f"jaxserve: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxserve",
        description="A JAX serving engine for large language models.",
        epilog="Batches from files: python -m jaxserve.offline --help. Checkpoints: python -m checkpoints.convert --help.",
    )
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description=SERVE_DESCRIPTION,
        epilog=SERVE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_flags(serve)
    add_engine_flags(serve)
    add_http_flags(serve)
    serve.set_defaults(run=_serve)
    return parser


def _serve(args: argparse.Namespace) -> int:
    config = serve_config_from_args(args)
    from jaxserve import launch

    return launch.serve(config)


if __name__ == "__main__":
    sys.exit(main())
