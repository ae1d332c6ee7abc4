"""Sampling among the tokens of a mask on the device: what may come does, and the same in any batch."""

from __future__ import annotations

import dataclasses
import itertools
import random

import jax
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.constraint import mask_of
from jaxserve.device.buckets import Bucket
from jaxserve.device.constrained import ConstrainedSampling, allowed_tokens
from jaxserve.device.pack import pack, unpack
from jaxserve.device.runner import DeviceRunner
from jaxserve.device.sampler import SlotState, empty_state, sample
from jaxserve.device.step import pack_sampled
from jaxserve.engine.token_sets import TokenSet
from jaxserve.host.jump import JumpForward
from jaxserve.models.sharding import make_mesh
from jaxserve.plan import PlanRow, RunnerLimits, StepPlan
from jaxserve.request import Request, SamplingParams
from tests.cached import CACHED
from tests.real_engines import TINY_MODEL, run, tiny_runner

pytestmark = CACHED

VOCAB = 97
LIMITS = RunnerLimits(num_pages=8, page_size=8, max_seqs=6, max_step_tokens=8, max_context=32, vocab_size=VOCAB)


def row(slot: int, params: SamplingParams, *, masked: bool = True) -> PlanRow:
    return PlanRow(
        seq_id=slot,
        slot=slot,
        start=4,
        count=1,
        tokens=(),
        pages=[slot],
        sample=True,
        num_prompt=3,
        params=params,
        seed=slot,
        stop_ids=(),
        fresh=False,
        masked=masked,
    )


@pytest.fixture(scope="module")
def constrained() -> ConstrainedSampling:
    mesh = make_mesh(1)
    everywhere = jax.NamedSharding(mesh, jax.P())
    slots = jax.eval_shape(lambda: empty_state(LIMITS.max_seqs, LIMITS.max_context, VOCAB))
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), slots)
    return ConstrainedSampling("xla", abstract, 6, 42, LIMITS, mesh)


def state() -> SlotState:
    slots = empty_state(LIMITS.max_seqs, LIMITS.max_context, VOCAB)
    return jax.device_put(slots, jax.NamedSharding(make_mesh(1), jax.P()))


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=2.0, top_k=5, top_p=0.9, logprobs=0),
    SamplingParams(temperature=1.0, repetition_penalty=1.5, presence_penalty=1.0, logprobs=20),
    SamplingParams(temperature=5.0, min_p=0.01),
]


def everywhere(x: np.ndarray) -> jax.Array:
    return jax.device_put(x, jax.NamedSharding(make_mesh(1), jax.P()))


def freely(logits: jax.Array, rows: tuple[PlanRow, ...]) -> jax.Array:
    """What a step leaves of these rows, which it samples as it does those that will be sampled again."""
    bucket = Bucket(6, 0, 6)
    samples = unpack(jax.numpy.asarray(pack(StepPlan(0, rows), bucket, LIMITS)[0]), state().tokens, bucket, LIMITS)[1]
    return everywhere(np.asarray(pack_sampled(sample(logits, samples, state()))))


@pytest.mark.slow
def test_rows_choose_among_their_masks_and_others_keep_their_tokens(constrained: ConstrainedSampling) -> None:
    rng = np.random.default_rng(0)
    rows = (*(row(slot, params) for slot, params in enumerate(PARAMS)), row(5, PARAMS[0], masked=False))
    for _ in range(10):
        logits = everywhere(rng.normal(size=(VOCAB, 6)).astype(np.float32))
        before = freely(logits, rows)
        allowed = [sorted(rng.choice(VOCAB, size, replace=False).tolist()) for size in (1, 2, 7, 40, VOCAB)]
        masks = (*(mask_of(ids, VOCAB) for ids in allowed), None)
        slots, result = constrained(state(), logits, before, StepPlan(0, rows), [0, 1, 2, 3, 4, 5], masks)
        tokens = np.asarray(result)[:, 0]
        assert all(token in ids for token, ids in zip(tokens, allowed, strict=False))
        assert tokens[0] == max(allowed[0], key=lambda token: logits[token, 0])
        assert tokens[1] == max(allowed[1], key=lambda token: logits[token, 1])
        np.testing.assert_array_equal(np.asarray(result)[5], np.asarray(before)[5])
        np.testing.assert_array_equal(np.asarray(slots.tokens)[:5, 5], tokens[:5])
        assert np.asarray(slots.tokens)[5].sum() == 0
        # Log probabilities are of the model's own distribution, not of the mask's.
        logprobs, packed = np.asarray(jax.nn.log_softmax(logits, axis=0)), np.asarray(result)
        for place in (1, 2, 3):
            found = packed[place].view(np.float32)
            assert found[1] == pytest.approx(logprobs[tokens[place], place], abs=1e-5)
            assert packed[place, 2] == np.argmax(logprobs[:, place])
            top = dict(zip(packed[place, 2:22].tolist(), found[22:].tolist(), strict=True))
            assert top.get(tokens[place], found[1]) == found[1]


@pytest.mark.slow
def test_a_mask_of_all_tokens_changes_nothing(constrained: ConstrainedSampling) -> None:
    logits = everywhere(np.random.default_rng(1).normal(size=(VOCAB, 6)).astype(np.float32))
    rows = tuple(row(slot, params) for slot, params in enumerate(PARAMS))
    masks = (mask_of(range(VOCAB), VOCAB),) * 5
    _, result = constrained(state(), logits, freely(logits, rows), StepPlan(0, rows), [0, 1, 2, 3, 4], masks)
    free = freely(logits, tuple(dataclasses.replace(each, masked=False) for each in rows))
    np.testing.assert_array_equal(np.asarray(result)[:5, 0], np.asarray(free)[:5, 0])
    np.testing.assert_allclose(
        np.asarray(result)[1:4, 1].view(np.float32), np.asarray(free)[1:4, 1].view(np.float32), atol=1e-5
    )


