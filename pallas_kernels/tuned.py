"""Tuned settings of kernels for a kind of device: a TOML file each, `configs/kernels/`, that `python -m bench.kernels` writes.

Owns the files' folder, names and form. Settings reach a kernel as keyword arguments, so that one that it does not know raises
there; `paged_attention.options` has the engine live with a file that is broken or was meant for another version.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

Settings = dict[str, dict[str, int]]
"""Options by kernel and implementation, as "quant_matmul.tpu"."""


def default_folder() -> Path:
    """Where the files are: in an installed package within jaxserve, in a checkout beside it."""
    root = Path(__file__).resolve().parents[1]
    inside = root / "jaxserve" / "configs"
    return (inside if inside.is_dir() else root / "configs") / "kernels"


def file_of(folder: Path, device_kind: str) -> Path:
    """Where the settings for a kind of device lie, whether or not there are any."""
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', device_kind.lower()).strip('-')}.toml"


def load(folder: Path, device_kind: str) -> Settings:
    """The settings for a kind of device; none where nobody tuned for it.

    Raises:
        ValueError: the file cannot be read, or holds something else than tables of whole numbers.
    """
    path = file_of(folder, device_kind)
    if not path.exists():
        return {}
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    for name, options in tables.items():
        if not isinstance(options, dict) or not all(type(value) is int for value in options.values()):
            raise ValueError(
                f"{path}: [{name}] must hold whole numbers, found {options}; python -m bench.kernels writes it anew"
            )
    return tables


def save(folder: Path, device_kind: str, name: str, options: dict[str, int]) -> Path:
    """Keep `options` for "kernel.implementation" beside what the file holds for others."""
    path = file_of(folder, device_kind)
    tables = {**load(folder, device_kind), name: options}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"# Tuned on {device_kind} by python -m bench.kernels."]
    for table, values in sorted(tables.items()):
        lines += ["", f'["{table}"]', *(f"{key} = {value}" for key, value in sorted(values.items()))]
    path.write_text("\n".join(lines) + "\n")
    return path
