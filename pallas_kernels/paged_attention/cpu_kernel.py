"""Decode attention for CPUs: the code of a row's attention over pages in "rows".

A piece of work is one row's part of so many positions for one or all KV heads. All query heads of a KV head are taken
together, so that each K and V comes from memory once. Page by page: scores of `lanes` positions at a time, the online softmax
(Milakov and Gimelshein, 2018) once a page, and weights times V. A long row's parts are joined at the end, as in
flash-decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pallas_kernels.native.emit import F32, I8, I16, I32, I64, Code, LaneSums, Number, Pointer, exponential, fold
from pallas_kernels.native.foreign import ArrayArgument, Kernel

MASKED = -1e30
# Registers' worth of running outputs that a pass over V holds.
_HELD = 16
ELEMENTS = {"float32": F32, "bfloat16": I16, "int8": I8, "uint8": I8, "float8_e4m3fn": I8}
# Bytes that processors bring from memory at a time.
_LINE = 64


def _bytes(stored: str) -> int:
    return {"float32": 4, "bfloat16": 2}.get(stored, 1)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the code depends on.

    Attributes:
        stored: data type of the pool, as `choose.pool_dtype` has it.
        rank: dimensions of the pool, of which the last three are a page's.
        capped: whether scores have a soft cap.
        lanes: floats in a vector; divides the head dim and the page size.
    """

    group: int
    head_dim: int
    page_size: int
    stored: str
    rank: int
    capped: bool
    lanes: int

    @property
    def name(self) -> str:
        cap = "_capped" * self.capped
        sizes = f"g{self.group}_d{self.head_dim}_b{self.page_size}_v{self.lanes}"
        return f"jaxserve_decode_{sizes}_{self.stored}_r{self.rank}{cap}"


def load_floats(pointer: Pointer, lanes: int, stored: str) -> Number:
    """Elements of the pool as floats."""
    raw = pointer.load(lanes)
    match stored:
        case "float32":
            return raw
        case "bfloat16":
            return (raw.unsigned(I32) << 16).bits(F32)
        case "int8":
            return raw.to_int(I32).to_float()
        case _:  # float8_e4m3fn: seven bits, of which four are an exponent that counts from 7; without it, ninths of a power
            wide = raw.unsigned(I32)
            rest = wide & 0x7F
            normal = ((rest << 20) + (120 << 23)).bits(F32)
            tiny = rest.to_float() * 2.0**-9
            value = (rest < 8).choose(tiny, normal)
            return (value.bits(I32) | ((wide & 0x80) << 24)).bits(F32)


@dataclass(frozen=True, slots=True)
class Operands:
    """The kernel's arrays. Positions are of the sequence, pages of the pool.

    Attributes:
        queries: [T, N, D], scaled, of which the first S are the rows'; tokens last in memory.
        pages: [..., K, B, 2*D] in "rows".
        table: [S, W] page ids.
        starts: [S] first position that each row sees.
        lengths: [S] positions of each row, those before its start included.
        piece: [2] positions of a part, a multiple of the page size; and KV heads of a piece, which takes them one after
            another, so that what comes next is known and can be brought near.
        first_page: [1], added to ids.
        cap: [1], the soft cap.
        sinks: [N] scores without a value.
        out: [S, N, D]. Tokens last, threads would write to each other's cache lines.
        parts: [splits, S, N, D+2] of rows in several parts: outputs, then the largest score and the sum of weights.
    """

    queries: ArrayArgument
    pages: ArrayArgument
    table: ArrayArgument
    starts: ArrayArgument
    lengths: ArrayArgument
    piece: ArrayArgument
    first_page: ArrayArgument
    cap: ArrayArgument
    sinks: ArrayArgument
    out: ArrayArgument
    parts: ArrayArgument


def decode_kernel(shape: Shape) -> Kernel:
    """The code for one shape."""
    arguments = ((F32, 3), (ELEMENTS[shape.stored], shape.rank), (I32, 2), *[(I32, 1)] * 4, (F32, 1), (F32, 1))
    return Kernel(
        name=shape.name,
        arrays=(*arguments, (F32, 3), (F32, 4)),
        num_results=2,
        num_pieces=lambda code, arrays: _num_pieces(code, shape, Operands(*arrays)),
        piece=lambda code, arrays, index: _write_piece(code, shape, Operands(*arrays), index),
        last=lambda code, arrays: _join(code, shape, Operands(*arrays)),
    )


def _sizes_of_piece(operands: Operands) -> tuple[Number, Number]:
    """Positions of a part, and KV heads."""
    positions, heads = ((operands.piece.data + place).load().to_int(I64) for place in (0, 1))
    return positions, heads


