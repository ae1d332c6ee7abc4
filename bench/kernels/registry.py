"""What the lab can run: subjects, and variants of them. A variant is a function registered in one line:

    @variant("softmax")
    def mine(x, *, block=128): ...

Its keyword arguments are what `--set` and `--sweep` may set. Knows no kernel; JAX is imported by whoever registers one.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

PLATFORMS = ("cpu", "gpu", "tpu")


class LabError(Exception):
    """Something that was asked for does not exist or cannot be; the message says what does and can."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a call cannot do without: bytes read and written once, and operations."""

    num_bytes: float
    operations: float


@dataclass(frozen=True, slots=True)
class Variant:
    """Attributes:
    run: takes the subject's arguments, then `options` by keyword; is jitted with the options fixed.
    prepare: takes the same and gives what `run` is called with; runs once, outside the clock.
    platforms: where it runs.
    """

    name: str
    run: Callable[..., Any]
    prepare: Callable[..., tuple[Any, ...]] | None = None
    platforms: tuple[str, ...] = PLATFORMS

    @property
    def options(self) -> dict[str, Any]:
        """Names and defaults of what may be set."""
        found: dict[str, Any] = {}
        for function in (self.run, self.prepare):
            if function is not None:
                parameters = inspect.signature(function).parameters.values()
                found |= {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY}
        return found


@dataclass(slots=True)
class Subject:
    """A kernel in the lab.

    Attributes:
        shapes: frozen dataclasses by name, the first being the default; their fields may be set and swept too.
        make: arguments for a shape and a seed.
        define: the definition, on the same arguments.
        cost: of a shape.
        error: how far a result is from the definition's, given the shape and arguments.
        tolerance: the largest error that passes.
    """

    name: str
    shapes: dict[str, Any]
    make: Callable[[Any, int], tuple[Any, ...]]
    define: Callable[..., Any]
    cost: Callable[[Any], Cost]
    error: Callable[[Any, tuple[Any, ...], Any, Any], float]
    tolerance: Callable[[Any], float]
    variants: dict[str, Variant] = field(default_factory=dict)


SUBJECTS: dict[str, Subject] = {}


def add(subject: Subject) -> Subject:
    """Register a subject."""
    SUBJECTS[subject.name] = subject
    return subject


def variant(
    subject: str, *, platforms: tuple[str, ...] = PLATFORMS, prepare: Callable[..., tuple[Any, ...]] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function under its name.

    Raises:
        LabError: no such subject.
    """

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        name = run.__name__.strip("_")
        find(subject).variants[name] = Variant(name, run, prepare, platforms)
        return run

    return register


def find(name: str) -> Subject:
    """The subject of that name, or a `LabError` that lists them."""
    if name not in SUBJECTS:
        raise LabError(f"no kernel {name!r}; there are {', '.join(sorted(SUBJECTS))}")
    return SUBJECTS[name]


def load(path: Path) -> None:
    """Run a file that registers variants."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise LabError(f"--load {path}: no such Python file")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@dataclass(frozen=True, slots=True)
class Trial:
    """One variant with its options on one shape; `settings` are what made them, of the shape and of the variant."""

    subject: Subject
    variant: Variant
    shape_name: str
    shape: Any
    options: dict[str, Any]
    settings: dict[str, Any]

    def __str__(self) -> str:
        changed = [f"{key}={value}" for key, value in self.options.items()]
        return " ".join([self.variant.name, *changed])

    def prepare(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the function is called with, of what the subject made."""
        prepare = self.variant.prepare
        return arguments if prepare is None else prepare(*arguments, **self._options_of(prepare))

    def function(self) -> Callable[..., Any]:
        """The variant with its options fixed."""
        return partial(self.variant.run, **self._options_of(self.variant.run))

    def _options_of(self, function: Callable[..., Any]) -> dict[str, Any]:
        takes = inspect.signature(function).parameters
        return {key: value for key, value in self.options.items() if key in takes}


def plan(
    subject: Subject, *, platform: str, shapes: list[str], variants: list[str], sweeps: list[dict[str, Any]]
) -> list[Trial]:
    """Every wanted variant on every wanted shape with every combination of settings that it knows.

    Args:
        variants: empty for all that run on the platform.
        sweeps: combinations of settings; each belongs to a field of the shapes, or to an option of a wanted variant.

    Raises:
        LabError: a name that does not exist, or a setting that nothing takes.
    """
    for name in variants:
        if name not in subject.variants:
            raise LabError(f"{subject.name} has no variant {name!r}; there are {', '.join(sorted(subject.variants))}")
    wanted = [subject.variants[name] for name in variants or subject.variants]
    able = [one for one in wanted if platform in one.platforms]
    if not able:
        where = {one.name: one.platforms for one in wanted}
        raise LabError(f"no variant of {subject.name} runs on {platform}: {where}")
    trials: dict[str, Trial] = {}
    for shape_name in shapes or [next(iter(subject.shapes))]:
        if shape_name not in subject.shapes:
            raise LabError(f"{subject.name} has no shape {shape_name!r}; there are {', '.join(subject.shapes)}")
        for settings in sweeps:
            shape = subject.shapes[shape_name]
            of_shape = {key: value for key, value in settings.items() if key in {f.name for f in fields(shape)}}
            rest = settings.keys() - of_shape.keys()
            known = set().union(*(one.options for one in able))
            if rest - known:
                has = sorted({f.name for f in fields(shape)} | known)
                raise LabError(f"{subject.name} has nothing named {', '.join(sorted(rest - known))} to set; there are {has}")
            title = " ".join([shape_name, *(f"{key}={value}" for key, value in of_shape.items())])
            for one in able:
                options = {key: settings[key] for key in settings if key in one.options and key not in of_shape}
                trial = Trial(subject, one, title, replace(shape, **of_shape), options, {**of_shape, **options})
                trials.setdefault(f"{title}: {trial}", trial)
    return list(trials.values())
