"""Constrained sequences through whole engines without a device: what comes out, when masks are given, and what fails alone."""

import dataclasses
import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.constraint import is_empty, mask_of
from jaxserve.engine.core import EngineCore
from jaxserve.engine.token_sets import TokenSet
from jaxserve.errors import EngineError
from jaxserve.host.jump import JumpForward
from jaxserve.host.prefix import PrefixTree
from jaxserve.host.scheduler import Scheduler
from jaxserve.plan import RunnerLimits
from jaxserve.request import FinishReason, Request, SamplingParams
from tests.engine.grammars import END_ID, ID_OF_BYTE, TOKENIZER, VOCAB_SIZE, compiled, json_schema, regex
from tests.fakes import FakeRunner, InjectedFailure, expected_output

LIMITS = RunnerLimits(num_pages=400, page_size=4, max_seqs=6, max_step_tokens=24, max_context=200, vocab_size=VOCAB_SIZE)
SMALL_POOL = dataclasses.replace(LIMITS, num_pages=50)

both = pytest.mark.parametrize("overlap", [False, True])

COLOURS = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "share": {"type": "integer", "minimum": 0, "maximum": 100},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
    },
    "required": ["colour", "share"],
    "additionalProperties": False,
}


def request(name, constraint=None, *, num_prompt=3, priority=0, **params):
    params = SamplingParams(**{"seed": sum(map(ord, name)), "max_tokens": 60, **params})
    prompt = tuple((7 * i + len(name)) % VOCAB_SIZE for i in range(num_prompt))
    return Request(request_id=name, prompt=prompt, params=params, constraint=constraint, priority=priority)


class Engine:
    """A core over a `FakeRunner`, run to its end with every check."""

    def __init__(self, *, overlap, limits=LIMITS, prefill_chunk=16, prefixes=False, jumps=(), **runner):
        self.runner = FakeRunner(limits, **runner)
        self.scheduler = Scheduler(
            limits,
            prefill_chunk=prefill_chunk,
            eos_token_ids=(END_ID,),
            seed=1,
            prefixes=PrefixTree(limits.page_size) if prefixes else None,
            jump=JumpForward(jumps),
        )
        self.core = EngineCore(self.scheduler, self.runner, overlap=overlap)

    def run(self, *requests):
        """Tokens and finish reason of each."""
        for each in requests:
            self.core.add(each)
        tokens = {each.request_id: [] for each in requests}
        reasons = {}
        for _ in range(5000):
            if not self.core.has_work:
                break
            for event in self.core.step():
                assert event.request_id not in reasons
                tokens[event.request_id] += event.tokens
                if event.finish_reason is not None:
                    reasons[event.request_id] = event.finish_reason
            self.scheduler.check_integrity()
        return {name: (tuple(tokens[name]), reasons[name]) for name in tokens}


def expected(runner, each):
    return expected_output(each, runner.limits, next_token=runner.next_token, eos_token_ids=(END_ID,))


def text_of(tokens):
    return TOKENIZER.decode(tokens)


class TestOutputs:
    @both
    def test_what_a_schema_says_comes_out(self, overlap):
        engine = Engine(overlap=overlap)
        requests = [request(f"r{i}", compiled(json_schema(COLOURS)), temperature=i % 2) for i in range(8)]
        done = engine.run(*requests)
        for each in requests:
            tokens, reason = done[each.request_id]
            assert (tokens, reason) == expected(engine.runner, each)
            if reason is FinishReason.STOP:
                jsonschema.validate(json.loads(text_of(tokens)), COLOURS)
        assert [reason for _, reason in done.values()].count(FinishReason.STOP) >= 4

    @both
    def test_neighbours_without_a_constraint_are_as_they_were(self, overlap):
        free = [request(f"f{i}", num_prompt=1 + 5 * i, max_tokens=30) for i in range(3)]
        alone = Engine(overlap=overlap).run(*free)
        mixed = Engine(overlap=overlap).run(
            *(x for f in free for x in (f, request("c" + f.request_id, compiled(regex("[ab]+")))))
        )
        assert {name: mixed[name] for name in alone} == alone

    @both
    def test_a_plan_without_constrained_rows_asks_for_no_masks(self, overlap):
        engine = Engine(overlap=overlap)
        engine.run(request("free"))
        assert engine.runner.num_constrained == 0

    @both
    def test_the_output_ends_when_the_grammar_is_complete(self, overlap):
        tokens, reason = Engine(overlap=overlap).run(request("a", compiled(regex("yes"))))["a"]
        assert (text_of(tokens), reason) == ("yes", FinishReason.STOP)

    @both
    def test_before_min_tokens_it_ends_only_where_nothing_else_is_left(self, overlap):
        engine = Engine(overlap=overlap)
        done = engine.run(
            request("long", compiled(regex("a*")), min_tokens=12, max_tokens=40),
            request("short", compiled(regex("yes")), min_tokens=20, stop_token_ids=(200,)),
        )
        assert len(done["long"][0]) > 12
        assert (text_of(done["short"][0]), done["short"][1]) == ("yes", FinishReason.STOP)

    @both
    def test_ignoring_the_end_only_ends_follow(self, overlap):
        tokens, reason = Engine(overlap=overlap).run(request("a", compiled(regex("yes")), ignore_eos=True, max_tokens=9))["a"]
        assert (text_of(tokens), len(tokens), tokens[-1], reason) == ("yes", 9, END_ID, FinishReason.LENGTH)

    def test_choices_of_one_constraint_differ_by_their_seed(self):
        constraint = compiled(regex("[a-z]{8}"))
        done = Engine(overlap=True).run(*(request(f"c{i}", constraint, seed=i) for i in range(4)))
        assert len({tokens for tokens, _ in done.values()}) == 4
        assert all(len(text_of(tokens)) == 8 for tokens, _ in done.values())


