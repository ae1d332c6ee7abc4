"""Host memory while loading: measured in a process of its own, since a peak cannot be taken back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.checkpoints.builders import tiny_hf

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
# Thread stacks, interpreter and allocator: what a process grows by however small the tensors are.
SLACK = 12 * MIB

SCRIPT = """
import sys, jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec, AxisType
from checkpoints.checkpoint import open_checkpoint
from checkpoints.tree import TensorSource, load_tree

def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) * 1024

path, num_devices, fused = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "fused"
mesh = jax.make_mesh((num_devices,), ("x",), axis_types=(AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("x"))
checkpoint = open_checkpoint(path)
rows = {name: info.shape[0] for name, info in checkpoint.tensors.items()}
width = 1024
if fused:
    names = sorted(rows)
    groups = [tuple(names[i:i + 3]) for i in range(0, len(names), 3)]
    sources = [TensorSource(group, np.concatenate, tuple((rows[n], width) for n in group)) for group in groups]
else:
    sources = [TensorSource((name,)) for name in rows]
def target(n):
    return jax.ShapeDtypeStruct((n, width), np.float32, sharding=sharding)

tree = [target(sum(rows[n] for n in source.names)) for source in sources]
jax.device_put(np.zeros((num_devices, 64), np.float32), sharding).block_until_ready()
weights = sum(int(np.prod(t.shape)) * 4 for t in tree)
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
params = load_tree(checkpoint, tree, sources)
print(status("VmHWM") - before, weights)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "form", "dtype"),
    [(1, "plain", np.float32), (4, "plain", ml_dtypes.bfloat16), (4, "fused", np.float32), (1, "fused", ml_dtypes.bfloat16)],
)
def test_the_peak_stays_under_the_weights_plus_the_largest_tensor(
    tmp_path: Path, num_devices: int, form: str, dtype: type
) -> None:
    sizes = [24 * MIB] + [8 * MIB] * 11 if form == "plain" else [8 * MIB] * 12
    tensors: dict[str, np.ndarray] = {f"t{i:02}": np.ones((size // 4096, 1024), dtype) for i, size in enumerate(sizes)}
    path = tiny_hf(tmp_path / "model", tensors)
    del tensors
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        "JAX_PLATFORMS": "cpu",
        "MALLOC_ARENA_MAX": "2",
    }
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, path, str(num_devices), form],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    peak, weights = map(int, result.stdout.split())
    assert weights == sum(sizes)
    assert peak <= weights + 24 * MIB + SLACK
