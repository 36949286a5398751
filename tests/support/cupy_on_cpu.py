"""Emulation of CuPy on the CPU, as far as `codec.engines.cuda` and the tests use CuPy.

A stream is a list of work that runs when a caller waits for the stream. Memory that is no longer referenced returns to
its pool and is overwritten, so that a use after free shows: pinned memory immediately, device memory in stream order.
A captured stream records its work. Calls that CUDA's documentation names unsafe during capture invalidate the capture.

`tests/engines/test_cupy_backend.py` compares the names, parameters and types in this module with those of CuPy.

One file: it stands in for one package.
"""

import ctypes
import functools
import importlib.machinery
import itertools
import json
import sys
import types
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from codec.engines.cuda import cache, cupy_backend, devices
from codec.engines.cuda import library as kernel_library
from support.device import launch

GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # values of cudaStreamCaptureMode, for captures and for threads
_LEGACY = 1  # handle cudaStreamLegacy, an alias of stream 0
_MANY = 65_535  # CUDA's largest grid size in the second dimension


class Machine:
    """State of the emulated GPUs and their driver, shared by all threads."""

    def __init__(self, library: Any, capabilities: tuple[str, ...]) -> None:
        self.library, self.capabilities = library, capabilities
        # By stream: work that was submitted and has not run
        self.todo: dict[int, deque[Callable[[], Any]]] = defaultdict(deque)
        self.captured: dict[int, tuple[int, list[Callable[[], Any]]]] = {}  # captured streams: mode and recorded work
        self.broken = False  # True once a capture was invalidated
        self.mode = GLOBAL
        self.current = Stream.null
        self.stack = [Stream.null]
        self.free: dict[Any, list[Any]] = defaultdict(list)  # free blocks by pool and size in bytes
        self.functions: list[str] = []  # names of the kernels loaded so far; a function handle is an index

    def do(self, stream: int, work: Callable[[], Any]) -> None:
        """Append work to a stream; the work runs when a caller waits for the stream."""
        (self.captured[stream][1] if stream in self.captured else self.todo[_number(stream)]).append(work)

    def wait(self, stream: int, until: Callable[[], bool] = lambda: False) -> None:
        if stream in self.captured:
            self.broken = True
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported")
        todo = self.todo[_number(stream)]
        while todo and not until():
            todo.popleft()()

    def unsafe(self) -> None:
        """Invalidate captures, as CUDA does on an unsafe call, unless this thread's capture mode permits such calls."""
        if self.mode != RELAXED and any(mode != RELAXED for mode, _ in self.captured.values()):
            self.broken = True
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsafe")


machine: Machine


def _number(stream: int) -> int:
    return 0 if stream == _LEGACY else stream


class CUDARuntimeError(RuntimeError):
    pass


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self._stream, self._reached = 0, True

    def _reach(self) -> None:
        self._reached = True

    @property
    def done(self) -> bool:
        machine.unsafe()
        return self._reached

    def synchronize(self) -> None:
        machine.wait(self._stream, lambda: self._reached)


class Graph:
    _work: list[Callable[[], Any]]

    def launch(self, stream: "Stream | None" = None) -> None:
        for work in self._work:
            machine.do((stream or machine.current).ptr, work)


class Stream:
    ptr: int
    null: "Stream"
    _numbers = itertools.count(16)

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: Any = None
    ) -> None:
        self.ptr = 0 if null else next(self._numbers)

    @classmethod
    def from_external(cls, obj: Any) -> "Stream":
        version, number = obj.__cuda_stream__()
        assert (version, type(number)) == (0, int)
        stream = cls(null=True)
        stream.ptr = number
        return stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __enter__(self) -> "Stream":
        machine.stack.append(self)
        machine.current = self
        return self

    def __exit__(self, *args: object) -> None:
        machine.stack.pop()
        machine.current = machine.stack[-1]

    def use(self) -> "Stream":
        machine.current = self
        return self

    def synchronize(self) -> None:
        machine.wait(self.ptr)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event._stream, event._reached = self.ptr, False
        machine.do(self.ptr, event._reach)
        return event

    def wait_event(self, event: Event) -> None:
        machine.do(self.ptr, event.synchronize)

    def begin_capture(self, mode: int | None = None) -> None:
        assert self.ptr > _LEGACY
        machine.captured[self.ptr] = RELAXED if mode is None else mode, []
        machine.broken = False

    def end_capture(self) -> Graph:
        graph = Graph()
        _, graph._work = machine.captured.pop(self.ptr)
        if machine.broken:
            raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated")
        return graph

    def is_capturing(self) -> bool:
        """Return True if the stream is being captured. Raise on the default stream during a global capture."""
        if self.ptr <= _LEGACY and any(mode == GLOBAL for mode, _ in machine.captured.values()):
            raise CUDARuntimeError("cudaErrorStreamCaptureImplicit")
        return self.ptr in machine.captured


Stream.null = Stream(null=True)


