"""A plan packed and unpacked again says the same: where each token stands, where its KV goes, what each row asks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxserve.device.buckets import Bucket, bucket_for_plan, enumerate_buckets, num_samples
from jaxserve.device.pack import FROM_DEVICE, MAX_FORBIDDEN, pack, table_width, uniform, unpack, upload_size
from jaxserve.plan import PlanRow, RunnerLimits, StepPlan
from jaxserve.request import MAX_STOP_TOKEN_IDS, SamplingParams

LIMITS = RunnerLimits(num_pages=80, page_size=4, max_seqs=5, max_step_tokens=24, max_context=42, vocab_size=50)
BUCKETS = enumerate_buckets(LIMITS)
# Tokens that the device remembers: another one at each slot and position.
HISTORY = np.arange((LIMITS.max_seqs + 1) * (LIMITS.max_context + 1), dtype=np.int32).reshape(LIMITS.max_seqs + 1, -1) + 1000

PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=1e-4, top_k=-1, logprobs=20, min_tokens=7, stop_token_ids=(3, 4)),
    SamplingParams(temperature=0.3, top_k=2**31 - 1, top_p=0.9, min_p=0.05, logit_bias=((1, 2.0),)),
    SamplingParams(presence_penalty=-2.0, frequency_penalty=1.5, repetition_penalty=1.1),
    SamplingParams(prompt_logprobs=3),
)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    slots = draw(st.permutations(range(LIMITS.max_seqs)))[: draw(st.integers(0, LIMITS.max_seqs))]
    pages = draw(st.permutations(range(LIMITS.num_pages)))
    room = LIMITS.max_step_tokens - len(slots)
    rows = []
    for slot in slots:
        count = 1 + draw(st.just(0) | st.integers(0, room))
        room -= count - 1
        start = draw(st.just(0) | st.integers(0, LIMITS.max_context - 1 - count))
        sample = draw(st.booleans())
        known = count - (start > 0 and draw(st.booleans()))
        width = table_width(LIMITS)
        mine, pages = pages[:width], pages[width:]
        end = -(-(start + count) // LIMITS.page_size)
        params = draw(st.sampled_from(PARAMS))
        num_targets = 0 if params.prompt_logprobs is None else draw(st.integers(0, count))
        rows.append(
            PlanRow(
                seq_id=slot + 100,
                slot=slot,
                start=start,
                count=count,
                tokens=tuple(draw(st.lists(st.integers(0, 49), min_size=known, max_size=known))),
                pages=mine[: draw(st.integers(end, width))],
                sample=sample,
                num_prompt=draw(st.integers(1, start + count)),
                params=params,
                seed=draw(st.integers(0, 2**64 - 1)),
                stop_ids=(2, *params.stop_token_ids),
                fresh=start == 0,
                targets=tuple(draw(st.lists(st.integers(0, 49), min_size=num_targets, max_size=num_targets))),
            )
        )
    return StepPlan(0, tuple(rows))


@functools.cache
def unpacker(bucket: Bucket) -> Callable[[np.ndarray], Any]:
    return jax.jit(lambda packed: unpack(packed, jnp.asarray(HISTORY), bucket, LIMITS))


def round_trip(plan: StepPlan) -> tuple[Bucket, list[int | None], Any, Any, np.ndarray]:
    """The plan's bucket, the places of its sampled rows, and what the device sees, as NumPy arrays."""
    bucket = bucket_for_plan(BUCKETS, plan)
    packed, places = pack(plan, bucket, LIMITS)
    assert packed.dtype == np.int32
    assert packed.shape == (upload_size(bucket, LIMITS),)
    batch, samples, token_slots, _ = jax.tree.map(np.asarray, unpacker(bucket)(packed))
    return bucket, places, batch, samples, token_slots


def row_places(plan: StepPlan, bucket: Bucket) -> list[range]:
    """Where each row of the plan stands among the step's rows: rows of one token first, and longer ones token by token where
    there is no place for a longer row."""
    places, single, chunk = [], 0, bucket.num_single
    for row in plan.rows:
        if row.count > 1 and bucket.has_chunks:
            places.append(range(chunk, chunk + 1))
            chunk += 1
        else:
            places.append(range(single, single + row.count))
            single += row.count
    return places


