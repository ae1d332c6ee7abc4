"""The command line: `jaxserve serve --model M ...`, also as `python -m jaxserve`.

Owns subcommands and exit codes. Flags come from `jaxserve.flags`; what a subcommand needs is imported when it runs, so that
`--help` and a mistyped flag do not wait for JAX.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxserve import __version__
from jaxserve.config import DTYPES, KV_DTYPES, WEIGHT_DTYPES, EngineConfig
from jaxserve.errors import ConfigError, JaxserveError
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


INSPECT_DESCRIPTION = """\
Say what a model is, and on what devices it fits with how many sequences of which length. Only headers are read: no weights are
loaded and no device is used.
"""
INSPECT_EXAMPLES = """\
examples:
  jaxserve inspect smollm2-135m-instruct
  jaxserve inspect hf:Qwen/Qwen3-8B --device v5e --kv-dtype int8
  jaxserve inspect ./model.gguf --device h200 --tensor-parallel 2 --json
  jaxserve inspect hf:Qwen/Qwen3-30B-A3B --device v6e --tensor-parallel 2 --expert-parallel 4
"""
DEVICES = ("v5e", "v6e", "v5p", "tpu7x", "h100", "h200", "a100", "cpu")


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
    _add_inspect(commands)
    return parser


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="say what a model is and where it fits",
        description=INSPECT_DESCRIPTION,
        epilog=INSPECT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inspect.add_argument("model", metavar="MODEL", help="as of serve --model; of hf:ORG/NAME only the small files are fetched")
    inspect.add_argument("--device", choices=DEVICES, help="kind of device; default: the fewest devices of each kind")
    for flag, choices in (("--dtype", DTYPES), ("--weight-dtype", WEIGHT_DTYPES), ("--kv-dtype", KV_DTYPES)):
        inspect.add_argument(flag, choices=choices, default="auto", help="as of serve")
    inspect.add_argument("--tensor-parallel", type=int, metavar="N", help="devices that share each layer; default: several")
    inspect.add_argument(
        "--expert-parallel",
        type=int,
        default=1,
        metavar="N",
        help="times as many, that split a mixture's experts; default: 1",
    )
    inspect.add_argument("--json", action="store_true", help="print all figures as JSON, sizes in bytes")
    inspect.set_defaults(run=_inspect)


def _serve(args: argparse.Namespace) -> int:
    config = serve_config_from_args(args)
    from jaxserve import serving

    return serving.serve(config)


def _inspect(args: argparse.Namespace) -> int:
    for flag, number in (("--tensor-parallel", args.tensor_parallel), ("--expert-parallel", args.expert_parallel)):
        if number is not None and number < 1:
            raise ConfigError(f"{flag} must be at least 1, found {number}")
    from jaxserve import inspect_model, inspect_report

    found = inspect_model.inspect(args.model)
    split = args.tensor_parallel, args.expert_parallel
    engine = EngineConfig(dtype=args.dtype, weight_dtype=args.weight_dtype, kv_dtype=args.kv_dtype)
    fits = inspect_model.fits(found.config, DEVICES, args.device, *split, engine=engine)
    if args.json:
        print(inspect_report.as_json(found, fits))
        return 0
    print(inspect_report.describe(found), end="\n\n")
    print(inspect_report.fits_of_numbers(fits) if args.device else inspect_report.fits_of_chips(fits))
    return 0


if __name__ == "__main__":
    sys.exit(main())
