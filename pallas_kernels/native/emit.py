"""A small language for loops over vectors, which writes LLVM's intermediate code: what kernels for CPUs are made of.

A `Code` is a function under construction, a `Number` an integer, a float or a vector of either in it, with Python's
operators. A `Pointer` reads and writes memory by elements; a `Variable` is what changes from one round of a loop to the next.
Everything is as wide as the kernel says: no loop is left for a compiler to vectorise as it sees fit.

Owns no kernel, and knows neither JAX nor how a function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
ADDRESS = ir.PointerType()

# Sums may be reordered and products joined with them; infinities and NaN stay what they are.
_FAST = ("reassoc", "contract", "nsz")


def vector(element: Any, lanes: int) -> Any:
    """The type of `lanes` elements; of one, the element's own."""
    return element if lanes == 1 else ir.VectorType(element, lanes)


@dataclass(frozen=True, slots=True)
class Number:
    """A value. Operators take Python numbers too, and numbers of one lane beside vectors."""

    code: Code
    value: Any

    @property
    def is_float(self) -> bool:
        return getattr(self.value.type, "element", self.value.type) == F32

    @property
    def lanes(self) -> int:
        return getattr(self.value.type, "count", 1)

    def __add__(self, other: Number | float) -> Number:
        return self._both(other, "fadd", "add")

    __radd__ = __add__

    def __sub__(self, other: Number | float) -> Number:
        return self._both(other, "fsub", "sub")

    def __mul__(self, other: Number | float) -> Number:
        return self._both(other, "fmul", "mul")

    __rmul__ = __mul__

    def __truediv__(self, other: Number | float) -> Number:
        return self._both(other, "fdiv", "")

    def __floordiv__(self, other: Number | int) -> Number:
        """Of integers, rounded towards zero."""
        return self._both(other, "", "sdiv")

    def __mod__(self, other: Number | int) -> Number:
        return self._both(other, "", "srem")

    def __lshift__(self, other: int) -> Number:
        return self._both(other, "", "shl")

    def __and__(self, other: Number | int) -> Number:
        return self._both(other, "", "and_")

    def __or__(self, other: Number | int) -> Number:
        return self._both(other, "", "or_")

    def __lt__(self, other: Number | float) -> Number:
        return self._compare("<", other)

    def __ge__(self, other: Number | float) -> Number:
        return self._compare(">=", other)

    def equals(self, other: Number | float) -> Number:
        return self._compare("==", other)

    def differs(self, other: Number | int) -> Number:
        return self._compare("!=", other)

    def least(self, other: Number | float) -> Number:
        """The smaller of two."""
        return (self < other).choose(self, other)

    def most(self, other: Number | float) -> Number:
        """The larger of two."""
        return (self < other).choose(other, self)

    def choose(self, yes: Number | float, no: Number | float) -> Number:
        """`yes` where this truth value is true, `no` elsewhere."""
        like = yes if isinstance(yes, Number) else no
        assert isinstance(like, Number)
        code = self.code
        return Number(code, code.builder.select(self.value, code.like(yes, like).value, code.like(no, like).value))

    def spread(self, lanes: int) -> Number:
        """This number in every lane of a vector."""
        if self.lanes == lanes:
            return self
        builder, kind = self.code.builder, vector(self.value.type, lanes)
        first = builder.insert_element(ir.Constant(kind, ir.Undefined), self.value, ir.Constant(I32, 0))
        return self.code.shuffled(Number(self.code, first), None, [0] * lanes)

    def to_float(self) -> Number:
        """Signed integers as floats."""
        return Number(self.code, self.code.builder.sitofp(self.value, vector(F32, self.lanes)))

    def to_int(self, kind: Any) -> Number:
        """Floats cut off, or integers of fewer bits with their sign."""
        kind = vector(kind, self.lanes)
        builder = self.code.builder
        return Number(self.code, builder.fptosi(self.value, kind) if self.is_float else builder.sext(self.value, kind))

    def unsigned(self, kind: Any) -> Number:
        """Integers of fewer bits without a sign."""
        return Number(self.code, self.code.builder.zext(self.value, vector(kind, self.lanes)))

    def bits(self, kind: Any) -> Number:
        """The same bits, as another kind of as many."""
        return Number(self.code, self.code.builder.bitcast(self.value, vector(kind, self.lanes)))

    def _both(self, other: Number | float, of_floats: str, of_integers: str) -> Number:
        code, left = self.code, self
        if isinstance(other, Number) and other.lanes > left.lanes:
            left = left.spread(other.lanes)
        right = code.like(other, left)
        if left.is_float:
            return Number(code, getattr(code.builder, of_floats)(left.value, right.value, flags=_FAST))
        return Number(code, getattr(code.builder, of_integers)(left.value, right.value))

    def _compare(self, how: str, other: Number | float) -> Number:
        builder, right = self.code.builder, self.code.like(other, self)
        compare = builder.fcmp_ordered if self.is_float else builder.icmp_signed
        return Number(self.code, compare(how, self.value, right.value))


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address of elements of one kind."""

    code: Code
    address: Any
    element: Any

    def __add__(self, elements: Number | int) -> Pointer:
        index = self.code.integer(elements)
        return Pointer(self.code, self.code.builder.gep(self.address, [index.value], source_etype=self.element), self.element)

    def load(self, lanes: int = 1) -> Number:
        """Elements from here on."""
        value = self.code.builder.load(self.address, typ=vector(self.element, lanes), align=_size(self.element))
        return Number(self.code, value)

    def store(self, number: Number) -> None:
        self.code.builder.store(number.value, self.address, align=_size(self.element))

    def as_kind(self, element: Any) -> Pointer:
        """The same address, of elements of another kind."""
        return Pointer(self.code, self.address, element)

    def add_atomically(self, by: int) -> Number:
        """Add to the integer here, in one order that all threads see, and return what it was before."""
        amount = ir.Constant(self.element, by)
        return Number(self.code, self.code.builder.atomic_rmw("add", self.address, amount, "seq_cst"))


@dataclass(frozen=True, slots=True)
class Variable:
    """A place for a value that changes. LLVM keeps it in a register."""

    code: Code
    place: Any
    kind: Any

    def get(self) -> Number:
        return Number(self.code, self.code.builder.load(self.place, typ=self.kind))

    def set(self, number: Number) -> None:
        self.code.builder.store(number.value, self.place)


class Code:
    """A function under construction.

    Args:
        module: that it becomes part of.
        result, arguments: types.
    """

    def __init__(self, module: Any, name: str, result: Any, arguments: list[Any]) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(result, arguments), name)
        self._entry = ir.IRBuilder(self.function.append_basic_block("entry"))
        body = self.function.append_basic_block("body")
        self.builder = ir.IRBuilder(body)

    def argument(self, index: int, element: Any) -> Pointer:
        """An argument that is an address."""
        return Pointer(self, self.function.args[index], element)

    def integer(self, number: Number | int, kind: Any = I64) -> Number:
        return number if isinstance(number, Number) else Number(self, ir.Constant(kind, number))

    def like(self, number: Number | float, other: Number) -> Number:
        """A number of the kind and lanes of another."""
        if isinstance(number, Number):
            return number.spread(other.lanes)
        element = getattr(other.value.type, "element", other.value.type)
        return self.constant(number, element, other.lanes)

    def constant(self, number: float, element: Any = F32, lanes: int = 1) -> Number:
        """The same number in each lane."""
        one = ir.Constant(element, number)
        return Number(self, one if lanes == 1 else ir.Constant(vector(element, lanes), [one] * lanes))

    def counting(self, lanes: int) -> Number:
        """0, 1, 2 and so on."""
        return Number(self, ir.Constant(vector(I64, lanes), [ir.Constant(I64, lane) for lane in range(lanes)]))

    def variable(self, initial: Number) -> Variable:
        place = self._entry.alloca(initial.value.type)
        variable = Variable(self, place, initial.value.type)
        variable.set(initial)
        return variable

    def array(self, element: Any, size: int) -> Pointer:
        """Room for `size` elements while the function runs."""
        place = self._entry.alloca(ir.ArrayType(element, size))
        place.align = 64
        place.type = ADDRESS  # llvmlite still gives it a type of what it points to
        return Pointer(self, place, element)

    @contextmanager
    def loop(self, end: Number | int, start: Number | int = 0, step: int = 1) -> Iterator[Number]:
        """Rounds with a counter from `start` on, while it is under `end`."""
        counter = self.variable(self.integer(start))
        with self.repeat(lambda: counter.get() < end):
            now = counter.get()
            yield now
            counter.set(now + step)

    @contextmanager
    def repeat(self, going_on: Callable[[], Number]) -> Iterator[None]:
        """Rounds while `going_on` is true, which is asked before each."""
        head, body, after = (self.function.append_basic_block(name) for name in ("while", "do", "done"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch(going_on().value, body, after)
        self.builder.position_at_end(body)
        yield
        self.builder.branch(head)
        self.builder.position_at_end(after)

    @contextmanager
    def when(self, true: Number) -> Iterator[None]:
        with self.builder.if_then(true.value):
            yield

    def shuffled(self, left: Number, right: Number | None, lanes: list[int]) -> Number:
        """Those lanes of two vectors, the second one's counted on from the first one's."""
        other = ir.Constant(left.value.type, ir.Undefined) if right is None else right.value
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), [ir.Constant(I32, lane) for lane in lanes])
        return Number(self, self.builder.shuffle_vector(left.value, other, mask))

    def intrinsic(self, name: str, *arguments: Number) -> Number:
        """One of LLVM's functions of vectors, of the kind of its first argument."""
        kind = arguments[0].value.type
        suffix = f"v{arguments[0].lanes}f32" if arguments[0].lanes > 1 else "f32"
        function = self.external(f"llvm.{name}.{suffix}", kind, [argument.value.type for argument in arguments])
        return Number(self, self.builder.call(function, [argument.value for argument in arguments]))

    def external(self, name: str, result: Any, arguments: list[Any]) -> Any:
        """A function defined elsewhere."""
        found = self.module.globals.get(name)
        return found or ir.Function(self.module, ir.FunctionType(result, arguments), name)

    def call(self, place: Number, result: Any, *arguments: Any) -> Any:
        """Call the function whose address is this integer."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(self.builder.inttoptr(place.value, kind.as_pointer()), arguments)

    def prefetch(self, pointer: Pointer) -> None:
        """Have a line of memory brought near that will be read soon."""
        function = self.external("llvm.prefetch.p0", ir.VoidType(), [ADDRESS, I32, I32, I32])
        self.builder.call(function, [pointer.address, *(ir.Constant(I32, value) for value in (0, 3, 1))])

    def keep_order(self) -> None:
        """Have LLVM leave what reads memory before this before it, and what reads after after. No instruction of its own."""
        self.builder.fence("seq_cst", targetscope="singlethread")

    def returns(self, value: Number | None = None) -> None:
        """The function's end."""
        if value is None:
            self.builder.ret_void()
        else:
            self.builder.ret(value.value)
        self._entry.branch(self.function.basic_blocks[1])


