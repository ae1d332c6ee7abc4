"""An engine without a device whose answers follow from their prompts alone, so that whoever asks knows what must come.

Owns the script, a runner that plays it, and a tokenizer to go with it. The scheduler and the loop around it are the real ones.
"""

from __future__ import annotations

import json
import time
import zlib
from array import array
from collections.abc import Sequence

from jaxserve.engine.core import EngineCore
from jaxserve.engine.text import Tokenizer
from jaxserve.engine.vocab import byte_level_characters
from jaxserve.host.prefix import PrefixTree
from jaxserve.host.scheduler import Scheduler
from jaxserve.plan import Masks, PlanRow, RunnerLimits, StepPlan, StepResult, StepStats
from jaxserve.request import TokenLogprobs

MODEL = "scripted"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
NUM_WORDS = 4096
FIRST_BYTE = len(SPECIAL)
FIRST_WORD = FIRST_BYTE + 256
VOCAB_SIZE = FIRST_WORD + NUM_WORDS
BYTES = sorted(byte_level_characters().items(), key=lambda pair: pair[1])
EMOJI = "🙂".encode()
EMOJI_EVERY = 16
"""Of so many tokens, four are the bytes of one character."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def scripted_tokenizer() -> Tokenizer:
    """Bytes, and words of a few letters with a space before each."""
    space = {byte: character for character, byte in BYTES}[0x20]
    tokens = [*SPECIAL, *(character for character, _ in BYTES), *(space + word_of(i) for i in range(NUM_WORDS))]
    spec = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False}
            for i, name in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": []},
    }
    return Tokenizer(json.dumps(spec), chat_template=CHAT_TEMPLATE, bos_token=SPECIAL[0], eos_token=SPECIAL[EOS_ID])


def word_of(number: int) -> str:
    """A word for each number below `NUM_WORDS`, of one to four letters."""
    letters = ""
    while number or not letters:
        number, letter = divmod(number, 26)
        letters += chr(97 + letter)
    return letters


def script_of(prompt: Sequence[int]) -> int:
    """Which answer goes with a prompt."""
    return zlib.crc32(array("q", prompt).tobytes())


def scripted_token(script: int, index: int) -> int:
    """The token of an answer at an index: words, and now and then the next byte of a character of four."""
    place = index % EMOJI_EVERY
    if place < len(EMOJI):
        return FIRST_BYTE + EMOJI[place]
    return FIRST_WORD + (script + 7919 * index) % NUM_WORDS


def scripted_text(prompt: Sequence[int], num_tokens: int) -> str:
    """The answer to a prompt, cut after so many tokens; half a character at its end is left out."""
    script = script_of(prompt)
    pieces = []
    for index in range(num_tokens):
        token = scripted_token(script, index)
        pieces.append(bytes([token - FIRST_BYTE]) if token < FIRST_WORD else b" " + word_of(token - FIRST_WORD).encode())
    return b"".join(pieces).decode(errors="ignore")


class _Handle:
    def __init__(self, result: StepResult, ready_at: float) -> None:
        self._result = result
        self._ready_at = ready_at

    def constrain(self, masks: Masks) -> None:
        raise NotImplementedError("the script knows no grammars")

    def result(self) -> StepResult:
        wait = self._ready_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        return self._result


class ScriptedRunner:
    """Plays the script. Steps queue up behind each other, as on a device.

    Args:
        step_seconds: what a step takes.
    """

    def __init__(self, limits: RunnerLimits, step_seconds: float) -> None:
        self._limits = limits
        self._step_seconds = step_seconds
        self._ready_at = 0.0
        self._prompts: list[list[int]] = [[] for _ in range(limits.max_seqs)]
        self._scripts = [0] * limits.max_seqs

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    def submit(self, plan: StepPlan) -> _Handle:
        """Queue a step behind those before it."""
        self._ready_at = max(self._ready_at, time.monotonic()) + self._step_seconds
        tokens = tuple([(self._play(row),) if row.sample else self._read(row) for row in plan.rows])
        logprobs = tuple([_logprobs(row, sampled) for row, sampled in zip(plan.rows, tokens, strict=True)])
        return _Handle(StepResult(plan.step_id, tokens, logprobs, StepStats(0.0, 0.0)), self._ready_at)

    def _read(self, row: PlanRow) -> tuple[int, ...]:
        """Take in what the row has of its prompt."""
        if row.fresh:
            self._prompts[row.slot] = list(row.history[: row.num_prompt])
        prompt = self._prompts[row.slot]
        if len(prompt) < row.num_prompt:
            prompt.extend(row.tokens[: row.num_prompt - len(prompt)])
            if len(prompt) == row.num_prompt:
                self._scripts[row.slot] = script_of(prompt)
        elif row.fresh:
            self._scripts[row.slot] = script_of(prompt)
        return ()

    def _play(self, row: PlanRow) -> int:
        if row.fresh or row.start < row.num_prompt:
            self._read(row)
        return scripted_token(self._scripts[row.slot], row.start + row.count - row.num_prompt)


def _logprobs(row: PlanRow, tokens: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    if row.params.logprobs is None:
        return ()
    return tuple(
        TokenLogprobs(-0.5, tuple((FIRST_WORD + (token + i) % NUM_WORDS, -0.5 - i) for i in range(row.params.logprobs)))
        for token in tokens
    )


def scripted_limits(*, max_seqs: int, max_context: int, num_pages: int = 0, page_size: int = 64) -> RunnerLimits:
    """Room for `max_seqs` of the longest sequences, unless `num_pages` says otherwise."""
    return RunnerLimits(
        num_pages=num_pages or max_seqs * -(-max_context // page_size),
        page_size=page_size,
        max_seqs=max_seqs,
        max_step_tokens=max(max_seqs, 1024),
        max_context=max_context,
        vocab_size=VOCAB_SIZE,
    )


def scripted_core(limits: RunnerLimits, step_seconds: float) -> EngineCore:
    """An engine core that plays the script, a step in each `step_seconds`."""
    prefixes = PrefixTree(limits.page_size)
    scheduler = Scheduler(limits, prefill_chunk=512, eos_token_ids=(EOS_ID,), seed=0, prefixes=prefixes)
    return EngineCore(scheduler, ScriptedRunner(limits, step_seconds), overlap=True)
