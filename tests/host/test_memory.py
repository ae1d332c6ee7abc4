"""Which pages sequences share, what each must still compute, what is evicted; and a slow oracle over random histories."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import ConfigError
from jaxserve.host.memory import Memory
from jaxserve.host.prefix import PrefixTree, cost_aware
from jaxserve.request import Request, Sequence
from tests.host.driver import make_limits

SIZE = 4


class Bench:
    """A memory and sequences that open, compute and close when a test says so. Checks integrity after every call."""

    def __init__(self, num_pages: int = 16, **tree) -> None:
        self.memory = Memory(make_limits(num_pages=num_pages, page_size=SIZE), PrefixTree(SIZE, **tree))
        self.open_ones: list[Sequence] = []
        self.next_id = 0

    def sequence(self, *tokens: int, salt: str = "", priority: int = 0) -> Sequence:
        """A sequence with the prompt `tokens`, not open yet."""
        request = Request(request_id=str(self.next_id), prompt=tokens, cache_salt=salt, priority=priority)
        self.next_id += 1
        return Sequence(self.next_id, request, list(tokens), 100, turn=self.next_id)

    def start(self, *tokens: int, **options) -> Sequence:
        return self.open(self.sequence(*tokens, **options))

    def open(self, seq: Sequence) -> Sequence:
        found = self.memory.find(seq)
        assert found.computing is None
        self.memory.open(seq, found)
        self.open_ones.append(seq)
        self.check()
        return seq

    def compute(self, seq: Sequence, count: int | None = None) -> list[Sequence]:
        """Plan `count` tokens of `seq`, or all that are known, and let the next plan begin."""
        end = len(seq.tokens) if count is None else seq.planned + count
        self.memory.grow(seq, -(-end // SIZE) - len(seq.pages))
        seq.planned = end
        woken = self.memory.share(seq)
        seq.dispatched = seq.planned
        self.check()
        return woken

    def say(self, seq: Sequence, *tokens: int) -> None:
        """Add output tokens, and compute them."""
        seq.tokens += tokens
        self.compute(seq)

    def close(self, seq: Sequence) -> list[Sequence]:
        self.open_ones.remove(seq)
        woken = self.memory.close(seq)
        self.check()
        return woken

    def run(self, *tokens: int, **options) -> Sequence:
        """Open, compute, close; the sequence, whose `cached` says what it found."""
        seq = self.start(*tokens, **options)
        self.compute(seq)
        self.close(seq)
        return seq

    def check(self) -> None:
        self.memory.check_integrity(self.open_ones)


def prompt(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + length))


# --- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 3), (5, 4), (8, 7), (9, 8), (10, 8), (12, 11)])
def test_a_prompt_that_comes_again_is_computed_in_its_last_page_only(length: int, cached: int) -> None:
    """Where the prompt fills its last page, that page is copied and the last token computed."""
    bench = Bench()
    assert bench.run(*prompt(length)).cached == 0
    assert bench.run(*prompt(length)).cached == cached


def test_the_next_turn_of_a_conversation_finds_what_was_generated() -> None:
    bench = Bench()
    first = bench.start(*prompt(6))
    bench.compute(first)
    bench.say(first, 50, 51, 52, 53, 54)
    bench.close(first)
    second = bench.run(*prompt(6), 50, 51, 52, 53, 54, 60, 61)
    assert second.cached == 8


def test_a_token_known_to_the_device_only_fills_no_shared_page() -> None:
    bench = Bench()
    seq = bench.start(*prompt(7))
    bench.compute(seq)
    seq.in_flight = 1
    bench.compute(seq, 1)
    assert (seq.planned, seq.num_shared) == (8, 1)
    seq.tokens.append(9)
    bench.compute(seq, 0)
    assert seq.num_shared == 2


def test_running_sequences_share_pages_and_write_their_own() -> None:
    bench = Bench()
    first = bench.start(*prompt(10))
    bench.compute(first)
    second = bench.start(*prompt(8), 70, 71)
    bench.compute(second)
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]


def test_the_beginning_of_a_page_that_another_writes_is_copied() -> None:
    """Choices of one prompt: each but the first computes one token of it."""
    bench = Bench()
    first = bench.start(*prompt(7))
    bench.compute(first)
    found = bench.memory.find(bench.sequence(*prompt(7)))
    assert (len(found.nodes), found.copied, found.num_copied) == (1, first.pages[1], 2)
    bench.say(first, 90, 91)
    bench.close(first)
    assert bench.memory.find(bench.sequence(*prompt(7))).num_copied == 2, "the page is full now, and cached"


def test_the_beginning_of_a_cached_page_is_copied() -> None:
    bench = Bench()
    bench.run(*prompt(8))
    found = bench.memory.find(bench.sequence(*prompt(6), 90, 91, 92))
    assert (len(found.nodes), found.num_copied) == (1, 2)


def test_nothing_that_this_plan_computes_is_copied() -> None:
    bench = Bench()
    first = bench.start(*prompt(3))
    bench.memory.grow(first, 1)
    first.planned = 3
    assert bench.memory.find(bench.sequence(*prompt(3))).copied is None


def test_salts_share_nothing() -> None:
    bench = Bench()
    bench.run(*prompt(9), salt="a")
    assert bench.run(*prompt(9), salt="b").cached == 0
    assert bench.run(*prompt(9)).cached == 0
    assert bench.run(*prompt(9), salt="a").cached == 8


def test_the_same_tokens_after_others_are_another_page() -> None:
    bench = Bench()
    bench.run(*prompt(4), *prompt(4), 1)
    assert bench.run(*prompt(4), *prompt(4), 1).cached == 8
    assert bench.run(*prompt(4, 9), *prompt(4), 1).cached == 0


def test_hits_are_counted_when_a_sequence_first_runs() -> None:
    bench = Bench()
    bench.run(*prompt(9))
    seq = bench.run(*prompt(10))
    bench.open(seq)
    assert (bench.memory.num_asked_tokens, bench.memory.num_hit_tokens) == (19, 8)


# --- computing it once ------------------------------------------------------------------------------------------------


def test_a_second_one_waits_until_the_first_has_computed_what_they_share() -> None:
    bench = Bench()
    first = bench.start(*prompt(12))
    second = bench.sequence(*prompt(8), 80, 81)
    node = bench.memory.find(second).computing
    assert node is not None
    assert node.depth == 1
    bench.memory.wait(second, node)
    assert bench.compute(first, 4) == []
    assert bench.compute(first, 4) == [second]
    assert bench.open(second).cached == 8


def test_nobody_waits_for_a_less_important_one_and_the_page_is_held_once_after_all() -> None:
    bench = Bench()
    first = bench.start(*prompt(9), priority=1)
    second = bench.start(*prompt(9))
    bench.compute(second)
    bench.compute(first)
    assert first.pages[:2] == second.pages[:2]
    assert bench.memory.num_free == 16 - 4


def test_those_that_wait_are_told_when_the_first_goes_away() -> None:
    bench = Bench()
    first = bench.start(*prompt(12))
    second = bench.sequence(*prompt(8), 80)
    node = bench.memory.find(second).computing
    assert node is not None
    bench.memory.wait(second, node)
    bench.compute(first, 4)
    assert bench.close(first) == [second]
    found = bench.memory.find(second)
    assert (len(found.nodes), found.computing) == (1, None)


def test_a_node_outlives_its_owner_while_another_computes_it_too() -> None:
    bench = Bench()
    first = bench.start(*prompt(9), priority=1)
    second = bench.start(*prompt(9))
    bench.close(first)
    bench.compute(second)
    bench.close(second)
    assert bench.run(*prompt(9)).cached == 8


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_what_is_idle_counts_as_free_and_is_given_out_last() -> None:
    bench = Bench(num_pages=4)
    bench.run(*prompt(8))
    assert (bench.memory.num_free, bench.memory.num_cached) == (4, 2)
    bench.run(*prompt(8, 50))
    assert (bench.memory.num_cached, bench.memory.num_evicted) == (4, 0)
    bench.run(*prompt(4, 90))
    assert (bench.memory.num_cached, bench.memory.num_evicted) == (4, 1)


def test_the_least_recently_used_leaf_goes_first_and_children_before_parents() -> None:
    bench = Bench(num_pages=4)
    bench.run(*prompt(8))
    bench.run(*prompt(8, 50))
    bench.run(*prompt(4), 99)  # uses the first page of the first again, and no other
    holder = bench.start(1)
    left = []
    while bench.memory.num_cached:
        bench.memory.grow(holder, 1)
        left.append([len(bench.memory.find(bench.sequence(*prompt(8, first), 99)).nodes) for first in (0, 50)])
    assert left == [[1, 2], [1, 1], [1, 0], [0, 0]]


def test_pages_in_use_are_not_evicted() -> None:
    bench = Bench(num_pages=4)
    seq = bench.start(*prompt(8))
    bench.compute(seq)
    bench.run(*prompt(8, 50))
    other = bench.start(*prompt(8, 90))
    bench.compute(other)
    assert bench.memory.num_free == 0
    assert set(seq.pages).isdisjoint(other.pages)


def test_cost_aware_eviction_keeps_what_is_used_often() -> None:
    bench = Bench(num_pages=4, policy=cost_aware(100.0))
    for _ in range(5):
        bench.run(*prompt(5))
    for first in range(20, 60, 4):
        bench.run(*prompt(4, first))
    assert bench.run(*prompt(5)).cached == 4


def test_cost_aware_eviction_forgets_what_was_used_long_ago() -> None:
    bench = Bench(num_pages=4, policy=cost_aware(100.0))
    for _ in range(5):
        bench.run(*prompt(5))
    for first in range(20, 500, 4):
        bench.run(*prompt(4, first))
    assert bench.run(*prompt(5)).cached == 0


def test_dropping_forgets_what_nobody_uses() -> None:
    bench = Bench()
    bench.run(*prompt(9))
    seq = bench.start(*prompt(8, 50), 1)
    bench.compute(seq)
    assert bench.memory.drop_idle() == 2
    bench.check()
    assert (bench.memory.num_cached, bench.memory.num_evicted) == (0, 0)
    bench.close(seq)
    assert bench.run(*prompt(9)).cached == 0
    assert bench.run(*prompt(8, 50), 1).cached == 8


def test_pinned_pages_stay() -> None:
    bench = Bench(num_pages=4)
    assert bench.memory.pin(prompt(9), "") == 2
    bench.check()
    bench.run(*prompt(9))
    assert bench.memory.num_free == 2
    bench.run(*prompt(8, 50))
    assert bench.memory.drop_idle() == 2
    assert bench.run(*prompt(9)).cached == 8


def test_what_is_there_can_be_pinned() -> None:
    bench = Bench(num_pages=4)
    bench.run(*prompt(9))
    assert bench.memory.pin(prompt(9), "") == 2
    bench.check()
    assert (bench.memory.num_free, bench.memory.num_cached) == (2, 0)
    assert bench.memory.pin(prompt(9), "") == 0
    bench.check()


def test_no_more_than_half_of_the_pool_can_be_pinned() -> None:
    bench = Bench(num_pages=4)
    with pytest.raises(ConfigError, match="a prefix of 12 tokens, 3 pages of 4, cannot be pinned"):
        bench.memory.pin(prompt(12), "")
    bench.check()
    assert bench.memory.num_pinned == 0


def test_after_a_failure_nothing_is_known_and_what_was_pinned_is_pinned_again() -> None:
    bench = Bench(num_pages=6)
    bench.memory.pin(prompt(8), "")
    bench.run(*prompt(9))
    bench.run(*prompt(9, 50))
    bench.memory.clear()
    bench.check()
    assert (bench.memory.num_free, bench.memory.num_cached) == (6, 0)
    assert bench.run(*prompt(9)).cached == 0
    assert bench.memory.num_free == 4
    assert bench.run(*prompt(9)).cached == 8


def test_without_a_tree_nothing_is_shared() -> None:
    bench = Bench()
    bench.memory = Memory(make_limits(num_pages=4, page_size=SIZE))
    bench.run(*prompt(9))
    assert bench.run(*prompt(9)).cached == 0
    assert (bench.memory.num_free, bench.memory.num_cached, bench.memory.drop_idle()) == (4, 0, 0)


# --- a slow oracle ----------------------------------------------------------------------------------------------------


@dataclass
class Slow:
    """Every full page by all tokens up to its end, the time of its last use, and nothing clever."""

    last_used: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    users: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    now: int = 0

    def cached(self, salt: str, tokens: tuple[int, ...]) -> int:
        """Leading full pages that are there, but for the last token."""
        count = 0
        while (count + 1) * SIZE < len(tokens) and (salt, tokens[: (count + 1) * SIZE]) in self.last_used:
            count += 1
        return count

    def add(self, salt: str, tokens: tuple[int, ...]) -> None:
        for end in range(SIZE, len(tokens) + 1, SIZE):
            self.last_used.setdefault((salt, tokens[:end]), 0)

    def close(self, salt: str, tokens: tuple[int, ...]) -> None:
        self.users.remove((salt, tokens))
        for end in range(len(tokens) // SIZE * SIZE, 0, -SIZE):
            if not self.in_use(salt, tokens[:end]):
                self.now += 1
                self.last_used[salt, tokens[:end]] = self.now

    def in_use(self, salt: str, prefix: tuple[int, ...]) -> bool:
        return any(s == salt and tokens[: len(prefix)] == prefix for s, tokens in self.users)

    def evict(self) -> None:
        def is_leaf(salt: str, prefix: tuple[int, ...]) -> bool:
            return not any(s == salt and len(p) > len(prefix) and p[: len(prefix)] == prefix for s, p in self.last_used)

        leaves = [key for key in self.last_used if is_leaf(*key) and not self.in_use(*key)]
        del self.last_used[min(leaves, key=self.last_used.__getitem__)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "s"]),
            st.lists(st.integers(0, 1), min_size=1, max_size=5),  # which of two blocks comes next
            st.integers(0, 3),
            st.integers(0, 3),
        ),
        max_size=40,
    ),
    st.integers(12, 16),
)
def test_hits_are_those_of_a_slow_oracle(history: list, num_pages: int) -> None:
    """Up to two sequences are open at a time; each computes its whole prompt at once."""
    bench, slow = Bench(num_pages), Slow()
    open_ones: list[tuple[Sequence, str, tuple[int, ...]]] = []
    for salt, blocks, extra, closing in history:
        while len(open_ones) > min(1, closing):
            seq, *key = open_ones.pop(0)
            bench.close(seq)
            slow.close(*key)
        tokens = tuple(token for block in blocks for token in prompt(SIZE, 10 * block)) + prompt(extra, 50)
        seq = bench.sequence(*tokens, salt=salt)
        found = bench.memory.find(seq)
        assert len(found.nodes) == slow.cached(salt, tokens)
        held = (salt, tokens[: len(found.nodes) * SIZE])
        slow.users.append(held)
        bench.open(seq)
        missing = -(-len(tokens) // SIZE) - len(seq.pages)
        tables = {page for one, *_ in open_ones for page in one.pages} | set(seq.pages)
        free = num_pages - len(tables) - sum(not slow.in_use(*key) for key in slow.last_used)
        for _ in range(max(0, missing - free)):
            slow.evict()
        bench.compute(seq)
        slow.add(salt, tokens)
        slow.users[-1] = (salt, tokens)
        open_ones.append((seq, salt, tokens))
        assert bench.memory.num_cached == sum(not slow.in_use(*key) for key in slow.last_used)
