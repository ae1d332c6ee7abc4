"""Reads Hugging Face's `config.json`, in the variants that are about: the keys that all families share, checked.

Owns the errors for what is missing or wrong. What a family's own keys mean is the family's business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.config import RopeScaling
from jaxserve.errors import ConfigError

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}

ROPE_KEYS = frozenset(
    (
        *("type", "rope_type", "rope_theta", "factor", "partial_rotary_factor", "attention_factor"),
        *("original_max_position_embeddings", "max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "llama_4_scaling_beta", "finetuned"),
        *("short_factor", "long_factor", "short_mscale", "long_mscale"),
    )
)
"""Of `rope_scaling`: those that are heeded, and those that say nothing about the mathematics."""


@dataclass(frozen=True, slots=True)
class HfConfig:
    """The text model's part of a `config.json`.

    Attributes:
        where: named in errors, such as the file's path.
        heeded: keys that were asked for; it grows.
    """

    values: Mapping[str, Any]
    where: str
    heeded: set[str] = field(default_factory=set)

    def with_defaults(self, **defaults: Any) -> HfConfig:
        """The same with what its family takes for keys that are absent."""
        return replace(self, values={**defaults, **self.values})

    def error(self, key: str, expected: str) -> ConfigError:
        """An error that says what `key` should be and what it is."""
        found = repr(self.values[key])[:80] if key in self.values else "no such key"
        return ConfigError(f"{self.where}: {key} must be {expected}, found {found}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`; `default` where it is absent or null."""
        self.heeded.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; demanded if there is no default."""
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise self.error(key, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; demanded if there is no default."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """A number; None where it is null, which differs from absent where there is a default."""
        value = self.get(key) if key in self.values else default
        return None if value is None else self.number(key, default)

    def optional_count(self, key: str, default: int | None = None) -> int | None:
        """A positive integer; None where it is null, which differs from absent where there is a default."""
        value = self.get(key) if key in self.values else default
        return None if value is None else self.count(key, default)

    def num_experts(self) -> int:
        """Of a mixture, under either of its names."""
        names = ("num_experts", "num_local_experts")
        given = [name for name in names if self.get(name) is not None]
        return self.count((*given, *names)[0])

    @property
    def rope(self) -> Mapping[str, Any]:
        """`rope_scaling` or `rope_parameters`, as transformers 5 calls it; {} for neither."""
        return self._rope("rope_scaling") or self._rope("rope_parameters")

    def rope_of(self, layer_type: str) -> Mapping[str, Any]:
        """What `rope_parameters` has for layers of a type, under its name; {} for nothing."""
        self.heeded.add(f"rope_parameters.{layer_type}")
        value = self._rope("rope_parameters").get(layer_type) or {}
        if not isinstance(value, Mapping):
            raise self.error("rope_parameters", f"an object with an object {layer_type}")
        return value

    def _rope(self, key: str) -> Mapping[str, Any]:
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return value

    def activation(self, key: str = "hidden_act", default: str = "silu") -> str:
        """Of the MLP's gate, under our name."""
        name = self.get(key, default)
        if name not in ACTIVATIONS:
            raise self.error(key, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def common(self) -> dict[str, Any]:
        """Fields of `ModelConfig` that every family has, `family` and the biases excepted."""
        num_heads = self.count("num_attention_heads")
        hidden = self.count("hidden_size")
        dim = self.count("head_dim", max(1, hidden // num_heads))
        return {
            "vocab_size": self.count("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self.count("intermediate_size"),
            "num_layers": self.count("num_hidden_layers"),
            "num_heads": num_heads,
            "num_kv_heads": self.count("num_key_value_heads", num_heads),
            "head_dim": dim,
            "max_position": self.count("max_position_embeddings"),
            "rms_norm_eps": self.number("rms_norm_eps", 1e-6),
            "activation": self.activation(),
            "rope_theta": self.rope_theta(),
            "rope_scaling": self.rope_scaling(),
            "rotary_dim": self._rotary_dim(dim),
            "tie_embeddings": self.flag("tie_word_embeddings"),
            "bos_token_id": self.get("bos_token_id"),
            "eos_token_ids": self._eos_token_ids(),
        }

    def rope_theta(self, default: float = 10_000.0) -> float:
        """The base of rotary frequencies."""
        return float(self.rope.get("rope_theta") or self.get("rope_theta") or default)

    def _rotary_dim(self, head_dim: int) -> int:
        part = float(self.rope.get("partial_rotary_factor") or self.get("partial_rotary_factor") or 1.0)
        if not 0 < part <= 1:
            raise self.error("partial_rotary_factor", "above 0 and at most 1")
        return 0 if part == 1.0 else int(head_dim * part)

    def _eos_token_ids(self) -> tuple[int, ...]:
        value = self.get("eos_token_id", [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(item) is int and item >= 0 for item in ids):
            raise self.error("eos_token_id", "a token id or a list of them")
        return tuple(ids)

    def windowed(self, default: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which layers have a window, by `layer_types` if it is there."""
        types = self.get("layer_types")
        if types is None:
            return default
        known = {"sliding_attention": True, "full_attention": False}
        if not isinstance(types, list) or not all(kind in known for kind in types):
            raise self.error("layer_types", "a list of sliding_attention and full_attention")
        return tuple(known[kind] for kind in types)

    def rope_of_kinds(self, default_theta: float, default_local_theta: float) -> dict[str, Any]:
        """Fields of `ModelConfig` where layers with a window have a rotary base of their own and are not scaled.

        transformers 5 writes the settings of both kinds under their names.
        """
        of_full, of_windowed = self.rope_of("full_attention"), self.rope_of("sliding_attention")
        if self.rope_scaling(of_windowed) is not None:
            raise self.error("rope_parameters", "without scaling in sliding_attention")
        scaled = self._rope("rope_scaling") or of_full or self._rope("rope_parameters")
        theta = float(of_full.get("rope_theta") or self.rope_theta(default_theta))
        return {
            "rope_theta": theta,
            "rope_scaling": self.rope_scaling(scaled),
            "local_rope_theta": float(of_windowed.get("rope_theta") or default_local_theta),
        }

    def windowed_if(self, window: int | None) -> tuple[bool, ...]:
        """All layers, or those of `layer_types`, if there is a window; none if there is none."""
        return () if window is None else self.windowed((True,) * self.count("num_hidden_layers"))

    def rope_scaling(self, rope: Mapping[str, Any] | None = None) -> RopeScaling | None:
        """How `rope`, by default that of the whole model, stretches frequencies; None for not at all."""
        rope = self.rope if rope is None else rope
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "yarn" and rope.get("llama_4_scaling_beta"):
            raise ConfigError(f"{self.where}: llama_4_scaling_beta needs rope scaling yarn, found {kind!r}")
        if kind == "default":
            return None
        if kind == "su":
            kind = "longrope"
        readers = {"linear": self._linear, "llama3": self._llama3, "yarn": self._yarn, "longrope": self._longrope}
        if kind not in readers:
            raise ConfigError(f"{self.where}: rope scaling {kind!r} is not supported; known: default, {', '.join(readers)}")
        unknown = sorted(key for key in rope if key not in ROPE_KEYS and rope[key] is not None)
        if unknown:
            raise ConfigError(f"{self.where}: {unknown[0]} in rope scaling {kind} is not supported: {dict(rope)!r:.200}")
        try:
            return readers[kind](rope)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.where}: rope scaling {dict(rope)!r:.200}: {error!r} is missing or wrong") from None

    def _original(self, rope: Mapping[str, Any]) -> int:
        own = self.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        return int(own or self.count("max_position_embeddings"))

    def _factor(self, rope: Mapping[str, Any]) -> float:
        return float(rope.get("factor") or self.count("max_position_embeddings") / self._original(rope))

    def _linear(self, rope: Mapping[str, Any]) -> RopeScaling:
        return RopeScaling(kind="linear", factor=float(rope["factor"]))

    def _llama3(self, rope: Mapping[str, Any]) -> RopeScaling:
        return RopeScaling(
            kind="llama3",
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position=self._original(rope),
        )

    def _yarn(self, rope: Mapping[str, Any]) -> RopeScaling:
        return RopeScaling(
            kind="yarn",
            factor=self._factor(rope),
            original_max_position=self._original(rope),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            truncate=bool(rope.get("truncate", True)),
            attention_factor=_yarn_attention_factor(rope, self._factor(rope)),
            query_log_scale=float(rope.get("llama_4_scaling_beta") or 0.0),
        )

    def _longrope(self, rope: Mapping[str, Any]) -> RopeScaling:
        original = self._original(rope)
        factor = self._factor(rope)
        attention, short = rope.get("long_mscale", rope.get("attention_factor")), rope.get("short_mscale")
        if attention is None:
            attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return RopeScaling(
            kind="longrope",
            factor=factor,
            original_max_position=original,
            attention_factor=float(attention),
            short_factors=tuple(map(float, rope["short_factor"])),
            long_factors=tuple(map(float, rope["long_factor"])),
            short_attention_factor=None if short is None else float(short),
        )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """YaRN's "temperature" (Peng et al., 2023), with DeepSeek's two further factors where they are given."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(factor: float, weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(factor, float(rope["mscale"])) / scale(factor, float(rope["mscale_all_dim"]))
    return scale(factor, 1.0)
