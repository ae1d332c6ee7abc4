"""Reads Hugging Face's `config.json`, in the variants that are about: the keys that all families share, checked.

Owns the errors for what is missing or wrong. What a family's own keys mean is the family's business.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.model_config import RopeScaling

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

MAX_COUNT = 2**31 - 1
MOST = {"num_hidden_layers": 10_000, "num_experts": 100_000, "num_local_experts": 100_000}
"""Of what a model has: parameters are declared for each, which for a number that is a mistake would take all memory."""


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
        value, most = self.get(key, default), MOST.get(key, MAX_COUNT)
        if type(value) is not int or value < 1:
            raise self.error(key, "a positive integer")
        if value > most:
            raise self.error(key, f"at most {most:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; demanded if there is no default."""
        try:
            return _number(self.get(key, default))
        except ValueError:
            raise self.error(key, "a number") from None

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; demanded if there is no default."""
        value = self.number(key, default)
        if value <= 0:
            raise self.error(key, "a number above 0")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    def optional_positive(self, key: str, default: float | None = None) -> float | None:
        """A number above 0; None where it is null, which differs from absent where there is a default."""
        value = self.get(key) if key in self.values else default
        return None if value is None else self.positive(key, default)

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
        if not isinstance(name, str) or name not in ACTIVATIONS:
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
            "rms_norm_eps": self.positive("rms_norm_eps", 1e-6),
            "activation": self.activation(),
            "rope_theta": self.rope_theta(),
            "rope_scaling": self.rope_scaling(),
            "rotary_dim": self._rotary_dim(dim),
            "tie_embeddings": self.flag("tie_word_embeddings"),
            "bos_token_id": next(iter(self._token_ids("bos_token_id")), None),
            "eos_token_ids": self._token_ids("eos_token_id"),
        }

    def rope_theta(self, default: float = 10_000.0) -> float:
        """The base of rotary frequencies."""
        return self.base_of(self.rope, self.get("rope_theta") or default)

    def base_of(self, rope: Mapping[str, Any], default: Any) -> float:
        """The base that `rope` names, else `default`, which is checked too."""
        try:
            theta = _number(rope.get("rope_theta") or default)
        except ValueError:
            theta = 0.0
        if theta <= 1:
            raise ConfigError(
                f"{self.where}: rope_theta must be a number above 1, found {rope.get('rope_theta') or default!r:.80}"
            )
        return theta

    def _rotary_dim(self, head_dim: int) -> int:
        given = self.rope.get("partial_rotary_factor") or self.get("partial_rotary_factor") or 1.0
        if type(given) not in (int, float) or not 0 < given <= 1 or not int(head_dim * given):
            raise ConfigError(
                f"{self.where}: partial_rotary_factor must be above 0, at most 1, and leave a part of head_dim ({head_dim}), "
                f"found {given!r:.80}"
            )
        return 0 if given == 1.0 else int(head_dim * given)

    def _token_ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(item) is int and item >= -1 for item in ids):
            raise self.error(key, "a token id or a list of them")
        return tuple(token_id for token_id in ids if token_id != -1)  # as some spell that there is none

    def windowed(self, default: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which layers have a window, by `layer_types` if it is there."""
        types = self.get("layer_types")
        if types is None:
            return default
        known = {"sliding_attention": True, "full_attention": False}
        if not isinstance(types, list) or not all(isinstance(kind, str) and kind in known for kind in types):
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
        return {
            "rope_theta": self.base_of(of_full, self.rope_theta(default_theta)),
            "rope_scaling": self.rope_scaling(scaled),
            "local_rope_theta": self.base_of(of_windowed, default_local_theta),
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
        if not isinstance(kind, str) or kind not in readers:
            raise ConfigError(
                f"{self.where}: rope scaling {kind!r:.80} is not supported; known: default, {', '.join(readers)}"
            )
        unknown = sorted(key for key in rope if key not in ROPE_KEYS and rope[key] is not None)
        if unknown:
            raise ConfigError(f"{self.where}: {unknown[0]} in rope scaling {kind} is not supported: {dict(rope)!r:.200}")
        try:
            return readers[kind](rope)
        except KeyError as error:
            raise ConfigError(f"{self.where}: rope scaling {dict(rope)!r:.200}: {error} is missing") from None
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"{self.where}: rope scaling {dict(rope)!r:.200} is wrong: {error}") from None

    def _original(self, rope: Mapping[str, Any]) -> int:
        own = self.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        return max(1, int(_positive(own or self.count("max_position_embeddings"))))

    def _factor(self, rope: Mapping[str, Any]) -> float:
        return _positive(rope.get("factor") or self.count("max_position_embeddings") / self._original(rope))

    def _linear(self, rope: Mapping[str, Any]) -> RopeScaling:
        return RopeScaling(kind="linear", factor=_positive(rope["factor"]))

    def _llama3(self, rope: Mapping[str, Any]) -> RopeScaling:
        low, high = _positive(rope["low_freq_factor"]), _positive(rope["high_freq_factor"])
        if low >= high:
            raise ValueError(f"low_freq_factor ({low}) must be below high_freq_factor ({high})")
        return RopeScaling(
            kind="llama3",
            factor=_positive(rope["factor"]),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=self._original(rope),
        )

    def _yarn(self, rope: Mapping[str, Any]) -> RopeScaling:
        return RopeScaling(
            kind="yarn",
            factor=self._factor(rope),
            original_max_position=self._original(rope),
            beta_fast=_positive(rope.get("beta_fast") or 32.0),
            beta_slow=_positive(rope.get("beta_slow") or 1.0),
            truncate=bool(rope.get("truncate", True)),
            attention_factor=_yarn_attention_factor(rope, self._factor(rope)),
            query_log_scale=_number(rope.get("llama_4_scaling_beta") or 0.0),
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
            attention_factor=_positive(attention),
            short_factors=tuple(map(_positive, rope["short_factor"])),
            long_factors=tuple(map(_positive, rope["long_factor"])),
            short_attention_factor=None if short is None else _positive(short),
        )


def _number(value: Any) -> float:
    """A finite number as a float; ValueError for anything else, such as a number in a string."""
    if type(value) not in (int, float) or not abs(value) < sys.float_info.max:
        raise ValueError(f"{value!r:.80} is not a number")
    return float(value)


def _positive(value: Any) -> float:
    """A finite number above 0, as `_number`."""
    number = _number(value)
    if number <= 0:
        raise ValueError(f"{value!r:.80} is not above 0")
    return number


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """YaRN's "temperature" (Peng et al., 2023), with DeepSeek's two further factors where they are given."""
    if rope.get("attention_factor") is not None:
        return _positive(rope["attention_factor"])

    def scale(factor: float, weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(factor, _number(rope["mscale"])) / scale(factor, _number(rope["mscale_all_dim"]))
    return scale(factor, 1.0)
