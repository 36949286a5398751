# pyright: basic
# ruff: noqa: D102 - Device documents the methods
"""GPU backend on CuPy: memory comes from the pools of CuPy or torch; kernels are launched with the CUDA driver."""

import ctypes
import functools
import importlib
import importlib.util
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from codec._c.library import ITEMSIZE, ffi
from codec.engines.cuda import kernels
from codec.engines.cuda.kernels import KERNELS
from codec.errors import EngineError
from codec.tensors.view import TensorView, is_torch, view

_PINNED = 1 << 16  # maximum bytes of an upload from pinned memory; the host waits during larger ones
_RELAXED = 2  # value of CU_STREAM_CAPTURE_MODE_RELAXED
# cudaDevAttrMultiProcessorCount, ComputeCapabilityMajor and Minor, which CuPy does not name
_PROCESSORS, _MAJOR, _MINOR = 16, 75, 76
_OLDEST = 8  # minimum major compute capability: the first with single-instruction warp reductions
_INSTALL = "pip install 'tensor-codec[cuda12]', or [cuda13] beside a driver of CUDA 13"


def _cupy() -> Any:
    return importlib.import_module("cupy")


@functools.cache
def _driver() -> Any:
    """Return the CUDA driver, for functions that CuPy does not expose."""
    return ctypes.CDLL("libcuda.so.1")


@contextmanager
def _relaxed() -> Generator[None]:
    """Context in which this thread may allocate memory while any thread captures a stream.

    The memory does not belong to the captured graph: the owner of the memory must keep it alive.
    """
    mode = ctypes.c_int(_RELAXED)
    exchange = _driver().cuThreadExchangeStreamCaptureMode
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def _too_old(cupy: Any, index: int) -> str | None:
    """Return why kernels cannot run on a GPU, or None if they can.

    The GPU is not made current, because that would allocate memory on it.
    """
    major, minor = (cupy.cuda.runtime.deviceGetAttribute(which, index) for which in (_MAJOR, _MINOR))
    if major >= _OLDEST:
        return None
    return f"cuda:{index} has compute capability {major}.{minor}, but at least 8.0 is needed: A100, RTX 30 or later"


