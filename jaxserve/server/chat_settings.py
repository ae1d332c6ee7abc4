"""How a server, or an offline run, is told to chat with its model: by which template, with which forms of calls and reasoning.

Owns the step from settings to a tokenizer that keeps to them.
"""

from __future__ import annotations

from pathlib import Path

from jaxserve.config import HttpConfig
from jaxserve.engine.text import ChatRules, Tokenizer
from jaxserve.engine.tools.dialect import choose_dialect
from jaxserve.errors import ConfigError


class ChatSettings:
    """The settings of `config` that are about chats.

    Attributes:
        template: the chat template that replaces the model's, or None.

    Raises:
        ConfigError: the chat template cannot be read, or there is no such format of calls or reasoning.
    """

    def __init__(self, config: HttpConfig) -> None:
        self.template = _read_template(config.chat_template)
        self._formats = {"tool_format": config.tool_format, "reasoning_format": config.reasoning_format}
        self._rules = ChatRules(
            special_tokens_in_messages=config.special_tokens_in_messages,
            trust_request_chat_template=config.trust_request_chat_template,
        )
        choose_dialect(self.template, **self._formats)

    def apply(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer under these settings."""
        if self.template is not None:
            tokenizer = tokenizer.with_template(self.template)
        return tokenizer.with_formats(**self._formats).with_rules(self._rules)


def _read_template(path: str) -> str | None:
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {path}: {error}") from None
