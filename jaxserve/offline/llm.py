"""`LLM`: a model in this process, for Python code that has prompts and wants outputs.

Owns the engine that it built. Knows neither files nor the API's schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from jaxserve.config import EngineConfig, ServeConfig
from jaxserve.engine.chat import Message
from jaxserve.errors import EngineError, InvalidRequest
from jaxserve.from_mapping import from_mapping
from jaxserve.offline.generation import Completion, Engine, Generation
from jaxserve.request import FinishReason, Request, SamplingParams

Prompt = str | Sequence[int]


class LLM:
    """A model, loaded and ready.

        with LLM("smollm2-135m-instruct", max_seqs=8) as llm:
            for output in llm.generate(["The capital of Peru is"], SamplingParams(max_tokens=16)):
                print(output.text)

    Not thread-safe. Close it, or use it as a context manager, to give back its memory.

    Args:
        model: a name from `configs/models/`, a path, or `hf:ORG/NAME`.
        options: fields of `EngineConfig`, such as `max_seqs` or `dtype`.

    Attributes:
        default_params: how prompts are sampled that come without parameters: the model's own values, else those of
            `SamplingParams`. To change one of them, `dataclasses.replace` it.

    Raises:
        ConfigError: on an unknown model or option.
        ModelLoadError: when weights or tokenizer cannot be loaded.
    """

    default_params: SamplingParams

    def __init__(self, model: str, **options: Any) -> None:
        engine_config: EngineConfig = from_mapping(EngineConfig, options, where="LLM")
        # Loading JAX takes seconds; whoever only imports this module need not wait for it.
        from jaxserve import launch

        self._own(launch.build_engine(ServeConfig(model=model, engine=engine_config)))

    def _own(self, engine: Engine) -> None:
        self._engine = engine
        defaults: dict[str, Any] = dict(engine.sampling_defaults)
        self.default_params = SamplingParams(**defaults)

    @classmethod
    def from_engine(cls, engine: Engine) -> Self:
        """An `LLM` over an engine that is already built; it closes the engine when it is closed."""
        llm = cls.__new__(cls)
        llm._own(engine)
        return llm

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue each prompt, all of them at once.

        Args:
            prompts: one or many, each a string or a sequence of token ids.
            params: for all prompts, or one for each; None for `default_params`. What is given is taken as it is.

        Returns:
            One completion a prompt, in order.

        Raises:
            InvalidRequest: naming the prompt that cannot be served; then none is.
            EngineError: when the engine fails.
        """
        encode = self._engine.tokenizer.encode
        return self._run([encode(p) if isinstance(p, str) else p for p in _as_prompts(prompts)], params)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer each conversation, all of them at once.

        Args:
            conversations: one or many, each a list of `{"role": ..., "content": ...}`.
            params: as `generate`.

        Raises:
            InvalidRequest: as `generate`, and where the model has no chat template.
            EngineError: when the engine fails.
        """
        encode_chat = self._engine.tokenizer.encode_chat
        return self._run([encode_chat(messages) for messages in _as_conversations(conversations)], params)

    def close(self) -> None:
        """Give back the engine's memory."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Completion]:
        generation = Generation(self._engine)
        done: dict[str, Completion] = {}
        try:
            params = self.default_params if params is None else params
            for index, (prompt, each) in enumerate(zip(prompts, _params_for(prompts, params), strict=True)):
                try:
                    constraint = self._engine.constraints.of(each)
                    request = Request(request_id=str(index), prompt=tuple(prompt), params=each, constraint=constraint)
                    generation.add(request)
                except InvalidRequest as error:
                    raise InvalidRequest(f"prompt {index}: {error}", param=error.param) from None
            while generation.num_live:
                done |= generation.step()
        finally:
            generation.close()
        return [_checked(done[str(index)], index) for index in range(len(prompts))]


def _checked(completion: Completion, index: int) -> Completion:
    if completion.finish_reason is FinishReason.ERROR:
        raise EngineError(f"the engine failed while it worked on prompt {index}")
    return completion


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _as_conversations(conversations: Sequence[Message] | Sequence[Sequence[Message]]) -> Sequence[Sequence[Message]]:
    if conversations and all(isinstance(item, dict) for item in conversations):
        return [conversations]  # type: ignore[list-item]
    return conversations  # type: ignore[return-value]


def _params_for(
    prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if len(params) != len(prompts):
        raise InvalidRequest(f"params must be one, or one for each of {len(prompts)} prompts, found {len(params)}")
    return params