class _ForeignStream:
    """Stream of another library, with the interface through which CuPy accepts foreign streams."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


class Gpu:
    """GPU of CuPy: implements :class:`codec.engines.cuda.devices.Device`."""

    def __init__(self, index: int) -> None:
        self._cupy = _cupy()
        if reason := _too_old(self._cupy, index):
            raise EngineError(reason)
        self._device = self._cupy.cuda.Device(index)
        self.name = f"cuda:{index}"
        self.processors = self._cupy.cuda.runtime.deviceGetAttribute(_PROCESSORS, index)
        self._arch = f"sm_{self._device.compute_capability}"
        self._functions: dict[str, Any] = {}
        self._now = threading.local()  # fields during `on`: `stream`, and bool `captured`
        self._constants: dict[tuple[str, str, int], tuple[int, ...]] = {}
        self._sent = deque[list[Any]]()  # [source, event or None] of uploads in flight; the event marks completion
        self._sending = threading.Lock()

    @contextmanager
    def on(self, stream: int) -> Generator[None]:
        with self._device:
            before = self._cupy.cuda.get_current_stream()  # `with stream:` would not restore a stream set by use()
            outer, now = dict(vars(self._now)), self._other(stream)
            captured = self._captures(now)
            now.use()
            vars(self._now).update(stream=now, captured=captured)
            try:
                with _relaxed() if captured else nullcontext():
                    yield
            finally:
                vars(self._now).clear()
                vars(self._now).update(outer)
                before.use()

    def _captures(self, stream: Any) -> bool:
        """Return True if a stream is being captured; raise EngineError if another capture forbids the query."""
        try:
            return stream.is_capturing()
        except self._cupy.cuda.runtime.CUDARuntimeError as e:
            raise EngineError(
                f"{self.name}: the default stream cannot be used while another stream is captured in global mode "
                f"({e}): make the captured stream the current one, or capture in mode thread_local or relaxed"
            ) from e

    def _stream(self) -> Any:
        return self._now.stream

    def stream(self) -> int:
        with self._device:
            return self._cupy.cuda.get_current_stream().ptr

    def capturing(self) -> bool:
        return self._now.captured

    def _other(self, stream: int) -> Any:
        return self._cupy.cuda.Stream.from_external(_ForeignStream(stream)) if stream else self._cupy.cuda.Stream.null

    def wait_for(self, stream: int) -> None:
        self._stream().wait_event(self._other(stream).record())

    def delay(self, stream: int) -> None:
        self._other(stream).wait_event(self._stream().record())

    def allocate(self, nbytes: int, like: Any) -> tuple[int, object]:
        if is_torch(like):
            torch: Any = sys.modules["torch"]
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.name)
            return memory.data_ptr(), memory
        memory = self._cupy.cuda.alloc(nbytes)
        return memory.ptr, memory

    def upload(self, to: int, data: Any) -> object:
        self._drop_sent()
        runtime, stream, nbytes = self._cupy.cuda.runtime, self._stream(), len(data)
        kept, at, capturing = data, _address(data), self.capturing()
        if capturing or nbytes <= _PINNED:
            kept = self._cupy.cuda.alloc_pinned_memory(nbytes)
            ctypes.memmove(kept.ptr, at, nbytes)
            at = kept.ptr
        if capturing:  # the graph reads `kept` at each replay; the caller keeps it alive
            runtime.memcpyAsync(to, at, nbytes, runtime.memcpyHostToDevice, stream.ptr)
            return kept
        sent: list[Any] = [kept, None]
        with self._sending:
            self._sent.append(sent)
        try:
            runtime.memcpyAsync(to, at, nbytes, runtime.memcpyHostToDevice, stream.ptr)
        except Exception:
            with self._sending:
                self._sent = deque(other for other in self._sent if other is not sent)
            raise
        sent[1] = stream.record(self._cupy.cuda.Event(disable_timing=True))
        return kept

    def _drop_sent(self) -> None:
        """Release the host buffers of completed uploads, up to the first upload that is still in flight."""
        with self._sending:
            while self._sent and (event := self._sent[0][1]) is not None and event.done:
                self._sent.popleft()

    def download(self, at: int, nbytes: int) -> bytearray:
        return self._download(at, nbytes, self._stream())

    def _download(self, at: int, nbytes: int, stream: Any) -> bytearray:
        runtime, data = self._cupy.cuda.runtime, bytearray(nbytes)
        if nbytes:
            runtime.memcpyAsync(_address(data), at, nbytes, runtime.memcpyDeviceToHost, stream.ptr)
        stream.synchronize()
        return data

    def read_back(self, at: int, nbytes: int, into: Any = None) -> Any:
        if into is None:
            into = _bytes_at(self._cupy.cuda.alloc_pinned_memory(max(nbytes, 1)), nbytes)
        if nbytes:
            runtime = self._cupy.cuda.runtime
            runtime.memcpyAsync(_address(into), at, nbytes, runtime.memcpyDeviceToHost, self._stream().ptr)
        return into

    def wait(self) -> None:
        self._stream().synchronize()

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
        for code in kernels.load(todo, self._arch):
            module = self._cupy.cuda.Module()
            module.load(code.image)
            for name, lowered in code.names.items():
                self._functions[name] = module.get_function(lowered)

    def constant(self, kernel: str, name: str, count: int) -> tuple[int, ...]:
        key = kernel, name, count
        if key not in self._constants:
            self.prepare([kernel])
            module = self._functions[kernel].module
            side = self._cupy.cuda.Stream(non_blocking=True)  # a new stream, because the current one may be captured
            data = self._download(module.get_global_var(name), 8 * count, side)
            self._constants[key] = tuple(np.frombuffer(data, np.uint64).tolist())
        return self._constants[key]

    def launch(self, kernel: str, grid: tuple[int, int], *args: Any) -> None:
        if kernel not in self._functions:
            self.prepare([kernel])
        pointers = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
        threads = KERNELS[kernel].threads
        function, stream = self._functions[kernel], self._now.stream
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

    def new_bytes(self, nbytes: int, like: Any) -> tuple[Any, int]:
        if is_torch(like):
            torch: Any = sys.modules["torch"]
            t = torch.empty(nbytes, dtype=torch.uint8, device=self.name)
            return t, t.data_ptr()
        array = self._cupy.empty(nbytes, np.uint8)
        return array, array.data.ptr

    def bytes_of(self, v: TensorView, nbytes: int) -> Any:
        owner: Any = v.owner
        if is_torch(owner):
            return owner.reshape(-1).view(sys.modules["torch"].uint8)[:nbytes]
        memory = self._cupy.cuda.UnownedMemory(v.address, max(v.nbytes, 1), owner, self._device.id)
        return self._cupy.ndarray(nbytes, np.uint8, self._cupy.cuda.MemoryPointer(memory, 0))


def _numpy_dtype(dtype: str) -> Any:
    """Return the dtype of numpy or ml_dtypes; raise TypeError if there is none."""
    if hasattr(np, dtype):
        return np.dtype(dtype)
    if importlib.util.find_spec("ml_dtypes") is None:
        raise TypeError(dtype)
    return np.dtype(getattr(importlib.import_module("ml_dtypes"), dtype))


def _bytes_at(memory: Any, nbytes: int) -> memoryview:
    """Return a memoryview of the first `nbytes` bytes of CuPy's host memory; the result keeps that memory alive."""
    array: Any = (ctypes.c_uint8 * nbytes).from_address(memory.ptr)
    array.memory = memory
    return memoryview(array)


