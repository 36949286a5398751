"""The memory that one call has on a device."""

import ctypes
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from codec._c.library import ITEMSIZE, ffi
from codec.engines.cuda.devices import Device
from codec.tensors.view import TensorView

_VALUES = 4096  # a block of threads
_AT_ONCE = 65_535  # CUDA's limit of a grid's second dimension
_PIECE = struct.Struct("<3Q")  # codec_piece of native/cuda/frame/gather.cu


class Work:
    """Memory on a device for one call, kept until this object is gone.

    What lies elsewhere, or where kernels cannot read it, is copied: tensors in host memory can be encoded, too.
    """

    def __init__(self, device: Device, stream: int) -> None:
        self.device, self._stream = device, stream
        self._keep: list[object] = []
        self._written: list[tuple[TensorView, int]] = []

    def again(self) -> AbstractContextManager[Any]:
        """Work on the device and stream once more."""
        return self.device.on(self._stream)

    def beside(self) -> "Work":
        """Memory for another call on the same stream."""
        return Work(self.device, self._stream)

    def new(self, nbytes: int) -> int:
        """The address of new bytes, at a multiple of 256."""
        address, owner = self.device.allocate(max(nbytes, 1))
        self._keep.append(owner)
        return address

    def zeros(self, *sizes: int) -> list[int]:
        """Addresses of zeros, so many bytes each."""
        places, total = _places(sizes)
        address = self.new(total)
        self.device.clear(address, total)
        return [address + at for at in places]

    def reserve(self, *sizes: int) -> list[int]:
        """Addresses of memory for several things, one behind the other, which :meth:`send` fills."""
        places, total = _places(sizes)
        address = self.new(total)
        return [address + at for at in places]

    def send(self, places: Sequence[int], *buffers: Any) -> None:
        """Copy buffers in host memory to where there is a place for each, all at once."""
        if len(buffers) == 1:
            [image] = buffers
        else:
            image = bytearray(places[-1] - places[0] + len(buffers[-1]))
            for place, buffer in zip(places, buffers, strict=True):
                at = place - places[0]
                image[at : at + len(buffer)] = buffer
        if image:
            self._keep.append(self.device.upload(places[0], image))

    def put(self, *buffers: Any) -> list[int]:
        """Addresses of copies of buffers in host memory, which get there together."""
        places = self.reserve(*map(len, buffers))
        self.send(places, *buffers)
        return places

    def read(self, v: TensorView, multiple: int = 0) -> int:
        """The address of a tensor's values, at a multiple of a value's size or of another number."""
        self._keep.append(v)
        if v.device == "cpu":
            return self.put(_host_bytes(v))[0]
        if v.address % (multiple or ITEMSIZE[v.dtype]) == 0:
            return v.address
        return self.copy(v)

    def fetch(self, v: TensorView) -> TensorView:
        """The tensor in host memory: what was begun is waited for."""
        if v.device == "cpu":
            return v
        return _on_host(v, self.device.download(v.address, v.nbytes))

    def fetch_all(self, views: Sequence[TensorView]) -> list[TensorView]:
        """The same of a few bytes each, all at once."""
        there = [v for v in views if v.device != "cpu"]
        if len(there) < 2:
            return [self.fetch(v) for v in views]
        at, *places = self.reserve(_PIECE.size * len(there), *[v.nbytes for v in there])
        pieces = (_PIECE.pack(v.address, place, v.nbytes) for v, place in zip(there, places, strict=True))
        self.send([at], b"".join(pieces))
        self.device.prepare(["gather"])
        self.device.launch("gather", (len(there), 1), pointer(at))
        end = places[-1] + there[-1].nbytes
        data = memoryview(self.device.download(places[0], end - places[0]))
        found = iter([data[place - places[0] :] for place in places])
        return [v if v.device == "cpu" else _on_host(v, next(found)) for v in views]

    def copy(self, v: TensorView) -> int:
        """The address of a copy of what lies on the device."""
        address = self.new(v.nbytes)
        self.device.copy(address, v.address, v.nbytes)
        return address

    def write(self, v: TensorView, *, read: bool = False, apart: bool = False) -> int:
        """The address of what is to be a tensor's values by :meth:`finish`.

        `read`: it is to have them before, too; `apart`: the tensor itself must stay as it is until then.
        """
        self._keep.append(v)
        if v.device != "cpu" and v.address % ITEMSIZE[v.dtype] == 0 and not apart:
            return v.address
        address = self.new(v.nbytes) if not read else self.read(v) if v.device == "cpu" else self.copy(v)
        self._written.append((v, address))
        return address

    def finite(self, address: int, n: int) -> bool:
        """Whether n float32 are numbers: what was begun is waited for."""
        [found] = self.zeros(4)
        self.device.launch("check_finite", (grid_for(self.device, n), 1), pointer(address), wide(n), pointer(found))
        return not any(self.device.download(found, 4))

    def finish(self) -> None:
        """All that was to be written has been: copy it where it does not lie where it should."""
        for v, address in self._written:
            self.deliver(v, address, v.nbytes)

    def deliver(self, v: TensorView, address: int, nbytes: int) -> None:
        """The first bytes of a tensor are those here."""
        if v.device == "cpu":
            ffi.memmove(v.data, self.device.download(address, nbytes), nbytes)
        elif v.address != address:
            self.device.copy(v.address, address, nbytes)


def _on_host(v: TensorView, data: Any) -> TensorView:
    """A tensor on a device, by a copy of its bytes."""
    return v._replace(data=ffi.from_buffer(data), owner=data, device="cpu", stream=None)


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where things of such sizes begin, one behind the other, and all that they take."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // 16) * 16)
    return places[:-1], places[-1]


def _host_bytes(v: TensorView) -> Any:
    """The bytes of a tensor in host memory."""
    return ffi.buffer(v.data, v.nbytes) if v.nbytes else b""


def pointer(address: int) -> Any:
    """An address as a kernel's argument."""
    return ctypes.c_uint64(address)


def wide(n: int) -> Any:
    """A uint64, likewise."""
    return ctypes.c_uint64(n)


def small(n: int) -> Any:
    """A uint32, likewise."""
    return ctypes.c_uint32(n)


def launch_each(device: Device, kernel: str, grids: Sequence[int], at: int, nbytes: int) -> None:
    """Launch a kernel for structs of so many bytes that follow each other, each with so many blocks of threads."""
    for i in range(0, len(grids), _AT_ONCE):
        some = grids[i : i + _AT_ONCE]
        device.launch(kernel, (max(some), len(some)), pointer(at + nbytes * i))


def grid_for(device: Device, n: int) -> int:
    """Blocks of threads that go over n values, a few each."""
    return max(1, min(-(-n // _VALUES), 8 * device.processors))
