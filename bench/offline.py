"""Throughput on the four workloads, against the machine's limits and other engines: `python -m bench.offline --help`.

Owns the order of the run: ours and the peers in turn, round after round, so that a machine that slows down slows all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from bench import ceiling, limits, ours, startup
from bench.peers import Peer, PeerError, figures_for
from bench.report import OURS, Figure, Rounds, throughput_line, throughput_table, write_json
from bench.workloads import WORKLOADS, Workload, throughput
from jaxserve.config import ServeConfig
from jaxserve.errors import JaxserveError
from jaxserve.flags import add_engine_flags, add_model_flags, serve_config_from_args

DESCRIPTION = """\
Measure throughput on random prompts, greedy, without stops; every engine gets the same token ids.

workloads:
  a    1 sequence  of   128 tokens in / 64 out
  b    8 sequences of   128 tokens in / 64 out
  c   32 sequences of   128 tokens in / 64 out
  d    8 sequences of 1,024 tokens in / 32 out

With t(n) the time to n output tokens of all B sequences:
  prefill = B * in / t(1);  decode = B * (out - 1) / (t(out) - t(1));  total = B * out / t(out)
Each rate is the median over the rounds. In a round each workload is run by us and then by each peer in turn.
Leave the machine alone meanwhile.
"""
EPILOG = """\
examples:
  python -m bench.offline --model smollm2-135m-instruct
  python -m bench.offline --model model-f32.gguf --json results/offline.json \\
      --peer 'llama.cpp=python llama_bench.py model-f32.gguf {workload}' --peer 'vllm=python vllm_bench.py hf_dir'
"""

SINGLE, BATCHED = WORKLOADS["a"], WORKLOADS["c"]


@dataclass(slots=True)
class Findings:
    """Raw numbers of one run.

    Attributes:
        timings: by workload, one pair a round: to the first token, and to the last.
        bandwidths: bytes per second read from memory, one a round.
        ceilings: tokens per second of the stripped step at the largest workload, one a round.
        starts: a fresh process with no compile cache, and one with it.
    """

    rounds: Rounds = field(default_factory=Rounds)
    timings: dict[str, list[tuple[ours.Timing, ours.Timing]]] = field(default_factory=dict)
    bandwidths: list[float] = field(default_factory=list)
    ceilings: list[float] = field(default_factory=list)
    starts: tuple[startup.Start, startup.Start] | None = None
    weight_bytes: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code says whether it ran, not whether the figures are good."""
    args = _parse(argv)
    try:
        config = _comparable(serve_config_from_args(args))
        found = Findings()
        if args.startup:
            progress("starting fresh processes, with no compile cache and then with it")
            found.starts = startup.measure(config)
        engine = ours.build(config)
    except (JaxserveError, RuntimeError) as error:
        print(f"bench.offline: error: {error}", file=sys.stderr)
        return 2
    found.weight_bytes = engine.runner.weight_bytes
    for workload in args.workloads:
        ours.run_workload(engine.core, workload, num_output=1)
    for number in range(1, args.repeats + 1):
        progress(f"round {number} of {args.repeats}")
        _round(engine, args, found)
    figures = list(_figures(found, [peer.name for peer in args.peers], args.workloads))
    print("\n" + throughput_table(found.rounds, args.workloads) + "\n")
    print("\n".join(map(str, figures)))
    if args.json:
        write_json(args.json, {"config": config, "findings": found}, figures)
    return 0


def _round(engine: ours.Engine, args: argparse.Namespace, found: Findings) -> None:
    found.bandwidths.append(limits.memory_read_bandwidth())
    for workload in args.workloads:
        _run_ours(engine, workload, found)
        for peer in args.peers:
            if peer.one_workload_at_a_time:
                _run_peer(peer, [workload], args.peer_timeout, found)
    for peer in args.peers:
        if not peer.one_workload_at_a_time:
            _run_peer(peer, args.workloads, args.peer_timeout, found)


def _run_ours(engine: ours.Engine, workload: Workload, found: Findings) -> None:
    first = ours.run_workload(engine.core, workload, num_output=1)
    whole = ours.run_workload(engine.core, workload, num_output=workload.output)
    found.timings.setdefault(workload.name, []).append((first, whole))
    rates = throughput(workload, first.seconds, whole.seconds)
    found.rounds.add(OURS, workload, rates)
    progress(throughput_line(OURS, workload, rates))
    if workload is BATCHED and (rates_at_best := ceiling.decode_ceiling(engine.runner, workload.batch)):
        found.ceilings.append(median(rates_at_best))
        progress(f"ceiling of a decode step at {workload.batch} sequences: {found.ceilings[-1]:.1f} tok/s")