class TestOrder:
    def test_with_overlap_a_step_is_submitted_before_its_masks_are_known(self):
        log = []

        class Logged(FakeRunner):
            def submit(self, plan):
                log.append(f"s{plan.step_id}")
                handle = super().submit(plan)
                constrain, result = handle.constrain, handle.result
                handle.constrain = lambda masks: (log.append(f"m{plan.step_id}"), constrain(masks))
                handle.result = lambda: (log.append(f"r{plan.step_id}"), result())[1]
                return handle

        engine = Engine(overlap=True)
        engine.core._runner = Logged(LIMITS)
        engine.run(request("a", compiled(regex("[ab]{3}"))))
        assert " ".join(log).startswith("s0 m0 s1 r0 m1 s2 r1 m2 s3")


class TestTrouble:
    @both
    def test_abort_while_a_mask_is_due(self, overlap):
        engine = Engine(overlap=overlap)
        engine.core.add(request("a", compiled(regex("[ab]+"))))
        engine.core.add(request("b", compiled(regex("[cd]{5}"))))
        engine.core.step()
        engine.core.step()
        engine.core.abort("a")
        texts = []
        while engine.core.has_work:
            texts += [token for event in engine.core.step() for token in event.tokens if event.request_id == "b"]
        assert set(text_of(texts)) <= set("cd")

    @both
    @pytest.mark.parametrize("failing", [0, 1, 5])
    def test_a_device_that_fails_in_the_second_half_of_a_step(self, overlap, failing):
        engine = Engine(overlap=overlap, fail_on_constrain=failing)
        done = engine.run(*(request(f"r{i}", compiled(regex("[ab]{9}")) if i % 2 else None, max_tokens=20) for i in range(4)))
        assert isinstance(engine.core.last_error, InjectedFailure)
        assert {reason for _, reason in done.values()} >= {FinishReason.ERROR}
        after = request("after", compiled(regex("[ab]{9}")))
        assert engine.run(after)["after"] == expected(engine.runner, after)

    @both
    def test_a_constraint_that_gives_up_ends_its_own_sequence_alone(self, overlap):
        class GivesUp:
            done = False
            num_tokens = 0

            def mask(self):
                if self.num_tokens == 3:
                    raise EngineError("too complex")
                return mask_of(range(VOCAB_SIZE), VOCAB_SIZE)

            def advance(self, token_id):
                self.num_tokens += 1

            def forced(self):
                return ()

        class Constraint:
            def start(self):
                return GivesUp()

        engine = Engine(overlap=overlap)
        other = request("other", compiled(regex("[ab]{9}")))
        done = engine.run(request("a", Constraint(), ignore_eos=True), other)
        assert done["a"][1] is FinishReason.ERROR
        assert len(done["a"][0]) == 3
        assert done["other"] == expected(engine.runner, other)
        assert engine.core.last_error is None

    def test_a_restriction_that_nobody_compiled(self):
        with pytest.raises(AssertionError, match="nobody compiled"):
            Engine(overlap=True).core.add(request("a", allowed_token_ids=(1,)))


