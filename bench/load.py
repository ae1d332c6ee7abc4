"""How fast weights load, against the disk: `python -m bench.load`.

Makes a synthetic Llama in a folder, then in turn reads its files one after the other (unbuffered, 8 MiB at a time: what the
disk gives) and loads it into parameters in a fresh process, from the open to the last array on the device. Before each, the
files' pages are dropped from the system's cache (`POSIX_FADV_DONTNEED`, which any owner of a file may; what was written is
synced first), so that both come from the disk. Then the same out of the cache.

A virtual machine's free memory may be its host's until it is touched, which takes longer than any load: so the child touches
as much as it will need, and gives it back, before the clock runs. Owns the model, the child and the report.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from bench.startup import peak_resident_bytes
from checkpoints.checkpoint import TensorInfo
from checkpoints.orbax import write_orbax
from checkpoints.safetensors import write_safetensors

BLOCK_BYTES = 8 << 20
TOUCHED = 4
"""Times the files' bytes that are touched: into float32 bfloat16 takes twice its size, and what is given back comes again in
any order."""
STORED = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}
WRITERS: dict[str, Any] = {"safetensors": write_safetensors, "orbax": write_orbax}
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
}
"""Of Llama 3.2 1B, with fewer tokens, so that layers are what is loaded."""


@dataclass(frozen=True, slots=True)
class Load:
    """One load in a fresh process.

    Attributes:
        grown_bytes: peak resident memory over what the process had before.
        weight_bytes, largest_bytes: of the parameters, and of the largest with the tensors that it is made of.
    """

    seconds: float
    grown_bytes: int
    weight_bytes: int
    largest_bytes: int


def config_of(num_bytes: int, dtype: np.dtype) -> dict[str, Any]:
    """A Llama whose weights take about `num_bytes`."""
    hidden, mlp = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    key_value = hidden * SHAPE["num_key_value_heads"] // SHAPE["num_attention_heads"]
    of_layer = hidden * (2 * hidden + 2 * key_value + 3 * mlp) * dtype.itemsize
    table = SHAPE["vocab_size"] * hidden * dtype.itemsize
    layers = max(1, round((num_bytes - table) / of_layer))
    return {
        **SHAPE,
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }


def make_model(target: Path, form: str, num_bytes: int, dtype: np.dtype) -> None:
    """Write the model, of random bytes that no file system can make smaller."""
    from jaxserve.models.families import FAMILIES, model_config_from_hf
    from jaxserve.models.params import map_specs

    config = config_of(num_bytes, dtype)
    tensors: dict[str, TensorInfo] = {}

    def add(spec: Any) -> None:
        tensors.update({name: TensorInfo(shape, dtype) for name, shape in spec.tensors})

    map_specs(add, FAMILIES["llama"].specs(model_config_from_hf(config)))
    noise = (0.02 * np.random.default_rng(0).standard_normal(1 << 22, np.float32)).astype(dtype)

    def values(name: str) -> np.ndarray:
        return np.resize(np.roll(noise, hash(name) % 1000), tensors[name].shape)

    WRITERS[form](target, tensors, values, config, None)


def files_of(target: Path) -> list[Path]:
    """Files with weights, in order."""
    return sorted(path for path in target.rglob("*") if path.is_file() and path.stat().st_size > 1 << 16)


def drop_from_cache(files: Sequence[Path]) -> None:
    """Have the system forget what it has in memory of these files."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_seconds(files: Sequence[Path]) -> float:
    """Time to read the files one after the other, past the system's cache where the file system lets us."""
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        started = time.perf_counter()
        for path in files:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            except OSError:
                descriptor = os.open(path, os.O_RDONLY)
            try:
                offset = 0
                while (count := os.preadv(descriptor, [block], offset)) > 0:
                    offset += count
                    if count % 512:
                        break
            finally:
                os.close(descriptor)
        return time.perf_counter() - started


def load_seconds(target: Path, dtype: str) -> Load:
    """Load in a process of its own, since a peak of memory cannot be taken back."""
    command = [sys.executable, "-m", "bench.load", "--child", str(target), "--into", dtype]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Load(**json.loads(done.stdout))


