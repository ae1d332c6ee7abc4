"""Damaged files of every format: cut anywhere, or with bytes flipped, they are read correctly or refused by name.

What no checksum covers cannot be detected: a flip in tensor data or in the text of a token is still a valid file. So a flip
may succeed, and then every tensor must still have the shape and dtype that the checkpoint announced.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from checkpoints.checkpoint import CheckpointError, TensorInfo, TokenizerFiles, open_checkpoint
from checkpoints.hf_files import write_tokenizer
from checkpoints.orbax import write_orbax
from tests.checkpoints.builders import CONFIG, llama_shapes, random_tensors, read_all, tiny_gguf, tiny_hf

# From the profile, so that quick runs stay quick.
EXAMPLES = settings().max_examples
TOKENIZER = TokenizerFiles(tokenizer_json='{"model": {}}', chat_template="x", bos_token="<s>", add_bos=True)
SMALL: dict[str, np.ndarray] = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.ones(5, np.float16),
    "s": np.zeros((), np.float32),
}


@dataclass(frozen=True)
class Sample:
    """A whole checkpoint, the files of it that may be damaged, and where their headers end."""

    root: Path
    files: dict[str, bytes]
    header_bytes: dict[str, int]
    arrays: dict[str, bytes]


def sample(root: Path, header_bytes: Callable[[str, bytes], int] = lambda name, data: len(data)) -> Sample:
    paths = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    files = {str(path.relative_to(root)): path.read_bytes() for path in paths}
    headers = {name: header_bytes(name, data) for name, data in files.items()}
    with open_checkpoint(root) as checkpoint:
        arrays = {name: values.tobytes() for name, values in read_all(checkpoint).items()}
    return Sample(root, {name: data for name, data in files.items() if data}, headers, arrays)


@pytest.fixture(scope="module")
def gguf_sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    path = tiny_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", random_tensors(llama_shapes(layers=1)))
    size = path.stat().st_size
    data = sum(values.nbytes for values in random_tensors(llama_shapes(layers=1)).values())
    return sample(path, lambda name, content: size - data)


@pytest.fixture(scope="module")
def safetensors_sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    directory = tiny_hf(tmp_path_factory.mktemp("hf") / "m", SMALL, shards=2)
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    write_tokenizer(directory, TOKENIZER)

    def header_bytes(name: str, data: bytes) -> int:
        return 8 + int.from_bytes(data[:8], "little") if name.endswith(".safetensors") else len(data)

    return sample(directory, header_bytes)


@pytest.fixture(scope="module")
def orbax_sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    directory = tmp_path_factory.mktemp("orbax") / "m"
    infos = {name: TensorInfo(values.shape, values.dtype) for name, values in SMALL.items()}
    write_orbax(directory, infos, SMALL.__getitem__, CONFIG, TOKENIZER)
    return sample(directory)


def damaged(whole: Sample, target: Path, name: str, content: bytes) -> Path:
    """A copy of the checkpoint at `target` in which the file `name` has other content."""
    if whole.root.is_file():
        target.write_bytes(content)
        return target
    shutil.copytree(whole.root, target)
    (target / name).write_bytes(content)
    return target


def read_or_refusal(path: Path) -> dict[str, bytes] | None:
    """The bytes of every tensor, or None if the checkpoint was refused with an error that names it. Anything else fails."""
    try:
        with open_checkpoint(path) as checkpoint:
            arrays = read_all(checkpoint)
            assert {n: TensorInfo(a.shape, a.dtype) for n, a in arrays.items()} == dict(checkpoint.tensors)
            return {name: values.tobytes() for name, values in arrays.items()}
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017 (a return follows)
        return None


def cut(whole: Sample, target: Path, where: float, which: int) -> None:
    name = sorted(whole.files)[which % len(whole.files)]
    data = whole.files[name]
    found = read_or_refusal(damaged(whole, target, name, data[: int(where * len(data))]))
    assert found is None or found == whole.arrays


def flip(whole: Sample, target: Path, where: float, which: int, mask: int, count: int) -> None:
    name = sorted(whole.files)[which % len(whole.files)]
    data = bytearray(whole.files[name])
    start = int(where * whole.header_bytes[name])
    for at in range(start, min(start + count, whole.header_bytes[name])):
        data[at] ^= mask
    read_or_refusal(damaged(whole, target, name, bytes(data)))


places = st.floats(0, 1, exclude_max=True)
masks = st.sampled_from([0xFF, 0x80, 0x01, 0x40]) | st.integers(1, 255)
counts = st.sampled_from([1, 1, 8, 64])
files = st.integers(0, 100)


@settings(max_examples=2 * EXAMPLES)
@given(where=places)
@example(where=0.0)
def test_a_cut_gguf_file_is_refused(tmp_path_factory: pytest.TempPathFactory, gguf_sample: Sample, where: float) -> None:
    target = tmp_path_factory.mktemp("cut") / "m.gguf"
    data = gguf_sample.files["."]
    assert read_or_refusal(damaged(gguf_sample, target, ".", data[: int(where * len(data))])) is None


@settings(max_examples=3 * EXAMPLES)
@given(where=places, mask=masks, count=counts)
def test_a_gguf_header_with_flipped_bytes_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, gguf_sample: Sample, where: float, mask: int, count: int
) -> None:
    flip(gguf_sample, tmp_path_factory.mktemp("flip") / "m.gguf", where, 0, mask, count)


@settings(max_examples=2 * EXAMPLES)
@given(where=places, which=files)
def test_a_cut_file_of_a_hugging_face_directory_is_refused_or_did_not_matter(
    tmp_path_factory: pytest.TempPathFactory, safetensors_sample: Sample, where: float, which: int
) -> None:
    cut(safetensors_sample, tmp_path_factory.mktemp("cut") / "m", where, which)


@settings(max_examples=3 * EXAMPLES)
@given(where=places, which=files, mask=masks, count=counts)
def test_a_hugging_face_directory_with_flipped_bytes_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, safetensors_sample: Sample, where: float, which: int, mask: int, count: int
) -> None:
    flip(safetensors_sample, tmp_path_factory.mktemp("flip") / "m", where, which, mask, count)


@pytest.mark.slow
@given(where=places, which=files)
def test_a_cut_file_of_an_orbax_directory_is_refused_or_did_not_matter(
    tmp_path_factory: pytest.TempPathFactory, orbax_sample: Sample, where: float, which: int
) -> None:
    cut(orbax_sample, tmp_path_factory.mktemp("cut") / "m", where, which)


@pytest.mark.slow
@given(where=places, which=files, mask=masks, count=counts)
def test_an_orbax_directory_with_flipped_bytes_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, orbax_sample: Sample, where: float, which: int, mask: int, count: int
) -> None:
    flip(orbax_sample, tmp_path_factory.mktemp("flip") / "m", where, which, mask, count)


def folder_with(path: Path, *names: str) -> None:
    path.mkdir()
    for name in names:
        (path / name).touch()


NOT_CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda p: None, "no such file or directory; expected a GGUF file"),
    "empty file": (lambda p: p.write_bytes(b""), "not a GGUF file: it starts with b''"),
    "wrong magic": (lambda p: p.write_bytes(b"GGML" + bytes(100)), "not a GGUF file: it starts with b'GGML'"),
    "bare magic": (lambda p: p.write_bytes(b"GGUF"), "version would end after the end of the file"),
    "old version": (lambda p: p.write_bytes(b"GGUF\1\0\0\0" + bytes(99)), "versions 2 and 3, little-endian, .* version 1"),
    "big-endian": (lambda p: p.write_bytes(b"GGUF\0\0\0\3" + bytes(99)), "found a big-endian file"),
    "absurd counts": (lambda p: p.write_bytes(b"GGUF\3\0\0\0" + b"\xff" * 16 + bytes(99)), "truncated or corrupt: .* entries"),
    "empty directory": (folder_with, "not a checkpoint: .* found an empty directory"),
    "a directory of GGUFs": (lambda p: folder_with(p, "x.gguf"), r"holds GGUF files; pass one of them: x\.gguf"),
    "pickles": (lambda p: folder_with(p, "pytorch_model.bin"), "pytorch_model.bin is a PyTorch pickle.* python -c"),
    "something else": (lambda p: folder_with(p, "README"), "not a checkpoint: .* found README"),
}


@pytest.mark.parametrize("case", NOT_CHECKPOINTS)
def test_what_is_not_a_checkpoint_is_told_apart(tmp_path: Path, case: str) -> None:
    make, message = NOT_CHECKPOINTS[case]
    path = tmp_path / "thing"
    make(path)
    with pytest.raises(CheckpointError, match=f"thing: .*{message}"):
        open_checkpoint(path)


def test_a_file_of_a_hugging_face_directory_points_to_the_directory(tmp_path: Path) -> None:
    tiny_hf(tmp_path, SMALL)
    with pytest.raises(CheckpointError, match=f"is one file of a Hugging Face directory; pass the directory {tmp_path}"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_a_file_cut_while_open_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    with open_checkpoint(path) as checkpoint:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        with pytest.raises(CheckpointError, match=r"m\.gguf: ends at byte .* truncated while in use"):
            read_all(checkpoint)
