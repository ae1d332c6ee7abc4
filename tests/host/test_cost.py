"""Step costs: the two models, the fit to measured steps, and their files."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from jaxserve.device.buckets import choose_bucket, enumerate_buckets
from jaxserve.errors import ConfigError
from jaxserve.host.cost import ChipCost, FittedCost, KindCost, StepWork, chunk_products, work_of
from jaxserve.host.cost_file import CostOrigin, format_cost, parse_cost, read_cost
from jaxserve.host.fit import Sample, fit_cost, non_negative_least_squares, relative_errors, spread_of
from jaxserve.plan import StepPlan
from tests.host.driver import Driver, make_limits

DECODE = KindCost(places=(1, 8, 32), seconds=(0.010, 0.012, 0.020), per_row=1e-5, per_context=1e-6)
CHUNKED = KindCost(
    places=(64, 160),
    seconds=(0.03, 0.05),
    per_row=2e-5,
    per_chunk=1e-3,
    per_context=2e-6,
    per_chunk_context=3e-6,
    per_product=1e-8,
)
COST = FittedCost(decode=DECODE, chunked=CHUNKED)


@pytest.mark.parametrize(
    ("places", "seconds"), [(1, 0.010), (8, 0.012), (20, 0.016), (32, 0.020), (56, 0.028), (4, 0.010 + 0.002 * 3 / 7)]
)
def test_empty_steps_are_interpolated_and_extrapolated(places: int, seconds: float) -> None:
    assert DECODE.empty_seconds(places) == pytest.approx(seconds)


def test_a_single_size_is_that_of_all() -> None:
    assert KindCost(places=(8,), seconds=(0.5,)).empty_seconds(800) == 0.5


def test_everything_in_a_step_costs() -> None:
    work = StepWork(160, True, 3, 2, 1000, 500, 40_000)
    assert COST.seconds(work) == pytest.approx(0.05 + 3 * 2e-5 + 2 * 1e-3 + 1000 * 2e-6 + 500 * 3e-6 + 40_000 * 1e-8)
    decodes = StepWork(8, False, 3, 0, 1000, 0, 0)
    assert COST.seconds(decodes) == pytest.approx(0.012 + 3e-5 + 1e-3)


def plan_beside_a_decode(driver: Driver, decoding: int, num_prompt: int) -> StepPlan:
    """A plan with a decode after a prompt of `decoding` tokens, and the first chunk of one of `num_prompt`."""
    driver.add("one", decoding, max_tokens=9)
    driver.step()
    driver.add("other", num_prompt)
    driver.plan()
    return driver.in_flight[0][0]


def test_work_of_a_plan_follows_its_bucket() -> None:
    driver = Driver(make_limits(num_pages=64, max_seqs=4, max_step_tokens=32), prefill_chunk=8)
    buckets = enumerate_buckets(driver.limits)
    plan = plan_beside_a_decode(driver, 3, 12)
    assert [row.count for row in plan.rows] == [1, 8]
    bucket = choose_bucket(buckets, 1, 8, 1)
    assert work_of(plan, partial(choose_bucket, buckets)) == StepWork(
        bucket.num_tokens, True, 2, 1, 4, 8, chunk_products(0, 8)
    )


def test_a_short_chunk_in_a_program_for_decodes_is_as_many_of_them() -> None:
    driver = Driver(make_limits(num_pages=64, max_seqs=16, max_step_tokens=64), prefill_chunk=8)
    buckets = enumerate_buckets(driver.limits)
    plan = plan_beside_a_decode(driver, 7, 5)
    assert [row.count for row in plan.rows] == [1, 5]
    assert work_of(plan, partial(choose_bucket, buckets)) == StepWork(8, False, 2, 0, 8 + sum(range(1, 6)), 0, 0)


def test_what_two_sizes_have_alike_is_not_believed_of_a_larger_one() -> None:
    flat = KindCost(places=(1, 16, 32), seconds=(0.012, 0.033, 0.033))
    assert [flat.empty_seconds(places) for places in (16, 24, 32)] == [0.033] * 3
    assert flat.empty_seconds(64) == pytest.approx(0.033 + 32 * 0.021 / 31)


def test_products_of_chunks_add_up_to_those_of_the_whole() -> None:
    assert chunk_products(0, 5) == 1 + 2 + 3 + 4 + 5
    assert chunk_products(0, 5) + chunk_products(5, 7) == chunk_products(0, 12)


def test_a_chip_is_bound_by_bytes_or_by_arithmetic() -> None:
    chip = ChipCost(
        bytes_per_second=1e12,
        flops=1e14,
        weight_bytes=1e10,
        flops_per_token=1e10,
        kv_bytes_per_token=1e5,
        flops_per_product=1e5,
        overhead_seconds=1e-4,
    )
    assert chip.seconds(StepWork(8, False, 8, 0, 8000, 0, 0)) == pytest.approx(1e-4 + (1e10 + 8e8) / 1e12)
    chunk = StepWork(2048, True, 1, 1, 0, 2048, chunk_products(0, 2048))
    assert chip.seconds(chunk) == pytest.approx(1e-4 + (2048e10 + 1e5 * chunk_products(0, 2048)) / 1e14)
    with pytest.raises(ConfigError, match="flops must be positive"):
        replace(chip, flops=0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"places": (8, 1, 32)}, "ascend"),
        ({"seconds": (1.0, 2.0)}, "as many"),
        ({"seconds": (0.02, 0.01, 0.03)}, "fall"),
        ({"per_row": -1.0}, "negative"),
    ],
)
def test_a_kind_that_makes_no_sense_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(DECODE, **changes)


# --- the fit ----------------------------------------------------------------------------------------------------------


def make_samples(cost: FittedCost, noise: float = 0.0) -> list[Sample]:
    works = [StepWork(n, False, rows, 0, rows * c, 0, 0) for n in (1, 8, 32) for rows in (1, n) for c in (10, 500, 4000)]
    works += [
        StepWork(places, True, rows + chunks, chunks, rows * 100, chunks * (start + 32), chunks * chunk_products(start, 32))
        for places in (64, 160)
        for rows in (0, 5, 30)
        for chunks in (1, 3)
        for start in (0, 700, 4000)
    ]
    works += [StepWork(160, True, 1, 1, 0, start + 128, chunk_products(start, 128)) for start in (0, 700, 4000)]
    return [Sample(work, cost.seconds(work) * (1 + noise * (-1) ** index)) for index, work in enumerate(works)]


def test_the_fit_finds_the_model_that_made_the_samples() -> None:
    fitted = fit_cost(make_samples(COST))
    assert relative_errors(fitted, make_samples(COST))[-1] < 1e-6
    assert fitted.chunked.per_product == pytest.approx(CHUNKED.per_product, rel=1e-3)
    assert fitted.decode.seconds == pytest.approx(DECODE.seconds, rel=1e-3)


def test_noise_moves_the_fit_by_no_more_than_itself() -> None:
    errors = relative_errors(fit_cost(make_samples(COST, noise=0.1)), make_samples(COST))
    assert errors[len(errors) // 2] < 0.05


def test_the_fit_is_to_the_mean_where_steps_vary() -> None:
    """Relative to what was measured it would be the harmonic mean, which is low, and so would be every prediction."""
    work = StepWork(8, False, 8, 0, 800, 0, 0)
    varying = [Sample(work, seconds) for seconds in (0.01, 0.01, 0.01, 0.05)]
    chunks = [sample for sample in make_samples(COST) if sample.work.chunked]
    fitted = fit_cost([*varying, *chunks])
    assert fitted.seconds(work) == pytest.approx(0.02)
    spread = spread_of(fitted, varying)
    assert spread == pytest.approx((0.5, 0.5, 0.5, 2.5))
    assert spread_of(fitted, varying * 100)[-1] == pytest.approx(2.5)
    assert sum(spread_of(fitted, varying * 100)) / 40 == pytest.approx(1.0)


def test_what_would_be_negative_is_zero() -> None:
    falling = [Sample(StepWork(8, False, rows, 0, 100 * rows, 0, 0), 0.02 - 0.001 * rows) for rows in range(1, 9)]
    chunks = [sample for sample in make_samples(COST) if sample.work.chunked]
    decode = fit_cost([*falling, *chunks]).decode
    assert (decode.per_row, decode.per_context) == (0.0, 0.0)
    assert 0.012 < decode.seconds[0] < 0.019


def test_least_squares_agree_with_a_search() -> None:
    rows = [[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]
    assert non_negative_least_squares(rows, [1.0, 3.0, 5.0]) == pytest.approx([1.0, 2.0])
    assert non_negative_least_squares(rows, [3.0, 2.0, 1.0]) == pytest.approx([2.0, 0.0])
    assert non_negative_least_squares(rows, [-1.0, 1.0, 3.0]) == pytest.approx([0.0, 7 / 5])


def test_a_kind_that_was_not_measured_is_named() -> None:
    with pytest.raises(ConfigError, match="chunks"):
        fit_cost([sample for sample in make_samples(COST) if not sample.work.chunked])


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_are_read_back(tmp_path: Path) -> None:
    origin = CostOrigin(
        model='a "b" \\ c',
        machine="m",
        date="2026-01-02",
        num_steps=3,
        median_error=0.02,
        p95_error=0.1,
        spread=(0.5, 1.25, 3.0),
    )
    path = tmp_path / "cost.toml"
    path.write_text(format_cost(COST, origin))
    assert read_cost(path) == (COST, origin)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[chip", "not valid TOML"),
        ("[chips]", r"expected a table \[chip\] or \[fitted\]"),
        ("[chip]\nflops = 1e12", "missing"),
        ("[chip]\nflop = 1e12", "did you mean 'flops'"),
        ("[fitted.decode]\nplaces = [1]\nseconds = [1.0]", r"fitted.chunked"),
        ("[fitted.decode]\nplaces = 1\nseconds = [1.0]", r"fitted.decode: places must be an array"),
        ("[fitted.decode]\nplaces = [2, 1]\nseconds = [1.0, 2.0]", r"fitted.decode: places must ascend"),
    ],
)
def test_files_that_are_wrong_say_where(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_cost(text, where="x.toml")
    assert "x.toml" in str(caught.value)


def test_a_file_that_is_not_there_says_what_writes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bench\.calibrate"):
        read_cost(tmp_path / "none.toml")
