"""What `jaxserve inspect` prints: a model's figures and a table of where it fits, for people or as JSON. Knows no file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from jaxserve.inspect_model import USABLE, Fit, Inspection
from jaxserve.model_config import ModelConfig

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
LABEL_WIDTH = 15


def describe(found: Inspection) -> str:
    """The model alone, a line a fact."""
    config = found.config
    facts = {
        "model": found.model if found.model == found.path else f"{found.model}  ({found.path})",
        "architecture": f"{found.architecture}, of the family {config.family}",
        "layers": _layers(config),
        "attention": _attention(config),
        "parameters": _parameters(found),
        "vocabulary": f"{config.vocab_size:,} tokens" + (", embedding tied to the head" if config.tie_embeddings else ""),
        f"{found.form}": _stored(found.stored_bytes),
        "KV": _kv(config),
        "context": f"{config.max_position:,} tokens",
        "tokenizer": found.tokenizer or "none: it cannot be served without",
        "chat template": "yes" if found.chat_template else "none: /v1/chat/completions needs --chat-template FILE",
        "sampling": ", ".join(f"{name} {value}" for name, value in found.sampling.items()) or "the API's defaults",
        "end tokens": ", ".join(map(str, config.eos_token_ids)) or "none: answers end by their length alone",
    }
    return "\n".join(f"{label:<{LABEL_WIDTH}}{text}" for label, text in facts.items())


def _layers(config: ModelConfig) -> str:
    experts = config.experts
    mlp = f"MLP {config.intermediate_size:,}"
    if experts is not None:
        mlp = f"{experts.num} experts of {experts.width:,}, {experts.per_token} for each token"
        mlp += f" and a shared one of {experts.shared_width:,}" if experts.shared_width else ""
    return f"{config.num_layers}, hidden {config.hidden_size:,}, {mlp}"


def _attention(config: ModelConfig) -> str:
    windowed = sum(config.windowed)
    of_kv = f"{config.num_kv_heads} KV head" + "s" * (config.num_kv_heads > 1)
    heads = f"{config.num_heads} heads over {of_kv} of {config.head_dim}"
    return heads + (f"; {windowed} of {config.num_layers} layers see {config.window:,} tokens" if windowed else "")


def _parameters(found: Inspection) -> str:
    text = count(found.parameters)
    return text if found.active_parameters == found.parameters else f"{text}, {count(found.active_parameters)} for each token"


def _stored(stored: Mapping[str, int] | None) -> str:
    if stored is None:
        return "weights were not looked at"
    parts = sorted(stored.items(), key=lambda item: -item[1])
    return f"{size(sum(stored.values()))}: " + ", ".join(f"{name} {size(nbytes)}" for name, nbytes in parts)


def _kv(config: ModelConfig) -> str:
    of_layer = 2 * config.num_kv_heads * config.head_dim
    text = f"{size(2 * config.num_layers * of_layer)} a token in bfloat16"
    windowed = sum(config.windowed)
    if not windowed:
        return text
    if windowed == config.num_layers:
        return f"{text}, of the newest {config.window:,} tokens alone"
    return f"{text}, {size(2 * windowed * of_layer)} of it in layers that look back {config.window:,} tokens"


def size(nbytes: float) -> str:
    """Bytes with a binary unit and three digits."""
    power = 0
    while nbytes >= 1000 and power + 1 < len(UNITS):
        nbytes, power = nbytes / 1024, power + 1
    return f"{nbytes:.0f} {UNITS[power]}" if nbytes >= 100 or not power else f"{nbytes:.3g} {UNITS[power]}"


def count(number: int) -> str:
    """Parameters as people say them."""
    for limit, unit in ((10**9, "B"), (10**6, "M")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:,}"


def fits_of_chips(fits: Sequence[Fit]) -> str:
    """A row for each kind of device: how many it takes, and what fits then."""
    head = ["device", "number", "weights", "KV", *map(_length, fits[0].sequences)]
    rows = [
        [fit.chip, str(fit.devices), f"{size(fit.weight_bytes)} each", _room(fit), *_sequences(fit, fit.sequences)]
        for fit in fits
    ]
    title = f"Sequences at once on the fewest devices that hold it{_split(fits)}, by tokens of context:"
    return f"{title}\n\n{_table(head, rows)}\n\n{_footnote(fits)}"


def fits_of_numbers(fits: Sequence[Fit]) -> str:
    """A row for each number of devices of one kind."""
    head = ["devices", "weights", "KV", *map(_length, fits[0].sequences)]
    rows = [[str(fit.devices), f"{size(fit.weight_bytes)} each", _room(fit), *_sequences(fit, fit.sequences)] for fit in fits]
    title = f"Sequences at once on {fits[0].chip}{_split(fits)}, by tokens of context:"
    return f"{title}\n\n{_table(head, rows)}\n\n{_footnote(fits)}"


def _split(fits: Sequence[Fit]) -> str:
    parts = fits[0].expert_parallel
    return f", the experts in {parts} parts" if parts > 1 else ""


def _length(context: int) -> str:
    return f"{context // 1024}k" if context % 1024 == 0 else f"{context:,}"


def _room(fit: Fit) -> str:
    return size(fit.kv_bytes) if fit.holds_weights else "none"


def _sequences(fit: Fit, contexts: Iterable[int]) -> list[str]:
    return [f"{fit.sequences[context]:,}" if fit.sequences[context] else "-" for context in contexts]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join(f"  {line}" for line in lines)


def _footnote(fits: Sequence[Fit]) -> str:
    kinds: dict[tuple[str, str], list[str]] = {}
    for fit in fits:
        kinds.setdefault((fit.weight_dtype, fit.kv_dtype), []).append(fit.chip)
    (dtype, kv_dtype), *_ = kinds
    others = "".join(f" ({', '.join(chips)}: {of[0]} and {of[1]})" for of, chips in list(kinds.items())[1:])
    return (
        f"Weights in {dtype}, KV in {kv_dtype}{others}. A dash: not even one.\n"
        f"KV has what {USABLE:.0%} of memory leaves; --kv-memory asks for it, as the engine takes half of that unasked."
    )


def as_json(found: Inspection, fits: Sequence[Fit]) -> str:
    """All figures, bytes as numbers."""
    values = asdict(found) | {"fits": [asdict(fit) for fit in fits]}
    return json.dumps(values, indent=2)
