"""Whatever may be asked for may be asked for together: bodies drawn at random, of every endpoint that generates.

A stream says what the whole answer says, what has to be of some form is, and all of it at once, with sequences preempted for
want of memory, is the same again.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import pytest

from jaxserve.config import HttpConfig
from jaxserve.engine.text import Tokenizer
from jaxserve.engine.tools.formats import TOOL_FORMATS
from tests.engine import tiny_tokenizers as tiny
from tests.engine.engines import LIMITS, fake_engine
from tests.server.serving import MODEL, Serving, serving
from tests.server.test_tools import TOOL_TEMPLATE

Json = dict[str, Any]
COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"

# --- what is asked for ------------------------------------------------------------------------------------------------

PAINT = {
    "type": "object",
    "properties": {
        "colour": {"enum": ['re"d', "grün\\"]},
        "coats": {"type": "object", "properties": {"n": {"type": "integer"}}},
    },
    "required": ["colour"],
    "additionalProperties": False,
}
FUNCTIONS: dict[str, Json] = {"paint": PAINT, "now": {"type": "object", "properties": {}, "additionalProperties": False}}


def as_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), PAINT)
    return True


FORMS: list[tuple[Json, Callable[[str], Any]]] = [
    ({"json": PAINT}, as_schema),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ({"regex": "[a-c]{3}-[é0-9]{2,4}"}, re.compile("[a-c]{3}-[é0-9]{2,4}").fullmatch),
    ({"choice": ["yes", "noé", "no"]}, ["yes", "noé", "no"].__contains__),
    ({"grammar": 'start: "a" /[bc]{2,5}/'}, re.compile("a[bc]{2,5}").fullmatch),
]
TOOLS: dict[str, list[Json]] = {
    CHAT: [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in FUNCTIONS.items()],
    RESPONSES: [{"type": "function", "name": name, "parameters": schema} for name, schema in FUNCTIONS.items()],
    MESSAGES: [{"name": name, "input_schema": schema} for name, schema in FUNCTIONS.items()],
}
MUST_CALL: dict[str, list[Any]] = {
    CHAT: ["required", {"type": "function", "function": {"name": "paint"}}],
    RESPONSES: ["required", {"type": "function", "name": "paint"}],
    MESSAGES: [{"type": "any"}, {"type": "tool", "name": "paint"}],
}


@dataclass(frozen=True)
class Asked:
    """A body, and what its answer has to be where it ends by itself: of a form, or calls."""

    path: str
    body: Json
    is_right: Callable[[str], Any] | None = None
    calls: bool = False


def draw(rng: random.Random, path: str) -> Asked:
    """Some of what the endpoint at `path` can be asked for."""
    body: Json = {"model": MODEL, "temperature": rng.choice([0, 1]), "seed": rng.randrange(99)}
    chat = {"messages": [{"role": "user", "content": f"{rng.random()}"}]}
    body |= {COMPLETIONS: {"prompt": f"{rng.random()}"}, RESPONSES: {"input": f"{rng.random()}"}}.get(path, chat)
    body["max_output_tokens" if path == RESPONSES else "max_tokens"] = rng.choice([3, 20, 100, 100])
    is_right, calls = None, False
    if path != COMPLETIONS and rng.random() < 0.6:
        body["tools"] = TOOLS[path]
        if calls := rng.random() < 0.5:
            body["tool_choice"] = rng.choice(MUST_CALL[path])
    if path != MESSAGES:
        options: list[Json] = [{"min_tokens": 3}, {"stop": ["o", '"c']}, {"include_stop_str_in_output": True}, {"n": 2}]
        options += [{"logprobs": 1, "echo": True}, {"frequency_penalty": 1}, {"ignore_eos": True}]
        for option in rng.sample(options, 2):
            body |= option if path == COMPLETIONS or "echo" not in option else {}
        if path == CHAT and rng.random() < 0.4:
            body |= {"logprobs": True, "top_logprobs": 1}
        if path == RESPONSES:
            body.pop("n", None)
            body["include"] = ["message.output_text.logprobs"]
        if not calls and rng.random() < 0.6:
            form, is_right = rng.choice(FORMS[: 4 if "tools" in body else 5])
            body["structured_outputs"] = form
    free = not ({"stop", "echo", "ignore_eos"} & body.keys())
    return Asked(path, body, is_right if free else None, calls and free)


# --- what is answered -------------------------------------------------------------------------------------------------


def said(path: str, answer: Json) -> Any:
    """What a whole answer says, without what differs from one time to the next."""
    kept = {"output": answer["output"], "status": answer["status"]} if path == RESPONSES else None
    kept = kept or ({"content": answer["content"], "stop_reason": answer["stop_reason"]} if path == MESSAGES else None)
    return json.loads(re.sub(r'"(id|call_id)": "[^"]*"', '"id": ""', json.dumps(kept or {"choices": answer["choices"]})))


def put_together(path: str, events: list[Json]) -> Json:
    """The whole answer that a stream's events make."""
    if path == RESPONSES:
        return dict(events[-1]["response"])
    return _message(events) if path == MESSAGES else _choices(events, chat=path == CHAT)


