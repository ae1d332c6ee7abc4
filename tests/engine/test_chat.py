"""The dialect that chat templates are written in, what rendering may cost, and continuing a message."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pytest

from jaxserve.engine import chat
from jaxserve.engine.chat import ChatTemplate
from jaxserve.engine.chat_content import ContentForm
from jaxserve.errors import InvalidRequest, ModelLoadError
from tests.engine import tiny_tokenizers as tiny


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages or user("x"), **options)


# --- the dialect ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        # Blocks take the line they stand on with them.
        ("a\n  {% if true %}\nb\n    {% endif %}\nc", "a\nb\nc"),
        (
            "{% for i in 'abcd' %}{% if i == 'b' %}{% continue %}{% elif i == 'd' %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "ac",
        ),
        ("{{ {'b': '<é>', 'a': none} | tojson }}", '{"b": "<é>", "a": null}'),
        ("{{ ['é'] | tojson(ensure_ascii=true) }}", r'["\u00e9"]'),
        ("{{ {'b': 1, 'a': [2]} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":[2],"b":1}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ {'a': 1} | tojson(indent='--') }}", '{\n--"a": 1\n}'),
        ("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}", "1False"),
        ("{% set ns = namespace(n=1) %}{% for i in range(3) %}{% set ns.n = ns.n * 2 %}{% endfor %}{{ ns.n }}", "8"),
        ("{{ unknown }}|{{ unknown is defined }}|{{ tools is none }}|{{ documents is none }}", "|False|True|True"),
        ("{{ strftime_now('%d %b %Y') }}", "14 Mar 2025"),
        ("{% macro twice(x) %}{{ x }}{{ caller() }}{% endmacro %}{% call twice('a') %}b{% endcall %}", "ab"),
        ("{{ dict(a=1) }}{{ 'a-b'.split('-') }}{{ {'a': 1}.items() | list }}", "{'a': 1}['a', 'b'][('a', 1)]"),
        ("{{ messages[0].name is defined }}", "False"),  # null, and left out
    ],
)
def test_what_templates_in_the_wild_expect(source: str, expected: str) -> None:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", now=lambda: datetime(2025, 3, 14))
    assert template.render([{"role": "user", "content": "x", "name": None}]) == expected


def test_variables_are_what_a_template_reads_and_does_not_set() -> None:
    template = ChatTemplate("{% set a = 1 %}{% for m in messages %}{{ m }}{{ a }}{{ enable_thinking }}{% endfor %}")
    assert template.variables == {"messages", "enable_thinking"}


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ raise_exception('No <system> role') }}", "says: No <system> role"),
        ("{{ messages[0].content + 1 }}", "cannot use them: TypeError: "),
        ("{{ messages[7].content.x }}", "cannot use them: UndefinedError: "),
        ("{{ 1 // 0 }}", "cannot use them: ZeroDivisionError: "),
        ("{% include 'other' %}", "cannot use them: TypeError: "),
        ("{{ ''.__class__.__mro__ }}", "cannot use them: SecurityError: "),
        ("{{ messages.append(1) }}", "cannot use them: SecurityError: "),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "cannot use them: SecurityError: "),
        ("{{ namespace(__init__=1) }}", "cannot use them: SecurityError: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot use them: RecursionError: "),
        ("{{ range(1000000) }}", "cannot use them: OverflowError: "),
    ],
)
def test_whatever_fails_is_the_request_s_error(source: str, error: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f"messages: the model's chat template {error}")) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_an_error_that_quotes_the_conversation_is_cut() -> None:
    with pytest.raises(InvalidRequest) as caught:
        render("{{ raise_exception(messages[0].content) }}", user("x" * 100_000))
    assert len(str(caught.value)) == 1000


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% unknown %}", "{{ " + "(" * 3000 + ")" * 3000 + " }}"])
def test_a_template_that_does_not_compile(source: str) -> None:
    with pytest.raises(ModelLoadError, match="chat template"):
        ChatTemplate(source)


# --- bounds -----------------------------------------------------------------------------------------------------------

LOOPS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set ns = namespace(s='x') %}{% for i in range(99999) %}{% set ns.s = ns.s + messages[0].content %}{% endfor %}",
    "{% macro f() %}{{ caller() }}{% endmacro %}{% for i in range(99999) %}{% call f() %}x{% endcall %}{% endfor %}",
]


@contextmanager
def collector_off() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("source", LOOPS, ids=range(len(LOOPS)))
def test_rendering_is_bounded_in_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "TRIAL_SECONDS", 0.01)
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.02)
    template = ChatTemplate(source)
    # A collection of what the tests before it left in this process takes a second of its own, in whoever's thread it falls.
    with collector_off():
        started = time.thread_time()
        with pytest.raises(InvalidRequest, match="takes too long"):
            template.render(user("x" * 10_000))
        assert time.thread_time() - started < 1.0


def test_rendering_is_bounded_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% for i in range(100) %}{{ messages[0].content }}{% endfor %}")
    monkeypatch.setattr(chat, "MAX_CHARACTERS", 1000)
    assert len(template.render(user("x" * 10))) == 1000
    with pytest.raises(InvalidRequest, match="more than 1000 characters"):
        template.render(user("x" * 11))


# --- content in parts, and roles --------------------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
LOOP = "{% for part in message.content %}[{{ part.text }}]{% endfor %}"
FORMS = {
    "strings": ("{% for message in messages %}{{ message.content }}{% endfor %}", ContentForm(), "a\nb", "x"),
    "printed": ("{{ messages | tojson }}", ContentForm(), '[{"role": "user", "content": "a\\nb"}]', None),
    "parts": (
        "{% for message in messages %}" + LOOP + "{% endfor %}",
        ContentForm(frozenset({"system", "user", "assistant"}), frozenset({"system", "user", "assistant"})),
        "[a][b]",
        "[x]",
    ),
    "either": (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        + LOOP
        + "{% endif %}{% endfor %}",
        ContentForm(frozenset({"system", "user", "assistant"})),
        "[a][b]",
        "x",
    ),
    "only_the_first": (
        "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}",
        ContentForm(),
        "a\nb",
        "x",
    ),
    "users": (
        "{% for message in messages %}{% if message.role == 'user' %}"
        + LOOP
        + "{% else %}{{ message.content }}{% endif %}{% endfor %}",
        ContentForm(frozenset({"user"}), frozenset({"user"})),
        "[a][b]",
        "[x]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("source", "form", "parts", "text"), FORMS.values(), ids=FORMS)
def test_content_is_given_in_the_form_that_the_template_reads(
    source: str, form: ContentForm, parts: str, text: str | None
) -> None:
    template = ChatTemplate(source)
    assert template.content == form
    assert template.render(user(PARTS)) == parts
    if text is not None:
        assert template.render(user("x")) == text


def test_developer_is_system_to_a_template_that_does_not_know_it() -> None:
    messages = [{"role": "developer", "content": "Be brief."}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{% if messages[0].role == 'developer' %}{{ messages[0].role }}{% endif %}", messages) == "developer"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_every_name(name: str) -> None:
    message = {"role": "assistant", "content": "", name: "hm"}
    assert render("{{ messages[0].reasoning_content }} {{ messages[0].thinking }}", [message]) == "hm hm"


def test_a_call_without_content_has_an_empty_one() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert render("{{ messages[0].content + messages[0].tool_calls[0].function.name }}", [message]) == "f"


# --- the end of a rendering -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (tiny.CHATML, "The tide", "<|im_start|>assistant\nThe tide"),
        (tiny.CHATML, "The tide \n", "<|im_start|>assistant\nThe tide \n"),
        (tiny.CHATML, "", "<|im_start|>assistant\n"),
        ("{{ messages[-1].content | trim }}!", " The tide \n", "The tide"),
        ("{{ messages[-1].content }}! {{ messages[-1].content }}?", "a", "a! a"),
        ("{% for part in messages[-1].content %}[{{ part.text }}]{% endfor %}", PARTS, "[a][b"),
        ("{{ messages[-1].content }}!", PARTS, "a\nb"),
    ],
)
def test_the_last_message_is_continued(source: str, content: Any, expected: str) -> None:
    messages = [{"role": "assistant", "content": content}]
    assert render(source, messages, add_generation_prompt=False, continue_final_message=True) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("dropped", {"role": "assistant", "content": "a"}),
        ("{{ messages[-1].content }}", {"role": "assistant"}),
        ("{{ messages[-1].content }}", {"role": "assistant", "content": 3}),
    ],
)
def test_what_cannot_be_continued_is_refused(source: str, message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message: ") as caught:
        render(source, [message], add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_an_answer_is_continued_or_begun() -> None:
    with pytest.raises(InvalidRequest, match="exclude each other") as caught:
        render(tiny.CHATML, user("a"), add_generation_prompt=True, continue_final_message=True)
    assert caught.value.param == "continue_final_message"
