"""Both endpoints through the unmodified OpenAI client: texts, choices, usage, log probabilities, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from jaxserve.config import HttpConfig
from jaxserve.request import Request, SamplingParams
from tests.engine import tiny_tokenizers as tiny
from tests.engine.engines import LIMITS, fake_engine
from tests.fakes import expected_output
from tests.server.serving import BYTE_LEVEL, MODEL, Serving, says, serving

TEXT = "hello wörld 😀! é€"


def user(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


async def complete(server: Serving, prompt: Any = "hello", **fields: Any) -> Completion:
    return await server.client.completions.create(model=MODEL, prompt=prompt, **{"max_tokens": 100, **fields})


async def chat(server: Serving, content: str = "hello", **fields: Any) -> ChatCompletion:
    return await server.client.chat.completions.create(model=MODEL, messages=user(content), **fields)


async def stream_completion(server: Serving, prompt: Any = "hello", **fields: Any) -> list[Completion]:
    fields = {"max_tokens": 100, **fields}
    return [c async for c in await server.client.completions.create(model=MODEL, prompt=prompt, stream=True, **fields)]


async def stream_chat(server: Serving, content: str = "hello", **fields: Any) -> list[ChatCompletionChunk]:
    stream = await server.client.chat.completions.create(model=MODEL, messages=user(content), stream=True, **fields)
    return [chunk async for chunk in stream]


def joined(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.text if isinstance(chunk, Completion) else choice.delta.content or ""
            texts[choice.index] = texts.get(choice.index, "") + text
    return texts


def reasons(chunks: list[Any]) -> dict[int, list[str | None]]:
    found: dict[int, list[str | None]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            found.setdefault(choice.index, []).append(choice.finish_reason)
    return found


# --- texts ------------------------------------------------------------------------------------------------------------


async def test_both_endpoints_streamed_or_not_say_the_same() -> None:
    async with serving(says("hello", TEXT)) as server:
        completion = await complete(server)
        assert (completion.choices[0].text, completion.choices[0].finish_reason) == (TEXT, "stop")
        assert (completion.object, completion.model) == ("text_completion", MODEL)
        answer = await chat(server)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (TEXT, "stop")
        assert (answer.object, answer.choices[0].message.role) == ("chat.completion", "assistant")
        assert joined(await stream_completion(server)) == {0: TEXT}
        assert joined(await stream_chat(server)) == {0: TEXT}


async def test_the_client_without_asyncio() -> None:
    def ask(url: str) -> list[str]:
        with (
            openai.DefaultHttpxClient(trust_env=False) as http,
            openai.OpenAI(base_url=url, api_key="-", http_client=http) as client,
        ):
            answer = client.chat.completions.create(model=MODEL, messages=user("hello"))
            stream = client.completions.create(model=MODEL, prompt="hello", max_tokens=50, stream=True)
            return [answer.choices[0].message.content or "", "".join(chunk.choices[0].text for chunk in stream)]

    async with serving(says("hello", TEXT)) as server:
        assert await asyncio.to_thread(ask, f"{server.url}/v1") == [TEXT, TEXT]


async def test_length_ends_an_output() -> None:
    async with serving(says("hello", "hello world")) as server:
        completion = await complete(server, max_tokens=1)
        assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("hello", "length")
        assert (await chat(server, max_completion_tokens=1)).choices[0].finish_reason == "length"
        assert reasons(await stream_chat(server, max_tokens=1))[0][-1] == "length"


async def test_default_lengths() -> None:
    """16 for completions, as OpenAI documents; what is left of the context for chat."""
    async with serving() as server:
        usage = (await server.client.completions.create(model=MODEL, prompt="x")).usage
        assert usage is not None
        assert usage.completion_tokens == 16
        answer = await chat(server, "x", extra_body={"ignore_eos": True})
        assert answer.usage is not None
        assert answer.usage.total_tokens == LIMITS.max_context


async def test_prompts_of_every_kind_get_choices_in_order() -> None:
    async with serving() as server:
        alone = [(await complete(server, prompt, temperature=0)).choices[0].text for prompt in ("ab", "cd")]
        ids = [BYTE_LEVEL.encode(prompt) for prompt in ("ab", "cd")]
        for prompts in (["ab", "cd"], ids):
            choices = (await complete(server, prompts, temperature=0)).choices
            assert [(choice.index, choice.text) for choice in choices] == list(enumerate(alone))
            assert joined(await stream_completion(server, prompts, temperature=0)) == dict(enumerate(alone))
        assert (await complete(server, ids[0], temperature=0)).choices[0].text == alone[0]


async def test_choices_are_whole_and_indexed() -> None:
    """vllm PR16863: choices overwrote each other. TGI PR1648: the index counted tokens."""
    async with serving() as server:
        alone = [(await complete(server, seed=seed)).choices[0].text for seed in (7, 8, 9)]
        assert len(set(alone)) == 3
        choices = (await complete(server, seed=7, n=3)).choices
        assert [(choice.index, choice.text) for choice in choices] == list(enumerate(alone))
        chunks = await stream_completion(server, seed=7, n=3)
        assert joined(chunks) == dict(enumerate(alone))
        for found in reasons(chunks).values():
            assert found[-1] in ("stop", "length")
            assert found[:-1] == [None] * (len(found) - 1)


@pytest.mark.parametrize("top_k", [-1, 0])
async def test_unseeded_choices_differ(top_k: int) -> None:
    """tpu-inference I1386: top_k off meant greedy."""
    async with serving() as server:
        texts = [choice.text for choice in (await complete(server, n=8, extra_body={"top_k": top_k})).choices]
        assert len(set(texts)) > 1


async def test_tokens_are_those_of_the_request_alone() -> None:
    """What is sent arrives: sampling fields, seed and stop ids reach the engine as they are."""
    fake = fake_engine()
    params = SamplingParams(max_tokens=60, seed=5, stop_token_ids=(77,), min_tokens=9)
    prompt = BYTE_LEVEL.encode("hello world")
    expected, _ = expected_output(
        Request(request_id="r", prompt=tuple(prompt), params=params),
        LIMITS,
        next_token=fake.runner.next_token,
        eos_token_ids=(2,),
    )
    extra = {"stop_token_ids": [77], "min_tokens": 9}
    async with serving(fake) as server:
        completion = await complete(server, max_tokens=60, prompt="hello world", seed=5, logprobs=0, extra_body=extra)
        assert completion.usage is not None
        assert completion.usage.completion_tokens == len(expected)


@pytest.mark.parametrize(
    ("answer", "stop", "expected"),
    [
        ("ABC DEFGHIJKL", ["DEFGHIJ"], "ABC "),
        ("DEFGHIJKL", ["DEFGHIJ"], ""),
        ("L M N O P Q R", ["O P Q"], "L M N "),
        ("?\nAlice:", ["\n"], "?"),
        ("a😀b", ["😀"], "a"),
        ("a<|im_start|>b", ["<|im", "zz"], "a"),
        ("xab", ["abc"], "xab"),
    ],
)
async def test_stop_strings(answer: str, stop: list[str], expected: str) -> None:
    """vllm I3574, llama.cpp I11538 and PR9867: no part leaks, tokens do not matter, no tail is lost."""
    async with serving(says("hello", answer)) as server:
        completion = await complete(server, stop=stop)
        assert (completion.choices[0].text, completion.choices[0].finish_reason) == (expected, "stop")
        chunks = await stream_chat(server, stop=stop)
        assert joined(chunks) == {0: expected}
        assert reasons(chunks)[0][-1] == "stop"
        for chunk in chunks:
            assert not any(choice.delta.content and "DEF" in choice.delta.content for choice in chunk.choices)
        await server.idle()


async def test_a_stop_string_ends_generation() -> None:
    """Its choice stops costing anything, and the other goes on."""
    async with serving() as server:
        texts = [choice.text for choice in (await complete(server, max_tokens=200, n=2, seed=1)).choices]
        stop = texts[0][4:7]
        assert stop not in texts[1]
        completion = await complete(server, max_tokens=200, n=2, seed=1, stop=stop)
        assert [choice.text for choice in completion.choices] == [texts[0][: texts[0].index(stop)], texts[1]]
        await server.idle()


async def test_the_engine_hears_of_a_stop_string() -> None:
    """It would go on to the length limit, and the answer would wait for it."""
    async with serving(fake_engine(step_seconds=0.002)) as server:
        text = (await complete(server, max_tokens=20, seed=1)).choices[0].text
        for _ in range(2):
            before = server.engine.stats.num_output_tokens
            await complete(server, max_tokens=400, seed=1, stop=text[2:5], extra_body={"ignore_eos": True})
            await server.idle()
            assert server.engine.stats.num_output_tokens - before < 40
            await stream_completion(server, max_tokens=400, seed=1, stop=text[2:5])


async def test_a_stop_string_counts_tokens_up_to_it() -> None:
    ids = BYTE_LEVEL.encode_plain("hello worldly goods")
    async with serving(says("hello", ids)) as server:
        completion = await complete(server, stop="world")
        assert completion.usage is not None
        assert completion.usage.completion_tokens == len(BYTE_LEVEL.encode_plain("hello world"))


async def test_min_tokens_and_ignore_eos() -> None:
    """tpu-inference I1524: both were ignored."""
    async with serving(fake_engine(eos_probability=0.5)) as server:
        for extra in ({"min_tokens": 30}, {"ignore_eos": True}):
            usage = (await complete(server, max_tokens=60, extra_body=extra)).usage
            assert usage is not None
            assert usage.completion_tokens >= 30
        usage = (await complete(server, max_tokens=60, seed=0)).usage
        assert usage is not None
        assert usage.completion_tokens < 30


async def test_characters_over_several_tokens() -> None:
    """llama.cpp PR4446: no U+FFFD in any delta."""
    text = "🫠龜é€😀"
    async with serving(says("hello", text)) as server:
        chunks = await stream_completion(server)
        assert joined(chunks) == {0: text}
        assert not any("\ufffd" in choice.text for chunk in chunks for choice in chunk.choices)
        for max_tokens in range(1, len(text.encode())):
            cut = (await complete(server, max_tokens=max_tokens)).choices[0].text
            assert text.startswith(cut)
            assert joined(await stream_completion(server, max_tokens=max_tokens)).get(0, "") == cut


async def test_line_separators_do_not_break_events() -> None:
    text = "a\u2028b\u2029c\x85d\x0be\r\nf\n\ng\x00"
    async with serving(says("hello", text)) as server:
        assert joined(await stream_chat(server)) == {0: text}


async def test_special_tokens_are_no_text() -> None:
    async with serving(says("hello", [tiny.IM_START_ID, *BYTE_LEVEL.encode_plain("hi"), tiny.EOS_ID])) as server:
        assert (await complete(server)).choices[0].text == "hi"


# --- usage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
async def test_usage_is_the_same_streamed_or_not(n: int) -> None:
    """vllm I7262, I8625: usage null before, then one chunk without choices that sums them all; none if not asked."""
    async with serving(fake_engine(eos_probability=0.05)) as server:
        whole = (await complete(server, n=n, seed=3)).usage
        assert whole is not None
        assert whole.prompt_tokens == len(BYTE_LEVEL.encode("hello"))
        assert whole.total_tokens == whole.prompt_tokens + whole.completion_tokens
        chunks = await stream_completion(server, n=n, seed=3, stream_options={"include_usage": True})
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert all("usage" in chunk.model_fields_set for chunk in chunks)
        assert chunks[-1].choices == []
        assert chunks[-1].usage == whole
        for chunk in await stream_completion(server, n=n, seed=3):
            assert "usage" not in chunk.model_fields_set
            assert chunk.choices


# --- log probabilities ------------------------------------------------------------------------------------------------


async def test_chat_logprobs() -> None:
    """vllm I19177, I27300, I3179: the chat shape; tokens are text; bytes are the token's own."""
    async with serving(says("hello", TEXT)) as server:
        whole = (await chat(server, logprobs=True, top_logprobs=20)).choices[0].logprobs
        assert whole is not None
        assert whole.content is not None
        assert b"".join(bytes(entry.bytes or ()) for entry in whole.content).decode() == TEXT
        ids = BYTE_LEVEL.encode_plain(TEXT)
        for token_id, entry in zip(ids, whole.content, strict=True):
            assert len(entry.top_logprobs) == 20
            for i, top in enumerate(entry.top_logprobs):
                assert bytes(top.bytes or ()) == BYTE_LEVEL.token_bytes((token_id + i) % LIMITS.vocab_size)
                assert "\ufffd" not in top.token
                assert top.token
            assert entry.logprob == -0.25 - token_id % 8
        assert whole.content[0].token == "hello"
        streamed = [
            entry
            for chunk in await stream_chat(server, logprobs=True, top_logprobs=20)
            for choice in chunk.choices
            if choice.logprobs is not None
            for entry in choice.logprobs.content or ()
        ]
        assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in whole.content]
        assert (await chat(server)).choices[0].logprobs is None


