"""Converts a checkpoint to safetensors or Orbax: `python -m checkpoints.convert SRC DST`.

Owns the command line, the choice of dtype and what may be overwritten. Reading and writing are the formats' business.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from tqdm import tqdm

from checkpoints.checkpoint import Checkpoint, CheckpointError, TensorInfo, is_floating, open_checkpoint
from checkpoints.safetensors import DEFAULT_SHARD_BYTES, write_safetensors
from checkpoints.sources import default_models_dir, resolve

Format = Literal["safetensors", "orbax"]

DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
DTYPE_NAMES = {"f32": "float32", "bf16": "bfloat16"} | {name: name for name in DTYPES}

EPILOG = """examples:
  python -m checkpoints.convert model.Q4_1.gguf model-hf
  python -m checkpoints.convert model-hf model-orbax --format orbax --dtype bfloat16
  python -m checkpoints.convert smollm2-135m-instruct smollm2-hf
  python -m checkpoints.convert hf:Qwen/Qwen3-0.6B qwen3-orbax --format orbax

DST appears only when it is complete. Quantised tensors are written dequantised, as float32 unless --dtype says otherwise.
"""


def convert(
    source: Path,
    target: Path,
    *,
    form: Format = "safetensors",
    dtype: str | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    replace: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the checkpoint `source` to the directory `target`, which appears whole or not at all.

    Args:
        form: either holds one tensor in memory at a time; a conversion to Orbax that was killed is carried on by the next.
        dtype: "float32" or "bfloat16" for floating-point tensors; None keeps what `Checkpoint.read` gives.
        shard_bytes: of a safetensors file at most.
        replace: whether a checkpoint that is at `target` may be deleted, once the new one is complete.
        progress: called with bytes done and in all, after each tensor.

    Raises:
        CheckpointError: `source` cannot be read, or `target` cannot be written or must not be replaced.
    """
    _check_target(target, replace)
    _check_apart(source, target)
    with open_checkpoint(source) as checkpoint:
        tensors = {name: _cast_info(info, dtype) for name, info in checkpoint.tensors.items()}
        read = _reader(checkpoint, tensors, progress)
        config = _config(checkpoint.config, dtype)
        if form == "safetensors":
            write_safetensors(target, tensors, read, config, checkpoint.tokenizer, shard_bytes=shard_bytes, replace=replace)
        else:
            from checkpoints.orbax import write_orbax

            key = _fingerprint(source, dtype)
            write_orbax(target, tensors, read, config, checkpoint.tokenizer, replace=replace, key=key)


def _fingerprint(source: Path, dtype: str | None) -> str:
    """What is converted: another only if a file has changed."""
    paths = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return json.dumps([states, dtype])


def _check_target(target: Path, replace: bool) -> None:
    """Refuse a target that holds anything but a checkpoint, however much `replace` insists."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise CheckpointError(f"{target}: is a file; DST must be a directory, or not exist")
    if not replace:
        raise CheckpointError(f"{target}: is not empty; choose another DST, or pass --force to replace it")
    if not (target / "config.json").is_file():
        raise CheckpointError(f"{target}: has no config.json, so it is not a checkpoint, and will not be replaced")


def _check_apart(source: Path, target: Path) -> None:
    """Refuse a target that holds the source among other things."""
    if target.exists() and source.resolve() != target.resolve() and source.resolve().is_relative_to(target.resolve()):
        raise CheckpointError(f"{target}: contains {source}, which replacing it would delete")


def _cast_info(info: TensorInfo, dtype: str | None) -> TensorInfo:
    return TensorInfo(info.shape, DTYPES[dtype]) if dtype is not None and is_floating(info.dtype) else info


def _config(config: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    if dtype is None:
        return dict(config)
    # Transformers before version 5 wrote the dtype under the first of these.
    present = [key for key in ("torch_dtype", "dtype") if key in config] or ["torch_dtype"]
    return dict(config) | dict.fromkeys(present, dtype)


def _reader(
    checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo], progress: Callable[[int, int], None] | None
) -> Callable[[str], np.ndarray]:
    total = sum(info.nbytes for info in tensors.values())
    done = 0

    def read(name: str) -> np.ndarray:
        nonlocal done
        values = checkpoint.read(name).astype(tensors[name].dtype, copy=False)
        done += tensors[name].nbytes
        if progress is not None:
            progress(done, total)
        return values

    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints.convert",
        description="Convert a GGUF file, a Hugging Face directory or an Orbax directory, fetched first if need be.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="GGUF file, Hugging Face directory or Orbax directory; a name from configs/models/; or hf:ORG/NAME",
    )
    parser.add_argument("target", metavar="DST", type=Path, help="directory to write")
    parser.add_argument(
        "--format",
        dest="form",
        choices=("safetensors", "orbax"),
        default="safetensors",
        help="safetensors: a Hugging Face directory, sharded at 4 GiB; orbax: an Orbax directory (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=sorted(DTYPE_NAMES),
        help="dtype of floating-point tensors (default: as stored; float32 if quantised)",
    )
    parser.add_argument("--force", action="store_true", help="replace the checkpoint that is at DST")
    return parser


class _Bar:
    """A progress bar that appears with the first progress, so that an error before it is a single line."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.bar: tqdm | None = None

    def update(self, done: int, total: int) -> None:
        if self.bar is None:
            self.bar = tqdm(desc=self.title, total=total, unit="B", unit_scale=True, file=sys.stderr)
        self.bar.update(done - self.bar.n)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        _check_target(options.target, options.force)  # or what is refused would be fetched first
        source = resolve(options.source, default_models_dir())
        with contextlib.closing(_Bar(f"converting {Path(options.source).name}")) as bar:
            convert(
                source,
                options.target,
                form=options.form,
                dtype=DTYPE_NAMES[options.dtype] if options.dtype else None,
                replace=options.force,
                progress=bar.update,
            )
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
