"""What a step costs in seconds, from what is in it: fitted to measured steps, or worked out from a chip's figures.

Owns the quantities that a step's time depends on and the two models of it. Knows neither how steps are measured
(`engine.calibration`) nor what is decided by their cost (`host.pace`, the simulator).

Programs have fixed shapes, so the dense part of a step (products with weights, over every place whether taken or not)
follows the bucket that it runs in; attention and the handling of rows follow what is in the plan.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jaxserve.errors import ConfigError
from jaxserve.plan import StepPlan


class Bucket(Protocol):
    """The static shape of a compiled step, as `device.buckets.Bucket` has it."""

    @property
    def has_chunks(self) -> bool: ...
    @property
    def chunk_rows(self) -> int: ...
    @property
    def num_single(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


BucketFor = Callable[[int, int, int], Bucket]
"""(rows of one token, tokens of longer rows, longer rows) -> the bucket that such a step runs in."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step does, as far as its time depends on it.

    Attributes:
        places: tokens that its program computes, empty places included.
        chunked: whether the program has room for rows of more than one token.
        num_rows: rows in the plan.
        num_chunks: those of more than one token.
        context_read: KV positions that rows of one token attend to, over all of them.
        chunk_context: likewise of longer rows, each position once a row.
        chunk_products: pairs of a token of a longer row and a position that it attends to.
    """

    places: int
    chunked: bool
    num_rows: int
    num_chunks: int
    context_read: int
    chunk_context: int
    chunk_products: int


def chunk_products(start: int, count: int) -> int:
    """Pairs (token, position that it attends to) of a row of `count` tokens from position `start`."""
    return count * start + count * (count + 1) // 2


def work_of(plan: StepPlan, bucket_for: BucketFor) -> StepWork:
    """The work of `plan`."""
    num_single = chunk_tokens = num_chunks = context = chunk_context = products = 0
    for row in plan.rows:
        if row.count == 1:
            num_single += 1
            context += row.start + 1
        else:
            num_chunks += 1
            chunk_tokens += row.count
            chunk_context += row.start + row.count
            products += chunk_products(row.start, row.count)
    bucket = bucket_for(num_single, chunk_tokens, num_chunks)
    if not bucket.has_chunks:  # there each token of a longer row attends by itself
        return StepWork(bucket.num_tokens, False, len(plan.rows), 0, context + products, 0, 0)
    return StepWork(bucket.num_tokens, True, len(plan.rows), num_chunks, context, chunk_context, products)


class StepCost(Protocol):
    """Predicts the time of a step."""

    def seconds(self, work: StepWork) -> float:
        """Seconds that the device takes; never falls when any part of `work` grows within one kind of program."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCost:
    """Seconds of one kind of program: decodes alone, or with room for chunks.

    Attributes:
        places: sizes that were measured, ascending.
        seconds: of an empty step of each, never falling. Between two sizes it is interpolated; before them the nearest
            slope goes on, and after them the steeper of that and of all of them together: two sizes that came out alike say
            nothing of one that was not measured.
        per_row: seconds for each row.
        per_chunk: seconds for each row of more than one token, on top of that.
        per_context: seconds for each position of `context_read`.
        per_chunk_context: seconds for each position of `chunk_context`.
        per_product: seconds for each pair of `chunk_products`.
    """

    places: tuple[int, ...]
    seconds: tuple[float, ...]
    per_row: float = 0.0
    per_chunk: float = 0.0
    per_context: float = 0.0
    per_chunk_context: float = 0.0
    per_product: float = 0.0

    def __post_init__(self) -> None:
        if not self.places or len(self.places) != len(self.seconds):
            raise ConfigError(f"a cost needs as many seconds as places, and at least one, found {self.places}, {self.seconds}")
        if list(self.places) != sorted(set(self.places)):
            raise ConfigError(f"places must ascend, found {self.places}")
        if list(self.seconds) != sorted(self.seconds) or min(self.seconds) < 0:
            raise ConfigError(f"seconds must not fall nor be negative, found {self.seconds}")
        if min(self.per_row, self.per_chunk, self.per_context, self.per_chunk_context, self.per_product) < 0:
            raise ConfigError(f"coefficients must not be negative, found {self}")

    def empty_seconds(self, places: int) -> float:
        """Seconds of a step of so many places with nothing in them."""
        known, seconds = self.places, self.seconds
        if len(known) == 1:
            return seconds[0]
        right = min(max(bisect.bisect_left(known, places), 1), len(known) - 1)
        slope = (seconds[right] - seconds[right - 1]) / (known[right] - known[right - 1])
        if places > known[-1]:
            slope = max(slope, (seconds[-1] - seconds[0]) / (known[-1] - known[0]))
            return seconds[-1] + slope * (places - known[-1])
        return max(0.0, seconds[right - 1] + slope * (places - known[right - 1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCost:
    """A model fitted to measured steps, piecewise linear in the bucket's size and linear in what is in the plan."""

    decode: KindCost
    chunked: KindCost

    def seconds(self, work: StepWork) -> float:
        kind = self.chunked if work.chunked else self.decode
        return (
            kind.empty_seconds(work.places)
            + kind.per_row * work.num_rows
            + kind.per_chunk * work.num_chunks
            + kind.per_context * work.context_read
            + kind.per_chunk_context * work.chunk_context
            + kind.per_product * work.chunk_products
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipCost:
    """A roofline: the longer of moving the bytes and doing the arithmetic (Williams, Waterman and Patterson, 2009).

    Attributes:
        bytes_per_second: memory bandwidth that a step reaches.
        flops: floating-point operations a second that a step reaches.
        weight_bytes: read once a step.
        flops_per_token: twice the parameters.
        kv_bytes_per_token: K and V of one position in all layers.
        flops_per_product: of attention, for each pair (token, position): four times layers x heads x head dim.
        overhead_seconds: of a step with nothing in it.
    """

    bytes_per_second: float
    flops: float
    weight_bytes: float
    flops_per_token: float
    kv_bytes_per_token: float
    flops_per_product: float
    overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bytes_per_second", "flops"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, found {getattr(self, name)}")
        for name in ("weight_bytes", "flops_per_token", "kv_bytes_per_token", "flops_per_product", "overhead_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, found {getattr(self, name)}")

    def seconds(self, work: StepWork) -> float:
        num_bytes = self.weight_bytes + self.kv_bytes_per_token * (work.context_read + work.chunk_context)
        products = work.context_read + work.chunk_products
        operations = self.flops_per_token * work.places + self.flops_per_product * products
        return self.overhead_seconds + max(num_bytes / self.bytes_per_second, operations / self.flops)
