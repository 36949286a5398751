# pyright: basic
# ruff: noqa: D102 - what methods do is said by Device
"""GPUs through CuPy: memory from its pools, kernels by the driver."""

import ctypes
import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from codec._c import pool
from codec._c.library import ITEMSIZE, ffi
from codec.engines.cuda import kernels
from codec.engines.cuda.kernels import FILE_OF, FILES
from codec.errors import EngineError
from codec.tensors.view import TensorView, is_torch, view

_PINNED = 1 << 16  # bytes: longer copies from memory that can be paged wait for the stream
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
# cudaDevAttrMultiProcessorCount, ComputeCapabilityMajor and Minor, which CuPy does not name
_PROCESSORS, _MAJOR, _MINOR = 16, 75, 76
_OLDEST = 8  # since then a warp adds and ors by one instruction
_INSTALL = "pip install 'tensor-codec[cuda12]', or [cuda13] beside a driver of CUDA 13"


def _cupy() -> Any:
    return importlib.import_module("cupy")


@functools.cache
def _driver() -> Any:
    """For what CuPy does not pass on."""
    return ctypes.CDLL("libcuda.so.1")


@contextmanager
def _relaxed() -> Generator[None]:
    """Let this thread ask for memory while a stream is captured, by whoever: it is kept, and no part of the graph."""
    mode = ctypes.c_int(_RELAXED)
    exchange = _driver().cuThreadExchangeStreamCaptureMode
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def _too_old(cupy: Any, index: int) -> str | None:
    """Why kernels cannot run on a GPU, or None. It is not made the current one, which would take memory there."""
    major, minor = (cupy.cuda.runtime.deviceGetAttribute(which, index) for which in (_MAJOR, _MINOR))
    if major >= _OLDEST:
        return None
    return f"cuda:{index} has compute capability {major}.{minor}, and 8.0 or more is needed: A100, RTX 30 or later"


