"""What goes back over the wire: whole answers, stream chunks, log probabilities, usage and errors, as the OpenAI API has them.

Pure. Owns the two shapes (completions and chat completions) and nothing else. A chunk of text is the hot path, once per
token and stream: all of it but the text is encoded once per choice, and chunks are ASCII, since some clients split lines at
characters (U+2028, U+0085) that JSON need not escape.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.engine.output import OutputDelta, ShownToken
from jaxserve.engine.text import Tokenizer
from jaxserve.engine.tools.parts import CallArguments, CallBegin, Part, Reasoning, Text
from jaxserve.errors import Conflict, JaxserveError, QueueFull, RequestError, RequestTimeout, StorageFailed, Unauthorized
from jaxserve.request import FinishReason

DONE = b"data: [DONE]\n\n"

MIN_LOGPROB = -9999.0
"""OpenAI's stand-in for a probability of zero, whose logarithm JSON cannot spell."""

FILL = 32
"""Characters; lengths of chunks that are obfuscated are multiples of it, but for what is the same in all of them."""

_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_quote: Callable[[str], str] = json.encoder.encode_basestring_ascii


def event(value: Any) -> bytes:
    """One server-sent event."""
    return f"data: {_dumps(value)}\n\n".encode()


def named_event(value: dict[str, Any]) -> bytes:
    """One server-sent event whose name is its type."""
    return f"event: {value['type']}\n".encode() + event(value)