async def test_completion_logprobs() -> None:
    """vllm I16540: string keys, 20 alternatives; the lists line up."""
    async with serving(says("hello", TEXT)) as server:
        for n in (0, 1, 20):
            whole = (await complete(server, logprobs=n)).choices[0].logprobs
            assert whole is not None
            assert whole.tokens is not None
            assert whole.top_logprobs is not None
            ids = BYTE_LEVEL.encode_plain(TEXT)
            assert len(whole.tokens) == len(whole.token_logprobs or ()) == len(whole.top_logprobs) == len(ids)
            assert [len(top) for top in whole.top_logprobs] == [max(n, 1)] * len(ids)
            assert all(token in top for token, top in zip(whole.tokens, whole.top_logprobs, strict=True))
            offsets = [len(b"".join(map(BYTE_LEVEL.token_bytes, ids[:i])).decode(errors="ignore")) for i in range(len(ids))]
            assert whole.text_offset == offsets
            parts = [c.logprobs for chunk in await stream_completion(server, logprobs=n) for c in chunk.choices if c.logprobs]
            assert [token for part in parts for token in part.tokens or ()] == whole.tokens
            assert [offset for part in parts for offset in part.text_offset or ()] == offsets
        assert (await complete(server)).choices[0].logprobs is None


async def test_logprobs_end_where_the_text_does() -> None:
    """Neither a stop string's tokens nor the stop token are shown."""
    async with serving(says("hello", "hello world")) as server:
        for stop, shown in ((" wor", ["hello"]), ("wor", ["hello", " wor"])):  # the latter for its space
            logprobs = (await complete(server, logprobs=1, stop=stop)).choices[0].logprobs
            assert logprobs is not None
            assert logprobs.tokens == shown


