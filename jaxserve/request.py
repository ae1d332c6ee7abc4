"""What a caller asks for and what comes back, as plain values. Standard library only.

Owns `SamplingParams`, `Request`, `Sequence`, `TokenLogprobs` and `TokenEvent`. Knows token ids, not text, sockets or arrays.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace

from jaxserve.constraint import Constraint, Grammar, Matcher
from jaxserve.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 16
MAX_ALLOWED_TOKEN_IDS = 2**18
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 1024

MIN_PRIORITY, MAX_PRIORITY = -100, 100
INTERACTIVE_PRIORITY = 0
BATCH_PRIORITY = 10
"""Requests at this priority or a less urgent one fill what others leave; no time to the first token is kept for them."""

PRIORITY_NAMES = {"interactive": INTERACTIVE_PRIORITY, "batch": BATCH_PRIORITY}


class FinishReason(enum.StrEnum):
    """Why a sequence ended, in the words that the OpenAI API uses where it has one."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"  # the text layer's reading of a stop after calls; the engine knows no calls
    TIMEOUT = "timeout"
    ABORT = "abort"
    ERROR = "error"


def _require(ok: bool, param: str, expected: str, found: object) -> None:
    if not ok:
        raise InvalidRequest(f"{param} must be {expected}, found {found!r}", param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Attributes:
        max_tokens: output tokens at most; None means up to the context limit, 0 that the request ends after its prompt.
        min_tokens: end-of-sequence and stop tokens cannot be sampled before this many output tokens.
        temperature: 0 is greedy; values under 1e-3 are treated as 0, whose limit they are.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        min_p: keep tokens at least this fraction as likely as the most likely; 0 keeps all.
        seed: makes sampling reproducible, alone or in any batch; None draws a fresh seed.
        presence_penalty, frequency_penalty: subtracted from logits of output tokens (once; per occurrence), -2 to 2.
        repetition_penalty: divides positive and multiplies negative logits of prompt and output tokens; 1 is off.
        logit_bias: (token id, value) pairs added to logits, at most 300.
        logprobs: None for none; n from 0 to 20 for the chosen token's and the n most likely tokens', of the model's own
            distribution (before temperature, penalties and bias).
        prompt_logprobs: None for none; n from 0 to 20 for the log probability of each prompt token but the first, its rank,
            and the n most likely tokens'. Every position is then computed, cached or not.
        stop: strings that end the output and are not part of it. Handled by the text layer, as the next two.
        include_stop_str_in_output: the stop string, or the stop token's text, is part of the output after all.
        skip_special_tokens: special tokens are not text; if false, their names are.
        stop_token_ids: further ids that end the output.
        ignore_eos: do not end at the model's end-of-sequence tokens.
        grammar: what the output has to be, from its first token to its last. The output ends when it is complete, earlier than
            `min_tokens` where nothing else is left.
        allowed_token_ids: sample no others; () allows all. An end-of-sequence token ends the output only if it is among them.
        bad_words: none of these comes in the output, spelt as the tokenizer spells it, with a space before it or without.

    Raises:
        InvalidRequest: naming the field, on any value out of range (NaN and infinity included).
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            value = getattr(self, name)
            _require(isinstance(value, (int, float)) and math.isfinite(value), name, "a finite number", value)
        _require(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "at least 0", self.max_tokens)
        _require(self.min_tokens >= 0, "min_tokens", "at least 0", self.min_tokens)
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"at most max_tokens ({self.max_tokens})",
            self.min_tokens,
        )
        _require(0.0 <= self.temperature <= 100.0, "temperature", "from 0 to 100", self.temperature)
        _require(-1 <= self.top_k < 2**31, "top_k", "-1, 0 or a positive 32-bit integer", self.top_k)
        _require(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1", self.top_p)
        _require(0.0 <= self.min_p <= 1.0, "min_p", "from 0 to 1", self.min_p)
        _require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer", self.seed)
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2.0 <= getattr(self, name) <= 2.0, name, "from -2 to 2", getattr(self, name))
        _require(0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", "above 0, at most 100", self.repetition_penalty)
        _require(
            len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", f"at most {MAX_LOGIT_BIAS} entries", len(self.logit_bias)
        )
        for _, value in self.logit_bias:
            _require(-100.0 <= value <= 100.0, "logit_bias", "values from -100 to 100", value)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(count is None or 0 <= count <= MAX_LOGPROBS, name, f"from 0 to {MAX_LOGPROBS}", count)
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"at most {MAX_STOP_TOKEN_IDS} ids",
            len(self.stop_token_ids),
        )
        self._check_constraints()

    def _check_constraints(self) -> None:
        num_allowed = len(self.allowed_token_ids)
        _require(
            num_allowed <= MAX_ALLOWED_TOKEN_IDS, "allowed_token_ids", f"at most {MAX_ALLOWED_TOKEN_IDS} ids", num_allowed
        )
        _require(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} words", len(self.bad_words))
        for word in self.bad_words:
            fits = bool(word.strip()) and len(word) <= MAX_BAD_WORD_CHARACTERS
            _require(
                fits, "bad_words", f"words of 1 to {MAX_BAD_WORD_CHARACTERS} characters that are not all spaces", word[:60]
            )
        if self.grammar is not None:
            for name in ("allowed_token_ids", "bad_words"):
                _require(not getattr(self, name), name, f"left out where {self.grammar.param} restricts the output", "both")

    @property
    def restricts_tokens(self) -> bool:
        """Whether a request with these needs a constraint."""
        return self.grammar is not None or bool(self.allowed_token_ids or self.bad_words)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < 1e-3


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidRequest` if `logit_bias`, `stop_token_ids` or `allowed_token_ids` name an id outside the vocabulary."""
    named = {
        "logit_bias": [token_id for token_id, _ in params.logit_bias],
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
    }
    for name, ids in named.items():
        for token_id in ids:
            _require(0 <= token_id < vocab_size, name, f"token ids from 0 to {vocab_size - 1}", token_id)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded LoRA adapter.

    Attributes:
        name: what requests call it.
        slot: where its weights are on the device.
        load: number of the load that brought it, from 1: no two of a process have the same, so that what was cached under one
            is not found by another of the same name or slot.
    """

    name: str
    slot: int
    load: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate.

    Attributes:
        request_id: unique among live requests.
        prompt: token ids, at least one.
        params: see `SamplingParams`.
        priority: lower runs first and is preempted last, for the sake of which a higher one loses its slot and pages.
        tenant: whose share of the engine it uses: the label of an API key, or "".
        weight: the tenant's share against other tenants' while both have requests waiting.
        deadline: seconds on the scheduler's clock at which it ends, finished or not; None for never. Earlier ones of a
            tenant run first.
        cache_salt: whose cached prefixes it may use and add to: those of requests with the same one, and no others.
        embed: whether the final hidden state of its last prompt token is wanted, and no output.
        constraint: what `params` restrict tokens to, compiled; None where they do not. Whoever makes the request compiles it.
        adapter: whose weights are added to the model's; None for none. Whoever makes the request keeps it loaded meanwhile.

    Raises:
        InvalidRequest: a weight that is not above 0, a deadline that is no time, or `embed` with output.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = INTERACTIVE_PRIORITY
    tenant: str = ""
    weight: float = 1.0
    deadline: float | None = None
    cache_salt: str = ""
    embed: bool = False
    constraint: Constraint | None = None
    adapter: Adapter | None = None

    def __post_init__(self) -> None:
        _require(0.0 < self.weight < math.inf, "weight", "above 0", self.weight)
        _require(self.deadline is None or math.isfinite(self.deadline), "deadline", "a finite time or None", self.deadline)
        _require(not self.embed or self.params.max_tokens == 0, "max_tokens", "0 for an embedding", self.params.max_tokens)

    @property
    def cache_root(self) -> tuple[str, int]:
        """What else than tokens its K and V depend on, or are kept apart by: its salt, and its adapter's load, 0 for none."""
        return self.cache_salt, 0 if self.adapter is None else self.adapter.load


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities (natural) at one position: the token's that is there, and the most likely (id, value) first.

    Attributes:
        rank: of a prompt's token, its place among all by likelihood, from 1; equals are one behind whoever is likelier.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A live request inside the scheduler, which alone changes it.

    The sequence is `prompt + outputs`. `planned` counts the leading tokens whose KV has been dispatched to the device,
    `computed` those whose step has been committed, and `in_flight` the sampled tokens that are dispatched and not yet
    read; so `planned >= computed`, and the sequence has `len(tokens) + in_flight` tokens, of which the last may be
    known to the device only.

    Attributes:
        seq_id: unique for the life of the scheduler, increasing with arrival.
        tokens: prompt and committed output ids.
        pages: the block table, in position order, from page `first_page` on.
        first_page: leading pages that it has given back, or never had, since no layer sees them any more.
        local_pages, first_local_page: the same of layers with a window, where these have a pool of their own.
        slot: index of its per-slot device state while running, else None.
        max_output: output tokens at most, from `max_tokens` and the context limit.
        num_preemptions: how often it lost its pages.
        rows_in_flight: rows of it that are dispatched and not yet committed, whether or not they still count.
        seed: the request's, or one that the scheduler drew; 64 bits, unsigned.
        stop_ids: token ids that end it.
        max_positions: positions whose KV it may ever need; one less than its tokens may be, since nothing follows the last
            output token.
        turn: its place among all that ever ran, which it keeps when it is preempted; -1 before it first runs.
        num_shared: leading pages that lie in the prefix tree, or did when it held them.
        dispatched: leading positions that plans before the newest compute, or that were cached.
        cached: prompt tokens that it did not compute when it first ran; None before.
        charged: leading positions that its tenant has been charged for; a replay is not charged again.
        scores: log probabilities of the prompt's tokens after the first, as far as they have been committed.
        matcher: its place in the request's constraint, after all committed output tokens; None without one.
    """

    seq_id: int
    request: Request
    tokens: list[int]
    max_output: int
    planned: int = 0
    computed: int = 0
    in_flight: int = 0
    pages: list[int] = field(default_factory=list)
    first_page: int = 0
    local_pages: list[int] = field(default_factory=list)
    first_local_page: int = 0
    slot: int | None = None
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    rows_in_flight: int = 0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    max_positions: int = 0
    turn: int = -1
    num_shared: int = 0
    dispatched: int = 0
    cached: int | None = None
    charged: int = 0
    scores: list[TokenLogprobs] = field(default_factory=list)
    matcher: Matcher | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_output(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens that exist on the host or, sampled and unread, on the device."""
        return len(self.tokens) + self.in_flight

    @property
    def lacks_scores(self) -> bool:
        """Whether log probabilities of its prompt are wanted and not all committed."""
        return self.request.params.prompt_logprobs is not None and len(self.scores) < len(self.request.prompt) - 1

    @property
    def num_skippable(self) -> int:
        """Leading tokens that it need not compute if their KV is cached."""
        return len(self.scores) if self.lacks_scores else len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step gave one request.

    Attributes:
        tokens: new output ids, in order; may be empty when the request only finished.
        logprobs: one entry per token if the request asked, else empty.
        finish_reason: None while it goes on. A stop token that ended the sequence is part of `tokens`.
        num_prompt, num_output: totals so far, for usage.
        num_cached: prompt tokens that were cached and not computed.
        prompt_logprobs: of every prompt token after the first, in the first event of a request that asked, else empty.
        hidden: the final hidden state of the last prompt token, in the only event of an embedding, else empty.
        problem: what the request itself ended with ERROR for; "" where the engine failed under it, or nothing did.
    """

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    num_prompt: int
    num_output: int
    num_cached: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    hidden: tuple[float, ...] = ()
    problem: str = ""

    def merged(self, later: TokenEvent) -> TokenEvent:
        """This event and the next one of the same request, as one."""
        return replace(
            later,
            tokens=self.tokens + later.tokens,
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=self.prompt_logprobs + later.prompt_logprobs,
        )
