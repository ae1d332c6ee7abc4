"""Which cached pages to give up: the policies of `host.prefix` over recorded traffic.

`python -m bench.eviction TRACE.jsonl...` runs the server's own prefix tree over traces with a line a request, whose `hash_ids`
name the blocks of 512 tokens of its prompt (Mooncake's format, Qin et al., 2024). One block is one page here. Requests are
served one after the other, so what is compared is the order of eviction and nothing else. Reported, for pools of several
sizes, is the part of all prompt tokens that was found, and the part of the work: later tokens cost more, since they attend to
more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.host.memory import Memory
from jaxserve.host.prefix import Policy, PrefixTree, cost_aware, least_recently_used
from jaxserve.plan import RunnerLimits
from jaxserve.request import Request
from jaxserve.request import Sequence as LiveSequence

BLOCK_TOKENS = 512
LINEAR_BLOCKS = 60.0
"""Blocks of context at which attention costs as much as all else: about 30,000 tokens for an 8B model of 32 layers and 4,096
dimensions, by floating-point operations."""

POLICIES: dict[str, Policy] = {"lru": least_recently_used, "cost-aware": cost_aware(LINEAR_BLOCKS)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy found in one pool.

    Attributes:
        token_share, work_share: of prompt tokens, and of the cost of computing them, that were found; 0 to 1.
        num_evicted: blocks.
    """

    token_share: float
    work_share: float
    num_evicted: int


def read_trace(path: Path) -> list[list[int]]:
    """The blocks of each request, in order of arrival."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def replay(requests: Iterable[list[int]], num_blocks: int, policy: Policy) -> Outcome:
    """Serve `requests` one after the other from a pool of `num_blocks`; those that cannot fit are left out."""
    limits = RunnerLimits(num_blocks, 1, max_seqs=1, max_step_tokens=1, max_context=num_blocks, vocab_size=1)
    memory = Memory(limits, PrefixTree(1, policy))
    asked = hit = asked_work = hit_work = 0.0
    for number, blocks in enumerate(requests):
        if len(blocks) > num_blocks:
            continue
        # The token after the blocks is what at least has to be computed; nothing is kept of it.
        seq = LiveSequence(number, Request(request_id="", prompt=(0,)), [*blocks, 0], 1, turn=number)
        found = memory.find(seq)
        memory.open(seq, found)
        num_found = len(found.nodes)
        memory.grow(seq, len(blocks) - num_found)
        seq.planned = seq.dispatched = len(blocks)
        memory.close(seq)
        asked, hit = asked + len(blocks), hit + num_found
        asked_work, hit_work = asked_work + _work(len(blocks)), hit_work + _work(num_found)
    return Outcome(hit / asked, hit_work / asked_work, memory.num_evicted)


def _work(num_blocks: int) -> float:
    """The cost of a prefix of so many blocks, in blocks without attention."""
    return num_blocks + num_blocks * (num_blocks - 1) / 2 / LINEAR_BLOCKS


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each trace."""
    parser = argparse.ArgumentParser(prog="python -m bench.eviction", description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE.jsonl", help="a line a request, with hash_ids")
    parser.add_argument(
        "--blocks", default="1000,4000,16000,64000", metavar="N,...", help="pool sizes (default: 1000,4000,16000,64000)"
    )
    args = parser.parse_args(argv)
    for path in args.traces:
        requests = read_trace(path)
        total = sum(map(len, requests))
        print(f"{path.name}: {len(requests)} requests, {total} blocks, {len({b for r in requests for b in r})} different")
        print(f"{'blocks':>10}{'policy':>14}{'tokens found':>14}{'work saved':>12}{'evicted':>10}{'seconds':>9}")
        for num_blocks in map(int, args.blocks.split(",")):
            for name, policy in POLICIES.items():
                started = time.perf_counter()
                outcome = replay(requests, num_blocks, policy)
                seconds = time.perf_counter() - started
                print(
                    f"{num_blocks:>10}{name:>14}{outcome.token_share:>14.1%}{outcome.work_share:>12.1%}"
                    f"{outcome.num_evicted:>10}{seconds:>9.1f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