class _Number:
    """A stream of another library's, as CuPy takes it."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


class Gpu:
    """A :class:`codec.engines.cuda.devices.Device`."""

    def __init__(self, index: int) -> None:
        self._cupy = _cupy()
        if said := _too_old(self._cupy, index):
            raise EngineError(said)
        self._device = self._cupy.cuda.Device(index)
        self.name = f"cuda:{index}"
        self.processors = self._cupy.cuda.runtime.deviceGetAttribute(_PROCESSORS, index)
        self._arch = f"sm_{self._device.compute_capability}"
        self._functions: dict[str, Any] = {}
        self._numbers: dict[tuple[str, str], tuple[int, ...]] = {}
        self._sent: list[list[Any]] = []  # memory that is copied from, and the event after which it is free
        self._sending = threading.Lock()

    @contextmanager
    def on(self, stream: int) -> Generator[None]:
        with self._device:
            before = self._stream()  # CuPy's own `with` would not go back to one that was chosen by use()
            now = self._other(stream).use()
            try:
                with _relaxed() if now.is_capturing() else nullcontext():
                    yield
            finally:
                before.use()

    def _stream(self) -> Any:
        return self._cupy.cuda.get_current_stream()

    def stream(self) -> int:
        with self._device:
            return self._stream().ptr

    def _other(self, stream: int) -> Any:
        return self._cupy.cuda.Stream.from_external(_Number(stream)) if stream else self._cupy.cuda.Stream.null

    def wait_for(self, stream: int) -> None:
        self._stream().wait_event(self._other(stream).record())

    def hold(self, stream: int) -> None:
        self._other(stream).wait_event(self._stream().record())

    def allocate(self, nbytes: int) -> tuple[int, object]:
        memory = self._cupy.cuda.alloc(nbytes)
        return memory.ptr, memory

    def upload(self, to: int, data: Any) -> object:
        self._forget()
        runtime, stream, nbytes = self._cupy.cuda.runtime, self._stream(), len(data)
        kept, at, capturing = data, _address(data), stream.is_capturing()
        if capturing or nbytes <= _PINNED:
            kept = self._cupy.cuda.alloc_pinned_memory(nbytes)
            ctypes.memmove(kept.ptr, at, nbytes)
            at = kept.ptr
        sent = [kept, None]
        if not capturing:  # a graph's memory is kept by who has the graph
            with self._sending:
                self._sent.append(sent)
        try:
            runtime.memcpyAsync(to, at, nbytes, runtime.memcpyHostToDevice, stream.ptr)
        except Exception:
            self._forget(sent)
            raise
        if not capturing:
            sent[1] = stream.record()
        return kept

    def _forget(self, failed: list[Any] | None = None) -> None:
        """Copies that are done, and one that was not begun."""
        with self._sending:
            self._sent = [s for s in self._sent if s is not failed and (s[1] is None or not s[1].done)]

    def download(self, at: int, nbytes: int) -> bytearray:
        runtime, data, stream = self._cupy.cuda.runtime, bytearray(nbytes), self._stream()
        if nbytes:
            runtime.memcpyAsync(_address(data), at, nbytes, runtime.memcpyDeviceToHost, stream.ptr)
        stream.synchronize()
        return data

    def copy(self, to: int, at: int, nbytes: int) -> None:
        runtime = self._cupy.cuda.runtime
        if nbytes:
            runtime.memcpyAsync(to, at, nbytes, runtime.memcpyDeviceToDevice, self._stream().ptr)

    def clear(self, at: int, nbytes: int) -> None:
        if nbytes:
            self._cupy.cuda.runtime.memsetAsync(at, 0, nbytes, self._stream().ptr)

    def prepare(self, wanted: Iterable[str]) -> None:
        todo = [kernel for kernel in wanted if kernel not in self._functions]
        if not todo:
            return
        for code in compile_all(todo, self._arch):
            module = self._cupy.cuda.Module()
            module.load(code.image)
            for name, lowered in code.names.items():
                self._functions[name] = module.get_function(lowered)

    def numbers(self, kernel: str, name: str, count: int) -> tuple[int, ...]:
        self.prepare([kernel])
        if (kernel, name) not in self._numbers:
            module = self._functions[kernel].module
            data = self.download(module.get_global_var(name), 8 * count)
            self._numbers[kernel, name] = tuple(np.frombuffer(data, np.uint64).tolist())
        return self._numbers[kernel, name]

    def launch(self, kernel: str, grid: tuple[int, int], *args: Any) -> None:
        self.prepare([kernel])
        pointers = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
        threads = FILES[FILE_OF[kernel]].threads
        function, stream = self._functions[kernel], self._stream()
        at = ctypes.addressof(pointers)
        self._cupy.cuda.driver.launchKernel(function.ptr, *grid, 1, threads, 1, 1, 0, stream.ptr, at, 0)

    def empty(self, dtype: str, shape: tuple[int, ...], like: Any) -> tuple[Any, TensorView]:
        if is_torch(like):
            torch: Any = sys.modules["torch"]
            t = torch.empty(shape, dtype=getattr(torch, dtype), device=self.name)
            return t, view(t)
        bits = f"uint{8 * ITEMSIZE[dtype]}"
        asked = getattr(like, "dtype", None)
        try:
            array = self._cupy.empty(shape, bits if asked == bits else _numpy_dtype(dtype))
        except (TypeError, ValueError) as e:
            raise EngineError(
                f"CuPy has no {dtype}: pass like= a torch tensor, or out= or like= an array of {bits} for the bits"
            ) from e
        return array, view(array)._replace(dtype=dtype)

    def bytes_of(self, v: TensorView, nbytes: int) -> Any:
        owner: Any = v.owner
        if is_torch(owner):
            return owner.reshape(-1).view(sys.modules["torch"].uint8)[:nbytes]
        memory = self._cupy.cuda.UnownedMemory(v.address, max(v.nbytes, 1), owner, self._device.id)
        return self._cupy.ndarray(nbytes, np.uint8, self._cupy.cuda.MemoryPointer(memory, 0))


def _numpy_dtype(dtype: str) -> Any:
    if hasattr(np, dtype):
        return np.dtype(dtype)
    if importlib.util.find_spec("ml_dtypes") is None:
        raise TypeError(dtype)
    return np.dtype(getattr(importlib.import_module("ml_dtypes"), dtype))


def compile_all(wanted: list[str], arch: str) -> list[kernels.Code]:
    """Of the file of each kernel what is needed for it, several at a time."""

    def task(i: int, _: int) -> kernels.Code:
        file = FILE_OF[wanted[i]]
        return kernels.compiled(file, FILES[file].alone(wanted[i]), arch)

    return pool.run(task, len(wanted), len(wanted))


def _address(data: Any) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(data)))


@functools.cache
def _gpu(index: int) -> Gpu:
    return Gpu(index)


class CupyBackend:
    """A :class:`codec.engines.cuda.devices.Backend`."""

    def why_not(self) -> str | None:
        """Why no GPU can be used, or None."""
        if importlib.util.find_spec("cupy") is None:
            return f"CuPy is not installed: {_INSTALL}"
        try:
            cupy = _cupy()
        except ImportError as e:
            return f"CuPy cannot be imported: {e}"
        if not hasattr(cupy.cuda.Stream, "from_external"):
            return f"CuPy {cupy.__version__} is too old: {_INSTALL}"
        said: str | None = "there is no GPU"
        try:
            for i in range(cupy.cuda.runtime.getDeviceCount()):
                said = _too_old(cupy, i)
                if said is None:
                    break
            return said
        except Exception as e:  # of CuPy's own kinds
            return f"there is no GPU that can be used: {e}"

    def find(self, v: TensorView) -> Gpu:
        """The one on which a tensor lies."""
        index = v.device.partition(":")[2]
        if index:
            return _gpu(int(index))
        return _gpu(_cupy().cuda.runtime.pointerGetAttributes(v.address).device) if v.nbytes else self.current()

    def current(self) -> Gpu:
        """CuPy's current one."""
        return _gpu(_cupy().cuda.runtime.getDevice())
