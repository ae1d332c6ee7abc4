"""From LLVM code to a function that XLA's CPU programs call: compiled here, handed to JAX by name, run by XLA's own threads.

A kernel is a function of a number, which of so many pieces of work it is to do, and of the arrays' addresses. Threads take
pieces until none is left: the caller's own, and as many of XLA's pool as are free. The caller waits for pieces that were
begun, never for a thread to begin, so that a full pool delays nothing. What the threads share outlives the call, since a late
one still looks at it.

Owns the layout of XLA's call frames (its C interface for foreign functions, version 0) and the host's vector width. Knows no
kernel.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import llvmlite.binding as llvm
from llvmlite import ir

from pallas_kernels.native.emit import ADDRESS, I1, I32, I64, Code, Number, Pointer

# Words of XLA_FFI_CallFrame, of the lists of arguments and results in it, of XLA_FFI_Buffer, and of XLA_FFI_Api.
_EXTENSION, _API, _CONTEXT, _STAGE, _ARGUMENTS, _RESULTS = 1, 2, 3, 4, 9, 14
_BUFFER_DATA, _BUFFER_SIZES = 3, 5
_VERSION, _DESTROY_ERROR, _SCHEDULE, _NUM_THREADS = 4, 8, 17, 18
# XLA_FFI_ExecutionStage_EXECUTE.
_EXECUTE = 3
# Words of a job: the next piece, pieces done, threads that still hold it, pieces in all, and then what the kernel reads.
_NEXT, _DONE, _HOLDERS, _COUNT, _VALUES = range(5)

TOKENS_LAST = (1, 2, 0)
"""How arrays of [T, heads, D] lie in memory as the model's products leave them, which have tokens last: major to minor."""


@functools.cache
def vector_lanes() -> int:
    """Floats in the widest vector of this host's processor."""
    features = llvm.get_host_cpu_features()
    return 16 if features.get("avx512f") else 8 if features.get("avx2") else 4


@dataclass(frozen=True, slots=True)
class ArrayArgument:
    """An argument or a result as a kernel sees it.

    Attributes:
        data: its first element; dimensions lie in their order, but where the call's layout says otherwise.
        sizes: of its dimensions.
    """

    data: Pointer
    sizes: list[Number]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A function of arrays, cut into pieces that threads do in any order.

    Attributes:
        name: of its own for each code that there may be; XLA's programs call it by this.
        arrays: element type and number of dimensions of each argument and then of each result.
        num_results: how many of them are results.
        num_pieces: from the arrays' sizes.
        piece: writes the code of one piece.
        last: writes what the caller does when all pieces are done.
    """

    name: str
    arrays: tuple[tuple[Any, int], ...]
    num_results: int
    num_pieces: Callable[[Code, list[ArrayArgument]], Number]
    piece: Callable[[Code, list[ArrayArgument], Number], None]
    last: Callable[[Code, list[ArrayArgument]], None] | None = None


_registered: dict[str, Any] = {}
_lock = threading.Lock()


def register(name: str, make: Callable[[], Kernel]) -> None:
    """Compile a kernel and hand it to JAX, if this process has not done so yet. It stays for as long as the process does."""
    with _lock:
        if name not in _registered:
            _registered[name] = _compiled(make())
            address = _registered[name].get_function_address(name)
            jax.ffi.register_ffi_target(name, _capsule(address, None, None), platform="cpu")


def assembly(kernel: Kernel) -> str:
    """What the host's processor runs, for the curious."""
    module, machine = _optimised(kernel)
    return machine.emit_assembly(module)


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _compiled(kernel: Kernel) -> Any:
    module, machine = _optimised(kernel)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def _optimised(kernel: Kernel) -> tuple[Any, Any]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True
    )
    module = llvm.parse_assembly(_written(kernel))
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return module, machine


def _written(kernel: Kernel) -> str:
    """The module's code: what a thread does, what the pool's threads call, and what XLA calls."""
    module = ir.Module(kernel.name)
    module.triple = llvm.get_default_triple()
    work = _write_work(module, kernel)
    _write_call(module, kernel, work, _write_task(module, kernel, work))
    return str(module)


def _write_work(module: Any, kernel: Kernel) -> Any:
    code = Code(module, f"{kernel.name}.work", ir.VoidType(), [ADDRESS])
    code.function.linkage = "internal"
    job = code.argument(0, I64)
    count, arrays = (job + _COUNT).load(), _arrays_of_job(code, kernel, job)
    piece = code.variable((job + _NEXT).add_atomically(1))
    with code.repeat(lambda: piece.get() < count):
        kernel.piece(code, arrays, piece.get())
        (job + _DONE).add_atomically(1)
        piece.set((job + _NEXT).add_atomically(1))
    code.returns()
    return code.function


def _write_task(module: Any, kernel: Kernel, work: Any) -> Any:
    code = Code(module, f"{kernel.name}.task", ir.VoidType(), [ADDRESS])
    code.function.linkage = "internal"
    job = code.argument(0, I64)
    code.builder.call(work, [job.address])
    _let_go(code, job)
    code.returns()
    return code.function


def _let_go(code: Code, job: Pointer) -> None:
    with code.when((job + _HOLDERS).add_atomically(-1).equals(1)):
        code.builder.call(code.external("free", ir.VoidType(), [ADDRESS]), [job.address])


