"""What structured output costs: sequences that follow a JSON schema against as many that need not, of the same lengths.

`python -m bench.structured --model NAME` runs both in turn on one engine and says the ratio of their throughputs, and where
the time goes: making masks on the host while the device computes, handing them over, and sampling again on the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.config import EngineConfig, ServeConfig
from jaxserve.constraint import Grammar, GrammarKind
from jaxserve.engine.constraints import Constraints
from jaxserve.offline.generation import Engine
from jaxserve.request import Request, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"type": "string", "maxLength": 60},
        "languages": {"type": "array", "items": {"enum": ["English", "French", "German", "Spanish"]}, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 60}, "city": {"type": "string", "maxLength": 40}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
        "biography": {"type": "string", "maxLength": 400},
    },
    "required": ["name", "age", "occupation", "languages", "address", "biography"],
    "additionalProperties": False,
}


@dataclass(slots=True)
class Spent:
    """Seconds spent in a function, call by call."""

    seconds: list[float] = field(default_factory=list)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds.append(time.perf_counter() - started)

        return timed

    @property
    def milliseconds(self) -> float:
        """The median of a call."""
        return 1e3 * statistics.median(self.seconds) if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Round:
    """What one batch came to.

    Attributes:
        seconds: of the whole batch, prompts included.
        cpu_seconds: of all threads of this process; on CPU that is what the batch cost, whoever else uses the machine.
        exposed_seconds: host time during which the device had nothing to do.
    """

    lengths: list[int]
    texts: list[str]
    seconds: float
    cpu_seconds: float
    num_steps: int
    exposed_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(self.lengths) / self.seconds


def run(engine: Engine, requests: Sequence[Request]) -> Round:
    """All `requests` at once, to their ends."""
    core, outputs = engine.core, {request.request_id: list[int]() for request in requests}
    before, started, cpu_started = core.stats(), time.perf_counter(), time.process_time()
    for request in requests:
        core.add(request)
    while core.has_work:
        for event in core.step():
            outputs[event.request_id] += event.tokens
    seconds, cpu_seconds, after = time.perf_counter() - started, time.process_time() - cpu_started, core.stats()
    return Round(
        [len(tokens) for tokens in outputs.values()],
        [engine.tokenizer.decode(tokens) for tokens in outputs.values()],
        seconds,
        cpu_seconds,
        after.num_steps - before.num_steps,
        after.exposed_host_seconds - before.exposed_host_seconds,
    )


def constrained_requests(engine: Engine, count: int, params: SamplingParams) -> list[Request]:
    """`count` requests for a person each, in JSON."""
    constraints = Constraints(engine.tokenizer, engine.limits.vocab_size, engine.core.eos_token_ids)
    params = replace(params, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)))
    constraint = constraints.of(params)
    prompts = [f"A person of the year {1850 + 10 * number}, as JSON with all details:\n" for number in range(count)]
    return [
        Request(
            request_id=str(number),
            prompt=tuple(engine.tokenizer.encode(prompt)),
            params=replace(params, seed=number),
            constraint=constraint,
        )
        for number, prompt in enumerate(prompts)
    ]


def free_requests(requests: Sequence[Request], lengths: Sequence[int]) -> list[Request]:
    """The same requests without constraints, with outputs of these lengths."""
    return [
        replace(request, constraint=None, params=replace(request.params, grammar=None, max_tokens=length, ignore_eos=True))
        for request, length in zip(requests, lengths, strict=True)
    ]


def compare(engine: Engine, count: int, params: SamplingParams, rounds: int) -> None:
    """Run both in turn and print what came of it."""
    requests = constrained_requests(engine, count, params)
    warm = run(engine, requests)
    free = free_requests(requests, warm.lengths)
    run(engine, free)
    masks, handing = Spent(), Spent()
    core: Any = engine.core
    core._scheduler.masks = masks.around(core._scheduler.masks)
    core._runner._constrain = handing.around(core._runner._constrain)
    found: list[tuple[Round, Round]] = []
    for number in range(rounds):
        pair = [run(engine, requests), run(engine, free)] if number % 2 else [run(engine, free), run(engine, requests)][::-1]
        found.append((pair[0], pair[1]))
        assert pair[0].lengths == pair[1].lengths
    whole = sum(_is_json(text) for text in warm.texts)
    lengths = f"{min(warm.lengths)} to {max(warm.lengths)} tokens"
    print(f"{count} sequences of {lengths}, {whole} of them whole, at temperature {params.temperature:g}")
    print(f"{'':>16}{'tokens/s':>10}{'ms a step':>11}{'CPU ms a step':>15}{'exposed ms a step':>19}")
    for name, index in (("constrained", 0), ("free", 1)):
        one = [pair[index] for pair in found]
        rate = statistics.median(each.tokens_per_second for each in one)
        step = statistics.median(1e3 * each.seconds / each.num_steps for each in one)
        cpu = statistics.median(1e3 * each.cpu_seconds / each.num_steps for each in one)
        exposed = statistics.median(1e3 * each.exposed_seconds / each.num_steps for each in one)
        print(f"{name:>16}{rate:>10.1f}{step:>11.2f}{cpu:>15.2f}{exposed:>19.3f}")
    ratios = sorted(pair[0].tokens_per_second / pair[1].tokens_per_second for pair in found)
    print(f"ratio {statistics.median(ratios):.3f}, of rounds {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    print(f"masks {masks.milliseconds:.2f} ms a step, handing them over {handing.milliseconds:.2f} ms", flush=True)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each way of sampling."""
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", metavar="NAME")
    parser.add_argument("--seqs", type=int, default=16, metavar="N", help="sequences at once (default: 16)")
    parser.add_argument("--max-seqs", type=int, metavar="N", help="places in a step (default: as many as sequences)")
    parser.add_argument("--tokens", type=int, default=160, metavar="N", help="output tokens at most (default: 160)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of each kind (default: 5)")
    args = parser.parse_args(argv)
    from jaxserve import launch

    engine = launch.build_engine(ServeConfig(model=args.model, engine=EngineConfig(max_seqs=args.max_seqs or args.seqs)))
    for params in (SamplingParams(temperature=0.0, max_tokens=args.tokens), SamplingParams(max_tokens=args.tokens)):
        compare(engine, args.seqs, params, args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
