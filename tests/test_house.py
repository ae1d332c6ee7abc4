"""The house rules that a machine can check: import arrows, clean imports, file sizes, the README's map, what git tracks."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxserve import __version__
from jaxserve.config import ServeConfig
from jaxserve.from_mapping import from_mapping
from tests.arrows import check_source, check_tree

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jaxserve", "pallas_kernels", "checkpoints")


def tracked_files() -> list[Path]:
    """What git tracks; skips where this is not a git checkout (such as an unpacked source distribution)."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in listing.split("\0") if name and (ROOT / name).exists()]


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


# --- arrows -----------------------------------------------------------------------------------------------------------


def test_no_arrow_points_up() -> None:
    violations = check_tree(ROOT, PACKAGES)
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jaxserve.host.pages", "import heapq\nfrom jaxserve.plan import StepPlan\nfrom . import prefix"),
        ("jaxserve.engine.core", "from ..host.scheduler import Scheduler\nimport tokenizers"),
        ("jaxserve.server.app", "import asyncio\nfrom jaxserve.host.admission import Admission"),
        ("jaxserve.server.handlers", "from aiohttp import web\nfrom jaxserve import __version__"),
        ("jaxserve.models.llama", "import jax.numpy as jnp\nfrom pallas_kernels.paged_attention import paged_attention"),
        ("jaxserve.device.runner", "import jax\nfrom jaxserve.models import llama\nfrom jaxserve.plan import StepPlan"),
        ("pallas_kernels.paged_attention.xla", "from pallas_kernels.paged_attention.reference import reference"),
        ("checkpoints.gguf", "import gguf\nfrom gguf.quants import dequantize\nfrom checkpoints.tree import load"),
        ("jaxserve.launch", "from jaxserve.device import runner\nfrom jaxserve.server import app"),
        ("jaxserve.flags", "import argparse\nfrom jaxserve.config import EngineConfig"),
        ("jaxserve.host", "from jaxserve.host.pages import PagePool"),
    ],
)
def test_checker_lets_pass(module: str, source: str) -> None:
    assert check_source(module, source, is_package=module == "jaxserve.host") == []


@pytest.mark.parametrize(
    ("module", "source", "culprit"),
    [
        ("jaxserve.plan", "import numpy", "numpy"),
        ("jaxserve.config", "from jaxserve.host import pages", "jaxserve.host.pages"),
        ("jaxserve.flags", "import jax", "jax"),
        ("jaxserve.batch_file", "from jaxserve.engine import text", "jaxserve.engine"),
        ("jaxserve.host.pages", "import jax", "jax"),
        ("jaxserve.host.pages", "def f():\n    import jax.numpy as jnp", "jax.numpy"),
        ("jaxserve.host.pages", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jax import Array", "jax"),
        ("jaxserve.host.pages", "from ..engine import core", "jaxserve.engine"),
        ("jaxserve.host.pages", "from .. import engine", "jaxserve.engine"),
        ("jaxserve.host.pages", "from jaxserve import device", "jaxserve.device"),
        ("jaxserve.host.pages", "import numpy", "numpy"),
        ("jaxserve.engine.core", "from jaxserve.server import app", "jaxserve.server"),
        ("jaxserve.engine.core", "import aiohttp", "aiohttp"),
        ("jaxserve.engine.core", "from jaxserve.device.runner import Runner", "jaxserve.device.runner"),
        ("jaxserve.engine.core", "import importlib\nimportlib.import_module('jaxserve.device')", "jaxserve.device"),
        ("jaxserve.engine.core", "__import__('jax')", "jax"),
        ("jaxserve.engine.core", "from jaxserve.launch import build_engine", "jaxserve.launch"),
        ("jaxserve.server.app", "from jaxserve.host.scheduler import Scheduler", "jaxserve.host.scheduler"),
        ("jaxserve.server.app", "from jaxserve.host import scheduler", "jaxserve.host.scheduler"),
        ("jaxserve.server.app", "from jaxserve.models import llama", "jaxserve.models"),
        ("jaxserve.models.llama", "from jaxserve.device import pack", "jaxserve.device"),
        ("jaxserve.models.llama", "import tokenizers", "tokenizers"),
        ("jaxserve.models.llama", "import asyncio", "asyncio"),
        ("jaxserve.device.runner", "import asyncio.events", "asyncio.events"),
        ("jaxserve.device.runner", "from aiohttp import web", "aiohttp"),
        ("jaxserve.device.runner", "from jaxserve.host.scheduler import Scheduler", "jaxserve.host.scheduler"),
        ("jaxserve.device.runner", "from checkpoints import tree", "checkpoints"),
        ("pallas_kernels.paged_attention", "from jaxserve.model_config import ModelConfig", "jaxserve.model_config"),
        ("pallas_kernels.paged_attention", "import socket", "socket"),
        ("checkpoints.tree", "from jaxserve.errors import ModelLoadError", "jaxserve.errors"),
        ("checkpoints.tree", "import jaxserve", "jaxserve"),
        ("checkpoints.tree", "import torch", "torch"),
    ],
)
def test_checker_catches(module: str, source: str, culprit: str) -> None:
    violations = check_source(module, source)
    assert len(violations) == 1
    assert f"may not import {culprit} " in violations[0]


def test_checker_knows_every_room(tmp_path: Path) -> None:
    """A module in no room is itself a violation: a new room needs a row in the table."""
    assert "belongs to no room" in check_source("jaxserve.cellar.wine", "")[0]
    package = tmp_path / "jaxserve" / "host"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "pages.py").write_text("\nimport jax\n")
    (violation,) = check_tree(tmp_path, ["jaxserve"])
    assert violation.startswith("jaxserve/host/pages.py:2: ")


