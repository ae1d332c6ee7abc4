"""How often a program that XLA compiles for an H200 goes over its large arrays, and with how many launches.

    python -m tests.kernels.ladder.passes ROWS VOCABULARY

compiles the step's draws, in a process of its own, and prints a line of JSON for each computation that launches kernels.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict, dataclass

LAUNCHING = ("fusion", "copy", "custom-call", "sort", "reduce", "reduce-window", "gather")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\{$")
_BRANCHES = re.compile(r"(?:true_computation|false_computation)=(%[\w.-]+)|branch_computations=\{([^}]*)\}")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = (.+?) ([a-z-]+)\((.*)$")


@dataclass
class Passes:
    """Of one computation, which other ones may call.

    Attributes:
        launches: operations that are kernels of their own; a sort may be several.
        reads, writes: of arrays of the size in question.
        branches: computations of which it runs one.
        loops: computations that it repeats.
    """

    launches: int = 0
    reads: int = 0
    writes: int = 0
    branches: tuple[str, ...] = ()
    loops: tuple[str, ...] = ()


def count_passes(program: str, shape: str) -> dict[str, Passes]:
    """By computation of an optimised program, those inside of kernels left out.

    Args:
        shape: of the arrays in question, as "f32[16,262144]".
    """
    shapes: dict[str, str] = {}
    found: dict[str, Passes] = {}
    of, inside = "", set(re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", program))
    for line in program.splitlines():
        if heading := _COMPUTATION.match(line):
            of = heading[1]
            continue
        instruction = _INSTRUCTION.match(line)
        if not instruction or of in inside:
            continue
        name, result, operation, rest = instruction.groups()
        shapes[name] = result
        passes = found.setdefault(of, Passes())
        if operation == "conditional":
            passes.branches += tuple(re.findall(r"%([\w.-]+)", " ".join(map("".join, _BRANCHES.findall(rest)))))
        elif operation == "while":
            passes.loops += tuple(re.findall(r"body=%([\w.-]+)", rest))
        elif operation in LAUNCHING:
            operands = re.findall(r"%([\w.-]+)", rest.split(")")[0])
            passes.launches += 1
            passes.reads += sum(shapes.get(operand, "").startswith(shape) for operand in operands)
            passes.writes += shape in result
    return found


def main() -> None:
    """Compile and count."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    from pallas_kernels.aot import TARGETS, target_devices
    from pallas_kernels.programs import sample

    rows, vocab = map(int, sys.argv[1:])
    function, arguments = sample(target_devices(TARGETS["h200"], 1), impl="xla", num_rows=rows, vocab_size=vocab)
    program = function.lower(*arguments).compile().as_text()
    for name, passes in count_passes(program, f"f32[{rows},{vocab}]").items():
        print(json.dumps({"name": name, **asdict(passes)}))


if __name__ == "__main__":
    main()