def _address(data: Any) -> int:
    """Return the address of a buffer in host memory."""
    return int(ffi.cast("uintptr_t", ffi.from_buffer(data)))


@functools.cache
def _gpu(index: int) -> Gpu:
    """Return the :class:`Gpu` with this index; it is created on the first call."""
    return Gpu(index)


class CupyBackend:
    """GPUs found by CuPy: implements :class:`codec.engines.cuda.devices.Backend`."""

    def __init__(self) -> None:
        # True once a usable GPU has been found, so that later calls skip the search, which takes several driver calls.
        self._usable = False

    def why_not(self) -> str | None:
        """Return why no GPU can be used, or None if one can."""
        reason = None if self._usable else self._look()
        self._usable = reason is None
        return reason

    def _look(self) -> str | None:
        """Search for a usable GPU; return None if there is one, otherwise the reason why there is none."""
        if importlib.util.find_spec("cupy") is None:
            return f"CuPy is not installed: {_INSTALL}"
        try:
            cupy = _cupy()
        except ImportError as e:
            return f"CuPy cannot be imported: {e}"
        if not hasattr(cupy.cuda.Stream, "from_external"):
            return f"CuPy {cupy.__version__} is too old: {_INSTALL}"
        reason: str | None = "there is no GPU"
        try:
            for i in range(cupy.cuda.runtime.getDeviceCount()):
                reason = _too_old(cupy, i)
                if reason is None:
                    break
            return reason
        except Exception as e:  # CuPy raises errors of many types
            return f"there is no GPU that can be used: {e}"

    def find(self, v: TensorView) -> Gpu:
        """Return the GPU on which a tensor lies."""
        index = v.device.partition(":")[2]
        if index:
            return _gpu(int(index))
        return _gpu(_cupy().cuda.runtime.pointerGetAttributes(v.address).device) if v.nbytes else self.current()

    def current(self) -> Gpu:
        """Return CuPy's current GPU."""
        return _gpu(_cupy().cuda.runtime.getDevice())
