"""Which room may import which: the table of arrows, and a checker that reads imports with `ast`.

Imports inside functions and under `TYPE_CHECKING` are arrows too, as are `import_module("...")` with a literal name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

BATCH_FILES = ("jaxserve.batch_file", "jaxserve.journal", "jaxserve.disk")
FLOOR_0 = (
    *("jaxserve.errors", "jaxserve.config", "jaxserve.model_config", "jaxserve.from_mapping"),
    *("jaxserve.constraint", "jaxserve.request", "jaxserve.plan"),
    "jaxserve.__version__",
)
NETWORK_AND_LOOPS = frozenset({"asyncio", "socket", "socketserver", "ssl", "http", "selectors", "urllib"})
ARRAYS = ("jax", "jaxlib", "numpy", "ml_dtypes", "jaxtyping")


@dataclass(frozen=True, slots=True)
class Room:
    """What a room may import beside itself: prefixes of modules, ours and others'.

    The standard library is open to all but for the `forbidden` parts.
    """

    allowed: tuple[str, ...] = ()
    forbidden: frozenset[str] = field(default_factory=frozenset)


ROOMS: dict[str, Room] = {
    **dict.fromkeys(FLOOR_0, Room(FLOOR_0)),
    "jaxserve.flags": Room(FLOOR_0),
    "jaxserve.batch_file": Room(FLOOR_0),
    "jaxserve.disk": Room(FLOOR_0),
    "jaxserve.journal": Room((*FLOOR_0, "jaxserve.disk")),
    "jaxserve.host": Room(FLOOR_0),
    "jaxserve.engine": Room((*FLOOR_0, "jaxserve.host", "tokenizers", "sentencepiece", "jinja2", "llguidance")),
    "jaxserve.server": Room(
        (*FLOOR_0, *BATCH_FILES, "jaxserve.engine", "jaxserve.host.admission", "aiohttp", "msgspec", "prometheus_client")
    ),
    "pallas_kernels": Room((*ARRAYS, "llvmlite"), NETWORK_AND_LOOPS),
    "jaxserve.models": Room((*ARRAYS, "pallas_kernels", "jaxserve.model_config", "jaxserve.errors"), NETWORK_AND_LOOPS),
    "jaxserve.device": Room((*FLOOR_0, *ARRAYS, "pallas_kernels", "jaxserve.models"), NETWORK_AND_LOOPS),
    "checkpoints": Room(
        (*ARRAYS, "safetensors", "gguf", "orbax", "tensorstore", "huggingface_hub", "tqdm"), NETWORK_AND_LOOPS
    ),
}
ROOF = (
    "jaxserve.launch",
    "jaxserve.serving",
    "jaxserve.adapters",
    "jaxserve.weights",
    "jaxserve.sampling_defaults",
    "jaxserve.vocabulary",
    "jaxserve.__main__",
    "jaxserve.inspect_model",
    "jaxserve.inspect_report",
    "jaxserve.offline",
)


def check_tree(root: Path, packages: Iterable[str]) -> list[str]:
    """Violations in every module of `packages` under `root`, as `path:line: what`."""
    violations = []
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            relative = path.relative_to(root)
            parts = relative.with_suffix("").parts
            is_package = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if is_package else parts)
            for violation in check_source(module, path.read_text(), is_package=is_package):
                violations.append(f"{relative}:{violation}")
    return violations


def check_source(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Violations in one module's source, as `line: what`."""
    if _within(module, ROOF):
        return []
    if module == "jaxserve":
        name, room = module, Room()
    else:
        name = _longest_prefix(module, ROOMS)
        if not name:
            return [f"1: {module} belongs to no room of the table in tests/arrows.py"]
        room = ROOMS[name]
    return [
        f"{line}: {module} may not import {target} (room {name}: {', '.join(room.allowed) or 'standard library'})"
        for line, target in _imports(module, source, is_package)
        if not _may_import(name, room, target)
    ]


def _may_import(name: str, room: Room, target: str) -> bool:
    top = target.split(".", 1)[0]
    if top in sys.stdlib_module_names:
        return top not in room.forbidden
    return _within(target, (name,) if name != "jaxserve" else ()) or _within(target, room.allowed)


def _within(module: str, prefixes: Iterable[str]) -> bool:
    return bool(_longest_prefix(module, prefixes))


def _longest_prefix(module: str, prefixes: Iterable[str]) -> str:
    return max((p for p in prefixes if module == p or module.startswith(p + ".")), key=len, default="")


def _imports(module: str, source: str, is_package: bool) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = _resolve(module, is_package, node)
            # `from jaxserve import device` imports a room; `from jaxserve.plan import StepPlan` a name of a module.
            for target in sorted({f"{base}.{a.name}" if _is_hallway(base) else base for a in node.names}):
                yield node.lineno, target
        elif isinstance(node, ast.Call) and _is_import_call(node.func) and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node.lineno, argument.value


def _resolve(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def _is_hallway(module: str) -> bool:
    """Whether names taken from this package are its modules, since it gives none of its own."""
    return module in ("jaxserve", "jaxserve.host")


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")