@given(plans())
def test_tokens_stand_where_the_plan_says(plan: StepPlan) -> None:
    bucket, _, batch, _, token_slots = round_trip(plan)
    real = np.zeros(bucket.num_tokens, bool)
    for row, place in zip(plan.rows, row_places(plan, bucket), strict=True):
        first = batch.row_offsets[place.start]
        mine = slice(first, first + row.count)
        assert not real[mine].any(), "two rows share a token"
        real[mine] = True
        positions = np.arange(row.start, row.start + row.count)
        from_device = HISTORY[row.slot, positions[len(row.tokens) :]]
        np.testing.assert_array_equal(batch.token_ids[mine], [*row.tokens, *from_device])
        np.testing.assert_array_equal(batch.positions[mine], positions)
        np.testing.assert_array_equal(batch.page_ids[mine], np.array(row.pages)[positions // LIMITS.page_size])
        np.testing.assert_array_equal(batch.page_offsets[mine], positions % LIMITS.page_size)
        np.testing.assert_array_equal(token_slots[mine], row.slot)
    assert real.sum() == plan.num_tokens
    assert (batch.page_ids[~real] >= LIMITS.num_pages).all(), "padding must write its KV nowhere"
    assert (token_slots[~real] == LIMITS.max_seqs).all(), "padding must write to nobody's slot"


@given(plans())
def test_rows_are_what_attention_expects(plan: StepPlan) -> None:
    bucket, _, batch, _, _ = round_trip(plan)
    offsets = batch.row_offsets
    assert offsets.shape == (bucket.num_rows + 1,)
    num_single = sum(row.count == 1 for row in plan.rows) if bucket.has_chunks else plan.num_tokens
    expected = np.minimum(np.arange(bucket.num_single + 1), num_single)
    np.testing.assert_array_equal(offsets[: bucket.num_single + 1], expected)
    assert (np.diff(offsets) >= 0).all()
    assert offsets[-1] <= bucket.num_tokens
    places = row_places(plan, bucket)
    for row, place in zip(plan.rows, places, strict=True):
        each = row.count // len(place)
        assert (offsets[np.array(place) + 1] - offsets[np.array(place)] == each).all()
        np.testing.assert_array_equal(batch.lengths[place], row.start + each * (1 + np.arange(len(place))))
        used = -(-(row.start + row.count) // LIMITS.page_size)
        for one in place:
            np.testing.assert_array_equal(batch.block_table[one, :used], row.pages[:used])
    padding = np.setdiff1d(np.arange(bucket.num_rows), [one for place in places for one in place])
    assert (batch.lengths[padding] == 0).all()


@given(plans())
def test_sampled_rows_carry_what_they_ask(plan: StepPlan) -> None:
    bucket, places, batch, samples, _ = round_trip(plan)
    assert samples.slot.shape == (num_samples(bucket, LIMITS),)
    asked = [place for place in places if place is not None]
    assert asked == list(range(len(asked))), "places are taken in order"
    for row, stands, place in zip(plan.rows, row_places(plan, bucket), places, strict=True):
        assert (place is not None) == row.sample
        if place is None:
            continue
        params = row.params
        expected = {
            "slot": row.slot,
            "last_token": batch.row_offsets[stands.start] + row.count - 1,
            "next_position": row.start + row.count,
            "top_k": max(params.top_k, 0),
            "num_prompt": row.num_prompt,
            "min_tokens": params.min_tokens,
            "num_logprobs": -1 if params.logprobs is None else params.logprobs,
            "has_bias": bool(params.logit_bias),
            "uniform": uniform(row.seed, row.start + row.count),
            "temperature": 0.0 if params.greedy else np.float32(params.temperature),
            **{
                name: np.float32(getattr(params, name))
                for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
            },
        }
        assert {name: getattr(samples, name)[place] for name in expected} == expected
        forbidden = set(samples.forbidden[place].tolist()) - {LIMITS.vocab_size}
        assert forbidden == (set(row.stop_ids) if params.min_tokens else set())


@given(plans())
def test_known_tokens_are_those_that_follow(plan: StepPlan) -> None:
    bucket, _, batch, _, _ = round_trip(plan)
    *_, known = jax.tree.map(np.asarray, unpacker(bucket)(pack(plan, bucket, LIMITS)[0]))
    expected = [
        (batch.row_offsets[place.start] + i, target)
        for row, place in zip(plan.rows, row_places(plan, bucket), strict=True)
        for i, target in enumerate(row.targets)
    ]
    assert list(zip(known.token, known.target, strict=True))[: len(expected)] == expected
    assert (known.target[len(expected) :] == -1).all()


@given(plans())
def test_padding_asks_for_nothing(plan: StepPlan) -> None:
    _, places, _, samples, _ = round_trip(plan)
    padding = slice(sum(place is not None for place in places), None)
    assert (samples.slot[padding] == LIMITS.max_seqs).all()
    asks_nothing = {
        "temperature": 0, "top_p": 1, "min_p": 0, "top_k": 0, "presence_penalty": 0, "frequency_penalty": 0,
        "repetition_penalty": 1, "min_tokens": 0, "num_logprobs": -1, "has_bias": 0, "forbidden": LIMITS.vocab_size,
    }  # fmt: skip
    for name, value in asks_nothing.items():
        assert (getattr(samples, name)[padding] == value).all(), name


def test_stop_ids_that_a_request_may_name_fit() -> None:
    assert MAX_FORBIDDEN >= MAX_STOP_TOKEN_IDS + 8, "and the model's own end-of-sequence ids"


def test_no_token_id_is_mistaken_for_one_from_the_device() -> None:
    assert FROM_DEVICE < 0


def test_a_row_may_end_at_the_last_position() -> None:
    """Its sampled token then goes to a place past the context, which the slot's history has."""
    end = LIMITS.max_context
    row = PlanRow(1, 0, end - 1, 1, (5,), list(range(table_width(LIMITS))), True, 1, PARAMS[0], 0, (), False)
    _, _, batch, samples, _ = round_trip(StepPlan(0, (row,)))
    assert batch.lengths[0] == samples.next_position[0] == end < HISTORY.shape[1]


# --- uniform numbers --------------------------------------------------------------------------------------------------


def test_uniform_is_splitmix64() -> None:
    """Its first outputs for this seed, from its authors' reference implementation."""
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [uniform(1234567, position) for position in range(5)] == [(output >> 40) / 2**24 for output in outputs]


@pytest.mark.parametrize(
    "pairs",
    [
        [(seed, 17) for seed in range(20_000)],
        [(12345, position) for position in range(20_000)],
        [(2**64 - 1 - seed, seed) for seed in range(20_000)],
        [(seed << 32, 0) for seed in range(20_000)],
    ],
    ids=["neighbouring_seeds", "positions_of_one_seed", "both", "high_bits"],
)
def test_uniform_is_uniform(pairs: list[tuple[int, int]]) -> None:
    numbers = np.array([uniform(seed, position) for seed, position in pairs])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert (numbers == numbers.astype(np.float32)).all(), "exact in float32, so that 1 is never reached"
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    assert stats.chisquare(counts).pvalue > 1e-3
    neighbours = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(len(numbers))


def test_seeds_draw_other_numbers() -> None:
    assert len({uniform(seed, 9) for seed in range(1000)}) > 990
    assert len({uniform(9, position) for position in range(1000)}) > 990


@pytest.mark.slow
@pytest.mark.parametrize("in_all", [True, False], ids=["all_layers", "some_layers"])
def test_with_a_window_tables_begin_with_the_first_page_that_is_seen(in_all: bool) -> None:
    """A chunk, a decode, and, where there is no place for chunks, a row of three with a place for each of its tokens; of each
    kind one whose window begins with a page."""
    window = 9
    of_window = dataclasses.replace(LIMITS, window=window)
    limits = of_window if in_all else dataclasses.replace(LIMITS, local_pages=70, local_window=window)
    params = SamplingParams()
    for shapes in ([(20, 7), (30, 1)], [(19, 3), (32, 1)]):
        rows = []
        for slot, (start, count) in enumerate(shapes):
            first = of_window.first_seen_page(start) - slot  # one of them holds a page more than it must
            end = -(-(start + count) // LIMITS.page_size)
            pages, local = list(range(20 * slot, 20 * slot + end)), [60 - slot * 20 - page for page in range(first, end)]
            table = {"pages": local, "first_page": first} if in_all else {"local_pages": local, "first_local_page": first}
            common = {"seed": 0, "stop_ids": (), "fresh": False, "sample": True, "num_prompt": 1, "params": params}
            rows.append(
                PlanRow(
                    seq_id=slot, slot=slot, start=start, count=count, tokens=(1,) * count, **{"pages": pages} | table, **common
                )
            )
        bucket = bucket_for_plan(BUCKETS, StepPlan(0, tuple(rows)))
        packed, _ = pack(StepPlan(0, tuple(rows)), bucket, limits)
        unpacked = jax.jit(functools.partial(unpack, bucket=bucket, limits=limits))(packed, HISTORY)
        batch = jax.tree.map(np.asarray, unpacked[0])
        seen = batch if in_all else batch.local
        for row, place in zip(rows, row_places(StepPlan(0, tuple(rows)), bucket), strict=True):
            local = dict(enumerate(row.pages, row.first_page) if in_all else enumerate(row.local_pages, row.first_local_page))
            for one in place:
                tokens = range(batch.row_offsets[one], batch.row_offsets[one + 1])
                positions = batch.positions[tokens.start : tokens.stop]
                first = max(0, positions[0] - window + 1) // LIMITS.page_size
                assert seen.lengths[one] == positions[-1] + 1 - first * LIMITS.page_size
                expected = [local[page] for page in range(first, positions[-1] // LIMITS.page_size + 1)]
                assert seen.block_table[one, : len(expected)].tolist() == expected
                for token, position in zip(tokens, positions, strict=True):
                    assert seen.page_ids[token] == local[position // LIMITS.page_size]
                    assert in_all or batch.page_ids[token] == row.pages[position // LIMITS.page_size]


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(3, 1, 7), (3, 1, 1)], ids=["chunks", "places_of_single_tokens"])
def test_every_token_has_its_row_s_adapter(counts: tuple[int, ...]) -> None:
    """Also a row that has a place for each of its tokens; rows without one, and padding, have none."""
    limits = dataclasses.replace(LIMITS, max_adapters=4, max_adapter_rank=2)
    common = {"seed": 0, "stop_ids": (), "fresh": True, "sample": True, "num_prompt": 1, "params": SamplingParams()}
    rows = tuple(
        PlanRow(
            seq_id=slot,
            slot=slot,
            start=0,
            count=count,
            tokens=(1,) * count,
            pages=[8 * slot, 8 * slot + 1],
            adapter=adapter,
            **common,
        )
        for slot, (count, adapter) in enumerate(zip(counts, (2, -1, 0), strict=True))
    )
    plan = StepPlan(0, rows)
    bucket = bucket_for_plan(BUCKETS, plan)
    assert bucket.has_chunks == (max(counts) == 7)
    packed, _ = pack(plan, bucket, limits)
    batch = jax.tree.map(np.asarray, jax.jit(functools.partial(unpack, bucket=bucket, limits=limits))(packed, HISTORY)[0])
    expected = np.full(bucket.num_tokens, -1)
    for row, place in zip(rows, row_places(plan, bucket), strict=True):
        first = batch.row_offsets[place.start]
        expected[first : first + row.count] = row.adapter
    np.testing.assert_array_equal(batch.adapters, expected)
    assert pack(plan, bucket, LIMITS)[0].size < packed.size, "where there are none, none are uploaded"