def get_current_stream(device_id: int = -1) -> Stream:
    return machine.current


class Device:
    id: int

    def __init__(self, device: int | None = None) -> None:
        self.id = getDevice() if device is None else int(device)

    def __enter__(self) -> "Device":
        assert self.id == getDevice()  # the emulation cannot switch devices
        return self

    def __exit__(self, *args: object) -> None:
        pass

    @property
    def compute_capability(self) -> str:
        return machine.capabilities[self.id]


class _Pooled:
    """Memory that returns to its pool when freed. A pool is a stream's number, or None for pinned memory."""

    def __init__(self, memory: Any, pool: int | None) -> None:
        self._machine, self._memory, self._pool, self.ptr = machine, memory, pool, memory.ctypes.data

    def __del__(self) -> None:
        overwrite = functools.partial(self._memory.fill, 0xE5)
        if self._pool is None:
            overwrite()
        else:
            self._machine.todo[self._pool].append(overwrite)
        self._machine.free[self._pool, len(self._memory)].append(self._memory)


def _take(size: int, pool: int | None) -> _Pooled:
    """Return a free block of the pool, or allocate one if the pool has none of this size."""
    size = -(-size // 512) * 512
    free = machine.free[pool, size]
    if not free:
        machine.unsafe()
        memory = np.full(size + 512, 0xE5, np.uint8)
        free.append(memory[-memory.ctypes.data % 512 :][:size])
    return _Pooled(free.pop(), pool)


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self._owner = ptr, owner


class MemoryPointer:
    ptr: int

    def __init__(self, mem: Any, offset: int) -> None:
        self._mem, self.ptr = mem, mem.ptr + offset

    def __add__(self, y: int) -> "MemoryPointer":
        return MemoryPointer(self._mem, self.ptr - self._mem.ptr + y)


def alloc(size: int) -> MemoryPointer:
    return MemoryPointer(_take(size, _number(machine.current.ptr)), 0)


class PinnedMemoryPointer:
    ptr: int

    def __init__(self, mem: Any, offset: int) -> None:
        self._mem, self.ptr = mem, mem.ptr + offset


def alloc_pinned_memory(size: int) -> PinnedMemoryPointer:
    return PinnedMemoryPointer(_take(size, None), 0)


def getDevice() -> int:
    return 0


def getDeviceCount() -> int:
    return len(machine.capabilities)


def deviceGetAttribute(attrib: int, device: int) -> int:
    capability = machine.capabilities[device]
    return {16: 2, 75: int(capability[:-1]), 76: int(capability[-1])}[attrib]


def pointerGetAttributes(ptr: int) -> Any:
    return types.SimpleNamespace(device=0)


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    machine.do(stream, functools.partial(ctypes.memmove, dst, src, size))


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
    machine.do(stream, functools.partial(ctypes.memset, ptr, value, size))


_ARGUMENTS = {"reduce_rows": [ctypes.c_uint64, ctypes.c_uint32], "check_finite": [ctypes.c_uint64] * 3}


def launchKernel(
    f: int,
    grid_dim_x: int,
    grid_dim_y: int,
    grid_dim_z: int,
    block_dim_x: int,
    block_dim_y: int,
    block_dim_z: int,
    shared_mem_bytes: int,
    stream: int,
    kernel_params: int,
    extra: int,
) -> None:
    """Append a kernel to a stream. The kernel's arguments are copied before this function returns."""
    assert (grid_dim_z, block_dim_y, block_dim_z, shared_mem_bytes, extra) == (1, 1, 1, 0, 0)
    assert grid_dim_x > 0
    assert 0 < grid_dim_y <= _MANY
    kernel = machine.functions[f]
    kinds = _ARGUMENTS.get(kernel.split("<")[0], [ctypes.c_uint64])
    places = (ctypes.c_void_p * len(kinds)).from_address(kernel_params)
    args = [kind.from_address(at).value for kind, at in zip(kinds, places, strict=True)]
    args = [kind(value) for kind, value in zip(kinds, args, strict=True)]
    grid = grid_dim_x, grid_dim_y
    machine.do(stream, functools.partial(launch, machine.library, kernel, grid, block_dim_x, *args))


class Function:
    ptr: int
    module: "Module"

    def __init__(self, module: "Module", funcname: str) -> None:
        self.module, self.ptr = module, len(machine.functions)
        machine.functions.append(module._kernels[funcname])


class Module:
    def load(self, cubin: bytes) -> None:
        assert type(cubin) is bytes
        assert cubin.endswith(b"\0")
        self._kernels: dict[str, str] = json.loads(cubin[:-1])

    def get_function(self, name: str) -> Function:
        return Function(self, name)

    def get_global_var(self, name: str) -> int:
        assert self._kernels
        return ctypes.addressof(ctypes.c_uint64.in_dll(machine.library, name))


class NVRTCError(RuntimeError):
    pass


class _Compiler:
    """Emulation of NVRTC, whose machine code is a list of kernel names."""

    def __init__(self) -> None:
        self._programs: dict[int, list[str]] = {}

    def getVersion(self) -> tuple[int, int]:
        return 12, 9

    def createProgram(self, src: str, name: str, headers: Any, include_names: Any) -> int:
        self._programs[len(self._programs)] = []
        return len(self._programs) - 1

    def addNameExpression(self, prog: int, name: str) -> None:
        self._programs[prog].append(name)

    def compileProgram(self, prog: int, options: Any) -> None:
        assert {"-fmad=false", "-arch=sm_90"} <= set(options)

    def getLoweredName(self, prog: int, name: str) -> str:
        return f"_Z{name}"

    def getCUBIN(self, prog: int) -> bytes:
        return json.dumps({self.getLoweredName(prog, name): name for name in self._programs[prog]}).encode()

    def getProgramLog(self, prog: int) -> str:
        return ""

    def destroyProgram(self, prog: int) -> None:
        self._programs[prog].clear()


class ndarray:
    data: MemoryPointer
    device: Device
    dtype: Any
    flags: Any
    nbytes: int
    ndim: int
    shape: tuple[int, ...]

    def __init__(self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None) -> None:
        self.dtype = dtype = np.dtype(dtype)
        if dtype.isbuiltin != 1 and dtype.name != "bfloat16":
            raise ValueError(f"Unsupported dtype {dtype}")
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.ndim, self.nbytes = len(self.shape), dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))
        self.data, self.device = alloc(self.nbytes) if memptr is None else memptr, Device()
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.data.ptr)
        self._there = np.frombuffer(memory, dtype).reshape(self.shape)
        self.flags = self._there.flags

    def _part(self, seen: Any) -> "ndarray":
        return ndarray(seen.shape, seen.dtype, self.data + (seen.ctypes.data - self._there.ctypes.data))

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device.id

    def __getitem__(self, items: Any) -> "ndarray":
        return self._part(self._there[items])

    def view(self, dtype: Any) -> "ndarray":
        return self._part(self._there.view(dtype))

    def reshape(self, *shape: int) -> "ndarray":
        return self._part(self._there.reshape(*shape))

    def get(self) -> Any:
        machine.current.synchronize()
        return self._there.copy()

    def set(self, arr: Any) -> None:
        """Copy a host array to the device in the order of the current stream."""
        machine.do(machine.current.ptr, functools.partial(np.copyto, self._there, np.array(arr)))


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)


