"""The prefix that `--pin-prefix` keeps warm: the tokens that every conversation under one system prompt begins with."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

from jaxserve.engine.core import EngineCore
from jaxserve.engine.text import Tokenizer
from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)


def pin_prefix(core: EngineCore, tokenizer: Tokenizer, path: Path) -> None:
    """Compute the prefix of the system prompt in `path` and keep it. For before the first request.

    Raises:
        ConfigError: the file cannot be read, is empty, or the prefix is too long to keep.
        EngineError: it could not be computed.
    """
    try:
        text = path.read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"pin_prefix {path} cannot be read: {error}") from None
    if not text:
        raise ConfigError(f"pin_prefix {path} is empty; it must have the text of a system prompt")
    tokens = prefix_tokens(tokenizer, text)
    num_pages = core.pin(tokens)
    if num_pages:
        logger.info("pinned the %d pages of %s, a prefix of %d tokens", num_pages, path, len(tokens))
    else:
        logger.warning("nothing is pinned: %s, a prefix of %d tokens, fills no page", path, len(tokens))


def prefix_tokens(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """What conversations with the system prompt `text` begin with, whatever the user says; without a chat template, `text`."""
    if tokenizer.template is None:
        return tuple(tokenizer.encode(text))
    system = {"role": "system", "content": text}
    one, other = (tokenizer.encode_chat([system, {"role": "user", "content": said}]) for said in ("Why?", "1 and 1"))
    together = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return tuple(token for token, _ in together)
