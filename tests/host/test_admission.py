import dataclasses
import itertools

import pytest

from jaxserve.errors import InvalidRequest, NotReady, QueueFull
from jaxserve.host.admission import Admission, cap_output, output_limit, validate
from jaxserve.request import FinishReason, TokenEvent
from tests.host.driver import make_limits, make_request


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def make_admission(clock=None, *, requests=4, tokens=100):
    return Admission(make_limits(), max_queue_requests=requests, max_queue_tokens=tokens, clock=clock or Clock())


def event(request_id, reason=None):
    return TokenEvent(request_id, (7,), (), reason, 4, 1)


CONTEXT_IS = "this model's maximum context length is"


@pytest.mark.parametrize(
    ("request_", "param", "message"),
    [
        (dataclasses.replace(make_request(), prompt=()), "prompt", "prompt must have at least 1 token, found 0"),
        (dataclasses.replace(make_request(), prompt=(1, 50)), "prompt", "prompt must have token ids from 0 to 49, found 50"),
        (dataclasses.replace(make_request(), prompt=(-1, 5)), "prompt", "prompt must have token ids from 0 to 49, found -1"),
        (make_request(stop_token_ids=(50,)), "stop_token_ids", "stop_token_ids must be token ids from 0 to 49, found 50"),
        (make_request(logit_bias=((-1, 1.0),)), "logit_bias", "logit_bias must be token ids from 0 to 49, found -1"),
        (make_request(num_prompt=64), "prompt", f"prompt 64 + 1 output token > context 64; {CONTEXT_IS} 64 tokens"),
        (
            make_request(num_prompt=8, max_tokens=57),
            "max_tokens",
            f"prompt 8 + max_tokens 57 > context 64; {CONTEXT_IS} 64 tokens",
        ),
        (
            make_request(num_prompt=8, min_tokens=57),
            "min_tokens",
            f"prompt 8 + min_tokens 57 > context 64; {CONTEXT_IS} 64 tokens",
        ),
    ],
)
def test_what_can_never_be_served_is_refused_by_name_and_number(request_, param, message):
    with pytest.raises(InvalidRequest) as caught:
        validate(request_, make_limits())
    assert str(caught.value) == message
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("num_prompt", "params", "param", "output"),
    [
        (25, {}, "prompt", "prompt 25 + 1 output token"),
        (8, {"max_tokens": 18}, "max_tokens", "prompt 8 + max_tokens 18"),
    ],
)
def test_what_the_pool_can_never_hold_is_refused(num_prompt, params, param, output):
    with pytest.raises(InvalidRequest) as caught:
        validate(make_request(num_prompt=num_prompt, **params), make_limits(num_pages=6))
    assert str(caught.value) == f"{output} need 7 pages of 4 tokens > the pool's 6; {CONTEXT_IS} 25 tokens"
    assert caught.value.param == param


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(63, 1), (8, 56), (1, 63)])
def test_what_just_fits_the_context_is_accepted(num_prompt, max_tokens):
    validate(make_request(num_prompt=num_prompt, max_tokens=max_tokens), make_limits())


def test_the_last_token_needs_no_page():
    validate(make_request(num_prompt=8, max_tokens=17), make_limits(num_pages=6))
    validate(make_request(num_prompt=24), make_limits(num_pages=6))


def test_output_limit_is_max_tokens_or_what_context_and_pool_leave():
    assert output_limit(make_request(num_prompt=8, max_tokens=5), make_limits()) == 5
    assert output_limit(make_request(num_prompt=8), make_limits()) == 56
    assert output_limit(make_request(num_prompt=8), make_limits(num_pages=6)) == 17


def test_requests_wait_until_their_first_token():
    admission = make_admission()
    admission.admit(make_request("a", 10), make_request("b", 20))
    assert (admission.queued_requests, admission.queued_tokens) == (2, 30)
    admission.observe([event("a")])
    assert (admission.queued_requests, admission.queued_tokens) == (1, 20)
    admission.observe([event("a"), event("a", FinishReason.STOP), event("b", FinishReason.ABORT)])
    assert (admission.queued_requests, admission.queued_tokens) == (0, 0)
    admission.check_integrity()


def test_the_queue_is_bounded_by_requests():
    admission = make_admission(requests=2)
    admission.admit(make_request("a"))
    admission.admit(make_request("b"))
    with pytest.raises(QueueFull, match="2 requests and 8 prompt tokens wait, at most 2 and 100 may; 1 and 4 came"):
        admission.admit(make_request("c"))
    admission.observe([event("a")])
    admission.admit(make_request("c"))


def test_the_queue_is_bounded_by_tokens():
    admission = make_admission(tokens=20)
    admission.admit(make_request("a", 11))
    with pytest.raises(QueueFull):
        admission.admit(make_request("b", 10))
    admission.admit(make_request("c", 9))


def test_all_requests_of_a_call_get_in_or_none():
    admission = make_admission(requests=3)
    admission.admit(make_request("a"), make_request("b"))
    with pytest.raises(QueueFull):
        admission.admit(make_request("c"), make_request("d"))
    with pytest.raises(InvalidRequest):
        admission.admit(make_request("c"), make_request("d", 64))
    assert admission.queued_requests == 2
    admission.check_integrity()


