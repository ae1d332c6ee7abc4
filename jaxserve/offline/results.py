"""Between input lines and the engine: a line as requests, and its outputs or its error as a result.

Owns the output's two shapes. Fields of bodies are the server's schema's business, so nothing is parsed twice. Everything in
a result follows from the run and the line, so that a run which was killed and resumed gives the bytes of one that was not.
The exception is log probabilities, if asked for: their last digits depend on which requests share a step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.batch_file import CHAT_URL, COMPLETIONS_URL, InputLine, answered
from jaxserve.engine.output import OutputDelta
from jaxserve.errors import EngineError, InvalidRequest, JaxserveError
from jaxserve.host.admission import validate
from jaxserve.offline.generation import Completion, Engine
from jaxserve.request import Request
from jaxserve.server.call import Call, naming_fields_of
from jaxserve.server.constraining import constrain
from jaxserve.server.echo import ShownPrompts
from jaxserve.server.form import WholeOutput
from jaxserve.server.openai import parse_chat, parse_completion
from jaxserve.server.openai_form import OpenAIForm
from jaxserve.server.prompt_logprobs import spell
from jaxserve.server.wire import ChatShape, CompletionShape, Shape, error_body, status_of, usage

Result = dict[str, Any]

# The moment of an answer would differ between runs.
CREATED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What fills in the lines.

    Attributes:
        run_id: of the run, from everything that determines its results; result ids come from it.
        seed: of the run; with a line's own name it gives the seed of requests without one.
        defaults: fields for lines that are not in batch format and do not have them.
        chat: whether a plain prompt goes through the chat template, as what a user says.
    """

    run_id: str
    seed: int = 0
    defaults: Mapping[str, Any]
    chat: bool = False

    def result_id(self, number: int) -> str:
        """The id of the result of line `number`."""
        return f"batch_req_{_hash(self.run_id, number)}"