def _message(events: list[Json]) -> Json:
    blocks: list[Json] = []
    fragments = ""
    for event in events:
        delta = event.get("delta", {})
        match event["type"], delta.get("type"):
            case "content_block_start", _:
                blocks.append(dict(event["content_block"]))
                fragments = ""
            case "content_block_delta", "text_delta":
                blocks[-1]["text"] += delta["text"]
            case "content_block_delta", "input_json_delta":
                fragments += delta["partial_json"]
            case "content_block_stop", _ if blocks[-1]["type"] == "tool_use" and fragments.endswith("}"):
                blocks[-1]["input"] = json.loads(fragments)
            case "message_delta", _:
                return {"content": blocks, "stop_reason": delta["stop_reason"]}
    raise AssertionError("the stream has no end")


def _choices(events: list[Json], *, chat: bool) -> Json:
    choices: dict[int, Json] = {}
    for event in (each for chunk in events for each in chunk["choices"]):
        message = {"role": "assistant", "content": "", "refusal": None}
        empty = {"message": message} if chat else {"text": ""}
        choice = choices.setdefault(
            event["index"], {"index": event["index"], **empty, "logprobs": None, "finish_reason": None}
        )
        choice["finish_reason"] = choice["finish_reason"] or event["finish_reason"]
        for key, values in (event["logprobs"] or {}).items():
            before = (choice["logprobs"] or {}).get(key)
            choice["logprobs"] = {**(choice["logprobs"] or {}), key: values if before is None else before + values}
        if not chat:
            choice["text"] += event["text"]
            continue
        message = choice["message"]
        message["content"] += event["delta"].get("content", "")
        for delta in event["delta"].get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if delta["index"] == len(calls):
                calls.append({**delta, "function": {**delta["function"], "arguments": ""}})
                del calls[-1]["index"]
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    for choice in choices.values() if chat else ():
        message = choice["message"]
        message["content"] = message["content"] or (None if "tool_calls" in message else "")
    return {"choices": [choices[index] for index in sorted(choices)]}


async def ask(server: Serving, asked: Asked) -> Json:
    status, answer = await server.post(asked.path, asked.body)
    assert status == 200, (asked, answer)
    return answer


async def ask_streamed(server: Serving, asked: Asked) -> Json:
    async with server.http.post(server.url + asked.path, json={**asked.body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n") if line.startswith("data: {")]
    return put_together(asked.path, [json.loads(line) for line in lines])


def check_form(asked: Asked, answer: Json) -> None:
    """What ended by itself is of its form, and there are calls, as their schemas have them, where there must be."""
    match asked.path:
        case "/v1/responses":
            texts = ["".join(item["content"][0]["text"] for item in answer["output"] if item["type"] == "message")]
            made = [(item["name"], item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
            ended = answer["status"] == "completed"
        case "/v1/messages":
            texts = []
            made = [(block["name"], json.dumps(block["input"])) for block in answer["content"] if block["type"] == "tool_use"]
            ended = answer["stop_reason"] != "max_tokens"
        case _:
            choice = answer["choices"][0]
            message = choice.get("message", {"content": choice.get("text")})
            texts = [message["content"]]
            made = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
            ended = choice["finish_reason"] != "length"
    if not ended:
        return
    if asked.is_right is not None and not made:
        assert all(asked.is_right(text) for text in texts), texts
    if asked.calls:
        assert made
        assert not any(texts)
        for name, arguments in made:
            jsonschema.validate(json.loads(arguments), FUNCTIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hermes", "mistral"])
async def test_combinations(name: str) -> None:
    rng = random.Random(name)
    library = tiny.byte_level_library()
    library.add_special_tokens(list(TOOL_FORMATS[name].markers))
    tokenizer = Tokenizer(library.to_str(), chat_template=TOOL_TEMPLATE, eos_token="<|im_end|>")
    tokenizer = tokenizer.with_formats(tool_format=name, reasoning_format="think")
    asked = [draw(rng, path) for path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES) for _ in range(5)]
    limits = replace(LIMITS, vocab_size=tokenizer.vocab_size, max_context=1024)
    config = HttpConfig(port=0, max_queue_tokens=100_000)

    def engine(num_pages: int) -> Any:
        return fake_engine(replace(limits, num_pages=num_pages), eos_token_ids=(tiny.IM_END_ID,), eos_probability=0.02)

    async with serving(engine(256), tokenizer=tokenizer, config=config) as server:
        alone = [await ask(server, each) for each in asked]
        for each, answer in zip(asked, alone, strict=True):
            check_form(each, answer)
            assert said(each.path, await ask_streamed(server, each)) == said(each.path, answer), each
    small = engine(80)
    async with serving(small, tokenizer=tokenizer, config=config) as server:
        together = await asyncio.gather(*(ask(server, each) for each in asked))
        assert server.engine.stats.num_preemptions > 0
    for each, answer, again in zip(asked, alone, together, strict=True):
        assert said(each.path, again) == said(each.path, answer), each