# --- imports in a fresh process ---------------------------------------------------------------------------------------


def test_left_tower_never_loads_jax() -> None:
    loaded = run_python(
        "import importlib, pkgutil, sys\n"
        "for room in ('jaxserve.host', 'jaxserve.engine', 'jaxserve.server'):\n"
        "    package = importlib.import_module(room)\n"
        "    for module in pkgutil.walk_packages(package.__path__, room + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib', 'flax')))\n"
    )
    assert loaded.strip() == "[]"


def test_importing_jaxserve_is_free_of_side_effects() -> None:
    changes = run_python(
        "import logging, os, signal, sys, threading\n"
        "before = set(sys.modules)\n"
        "def state():\n"
        "    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]\n"
        "    return dict(os.environ), handlers, logging.root.handlers[:], logging.root.level, threading.active_count()\n"
        "earlier = state()\n"
        "import jaxserve\n"
        "assert state() == earlier\n"
        "print(sorted(name for name in set(sys.modules) - before if name.split('.')[0] not in sys.stdlib_module_names))\n"
    )
    assert changes.strip() == "['jaxserve']"


def test_help_does_not_load_jax() -> None:
    """A typo in a flag must not cost the seconds that importing the right tower takes."""
    loaded = run_python(
        "import sys\n"
        "from jaxserve.__main__ import main\n"
        "try:\n"
        "    main(['serve', '--help'])\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 0, stop.code\n"
        "print('jax' in sys.modules)\n"
    )
    assert "--model" in loaded
    assert loaded.splitlines()[-1] == "False"


# --- the shape of the code --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("room", "limit"), [("jaxserve", 400), ("checkpoints", 400), ("bench", 400), ("tests", 700)])
def test_files_stay_small(room: str, limit: int) -> None:
    """Kernels aside: an unrolled kernel is long for good reasons."""
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in (ROOT / room).rglob("*.py")}
    assert lengths
    too_long = [f"{path}: {lines} lines" for path, lines in lengths.items() if lines > limit]
    assert not too_long, f"over {limit} lines: {too_long}"


def test_every_module_says_what_it_owns() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for room in (*PACKAGES, "bench")
        for path in (ROOT / room).rglob("*.py")
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent, f"without a module docstring: {silent}"


# --- the README, the changelog and git --------------------------------------------------------------------------------


def readme_map() -> set[str]:
    """The paths in backticks in the first column of the README's map."""
    text = (ROOT / "README.md").read_text()
    section = text.split("\n## The map", 1)[1].split("\n## ", 1)[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, flags=re.MULTILINE)
    return {path for cell in cells for path in re.findall(r"`([^`]+)`", cell)}


def test_readme_map_lists_every_entry_and_room() -> None:
    tracked = tracked_files()
    top_level = {path.parts[0] + ("/" if len(path.parts) > 1 else "") for path in tracked}
    packages = {f"{path.parent}/" for path in tracked if path.name == "__init__.py" and path.parts[0] in PACKAGES}
    roof = {str(path) for path in tracked if path.match("jaxserve/*.py") and path.name != "__init__.py"}
    missing = (top_level | packages | roof) - readme_map()
    assert not missing, f"README.md, 'The map' lacks {sorted(missing)}"


def test_readme_map_names_only_what_exists() -> None:
    ghosts = sorted(path for path in readme_map() if not (ROOT / path).exists())
    assert not ghosts, f"README.md, 'The map' names {ghosts}"


def test_no_results_in_git() -> None:
    results = re.compile(r"(^|/)results?/|\.(log|prof|pb|xplane|csv|gguf|whl|pyc|ipynb)$", flags=re.IGNORECASE)
    found = [str(path) for path in tracked_files() if results.search(str(path))]
    large = [str(path) for path in tracked_files() if (ROOT / path).stat().st_size > 1 << 20]
    assert not found + large, f"results or large files in git: {found + large}"


def test_no_path_of_one_machine() -> None:
    machine_path = re.compile(r"(?<![\w.~-])/(?:root|work|home/\w+|Users/\w+)/")
    found = []
    for path in tracked_files():
        text = (ROOT / path).read_bytes().decode("utf-8", errors="ignore")
        if path.suffix not in (".npz", ".npy", ".safetensors") and machine_path.search(text):
            found.append(str(path))
    assert not found, f"these name a path of one machine: {found}"


def test_version_matches_changelog() -> None:
    newest = re.search(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__


@pytest.mark.parametrize("path", sorted((ROOT / "configs/serving").glob("*.toml")), ids=lambda path: path.stem)
def test_serving_configs_are_valid(path: Path) -> None:
    assert from_mapping(ServeConfig, tomllib.loads(path.read_text()), where=str(path)).model