def _num_pieces(code: Code, shape: Shape, operands: Operands) -> Number:
    """As many parts for each row's heads, a piece's of them at a time, as the longest row has."""
    num_rows, (_, heads) = operands.lengths.sizes[0], _sizes_of_piece(operands)
    most = code.variable(code.integer(1))
    with code.loop(num_rows) as row:
        most.set(most.get().most(_num_parts(operands, row, shape)))
    return most.get() * num_rows * (operands.pages.sizes[-3] // heads)


def _bounds(operands: Operands, row: Number, page_size: int) -> tuple[Number, Number, Number]:
    """First position of the first page with one to see, first position to see, and length."""
    start = (operands.starts.data + row).load().to_int(I64)
    return start // page_size * page_size, start, (operands.lengths.data + row).load().to_int(I64)


def _num_parts(operands: Operands, row: Number, shape: Shape) -> Number:
    origin, _, length = _bounds(operands, row, shape.page_size)
    split, _ = _sizes_of_piece(operands)
    return (length - origin + (split - 1)) // split


def _write_piece(code: Code, shape: Shape, operands: Operands, index: Number) -> None:
    num_rows, (_, heads) = operands.lengths.sizes[0], _sizes_of_piece(operands)
    per_row = operands.pages.sizes[-3] // heads
    row, first_head = index // per_row, index % per_row * heads
    with code.loop(first_head + heads, first_head) as kv_head:
        _Part(code, shape, operands, row % num_rows, kv_head, row // num_rows).write(first_head + heads)


class _Part:
    """One part of one row for one KV head."""

    def __init__(self, code: Code, shape: Shape, operands: Operands, row: Number, kv_head: Number, part: Number) -> None:
        self.code, self.shape, self.operands = code, shape, operands
        self.row, self.kv_head, self.part = row, kv_head, part
        self.first_head = self.kv_head * shape.group
        self.queries = code.array(F32, shape.group * shape.head_dim)
        self.scores = code.array(F32, shape.group * shape.page_size)
        self.sums = code.array(F32, shape.group * shape.head_dim)
        self.best, self.total = (code.array(F32, shape.group) for _ in range(2))

    def write(self, end_head: Number) -> None:
        """`end_head` is past the piece's last KV head."""
        code, shape = self.code, self.shape
        origin, start, length = _bounds(self.operands, self.row, shape.page_size)
        split, _ = _sizes_of_piece(self.operands)
        begin = origin + self.part * split
        end = length.least(begin + split)
        with code.when((begin < length) | self.part.equals(0)):
            self._gather_queries()
            for head in range(shape.group):
                (self.best + head).store(code.constant(MASKED))
                (self.total + head).store(code.constant(0.0))
            for index in range(0, shape.group * shape.head_dim, shape.lanes):
                (self.sums + index).store(code.constant(0.0, lanes=shape.lanes))
            with code.loop(end, begin, shape.page_size) as position:
                number, is_last = position // shape.page_size, (position + shape.page_size) >= end
                # The next page, or the next head's first one; what the last head's last is followed by is not known.
                next_head = is_last.choose((self.kv_head + 1).least(end_head - 1), self.kv_head)
                following = page_rows(
                    shape, self.operands, self.row, is_last.choose(begin // shape.page_size, number + 1), next_head
                )
                first = (start - position).most(0)
                rows = page_rows(shape, self.operands, self.row, number, self.kv_head)
                self._fold_page(rows, following, first, (end - position).least(shape.page_size))
            self._finish((length - origin) < (split + 1))

    def _gather_queries(self) -> None:
        """This row's, which lie as far apart as there are tokens."""
        size, stride = self.shape.group * self.shape.head_dim, self.operands.queries.sizes[0]
        source = self.operands.queries.data + (self.first_head * self.shape.head_dim * stride + self.row)
        with self.code.loop(size) as index:
            (self.queries + index).store((source + index * stride).load())

    def _fold_page(self, rows: Pointer, following: Pointer, first: Number, end: Number) -> None:
        """Positions from `first` to `end` of a page into the sums, while memory brings what comes after."""
        shape = self.shape
        first_tile = first // shape.lanes * shape.lanes
        with self.code.loop(end, first_tile, shape.lanes) as tile:
            self._score(rows, tile, first, end)
        for head in range(shape.group):
            scores = self.scores + head * shape.page_size
            places = self.best + head, self.total + head, self.sums + head * shape.head_dim
            weigh(shape, scores, first_tile, end, *places, partial(_vector_at, scores, shape.lanes))
        self._mix(rows + shape.head_dim, following, first, end)

    def _score(self, rows: Pointer, tile: Number, first: Number, end: Number) -> None:
        """Scores of as many positions as a vector has lanes."""
        code, shape = self.code, self.shape
        lanes, heads_per_pass = shape.lanes, _heads_per_pass(shape)
        for first_head in range(0, shape.group, heads_per_pass):
            heads = range(first_head, min(first_head + heads_per_pass, shape.group))
            sums = {head: LaneSums() for head in heads}
            for place in range(lanes):
                row = rows + (tile + place) * (2 * shape.head_dim)
                if first_head == 0:
                    self._bring(row + shape.head_dim)
                products: dict[int, Number] = {}
                for dim in range(0, shape.head_dim, lanes):
                    key = load_floats(row + dim, lanes, shape.stored)
                    for head in heads:
                        product = (self.queries + (head * shape.head_dim + dim)).load(lanes) * key
                        products[head] = products[head] + product if head in products else product
                for head in heads:
                    sums[head].put(products[head])
            position = code.counting(lanes) + tile
            for head in heads:
                score = capped(sums[head].total(), shape, self.operands.cap)
                seen = (position < end) & (position >= first)
                (self.scores + (tile + head * shape.page_size)).store(seen.choose(score, MASKED))

    def _bring(self, half: Pointer) -> None:
        """Have half a position's row brought near: its V while its K is read, and K of the next page while V is."""
        size = _bytes(self.shape.stored)
        for byte in range(0, self.shape.head_dim * size, _LINE):
            self.code.prefetch(half + byte // size)
        self.code.keep_order()

    def _mix(self, values: Pointer, following: Pointer, first: Number, end: Number) -> None:
        """Weights times V, added to the sums, while the next page's K comes near."""
        code, shape = self.code, self.shape
        lanes, heads_per_pass = shape.lanes, _heads_per_pass(shape)
        dims_per_pass = min(shape.head_dim, _HELD * lanes)
        for first_head in range(0, shape.group, heads_per_pass):
            for first_dim in range(0, shape.head_dim, dims_per_pass):
                held = {
                    (head, dim): code.variable((self.sums + (head * shape.head_dim + dim)).load(lanes))
                    for head in range(first_head, min(first_head + heads_per_pass, shape.group))
                    for dim in range(first_dim, min(first_dim + dims_per_pass, shape.head_dim), lanes)
                }
                with code.loop(end, first) as position:
                    if first_head == first_dim == 0:
                        self._bring(following + position * (2 * shape.head_dim))
                    for dim in sorted({dim for _, dim in held}):
                        value = load_floats(values + (position * (2 * shape.head_dim) + dim), lanes, shape.stored)
                        for head in sorted({head for head, _ in held}):
                            weight = (self.scores + (position + head * shape.page_size)).load().spread(lanes)
                            held[head, dim].set(held[head, dim].get() + weight * value)
                for (head, dim), variable in held.items():
                    (self.sums + (head * shape.head_dim + dim)).store(variable.get())

    def _finish(self, alone: Number) -> None:
        """What the row's only part gives is its output; other parts are kept to be joined."""
        code, shape, operands = self.code, self.shape, self.operands
        with code.when(alone):
            for head in range(shape.group):
                sink = (operands.sinks.data + (self.kv_head * shape.group + head)).load()
                best, total = (self.best + head).load(), (self.total + head).load()
                factor, sums = output_factor(best, total, sink), self.sums + head * shape.head_dim
                _put_output(shape, operands, self.row, self.first_head + head, sums, factor)
        with code.when(alone.equals(0)):
            for head in range(shape.group):
                place = _part(operands, self.part, self.row, self.first_head + head)
                for dim in range(0, shape.head_dim, shape.lanes):
                    (place + dim).store((self.sums + (head * shape.head_dim + dim)).load(shape.lanes))
                (place + shape.head_dim).store((self.best + head).load())
                (place + (shape.head_dim + 1)).store((self.total + head).load())


def page_rows(shape: Shape, operands: Any, row: Number, number: Number, kv_head: Number) -> Pointer:
    """A KV head's rows in a page of a row's, for operands with `table`, `first_page` and `pages`."""
    page = (operands.table.data + (row * operands.table.sizes[1] + number)).load()
    page = (page + operands.first_page.data.load()).unsigned(I64)
    index = page * operands.pages.sizes[-3] + kv_head
    return operands.pages.data + index * (shape.page_size * 2 * shape.head_dim)


def _vector_at(scores: Pointer, lanes: int, index: Number) -> Number:
    return (scores + index).load(lanes)


def weigh(
    shape: Shape,
    scores: Pointer,
    first: Number | int,
    end: Number,
    best: Pointer,
    total: Pointer,
    sums: Pointer,
    score_at: Callable[[Number], Number],
) -> None:
    """Scores of one query made into weights, and what was summed so far shrunk to the new largest score.

    Args:
        scores: where weights go; whole vectors from `first` until there are `end`.
        best, total, sums: the largest score, the sum of weights and the sum of weighted values.
        score_at: a vector of scores, of which those that are not seen are `MASKED`.
    """
    code, lanes = scores.code, shape.lanes
    before = best.load()
    most = code.variable(before.spread(lanes))
    with code.loop(end, first, lanes) as index:
        score = score_at(index)
        (scores + index).store(score)
        most.set(most.get().most(score))
    largest = fold(most.get(), Number.most)
    # Where nothing is seen yet, nothing may come of it: weights are those of scores far below.
    base = largest.most(MASKED / 2)
    added = code.variable(code.constant(0.0, lanes=lanes))
    with code.loop(end, first, lanes) as index:
        raw = (scores + index).load(lanes)
        weights = (raw < MASKED / 2).choose(0.0, exponential(raw - base))
        (scores + index).store(weights)
        added.set(added.get() + weights)
    shrink = exponential((before - base).spread(lanes))
    best.store(largest)
    total.store(total.load() * fold(shrink, Number.most) + fold(added.get(), Number.__add__))
    for dim in range(0, shape.head_dim, lanes):
        (sums + dim).store((sums + dim).load(lanes) * shrink)


def _part(operands: Operands, part: Number, row: Number, head: Number) -> Pointer:
    """Where a part of a row's head is kept."""
    _, num_rows, num_heads, width = operands.parts.sizes
    return operands.parts.data + ((part * num_rows + row) * num_heads + head) * width


def _put_output(shape: Shape, operands: Operands, row: Number, head: Number, sums: Pointer, factor: Number) -> None:
    """Sums times a factor."""
    place = operands.out.data + (row * operands.out.sizes[1] + head) * shape.head_dim
    wide = factor.spread(shape.lanes)
    for dim in range(0, shape.head_dim, shape.lanes):
        (place + dim).store((sums + dim).load(shape.lanes) * wide)


def capped(score: Number, shape: Shape, cap: ArrayArgument) -> Number:
    """Scores under the soft cap, whose hyperbolic tangent is made of a power of e."""
    if not shape.capped:
        return score
    code, most = score.code, cap.data.load()
    power = exponential(((score / most) * 2.0).least(60.0))
    return (code.constant(1.0, lanes=score.lanes) - code.constant(2.0, lanes=score.lanes) / (power + 1.0)) * most


def output_factor(best: Number, total: Number, sink: Number) -> Number:
    """What makes sums outputs: one over the sum of weights and the sink's; where the sink is the larger, as much less."""
    largest = best.most(sink)
    shrink = exponential(best - largest)
    whole = total * shrink + exponential(sink - largest)
    return (total < 1e-37).choose(0.0, shrink / whole.most(1e-37))


def _heads_per_pass(shape: Shape) -> int:
    """Query heads taken together, as many as registers hold the sums of."""
    return max(1, min(shape.group, _HELD * shape.lanes // shape.head_dim))


def _join(code: Code, shape: Shape, operands: Operands) -> None:
    """Outputs of rows of several parts."""
    sums = code.array(F32, shape.head_dim)
    with code.loop(operands.lengths.sizes[0]) as row:
        num_parts = _num_parts(operands, row, shape)
        with code.when(num_parts >= 2), code.loop(operands.queries.sizes[1]) as head:
            sink = (operands.sinks.data + head).load()
            best = code.variable(sink)
            with code.loop(num_parts) as part:
                best.set(best.get().most((_part(operands, part, row, head) + shape.head_dim).load()))
            total = code.variable(exponential(sink - best.get()))
            for dim in range(0, shape.head_dim, shape.lanes):
                (sums + dim).store(code.constant(0.0, lanes=shape.lanes))
            with code.loop(num_parts) as part:
                kept = _part(operands, part, row, head)
                shrink = exponential((kept + shape.head_dim).load() - best.get())
                total.set(total.get() + (kept + (shape.head_dim + 1)).load() * shrink)
                for dim in range(0, shape.head_dim, shape.lanes):
                    place = sums + dim
                    place.store(place.load(shape.lanes) + (kept + dim).load(shape.lanes) * shrink)
            _put_output(shape, operands, row, head, sums, code.constant(1.0) / total.get())