class TestJumps:
    """Forced tokens are taken without sampling each, where the next step has places for them."""

    SIZES = (1, 4, 6)

    @both
    def test_a_forced_text_takes_few_steps_and_the_same_tokens(self, overlap):
        each = request("a", compiled(json_schema(COLOURS)))
        slow = Engine(overlap=overlap)
        quick = Engine(overlap=overlap, jumps=self.SIZES)
        assert quick.run(each) == slow.run(each)
        assert quick.runner.num_steps <= 0.75 * slow.runner.num_steps

    @both
    def test_log_probabilities_are_sampled_one_by_one(self, overlap):
        each = request("a", compiled(json_schema(COLOURS)), logprobs=1)
        slow, quick = Engine(overlap=overlap), Engine(overlap=overlap, jumps=self.SIZES)
        assert quick.run(each) == slow.run(each)
        assert quick.runner.num_steps == slow.runner.num_steps

    @both
    @pytest.mark.parametrize("max_tokens", range(1, 12))
    def test_a_jump_ends_where_the_output_does(self, overlap, max_tokens):
        each = request("a", compiled(json_schema(COLOURS)), max_tokens=max_tokens)
        engine = Engine(overlap=overlap, jumps=self.SIZES)
        assert engine.run(each)["a"] == expected(engine.runner, each)

    @both
    def test_a_stop_token_among_forced_ones_ends_it(self, overlap):
        each = request("a", compiled(regex("[ab]qqzqq")), stop_token_ids=(ID_OF_BYTE[ord("z")],))
        engine = Engine(overlap=overlap, jumps=self.SIZES)
        tokens, reason = engine.run(each)["a"]
        assert (text_of(tokens)[1:], reason) == ("qqz", FinishReason.STOP)
        assert (tokens, reason) == expected(engine.runner, each)

    @pytest.mark.parametrize(
        ("num_rows", "wanted", "room"),
        [
            (1, 0, 0),
            (1, 1, 1),  # 16 places instead of 9 for one token more, a step of 9 saved
            (1, 7, 7),
            (1, 100, 31),
            (8, 1, 0),  # 24 instead of 16 for an eighth of a step
            (8, 4, 0),
            (8, 5, 5),
            (6, 1, 1),
            (6, 2, 2),
            (6, 3, 2),
            (32, 5, 0),
            (40, 5, 0),
            (0, 5, 0),
        ],
    )
    def test_it_pays(self, num_rows, wanted, room):
        assert JumpForward((8, 1, 32, 16)).room(num_rows, wanted) == room


class TestTokenSets:
    def make(self, allowed=range(VOCAB_SIZE), forbidden=(), end=(END_ID,)):
        return TokenSet(mask_of(allowed, VOCAB_SIZE), forbidden, mask_of(end, VOCAB_SIZE))

    def test_only_allowed_tokens(self):
        tokens, reason = Engine(overlap=True).run(request("a", self.make([5, 9, 70])))["a"]
        assert set(tokens) == {5, 9, 70}
        assert reason is FinishReason.LENGTH

    @both
    def test_forbidden_sequences_do_not_come(self, overlap):
        forbidden = ((1, 1), (90,), (1, 180, 1))
        tokens, _ = Engine(overlap=overlap).run(request("a", self.make([1, 90, 180, 270], forbidden)))["a"]
        assert not any(tokens[i : i + len(word)] == word for word in forbidden for i in range(len(tokens)))
        assert set(tokens) == {1, 180, 270}

    def test_where_nothing_is_left_the_output_ends(self):
        done = Engine(overlap=True).run(request("a", self.make([4], ((4, 4),))), request("b", self.make([4], ((4, 4),), ())))
        assert done["a"] == ((4, END_ID), FinishReason.STOP)
        assert done["b"] == ((4,), FinishReason.ERROR)
        assert is_empty(mask_of([], VOCAB_SIZE))


names = st.sampled_from(["a", "b", "name", "é"])
leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, st.integers(-99, 99), st.integers(0, 999)
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
    st.sampled_from([{"type": "string", "pattern": "^[a-f]{2,4}$"}, {"type": "string", "format": "date"}]),
    st.builds(
        lambda values: {"enum": values}, st.lists(st.one_of(st.integers(0, 9), names, st.none()), min_size=1, max_size=4)
    ),
)


def objects(schemas):
    def make(properties, required):
        chosen = [name for name, flag in zip(properties, required, strict=False) if flag]
        return {"type": "object", "properties": properties, "required": chosen, "additionalProperties": False}

    return st.builds(make, st.dictionaries(names, schemas, max_size=3), st.lists(st.booleans(), min_size=3, max_size=3))


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


@pytest.mark.slow
@given(
    chosen=st.lists(schemas, min_size=1, max_size=3),
    num_choices=st.integers(1, 3),
    overlap=st.booleans(),
    small_pool=st.booleans(),
    prefixes=st.booleans(),
    prefill_chunk=st.sampled_from([3, 24]),
    jumps=st.sampled_from([(), (1, 4, 6), (24,)]),
)
def test_outputs_of_random_schemas_are_valid(chosen, num_choices, overlap, small_pool, prefixes, prefill_chunk, jumps):
    limits = SMALL_POOL if small_pool else LIMITS
    engine = Engine(overlap=overlap, limits=limits, prefixes=prefixes, prefill_chunk=prefill_chunk, jumps=jumps)
    schema_of, requests = {}, []
    for number, schema in enumerate(chosen):
        constraint = compiled(json_schema(schema))
        for choice in range(num_choices):
            name = f"{number}-{choice}"
            schema_of[name] = schema
            requests.append(request(name, constraint, seed=choice, max_tokens=100, num_prompt=5 + 9 * number))
            requests.append(request(f"free {name}", seed=choice, num_prompt=30, max_tokens=50, priority=choice % 2))
    done = engine.run(*requests)
    for each in requests:
        tokens, reason = done[each.request_id]
        assert (tokens, reason) == expected(engine.runner, each)
        if each.request_id in schema_of and reason is FinishReason.STOP:
            jsonschema.validate(json.loads(text_of(tokens)), schema_of[each.request_id])
