"""Start to first token, and peak memory, of a fresh process.

Owns the child, `python -m bench.startup CONFIG`, which prints its marks as JSON lines, and `measure`, which spawns it with an
empty and then a warm compile cache. The clock runs from before the process exists, so the interpreter's start and every
import count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench import ours
from bench.workloads import WORKLOADS, prompts
from jaxserve.config import ServeConfig
from jaxserve.from_mapping import from_mapping

ALLOWANCE_BYTES = 1 << 30
"""What a process may take beside weights and KV pool: the interpreter, JAX, programs and activations."""


@dataclass(frozen=True, slots=True)
class Start:
    """What one fresh process took.

    Attributes:
        first_token_seconds: from before the process existed to its first output token, with everything compiled.
        peak_bytes: the most resident memory, over warm-up and 32 sequences at once.
        weight_bytes, kv_bytes: of the parameters and the KV pool.
    """

    first_token_seconds: float
    peak_bytes: int
    weight_bytes: int
    kv_bytes: int

    @property
    def allowed_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + ALLOWANCE_BYTES


def measure(config: ServeConfig) -> tuple[Start, Start]:
    """Start twice, with no compile cache and then with the one that the first start left.

    Raises:
        RuntimeError: the child failed; the message has its last words.
    """
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-cache-") as cache:
        config = replace(config, engine=replace(config.engine, compile_cache=cache))
        return _start(config), _start(config)


def _start(config: ServeConfig) -> Start:
    command = [sys.executable, "-m", "bench.startup", json.dumps(asdict(config))]
    with tempfile.TemporaryFile("w+") as errors:
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child:
            assert child.stdout is not None
            marks = (json.loads(line) for line in child.stdout if line.startswith("{"))
            next(marks, None)
            first_token_seconds = time.perf_counter() - started
            sizes = next(marks, None)
        if child.returncode or sizes is None:
            errors.seek(0)
            last_words = "".join(errors.readlines()[-10:])
            raise RuntimeError(f"{' '.join(command)}: exit code {child.returncode}:\n{last_words}")
    return Start(first_token_seconds=first_token_seconds, **sizes)


def peak_resident_bytes() -> int:
    """The most memory that this process has had resident."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line")


def main() -> int:
    """The child: build the engine, give one token, run 32 sequences, say what it took."""
    if len(sys.argv) != 2:
        print("usage: python -m bench.startup CONFIG, a ServeConfig as JSON; `bench.offline` starts this", file=sys.stderr)
        return 2
    config = from_mapping(ServeConfig, json.loads(sys.argv[1]), where="argument")
    engine = ours.build(config)
    ours.first_token(engine.core, prompts(WORKLOADS["a"])[0])
    print(json.dumps({"first_token": True}), flush=True)
    ours.run_workload(engine.core, WORKLOADS["c"], num_output=8)
    sizes = {
        "peak_bytes": peak_resident_bytes(),
        "weight_bytes": engine.runner.weight_bytes,
        "kv_bytes": engine.runner.kv_bytes,
    }
    print(json.dumps(sizes), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