def _run_peer(peer: Peer, workloads: Sequence[Workload], timeout: float, found: Findings) -> None:
    """One run of a peer's command; a failure is reported and the peer left out of this round."""
    try:
        rates = peer.run(workloads[0] if peer.one_workload_at_a_time else None, timeout=timeout)
        for workload in workloads:
            found.rounds.add(peer.name, workload, figures_for(peer, workload, rates))
            progress(throughput_line(peer.name, workload, figures_for(peer, workload, rates)))
    except PeerError as error:
        progress(f"left out of this round: {error}")


def _figures(found: Findings, peers: Sequence[str], workloads: Sequence[Workload]) -> Iterator[Figure]:
    """The figures that we hold ourselves to, in the order of the report."""
    for peer in peers:
        for workload in workloads:
            name = f"total output over {peer}, {workload.title}"
            yield Figure(name, found.rounds.ratio(peer, workload), 1.0, at_least=True, unit="x")
    batched = found.rounds.medians(OURS, BATCHED)
    reached = batched.decode / median(found.ceilings) if batched and found.ceilings else None
    yield Figure("decode at 32 sequences, share of the ceiling", _percent(reached), 70, at_least=True, unit="%")
    yield Figure(
        "decode at 1 sequence, share of the memory's limit",
        _percent(_share_of_memory_limit(found)),
        85,
        at_least=True,
        unit="%",
    )
    exposed = [whole.exposed_share for _, whole in found.timings.get(BATCHED.name, [])]
    yield Figure(
        "host time not hidden at 32 sequences, share of the step",
        _percent(median(exposed) if exposed else None),
        5,
        at_least=False,
        unit="%",
    )
    cold, warm = found.starts or (None, None)
    yield Figure(
        "start to first token, no compile cache", cold.first_token_seconds if cold else None, 30, at_least=False, unit=" s"
    )
    yield Figure("start to first token, with it", warm.first_token_seconds if warm else None, 10, at_least=False, unit=" s")
    beside = (cold.peak_bytes - cold.weight_bytes - cold.kv_bytes) / 2**20 if cold else None
    yield Figure(
        "peak memory beside weights and KV pool", beside, startup.ALLOWANCE_BYTES / 2**20, at_least=False, unit=" MiB"
    )


def _share_of_memory_limit(found: Findings) -> float | None:
    """At one sequence a step reads every weight once: the decode rate over what the memory's speed allows."""
    single = found.rounds.medians(OURS, SINGLE)
    return single.decode * found.weight_bytes / median(found.bandwidths) if single else None


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _comparable(config: ServeConfig) -> ServeConfig:
    """Float32, as the peers run, unless another type was asked for; no prefix cache, since every run has the same prompts."""
    dtype = "float32" if config.engine.dtype == "auto" else config.engine.dtype
    return replace(config, engine=replace(config.engine, dtype=dtype, prefix_cache=False))


def progress(text: str) -> None:
    """Say on stderr how far we are; stdout has the report alone."""
    print(text, file=sys.stderr, flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.offline",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_flags(parser)
    run = parser.add_argument_group("run")
    run.add_argument("--workloads", type=_workloads, default="abcd", metavar="LETTERS", help="which to run; default: abcd")
    run.add_argument("--repeats", type=_positive, default=3, metavar="N", help="rounds; default: 3")
    run.add_argument(
        "--peer",
        dest="peers",
        type=Peer.parse,
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another engine: a command that prints lines as ours are; {workload} in it becomes the workload's letter, else "
        "it is run once a round for all of them; may be given again",
    )
    run.add_argument("--peer-timeout", type=float, default=900, metavar="SECONDS", help="for one command; default: 900")
    run.add_argument(
        "--startup",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure start to first token and peak memory in fresh processes too; default: yes",
    )
    run.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything, raw numbers included; results/ is ignored by git"
    )
    add_engine_flags(parser)
    return parser.parse_args(argv)


def _workloads(letters: str) -> list[Workload]:
    unknown = [letter for letter in letters if letter not in WORKLOADS]
    if unknown or not letters:
        raise argparse.ArgumentTypeError(f"expected letters of {''.join(WORKLOADS)}, found {letters!r}")
    return [WORKLOADS[letter] for letter in letters]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, found {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