# --- errors -----------------------------------------------------------------------------------------------------------


async def test_errors_raise_the_client_s_exceptions() -> None:
    async with serving(fake_engine(max_queue_requests=1)) as server:
        with pytest.raises(openai.BadRequestError, match="temperature") as bad:
            await complete(server, temperature=-1)
        assert (bad.value.status_code, bad.value.param, bad.value.type) == (400, "temperature", "invalid_request_error")
        with pytest.raises(openai.NotFoundError) as missing:
            await server.client.completions.create(model="gpt-4", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            await server.client.models.retrieve("gpt-4")
        assert [model.id for model in (await server.client.models.list()).data] == [MODEL]
        with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'"):
            await complete(server, extra_body={"temprature": 1})
        with pytest.raises(openai.BadRequestError, match="template drops tools"):
            await chat(server, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])


async def test_a_template_s_error_is_a_400() -> None:
    """llama.cpp, mistral.rs: `raise_exception` gave a 500."""
    async with serving(tokenizer=tiny.sentencepiece()) as server:
        with pytest.raises(openai.BadRequestError, match="roles must alternate") as caught:
            await server.client.chat.completions.create(model=MODEL, messages=user("a") + user("b"))
        assert caught.value.param == "messages"


async def test_too_long_names_all_three_numbers() -> None:
    """vllm I33418."""
    async with serving() as server:
        prompt = BYTE_LEVEL.encode_plain("a") * 8
        with pytest.raises(openai.BadRequestError, match=r"prompt 8 \+ max_tokens 510 > context 512") as caught:
            await complete(server, prompt, max_tokens=510)
        assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
        long: list[Any] = [BYTE_LEVEL.encode_plain("a") * 600, "a" * 600, "a" * 100_000]
        for prompt in long:
            with pytest.raises(openai.BadRequestError, match=r"prompt (600|has 100000 characters)") as caught:
                await complete(server, prompt, max_tokens=1)
            assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