@pytest.mark.parametrize("changes", [{"requests": 1}, {"tokens": 7}])
def test_what_an_empty_queue_cannot_hold_is_refused_for_good(changes):
    with pytest.raises(InvalidRequest, match="2 requests with 8 prompt tokens at once exceed the whole queue"):
        make_admission(**changes).admit(make_request("a"), make_request("b"))


def test_an_id_is_unique_while_it_waits_and_runs():
    admission = make_admission()
    admission.admit(make_request("a"))
    with pytest.raises(InvalidRequest, match=r"unique among live requests, found \['a'\]"):
        admission.admit(make_request("a"))
    admission.observe([event("a")])
    with pytest.raises(InvalidRequest):
        admission.admit(make_request("a"))
    admission.observe([event("a", FinishReason.STOP)])
    admission.admit(make_request("a"))
    with pytest.raises(InvalidRequest):
        admission.admit(make_request("b"), make_request("b"))


def test_a_forgotten_request_leaves_nothing():
    admission = make_admission()
    admission.admit(make_request("a"))
    admission.forget("a")
    admission.forget("never seen")
    assert (admission.queued_requests, admission.queued_tokens) == (0, 0)
    admission.admit(make_request("a"))


def test_events_of_unknown_requests_are_ignored():
    admission = make_admission()
    admission.observe([event("x"), event("x", FinishReason.STOP)])
    admission.check_integrity()


def test_draining_refuses_everything():
    admission = make_admission()
    assert not admission.draining
    admission.drain()
    assert admission.draining
    with pytest.raises(NotReady):
        admission.admit(make_request("a"))


def fill_and_refuse(admission, *new):
    with pytest.raises(QueueFull) as caught:
        admission.admit(*new)
    return caught.value.retry_after


def serve(admission, clock, count, *, seconds_each, num_prompt=10, reason=FinishReason.LENGTH):
    for number in range(count):
        admission.admit(make_request(f"served-{number}", num_prompt))
        clock.now += seconds_each
        admission.observe([event(f"served-{number}", reason)])


def test_without_a_measured_rate_a_retry_is_worth_it_after_a_second():
    admission = make_admission(requests=1)
    admission.admit(make_request("a"))
    assert fill_and_refuse(admission, make_request("b")) == 1.0


def test_retry_after_follows_the_rate_of_requests():
    clock = Clock()
    admission = make_admission(clock, requests=4)
    admission.admit(make_request("a"))
    serve(admission, clock, 5, seconds_each=2.0)
    admission.admit(make_request("b"), make_request("c"), make_request("d"))
    assert fill_and_refuse(admission, make_request("e")) == 2.0
    assert fill_and_refuse(admission, make_request("e"), make_request("f"), make_request("g")) == 6.0


def test_retry_after_follows_the_rate_of_tokens():
    clock = Clock()
    admission = make_admission(clock, requests=100, tokens=60)
    admission.admit(make_request("a", 30))
    serve(admission, clock, 10, seconds_each=1.0)  # 10 tokens/s
    assert fill_and_refuse(admission, make_request("b", 60)) == 3.0


def test_only_served_requests_count_towards_the_rate():
    clock = Clock()
    admission = make_admission(clock, requests=2)
    admission.admit(make_request("a"))
    serve(admission, clock, 2, seconds_each=4.0)
    serve(admission, clock, 50, seconds_each=0.0, reason=FinishReason.ABORT)
    admission.admit(make_request("b"))
    assert fill_and_refuse(admission, make_request("c")) == 4.0


def test_old_finishes_leave_the_window():
    clock = Clock()
    admission = make_admission(clock, requests=2)
    admission.admit(make_request("a"))
    serve(admission, clock, 5, seconds_each=1.0)
    clock.now += 100.0
    admission.admit(make_request("b"))
    assert fill_and_refuse(admission, make_request("c")) == 1.0
    serve_one_slowly(admission, clock)
    assert fill_and_refuse(admission, make_request("d")) == 30.0
    admission.check_integrity()


def serve_one_slowly(admission, clock):
    clock.now += 29.0
    admission.observe([event("a", FinishReason.STOP)])
    admission.admit(make_request("later"))


def test_retry_after_is_bounded():
    clock = Clock()
    admission = make_admission(clock, requests=100, tokens=100)
    admission.admit(make_request("a", 50))
    serve(admission, clock, 1, seconds_each=20.0, num_prompt=1)
    admission.admit(make_request("b", 50))
    assert fill_and_refuse(admission, make_request("c", 50)) == 60.0


# --- shares of the queue, and caps ------------------------------------------------------------------------------------


def make_shared(**changes):
    options = {"max_queue_requests": 30, "max_queue_tokens": 3000, "num_tenants": 3, "clock": Clock(), **changes}
    return Admission(make_limits(), **options)


