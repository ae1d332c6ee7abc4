"""Attention of chunks for CPUs: the code of a tile of a row's tokens over pages in "rows".

A piece of work is one tile of tokens for one KV head, with all of its query heads: a matrix of `tile * group` queries, of
which each page's K and V are read once. Page by page: K transposed, scores as a product, the online softmax (Milakov and
Gimelshein, 2018) and a product with V (as in FlashAttention; Dao, 2022). What comes of a token does not depend on the tile
that it is in, since each number is summed in the order of dims or positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.native.emit import F32, I32, I64, Code, Number, Pointer, transposed
from pallas_kernels.native.foreign import ArrayArgument, Kernel
from pallas_kernels.paged_attention.cpu_kernel import (
    ELEMENTS,
    MASKED,
    Shape,
    capped,
    load_floats,
    output_factor,
    page_rows,
    weigh,
)

# Rows and vectors of a product's block, whose sums registers hold: twice as many vectors where there are 32 registers.
_ROWS = 4
_FEWEST_QUERIES = 48


def tile_tokens(shape: Shape) -> int:
    """Tokens of a tile: a vector's, or more where a KV head has few query heads."""
    return shape.lanes * max(1, -(-_FEWEST_QUERIES // (shape.group * shape.lanes)))


def scratch_floats(group: int, head_dim: int, page_size: int) -> int:
    """What a tile keeps: queries, sums and weights of each token and head, and a page's K."""
    return max(16 * group, 2 * _FEWEST_QUERIES) * (2 * head_dim + page_size) + page_size * head_dim


@dataclass(frozen=True, slots=True)
class Operands:
    """The kernel's arrays. Rows are those that may own several tokens.

    Attributes:
        queries: [T, N, D], scaled; tokens last in memory.
        pages: [..., K, B, 2*D] in "rows".
        table: [S, W] page ids.
        offsets: [S+1] first token of each row, and the end.
        lengths: [S].
        window: [1] positions that a token sees; at least the longest length where there is no window.
        first_page: [1], added to ids.
        cap: [1], the soft cap.
        sinks: [N] scores without a value.
        out: [T, N, D]; zeros for tokens that no row owns.
    """

    queries: ArrayArgument
    pages: ArrayArgument
    table: ArrayArgument
    offsets: ArrayArgument
    lengths: ArrayArgument
    window: ArrayArgument
    first_page: ArrayArgument
    cap: ArrayArgument
    sinks: ArrayArgument
    out: ArrayArgument


def chunk_kernel_name(shape: Shape) -> str:
    return shape.name.replace("decode", "chunks")


def chunk_kernel(shape: Shape, name: str) -> Kernel:
    """The code for one shape."""
    stored = ELEMENTS[shape.stored]
    return Kernel(
        name=name,
        arrays=(
            *((F32, 3), (stored, shape.rank), (I32, 2), (I32, 1), (I32, 1), (I32, 1), (I32, 1), (F32, 1), (F32, 1)),
            (F32, 3),
        ),
        num_results=1,
        num_pieces=lambda code, arrays: _num_pieces(code, shape, Operands(*arrays)),
        piece=lambda code, arrays, index: _write_piece(code, shape, Operands(*arrays), index),
        last=lambda code, arrays: _clear_others(code, Operands(*arrays)),
    )


def _num_tiles(operands: Operands, row: Number, tile: int) -> Number:
    first, end = (operands.offsets.data + row).load(), (operands.offsets.data + (row + 1)).load()
    has_any = (operands.lengths.data + row).load() >= 1
    return has_any.choose((end - first + (tile - 1)) // tile, 0).to_int(I64)


def _num_pieces(code: Code, shape: Shape, operands: Operands) -> Number:
    count, tile = code.variable(code.integer(0)), tile_tokens(shape)
    with code.loop(operands.lengths.sizes[0]) as row:
        count.set(count.get() + _num_tiles(operands, row, tile))
    return count.get() * operands.pages.sizes[-3]


def _write_piece(code: Code, shape: Shape, operands: Operands, index: Number) -> None:
    num_kv_heads, tile = operands.pages.sizes[-3], tile_tokens(shape)
    left, row = code.variable(index // num_kv_heads), code.variable(code.integer(0))
    with code.repeat(lambda: left.get() >= _num_tiles(operands, row.get(), tile)):
        left.set(left.get() - _num_tiles(operands, row.get(), tile))
        row.set(row.get() + 1)
    _Tile(code, shape, operands, row.get(), left.get() * tile, index % num_kv_heads).write()


def _clear_others(code: Code, operands: Operands) -> None:
    """Zeros for tokens before the first row's and past the last one's."""
    num_tokens, num_heads, head_dim = operands.out.sizes
    offsets, num_rows = operands.offsets.data, operands.lengths.sizes[0]
    first, end = offsets.load().to_int(I64), (offsets + num_rows).load().to_int(I64)
    zero, width = code.constant(0.0), num_heads * head_dim
    for start, stop in ((code.integer(0), first), (end, num_tokens)):
        with code.loop(stop * width, start * width) as index:
            (operands.out.data + index).store(zero)
    with code.loop(num_rows) as row:
        start, stop = ((offsets + (row + after)).load().to_int(I64) for after in (0, 1))
        with code.when((operands.lengths.data + row).load() < 1), code.loop(stop * width, start * width) as index:
            (operands.out.data + index).store(zero)


class _Tile:
    """Some tokens of a row for one KV head. Their queries lie head by head, tokens within."""

    def __init__(self, code: Code, shape: Shape, operands: Operands, row: Number, first: Number, kv_head: Number) -> None:
        self.code, self.shape, self.operands = code, shape, operands
        self.row, self.kv_head, self.tile = row, kv_head, tile_tokens(shape)
        offset, end = ((operands.offsets.data + (row + after)).load().to_int(I64) for after in (0, 1))
        self.token = offset + first
        self.num_tokens = (end - self.token).least(self.tile)
        length = (operands.lengths.data + row).load().to_int(I64)
        self.position = length - (end - self.token)
        self.first_head = kv_head * shape.group
        num_queries = self.tile * shape.group
        self.queries, self.sums = (code.array(F32, num_queries * shape.head_dim) for _ in range(2))
        self.weights = code.array(F32, num_queries * shape.page_size)
        self.keys = code.array(F32, shape.page_size * shape.head_dim)
        self.best, self.total = (code.array(F32, num_queries) for _ in range(2))

    def write(self) -> None:
        code, shape, operands = self.code, self.shape, self.operands
        window = operands.window.data.load().to_int(I64)
        start = (self.position - window + 1).most(0) // shape.page_size * shape.page_size
        end = self.position + self.num_tokens
        num_queries = self.tile * shape.group
        self._gather_queries()
        with code.loop(num_queries) as query:
            (self.best + query).store(code.constant(MASKED))
            (self.total + query).store(code.constant(0.0))
        with code.loop(num_queries * shape.head_dim, step=shape.lanes) as index:
            (self.sums + index).store(code.constant(0.0, lanes=shape.lanes))
        with code.loop(end, start, shape.page_size) as position:
            self._fold_page(position, (end - position).least(shape.page_size), window)
        self._finish()

    def _gather_queries(self) -> None:
        """Queries made rows; those past the tile's end, which give nothing, are whatever is there or zeros."""
        code, shape, lanes = self.code, self.shape, self.shape.lanes
        stride = self.operands.queries.sizes[0]
        source = self.operands.queries.data + (self.first_head * shape.head_dim * stride + self.token)
        is_whole = (self.token + self.tile) < (stride + 1)
        with code.when(is_whole), code.loop(shape.group) as head, code.loop(shape.head_dim, step=lanes) as dim:
            for first in range(0, self.tile, lanes):
                corner = source + ((head * shape.head_dim + dim) * stride + first)
                block = [(corner + stride * place).load(lanes) for place in range(lanes)]
                for place, vector in enumerate(transposed(block)):
                    (self.queries + ((head * self.tile + (first + place)) * shape.head_dim + dim)).store(vector)
        with code.when(is_whole.equals(0)):
            with code.loop(self.tile * shape.group * shape.head_dim) as index:
                (self.queries + index).store(code.constant(0.0))
            with code.loop(shape.group) as head, code.loop(self.num_tokens) as token, code.loop(shape.head_dim) as dim:
                value = (source + ((head * shape.head_dim + dim) * stride + token)).load()
                (self.queries + ((head * self.tile + token) * shape.head_dim + dim)).store(value)

    def _fold_page(self, position: Number, end: Number, window: Number) -> None:
        """A page's first `end` positions into the sums."""
        code, shape, operands, lanes = self.code, self.shape, self.operands, self.shape.lanes
        rows = page_rows(shape, operands, self.row, position // shape.page_size, self.kv_head)
        width = 2 * shape.head_dim
        with code.loop(end, step=lanes) as place, code.loop(shape.head_dim, step=lanes) as dim:
            block = [load_floats(rows + ((place + lane) * width + dim), lanes, shape.stored) for lane in range(lanes)]
            for lane, vector in enumerate(transposed(block)):
                (self.keys + ((dim + lane) * shape.page_size + place)).store(vector)
        num_queries = self.tile * shape.group
        columns = (end + (lanes - 1)) // lanes * lanes
        self._multiply(num_queries, shape.head_dim, self.queries, self.keys, shape.page_size, self.weights, columns)
        with code.loop(num_queries) as query:
            self._weigh(query, position, columns, window)
        values = rows + shape.head_dim
        self._multiply(num_queries, end, self.weights, values, width, self.sums, shape.head_dim)

    def _multiply(
        self, rows: int, depth: Number | int, left: Pointer, right: Pointer, stride: int, out: Pointer, columns: Number | int
    ) -> None:
        """[rows, depth] times [depth, columns], in blocks of columns; added to `out` where it is the sums."""
        code, shape, lanes = self.code, self.shape, self.shape.lanes
        adds = out is self.sums
        left_stride = shape.page_size if adds else shape.head_dim
        out_stride, stored = (shape.head_dim, shape.stored) if adds else (shape.page_size, "float32")
        most = 4 if lanes == 16 else 2
        vectors = next(count for count in (most, 2, 1) if (out_stride // lanes) % count == 0)
        with code.loop(columns, step=vectors * lanes) as column, code.loop(rows, step=_ROWS) as row:
            places = [[out + ((row + i) * out_stride + column + j * lanes) for j in range(vectors)] for i in range(_ROWS)]
            zero = code.constant(0.0, lanes=lanes)
            held = [[code.variable(place.load(lanes) if adds else zero) for place in line] for line in places]
            with code.loop(depth) as index:
                from_here = right + (index * stride + column)
                block = [load_floats(from_here + j * lanes, lanes, stored) for j in range(vectors)]
                for i in range(_ROWS):
                    factor = (left + ((row + i) * left_stride + index)).load().spread(lanes)
                    for j in range(vectors):
                        held[i][j].set(held[i][j].get() + factor * block[j])
            for place_line, held_line in zip(places, held, strict=True):
                for place, variable in zip(place_line, held_line, strict=True):
                    place.store(variable.get())

    def _weigh(self, query: Number, position: Number, columns: Number, window: Number) -> None:
        """Scores of one query made into weights, and what was summed so far shrunk to the new largest score."""
        code, shape, lanes = self.code, self.shape, self.shape.lanes
        scores, own = self.weights + query * shape.page_size, self.position + query % self.tile

        def score_at(column: Number) -> Number:
            place = code.counting(lanes) + (position + column)
            seen = (place < (own + 1)) & (place >= (own - window + 1))
            return seen.choose(capped((scores + column).load(lanes), shape, self.operands.cap), MASKED)

        places = self.best + query, self.total + query, self.sums + query * shape.head_dim
        weigh(shape, scores, 0, columns, *places, score_at)

    def _finish(self) -> None:
        code, shape, operands = self.code, self.shape, self.operands
        with code.loop(shape.group) as head, code.loop(self.num_tokens) as token:
            query = head * self.tile + token
            sink = (operands.sinks.data + (self.first_head + head)).load()
            factor = output_factor((self.best + query).load(), (self.total + query).load(), sink).spread(shape.lanes)
            index = (self.token + token) * operands.out.sizes[1] + self.first_head + head
            for dim in range(0, shape.head_dim, shape.lanes):
                value = (self.sums + (query * shape.head_dim + dim)).load(shape.lanes) * factor
                (operands.out.data + (index * shape.head_dim + dim)).store(value)
