"""What a family of models must say of itself; everything else is the decoder's.

A family is one file: how to read its `config.json`, and what its tensors are called where that is not as in Llama.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxserve.model_config import ModelConfig
from jaxserve.models import decoder, decoder_params
from jaxserve.models.decoder_params import TensorNames
from jaxserve.models.hf_config import HfConfig

LLAMA_NAMES = TensorNames()

IGNORED_TENSORS = (
    "*.rotary_emb.inv_freq",
    "*.attention.masked_bias",
    "*.attention.bias",
    "*.self_attn.k_scale",
    "*.self_attn.v_scale",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family.

    Attributes:
        architectures: as `architectures` in `config.json` has them.
        read: the rest of `config.json`, as fields of `ModelConfig` but for `family`.
        names: what a block's tensors are called.
        ignored_tensors: patterns of a checkpoint's tensors that are no parameters.
    """

    architectures: tuple[str, ...]
    read: Callable[[HfConfig], dict[str, Any]]
    names: TensorNames = LLAMA_NAMES
    ignored_tensors: tuple[str, ...] = IGNORED_TENSORS

    def specs(self, config: ModelConfig) -> Any:
        """The declarations of the parameters."""
        return decoder_params.specs(config, self.names)

    forward = staticmethod(decoder.forward)
    head = staticmethod(decoder.head)
    kv_scale_tensors = staticmethod(decoder_params.kv_scale_tensors)
