"""Chat templates of known models give what `transformers` gives, over a table of conversations."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.engine.chat import ChatTemplate
from jaxserve.errors import InvalidRequest
from tests.references import chat_conversations as table

REFERENCES: dict[str, dict[str, dict[str, str]]] = json.loads(
    (Path(table.__file__).parent / "chat_templates.json").read_text()
)["templates"]


@functools.cache
def template(shared: Path, name: str) -> ChatTemplate:
    source = (shared / "data" / "chat-templates" / f"{name}.jinja").read_text()
    return ChatTemplate(source, bos_token=table.BOS, eos_token=table.EOS, now=lambda: table.NOW)


def rendered(chat: ChatTemplate, name: str, case: table.Case, template_name: str) -> tuple[str, str]:
    """What comes out as the references have it: a kind, and a summary or an error's message."""
    tools = table.tools_for(name, case, template_name)
    variables: dict[str, Any] = {**case.get("variables", {}), "documents": case.get("documents"), "tools": tools}
    try:
        text = chat.render(
            case["messages"],
            add_generation_prompt=case.get("add_generation_prompt", True),
            continue_final_message=case.get("continue_final_message", False),
            **variables,
        )
    except InvalidRequest as error:
        said = str(error).removeprefix("messages: the model's chat template ")
        if said.startswith("says: "):
            return "refused", said.removeprefix("says: ")
        kind, _, message = said.removeprefix("cannot use them: ").partition(": ")
        return kind, message
    return "rendered", table.summary(text)


@pytest.mark.parametrize("name", REFERENCES)
def test_renderings_are_those_of_transformers(shared: Path, name: str) -> None:
    chat = template(shared, name)
    reference = REFERENCES[name]
    assert reference.keys() == table.CASES.keys()
    found = {case_name: dict([rendered(chat, case_name, case, name)]) for case_name, case in table.CASES.items()}
    assert found == reference


@pytest.mark.parametrize("name", REFERENCES)
def test_content_in_parts_is_found_by_trying(shared: Path, name: str) -> None:
    content = template(shared, name).content
    assert content.as_parts == frozenset(table.ROLES_WITH_PARTS.get(name, ()))
    assert content.only_parts == frozenset()


def test_the_table_has_every_template(shared: Path) -> None:
    assert sorted(path.stem for path in (shared / "data" / "chat-templates").glob("*.jinja")) == sorted(REFERENCES)


def test_the_references_tell_conversations_apart() -> None:
    for cases in REFERENCES.values():
        summaries = [case["rendered"] for case in cases.values() if "rendered" in case]
        assert len(summaries) > 15
        assert len(set(summaries)) > 0.6 * len(summaries)
