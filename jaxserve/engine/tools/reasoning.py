"""Reasoning that a model writes before its answer, between two tags. Owns the tags, and what is reasoning and what is not.

Only what the answer begins with is reasoning: a tag further on is a tag that the answer speaks of.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.engine.tools.feed import Feed, Parse, accept, put_back, read_content, skip_space
from jaxserve.engine.tools.parts import Reasoning


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags around reasoning."""

    name: str
    open: str
    close: str

    @property
    def markers(self) -> tuple[str, ...]:
        """Tags that may be control tokens."""
        return (self.open, self.close)

    def opened_by(self, prompt: str) -> bool:
        """Whether the prompt leaves reasoning open, so that the answer begins inside it."""
        return prompt.rstrip().endswith(self.open)

    def is_open_after(self, answer: str) -> bool:
        """Whether the beginning of an answer ends inside reasoning."""
        return answer.rfind(self.open) > answer.rfind(self.close)

    def read(self, feed: Feed, *, opened: bool) -> Parse:
        """Read the reasoning, if there is any, and the white space between it and the answer.

        White space at its own beginning and end is not part of it, nor is a second opening tag after the prompt's.
        """
        feed.keep = feed.pos
        yield from skip_space(feed)
        tag = yield from accept(feed, (self.open,))
        if not opened and not tag:
            put_back(feed, 0)
            return
        feed.keep = None
        yield from skip_space(feed)
        yield from read_content(feed, (self.close,), Reasoning)
        feed.keep = None
        yield from skip_space(feed)


REASONING_FORMATS = {
    format.name: format
    for format in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("gemma", "<|channel>thought", "<channel|>"),
    )
}


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """The form that a chat template's own text has, or None."""
    for name, sign in (("gemma", "<|channel>"), ("mistral", "[THINK]"), ("think", "<think>")):
        if sign in template:
            return REASONING_FORMATS[name]
    return None
