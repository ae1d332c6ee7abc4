"""Reads the reference values in this folder. Owns their layout on disk; knows numpy and nothing of JAX or PyTorch.

`make_references.py` made them; README.md says how.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
TINY_NAMES = tuple(sorted(path.stem.removeprefix("tiny_") for path in HERE.glob("tiny_*.npz")))
FAMILY_NAMES = tuple(sorted(path.stem for path in (HERE / "families").glob("*.npz")))
MIXTURE_NAMES = tuple(sorted(path.stem.removeprefix("moe_") for path in HERE.glob("moe_*.npz")))
DEMO_NAMES = ("english", "code", "mixed")
GEMMA_TEXTS = {"english": ("english",), "code": ("code",), "long": ("mixed", "english", "code")}
"""Texts for Gemma, by the files that they are made of; the third is longer than its window."""

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyReference:
    """A tiny random Llama model and what `transformers` computes with it in float32.

    Attributes:
        config: its `config.json`.
        weights: parameters by Hugging Face name, float32 (each exact in float16), `[out, in]` for matrices.
        input_ids: [T], one sequence.
        logits: [T, V], of every position of `input_ids`.
        greedy_tokens: [16], the greedy continuation.
        greedy_gaps: [16], by how much each greedy token's logit exceeds the runner-up's; above 0.02 everywhere.
    """

    name: str
    config: dict[str, Any]
    weights: dict[str, Floats]
    input_ids: Ints
    logits: Floats
    greedy_tokens: Ints
    greedy_gaps: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyReference:
    """A tiny random model of any family and what `transformers` computes with it in float32.

    Attributes:
        name: "FAMILY-WHAT", where WHAT is what it is there to prove.
        config: its `config.json`.
        context: tokens of the longest context that it is to be served with, which decides between long rope's factors.
        weights: parameters by Hugging Face name, float32 (each exact in float16): `drawn_weights`.
        input_ids: [T + 32], a prompt and its greedy continuation.
        num_prompt: T.
        logits: [T + 32, V], of every position of `input_ids`.
    """

    name: str
    config: dict[str, Any]
    context: int
    weights: dict[str, Floats]
    input_ids: Ints
    num_prompt: int
    logits: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReference:
    """What `transformers` computes in float32 with the demo model on one real text.

    Attributes:
        text: the text, which the tokenizer turns into `input_ids` [T] and no special tokens.
        argmax, argmax_logit, logsumexp: [T], of each position's logits.
        sampled_ids, sampled_logits: [R] fixed vocabulary ids, and their logits at each position [T, R].
        last_logits: [V], of the last position.
        greedy_tokens: [64], the greedy continuation, end-of-sequence tokens not heeded.
        greedy_gaps: [64], by how much each greedy token's logit exceeds the runner-up's; may be a near-tie.
    """

    name: str
    text: str
    input_ids: Ints
    argmax: Ints
    argmax_logit: Floats
    logsumexp: Floats
    sampled_ids: Ints
    sampled_logits: Floats
    last_logits: Floats
    greedy_tokens: Ints
    greedy_gaps: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaReference:
    """What `transformers` computes in float32 with Gemma 3 270M on one real text; as `DemoReference`, but for what is left
    out, since the vocabulary is large. The text begins with the beginning-of-text token."""

    text: str
    input_ids: Ints
    argmax: Ints
    argmax_logit: Floats
    logsumexp: Floats
    sampled_ids: Ints
    sampled_logits: Floats
    greedy_tokens: Ints
    greedy_gaps: Floats


@dataclass(frozen=True, slots=True)
class EncodeReference:
    """A string and its ids under the demo model's tokenizer, nothing added around it."""

    text: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class ChatReference:
    """A conversation, and what the demo model's chat template makes of it."""

    messages: list[dict[str, str]]
    add_generation_prompt: bool
    text: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class TokenizerReference:
    """What the demo model's tokenizer does.

    Attributes:
        encode: ordinary strings.
        encode_special: strings that contain, or nearly contain, special tokens; whole ones become one id here.
        chat: conversations.
    """

    encode: list[EncodeReference]
    encode_special: list[EncodeReference]
    chat: list[ChatReference]


def load_tiny(name: str) -> TinyReference:
    """The tiny model `name`, one of `TINY_NAMES`."""
    return _load_tiny(name, HERE / f"tiny_{name}.npz")


