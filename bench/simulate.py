"""What a server, or a fleet of them, would do with recorded traffic: `python -m bench.simulate --help`. No JAX, no device.

Owns the command: what is simulated is `bench.simulation`'s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bench.simulation import autoscale, plot
from bench.simulation.fleet import Fleet, Scaling
from bench.simulation.record import Record, Summary, Targets, format_summary
from bench.simulation.replica import Setting, limits_of, setting_of
from bench.simulation.search import Profile, find_batch, profile_toml
from bench.simulation.traces import Arrival, clip, read_trace
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.flags import add_engine_flags, add_http_flags, add_model_flags, serve_config_from_args
from jaxserve.host.cost_file import read_cost

DESCRIPTION = """\
Run the server's own scheduler, prefix cache, admission and loop over a trace, in virtual time: an hour of traffic in a minute.
What a step takes comes from --cost: a file that `python -m bench.calibrate` measured, or one with a chip's figures. Without it
from the settings' step_cost, or else from the one file in configs/costs/ that is about the model.
"""
EXAMPLES = r"""
examples:
  python -m bench.simulate --config configs/serving/interactive.toml --cost results/cost.toml --trace lengths.csv --rate 0.8
  python -m bench.simulate --model 8b --max-seqs 128 --max-step-tokens 2048 --kv-memory 100GiB \
      --cost configs/costs/h200-llama-3.1-8b.toml --trace AzureLLMInferenceTrace_conv.csv --plot results/hour.svg
  ... --replicas 1:8 --autoscale queue,tokens,utilisation      # what a fleet would do, and what it would cost
  ... --find-batch --slo-ttft-p95 1 --slo-itl-p95 0.1 --out configs/serving/mine.toml     # the largest batch within targets
"""
COSTS = Path(__file__).resolve().parent.parent / "configs" / "costs"
POLICIES = ("queue", "tokens", "utilisation", "schedule")


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate; 2 where a flag or a file is at fault."""
    args = _parse(argv)
    try:
        setting, arrivals = _setting(args), _arrivals(args)
        if args.find_batch:
            return _find_batch(args, setting, arrivals)
        scalings = _scalings(args)
        if len(scalings) > 1:
            return _compare(args, setting, arrivals, scalings)
        return _simulate(args, setting, arrivals, *scalings.values())
    except JaxserveError as error:
        print(f"bench.simulate: error: {error}", file=sys.stderr)
        return 2


def _setting(args: argparse.Namespace) -> Setting:
    config = serve_config_from_args(args)
    path = args.cost or (Path(config.engine.step_cost) if config.engine.step_cost else _known_cost(config.model))
    cost, origin = read_cost(path)
    if not origin.kv_bytes_per_token and not config.engine.num_pages:
        raise ConfigError(f"{path} has no origin.kv_bytes_per_token, so the KV pool's size is unknown; give --num-pages N")
    return setting_of(config, cost, origin)


def _known_cost(model: str) -> Path:
    """The one file of `configs/costs/` that is about this model."""
    models = {path: read_cost(path)[1].model for path in sorted(COSTS.glob("*.toml"))}
    found = [path for path, name in models.items() if name == model]
    if len(found) != 1:
        known = ", ".join(f"{path.name} ({name})" for path, name in models.items())
        raise ConfigError(
            f"{len(found)} files of {COSTS} are about {model!r}, so --cost must name one; there are {known}; "
            "python -m bench.calibrate measures one here"
        )
    print(f"step costs: {found[0]}", file=sys.stderr)
    return found[0]


def _arrivals(args: argparse.Namespace) -> list[Arrival]:
    arrivals = read_trace(args.trace, rate=args.rate, seed=args.seed)
    return clip(arrivals[: args.requests], max_prompt=args.max_prompt, max_output=args.max_output)


def _targets(args: argparse.Namespace) -> Targets:
    return Targets(args.slo_ttft_p95, args.slo_itl_p95)


def run_fleet(
    setting: Setting, scaling: Scaling, arrivals: Sequence[Arrival], targets: Targets
) -> tuple[Summary, Record, Fleet]:
    """One simulation from beginning to end."""
    record = Record()
    fleet = Fleet(setting, scaling, record)
    end = fleet.run(arrivals)
    return fleet.summarise(targets, end), record, fleet


def _simulate(args: argparse.Namespace, setting: Setting, arrivals: Sequence[Arrival], scaling: Scaling) -> int:
    started = time.perf_counter()
    summary, record, fleet = run_fleet(setting, scaling, arrivals, _targets(args))
    print(f"{limits_of(setting)}")
    print(format_summary(summary, _targets(args)))
    print(f"simulated    in {time.perf_counter() - started:.1f} s")
    if args.json:
        _write_json(args.json, [asdict(summary)])
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        args.plot.write_text(plot.latencies(f"{args.trace.name}, {len(arrivals)} requests", record, fleet.history))
        print(f"plot         {args.plot}")
    return 0


def _compare(args: argparse.Namespace, setting: Setting, arrivals: Sequence[Arrival], scalings: dict[str, Scaling]) -> int:
    print(f"{'policy':<12} {'replica-s':>10} {'mean':>6} {'most':>5} {'good':>7} {'TTFT p95':>10} {'ITL p95':>9} {'shed':>6}")
    found = []
    for name, scaling in scalings.items():
        summary, _, fleet = run_fleet(setting, scaling, arrivals, _targets(args))
        found.append({"policy": name, **asdict(summary), "history": fleet.history})
        print(
            f"{name:<12} {summary.replica_seconds:>10.0f} {summary.replica_seconds / summary.seconds:>6.2f} "
            f"{max(count for _, count in fleet.history):>5} {summary.good_share:>7.1%} "
            f"{summary.ttft.get('p95', 0):>9.2f}s {1e3 * summary.itl.get('p95', 0):>7.1f}ms {summary.shed_share:>6.1%}",
            flush=True,
        )
    if args.json:
        _write_json(args.json, found)
    return 0


