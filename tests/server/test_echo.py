"""Prompts in their answers: `echo`, `prompt_logprobs` and `max_tokens` 0."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest

from jaxserve.engine.text import Tokenizer
from jaxserve.request import Request, SamplingParams, TokenEvent, TokenLogprobs
from jaxserve.server.echo import HeldEvents, echoed_text
from jaxserve.server.wire import MIN_LOGPROB, CompletionShape, number
from tests.engine import tiny_tokenizers as tiny
from tests.engine.engines import LIMITS, fake_engine
from tests.fakes import fake_prompt_logprobs
from tests.server.serving import BYTE_LEVEL, MODEL, Serving, says, serving
from tests.server.test_completions import chat, complete, joined, stream_completion

PROMPT = "Your answer: wörld 😀"
IDS = BYTE_LEVEL.encode(PROMPT)
NO_TEXT = {"echo": True, "max_tokens": 0}


def scores(num_top: int, ids: list[int] = IDS) -> tuple[TokenLogprobs, ...]:
    return fake_prompt_logprobs(ids, num_top, LIMITS.vocab_size)


async def test_the_prompt_comes_before_the_text() -> None:
    async with serving(says(PROMPT, "yes. no.")) as server:
        alone, echoed = await complete(server, PROMPT), await complete(server, PROMPT, echo=True)
        assert echoed.choices[0].text == PROMPT + alone.choices[0].text == PROMPT + "yes. no."
        assert echoed.usage == alone.usage
        cut = await complete(server, PROMPT, echo=True, stop=[".", "answer"])
        assert (cut.choices[0].text, cut.choices[0].finish_reason) == (PROMPT + "yes", "stop"), "only the output is searched"
        assert joined(await stream_completion(server, PROMPT, echo=True)) == {0: PROMPT + "yes. no."}
        ids = await complete(server, IDS, echo=True, max_tokens=0)
        assert ids.choices[0].text == PROMPT


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompts_tokens_come_before_the_outputs(stream: bool) -> None:
    async with serving(fake_engine(prefixes=True)) as server:
        for _ in range(2):  # the second time all of it is cached
            logprobs, text = await echoed_logprobs(server, stream)
            names = [CompletionShape(BYTE_LEVEL).token_text(token_id) for token_id in IDS]
            assert logprobs["tokens"][: len(IDS)] == names
            assert len(logprobs["tokens"]) == len(IDS) + 4
            assert logprobs["token_logprobs"][: len(IDS)] == [None, *(score.logprob for score in scores(2))]
            assert logprobs["top_logprobs"][0] is None
            for entry, score, name in zip(logprobs["top_logprobs"][1:], scores(2), names[1:], strict=False):
                assert 2 <= len(entry) <= 3
                assert entry[name] == score.logprob
                assert (score.logprob == max(entry.values())) == (score.rank == 1), (
                    "how a client tells that it is the likeliest"
                )
            offsets = logprobs["text_offset"]
            assert text.startswith(PROMPT)
            assert offsets == sorted(offsets)
            for name, start, end in zip(logprobs["tokens"], offsets, offsets[1:], strict=False):
                assert text[start:end] in (name, "") or name.startswith("bytes:")
            assert offsets[len(IDS)] == len(PROMPT)


async def echoed_logprobs(server: Serving, stream: bool, *, ignore_eos: bool = True) -> tuple[dict[str, list[Any]], str]:
    fields = {"max_tokens": 4, "echo": True, "logprobs": 2, "extra_body": {"ignore_eos": ignore_eos}}
    if not stream:
        choice = (await complete(server, PROMPT, **fields)).choices[0]
        assert choice.logprobs is not None
        return choice.logprobs.model_dump(), choice.text
    chunks = await stream_completion(server, PROMPT, **fields)
    parts = [chunk.choices[0].logprobs.model_dump() for chunk in chunks if chunk.choices[0].logprobs]
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}, joined(chunks)[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_token_is_listed_the_one_that_ends_it_too(stream: bool) -> None:
    """lm-eval takes all but one of the tokens after a context: what is missing at the end it would take from the prompt."""
    async with serving(says(PROMPT, "")) as server:
        logprobs, text = await echoed_logprobs(server, stream, ignore_eos=False)
        assert text == PROMPT
        assert logprobs["tokens"][len(IDS) :] == [BYTE_LEVEL.token_bytes(BYTE_LEVEL.eos_token_id or 0).decode()]
        assert logprobs["text_offset"][-1] == len(PROMPT)
        assert {len(values) for values in logprobs.values()} == {len(IDS) + 1}
        assert not (await complete(server, PROMPT, logprobs=1)).choices[0].logprobs.tokens  # type: ignore[union-attr]


async def test_without_output_there_is_the_prompt_alone() -> None:
    """vllm I6521: it killed the server."""
    async with serving() as server:
        for prompt in ("Your answer: Yes", BYTE_LEVEL.encode("Your answer: Yes")):
            completion = await complete(server, prompt, **NO_TEXT, logprobs=1)
            choice = completion.choices[0]
            assert (choice.text, choice.finish_reason) == ("Your answer: Yes", "length")
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs is not None
            assert len(choice.logprobs.token_logprobs) == len(BYTE_LEVEL.encode("Your answer: Yes"))
            assert completion.usage is not None
            assert completion.usage.completion_tokens == 0
            assert (await complete(server)).choices
        assert (await complete(server, max_tokens=0)).choices[0].text == ""
        assert joined(await stream_completion(server, **NO_TEXT)) == {0: "hello"}


async def test_every_choice_of_every_prompt_has_its_own_prompts() -> None:
    prompts = [PROMPT, "hello"]
    async with serving(fake_engine(prefixes=True)) as server:
        fields: dict[str, Any] = {"n": 3, "max_tokens": 2, "temperature": 1, "echo": True, "logprobs": 0}
        whole = await complete(server, prompts, **fields, extra_body={"ignore_eos": True})
        chunks = await stream_completion(server, prompts, **fields, extra_body={"ignore_eos": True})
        for index, choice in enumerate(whole.choices):
            prompt = prompts[index // 3]
            assert choice.text.startswith(prompt)
            assert joined(chunks)[index].startswith(prompt)
            ids = BYTE_LEVEL.encode(prompt)
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs is not None
            assert choice.logprobs.token_logprobs[: len(ids)] == [None, *(score.logprob for score in scores(0, ids))]
            assert len(choice.logprobs.token_logprobs) == len(ids) + 2
        best = await complete(server, prompts, **{**fields, "n": 1}, best_of=3)
        assert [choice.text[: len(prompt)] for choice, prompt in zip(best.choices, prompts, strict=True)] == prompts


async def test_only_the_first_choice_computes_log_probabilities_of_the_prompt() -> None:
    fake = fake_engine()
    asked: list[int | None] = []
    add = fake.core.add

    def noting(request: Request) -> None:
        asked.append(request.params.prompt_logprobs)
        add(request)

    fake.core.add = noting  # type: ignore[method-assign]
    async with serving(fake) as server:
        body = {"n": 2, "echo": True, "logprobs": 3, "extra_body": {"prompt_logprobs": 1}}
        completion = await complete(server, ["a b c", PROMPT], **body)
        assert asked == [3, None, 3, None]
        assert all(len(entry) <= 2 for choice in completion.choices for entry in choice.prompt_logprobs[1:])  # type: ignore[attr-defined]
        await complete(server, echo=True)
        assert asked[-1] is None


async def test_prompt_logprobs_are_vllms() -> None:
    async with serving() as server:
        choice = (await complete(server, PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 2})).choices[0]
        shown: list[Any] = choice.prompt_logprobs  # type: ignore[attr-defined]
        assert not choice.text.startswith(PROMPT)
        assert len(shown) == len(IDS)
        assert shown[0] is None
        for entry, score, token_id in zip(shown[1:], scores(2), IDS[1:], strict=True):
            own = entry[str(token_id)]
            assert (own["logprob"], own["rank"]) == (score.logprob, score.rank)
            assert own["decoded_token"] == CompletionShape(BYTE_LEVEL).token_text(token_id)
            assert {int(key) for key in entry} == {token_id, *(other for other, _ in score.top)}
            assert sorted(each["rank"] for each in entry.values())[0] == 1
        answer = await chat(server, "hello", extra_body={"prompt_logprobs": 0}, max_tokens=1)
        rendered = BYTE_LEVEL.encode_chat([{"role": "user", "content": "hello"}])
        assert [entry and list(entry) for entry in answer.prompt_logprobs] == [None, *([str(i)] for i in rendered[1:])]  # type: ignore[attr-defined]
        with pytest.raises(openai.BadRequestError, match="prompt_logprobs are not part of a stream"):
            await stream_completion(server, extra_body={"prompt_logprobs": 1})


async def test_a_retry_that_joins_sees_the_prompt_too() -> None:
    async with serving(fake_engine(step_seconds=0.02)) as server:
        headers = {"Idempotency-Key": "k"}
        body = {"model": MODEL, "prompt": PROMPT, "echo": True, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": 12}
        answers = await asyncio.gather(*(server.post("/v1/completions", body, headers=headers) for _ in range(2)))
        assert server.fake.runner.num_steps <= 14, "it ran once"
        assert answers[0][1]["choices"][0]["text"].startswith(PROMPT)
        assert answers[0][1]["choices"] == answers[1][1]["choices"]


# --- the parts --------------------------------------------------------------------------------------------------------


def request_of(ids: list[int], **params: Any) -> Request:
    return Request(request_id="a", prompt=tuple(ids), params=SamplingParams(**params))


def test_what_the_tokenizer_adds_is_not_in_the_text() -> None:
    """A BOS and a leading space have tokens and no characters."""
    tokenizer = tiny.sentencepiece()
    text = "hello world"
    ids = tokenizer.encode(text)
    assert tokenizer.is_special(ids[0])
    shown, offsets = echoed_text(request_of(ids), text, tokenizer)
    assert shown == text
    assert len(offsets) == len(ids)
    assert offsets[:2] == (0, 0)
    assert offsets[-1] < len(text)


@pytest.mark.parametrize("tokenizer", [tiny.byte_level(), tiny.sentencepiece()], ids=["byte_level", "sentencepiece"])
def test_special_tokens_of_a_text_are_text(tokenizer: Tokenizer) -> None:
    name = next(tokenizer.token_bytes(i).decode() for i in sorted(tokenizer.special_ids))
    text = f"hello{name}"
    ids = tokenizer.encode(text)
    shown, offsets = echoed_text(request_of(ids), text, tokenizer)
    assert shown == text
    assert offsets[-1] == len(text) - len(name)
    hidden, _ = echoed_text(request_of(ids), None, tokenizer)
    assert name not in hidden, "as in an output"
    assert name in echoed_text(request_of(ids, skip_special_tokens=False), None, tokenizer)[0]


def test_no_choice_is_shown_before_the_prompts_scores_are_there() -> None:
    score = TokenLogprobs(-1.0, (), 1)
    scored: dict[int, tuple[TokenLogprobs, ...]] = {}
    held = HeldEvents(2, scored)

    def event(index: int, token: int, *prompt_logprobs: TokenLogprobs) -> tuple[int, TokenEvent]:
        return index, TokenEvent(str(index), (token,), (), None, 2, 1, 0, prompt_logprobs)

    assert held.release([event(1, 5), event(3, 6)]) == []
    assert held.release([event(1, 7)]) == []
    released = dict(held.release([event(0, 8, score)]))
    assert {index: each.tokens for index, each in released.items()} == {0: (8,), 1: (5, 7)}
    assert scored == {0: (score,)}
    assert [index for index, _ in held.release([event(1, 9), event(2, 1)])] == [3, 1, 2]
    assert scored[1] == ()


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, -1e5])
def test_log_probabilities_that_json_cannot_spell_are_openais_least(logprob: float) -> None:
    """Those that are no number come of a model, or an adapter, that overflows."""
    assert number(logprob) == MIN_LOGPROB
    assert number(-0.5) == -0.5
