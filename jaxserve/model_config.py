"""What the weights are: `ModelConfig`, whatever file said so. Standard library only.

Knows nothing of how they are served, which is `config`'s; families of models make it of what their files say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxserve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for a longer context than the model was first trained on.

    Attributes:
        kind: "linear", "llama3", "yarn" or "longrope".
        factor: of the context.
        low_freq_factor, high_freq_factor: of llama3: turns in the original context; frequencies that turn less than the first
            are stretched whole, those that turn more than the second not at all.
        original_max_position: positions of the original context.
        beta_fast, beta_slow: of yarn, the same, the other way round.
        truncate: of yarn: the two ends of the blend are whole dimensions.
        attention_factor: multiplies the rotated vectors; None for 1.
        short_factors, long_factors: of longrope: what divides each frequency in contexts up to `original_max_position`, and in
            longer ones.
        short_attention_factor: of longrope: `attention_factor` where the short ones hold; None for the same.
        long: of longrope: whether this engine's contexts are longer; `ModelConfig.for_context` decides it.
        query_log_scale: queries are multiplied by 1 + this * log(1 + position // `original_max_position`), as in Ministral 3.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    short_attention_factor: float | None = None
    long: bool = True
    query_log_scale: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of an MLP: a router sends each token to some of them.

    Attributes:
        num: of experts.
        per_token: of them, those with the highest scores.
        width: of each expert, as `ModelConfig.intermediate_size` is of an MLP.
        renormalise: what a token's experts make is weighted by the softmax of their scores alone, not of all scores.
        layers: whether each layer has experts, the others an MLP; empty for all.
        shared_width: of an MLP that all tokens meet besides; 0 for none.
        shared_gate: what that MLP makes is weighted by a sigmoid.
    """

    num: int
    per_token: int
    width: int
    renormalise: bool = True
    layers: tuple[bool, ...] = ()
    shared_width: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.num:
            raise ConfigError(f"experts: a token meets at least 1 and at most all {self.num} of them, found {self.per_token}")
        if self.shared_gate and not self.shared_width:
            raise ConfigError("experts: shared_gate is of the MLP of shared_width, which is 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the weights are: a decoder of blocks of attention and MLP, and where it differs from Llama's.

    Sizes have the names and units of Hugging Face's `config.json`. The families read them from there.

    Attributes:
        max_position: tokens of the longest context.
        activation: of the MLP's gate: "silu", "gelu" or "gelu_tanh".
        norms: where a block's norms are: "pre", before attention and MLP; "post", after them; or "both".
        norm_offset: added to every norm's weights as the checkpoint has them.
        qk_norm: norm of queries and keys before they are rotated: "none", "head", of each head, or "projection", of all heads
            together.
        qkv_bias, output_bias, mlp_bias: whether these products have biases.
        window: newest positions that a token sees in the layers of `windowed`; None where there are none.
        windowed: whether each layer has the window; empty for none.
        rotary: whether each layer rotates queries and keys; empty for all.
        rotary_dim: leading numbers of a head that are rotated; 0 for all of them.
        local_rope_theta: of layers with the window, which then do without `rope_scaling`; None where all have `rope_theta`.
        attention_scale: multiplies scores; None for `head_dim ** -0.5`.
        attention_soft_cap, logits_soft_cap: bounds of scores and logits, by tanh; None for none.
        embedding_scale, residual_scale, logits_scale: multiply what leaves the embedding, what each part of a block adds, and
            logits.
        experts: in place of MLPs, in all layers or some; None where there are none.
        bos_token_id, eos_token_ids: of tokens that begin and end a text.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-5
    activation: str = "silu"
    norms: str = "pre"
    norm_offset: float = 0.0
    qk_norm: str = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    rotary: tuple[bool, ...] = ()
    rotary_dim: int = 0
    window: int | None = None
    windowed: tuple[bool, ...] = ()
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    tie_embeddings: bool = False
    experts: ExpertsConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embedding, found {self.head_dim}")
        rotary_dim, scaling = self.rotary_dim or self.head_dim, self.rope_scaling
        if rotary_dim % 2 or rotary_dim > self.head_dim:
            raise ConfigError(f"rotary_dim must be even and at most head_dim ({self.head_dim}), found {rotary_dim}")
        if scaling is not None and scaling.kind == "longrope":
            found = len(scaling.short_factors), len(scaling.long_factors)
            if found != (rotary_dim // 2, rotary_dim // 2):
                raise ConfigError(
                    f"longrope needs a short and a long factor for each of {rotary_dim // 2} pairs, found {found}"
                )
        for name in ("windowed", "rotary"):
            if len(getattr(self, name)) not in (0, self.num_layers):
                raise ConfigError(f"{name} must say so for each of {self.num_layers} layers, found {len(getattr(self, name))}")
        if any(self.windowed) and (self.window is None or self.window < 1):
            raise ConfigError(f"window must be at least 1 where layers have one, found {self.window}")
        if self.experts and len(self.experts.layers) not in (0, self.num_layers):
            raise ConfigError(
                f"experts.layers must say so for each of {self.num_layers} layers, found {len(self.experts.layers)}"
            )

    def for_context(self, max_context: int) -> ModelConfig:
        """The model as an engine runs it whose contexts have at most `max_context` tokens.

        This is where long rope's factors are chosen: once for the engine, since keys that are cached under the one set are
        wrong under the other. And a window as wide as the contexts is none, as Phi 4's of 262,144 for contexts of 131,072; it
        stays where layers that have it rotate differently.
        """
        scaling, windowed = self.rope_scaling, self.windowed
        if scaling is not None and scaling.kind == "longrope":
            scaling = replace(scaling, long=max_context > scaling.original_max_position)
        if self.window is not None and self.window >= max_context and self.local_rope_theta is None:
            windowed = ()
        return replace(self, rope_scaling=scaling, windowed=windowed)

    def layer_window(self, layer: int) -> int | None:
        """Newest positions that a token sees in this layer, its own among them; None for all."""
        return self.window if self.windowed and self.windowed[layer] else None

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts in place of an MLP."""
        return self.experts is not None and (not self.experts.layers or self.experts.layers[layer])

    @property
    def active_weights(self) -> float:
        """Weights that one token is multiplied with in a layer, the mean of all layers: of experts, those that it meets."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        widths = 3.0 * self.intermediate_size
        if self.experts is not None:
            share = sum(map(self.has_experts, range(self.num_layers))) / self.num_layers
            mixture = self.experts.num + 3 * (self.experts.per_token * self.experts.width + self.experts.shared_width)
            widths += share * (mixture - widths)
        return self.hidden_size * (attention + widths)