def _child(target: Path, dtype: str) -> None:
    import jax

    from checkpoints.tree import TensorSource
    from jaxserve import weights
    from jaxserve.models.families import model_config_from_hf
    from jaxserve.models.sharding import make_mesh

    mesh = make_mesh(1)
    jax.device_put(np.zeros(64, np.float32)).block_until_ready()
    _touch_memory(TOUCHED * sum(path.stat().st_size for path in files_of(target)))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak_resident_bytes()
    with tqdm(desc="loading", unit="B", unit_scale=True, file=sys.stderr) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        started = time.perf_counter()
        with weights.open_model(str(target)) as checkpoint:
            config = model_config_from_hf(checkpoint.config)
            params = weights.load_params(checkpoint, config, mesh, np.dtype(jax.numpy.dtype(dtype)), progress)
            seconds = time.perf_counter() - started
            abstract, mapping, _ = weights._params_wanted(config, mesh, np.dtype(jax.numpy.dtype(dtype)))
            sources = jax.tree.leaves(mapping, is_leaf=lambda node: isinstance(node, TensorSource))
            made = [
                leaf.size * leaf.dtype.itemsize + sum(checkpoint.tensors[name].nbytes for name in source.names)
                for leaf, source in zip(jax.tree.leaves(abstract), sources, strict=True)
            ]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(json.dumps(asdict(Load(seconds, peak_resident_bytes() - before, size, max(made)))))


def _touch_memory(num_bytes: int) -> None:
    held = [np.ones(BLOCK_BYTES, np.uint8) for _ in range(num_bytes // BLOCK_BYTES)]
    del held


def measure(target: Path, dtype: str, rounds: int) -> Iterator[tuple[float, Load, Load]]:
    """Of each round: seconds of the disk alone, of a load from the disk, and of one out of the system's cache."""
    files = files_of(target)
    for _ in range(rounds):
        drop_from_cache(files)
        alone = read_seconds(files)
        drop_from_cache(files)
        cold = load_seconds(target, dtype)
        read_all(files)
        yield alone, cold, load_seconds(target, dtype)


def read_all(files: Sequence[Path]) -> None:
    """Have the system keep these files in memory."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(BLOCK_BYTES):
                pass


def report(rounds: Sequence[tuple[float, Load, Load]], num_bytes: int) -> str:
    """The medians, and the median of each round's ratio."""
    ratio = statistics.median(alone / cold.seconds for alone, cold, _ in rounds)
    disk, load, warm = (
        num_bytes / statistics.median(seconds) / 1e9
        for seconds in ([r[0] for r in rounds], [r[1].seconds for r in rounds], [r[2].seconds for r in rounds])
    )
    worst = max(rounds, key=lambda one: one[1].grown_bytes)[1]
    over = worst.grown_bytes - worst.weight_bytes
    return (
        f"{num_bytes / 1e9:.2f} GB of files, {len(rounds)} rounds, medians\n"
        f"  the disk alone       {disk:6.2f} GB/s\n"
        f"  loading from it      {load:6.2f} GB/s, {ratio:.0%} of the disk in the same round\n"
        f"  loading out of cache {warm:6.2f} GB/s\n"
        f"  peak memory          {worst.grown_bytes / 1e6:.0f} MB: weights {worst.weight_bytes / 1e6:.0f} MB and "
        f"{over / 1e6:.0f} MB (the largest parameter and its tensors: {worst.largest_bytes / 1e6:.0f} MB)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model's files (default: %(default)s)")
    parser.add_argument("--format", dest="form", choices=sorted(WRITERS), default="safetensors")
    parser.add_argument("--stored", choices=sorted(STORED), default="bfloat16", help="type on disk (default: %(default)s)")
    parser.add_argument(
        "--into", choices=("float32", "bfloat16"), default="float32", help="type of parameters (default: float32)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary one")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        _child(options.child, options.into)
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-load-", dir=options.folder) as folder:
        target = Path(folder) / "model"
        make_model(target, options.form, int(options.gib * 2**30), STORED[options.stored])
        num_bytes = sum(path.stat().st_size for path in files_of(target))
        print(report(list(measure(target, options.into, options.rounds)), num_bytes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
