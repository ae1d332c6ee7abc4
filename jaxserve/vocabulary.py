"""Tokenizer files become a `Tokenizer`: the engine's encoders know no checkpoints, and checkpoints no encoder."""

from __future__ import annotations

from dataclasses import asdict

from checkpoints.checkpoint import TokenizerFiles
from checkpoints.sentencepiece_model import read_settings
from jaxserve.engine.encoders import Source
from jaxserve.engine.sentencepieces import AddedToken, SentencePieceSource
from jaxserve.engine.text import Tokenizer


def build_tokenizer(files: TokenizerFiles) -> Tokenizer:
    """The tokenizer that these files are.

    Raises:
        ModelLoadError: they are none that can be used.
    """
    return Tokenizer(
        _source(files),
        chat_template=files.chat_template,
        tool_template=files.tool_template,
        bos_token=files.bos_token,
        eos_token=files.eos_token,
        add_bos=files.add_bos,
    )


def _source(files: TokenizerFiles) -> Source:
    if files.tokenizer_json is not None:
        return files.tokenizer_json
    assert files.sentencepiece is not None, "tokenizer files without a vocabulary"
    return SentencePieceSource(
        model=files.sentencepiece,
        added_tokens=tuple(AddedToken(**asdict(token)) for token in files.added_tokens),
        prefix_each=files.prefix_each,
        keeps_characters=read_settings(files.sentencepiece).keeps_characters,
    )