def _write_call(module: Any, kernel: Kernel, work: Any, task: Any) -> None:
    code = Code(module, kernel.name, ADDRESS, [ADDRESS])
    frame = code.argument(0, I64)
    api = _pointer(frame + _API)
    extension = (frame + _EXTENSION).load()
    asked_for_version = extension.differs(0)
    with code.when(asked_for_version):
        _tell_version(_pointer(_pointer(frame + _EXTENSION) + 3), api)
    is_execution = (frame + _STAGE).as_kind(I32).load().equals(_EXECUTE)
    with code.when(asked_for_version.choose(code.constant(0, I1), is_execution)):
        arrays = _arrays_of_call(code, kernel, frame)
        count = kernel.num_pieces(code, arrays)
        helpers = (_num_threads(code, frame, api).least(count) - 1).most(0)
        job = _new_job(code, kernel, arrays, count, helpers)
        with code.loop(helpers):
            refused = _schedule(code, frame, api, task, job)
            with code.when(refused):
                (job + _HOLDERS).add_atomically(-1)
        code.builder.call(work, [job.address])
        pause = code.external("sched_yield", I32, [])
        with code.repeat(lambda: (job + _DONE).add_atomically(0) < count):
            code.builder.call(pause, [])
        if kernel.last is not None:
            kernel.last(code, arrays)
        _let_go(code, job)
    code.returns(Number(code, ir.Constant(ADDRESS, None)))


def _pointer(place: Pointer) -> Pointer:
    """The address that stands at another."""
    return Pointer(place.code, place.as_kind(ADDRESS).load().value, I64)


def _tell_version(metadata: Pointer, api: Pointer) -> None:
    """Fill XLA_FFI_Metadata: the version of the interface is the caller's own, and there are no traits and no state."""
    (metadata + 3).store((api + _VERSION).load())
    for word in (4, 5):
        (metadata + word).store(metadata.code.integer(0))


def _arrays_of_call(code: Code, kernel: Kernel, frame: Pointer) -> list[ArrayArgument]:
    arrays, num_arguments = [], len(kernel.arrays) - kernel.num_results
    for index, (element, rank) in enumerate(kernel.arrays):
        is_result = index >= num_arguments
        list_word, place = (_RESULTS, index - num_arguments) if is_result else (_ARGUMENTS, index)
        buffer = _pointer(_pointer(frame + list_word) + place)
        sizes = _pointer(buffer + _BUFFER_SIZES)
        data = _pointer(buffer + _BUFFER_DATA).as_kind(element)
        arrays.append(ArrayArgument(data, [(sizes + axis).load() for axis in range(rank)]))
    return arrays


def _new_job(code: Code, kernel: Kernel, arrays: list[ArrayArgument], count: Number, helpers: Number) -> Pointer:
    values: list[Pointer | Number] = []
    for array in arrays:
        values += [array.data, *array.sizes]
    allocate = code.external("malloc", ADDRESS, [I64])
    size = code.integer(8 * (_VALUES + len(values)))
    job = Pointer(code, code.builder.call(allocate, [size.value]), I64)
    for word, number in ((_NEXT, 0), (_DONE, 0), (_HOLDERS, helpers + 1), (_COUNT, count)):
        (job + word).store(code.integer(number))
    for word, value in enumerate(values, _VALUES):
        place = job + word
        if isinstance(value, Pointer):
            place.as_kind(ADDRESS).store(Number(code, value.address))
        else:
            place.store(value)
    return job


def _arrays_of_job(code: Code, kernel: Kernel, job: Pointer) -> list[ArrayArgument]:
    arrays, word = [], _VALUES
    for element, rank in kernel.arrays:
        sizes = [(job + word + 1 + axis).load() for axis in range(rank)]
        arrays.append(ArrayArgument(_pointer(job + word).as_kind(element), sizes))
        word += 1 + rank
    return arrays


def _num_threads(code: Code, frame: Pointer, api: Pointer) -> Number:
    """Threads of XLA's pool; none where the call has no pool."""
    number = code.array(I64, 1)
    number.store(code.integer(0))
    _call(code, frame, api, _NUM_THREADS, [number.address])
    return number.load()


def _schedule(code: Code, frame: Pointer, api: Pointer, task: Any, job: Pointer) -> Number:
    """Whether the pool refused to run the task."""
    return _call(code, frame, api, _SCHEDULE, [task, job.address])


def _call(code: Code, frame: Pointer, api: Pointer, word: int, arguments: list[Any]) -> Number:
    """Call a function of XLA's interface with the size of its arguments, the call's context and the rest of them."""
    block = _block(code, [(frame + _CONTEXT).as_kind(ADDRESS).load().value, *arguments])
    error = _invoke(code, api, word, block)
    failed = Number(code, code.builder.icmp_unsigned("!=", error.value, ir.Constant(ADDRESS, None)))
    with code.when(failed):
        _invoke(code, api, _DESTROY_ERROR, _block(code, [error.value]))
    return failed


def _block(code: Code, addresses: list[Any]) -> Pointer:
    size = 2 + len(addresses)
    block = code.array(I64, size)
    block.store(code.integer(8 * size))
    (block + 1).store(code.integer(0))
    for word, address in enumerate(addresses, 2):
        (block + word).as_kind(ADDRESS).store(Number(code, address))
    return block


def _invoke(code: Code, api: Pointer, word: int, block: Pointer) -> Number:
    return Number(code, code.call((api + word).load(), ADDRESS, block.address))