class Translator:
    """Turns lines into calls and what came of them into results, for one model and one run."""

    def __init__(self, engine: Engine, options: RequestOptions) -> None:
        self._tokenizer = engine.tokenizer
        self._model_name = engine.model_name
        self._adapters = {one.adapter.name: one.adapter for one in engine.adapters.loaded}
        self._limits = engine.limits
        self._sampling_defaults = engine.sampling_defaults
        self._constraints = engine.constraints
        self._options = options
        self._shapes: dict[str, Shape] = {
            COMPLETIONS_URL: CompletionShape(engine.tokenizer),
            CHAT_URL: ChatShape(engine.tokenizer),
        }

    def parse(self, line: InputLine) -> Call:
        """The requests of a line, each of which the engine can serve and has a seed if it needs one.

        Raises:
            InvalidRequest, ModelNotFound: naming the field.
        """
        url, body = (line.url, line.body) if line.is_batch else self._plain_body(line)
        parse = parse_chat if url == CHAT_URL else parse_completion
        prefix = "chatcmpl" if url == CHAT_URL else "cmpl"
        call_id = f"{prefix}-{_hash(self._options.run_id, line.number)}"
        names = (self._model_name, *self._adapters)
        call = parse(
            body,
            self._tokenizer,
            model=names,
            max_context=self._limits.max_context,
            call_id=call_id,
            defaults=self._sampling_defaults,
        )
        if url != line.url:  # the prompt became a message here
            call = replace(call, field_names={ours: theirs for ours, theirs in call.field_names.items() if ours != "prompt"})
        if call.stream:
            raise InvalidRequest("stream must be false in a file", param="stream")
        if call.timeout is not None:
            raise InvalidRequest("timeout is for servers: nobody waits for the answers of a file", param="timeout")
        if not line.is_batch and len(call.requests) != 1:
            raise InvalidRequest("a line that is not in batch format has one prompt and one choice", param="n")
        if not line.is_batch and call.reading is not None and call.reading.tools is not None:
            raise InvalidRequest(
                "tools are for lines in batch format, whose results have a place for calls: give the line custom_id, method, "
                "url and body",
                param="tools",
            )
        with naming_fields_of(call):
            for request in call.requests:
                validate(request, self._limits)
        call = replace(call, requests=constrain(call.requests, self._constraints))
        name = f"line {line.number}" if line.custom_id is None else f"id {line.custom_id}"
        requests = tuple(self._with_seed(request, f"{name} {index}") for index, request in enumerate(call.requests))
        adapter = self._adapters.get(call.model)
        return replace(call, requests=tuple(replace(request, adapter=adapter) for request in requests))

    def answer(self, line: InputLine, call: Call, completions: Sequence[Completion]) -> Result:
        """The result of a line whose requests are done."""
        prompts = ShownPrompts(call, self._tokenizer)
        prompts.scores |= {i: each.prompt_logprobs for i, each in enumerate(completions[:: call.num_candidates])}
        if not line.is_batch:
            return self._plain_answer(line, call, completions[0], prompts)
        body = OpenAIForm(self._shapes[line.url], call.model).body(
            call,
            [_shown(prompts, index, completion) for index, completion in enumerate(completions)],
            created=CREATED,
            num_output=sum(len(completion.token_ids) for completion in completions),
            num_cached=None,
            num_reasoning=_num_reasoning(completions),
            prompt_logprobs=prompts.logprobs,
        )
        return self._batch_result(line, 200, body)

    def refusal(self, line: InputLine, error: JaxserveError) -> Result:
        """The result of a line that cannot be served, or whose serving failed."""
        status = status_of(error)
        body = error_body(error, status=status, code="engine_error" if isinstance(error, EngineError) else None)
        if line.is_batch:
            return self._batch_result(line, status, body)
        return self._plain_result(line, text=None, finish_reason=None, usage=None, error=body["error"])

    def unreadable(self, number: int, custom_id: str | None, error: JaxserveError) -> Result:
        """The result of a line that is no request at all."""
        body = error_body(error, status=400)
        return {
            "id": self._options.result_id(number),
            "custom_id": custom_id,
            "index": number - 1,
            "response": None,
            "error": body["error"] | {"code": "invalid_line"},
        }

    def _plain_body(self, line: InputLine) -> tuple[str, dict[str, Any]]:
        url = line.url
        body = {key: value for key, value in line.body.items() if value is not None}
        if self._options.chat and url == COMPLETIONS_URL:
            prompt = body.pop("prompt", None)
            if not isinstance(prompt, str):
                raise InvalidRequest("prompt must be a string to go through the chat template (--chat)", param="prompt")
            url, body = CHAT_URL, {"messages": [{"role": "user", "content": prompt}]} | body
        defaults = dict(self._options.defaults)
        if "max_completion_tokens" in body:
            defaults.pop("max_tokens", None)
        return url, {"model": self._model_name} | defaults | body

    def _with_seed(self, request: Request, name: str) -> Request:
        if request.params.seed is not None or request.params.greedy:
            return request
        seed = int(_hash(self._options.seed, name), 16) % 2**64
        return replace(request, params=replace(request.params, seed=seed))

    def _batch_result(self, line: InputLine, status: int, body: Result) -> Result:
        request_id = f"req_{_hash(self._options.run_id, line.number)}"
        return answered(self._options.result_id(line.number), line.custom_id, request_id, status, body)

    def _plain_answer(self, line: InputLine, call: Call, completion: Completion, prompts: ShownPrompts) -> Result:
        shape = self._shapes[CHAT_URL if call.call_id.startswith("chat") else COMPLETIONS_URL]
        output = _shown(prompts, 0, completion)
        shown: dict[str, Any] = {"logprobs": shape.logprobs(output.tokens)} if call.shows_logprobs else {}
        if (logprobs := prompts.logprobs(0)) is not None:
            shown["prompt_logprobs"] = spell(shape, call.prompts[0], logprobs)
        return self._plain_result(
            line,
            text=output.content if call.echoes else completion.text,
            **shown,
            finish_reason=completion.finish_reason.value,
            usage=usage(call.num_prompt_tokens, len(completion.token_ids)),
            error=None,
        )

    def _plain_result(self, line: InputLine, **outcome: Any) -> Result:
        asked = "prompt" if "prompt" in line.body else "messages"
        names = {"index": line.number - 1} | ({} if line.custom_id is None else {"custom_id": line.custom_id})
        return {"id": self._options.result_id(line.number), **names, asked: line.body[asked], **outcome}


def _shown(prompts: ShownPrompts, index: int, completion: Completion) -> WholeOutput:
    """The output of request `index` with what is shown of its prompt."""
    if not isinstance(completion.content, str):
        return WholeOutput(completion.content, completion.shown, completion.finish_reason)
    delta = prompts.add(index, OutputDelta(completion.content, completion.shown, completion.finish_reason))
    return WholeOutput(delta.text, delta.tokens, completion.finish_reason)


def _num_reasoning(completions: Sequence[Completion]) -> int | None:
    counts = [completion.num_reasoning for completion in completions]
    return None if counts[0] is None else sum(count or 0 for count in counts)


def run_id_of(fingerprint: Mapping[str, Any]) -> str:
    """A name for everything that determines a run's results."""
    return _hash(json.dumps(fingerprint, sort_keys=True))


def _hash(*parts: object) -> str:
    """24 hex digits."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=12).hexdigest()