async def test_ids_outside_the_vocabulary() -> None:
    """sglang I7670, vllm I54195: crashed or corrupted neighbours."""
    async with serving() as server:
        bodies: list[dict[str, Any]] = [
            {"logit_bias": {"999999": 5}},
            {"extra_body": {"stop_token_ids": [999999], "min_tokens": 2}},
            {"prompt": [999999]},
            {"prompt": [271, 272]},
        ]
        for fields in bodies:
            with pytest.raises(openai.BadRequestError, match="from 0 to 271"):
                await complete(server, **fields)
        assert (await complete(server)).choices[0].text


async def test_empty_prompts() -> None:
    """vllm I7283: without a BOS there is nothing to start from; with one there is. The next request works."""
    async with serving() as server:
        nothing: list[Any] = ["", [""], [[]]]
        for prompt in nothing:
            with pytest.raises(openai.BadRequestError, match="at least 1 token"):
                await complete(server, prompt)
        assert (await complete(server)).choices
    async with serving(fake_engine(LIMITS_OF_308), tokenizer=tiny.sentencepiece()) as server:
        for prompt in ("", [""]):
            completion = await complete(server, prompt)
            assert completion.usage is not None
            assert completion.usage.prompt_tokens == 1


LIMITS_OF_308 = type(LIMITS)(
    num_pages=256, page_size=8, max_seqs=16, max_step_tokens=64, max_context=512, vocab_size=308
)  # fmt: skip


