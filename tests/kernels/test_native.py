"""The language that kernels for CPUs are written in, and how XLA calls them: what the host computes against numpy."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.native import foreign
from pallas_kernels.native.emit import F32, I32, I64, Code, LaneSums, Number, Pointer, exponential, fold, transposed
from pallas_kernels.native.foreign import ArrayArgument, Kernel

LANES = (4, 8, 16)


def compute(name: str, write: Callable[[Code, Pointer, Pointer], None], x: np.ndarray) -> np.ndarray:
    """What a kernel of one piece makes of an array: as many floats."""
    kernel = Kernel(
        name=name,
        arrays=((F32, 1), (F32, 1)),
        num_results=1,
        num_pieces=lambda code, arrays: code.integer(1),
        piece=lambda code, arrays, index: write(code, arrays[0].data, arrays[1].data),
    )
    foreign.register(name, lambda: kernel)
    found: np.ndarray = np.asarray(jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, jnp.float32))(x))
    return found


@pytest.mark.parametrize("lanes", LANES)
def test_exponentials(lanes: int) -> None:
    x = np.linspace(-87, 80, 4096, dtype=np.float32)

    def write(code: Code, source: Pointer, out: Pointer) -> None:
        with code.loop(x.size, step=lanes) as index:
            (out + index).store(exponential((source + index).load(lanes)))

    np.testing.assert_allclose(compute(f"test_exp_{lanes}", write, x), np.exp(x.astype(np.float64)), rtol=3e-7)


def test_exponentials_of_what_is_far_below_are_about_nothing() -> None:
    x = np.array([-88.0, -1e30, -np.inf, -300.0], np.float32)
    found = compute("test_exp_far", lambda code, source, out: out.store(exponential(source.load(4))), x)
    assert (found < 2e-38).all()


@pytest.mark.parametrize("lanes", LANES)
def test_sums_of_lanes_come_in_order(lanes: int) -> None:
    x = np.random.default_rng(0).standard_normal(lanes * lanes).astype(np.float32)

    def write(code: Code, source: Pointer, out: Pointer) -> None:
        sums = LaneSums()
        for row in range(lanes):
            sums.put((source + row * lanes).load(lanes))
        out.store(sums.total())

    found = compute(f"test_sums_{lanes}", write, x)[:lanes]
    np.testing.assert_allclose(found, x.reshape(lanes, lanes).sum(axis=1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lanes", LANES)
def test_transposes(lanes: int) -> None:
    x = np.arange(lanes * lanes, dtype=np.float32)

    def write(code: Code, source: Pointer, out: Pointer) -> None:
        rows = [(source + row * lanes).load(lanes) for row in range(lanes)]
        for row, vector in enumerate(transposed(rows)):
            (out + row * lanes).store(vector)

    np.testing.assert_array_equal(compute(f"test_transpose_{lanes}", write, x), x.reshape(lanes, lanes).T.ravel())


@pytest.mark.parametrize("lanes", LANES)
def test_folds(lanes: int) -> None:
    x = np.random.default_rng(1).permutation(lanes).astype(np.float32)

    def write(code: Code, source: Pointer, out: Pointer) -> None:
        out.store(fold(source.load(lanes), Number.most))
        (out + 1).store(fold(source.load(lanes), Number.__add__))

    found = compute(f"test_fold_{lanes}", write, x)
    assert found[:2].tolist() == [lanes - 1, sum(range(lanes))]


# --- pieces and threads -----------------------------------------------------------------------------------------------

NUM_PIECES = 500


def _piece(code: Code, arrays: list[ArrayArgument], index: Number) -> None:
    """Counts the piece, atomically, and works for a while that differs by piece."""
    rounds, counts = arrays
    work = code.variable(code.integer(0))
    with code.loop((rounds.data + index).load().to_int(I64)) as number:
        work.set(work.get() + number % 7)
    with code.when(work.get() >= 0):
        (counts.data + index).add_atomically(1)


def _clear_and_count(code: Code, arrays: list[ArrayArgument]) -> Number:
    with code.loop(arrays[0].sizes[0]) as index:
        (arrays[1].data + index).store(code.integer(0, I32))
    return arrays[0].sizes[0]


def _add_hundred(code: Code, arrays: list[ArrayArgument]) -> None:
    with code.loop(arrays[0].sizes[0]) as index:
        place = arrays[1].data + index
        place.store(place.load() + 100)


def test_each_piece_is_done_once_and_all_before_the_last_word() -> None:
    """Under many calls at once, so that threads of the pool come late or never."""
    name = "test_pieces"
    arrays = ((I32, 1), (I32, 1))
    kernel = Kernel(
        name=name, arrays=arrays, num_results=1, num_pieces=_clear_and_count, piece=_piece, last=_add_hundred
    )  # fmt: skip
    foreign.register(name, lambda: kernel)
    call = jax.jit(jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((NUM_PIECES,), jnp.int32)))
    rounds = jnp.asarray(np.random.default_rng(0).integers(0, 2000, NUM_PIECES), jnp.int32)

    def many(_: int) -> set[int]:
        return set(np.concatenate([np.asarray(call(rounds)) for _ in range(100)]).tolist())

    with ThreadPoolExecutor(8) as threads:
        assert set().union(*threads.map(many, range(8))) == {101}


def test_no_pieces_are_no_work() -> None:
    name = "test_no_pieces"
    kernel = Kernel(
        name=name, arrays=((I32, 1), (I32, 1)), num_results=1, num_pieces=lambda code, arrays: code.integer(0), piece=_piece,
        last=lambda code, arrays: arrays[1].data.store(code.integer(7, I32)),
    )  # fmt: skip
    foreign.register(name, lambda: kernel)
    found = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((1,), jnp.int32))(jnp.zeros(1, jnp.int32))
    assert found.tolist() == [7]


def test_a_kernel_is_compiled_once() -> None:
    made = []

    def make() -> Kernel:
        made.append(1)
        return Kernel(
            name="test_once", arrays=((I32, 1),), num_results=1,
            num_pieces=lambda code, arrays: code.integer(0), piece=lambda *_: None,
        )  # fmt: skip

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: foreign.register("test_once", make), range(8)))
    assert made == [1]


def test_assembly_is_of_this_hosts_processor() -> None:
    kernel = Kernel(
        name="test_assembly", arrays=((F32, 1), (F32, 1)), num_results=1, num_pieces=lambda code, arrays: code.integer(1),
        piece=lambda code, arrays, index: arrays[1].data.store(arrays[0].data.load(foreign.vector_lanes()) * 2.0),
    )  # fmt: skip
    assert "test_assembly" in foreign.assembly(kernel)
