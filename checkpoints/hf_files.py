"""The small files of a Hugging Face directory: config, generation config and tokenizer, read and written.

Also what stands beside an Orbax checkpoint of ours. Knows no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints.checkpoint import AddedToken, CheckpointError, TokenizerFiles
from checkpoints.files import parse_json_object, read_bytes, read_json_object, read_text
from checkpoints.hf_added_tokens import MAX_ID_DIGITS, read_added_tokens
from checkpoints.ranks import is_tiktoken, read_tekken, read_tiktoken
from checkpoints.sentencepiece_model import read_sentencepiece

MODEL_NAMES = ("tokenizer.model", "tiktoken.model", "spiece.model", "sentencepiece.bpe.model")
TOOL_TEMPLATE = Path("additional_chat_templates", "tool_use.jinja")

GENERATION = "generation_config"
"""The key of a checkpoint's config that has the rest of `generation_config.json`: how its makers would have it sampled."""

GENERATION_FILE = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id")


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json`, with the token ids of `generation_config.json`: its BOS, and the tokens that end a text in either.

    Tokens that are given by their text become ids. The rest of that file, if there is any, is under `GENERATION`.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; a checkpoint directory must have one")
    config = read_json_object(path)
    nested = config.get("text_config")
    in_text = nested if isinstance(nested, Mapping) else {}
    for key in TOKEN_IDS:
        if config.get(key) is None and in_text.get(key) is not None:
            config[key] = in_text[key]
    config.pop(GENERATION, None)
    found = read_generation(directory) if (directory / GENERATION_FILE).is_file() else {}
    if rest := {key: value for key, value in found.items() if key not in TOKEN_IDS and value is not None}:
        config[GENERATION] = rest
    if found.get("bos_token_id") is not None:
        config["bos_token_id"] = found["bos_token_id"]
    if found.get("eos_token_id") is not None:
        config["eos_token_id"] = _union(found["eos_token_id"], config.get("eos_token_id"))
    for key in TOKEN_IDS:
        if key in config:
            config[key] = _with_ids(config[key], directory, f"{path}: {key}")
            if key in in_text:
                config["text_config"] = config["text_config"] | {key: config[key]}
    quantised = directory / "hf_quant_config.json"
    if quantised.is_file() and not config.get("quantization_config"):
        # Where NVIDIA's ModelOpt put it before it wrote it into config.json.
        config["quantization_config"] = {"quant_method": "modelopt"} | _object(read_json_object(quantised), "quantization")
    return config


def read_generation(path: Path) -> dict[str, Any]:
    """A file like `generation_config.json`, or the one in a directory."""
    return read_json_object(path / GENERATION_FILE if path.is_dir() else path)


def _object(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return dict(found) if isinstance(found, Mapping) else {}


def _union(first: Any, second: Any) -> Any:
    """One token id, or a list of all that are in either, in order."""
    values = [*(first if isinstance(first, list) else [first]), *(second if isinstance(second, list) else [second])]
    unique = [value for index, value in enumerate(values) if value is not None and value not in values[:index]]
    return unique[0] if len(unique) == 1 and not isinstance(first, list) else unique


def _with_ids(value: Any, directory: Path, where: str) -> Any:
    """`value`, a token or a list of them, with ids in the place of texts."""
    if isinstance(value, list):
        return [_with_ids(item, directory, where) for item in value]
    if not isinstance(value, str):
        return value
    path = directory / "tokenizer.json"
    tokenizer = read_json_object(path) if path.is_file() else {}
    for entry in tokenizer.get("added_tokens") or ():
        if isinstance(entry, Mapping) and entry.get("content") == value:
            return entry.get("id")
    vocabulary = _object(_object(tokenizer, "model"), "vocab")
    is_number = value.isdecimal() and len(value) <= MAX_ID_DIGITS
    if not is_number and value not in vocabulary:
        raise CheckpointError(f"{where}: {value!r:.80} is neither a token id nor a token of {path}")
    return int(value) if is_number else vocabulary[value]


def read_tokenizer(directory: Path) -> TokenizerFiles | None:
    """The directory's tokenizer files; None if it has none.

    The first that is there of `tokenizer.json`, `tekken.json`, `tokenizer.model` (of SentencePiece, or ranks as `tiktoken` has
    them) and `*.tiktoken`.
    """
    settings_path = directory / "tokenizer_config.json"
    settings = read_json_object(settings_path) if settings_path.is_file() else {}
    files = _read_vocabulary(directory, settings, settings_path)
    if files is None:
        return None
    bos = _token(settings, "bos_token", settings_path, files.bos_token)
    add_bos = settings.get("add_bos_token")
    return replace(
        files,
        chat_template=_chat_template(directory, settings, settings_path),
        tool_template=_tool_template(directory, settings, settings_path),
        bos_token=bos,
        eos_token=_token(settings, "eos_token", settings_path, files.eos_token),
        add_bos=bos is not None and (files.add_bos if add_bos is None else bool(add_bos)),
    )


def _read_vocabulary(directory: Path, settings: Mapping[str, Any], settings_path: Path) -> TokenizerFiles | None:
    """What ids mean; BOS and whether it is added as far as that file says."""
    if (path := directory / "tokenizer.json").is_file():
        text = read_text(path).removeprefix("\ufeff")
        bos = _token(settings, "bos_token", settings_path)
        spec = parse_json_object(text, str(path))
        return TokenizerFiles(tokenizer_json=text, add_bos=bos is not None and _starts_with_special(spec, bos))
    if (path := directory / "tekken.json").is_file():
        return read_tekken(read_json_object(path), where=str(path))
    named = (directory / name for name in MODEL_NAMES)
    for path in (*named, *sorted(directory.glob("*.tiktoken"))):
        if path.is_file():
            return _read_model(path, settings, settings_path)
    return None


def _read_model(path: Path, settings: Mapping[str, Any], settings_path: Path) -> TokenizerFiles:
    data = read_bytes(path)
    added = read_added_tokens(path.parent, settings, settings_path)
    # Llama 3 and others have ranks under the name that was SentencePiece's.
    if path.suffix == ".tiktoken" or is_tiktoken(data):
        return read_tiktoken(data, added, where=str(path))
    return read_sentencepiece(data, added, prefix_each=settings.get("legacy") is not False, where=str(path))


def _token(settings: Mapping[str, Any], key: str, path: Path, default: str | None = None) -> str | None:
    value = settings.get(key, default)
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{path}: {key} must be a string or an object with 'content', found {value!r}")
    return value


def _starts_with_special(tokenizer: Mapping[str, Any], bos: str) -> bool:
    """Whether the post-processor of a `tokenizer.json` puts `bos` before a single text."""
    processor = tokenizer.get("post_processor")
    if not isinstance(processor, Mapping):
        return False
    inner = processor.get("processors")
    processors = inner if isinstance(inner, list) else [processor]
    for candidate in processors:
        template = candidate.get("single") if isinstance(candidate, Mapping) else None
        if isinstance(template, list) and template and isinstance(template[0], Mapping):
            special = template[0].get("SpecialToken")
            if isinstance(special, Mapping) and special.get("id") == bos:
                return True
    return False


def _chat_template(directory: Path, settings: Mapping[str, Any], path: Path) -> str | None:
    own_file = directory / "chat_template.jinja"
    if own_file.is_file():
        return read_text(own_file)
    template = settings.get("chat_template")
    return _named_template(template, "default", path) if isinstance(template, list) else _checked_template(template, path)


def _tool_template(directory: Path, settings: Mapping[str, Any], path: Path) -> str | None:
    own_file = directory / TOOL_TEMPLATE
    if own_file.is_file():
        return read_text(own_file)
    template = settings.get("chat_template")
    return _named_template(template, "tool_use", path) if isinstance(template, list) else None


def _named_template(named: list[Any], name: str, path: Path) -> str | None:
    templates = [entry.get("template") for entry in named if isinstance(entry, Mapping) and entry.get("name") == name]
    return _checked_template(templates[-1] if templates else None, path)


def _checked_template(template: Any, path: Path) -> str | None:
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path}: chat_template must be a string or a list of named templates, found {template!r}")
    return template


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Write `config.json` and the part of it that generation follows as `generation_config.json`."""
    _write_json(directory / "config.json", {key: value for key, value in config.items() if key != GENERATION})
    ids = {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}
    if generation := ids | (config.get(GENERATION) or {}):
        _write_json(directory / GENERATION_FILE, generation)


def write_tokenizer(directory: Path, tokenizer: TokenizerFiles | None) -> None:
    """Write the files that `read_tokenizer` reads back to an equal value."""
    if tokenizer is None:
        return
    if tokenizer.tokenizer_json is not None:
        (directory / "tokenizer.json").write_text(tokenizer.tokenizer_json, encoding="utf-8")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": tokenizer.add_bos}
    if tokenizer.sentencepiece is not None:
        (directory / "tokenizer.model").write_bytes(tokenizer.sentencepiece)
        settings["legacy"] = tokenizer.prefix_each
        settings["added_tokens_decoder"] = {str(token.token_id): _entry(token) for token in tokenizer.added_tokens}
    if tokenizer.chat_template is not None:
        (directory / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8", newline="")
    if tokenizer.tool_template is not None:
        (directory / TOOL_TEMPLATE).parent.mkdir(exist_ok=True)
        (directory / TOOL_TEMPLATE).write_text(tokenizer.tool_template, encoding="utf-8", newline="")
    for key, token in (("bos_token", tokenizer.bos_token), ("eos_token", tokenizer.eos_token)):
        if token is not None or tokenizer.sentencepiece is not None:
            settings[key] = token
    _write_json(directory / "tokenizer_config.json", settings)


def _entry(token: AddedToken) -> dict[str, Any]:
    flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "special": token.special}
    return {"content": token.content, "normalized": False, "single_word": False, **flags}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
