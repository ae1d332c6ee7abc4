"""One call's choices while the engine works on them.

Owns the step from token events to what each choice shows, and which choices still go on. Does not know how that is written.
"""

from __future__ import annotations

from jaxserve.engine.output import Output, OutputDelta
from jaxserve.engine.text import Tokenizer
from jaxserve.engine.token_stream import TokenStream
from jaxserve.request import TokenEvent
from jaxserve.server.call import Call
from jaxserve.server.echo import HeldEvents, PromptLogprobs, ShownPrompts
from jaxserve.server.metrics import Metrics, TokenCounter


class Generation:
    """Reads a call's stream as deltas of its choices."""

    def __init__(self, call: Call, stream: TokenStream, tokenizer: Tokenizer, clock: TokenCounter, metrics: Metrics) -> None:
        self._stream = stream
        self._clock = clock
        self._metrics = metrics
        self._prompts = ShownPrompts(call, tokenizer) if call.shows_prompts else None
        self._held = HeldEvents(call.num_candidates, self._prompts.scores) if self._prompts else None
        self._outputs = [Output(request, tokenizer, call.reading, lists_stop_token=call.echoes) for request in call.requests]
        self._num_cached = [0] * len(call.requests)
        self._num_candidates = call.num_candidates
        self._index_of = {request.request_id: index for index, request in enumerate(call.requests)}

    async def read(self) -> list[tuple[int, OutputDelta]]:
        """What has come since the last read, as (choice index, delta); empty once every choice has ended.

        Raises:
            EngineError, NotReady: as `TokenStream.read`.
        """
        events = await self._read_events()
        deltas = []
        for index, event in events:
            self._num_cached[index] = event.num_cached
            delta = self._outputs[index].push(event)
            if self._prompts is not None:
                delta = self._prompts.add(index, delta)
            if delta.finish_reason is not None:
                # A stop string ends the output, of which the engine knows nothing.
                self._stream.abort(event.request_id)
                self._metrics.finished.labels(delta.finish_reason.value).inc()
            deltas.append((index, delta))
        return deltas

    async def _read_events(self) -> list[tuple[int, TokenEvent]]:
        """Those that can be shown, by index; empty once every choice has ended."""
        while True:
            events = await self._stream.read()
            self._clock.observe(events)
            indexed = [(self._index_of[event.request_id], event) for event in events]
            if self._held is None or not events:
                return indexed
            if released := self._held.release(indexed):
                return released

    def prompt_logprobs(self, prompt: int) -> PromptLogprobs | None:
        """What `prompt_logprobs` shows of a prompt, by its index, once a choice of it has been read."""
        return None if self._prompts is None else self._prompts.logprobs(prompt)

    @property
    def num_cached(self) -> int:
        """Prompt tokens that were not computed, each prompt counted once: its other choices find what the first computed."""
        return sum(self._num_cached[:: self._num_candidates])

    @property
    def num_output(self) -> int:
        """Output tokens of all choices so far."""
        return sum(output.num_tokens for output in self._outputs)

    @property
    def num_reasoning(self) -> int | None:
        """Output tokens of all choices so far that are reasoning; None if they are not read for it."""
        counts = [output.num_reasoning_tokens for output in self._outputs]
        return sum(count or 0 for count in counts) if counts and counts[0] is not None else None
