"""Variants of a kernel side by side: `python -m bench.kernels KERNEL [--target ...] [--sweep key=a,b ...]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from bench.kernels.registry import PLATFORMS, SUBJECTS, LabError, Trial, find, load, plan
from bench.kernels.report import CsvFile, Result, roofline, table, winner, write_json

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "kernels"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the lab; the exit code is 1 where a trial failed or was wrong, 2 where it was asked for nonsense."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels",
        description="Check variants of a kernel against its definition, then time them, or compile them for another device.",
    )
    parser.add_argument("kernel", nargs="?", help="which; without one, list kernels, shapes, variants and their options")
    parser.add_argument(
        "--target", default="", metavar="WHERE", help="cpu, gpu, tpu, or aot:v5e, aot:h200, ... (default: here)"
    )
    parser.add_argument("--shape", nargs="+", default=[], metavar="NAME", help="named shapes (default: the first)")
    parser.add_argument("--variant", nargs="+", default=[], metavar="NAME", help="only these (default: all that run there)")
    parser.add_argument("--sweep", nargs="+", default=[], metavar="KEY=A,B", help="every combination of these settings")
    parser.add_argument("--load", nargs="+", default=[], type=Path, metavar="FILE", help="Python files that register variants")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls a trial (default: 20)")
    parser.add_argument("--output", type=Path, default=Path("results/kernels"), help="folder (default: results/kernels)")
    parser.add_argument(
        "--save", action="store_true", help="keep the winner's options for this kind of device, in configs/kernels/"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    import bench.kernels.attention
    import bench.kernels.subjects  # noqa: F401

    for path in options.load:
        load(path)
    if options.kernel is None:
        print(_listing())
        return 0
    subject = find(options.kernel)
    target, device = _target(options.target)
    settings = combinations(options.sweep)
    trials = plan(subject, platform=target, shapes=options.shape, variants=options.variant, sweeps=settings)
    name = options.target.replace(":", "-") or target
    results: list[Result] = []
    limits = None
    file = CsvFile(options.output / f"{subject.name}-{name}.csv")
    try:
        if device is None:
            from bench.kernels.measure import limits as measure_limits

            print("measuring what the device can do...", file=sys.stderr, flush=True)
            limits = measure_limits(target)
        for number, trial in enumerate(trials, 1):
            print(f"[{number}/{len(trials)}] {trial.shape_name}: {trial}", file=sys.stderr, flush=True)
            result = _here(trial, target, limits, options.repeats) if device is None else _ahead(trial, device, options.load)
            results.append(result)
            file.add(result)
    except KeyboardInterrupt:
        print(f"interrupted: {len(results)} of {len(trials)} trials are kept", file=sys.stderr)
    finally:
        file.close()
        write_json(options.output / f"{subject.name}-{name}.json", subject.name, name, limits, results)
    print(table(results))
    if limits is not None:
        plot = roofline(f"{subject.name} on {limits.device_kind}", limits.bandwidth, limits.matrix_rate, results)
        if plot:
            (options.output / f"{subject.name}-{name}.svg").write_text(plot)
    print(f"\nwritten to {options.output}/{subject.name}-{name}.{{csv,json{',svg' if limits else ''}}}")
    if options.save:
        print(_save(trials, results, limits))
    bad = len(results) < len(trials) or any(result.problem or result.passed is False for result in results)
    return 1 if bad else 0


def combinations(sweeps: Sequence[str]) -> list[dict[str, Any]]:
    """Every combination of `key=a,b` settings; one that is empty where there are none."""
    values: dict[str, list[Any]] = {}
    for sweep in sweeps:
        key, equals, text = sweep.partition("=")
        if not (key and equals and text):
            raise LabError(f"--sweep {sweep!r}: expected KEY=VALUE or KEY=VALUE,VALUE")
        values[key] = [_value(word) for word in text.split(",")]
    return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]


def _value(word: str) -> Any:
    words = {"none": None, "true": True, "false": False}
    if word.lower() in words:
        return words[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _target(name: str) -> tuple[str, Any]:
    """The platform, and the device to compile for where it is not here."""
    if name.startswith("aot:"):
        from bench.kernels import ahead

        found = ahead.target(name.removeprefix("aot:"))
        return ahead.platform_of(found), found
    import jax

    here = jax.default_backend()
    if name and name not in PLATFORMS:
        raise LabError(f"--target {name}: expected {', '.join(PLATFORMS)} or aot:DEVICE")
    if name and name != here:
        raise LabError(f"--target {name}: JAX runs on {here} here; to compile for another device take --target aot:DEVICE")
    return here, None


def _here(trial: Trial, platform: str, limits: Any, repeats: int) -> Result:
    """Check a trial, and time it if it is right."""
    import jax

    from bench.kernels.measure import Flush, median_seconds, summary

    subject, blank = trial.subject, Result(shape=trial.shape_name, variant=str(trial))
    try:
        makings = [subject.make(trial.shape, seed) for seed in range(2)]
        inputs = [jax.block_until_ready(trial.prepare(making)) for making in makings]
        call = jax.jit(trial.function())
        error = subject.error(trial.shape, makings[0], call(*inputs[0]), jax.jit(subject.define)(*makings[0]))
        if not error <= subject.tolerance(trial.shape):
            return replace(blank, error=error, passed=False)
        seconds, spread = summary(median_seconds(call, inputs, Flush(platform), repeats))
    except Exception as problem:  # a variant may do anything; the next is to run all the same
        return replace(blank, problem=f"{type(problem).__name__}: {problem}")
    cost = subject.cost(trial.shape)
    return replace(
        blank,
        error=error,
        passed=True,
        seconds=seconds,
        spread=spread,
        num_bytes=cost.num_bytes,
        operations=cost.operations,
        bytes_per_second=cost.num_bytes / seconds,
        operations_per_second=cost.operations / seconds,
        share=limits.floor_seconds(cost.num_bytes, cost.operations) / seconds,
    )


def _ahead(trial: Trial, device: Any, files: Sequence[Path]) -> Result:
    from bench.kernels.ahead import compile_trial

    figures = compile_trial(trial, device, files)
    return Result(
        shape=trial.shape_name,
        variant=str(trial),
        temp_bytes=figures.temp_bytes,
        code_bytes=figures.code_bytes,
        bundles=sum(figures.bundles.values()),
        spills=sum(figures.spills.values()),
        registers=max(figures.registers.values(), default=0),
        shared_bytes=max(figures.shared_bytes.values(), default=0),
        problem=figures.error,
    )


def _save(trials: Sequence[Trial], results: Sequence[Result], limits: Any) -> str:
    """Keep the winner's options."""
    from pallas_kernels import tuned

    shapes = {result.shape for result in results}
    if len(shapes) != 1:
        raise LabError(f"--save needs one shape to find a winner on, found {sorted(shapes)}; choose with --shape and --sweep")
    best = winner(results)
    if best is None or limits is None:
        raise LabError("--save: nothing was timed, so nothing won")
    trial = next(trial for trial in trials if str(trial) == best.variant)
    if not trial.options:
        raise LabError(f"--save: the winner, {best.variant}, has no options set; sweep some with --sweep, or name --variant")
    path = tuned.save(CONFIGS, limits.device_kind, f"{trial.subject.name}.{trial.variant.name}", trial.options)
    return f"kept {trial.options} in {path}"


def _listing() -> str:
    lines = []
    for name, subject in sorted(SUBJECTS.items()):
        lines.append(name)
        lines += [f"  shape {shape_name}: {shape}" for shape_name, shape in subject.shapes.items()]
        for one in subject.variants.values():
            takes = ", ".join(f"{key}={value}" for key, value in one.options.items()) or "nothing to set"
            lines.append(f"  variant {one.name} ({', '.join(one.platforms)}): {takes}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