def load_mixture(name: str) -> TinyReference:
    """The tiny mixture of experts `name`, one of `MIXTURE_NAMES`. 32 greedy tokens, whose gaps are above 0.01."""
    return _load_tiny(name, HERE / f"moe_{name}.npz")


def router_gap(name: str) -> float:
    """By how much the last score that the router of a mixture takes exceeds the first that it does not, at least."""
    with np.load(HERE / f"moe_{name}.npz") as data:
        return float(data["router_gap"])


def _load_tiny(name: str, path: Path) -> TinyReference:
    with np.load(path) as data:
        prefix = "weight:"
        return TinyReference(
            name=name,
            config=json.loads(str(data["config"])),
            weights={key[len(prefix) :]: data[key].astype(np.float32) for key in data.files if key.startswith(prefix)},
            **{key: data[key] for key in ("input_ids", "logits", "greedy_tokens", "greedy_gaps")},
        )


def load_family(name: str) -> FamilyReference:
    """The tiny model `name` of a family, one of `FAMILY_NAMES`."""
    with np.load(HERE / "families" / f"{name}.npz") as data:
        recipe = json.loads(str(data["recipe"]))
        weights = drawn_weights(recipe.pop("shapes"), recipe.pop("seed"), recipe.pop("norm_center"))
        return FamilyReference(name=name, **recipe, weights=weights, input_ids=data["input_ids"], logits=data["logits"])


def drawn_weights(shapes: dict[str, list[int]], seed: int, norm_center: int) -> dict[str, Floats]:
    """Random values of the parameters at these paths, under which every part of a model moves its logits.

    Drawn as integers from a generator whose stream numpy has frozen, and scaled by powers of two: so they are the same
    everywhere, need not be kept, and are exact in float16.

    Args:
        norm_center: what weights of norms vary around: 1, or 0 in families that add 1 to them.
    """
    tied = "lm_head.weight" not in shapes

    def drawn(path: str, shape: list[int]) -> Floats:
        generator = np.random.RandomState(zlib.crc32(f"{seed} {path}".encode()))
        values = generator.randint(-127, 128, shape).astype(np.float32)  # of a deviation of 73
        if path.endswith("norm.weight"):
            return norm_center + values * np.float32(2**-8)
        if path.endswith("bias"):
            return values * np.float32(2**-7)
        # Larger, and a model whose head is its embedding would answer each token with itself.
        wanted = 0.75 if tied and path.endswith("embed_tokens.weight") else 1.5
        return values * np.float32(2.0 ** round(math.log2(wanted / 73 / math.sqrt(shape[-1]))))

    return {path: drawn(path, shape) for path, shape in shapes.items()}


def load_demo(name: str) -> DemoReference:
    """The demo model's values on the text `name`, one of `DEMO_NAMES`."""
    text = (HERE / "texts" / f"{name}.txt").read_text(encoding="utf-8")
    prefix = f"{name}:"
    with np.load(HERE / "demo_model.npz") as data:
        arrays = {key[len(prefix) :]: data[key] for key in data.files if key.startswith(prefix)}
        return DemoReference(name=name, text=text, sampled_ids=data["sampled_ids"], **arrays)


def load_gemma(name: str) -> GemmaReference:
    """Gemma's values on the text `name`, one of `GEMMA_TEXTS`."""
    text = "".join((HERE / "texts" / f"{file}.txt").read_text(encoding="utf-8") for file in GEMMA_TEXTS[name])
    prefix = f"{name}:"
    with np.load(HERE / "gemma_model.npz") as data:
        arrays = {key[len(prefix) :]: data[key] for key in data.files if key.startswith(prefix)}
        return GemmaReference(text=text, sampled_ids=data["sampled_ids"], **arrays)


def load_tokenizer() -> TokenizerReference:
    """What the demo model's tokenizer does to strings and conversations."""
    data = json.loads((HERE / "demo_tokenizer.json").read_text(encoding="utf-8"))
    return TokenizerReference(
        encode=[EncodeReference(**entry) for entry in data["encode"]],
        encode_special=[EncodeReference(**entry) for entry in data["encode_special"]],
        chat=[ChatReference(**entry) for entry in data["chat"]],
    )


def write_hf_directory(reference: TinyReference | FamilyReference, path: Path) -> Path:
    """Write a tiny model as a Hugging Face directory (`config.json`, `model.safetensors`), and return `path`."""
    from safetensors.numpy import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(reference.config), encoding="utf-8")
    save_file(reference.weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
