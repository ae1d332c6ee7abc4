"""`LLM` against the oracle: the same tokens as one request alone, text cut at stops, errors that say which prompt."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxserve
from jaxserve.constraint import Grammar, GrammarKind
from jaxserve.engine.output import ShownToken
from jaxserve.errors import ConfigError, EngineError, InvalidRequest
from jaxserve.offline import LLM, Completion
from jaxserve.offline.generation import Generation
from jaxserve.request import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs
from tests.fakes import fake_prompt_logprobs
from tests.offline.toy import alone, toy_engine

ROOT = Path(__file__).resolve().parent.parent.parent


def request(prompt: list[int], params: SamplingParams) -> Request:
    return Request(request_id="x", prompt=tuple(prompt), params=params)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 99), min_size=1, max_size=40),
            st.builds(
                SamplingParams,
                max_tokens=st.integers(1, 40) | st.none(),
                temperature=st.sampled_from([0.0, 1.0]),
                seed=st.integers(0, 5),
                ignore_eos=st.booleans(),
            ),
        ),
        max_size=10,
    )
)
def test_each_output_is_what_the_prompt_gives_alone(work: list[tuple[list[int], SamplingParams]]) -> None:
    engine = toy_engine()
    completions = LLM.from_engine(engine).generate([prompt for prompt, _ in work], [params for _, params in work])
    assert len(completions) == len(work)
    for completion, (prompt, params) in zip(completions, work, strict=True):
        found = completion.token_ids, completion.finish_reason, completion.text
        assert found == alone(engine, request(prompt, params))
        assert completion.num_prompt == len(prompt)
    assert not engine.core.has_work
    assert engine.core.stats().free_pages == engine.limits.num_pages


GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.mark.parametrize("prompts", ["one prompt", ["one prompt"], [3, 1, 2], (3, 1, 2), [[3, 1, 2]]])
def test_one_prompt_in_any_form(prompts: Any) -> None:
    (completion,) = LLM.from_engine(toy_engine()).generate(prompts, GREEDY)
    assert len(completion.token_ids) <= 8


def test_mixed_prompts_and_no_prompts() -> None:
    llm = LLM.from_engine(toy_engine())
    assert llm.generate([], GREEDY) == []
    prompts: list[str | Sequence[int]] = ["abc", llm._engine.tokenizer.encode("abc")]
    text, ids = llm.generate(prompts, GREEDY)
    assert text == ids


def test_one_conversation_or_many() -> None:
    engine = toy_engine()
    llm = LLM.from_engine(engine)
    messages = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(messages, GREEDY)
    first, second = llm.chat([messages, [{"role": "user", "content": "other"}]], GREEDY)
    assert one == first != second
    assert one.token_ids == alone(engine, request(engine.tokenizer.encode_chat(messages), GREEDY))[0]
    with pytest.raises(InvalidRequest, match="no chat template"):
        LLM.from_engine(toy_engine(chat_template=False)).chat(messages)


def whole(llm: LLM, params: SamplingParams) -> Completion:
    (completion,) = llm.generate("once upon a time", params)
    return completion


def test_a_stop_string_ends_the_output_before_it() -> None:
    engine = toy_engine()
    llm = LLM.from_engine(engine)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=2)
    full = whole(llm, params)
    assert len(full.token_ids) == len(full.logprobs) == len(full.shown) == 40
    stop = full.text[10:13]
    cut = whole(llm, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=2, stop=(stop,)))
    assert cut.text == full.text[: full.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.token_ids == full.token_ids[: len(cut.token_ids)]
    assert stop in engine.tokenizer.decode(cut.token_ids)
    assert stop not in engine.tokenizer.decode(cut.token_ids[:-1])
    assert cut.logprobs == full.logprobs[: len(cut.token_ids)]
    assert not engine.core.has_work
    # One more token may have been under way.
    assert engine.core.stats().num_output_tokens <= 40 + len(cut.token_ids) + 1


def test_log_probabilities_of_the_prompt() -> None:
    engine = toy_engine()
    ids = engine.tokenizer.encode("once upon a time")
    for max_tokens in (0, 3):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
        completion = whole(LLM.from_engine(engine), params)
        assert completion.prompt_logprobs == fake_prompt_logprobs(ids, 2, engine.limits.vocab_size)
        assert len(completion.token_ids) == max_tokens
    assert whole(LLM.from_engine(engine), SamplingParams(max_tokens=1)).prompt_logprobs == ()


def test_several_tokens_at_once_are_cut_at_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """As speculative decoding will give them."""
    engine = toy_engine()
    ids = tuple(engine.tokenizer.encode("xy.z!"))
    logprobs = tuple(TokenLogprobs(-float(i), ()) for i in range(5))
    event = TokenEvent("0", ids, logprobs, None, 4, 5)
    monkeypatch.setattr(engine.core, "step", lambda: [event])
    params = SamplingParams(max_tokens=40, stop=(".",), logprobs=0)
    generation = Generation(engine)
    generation.add(Request(request_id="0", prompt=(1, 2, 3, 4), params=params))
    ((request_id, completion),) = generation.step()
    assert request_id == "0"
    assert completion == Completion(
        text="xy",
        token_ids=ids[:3],
        finish_reason=FinishReason.STOP,
        logprobs=logprobs[:3],
        shown=(ShownToken(ids[0], logprobs[0], 0), ShownToken(ids[1], logprobs[1], 1)),
        num_prompt=4,
    )
    assert not engine.core.has_work


def test_a_stop_string_in_the_last_token_still_counts() -> None:
    llm = LLM.from_engine(toy_engine())
    full = whole(llm, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    stopped = whole(llm, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop=(full.text[-1],)))
    assert full.finish_reason is FinishReason.LENGTH
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.text == full.text[: full.text.index(full.text[-1])]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["fine", [1, 10**6]], GREEDY, "prompt 1: prompt must have token ids"),
        (["fine", []], GREEDY, "prompt 1: prompt must have at least 1 token"),
        (["fine", "x" * 500], GREEDY, "prompt 1: "),
        (["fine"], SamplingParams(stop_token_ids=(10**6,)), "prompt 0: stop_token_ids must be token ids"),
        (["a", "b"], [GREEDY], "params must be one, or one for each of 2 prompts, found 1"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_named_and_none_is(prompts: Any, params: Any, message: str) -> None:
    engine = toy_engine()
    llm = LLM.from_engine(engine)
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompts, params)
    assert not engine.core.has_work
    assert engine.runner.num_steps == 0
    assert len(llm.generate("fine", GREEDY)) == 1


def test_a_failing_engine_is_told_and_can_be_used_again(caplog: pytest.LogCaptureFixture) -> None:
    engine = toy_engine(fail_on_submit=[2])
    llm = LLM.from_engine(engine)
    with caplog.at_level(logging.CRITICAL + 1), pytest.raises(EngineError, match="failed while it worked on prompt 0"):
        llm.generate(["a", "b"], GREEDY)
    assert not engine.core.has_work
    assert len(llm.generate(["a", "b"], GREEDY)) == 2


def test_a_dead_engine_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL + 1), pytest.raises(EngineError, match=r"gave up|failed while"):
        LLM.from_engine(toy_engine(fail_on_submit=range(9))).generate(["a" * 100] * 20, GREEDY)


def test_interrupting_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine()
    llm = LLM.from_engine(engine)
    step, steps = engine.core.step, iter(range(5))

    def interrupted() -> Any:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine.core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"] * 4, GREEDY)
    monkeypatch.undo()
    assert engine.core.stats().free_pages == engine.limits.num_pages
    assert len(llm.generate(["a"], GREEDY)) == 1


def test_it_closes_its_engine() -> None:
    engine = toy_engine()
    with LLM.from_engine(engine):
        assert engine.num_closed == 0
    assert engine.num_closed == 1


def test_an_unknown_option_is_named_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="LLM: unknown key 'max_seq'; did you mean 'max_seqs'"):
        LLM("any", max_seq=3)


def test_the_package_gives_them_lazily() -> None:
    assert jaxserve.LLM is LLM
    assert jaxserve.SamplingParams is SamplingParams
    assert {"LLM", "SamplingParams"} <= set(dir(jaxserve))
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = jaxserve.LMM
    code = "import sys, jaxserve; jaxserve.LLM; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "False\n"


def test_grammars_allowed_ids_and_bad_words() -> None:
    engine = toy_engine()
    llm = LLM.from_engine(engine)
    (choice,) = llm.generate("hello", SamplingParams(grammar=Grammar(GrammarKind.CHOICE, '["yes","no"]'), max_tokens=20))
    assert (choice.text in ("yes", "no"), choice.finish_reason) == (True, FinishReason.STOP)
    (only,) = llm.generate("hello", SamplingParams(allowed_token_ids=(30, 60, 90), max_tokens=20, seed=2))
    assert set(only.token_ids) == {30, 60, 90}
    word = engine.tokenizer.decode([60])
    params = SamplingParams(allowed_token_ids=(30, 60, 90), bad_words=(word,), max_tokens=20, seed=2)
    (without,) = llm.generate("hello", params)
    assert set(without.token_ids) == {30, 90}
    with pytest.raises(InvalidRequest, match=r"prompt 1: grammar: .*regex"):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(grammar=Grammar(GrammarKind.REGEX, "("))])
    assert not engine.core.has_work
