"""What a checkpoint is to the rest of the house, and how a path becomes one.

Owns the `Checkpoint` protocol, its plain values and `open_checkpoint`. A checkpoint shows Hugging Face tensor names in
Hugging Face layout, a config shaped like `config.json`, and tokenizer files, so a model family needs one name map. How each
format gets there is the business of the module that reads it.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import ml_dtypes
import numpy as np

GGUF_MAGIC = b"GGUF"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class CheckpointError(Exception):
    """A checkpoint that cannot be found, read or written. The message names the file and says what to do."""


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` holds floating-point numbers, those that NumPy itself does not know included."""
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype of what `Checkpoint.read` returns for a tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the array that `read` returns."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token that is found in the text as it is, whatever a SentencePiece model makes of the rest.

    Attributes:
        special: a control token, and not text.
        lstrip, rstrip: white space before, or after it belongs to it.
    """

    token_id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer as the texts and bytes that tokenizer libraries read; this room never builds one.

    Attributes:
        tokenizer_json: text of a Hugging Face `tokenizer.json`.
        sentencepiece: a serialised SentencePiece model, when there is no `tokenizer_json`. Its pieces that `added_tokens` are
            about are control symbols there.
        added_tokens: beside `sentencepiece`, in order of their ids.
        prefix_each: where `sentencepiece` puts a space before a text, it does so after every added or control token, and not
            only at the very beginning.
        chat_template: Jinja source of the default chat template.
        tool_template: of the one for conversations with tools, where that is another one.
        bos_token, eos_token: the text of these tokens.
        add_bos: a plain prompt starts with `bos_token`. Encode without special tokens and put it there.
    """

    tokenizer_json: str | None = None
    sentencepiece: bytes | None = None
    added_tokens: tuple[AddedToken, ...] = ()
    prefix_each: bool = True
    chat_template: str | None = None
    tool_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool = False


class Checkpoint(Protocol):
    """An open checkpoint. Safe to read from several threads; use as a context manager or `close` it.

    Attributes:
        path: the file or directory, for messages.
        config: as Hugging Face's `config.json`; `eos_token_id` may be a list, and `generation_config` holds what the files say
            of sampling, as `generation_config.json` has it.
        tokenizer: None where the checkpoint has none.
        tensors: Hugging Face name to what `read` will return.
    """

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def tokenizer(self) -> TokenizerFiles | None: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> np.ndarray:
        """Read one tensor into a new array: float32 if stored quantised, else the stored dtype.

        Raises:
            CheckpointError: no such tensor, or its bytes cannot be read.
        """
        ...

    def read_into(self, name: str, target: np.ndarray) -> None:
        """Read one tensor into `target`, C-contiguous and of its shape, converted to its dtype.

        Raises:
            CheckpointError: as `read` does.
        """
        ...

    def stored_bytes(self) -> Mapping[str, int]:
        """Bytes of tensors on disk, by the name of the type in which they are stored."""
        ...

    def close(self) -> None:
        """Release the files. Arrays that were read stay valid."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class CheckpointBase:
    """The parts that every format shares: attributes and the context manager. Subclasses add `read` and `close`."""

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        tokenizer: TokenizerFiles | None,
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        self.path = path
        self.config = config
        self.tokenizer = tokenizer
        self.tensors = tensors

    def info(self, name: str) -> TensorInfo:
        """The tensor's shape and dtype, or a `CheckpointError` that it is not there."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        return self.tensors[name]

    def read(self, name: str) -> np.ndarray:
        """See `Checkpoint`."""
        raise NotImplementedError

    def read_into(self, name: str, target: np.ndarray) -> None:
        """See `Checkpoint`; here by way of an array of its own."""
        np.copyto(target, self.read(name), casting="unsafe")

    def stored_bytes(self) -> Mapping[str, int]:
        """Bytes of tensors on disk, by type: here as they are read."""
        counts: collections.Counter[str] = collections.Counter()
        for info in self.tensors.values():
            counts[info.dtype.name] += info.nbytes
        return counts

    def close(self) -> None:
        """Release the files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file, a Hugging Face directory with safetensors, or an Orbax directory.

    A directory that holds several formats is opened as safetensors, else as Orbax. Only headers are read.

    Raises:
        CheckpointError: nothing there, another format (which it names), or a broken file (which it names).
    """
    from checkpoints.files import naming

    with naming(Path(path)):
        return _open(Path(path))


def _open(path: Path) -> Checkpoint:
    # Here, since these modules import this one; and so that a format's libraries are imported only when it is met.
    if path.is_file():
        _check_gguf_file(path)
        from checkpoints.gguf import GgufCheckpoint

        return GgufCheckpoint(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or directory; expected a GGUF file, a Hugging Face or an Orbax directory")
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists():
        from checkpoints.safetensors import SafetensorsCheckpoint

        return SafetensorsCheckpoint(path)
    if _orbax_root(path) is not None:
        from checkpoints.orbax import OrbaxCheckpoint

        return OrbaxCheckpoint(path)
    raise CheckpointError(_unknown_directory(path))


def _orbax_root(path: Path) -> Path | None:
    from checkpoints.files import orbax_root

    return orbax_root(path)


def _check_gguf_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    if magic == GGUF_MAGIC:
        return
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise CheckpointError(f"{path}: is one file of a Hugging Face directory; pass the directory {path.parent}")
    if path.suffix in PICKLES:
        raise CheckpointError(f"{path}: {_pickle_advice(path.parent)}")
    raise CheckpointError(f"{path}: not a GGUF file: it starts with {magic!r}, expected {GGUF_MAGIC!r}")


def _pickle_advice(directory: Path) -> str:
    convert = "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; " + "; ".join(
        f"{kind}.from_pretrained('{directory}').save_pretrained('{directory.name}-safetensors')" for kind in "MT"
    )
    return (
        "is a PyTorch pickle, which can run code when it is read, so it is not. If you trust it, convert it where torch and "
        f'transformers are installed: python -c "{convert}"'
    )


def _unknown_directory(path: Path) -> str:
    expected = "expected *.safetensors with config.json, or an Orbax checkpoint"
    ggufs = sorted(entry.name for entry in path.glob("*.gguf"))
    if ggufs:
        return f"{path}: holds GGUF files; pass one of them: {', '.join(ggufs)}"
    pickles = sorted(entry.name for entry in path.iterdir() if entry.suffix in PICKLES)
    if pickles:
        return f"{path}: {pickles[0]} {_pickle_advice(path)}"
    names = sorted(entry.name for entry in path.iterdir())
    found = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") if names else "an empty directory"
    return f"{path}: not a checkpoint: {expected}, found {found}"
