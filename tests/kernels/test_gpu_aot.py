"""GPU kernels compiled ahead of time for an H200: they compile, for its own instructions, and hardly spill."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from pallas_kernels.aot import search_path
from tests.conftest import ROOT
from tests.kernels.ladder.aot_gpu import CONFIGURATIONS
from tests.kernels.ladder.compiled import require

pytestmark = pytest.mark.slow

MAX_REGISTERS = 168
"""A third of a multiprocessor's for each of three warpgroups; they divide them among themselves once they run."""

# 128 sums of 256 columns leave little room beside them.
SPILLED_BYTES = {"decodes_of_dim256_float8": 256, "prompt_of_dim256": 32, "prompt_of_dim256_in_a_window": 64}


@dataclass(frozen=True)
class Kernel:
    """What the assembler says of one."""

    name: str
    target: str
    registers: int
    spilled_bytes: int


def kernels_in(log: str) -> list[Kernel]:
    pattern = re.compile(
        r"Compiling entry function '(\w+)' for '(\w+)'"
        r".*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        flags=re.DOTALL,
    )
    return [Kernel(m[1], m[2], int(m[5]), max(int(m[3]), int(m[4]))) for m in pattern.finditer(log)]


@cache
def compiled() -> dict[str, tuple[dict[str, Any], list[Kernel]]]:
    """All configurations, in one process."""
    require("h200")
    names = list(CONFIGURATIONS)
    command = [sys.executable, "-m", "tests.kernels.ladder.aot_gpu", *names]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(search_path()))
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found, log = {}, ""
    for line in result.stdout.splitlines():
        if line.startswith('{"name"'):
            about = json.loads(line)
            found[about["name"]] = (about, kernels_in(log))
            log = ""
        else:
            log += line + "\n"
    missing = [name for name in names if name not in found]
    assert not missing, f"the compiler ended at {missing[0]}: {result.stderr[-2000:]}"
    return found


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_compiles_for_h200(name: str) -> None:
    about, kernels = compiled()[name]
    assert "error" not in about, about["error"]
    attention = [kernel for kernel in kernels if "paged_attention" in kernel.name]
    assert len(attention) == ("singles" in CONFIGURATIONS[name]) + ("chunks" in CONFIGURATIONS[name])
    for kernel in kernels:
        assert kernel.target == "sm_90a"
        assert kernel.registers <= MAX_REGISTERS
        assert kernel.spilled_bytes <= SPILLED_BYTES.get(name, 0), kernel