def _size(element: Any) -> int:
    return 8 if isinstance(element, ir.PointerType) else 4 if element == F32 else max(1, element.width // 8)


@dataclass(slots=True)
class LaneSums:
    """As many vectors as each has lanes, put in one by one: one vector of their sums, in order.

    Two neighbours are folded into one vector of sums of neighbouring lanes, and the results again, which takes a shuffle or
    two for each vector where summing it alone takes one for each halving. No more wait to be folded than there are halvings.
    """

    waiting: list[tuple[int, Number]] = field(default_factory=list)

    def put(self, number: Number) -> None:
        level = 0
        while self.waiting and self.waiting[-1][0] == level:
            number = _folded(self.waiting.pop()[1], number)
            level += 1
        self.waiting.append((level, number))

    def total(self) -> Number:
        ((_, number),) = self.waiting
        return number


def _folded(left: Number, right: Number) -> Number:
    code, lanes = left.code, left.lanes
    even, odd = (list(range(first, 2 * lanes, 2)) for first in (0, 1))
    return code.shuffled(left, right, even) + code.shuffled(left, right, odd)


def transposed(vectors: list[Number]) -> list[Number]:
    """As many vectors as each has lanes, with lanes and vectors exchanged: blocks of 1, 2, 4 and so on lanes change places."""
    code, lanes = vectors[0].code, len(vectors)
    size = 1
    while size < lanes:
        low = [lane if lane & size == 0 else lanes + lane - size for lane in range(lanes)]
        high = [lane + size if lane & size == 0 else lanes + lane for lane in range(lanes)]
        found = list(vectors)
        for index in range(lanes):
            if index & size == 0:
                pair = vectors[index], vectors[index + size]
                found[index], found[index + size] = code.shuffled(*pair, low), code.shuffled(*pair, high)
        vectors, size = found, 2 * size
    return vectors


def fold(number: Number, join: Callable[[Number, Number], Number]) -> Number:
    """One number of all lanes of a vector, by halves."""
    code, lanes = number.code, number.lanes
    while lanes > 1:
        lanes //= 2
        number = join(
            code.shuffled(number, None, list(range(lanes))), code.shuffled(number, None, list(range(lanes, 2 * lanes)))
        )
    return Number(code, code.builder.extract_element(number.value, ir.Constant(I32, 0)))


def exponential(x: Number) -> Number:
    """e to the power of floats up to 80, to a relative error of 2e-7; 0 below -87.

    As in Cephes' expf (Moshier, 1992): a power of two and a polynomial of what is left of the exponent.
    """
    code = x.code
    x = x.most(-87.0)
    power = code.intrinsic("floor", x * 1.44269504 + 0.5)
    rest = x - power * 0.693359375
    rest = rest + power * 2.12194440e-4
    series = code.like(1.9875691500e-4, x)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        series = series * rest + coefficient
    value = series * (rest * rest) + rest + 1.0
    return value * ((power.to_int(I32) + 127) << 23).bits(F32)
