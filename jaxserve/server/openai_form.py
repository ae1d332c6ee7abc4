"""The form of the OpenAI API's completions and chat completions: `wire` says what is in it, here it is put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.engine.text import Tokenizer
from jaxserve.errors import JaxserveError
from jaxserve.server import wire
from jaxserve.server.call import Call
from jaxserve.server.echo import PromptLogprobs
from jaxserve.server.form import MakeForm, WholeOutput, whole_outputs
from jaxserve.server.joining import Begun, Deltas
from jaxserve.server.prompt_logprobs import add_prompt_logprobs
from jaxserve.server.ranking import shown_choices


class OpenAIForm:
    """Answers of one of the two endpoints; a `form.Form`."""

    def __init__(self, shape: wire.Shape, model_name: str) -> None:
        self._shape = shape
        self._model_name = model_name

    async def whole(self, begun: Begun) -> dict[str, Any]:
        outputs, source = await whole_outputs(begun), begun.source

        def body() -> dict[str, Any]:
            return self.body(
                begun.call,
                outputs,
                created=begun.created,
                num_output=source.num_output,
                num_cached=source.num_cached,
                num_reasoning=source.num_reasoning,
                prompt_logprobs=source.prompt_logprobs,
            )

        if begun.call.shows_prompts:  # likeliest tokens at each of thousands of places would hold up every stream
            return await asyncio.to_thread(body)
        return body()

    def body(
        self,
        call: Call,
        outputs: Sequence[WholeOutput],
        *,
        created: int,
        num_output: int,
        num_cached: int | None,
        num_reasoning: int | None,
        prompt_logprobs: Callable[[int], PromptLogprobs | None],
    ) -> dict[str, Any]:
        """The body of an answer whose outputs have ended.

        Args:
            created: seconds since 1970.
            num_output, num_cached, num_reasoning: tokens of all outputs; cached ones are not told where they are None.
            prompt_logprobs: what is known of a prompt, by its index.
        """
        body = wire.whole(
            self._shape,
            call_id=call.call_id,
            created=created,
            model=self._model_name,
            choices=shown_choices(call, [(output.content, output.tokens, output.finish_reason) for output in outputs]),
            num_prompt=call.num_prompt_tokens,
            num_output=num_output,
            num_cached=num_cached,
            num_reasoning=num_reasoning,
        )
        add_prompt_logprobs(body, call, self._shape, prompt_logprobs)
        return body

    def events(self, begun: Begun) -> ChunkEvents:
        return ChunkEvents(begun, self._shape, self._model_name)


class ChunkEvents:
    """A stream of chunks; a `form.Events`."""

    def __init__(self, begun: Begun, shape: wire.Shape, model_name: str) -> None:
        call = begun.call
        self._call = call
        self._source = begun.source
        self._writer = wire.ChunkWriter(
            shape,
            call_id=call.call_id,
            created=begun.created,
            model=model_name,
            num_choices=len(call.requests),
            include_usage=call.include_usage,
            obfuscate=call.obfuscates,
        )
        self._opened = False

    def opening(self) -> bytes:
        """Nothing yet: by the first chunk, benchmarks among the clients tell when the first token came."""
        return b""

    def _roles(self) -> bytes:
        self._opened = True
        if self._call.continuous_usage:
            self._writer.count(self._call.num_prompt_tokens, 0, 0, self._source.num_reasoning)
        return b"".join(map(self._writer.opening, range(len(self._call.requests))))

    def deltas(self, deltas: Deltas) -> bytes:
        roles = b"" if self._opened else self._roles()
        if self._call.continuous_usage:
            self._writer.count(*self._counts())
        return roles + b"".join([self._writer.delta(index, delta) for index, delta in deltas])

    def ending(self) -> bytes:
        if not self._call.include_usage:
            return wire.DONE
        return self._writer.usage(*self._counts()) + wire.DONE

    def _counts(self) -> tuple[int, int, int, int | None]:
        source = self._source
        return self._call.num_prompt_tokens, source.num_output, source.num_cached, source.num_reasoning

    def failure(self, error: JaxserveError | str) -> bytes:
        if isinstance(error, str):
            body = wire.error_body(error, status=500, code="internal_error")
        else:
            body = wire.error_body(error, status=wire.status_of(error))
        return wire.event(body) + wire.DONE


def form_of(shape: type[wire.Shape]) -> MakeForm:
    """What makes the form of an endpoint that has this shape."""

    def make(tokenizer: Tokenizer, model_name: str) -> OpenAIForm:
        return OpenAIForm(shape(tokenizer), model_name)

    return make
