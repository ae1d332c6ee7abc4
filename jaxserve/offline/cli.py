"""The command line of `python -m jaxserve.offline`.

Owns flags, exit codes, what is checked before the model is loaded, and what is told on the way. The work is done elsewhere:
files in `run`, prompts in `prompts`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from jaxserve import __version__
from jaxserve.batch_file import InputFile, may_want_grammars, parse_json_line, parse_text_line
from jaxserve.config import ServeConfig
from jaxserve.engine.adapters import named_adapters
from jaxserve.engine.constraints import Constraints
from jaxserve.errors import ConfigError, JaxserveError, ModelLoadError
from jaxserve.flags import CHAT_FIELDS, add_chat_flags, add_engine_flags, add_model_flags, integer, serve_config_from_args
from jaxserve.journal import Journal
from jaxserve.offline.generation import Engine
from jaxserve.offline.journal import discard, finish, journal_path, open_journal, output_of_run
from jaxserve.offline.progress import ProgressBar, StageBars
from jaxserve.offline.prompts import DEMO_PROMPTS, answer_prompts
from jaxserve.offline.results import RequestOptions, run_id_of
from jaxserve.offline.run import BatchRun
from jaxserve.server.chat_settings import ChatSettings

BuildEngine = Callable[[ServeConfig], Engine]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SOME_LINES_FAILED = 3
EXIT_SIGNALLED = 128
"""Plus the signal's number, as shells have it."""

FORMATS = {"jsonl": parse_json_line, "text": parse_text_line}

DESCRIPTION = """\
Run a model over a file of prompts, or over a few from the command line, without a server.

Each line of an input file is one of
  "a prompt"                                                        a JSON string
  {"prompt": "...", "max_tokens": 9}                                fields of the completions API
  {"messages": [...], "temperature": 0.5}                           fields of the chat completions API
  {"custom_id": "a", "method": "POST", "url": "/v1/...", "body": {...}}    OpenAI's batch format
and gives one line of output: an object of OpenAI's batch output for a line in batch format, else an object with the
prompt, the text, the finish reason and the usage. A line that is wrong gives an object with an error.

While the run goes on, results are appended to OUTPUT.partial as they finish. At the end OUTPUT appears, in the order of
the input. Run the same command again after a kill and it carries on: what is done is not done again, and OUTPUT comes
out as if nothing had happened (but for the last digits of log probabilities, which depend on what runs at once).
"""
EPILOG = """\
exit codes:
  0 done    1 engine or disk failed    2 wrong flag, file or model    3 done, but some lines failed
  130, 143 stopped by Ctrl-C, SIGTERM; after 1, 130 and 143 the same command carries on

examples:
  python -m jaxserve.offline --model smollm2-135m-instruct --demo
  python -m jaxserve.offline --model smollm2-135m-instruct --prompt "What is a page table?"
  python -m jaxserve.offline --model ./model.gguf --input prompts.jsonl --output answers.jsonl
  python -m jaxserve.offline --model ./model.gguf --input prompts.txt --format text --chat --output answers.jsonl
"""