async def test_not_a_number_is_refused_and_the_server_lives() -> None:
    """sglang PR28153."""
    async with serving() as server:
        for number in ("NaN", "Infinity", "-Infinity", "1e999"):
            data = f'{{"model": "{MODEL}", "prompt": "x", "temperature": {number}}}'.encode()
            status, body = await server.post("/v1/completions", data=data)
            assert status == 400
            assert body["error"]["param"] == "temperature"
        assert (await complete(server)).choices


async def test_tiny_temperatures_are_greedy() -> None:
    """vllm PR2937."""
    async with serving() as server:
        greedy = (await complete(server, temperature=0)).choices[0].text
        assert (await complete(server, temperature=1e-4)).choices[0].text == greedy


async def test_a_full_queue_is_a_429_that_says_when() -> None:
    async with serving(fake_engine(step_seconds=0.05), config=HttpConfig(port=0, max_queue_requests=4)) as server:
        results = await asyncio.gather(*(complete(server, max_tokens=4) for _ in range(32)), return_exceptions=True)
        busy = [result for result in results if isinstance(result, openai.RateLimitError)]
        assert busy
        assert all(int(error.response.headers["Retry-After"]) >= 1 for error in busy)
        assert all(isinstance(result, (Completion, openai.RateLimitError)) for result in results)
        with pytest.raises(openai.BadRequestError, match="whole queue"):
            await complete(server, n=5)
