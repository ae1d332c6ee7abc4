"""Conversations that chat templates are compared over: plain data, for the script that asks `transformers` and for the test.

What differs on purpose between the two is here, too: content in parts goes to `transformers` as text where a template cannot
read parts, the role "developer" as "system" where a template does not know it, and a call without content with an empty one.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Any

Case = dict[str, Any]

NOW = datetime(2025, 3, 14, 9, 26, 53)
BOS, EOS = "<s>", "</s>"

# Templates that read some roles' content as a list of parts; the others read strings only.
ROLES_WITH_PARTS = {"Mistral-Small-3.2-24B-Instruct-2506": ("user", "assistant")}
# Templates that know the role "developer".
KNOW_DEVELOPER = ("openai-gpt-oss-120b",)
# Templates that fail without tools; "one" shows how.
NEED_TOOLS = ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",)


def _message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _call(name: str, arguments: dict[str, Any], call_id: str = "call12345") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = _message("system", "Answer in one line.")
HELLO = _message("user", "Hello?")
ANSWER = _message("assistant", "Yes, hello.")
LOW = _message("assistant", " Low. ")
NEXT = _message("user", "What is the tide?")
ODD = "  Grüße, 你好 👩\u200d👧 <b>&amp;</b> \"quoted\" 'single' \\n\ttab\u2028line {{ not_a_variable }} {% raw %}\n\n"

TIDE = {
    "type": "function",
    "function": {
        "name": "tide_table",
        "description": "Times of high water <at> a place & day.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "a harbour, such as Saint-Malo"},
                "day": {"type": "string", "description": " ISO date ", "enum": ["2025-03-14", "2025-03-15"]},
                "unit": {"type": ["string", "null"], "description": "höchstens einer", "default": "m"},
            },
            "required": ["place"],
        },
    },
}
NOTHING = {
    "type": "function",
    "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
}
LIST = {
    "type": "function",
    "function": {
        "name": "mean",
        "description": "The mean.",
        "parameters": {
            "type": "object",
            "properties": {"of": {"type": "array", "items": {"type": "number"}, "description": "m"}},
        },
    },
}
NESTED = {
    "type": "function",
    "function": {
        "name": "plan",
        "description": "Plans a trip.",
        "parameters": {
            "type": "object",
            "properties": {
                "legs": {
                    "type": "object",
                    "description": "by name",
                    "additionalProperties": {"type": "integer"},
                    "properties": {"from": {"type": "string", "description": "start"}},
                }
            },
        },
        "return": {"type": "string", "description": "an itinerary"},
    },
}
CALLED = _message(
    "assistant", "", tool_calls=[_call("tide_table", {"place": "Saint-Malo", "day": "2025-03-14", "unit": None})]
)
RESULT = _message("tool", '{"high": ["06:12", "18:31"]}', tool_call_id="call12345", name="tide_table")

CASES: dict[str, Case] = {
    "one": {"messages": [HELLO]},
    "no_generation_prompt": {"messages": [HELLO], "add_generation_prompt": False},
    "system": {"messages": [SYSTEM, HELLO]},
    "turns": {"messages": [HELLO, ANSWER, NEXT]},
    "turns_after_system": {"messages": [SYSTEM, HELLO, ANSWER, NEXT, LOW, _message("user", "And now?")]},
    "ends_with_an_answer": {"messages": [HELLO, ANSWER], "add_generation_prompt": False},
    "ends_with_an_answer_and_a_prompt": {"messages": [SYSTEM, HELLO, ANSWER]},
    "empty_content": {"messages": [_message("system", ""), _message("user", ""), _message("assistant", ""), HELLO]},
    "spaces": {"messages": [_message("user", " \n "), _message("assistant", "\n\n a \n"), _message("user", "\t")]},
    "odd_characters": {"messages": [_message("system", ODD), _message("user", ODD), _message("assistant", ODD), HELLO]},
    "names": {"messages": [_message("user", "Hi", name="ada"), _message("assistant", "Hi.", name="bot"), NEXT]},
    "developer": {"messages": [_message("developer", "Be brief."), HELLO]},
    "only_system": {"messages": [SYSTEM]},
    "two_users": {"messages": [HELLO, NEXT]},
    "answer_first": {"messages": [ANSWER, HELLO]},
    "system_in_the_middle": {"messages": [HELLO, ANSWER, SYSTEM, NEXT]},
    "an_unknown_role": {"messages": [HELLO, _message("critic", "No."), NEXT]},
    "no_content": {"messages": [{"role": "user"}]},
    "parts": {"messages": [_message("user", _parts("Hello,", " you"))]},
    "parts_everywhere": {"messages": [_message("user", _parts("a")), _message("assistant", _parts("b", "c")), NEXT]},
    "parts_in_system": {"messages": [_message("system", _parts("Be", "brief.")), HELLO]},
    "continued": {"messages": [HELLO, ANSWER], "continue_final_message": True, "add_generation_prompt": False},
    "continued_with_space": {
        "messages": [SYSTEM, HELLO, _message("assistant", " The tide \n")],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "continued_user": {"messages": [HELLO], "continue_final_message": True, "add_generation_prompt": False},
    "continued_parts": {
        "messages": [HELLO, _message("assistant", _parts("The", " tide"))],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "tools": {"messages": [SYSTEM, NEXT], "tools": [TIDE]},
    "several_tools": {"messages": [NEXT], "tools": [TIDE, NOTHING, NESTED]},
    "a_tool_with_a_list": {"messages": [NEXT], "tools": [LIST]},  # for which one template calls itself without end
    "no_tools": {"messages": [NEXT], "tools": []},
    "tool_called": {"messages": [NEXT, CALLED, RESULT], "tools": [TIDE]},
    "tool_called_and_answered": {"messages": [SYSTEM, NEXT, CALLED, RESULT, ANSWER, HELLO], "tools": [TIDE]},
    "tool_called_with_null_content": {
        "messages": [NEXT, {**CALLED, "content": None}, RESULT],
        "tools": [TIDE],
    },
    "two_calls": {
        "messages": [
            NEXT,
            _message("assistant", "I look.", tool_calls=[_call("now", {}), _call("tide_table", {"place": "é"}, "call67890")]),
            _message("tool", "12:00", tool_call_id="call12345"),
            _message("tool", "18:31", tool_call_id="call67890"),
        ],
        "tools": [TIDE, NOTHING],
    },
    "a_call_with_a_long_id": {
        "messages": [NEXT, _message("assistant", "", tool_calls=[_call("now", {}, "call_with_a_long_id")]), RESULT],
    },
    "reasoning": {"messages": [HELLO, _message("assistant", "Yes.", reasoning_content="A greeting."), NEXT]},
    "reasoning_last": {
        "messages": [HELLO, _message("assistant", "Yes.", reasoning="A greeting.")],
        "add_generation_prompt": False,
    },
    "thoughts_in_content": {"messages": [HELLO, _message("assistant", "<think>\nhm\n</think>\n\nYes."), NEXT]},
    "thinking_off": {"messages": [HELLO, ANSWER, NEXT], "variables": {"enable_thinking": False}},
    "thinking_on": {"messages": [SYSTEM, HELLO], "variables": {"enable_thinking": True}},
    "variables": {
        "messages": [SYSTEM, NEXT],
        "tools": [TIDE],
        "variables": {
            "date_string": "1 Jan 2030",
            "tools_in_user_message": False,
            "builtin_tools": ["browser", "python", "code_interpreter"],
            "reasoning_effort": "high",
            "model_identity": "You are a tide table.",
        },
    },
    "documents": {"messages": [HELLO], "documents": [{"title": "Tides", "text": "They come and go."}]},
}  # fmt: skip


def messages_for_transformers(case: Case, template: str) -> list[dict[str, Any]]:
    """The case's messages in the form in which `transformers` has to be asked with this template."""
    roles_with_parts = ROLES_WITH_PARTS.get(template, ())
    asked = []
    for message in case["messages"]:
        content = message.get("content")
        if isinstance(content, list) and message["role"] not in roles_with_parts:
            message = {**message, "content": "\n".join(part["text"] for part in content)}
        if message["role"] == "developer" and template not in KNOW_DEVELOPER:
            message = {**message, "role": "system"}
        if message.get("tool_calls") and content is None:
            message = {**message, "content": ""}
        asked.append(message)
    return asked


def tools_for(name: str, case: Case, template: str) -> list[dict[str, Any]] | None:
    """The case's tools, and one where the template cannot do without."""
    return case.get("tools", [NOTHING] if template in NEED_TOOLS and name != "one" else None)


def summary(rendered: str) -> str:
    """Length and hash: a rendering holds much of its template, which is not ours to keep."""
    return f"{len(rendered)} {hashlib.sha256(rendered.encode()).hexdigest()[:32]}"