def fill(admission, tenant, *, priority=0):
    """Send requests until one is refused; how many were let in, and the refusal."""

    def send():
        for number in itertools.count():
            admission.admit(make_request(f"{tenant}{priority}-{number}", 10, tenant=tenant, priority=priority))

    before = admission.num_admitted
    with pytest.raises(QueueFull) as caught:
        send()
    admission.check_integrity()
    return admission.num_admitted - before, caught.value


def test_a_tenant_among_others_cannot_fill_the_queue():
    admission = make_shared()
    counts = {}
    for tenant in ("a", "b", "c"):
        counts[tenant], error = fill(admission, tenant)
        assert error.code == "tenant_share"
        assert f"{counts[tenant]} requests and {counts[tenant] * 10} prompt tokens of it wait" in str(error)
    assert counts == {"a": 20, "b": 7, "c": 2}
    assert admission.refused == {"tenant_share": 3}


def test_a_tenant_alone_may_fill_it():
    assert fill(make_shared(num_tenants=1), "a")[0] == 30


def test_the_tenant_s_share_counts_tokens_too():
    admission = make_shared(max_queue_requests=1000, max_queue_tokens=300)
    assert fill(admission, "a")[0] == 20


def test_batch_work_leaves_a_quarter_of_the_queue_to_others():
    admission = make_shared(num_tenants=1)
    count, error = fill(admission, "", priority=10)
    assert (count, error.code) == (22, "queue_full")
    assert fill(admission, "")[0] == 8


def test_by_default_four_pools_may_wait():
    assert make_shared(max_queue_tokens=0).max_queue_tokens == 4 * 64 * 4


def test_refusals_are_counted_and_their_share_exported():
    admission = make_admission(requests=1)
    admission.admit(make_request("a"))
    for _ in range(3):
        with pytest.raises(QueueFull):
            admission.admit(make_request("b"))
    assert (admission.num_admitted, admission.refused, admission.shed_share) == (1, {"queue_full": 3}, 0.75)


@pytest.mark.parametrize(("max_tokens", "cap", "expected"), [(None, 0, None), (None, 10, 10), (5, 10, 5), (10, 10, 10)])
def test_the_cap_on_output_fills_in_what_is_not_said(max_tokens, cap, expected):
    request = cap_output(make_request(max_tokens=max_tokens), make_limits(), cap)
    assert request.params.max_tokens == expected


def test_the_cap_on_output_does_not_ask_for_more_than_the_context_leaves():
    request = make_request(num_prompt=60)
    assert cap_output(request, make_limits(), 10) is request


@pytest.mark.parametrize("changes", [{"max_tokens": 11}, {"min_tokens": 11}])
def test_more_than_the_cap_is_refused_by_name_and_number(changes):
    (name,) = changes
    with pytest.raises(
        InvalidRequest, match=f"{name} must be at most 10, this server's limit for one answer, found 11"
    ) as caught:
        cap_output(make_request(**changes), make_limits(), 10)
    assert caught.value.param == name


# --- the target for the first token -----------------------------------------------------------------------------------


def make_backlogged(clock, **changes):
    """Admission that has seen 100 prompt tokens a second drain from a backlog, and has a target of 2 s."""
    admission = make_shared(slo_ttft_seconds=2.0, clock=clock, max_queue_requests=1000, **changes)
    admission.admit(make_request("old"))
    for number in range(100):
        admission.admit(make_request(f"served-{number}", 10))
        clock.now += 0.1
        admission.observe([event(f"served-{number}"), event(f"served-{number}", FinishReason.STOP)])
    admission.forget("old")
    assert admission.drain_rate == pytest.approx(100)
    admission._first_tokens.margin.factor = 1.0
    return admission


def test_what_would_be_too_late_is_refused_with_the_numbers():
    admission = make_backlogged(Clock())
    for number in range(19):
        admission.admit(make_request(f"in-{number}", 10))
    with pytest.raises(
        QueueFull, match=r"about 2\.10 s, and this server holds itself to 2 s: 190 prompt tokens go before"
    ) as caught:
        admission.admit(make_request("late", 20))
    assert caught.value.code == "too_late"
    assert caught.value.retry_after == 1.0


def test_batch_work_and_what_nothing_goes_before_are_let_in_whatever_the_forecast():
    admission = make_backlogged(Clock())
    admission.admit(*(make_request(f"big-{number}", 60) for number in range(5)))
    with pytest.raises(QueueFull):
        admission.admit(make_request("interactive"))
    admission.admit(make_request("batch", priority=10))
    admission.admit(make_request("urgent", 60, priority=-1))


def test_a_forecast_that_was_not_kept_makes_the_next_ones_longer():
    clock = Clock()
    admission = make_backlogged(clock)
    admission.admit(*(make_request(f"in-{number}", 10) for number in range(18)))
    clock.now += 1.0
    admission.observe([event("in-0")])
    kept = admission.margin
    assert kept < 1.0
    clock.now += 2.0
    admission.observe([event("in-1")])
    assert admission.margin > 1.0 > kept


def test_without_a_target_nothing_is_too_late():
    admission = make_shared(max_queue_requests=1000, max_queue_tokens=10**6)
    for number in range(500):
        admission.admit(make_request(str(number), 60, tenant=str(number % 3)))
