"""Reads LoRA adapters as PEFT saves them: `adapter_config.json` beside `adapter_model.safetensors`.

Owns the format: names, scales, and what in it is more than a pair of matrices beside a product, which is refused. Does not
know which products a model has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.checkpoint import CheckpointError
from checkpoints.files import FileReader, aligned_empty, naming, read_json_object
from checkpoints.safetensors import read_header

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_PROBLEMS = 10
MAX_REPEATS = 4
LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
"""Of what a pair may hold: more is infinite in bfloat16, and times the zeros of others' rows no number."""

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.\w+)?\.weight")
_CHANGES_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin training that change the model's own weights too, which are then not those that are served."""


def _given(value: Any) -> bool:
    return bool(value)


_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "use_dora": (_given, "its products are normed (DoRA)"),
    "bias": (lambda value: value not in (None, "none"), "biases were trained too; train with bias='none'"),
    "lora_bias": (_given, "its products have biases"),
    "modules_to_save": (_given, "whole modules were trained too"),
    "trainable_token_indices": (_given, "embeddings were trained too"),
    "target_parameters": (_given, "it changes parameters that are no product's"),
    "layer_replication": (_given, "it repeats layers"),
    "alora_invocation_tokens": (_given, "it is active after certain tokens only (aLoRA)"),
    "use_qalora": (_given, "its products have pooled inputs (QALoRA)"),
}
"""Keys that ask for more than we do: when, and what that means."""


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter.

    Attributes:
        base_model: what it was trained on, as its maker spelled it; "" if it does not say.
        pairs: for each module that it changes, such as `model.layers.0.self_attn.q_proj`, A of `[r, in]` and B of `[out, r]`
            in float32, B times the scale: the module's product `W @ x` becomes `W @ x + B @ (A @ x)`.
    """

    base_model: str
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return max(a.shape[0] for a, _ in self.pairs.values())


def read_peft(path: Path) -> PeftAdapter:
    """Read the adapter in the directory `path`.

    Raises:
        CheckpointError: it cannot be read, or is more than pairs of matrices; lists everything that is wrong with it.
    """
    with naming(path):
        _check_files(path)
    config = read_json_object(path / CONFIG)
    problems = _problems_of_config(config)
    if problems:
        raise CheckpointError(f"{path / CONFIG}: not supported: {'; '.join(problems)}")
    sides = _read_sides(path / WEIGHTS)
    return PeftAdapter(str(config.get("base_model_name_or_path") or ""), _pairs(config, sides, path / WEIGHTS))


def _check_files(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path}: expected a directory with {CONFIG} and {WEIGHTS}")
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path}: has no {CONFIG}")
    if not (path / WEIGHTS).is_file():
        advice = "adapter_model.bin runs code when it is read: save it with safe_serialization=True"
        raise CheckpointError(f"{path}: has no {WEIGHTS}; {advice}")


def _problems_of_config(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type must be 'LORA', found {config.get('peft_type')!r}")
    for key, (asks, meaning) in _REFUSED.items():
        if asks(config.get(key)):
            problems.append(f"{key} is {config[key]!r:.80}: {meaning}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_WEIGHTS):
        problems.append(
            f"init_lora_weights is {start!r}: the model's own weights were changed too; save it with "
            "path_initial_model_for_weight_conversion"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        problems.append(f"r must be a whole number of at least 1, found {rank!r}")
    if not _is_number(alpha):
        problems.append(f"lora_alpha must be a number, found {alpha!r:.80}")
    problems += _problems_of_pattern(config, "rank_pattern", "whole number", _is_count)
    return problems + _problems_of_pattern(config, "alpha_pattern", "number", _is_positive)


def _problems_of_pattern(config: Mapping[str, Any], key: str, kind: str, is_one: Callable[[Any], bool]) -> list[str]:
    pattern = config.get(key) or {}
    if not (isinstance(pattern, Mapping) and all(map(_is_expression, pattern)) and all(map(is_one, pattern.values()))):
        return [f"{key} must have a positive {kind} for each expression, found {pattern!r:.80}"]
    slow = next((text for text in pattern if _may_take_for_ever(text)), None)
    return (
        [] if slow is None else [f"{key}: {slow!r:.80} has too many repetitions, or one of a group, and could take for ever"]
    )


def _is_expression(text: str) -> bool:
    try:
        re.compile(text)
        re.compile(_at_the_end(text))
    except re.error:
        return False
    return True


def _may_take_for_ever(text: str) -> bool:
    """Whether trying the expression on a name could take longer than some milliseconds, in which Python does nothing else."""
    return re.search(r"\)[*+{]", text) is not None or len(re.findall(r"[*+{]", text)) > MAX_REPEATS


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _read_sides(path: Path) -> dict[tuple[str, str], np.ndarray]:
    """The file's tensors by module, as the file calls it, and side."""
    sides: dict[tuple[str, str], np.ndarray] = {}
    problems = []
    file = FileReader(path)
    try:
        for name, entry in read_header(file).items():
            match = _NAME.fullmatch(name)
            if match is None:
                problems.append(f"{name} is no lora_A or lora_B of a product")
            elif (match["module"], match["side"]) in sides:
                problems.append(f"{name} comes after another of the same product")
            elif entry.info.dtype.name not in ("float32", "float16", "bfloat16") or len(entry.info.shape) != 2:
                problems.append(f"{name} is {entry.info.dtype.name} of {entry.info.shape}, expected a matrix of floats")
            else:
                values = aligned_empty(entry.info.shape, entry.info.dtype)
                file.read_into(values, entry.offset)
                sides[match["module"], match["side"]] = values.astype(np.float32)
    finally:
        file.close()
    _raise_all(path, problems)
    return sides