def _scalings(args: argparse.Namespace) -> dict[str, Scaling]:
    """What to simulate by name: one fleet of fixed size, or one for each policy."""
    low, high = args.replicas
    common = Scaling(low=low, high=high, interval=args.interval, load_seconds=args.load_seconds, cooldown=args.cooldown)
    if not args.autoscale:
        if low != high:
            raise ConfigError(
                f"--replicas {low}:{high} is a span, which needs --autoscale {','.join(POLICIES)} or some of them"
            )
        return {f"fixed {low}": common}
    thresholds = autoscale.Thresholds(waiting=args.waiting, tokens=args.tokens, utilisation=args.utilisation)
    policies = {
        "queue": autoscale.by_queue(thresholds),
        "tokens": autoscale.by_tokens(thresholds),
        "utilisation": autoscale.by_utilisation(thresholds),
    }
    if args.schedule:
        policies["schedule"] = autoscale.by_schedule(autoscale.parse_schedule(args.schedule))
    names = args.autoscale.split(",")
    if unknown := [name for name in names if name not in policies]:
        raise ConfigError(f"--autoscale takes {', '.join(POLICIES)} (that with --schedule), found {', '.join(unknown)}")
    scalings = {f"fixed {low}": replace(common, high=low)}
    if high > low:
        scalings[f"fixed {high}"] = replace(common, low=high)
    return scalings | {name: replace(common, policy=policies[name]) for name in names}


def _find_batch(args: argparse.Namespace, setting: Setting, arrivals: Sequence[Arrival]) -> int:
    def said(tried: Profile) -> None:
        print(tried, flush=True)

    best = find_batch(
        setting, arrivals, _targets(args), max_seqs=args.limit_seqs, max_step_tokens=args.limit_tokens, progress=said
    )
    if best is None:
        print(f"nothing keeps p95 within {args.slo_ttft_p95:g} s and {args.slo_itl_p95:g} s, not even one sequence at a time")
        return 1
    print(f"best: {best}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(profile_toml(best, setting, _targets(args), sys.argv[1:] if args.argv is None else args.argv))
        print(f"written to {args.out}")
    return 0


def _write_json(path: Path, found: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"argv": sys.argv[1:], "found": found}, indent=1) + "\n")


def _span(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    try:
        span = int(low), int(high if colon else low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected N or MIN:MAX, found {text!r}") from None
    if not 1 <= span[0] <= span[1]:
        raise argparse.ArgumentTypeError(f"expected 1 <= MIN <= MAX, found {text!r}")
    return span


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_flags(parser)
    group = parser.add_argument_group("simulation")
    group.add_argument("--trace", type=Path, required=True, metavar="FILE", help="Azure CSV, Mooncake JSON lines, or lengths")
    group.add_argument("--cost", type=Path, metavar="FILE", help="what steps take; default: the known costs of the model")
    group.add_argument("--rate", type=float, metavar="R", help="requests a second at random, instead of the trace's times")
    group.add_argument("--requests", type=int, metavar="N", help="the first N only")
    group.add_argument("--max-prompt", type=int, default=0, metavar="N", help="cut longer prompts; default: leave them")
    group.add_argument("--max-output", type=int, default=0, metavar="N", help="cut longer answers; default: leave them")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of random arrivals; default: 0")
    group.add_argument("--slo-ttft-p95", type=float, default=1.0, metavar="S", help="target in seconds; default: %(default)s")
    group.add_argument("--slo-itl-p95", type=float, default=0.1, metavar="S", help="target in seconds; default: %(default)s")
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures; results/ is ignored by git")
    group.add_argument("--plot", type=Path, metavar="FILE.svg", help="write a plot")
    group = parser.add_argument_group("search")
    group.add_argument("--find-batch", action="store_true", help="search for the largest batch and budget within the targets")
    group.add_argument("--limit-seqs", type=int, default=256, metavar="N", help="try no larger batch; default: %(default)s")
    group.add_argument("--limit-tokens", type=int, default=4096, metavar="N", help="no larger budget; default: %(default)s")
    group.add_argument("--out", type=Path, metavar="FILE.toml", help="write what was found as a serving profile")
    group = parser.add_argument_group("fleet")
    group.add_argument("--replicas", type=_span, default=(1, 1), metavar="N|MIN:MAX", help="default: 1")
    group.add_argument("--autoscale", metavar="POLICY,...", help=f"compare policies: {', '.join(POLICIES)}")
    group.add_argument("--schedule", metavar="S:N,...", help="replicas from each time on, such as 0:1,600:3")
    group.add_argument("--interval", type=float, default=5.0, metavar="S", help="between decisions; default: %(default)s")
    group.add_argument(
        "--load-seconds", type=float, default=30.0, metavar="S", help="until a new one works; default: %(default)s"
    )
    group.add_argument(
        "--cooldown", type=float, default=120.0, metavar="S", help="before one is removed; default: %(default)s"
    )
    thresholds = autoscale.Thresholds()
    for name, what in (("waiting", "requests without a token"), ("tokens", "tokens in flight"), ("utilisation", "busy share")):
        default = getattr(thresholds, name)
        group.add_argument(
            f"--{name}", type=float, default=default, metavar="X", help=f"{what} a replica; default: {default:g}"
        )
    add_engine_flags(parser)
    add_http_flags(parser)
    args = parser.parse_args(argv)
    args.argv = argv
    if args.slo_ttft_p95 <= 0 or args.slo_itl_p95 <= 0:
        parser.error("targets must be positive")
    return args


if __name__ == "__main__":
    sys.exit(main())
