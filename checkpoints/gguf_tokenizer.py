"""A GGUF file's tokenizer metadata as tokenizer files: a `tokenizer.json`, or a SentencePiece model.

Owns which keys mean what. Builds text and bytes only: no tokenizer library is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from checkpoints.byte_level import ADD_BOS, IGNORE_MERGES, NFC, PRE_TOKENIZERS, byte_level_json
from checkpoints.checkpoint import AddedToken, TokenizerFiles
from checkpoints.gguf_metadata import GgufMetadata
from checkpoints.sentencepiece_model import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED, build_bpe_model


def tokenizer_from_metadata(metadata: GgufMetadata) -> TokenizerFiles | None:
    """Tokenizer files from GGUF metadata; None if the file has no tokenizer.

    Raises:
        CheckpointError: a kind of tokenizer that is not supported, or metadata that contradicts itself.
    """
    model = metadata.text("tokenizer.ggml.model")
    if model is None:
        return None
    if model not in MODELS:
        raise metadata.error("tokenizer.ggml.model", f"one of those supported: {', '.join(sorted(MODELS))}")
    read, adds_bos = MODELS[model]
    tokens = metadata.strings("tokenizer.ggml.tokens")
    bos = _token_text(metadata, "tokenizer.ggml.bos_token_id", tokens)
    add_bos = metadata.flag("tokenizer.ggml.add_bos_token")
    return replace(
        read(metadata, tokens),
        chat_template=metadata.text("tokenizer.chat_template"),
        tool_template=metadata.text("tokenizer.chat_template.tool_use"),
        bos_token=bos,
        eos_token=_token_text(metadata, "tokenizer.ggml.eos_token_id", tokens),
        add_bos=bos is not None and (adds_bos(metadata) if add_bos is None else add_bos),
    )


def _token_text(metadata: GgufMetadata, key: str, tokens: list[str]) -> str | None:
    token_id = metadata.index(key, len(tokens))
    return None if token_id is None else tokens[token_id]


def _byte_level_bpe(metadata: GgufMetadata, tokens: list[str]) -> TokenizerFiles:
    pre = _pre_tokenizer_name(metadata)
    kinds = _token_kinds(metadata, len(tokens))
    spec = byte_level_json(
        # Unused ids pad the embedding to a round size; as entries they could be produced from their placeholder text.
        {token: token_id for token_id, token in enumerate(tokens) if kinds[token_id] != UNUSED},
        metadata.strings("tokenizer.ggml.merges"),
        PRE_TOKENIZERS[pre],
        _added_tokens(tokens, kinds),
        nfc=pre in NFC,
        ignore_merges=pre in IGNORE_MERGES,
    )
    return TokenizerFiles(tokenizer_json=spec)


def _pre_tokenizer_name(metadata: GgufMetadata) -> str:
    # Files from before the key existed meant GPT-2's pre-tokeniser, which is wrong for most models made since.
    pre = metadata.text("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise metadata.error("tokenizer.ggml.pre", f"one of those supported: {', '.join(sorted(PRE_TOKENIZERS))}")
    return pre


def _sentencepiece(metadata: GgufMetadata, tokens: list[str]) -> TokenizerFiles:
    """The SentencePiece model that the file was made from, as far as encoding goes."""
    scores = metadata.numbers("tokenizer.ggml.scores", len(tokens))
    if scores is None:
        raise metadata.error("tokenizer.ggml.scores", f"an array of {len(tokens)} numbers")
    kinds = _token_kinds(metadata, len(tokens))
    unknown = metadata.index("tokenizer.ggml.unknown_token_id", len(tokens))
    if unknown is None:
        unknown = kinds.index(UNKNOWN) if UNKNOWN in kinds else 0
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix") is not False
    added = _added_pieces(metadata, tokens, kinds) if prefix else ()
    return TokenizerFiles(
        sentencepiece=build_bpe_model(
            _unique([token.replace(" ", SPACE) for token in tokens]),
            scores,
            _piece_kinds(kinds, unknown, {token.token_id for token in added}),
            unknown_id=unknown,
            bos_id=metadata.index("tokenizer.ggml.bos_token_id", len(tokens)),
            eos_id=metadata.index("tokenizer.ggml.eos_token_id", len(tokens)),
            dummy_prefix=prefix,
        ),
        added_tokens=added,
    )


def _piece_kinds(kinds: list[int], unknown: int, hidden: set[int]) -> list[int]:
    """Kinds as the library wants them: one unknown piece, whose id may be marked as something else."""
    shown = [CONTROL if kind == UNKNOWN or token_id in hidden else kind for token_id, kind in enumerate(kinds)]
    shown[unknown] = UNKNOWN
    return shown


def _unique(pieces: list[str]) -> list[str]:
    """The pieces with names of their own for those that are empty or come again, which the library would refuse."""
    seen: set[str] = set()
    if len(set(pieces)) == len(pieces) and all(pieces):
        return pieces
    unique = []
    for token_id, piece in enumerate(pieces):
        name = f"<duplicate {token_id} {piece}>" if not piece or piece in seen else piece
        seen.add(name)
        unique.append(name)
    return unique


# Architectures whose control tokens take the white space after them, which GGUF cannot say, and those of them that do not.
TAKE_SPACE_AFTER = {"phi3": {"<unk>", "<s>", "<|endoftext|>"}}


def _added_pieces(metadata: GgufMetadata, tokens: list[str], kinds: list[int]) -> tuple[AddedToken, ...]:
    """Tokens that are found before the model sees the rest, which begins anew with a space after them."""
    added = _added_tokens(tokens, kinds)
    exceptions = TAKE_SPACE_AFTER.get(metadata.text("general.architecture") or "")
    if exceptions is None:
        return tuple(token for token in added if not token.special)
    return tuple(replace(token, rstrip=token.content not in exceptions) for token in added)


def _added_tokens(tokens: list[str], kinds: list[int]) -> list[AddedToken]:
    return [
        AddedToken(token_id=token_id, content=tokens[token_id], special=kind == CONTROL)
        for token_id, kind in enumerate(kinds)
        if kind in (CONTROL, USER_DEFINED)
    ]


def _token_kinds(metadata: GgufMetadata, length: int) -> list[int]:
    kinds = metadata.numbers("tokenizer.ggml.token_type", length)
    if kinds is None:
        return [NORMAL] * length
    if not np.isin(kinds, range(BYTE + 1)).all():
        raise metadata.error("tokenizer.ggml.token_type", f"kinds of tokens from 0 to {BYTE}")
    return [int(kind) for kind in kinds.tolist()]


# tokenizer.ggml.model to what reads it, and whether a file that does not say so adds the first token.
MODELS: dict[str, tuple[Callable[[GgufMetadata, list[str]], TokenizerFiles], Callable[[GgufMetadata], bool]]] = {
    "gpt2": (_byte_level_bpe, lambda metadata: metadata.text("tokenizer.ggml.pre") in ADD_BOS),
    "llama": (_sentencepiece, lambda metadata: True),
}