def _module(name: str) -> str:
    """The module as a text model's checkpoint calls it: adapters of bare models and of those that see have other prefixes."""
    for prefix in ("model.language_model.", "language_model.model.", "model."):
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return "model." + name if name.startswith("layers.") else name


def _pairs(config: Mapping[str, Any], sides: Mapping[tuple[str, str], np.ndarray], path: Path) -> dict[str, Any]:
    pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    problems = []
    for module in dict.fromkeys(module for module, _ in sides):
        a, b = sides.get((module, "A")), sides.get((module, "B"))
        rank = _of_pattern(config.get("rank_pattern"), module, config["r"])
        if a is None or b is None:
            problems.append(f"{module} has lora_{'B' if a is None else 'A'} and no lora_{'A' if a is None else 'B'}")
        elif not a.shape[0] == b.shape[1] == rank:
            problems.append(f"{module} has A of {a.shape} and B of {b.shape}, expected rank {rank!r:.20} as {CONFIG} says")
        elif _module(module) in pairs:
            problems.append(f"{module} is there under another name too")
        else:
            alpha = _of_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            with np.errstate(over="ignore"):
                pairs[_module(module)] = a, b * np.float32(scale)
            if not all((np.abs(side) <= LARGEST).all() for side in pairs[_module(module)]):
                problems.append(f"{module} has numbers that are not finite, or are not once they are scaled")
    _raise_all(path, problems)
    if not pairs:
        raise CheckpointError(f"{path}: has no tensors")
    return pairs


def _of_pattern(pattern: Mapping[str, float] | None, module: str, default: float) -> float:
    """What PEFT takes for a module: the first key that, as a regular expression, the end of its name matches."""
    for key, value in (pattern or {}).items():
        if re.fullmatch(_at_the_end(key), module):
            return value
    return default


def _at_the_end(key: str) -> str:
    return rf"(.*\.)?({key})"


def _raise_all(path: Path, problems: list[str]) -> None:
    if problems:
        more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise CheckpointError(f"{path}: not supported: {'; '.join(problems[:MAX_PROBLEMS] + more)}")
