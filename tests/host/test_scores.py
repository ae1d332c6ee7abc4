"""Prompts whose log probabilities are wanted, and requests that end after their prompt."""

from __future__ import annotations

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.request import FinishReason, Request, SamplingParams
from tests.fakes import fake_hidden, fake_prompt_logprobs
from tests.host.driver import Driver, make_limits, make_request


def test_targets_reach_one_token_past_a_chunk() -> None:
    driver = Driver(prefill_chunk=4)
    driver.add("a", 10, prompt_logprobs=2, max_tokens=1)
    targets = []
    while driver.scheduler.num_live:
        targets.append(driver.plan()["s0"].targets)
        events = driver.commit()
    assert targets == [(2, 3, 4, 5), (6, 7, 8, 9), (10,)], "nothing follows the prompt's last token"
    assert events[0].prompt_logprobs == fake_prompt_logprobs(range(1, 11), 2, driver.limits.vocab_size)
    assert len(events[0].tokens) == 1


def test_nobody_who_does_not_ask_has_targets() -> None:
    driver = Driver()
    driver.add("a", 10, logprobs=3, max_tokens=2)
    assert driver.plan()["s0"].targets == ()


def test_a_prompt_of_one_token_has_no_scores() -> None:
    driver = Driver(prefixes=True)
    driver.add("a", 1, prompt_logprobs=0, max_tokens=3)
    assert [event.prompt_logprobs for event in driver.run()["a"]] == [()] * 3


@pytest.mark.parametrize("num_prompt", [7, 8, 9, 33])
def test_what_is_cached_is_computed_again_for_its_scores(num_prompt: int) -> None:
    """And what it computes is there for others, who do not ask."""
    driver = Driver(prefixes=True)
    events = []
    for asks in (0, 0, None):
        driver.add("a", num_prompt, prompt_logprobs=asks, max_tokens=2)
        events.append(driver.run()["a"])
    expected = fake_prompt_logprobs([1 + i % 40 for i in range(num_prompt)], 0, driver.limits.vocab_size)
    assert [[event.prompt_logprobs for event in each] for each in events] == [[expected, ()], [expected, ()], [(), ()]]
    assert [each[-1].num_cached for each in events] == [0, 0, num_prompt - 1]


def test_scores_that_were_read_before_a_preemption_are_not_computed_again() -> None:
    """Pages for nearly two prompts: one loses its own shortly before its end, and then starts from those that are left."""
    driver = Driver(make_limits(num_pages=9, max_seqs=2), prefill_chunk=1, prefixes=True)
    driver.add("a", 8, max_tokens=18, ignore_eos=True)
    params = SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=1)
    seq = driver.scheduler.add(Request(request_id="b", prompt=tuple(range(20, 37)), params=params))
    starts, num_kept, events = [], 0, []
    while driver.scheduler.num_live:
        row = driver.plan().get("s1")
        if row is not None and row.fresh:
            starts.append(row.start)
            num_kept = len(seq.scores)
        events = driver.commit() or events
    assert seq.num_preemptions == 1
    assert num_kept >= 12
    assert starts[0] == 0
    assert 0 < starts[1] <= num_kept
    assert events[0].prompt_logprobs == fake_prompt_logprobs(seq.request.prompt, 1, driver.limits.vocab_size)


# --- no output --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("prefixes", [False, True])
def test_without_output_a_request_ends_after_its_prompt(chunk: int, prefixes: bool) -> None:
    driver = Driver(prefill_chunk=chunk, prefixes=prefixes)
    driver.add("a", 9, max_tokens=0, prompt_logprobs=1, stop_token_ids=(7,))
    (event,) = driver.run()["a"]
    assert (event.tokens, event.num_prompt, event.num_output) == ((), 9, 0)
    assert event.finish_reason is FinishReason.LENGTH
    assert len(event.prompt_logprobs) == 8
    assert event.hidden == ()
    assert driver.runner.num_steps == -(-9 // chunk), "no decode step"


def test_a_prompt_may_fill_the_context_and_the_pool_where_no_output_follows() -> None:
    driver = Driver(make_limits(num_pages=4, page_size=4, max_context=16))
    driver.add("a", 16, max_tokens=0)
    assert len(driver.run()["a"]) == 1
    with pytest.raises(InvalidRequest, match="prompt 17 \\+ no output > context 16"):
        driver.add("b", 17, max_tokens=0)
    with pytest.raises(InvalidRequest, match="prompt 16 \\+ 1 output token > context 16"):
        driver.add("b", 16)


def test_an_embedding_has_its_last_token_computed_cached_or_not() -> None:
    driver = Driver(prefixes=True, prefill_chunk=5)
    prompt = make_request("a", 12).prompt
    for expected_cached in (0, 11):
        driver.scheduler.add(Request(request_id="a", prompt=prompt, params=SamplingParams(max_tokens=0), embed=True))
        (event,) = driver.run()["a"]
        assert event.hidden == fake_hidden(prompt)
        assert (event.num_cached, event.num_output) == (expected_cached, 0)


def test_an_embedding_has_no_output() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens must be 0 for an embedding, found 4") as caught:
        Request(request_id="a", prompt=(1,), params=SamplingParams(max_tokens=4), embed=True)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize("count", [-1, 21])
def test_prompt_logprobs_have_a_range(count: int) -> None:
    with pytest.raises(InvalidRequest, match=f"prompt_logprobs must be from 0 to 20, found {count}"):
        SamplingParams(prompt_logprobs=count)