class _Stopped(BaseException):
    """A signal asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = EXIT_SIGNALLED + number


def main(argv: Sequence[str] | None = None, *, build_engine: BuildEngine | None = None) -> int:
    """Run the command; the exit code. Tests give an engine that needs no model."""
    args = _parser().parse_args(argv)
    try:
        with _signals_raise():
            config = serve_config_from_args(args)
            build = build_engine or partial(_build_engine, path=args.input)
            if args.input is not None:
                return _run_file(args, config, build)
            return _run_prompts(args, config, build)
    except _Stopped as stopped:
        print(_how_to_resume(args), file=sys.stderr)
        return stopped.exit_code
    except BrokenPipeError:  # whoever reads the answers has had enough; neither has the interpreter's own flush a reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_SIGNALLED + signal.SIGPIPE
    except (ConfigError, ModelLoadError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except JaxserveError as error:
        print(f"error: {error}\n{_how_to_resume(args)}", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxserve.offline",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_flags(parser)
    parser.add_argument(
        "--served-model-name",
        dest="http.served_model_name",
        metavar="TEXT",
        help="the model's name in the bodies of lines in batch format; default: the model's own",
    )
    source = parser.add_argument_group("prompts, from a file or from here")
    source.add_argument("--input", metavar="FILE", type=Path, help="file with a request a line; blank lines are left out")
    source.add_argument("--format", choices=sorted(FORMATS), default="jsonl", help="of --input; text: a prompt a line")
    source.add_argument("--output", metavar="FILE", type=Path, help="where the results go; its folder exists")
    source.add_argument("--restart", action="store_true", help="forget an unfinished run and replace the output")
    source.add_argument("--prompt", metavar="TEXT", action="append", help="a prompt to answer on stdout; may be repeated")
    source.add_argument("--demo", action="store_true", help="answer a few prompts; so does giving none")

    sampling = parser.add_argument_group(
        "sampling",
        "for prompts that do not say themselves; lines in batch format are not touched. What neither says is the model's own; "
        "see --generation-config",
    )
    sampling.add_argument("--max-tokens", metavar="N", type=integer, default=256, help="output tokens; default: 256")
    sampling.add_argument(
        "--temperature", metavar="X", type=float, default=0.0, help="0 takes the likeliest token; default: 0"
    )
    sampling.add_argument("--top-p", metavar="X", type=float, help="keep tokens that make up this probability")
    sampling.add_argument("--top-k", metavar="N", type=integer, help="keep this many tokens")
    sampling.add_argument("--stop", metavar="TEXT", action="append", help="end the output before this; may be repeated")
    sampling.add_argument(
        "--seed", metavar="N", type=integer, default=0, help="of the run; seeds every request that has none; default: 0"
    )
    sampling.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="put plain prompts through the chat template as what a user says; default: not for --input, "
        "but for --prompt and --demo if the model has a template",
    )
    add_chat_flags(parser)
    add_engine_flags(parser)
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    return parser


def _build_engine(config: ServeConfig, path: Path | None) -> Engine:
    chat = ChatSettings(config.http)
    # Loading JAX takes seconds; a mistyped flag should not.
    from jaxserve import launch

    with closing(StageBars()) as progress:
        engine = launch.build_engine(config, progress=progress, meanwhile=partial(_prepare, path))
    return replace(engine, tokenizer=chat.apply(engine.tokenizer))


def _prepare(path: Path | None, constraints: Constraints) -> None:
    """Have what the lines of `path` will want."""
    if path is not None and may_want_grammars(path):
        constraints.prepare()


@contextmanager
def _signals_raise() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- prompts ----------------------------------------------------------------------------------------------------------


def _run_prompts(args: argparse.Namespace, config: ServeConfig, build: BuildEngine) -> int:
    if args.output is not None:
        raise ConfigError("--output needs --input")
    if args.prompt and args.demo:
        raise ConfigError("--prompt and --demo exclude each other")
    engine = build(config)
    try:
        chat = engine.tokenizer.template is not None if args.chat is None else args.chat
        options = RequestOptions(run_id="", seed=args.seed, defaults=_sampling_defaults(args), chat=chat)
        failures = answer_prompts(engine, args.prompt or DEMO_PROMPTS, options)
    finally:
        engine.close()
    return EXIT_SOME_LINES_FAILED if failures else EXIT_OK


def _sampling_defaults(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k", "stop")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


# --- files ------------------------------------------------------------------------------------------------------------


def _run_file(args: argparse.Namespace, config: ServeConfig, build: BuildEngine) -> int:
    _check_paths(args)
    input_file = InputFile(args.input)
    fingerprint = _fingerprint(args, config, input_file)
    options = RequestOptions(
        run_id=run_id_of(fingerprint), seed=args.seed, defaults=_sampling_defaults(args), chat=bool(args.chat)
    )
    if args.restart:
        discard(args.output)
    elif args.output.exists() and not journal_path(args.output).exists():
        return _check_finished(args.output, input_file, options)
    journal = open_journal(args.output, fingerprint, input_file.num_lines)
    try:
        if journal.num_bytes_cut:
            print(f"{journal.path}: cut off a half-written result of {journal.num_bytes_cut} bytes", file=sys.stderr)
        if journal.num_done < input_file.num_requests:
            _run_rest(args, config, build, input_file, journal, options)
        num_done, num_failed = journal.num_done, journal.num_failed
        finish(journal, args.output)
    finally:
        journal.close()
    return _report(args.output, num_done, num_failed)


def _run_rest(
    args: argparse.Namespace,
    config: ServeConfig,
    build: BuildEngine,
    input_file: InputFile,
    journal: Journal,
    options: RequestOptions,
) -> None:
    if journal.num_done:
        print(f"carrying on: {journal.num_done} of {input_file.num_requests} lines are done", file=sys.stderr)
    engine = build(config)
    try:
        with ProgressBar(args.input, total=input_file.num_requests, done=journal.num_done) as progress:
            BatchRun(engine, input_file, FORMATS[args.format], journal, options, progress).run()
    finally:
        engine.close()


def _check_paths(args: argparse.Namespace) -> None:
    if args.prompt or args.demo:
        raise ConfigError("--input excludes --prompt and --demo")
    if args.output is None:
        raise ConfigError("--input needs --output, where the results go")
    if args.output.is_dir():
        raise ConfigError(f"--output {args.output} is a folder; name a file")
    if not args.output.parent.is_dir():
        raise ConfigError(f"--output {args.output}: the folder {args.output.parent} does not exist; make it first")
    if args.output.exists() and args.input.exists() and args.output.samefile(args.input):
        raise ConfigError(f"--output {args.output} is the input")


def _fingerprint(args: argparse.Namespace, config: ServeConfig, input_file: InputFile) -> dict[str, Any]:
    """What determines the results. Settings that only decide how fast they come (such as max_seqs) may differ."""
    return {
        "jaxserve": __version__,
        "input sha256": input_file.sha256,
        "model": config.model,
        "model files": _file_sizes(Path(config.model)),
        "served model name": config.http.served_model_name,
        "adapters": {name: [path, _file_sizes(Path(path))] for name, path in named_adapters(config.engine)},
        "dtype": config.engine.dtype,
        "max_context": config.engine.max_context,
        "generation config": [config.engine.generation_config, _file_sizes(Path(config.engine.generation_config))],
        "format": args.format,
        "chat": bool(args.chat),
        "chat settings": _chat_settings(config),
        "seed": args.seed,
        "sampling": _sampling_defaults(args),
    }


def _chat_settings(config: ServeConfig) -> dict[str, Any]:
    settings = {name: getattr(config.http, name) for name in CHAT_FIELDS}
    return {**settings, "chat_template": ChatSettings(config.http).template}


def _file_sizes(model: Path) -> dict[str, int]:
    """Sizes of a local model's files by name, which tell another model under the same path; none for a named model."""
    if model.is_dir():
        return {str(path.relative_to(model)): path.stat().st_size for path in sorted(model.rglob("*")) if path.is_file()}
    return {model.name: model.stat().st_size} if model.is_file() else {}


def _check_finished(output: Path, input_file: InputFile, options: RequestOptions) -> int:
    """There is an output and no unfinished run: fine if this very run made it."""
    first_id = options.result_id(input_file.first_request) if input_file.num_requests else None
    counts = output_of_run(output, first_id, input_file.num_requests)
    if counts is None:
        raise ConfigError(
            f"--output {output} exists, and is not what this run would make (input, model or options differ); "
            "--restart replaces it"
        )
    print("this run is finished already", file=sys.stderr)
    return _report(output, *counts)


def _report(output: Path, num_done: int, num_failed: int) -> int:
    failed = f", {num_failed} of them errors" if num_failed else ""
    print(f"{output}: {num_done} results{failed}", file=sys.stderr)
    return EXIT_SOME_LINES_FAILED if num_failed else EXIT_OK


def _how_to_resume(args: argparse.Namespace) -> str:
    if args.input is None:
        return "stopped"
    return f"stopped; what is done is in {journal_path(args.output)}. Run the same command again to carry on"
