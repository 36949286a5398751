"""Interface through which this engine uses a GPU, and the choice of the GPU for a call."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from codec.engines.cuda import cupy_backend
from codec.errors import EngineError
from codec.tensors.view import TensorView


class Device(Protocol):
    """Interface of a GPU. Call methods only inside :meth:`on`: they use its stream. Attributes can be read anywhere."""

    name: str  # such as "cuda:0"
    processors: int  # number of multiprocessors

    def on(self, stream: int) -> AbstractContextManager[Any]:
        """Return a context in which this device and ``stream`` are current."""
        ...

    def capturing(self) -> bool:
        """Return True if the current stream is captured; memory must then stay allocated while the graph exists."""
        ...

    def stream(self) -> int:
        """Return the stream that the caller has made current."""
        ...

    def wait_for(self, stream: int) -> None:
        """Make the current stream wait for the work submitted to ``stream`` so far."""
        ...

    def delay(self, stream: int) -> None:
        """Make ``stream`` wait for the work submitted to the current stream so far."""
        ...

    def allocate(self, nbytes: int, like: Any) -> tuple[int, object]:
        """Return the address of ``nbytes`` bytes, a multiple of 256, and the object that owns them.

        The allocator of ``like``'s library is used. It is stream-ordered: freed memory can be reused by later work of
        the same stream.
        """
        ...

    def upload(self, to: int, data: Any) -> object:
        """Copy a buffer in host memory to the device.

        Returns
        -------
        object
            Owner of host memory that the caller must keep alive until the copy is complete.
        """
        ...

    def download(self, at: int, nbytes: int) -> bytearray:
        """Copy bytes to the host in stream order, wait for the copy, and return them."""
        ...

    def read_back(self, at: int, nbytes: int, into: Any = None) -> Any:
        """Enqueue a copy of bytes to page-locked host memory, without waiting for it.

        Parameters
        ----------
        at, nbytes : int
            Device address, and number of bytes.
        into : buffer, optional
            Page-locked memory of the caller. Default: new memory.

        Returns
        -------
        buffer
            Host memory that contains the bytes after :meth:`wait`.
        """
        ...

    def wait(self) -> None:
        """Make the host wait until the current stream has completed all work."""
        ...

    def copy(self, to: int, at: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from device address `at` to device address `to`."""
        ...

    def clear(self, at: int, nbytes: int) -> None:
        """Set `nbytes` bytes at device address `at` to 0."""
        ...

    def prepare(self, wanted: Iterable[str]) -> None:
        """Compile and load the kernels with these names that are not loaded yet."""
        ...

    def constant(self, kernel: str, name: str, count: int) -> tuple[int, ...]:
        """Return an exported constant of a kernel's source file, an array of ``count`` uint64."""
        ...

    def launch(self, kernel: str, grid: tuple[int, int], *args: Any) -> None:
        """Launch a kernel; ``grid``: number of thread blocks for each struct, and number of structs.

        Arguments are ctypes values, and are copied.
        """
        ...

    def empty(self, dtype: str, shape: tuple[int, ...], like: Any) -> tuple[Any, TensorView]:
        """Return a new tensor of ``like``'s library on this device, and its view."""
        ...

    def new_bytes(self, nbytes: int, like: Any) -> tuple[Any, int]:
        """Return a new uint8 tensor of ``like``'s library on this device, and its address."""
        ...

    def bytes_of(self, v: TensorView, nbytes: int) -> Any:
        """Return the first `nbytes` bytes of a tensor on this device, as an array or tensor of the same library."""
        ...


class Backend(Protocol):
    """Interface of a library that finds GPUs."""

    def why_not(self) -> str | None:
        """Return why no device is available, or None if one is."""
        ...

    def find(self, v: TensorView) -> Device:
        """Return the device on which a tensor lies."""
        ...

    def current(self) -> Device:
        """Return the device that the caller has made current; it is used if all tensors are in host memory."""
        ...


backend: Backend = cupy_backend.CupyBackend()


def device_for(views: Iterable[tuple[str, TensorView]]) -> Device:
    """Return the GPU that holds the arguments; the current GPU if all arguments are in host memory.

    Raises
    ------
    EngineError
        Arguments lie on different devices, or on a device that this engine cannot read.
    """
    found: Device | None = None
    first = ""
    for name, v in views:
        if v.device == "cpu":
            continue
        if v.device.partition(":")[0] != "cuda":
            raise EngineError(f"{name} is on {v.device}, which the cuda engine cannot read")
        device = backend.find(v)
        if found is not None and device.name != found.name:
            raise EngineError(f"{name} is on {device.name}, but {first} on {found.name}: move both to one device")
        if found is None:
            found, first = device, name
    return found or backend.current()
