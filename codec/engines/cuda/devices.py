"""Interface of a GPU as this engine uses it, and the choice of the GPU for a call."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from codec.engines.cuda import cupy_backend
from codec.errors import EngineError
from codec.tensors.view import TensorView


class Device(Protocol):
    """GPU. All methods run inside of :meth:`on`, in the order of its stream; properties can be read anywhere."""

    name: str  # such as "cuda:0"
    processors: int  # multiprocessors

    def on(self, stream: int) -> AbstractContextManager[Any]:
        """Make this device and ``stream`` current in the context."""
        ...

    def capturing(self) -> bool:
        """Return whether the current stream is captured: its memory must be kept as long as the graph."""
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

        The allocator of the library of ``like`` uses memory again in the order of its stream.
        """
        ...

    def upload(self, to: int, data: Any) -> object:
        """Copy a buffer in host memory to the device.

        Returns
        -------
        object
            Owner of memory that must be kept until the copy is complete.
        """
        ...

    def download(self, at: int, nbytes: int) -> bytearray:
        """Copy bytes to the host after waiting for the current stream."""
        ...

    def read_back(self, at: int, nbytes: int, into: Any = None) -> Any:
        """Copy bytes to page-locked memory of the host, in the order of the stream, and do not wait for that.

        Parameters
        ----------
        at, nbytes : int
            Bytes on the device.
        into : buffer, optional
            Page-locked memory of the caller. Default: new memory.

        Returns
        -------
        buffer
            Memory that has the bytes after :meth:`wait`.
        """
        ...

    def wait(self) -> None:
        """Wait for the current stream."""
        ...

    def copy(self, to: int, at: int, nbytes: int) -> None:
        """Copy bytes within the device."""
        ...

    def clear(self, at: int, nbytes: int) -> None:
        """Set bytes to 0."""
        ...

    def prepare(self, wanted: Iterable[str]) -> None:
        """Compile and load kernels."""
        ...

    def constant(self, kernel: str, name: str, count: int) -> tuple[int, ...]:
        """Return a constant that a kernel's file exports: an array of ``count`` uint64."""
        ...

    def launch(self, kernel: str, grid: tuple[int, int], *args: Any) -> None:
        """Launch a kernel with a grid of blocks and tensors.

        Arguments are ctypes values, which are copied.
        """
        ...

    def empty(self, dtype: str, shape: tuple[int, ...], like: Any) -> tuple[Any, TensorView]:
        """Return a new tensor on this device, of the library of ``like``, and its view."""
        ...

    def new_bytes(self, nbytes: int, like: Any) -> tuple[Any, int]:
        """Return a new tensor of uint8 on this device, of the library of ``like``, and its address."""
        ...

    def bytes_of(self, v: TensorView, nbytes: int) -> Any:
        """Return the first bytes of a tensor on this device, as an array or tensor of its owner's library."""
        ...


class Backend(Protocol):
    """Source of devices."""

    def why_not(self) -> str | None:
        """Return why no device is available, or None."""
        ...

    def find(self, v: TensorView) -> Device:
        """Return the device on which a tensor lies."""
        ...

    def current(self) -> Device:
        """Return the device that the caller has made current, for tensors that lie on none."""
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
