"""A toy engine: the real core and scheduler over `FakeRunner`, with a tiny byte-level tokenizer that chats. No JAX."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from jaxserve.engine.adapters import NO_ADAPTERS, AdapterTable
from jaxserve.engine.constraints import Constraints
from jaxserve.engine.core import EngineCore
from jaxserve.engine.text import Tokenizer
from jaxserve.host.scheduler import Scheduler
from jaxserve.plan import RunnerLimits
from jaxserve.request import FinishReason, Request
from jaxserve.server.call import NO_DEFAULTS
from tests.engine.tiny_tokenizers import byte_level
from tests.fakes import FakeRunner, expected_output

EOS_TOKEN_ID = 7


class CountingCore(EngineCore):
    """Notes every request that it is given."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.added: list[Request] = []

    def add(self, request: Request) -> None:
        super().add(request)
        self.added.append(request)


@dataclass
class ToyEngine:
    """Satisfies `jaxserve.offline.generation.Engine`."""

    core: CountingCore
    tokenizer: Tokenizer
    runner: FakeRunner
    limits: RunnerLimits
    model_name: str = "toy"
    adapters: AdapterTable = NO_ADAPTERS
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    num_closed: int = field(default=0)

    @cached_property
    def constraints(self) -> Constraints:
        return Constraints(self.tokenizer, self.limits.vocab_size, self.core.eos_token_ids)

    @property
    def added(self) -> list[Request]:
        return self.core.added

    def close(self) -> None:
        self.num_closed += 1


def alone(engine: ToyEngine, request: Request) -> tuple[tuple[int, ...], FinishReason, str]:
    """What `request`, without stop strings, must give alone or in any batch: token ids, why it ended, and its text."""
    tokens, reason = expected_output(
        request, engine.limits, next_token=engine.runner.next_token, eos_token_ids=(EOS_TOKEN_ID,)
    )
    shown = tokens[:-1] if reason is FinishReason.STOP else tokens
    data = b"".join(map(engine.tokenizer.text_bytes, shown))
    # Half a character at the length limit is left out.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return tokens, reason, decoder.decode(data, final=reason is not FinishReason.LENGTH)


def toy_engine(
    *,
    step_seconds: float = 0.0,
    max_seqs: int = 4,
    chat_template: bool | str = True,
    fail_on_submit: Collection[int] = (),
    adapters: AdapterTable = NO_ADAPTERS,
    sampling_defaults: Mapping[str, float] = NO_DEFAULTS,
) -> ToyEngine:
    tokenizer = byte_level() if chat_template is True else byte_level(chat_template or None)
    limits = RunnerLimits(
        num_pages=64, page_size=4, max_seqs=max_seqs, max_step_tokens=32, max_context=128, vocab_size=tokenizer.vocab_size
    )
    runner = FakeRunner(
        limits,
        eos_token_id=EOS_TOKEN_ID,
        eos_probability=0.03,
        step_seconds=step_seconds,
        fail_on_submit=fail_on_submit,
    )
    scheduler = Scheduler(limits, prefill_chunk=8, eos_token_ids=(EOS_TOKEN_ID,))
    core = CountingCore(scheduler, runner, overlap=True)
    return ToyEngine(core, tokenizer, runner, limits, adapters=adapters, sampling_defaults=sampling_defaults)
