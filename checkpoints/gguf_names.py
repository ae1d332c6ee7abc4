"""Which part of which stored tensor of a GGUF file is which tensor of Hugging Face's.

Owns what undoes the conversion to GGUF: names, the order of query and key rows, products and experts that were stored as
one tensor, and what was added to norms. Knows no bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkpoints.checkpoint import CheckpointError
from checkpoints.gguf_architectures import GLOBAL_NAMES, Architecture
from checkpoints.gguf_rope import ROPE_TENSORS

Shape = tuple[int, ...]

LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
QKV = ("attn_q", "attn_k", "attn_v")
GATE_UP = ("ffn_gate_exps", "ffn_up_exps")


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of Hugging Face's, as values of a stored one.

    Attributes:
        start: values of the stored tensor before it.
        heads: heads whose rows were interleaved; 0 for none.
        offset: to add to each value.
    """

    stored: str
    start: int
    shape: Shape
    heads: int = 0
    offset: float = 0.0


def parts_of(shapes: Mapping[str, Shape], row: Architecture, config: Mapping[str, Any]) -> dict[str, Part]:
    """Every tensor that Hugging Face has, by its name. A stored one that is not known keeps its name.

    Raises:
        CheckpointError: a stored tensor does not divide into what it should hold, or holds what another does.
    """
    split = _Splitter(row, config)
    parts: dict[str, Part] = {}
    for stored, shape in shapes.items():
        for name, part in split(stored, shape) if stored not in ROPE_TENSORS else ():
            if name in parts:
                raise CheckpointError(f"{stored} and {parts[name].stored} both hold {name}")
            parts[name] = part
    return parts


def rows_from_interleaved(num_rows: int, num_heads: int) -> np.ndarray:
    """Indices that take query or key rows from GGUF's order (rotary pairs adjacent) to Hugging Face's (halves)."""
    return np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2).swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Splitter:
    row: Architecture
    config: Mapping[str, Any]

    def __call__(self, stored: str, shape: Shape) -> Iterator[tuple[str, Part]]:
        layer = LAYER_TENSOR.fullmatch(stored)
        offset = -self.row.norm_offset if stored.endswith("norm.weight") else 0.0
        if layer is None:
            stem, _, kind = stored.rpartition(".")
            name = f"{GLOBAL_NAMES[stem]}.{kind}" if stem in GLOBAL_NAMES else stored
            yield name, Part(stored, 0, shape, offset=offset)
            return
        number, module, kind = layer.groups()
        prefix = f"model.layers.{number}."
        names = self.row.layer_names
        if module in names and "{}" in names[module]:
            yield from self.experts(stored, shape, prefix, kind, (module,))
        elif module in names:
            heads = self.interleaved_heads(stored, shape, module)
            yield f"{prefix}{names[module]}.{kind}", Part(stored, 0, shape, heads, offset)
        elif module == "attn_qkv":
            yield from self.queries_keys_values(stored, shape, prefix, kind)
        elif module == "ffn_gate_up_exps" and GATE_UP[0] in names:
            yield from self.experts(stored, shape, prefix, kind, GATE_UP)
        else:
            yield stored, Part(stored, 0, shape)

    def interleaved_heads(self, stored: str, shape: Shape, module: str) -> int:
        if not self.row.interleaved or module not in ("attn_q", "attn_k"):
            return 0
        heads = self.config["num_attention_heads" if module == "attn_q" else "num_key_value_heads"]
        if not shape or shape[0] % (2 * heads):
            raise CheckpointError(f"{stored} {list(shape)} does not divide into {heads} heads of even size")
        return heads

    def queries_keys_values(self, stored: str, shape: Shape, prefix: str, kind: str) -> Iterator[tuple[str, Part]]:
        config = self.config
        dim, kv_heads = config["head_dim"], config["num_key_value_heads"]
        rows = [config["num_attention_heads"] * dim, kv_heads * dim, kv_heads * dim]
        if not shape or shape[0] != sum(rows):
            raise CheckpointError(f"{stored} {list(shape)} must have {sum(rows)} rows: those of queries, keys and values")
        start = 0
        for module, count in zip(QKV, rows, strict=True):
            part = (count, *shape[1:])
            heads = self.interleaved_heads(stored, part, module)
            yield f"{prefix}{self.row.layer_names[module]}.{kind}", Part(stored, start, part, heads)
            start += math.prod(part)

    def experts(
        self, stored: str, shape: Shape, prefix: str, kind: str, modules: tuple[str, ...]
    ) -> Iterator[tuple[str, Part]]:
        """One tensor for each expert and each of `modules`, which lie one after the other within an expert."""
        if len(shape) < 2 or shape[1] % len(modules):
            raise CheckpointError(f"{stored} {list(shape)} must have a row for each expert, of {len(modules)} equal parts")
        part = (shape[1] // len(modules), *shape[2:])
        for index in range(shape[0] * len(modules)):
            expert, module = divmod(index, len(modules))
            name = self.row.layer_names[modules[module]].format(expert)
            yield f"{prefix}{name}.{kind}", Part(stored, index * math.prod(part), part)