def array(obj: Any) -> ndarray:
    made = ndarray(obj.shape, obj.dtype)
    made.set(obj)
    return made


def ascontiguousarray(a: Any) -> ndarray:
    return a


def exchange(mode: Any) -> int:
    """Emulate cuThreadExchangeStreamCaptureMode of the driver."""
    mode._obj.value, machine.mode = machine.mode, mode._obj.value
    return 0


def _module(name: str, *members: Any, **more: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update({member.__name__: member for member in members} | more)
    return module


_RUNTIME = {
    "memcpyHostToDevice": 1,
    "memcpyDeviceToHost": 2,
    "memcpyDeviceToDevice": 3,
    "streamCaptureModeGlobal": GLOBAL,
    "streamCaptureModeThreadLocal": THREAD_LOCAL,
    "streamCaptureModeRelaxed": RELAXED,
}
_nvrtc = _Compiler()
_functions = deviceGetAttribute, getDevice, getDeviceCount, pointerGetAttributes, memcpyAsync, memsetAsync
runtime = _module("runtime", CUDARuntimeError, *_functions, **_RUNTIME)
driver = _module("driver", launchKernel)
nvrtc = _module("nvrtc", NVRTCError, *(getattr(_nvrtc, name) for name in dir(_nvrtc) if name[0] != "_"))
_classes = Device, Event, Graph, MemoryPointer, Module, PinnedMemoryPointer, Stream, UnownedMemory
_modules = {"runtime": runtime, "driver": driver, "nvrtc": nvrtc, "function": _module("function", Function)}
cuda = _module("cuda", *_classes, alloc, alloc_pinned_memory, get_current_stream, **_modules)
cupy = _module("cupy", ndarray, empty, array, ascontiguousarray, cuda=cuda, __version__="14.0")


def install(monkeypatch: Any, library: Any, capabilities: tuple[str, ...] = ("90",)) -> Machine:
    """Replace CuPy by this module, with GPUs of the given compute capabilities, until the test ends."""
    global machine
    machine = Machine(library, capabilities)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(devices, "backend", cupy_backend.CupyBackend())
    monkeypatch.setattr(cupy_backend, "_gpu", functools.cache(cupy_backend.Gpu))
    monkeypatch.setattr(
        cupy_backend, "_driver", lambda: types.SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    )
    monkeypatch.setattr(cache, "cache_folder", lambda: None)
    monkeypatch.setattr(kernel_library, "code_for", lambda arch: None)  # the package's machine code is for real GPUs
    return machine