class Shape:
    """What differs between the two endpoints. Subclasses are stateless but for the tokenizer."""

    whole_object: str
    chunk_object: str
    _chunk_before: str  # between the choice's index and its text
    _chunk_after: str  # between the text and logprobs

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self) -> dict[str, Any] | None:
        """The part of a choice that a stream begins with, if any."""
        raise NotImplementedError

    def ending(self) -> dict[str, Any]:
        """The part of a choice that a stream ends with, beside its finish reason."""
        raise NotImplementedError

    def message(self, content: str | Sequence[Part]) -> dict[str, Any]:
        """The part of a choice that holds all that was said."""
        raise NotImplementedError

    def spell(self, part: Part) -> tuple[str, str, str]:
        """A part in a choice of a chunk: the text that grows with the part, and what comes before and after it."""
        raise NotImplementedError

    def logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        """Log probabilities of `tokens`."""
        raise NotImplementedError

    def chunk_around_text(self, index: int) -> tuple[str, str]:
        """What comes before and after the text in a choice of a chunk, up to the value of `logprobs`."""
        return f'{{"index":{index},{self._chunk_before}', f'{self._chunk_after},"logprobs":'

    def token_text(self, token_id: int) -> str:
        """The token's text; where its bytes are not whole characters, those bytes, as OpenAI spells them."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionShape(Shape):
    """`/v1/completions`."""

    whole_object = chunk_object = "text_completion"
    _chunk_before = '"text":'
    _chunk_after = ""

    def opening(self) -> None:
        return None

    def ending(self) -> dict[str, Any]:
        return {"text": ""}

    def message(self, content: str | Sequence[Part]) -> dict[str, Any]:
        assert isinstance(content, str), "completions are not read as parts"
        return {"text": content}

    def spell(self, part: Part) -> tuple[str, str, str]:
        raise AssertionError("completions are not read as parts")

    def logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        """Lists by token. The chosen token is always among `top_logprobs`; of tokens spelled alike the likeliest is."""
        return {
            "tokens": [self.token_text(token.token_id) for token in tokens],
            "token_logprobs": [None if token.logprobs is None else number(token.logprobs.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, token: ShownToken) -> dict[str, float] | None:
        if token.logprobs is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in (*token.logprobs.top, (token.token_id, token.logprobs.logprob)):
            top.setdefault(self.token_text(token_id), number(logprob))
        return top


class ChatShape(Shape):
    """`/v1/chat/completions`."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    _chunk_before = '"delta":{"content":'
    _chunk_after = "}"

    def opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": "", "refusal": None}}

    def ending(self) -> dict[str, Any]:
        return {"delta": {}}

    def message(self, content: str | Sequence[Part]) -> dict[str, Any]:
        if isinstance(content, str):
            return {"message": {"role": "assistant", "content": content, "refusal": None}}
        text = "".join(part.text for part in content if isinstance(part, Text))
        reasoning = "".join(part.text for part in content if isinstance(part, Reasoning))
        calls = _calls(content)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def spell(self, part: Part) -> tuple[str, str, str]:
        match part:
            case Text(text):
                return text, self._chunk_before, self._chunk_after
            case Reasoning(text):
                return text, '"delta":{"reasoning_content":', "}"
            case CallBegin(index, call_id, name):
                call = f'"index":{index},"id":{_quote(call_id)},"type":"function","function":{{"name":{_quote(name)}'
                return "", f'"delta":{{"tool_calls":[{{{call},"arguments":', "}}]}"
            case CallArguments(index, fragment):
                return fragment, f'"delta":{{"tool_calls":[{{"index":{index},"function":{{"arguments":', "}}]}"

    def logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        """A list of tokens, each with its alternatives and its own bytes."""
        content = [
            self._entry(token.token_id, token.logprobs.logprob)
            | {"top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in token.logprobs.top]}
            for token in tokens
            if token.logprobs is not None
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": self.token_text(token_id), "logprob": number(logprob), "bytes": list(data)}


def _calls(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The calls among the parts of an answer."""
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            calls.append({"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": ""}})
        elif isinstance(part, CallArguments):
            calls[part.index]["function"]["arguments"] += part.fragment
    return calls


def number(logprob: float) -> float:
    """A log probability as JSON can spell it."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB  # not `max`, which keeps what is no number


def usage(num_prompt: int, num_output: int, num_cached: int | None = None, num_reasoning: int | None = None) -> dict[str, Any]:
    """Token counts of a whole answer.

    Args:
        num_cached: prompt tokens that were not computed, if that is to be told.
        num_reasoning: output tokens that are reasoning, if the answer was read for it.
    """
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }
    if num_cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": num_cached}
    if num_reasoning is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return counts


def whole(
    shape: Shape,
    *,
    call_id: str,
    created: int,
    model: str,
    choices: Sequence[tuple[str | Sequence[Part], Sequence[ShownToken] | None, FinishReason]],
    num_prompt: int,
    num_output: int,
    num_cached: int | None = None,
    num_reasoning: int | None = None,
) -> dict[str, Any]:
    """An answer that is not streamed. `choices` are (content, tokens if log probabilities were asked for, why it ended)."""
    return {
        "id": call_id,
        "object": shape.whole_object,
        "created": created,
        "model": model,
        "choices": [
            {"index": index}
            | shape.message(content)
            | {"logprobs": None if tokens is None else shape.logprobs(tokens), "finish_reason": reason.value}
            for index, (content, tokens, reason) in enumerate(choices)
        ],
        "usage": usage(num_prompt, num_output, num_cached, num_reasoning),
    }


class ChunkWriter:
    """Encodes the chunks of one stream.

    Args:
        include_usage: whether each chunk has a usage, which is null but in the last, or what `count` makes it.
        obfuscate: whether chunks of text are filled up to lengths that are multiples of `FILL`.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        call_id: str,
        created: int,
        model: str,
        num_choices: int,
        include_usage: bool,
        obfuscate: bool = False,
    ) -> None:
        self._shape = shape
        head = {"id": call_id, "object": shape.chunk_object, "created": created, "model": model}
        self._head = f'data: {_dumps(head)[:-1]},"choices":['
        self._end = (',"usage":null' if include_usage else "") + "}\n\n"
        self._filling = secrets.token_urlsafe(FILL) if obfuscate else ""
        around = [shape.chunk_around_text(index) for index in range(num_choices)]
        self._before = [self._head + before for before, _ in around]
        self._after = around[0][1]

    def opening(self, index: int) -> bytes:
        """The chunk that choice `index` begins with; none for completions."""
        part = self._shape.opening()
        return b"" if part is None else self._choice({"index": index, **part, "logprobs": None, "finish_reason": None})

    def delta(self, index: int, delta: OutputDelta) -> bytes:
        """The chunks for `delta`: its text or its parts, unless there is nothing to say, and the end, if it is one."""
        chunks = b""
        if delta.parts:
            chunks = self._parts(index, delta.parts, delta.tokens)
        elif delta.tokens or (delta.text and delta.parts is None):
            chunks = self._text(index, delta.text if delta.parts is None else "", delta.tokens)
        if delta.finish_reason is not None:
            part = {"index": index, **self._shape.ending(), "logprobs": None, "finish_reason": delta.finish_reason.value}
            chunks += self._choice(part)
        return chunks

    def _parts(self, index: int, parts: Sequence[Part], tokens: Sequence[ShownToken]) -> bytes:
        """A chunk for each part; log probabilities come with the first."""
        chunks = []
        for part in parts:
            if isinstance(part, Text):
                chunks.append(self._text(index, part.text, tokens))
            else:
                text, before, after = self._shape.spell(part)
                chunks.append(self._chunk(f'{self._head}{{"index":{index},{before}', text, after + ',"logprobs":', tokens))
            tokens = ()
        return b"".join(chunks)

    def _text(self, index: int, text: str, tokens: Sequence[ShownToken]) -> bytes:
        return self._chunk(self._before[index], text, self._after, tokens)

    def _chunk(self, before: str, text: str, after: str, tokens: Sequence[ShownToken]) -> bytes:
        quoted = _quote(text)
        logprobs = _dumps(self._shape.logprobs(tokens)) if tokens else "null"
        after = f'{after}{logprobs},"finish_reason":null}}]'
        if self._filling:
            after += f',"obfuscation":"{self._filling[: -(len(quoted) + len(after)) % FILL]}"'
        return f"{before}{quoted}{after}{self._end}".encode()

    def usage(self, num_prompt: int, num_output: int, num_cached: int, num_reasoning: int | None = None) -> bytes:
        """The usage chunk, which has no choices."""
        counts = usage(num_prompt, num_output, num_cached, num_reasoning)
        return f'{self._head}],"usage":{_dumps(counts)}}}\n\n'.encode()

    def count(self, num_prompt: int, num_output: int, num_cached: int, num_reasoning: int | None = None) -> None:
        """Put this usage, which is that so far, into the chunks to come."""
        self._end = f',"usage":{_dumps(usage(num_prompt, num_output, num_cached, num_reasoning))}}}\n\n'

    def _choice(self, part: dict[str, Any]) -> bytes:
        return f"{self._head}{_dumps(part)}]{self._end}".encode()


def error_body(error: JaxserveError | str, *, status: int, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        408: "timeout_error",
        429: "rate_limit_error",
        503: "service_unavailable_error",
    }
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    if isinstance(error, RequestError):
        code = error.code
    param = error.param if isinstance(error, RequestError) else None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def internal_error(request_id: str) -> str:
    """What a client is told of a failure that is ours."""
    return f"the server failed; its log says how, under request {request_id}"


def status_of(error: JaxserveError) -> int:
    """The HTTP status to answer `error` with."""
    return error.status if isinstance(error, RequestError) else 500


def error_headers(error: JaxserveError) -> dict[str, str]:
    """`Retry-After` for what may work later, and how to identify oneself."""
    if isinstance(error, QueueFull):
        return {"Retry-After": str(max(1, round(error.retry_after)))}
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, (RequestTimeout, Conflict, StorageFailed)):  # OpenAI's clients repeat these unless told not to
        return {"x-should-retry": "false"}
    return {"Retry-After": "5"} if status_of(error) == 503 else {}
