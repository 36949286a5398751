"""What this engine needs of a GPU, and which one it works on."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from codec.engines.cuda import cupy_backend
from codec.errors import EngineError
from codec.tensors.view import TensorView


class Device(Protocol):
    """A GPU. All but its properties is done inside of :meth:`on`, in the order of that stream."""

    name: str  # such as "cuda:0"
    processors: int

    def on(self, stream: int) -> AbstractContextManager[Any]:
        """Work on this device and stream."""
        ...

    def stream(self) -> int:
        """The one that its user works on."""
        ...

    def wait_for(self, stream: int) -> None:
        """Do what follows after what that stream has to do by now."""
        ...

    def hold(self, stream: int) -> None:
        """Let that stream wait for what was begun here."""
        ...

    def allocate(self, nbytes: int) -> tuple[int, object]:
        """The address of so many bytes, at a multiple of 256, and what keeps them."""
        ...

    def upload(self, to: int, data: Any) -> object:
        """Copy a buffer here, and return what must be kept until that is done."""
        ...

    def download(self, at: int, nbytes: int) -> bytearray:
        """Wait for all that was begun, and copy bytes to the host."""
        ...

    def copy(self, to: int, at: int, nbytes: int) -> None:
        """From here to here."""
        ...

    def clear(self, at: int, nbytes: int) -> None:
        """Make bytes 0."""
        ...

    def prepare(self, wanted: Iterable[str]) -> None:
        """Compile and load them."""
        ...

    def numbers(self, kernel: str, name: str, count: int) -> tuple[int, ...]:
        """What a kernel's file exports, an array of uint64."""
        ...

    def launch(self, kernel: str, grid: tuple[int, int], *args: Any) -> None:
        """Begin a kernel with so many blocks, for so many tensors. Arguments are ctypes values, which are copied."""
        ...

    def empty(self, dtype: str, shape: tuple[int, ...], like: Any) -> tuple[Any, TensorView]:
        """A new tensor of the kind of `like` on this device, as its user and as this engine sees it."""
        ...

    def bytes_of(self, v: TensorView, nbytes: int) -> Any:
        """The first bytes of a tensor on this device, as an array or tensor of its owner's kind."""
        ...


class Backend(Protocol):
    """Where devices come from."""

    def why_not(self) -> str | None:
        """Why there are none, or None."""
        ...

    def find(self, v: TensorView) -> Device:
        """The device on which a tensor lies."""
        ...

    def current(self) -> Device:
        """The one that its user has chosen for what lies on none."""
        ...


backend: Backend = cupy_backend.CupyBackend()


def device_for(views: Iterable[tuple[str, TensorView]]) -> Device:
    """The device on which arguments lie, all but those in host memory.

    Raises
    ------
    EngineError
        They lie on different ones, or on something else.
    """
    found: Device | None = None
    first = ""
    for name, v in views:
        if v.device == "cpu":
            continue
        if v.device.partition(":")[0] != "cuda":
            raise EngineError(f"{name} lies on {v.device}, which the cuda engine cannot read")
        device = backend.find(v)
        if found is not None and device.name != found.name:
            raise EngineError(f"{name} lies on {device.name}, but {first} on {found.name}")
        if found is None:
            found, first = device, name
    return found or backend.current()
