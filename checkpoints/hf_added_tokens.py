"""The tokens that a Hugging Face directory adds to a vocabulary which is not a `tokenizer.json`.

Owns `added_tokens_decoder` of `tokenizer_config.json`, and what came before it: `added_tokens.json` and
`special_tokens_map.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from checkpoints.checkpoint import AddedToken, CheckpointError
from checkpoints.files import read_json_object

SPECIAL_KEYS = (
    *("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"),
    *("additional_special_tokens", "extra_special_tokens"),
)

MAX_ID_DIGITS = 8
"""Of a token's id: there is a place for each id up to the largest."""


def read_added_tokens(directory: Path, settings: Mapping[str, Any], settings_path: Path) -> tuple[AddedToken, ...]:
    """The added tokens, by id.

    Args:
        settings: `tokenizer_config.json`, which `settings_path` is the path of.

    Raises:
        CheckpointError: a file says something else than ids and tokens.
    """
    table = settings.get("added_tokens_decoder")
    if table is None:
        return _older_tokens(directory, settings)
    if not isinstance(table, Mapping):
        raise CheckpointError(f"{settings_path}: added_tokens_decoder must be an object, found {table!r:.200}")
    tokens = [_added_token(key, entry, f"{settings_path}: added_tokens_decoder[{key!r:.20}]") for key, entry in table.items()]
    return tuple(sorted(tokens, key=lambda token: token.token_id))


def _added_token(key: str, entry: Any, where: str) -> AddedToken:
    content = entry.get("content") if isinstance(entry, Mapping) else None
    if not key.isdecimal() or len(key) > MAX_ID_DIGITS or not isinstance(content, str) or not content:
        raise CheckpointError(f"{where} must be an id with an object that has 'content', found {entry!r:.200}")
    if entry.get("single_word"):
        raise CheckpointError(f"{where}: single_word is not supported; convert the tokenizer to a tokenizer.json")
    flags = {name: bool(entry.get(name)) for name in ("special", "lstrip", "rstrip")}
    return AddedToken(token_id=int(key), content=content, **flags)


def _older_tokens(directory: Path, settings: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    """Of `added_tokens.json`; those that have a role are special."""
    path = directory / "added_tokens.json"
    if not path.is_file():
        return ()
    map_path = directory / "special_tokens_map.json"
    special = set(_roles(settings)) | set(_roles(read_json_object(map_path) if map_path.is_file() else {}))
    ids = read_json_object(path)
    for content, token_id in ids.items():
        if type(token_id) is not int or not 0 <= token_id < 10**MAX_ID_DIGITS or not content:
            raise CheckpointError(f"{path}: {content!r} must have an id, found {token_id!r}")
    ordered = sorted(ids.items(), key=lambda item: item[1])
    return tuple(AddedToken(token_id=token_id, content=content, special=content in special) for content, token_id in ordered)


def _roles(settings: Mapping[str, Any]) -> Iterator[str]:
    """Texts of tokens with a role, each a string or an object that has `content`."""
    for key in SPECIAL_KEYS:
        value = settings.get(key)
        for token in value if isinstance(value, list) else [value]:
            text = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(text, str):
                yield text