@pytest.mark.parametrize("vocab", [31, 32, 33, 97])
def test_bits_of_masks(vocab: int) -> None:
    rng = random.Random(vocab)
    ids = sorted(rng.sample(range(vocab), vocab // 3))
    words = np.frombuffer(mask_of(ids, vocab), np.int32)[None]
    allowed = np.asarray(allowed_tokens(jax.numpy.asarray(words), vocab))
    assert allowed.shape == (vocab, 1)
    assert np.nonzero(allowed[:, 0])[0].tolist() == ids


ENGINE = EngineConfig(dtype="float32", max_seqs=4, max_step_tokens=64, max_context=160, num_pages=100, page_size=8)


@pytest.fixture(scope="module")
def runner() -> DeviceRunner:
    return tiny_runner(ENGINE)


def mixed(count: int) -> list[Request]:
    """Two thirds of them constrained, of all kinds of parameters."""
    vocab = TINY_MODEL.vocab_size
    odd = TokenSet(mask_of(range(1, vocab, 2), vocab), ((3, 5), (7,)), mask_of([0], vocab))
    few = TokenSet(mask_of((0, 2, 50), vocab), ((2, 2, 2),), mask_of([0], vocab))
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=20),
        SamplingParams(temperature=0.8, max_tokens=20, seed=3, top_p=0.9, logprobs=2),
        SamplingParams(temperature=1.0, max_tokens=15, seed=4, frequency_penalty=1.0, min_tokens=6),
        SamplingParams(temperature=0.0, max_tokens=25, logit_bias=((9, 4.0), (50, 3.0)), logprobs=1),
    ]
    return [
        Request(
            request_id=str(index),
            prompt=tuple((index * 7 + i) % vocab for i in range(2 + 5 * (index % 7))),
            params=kinds[index % len(kinds)],
            constraint=(None, odd, few)[index % 3],
            priority=index % 2,
        )
        for index in range(count)
    ]


@pytest.mark.slow
def test_the_same_tokens_alone_and_among_others_overlapped_or_not_and_preempted(runner: DeviceRunner) -> None:
    requests = mixed(24)
    free = [request for request in requests if request.constraint is None]
    reference = run(runner, requests, overlap=False, eos_token_ids=(0,)).outputs
    assert {token % 2 for token in reference["1"].tokens} == {1}
    for request in requests:
        alone = run(runner, [request], eos_token_ids=(0,)).outputs[request.request_id]
        assert alone.tokens == reference[request.request_id].tokens, request
    for options in ({}, {"num_pages": 9, "prefill_chunk": 7}, {"prefixes": True}):
        outputs = run(runner, requests, eos_token_ids=(0,), **options).outputs
        assert {name: output.tokens for name, output in outputs.items()} == {n: o.tokens for n, o in reference.items()}
    unconstrained = run(runner, free, eos_token_ids=(0,)).outputs
    assert all(unconstrained[each.request_id].tokens == reference[each.request_id].tokens for each in free)
    assert runner.compiles_since_ready == 0


class Template:
    """A constraint that leaves a choice at some places and forces the tokens between."""

    def __init__(self, places: list[list[int]]) -> None:
        self.places = places

    def start(self) -> TemplateMatcher:
        return TemplateMatcher(self.places)


class TemplateMatcher:
    def __init__(self, places: list[list[int]]) -> None:
        self.left = list(places)

    @property
    def done(self) -> bool:
        return not self.left

    def mask(self) -> bytes:
        return mask_of(self.left[0] if self.left else [0], TINY_MODEL.vocab_size)

    def advance(self, token_id: int) -> None:
        self.left = self.left[1:]

    def forced(self) -> tuple[int, ...]:
        return tuple(choices[0] for choices in itertools.takewhile(lambda choices: len(choices) == 1, self.left))


@pytest.mark.slow
def test_jumps_change_no_token(runner: DeviceRunner) -> None:
    rng = random.Random(0)
    vocab = TINY_MODEL.vocab_size

    def places() -> list[list[int]]:
        return [rng.sample(range(1, vocab), rng.choice([1, 1, 1, 30])) for _ in range(rng.randrange(5, 40))]

    requests = [
        Request(
            request_id=str(index),
            prompt=tuple(rng.randrange(vocab) for _ in range(rng.randrange(1, 30))),
            params=SamplingParams(temperature=index % 2, seed=index, max_tokens=60),
            constraint=Template(places()) if index % 4 else None,
        )
        for index in range(16)
    ]
    sizes = [bucket.num_single for bucket in runner.buckets if not bucket.has_chunks]
    for group in (requests, requests[1:2]):
        for overlap in (True, False):
            slow = run(runner, group, overlap=overlap, eos_token_ids=(0,))
            quick = run(runner, group, overlap=overlap, eos_token_ids=(0,), jump=JumpForward(sizes))
            assert {name: output.tokens for name, output in quick.outputs.items()} == {
                name: output.tokens for name, output in slow.outputs.items()
            }
            assert quick.stats.num_steps <= slow.stats.num_steps
        # Sixteen fill all four slots, one leaves places.
        assert group == requests or quick.stats.num_steps < slow.stats.num_steps
    assert runner.compiles_since_ready == 0
