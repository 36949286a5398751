"""Device memory of one call, and copies between it and host memory."""

import ctypes
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from codec._c.library import ITEMSIZE, ffi, lib
from codec.engines.cuda.devices import Device
from codec.engines.cuda.structs import PIECE
from codec.engines.cuda.upload import aligned
from codec.tensors.view import TensorView

MAX_GRID_Y, MAX_IDLE = int(lib.MAX_GRID_Y), int(lib.MAX_IDLE)  # limits of a launch; tests lower them


class CallMemory:
    """Device memory of one call, owned by this object.

    Tensors in host memory, and tensors that kernels cannot read in place, are copied to the device.

    Parameters
    ----------
    device : Device
    stream : int
        Stream of the call.
    like : array or tensor, optional
        Argument of the call. Its library, torch or CuPy, allocates the memory with its stream-ordered allocator, on the
        stream of the call.

    Attributes
    ----------
    allocated_nbytes, kept_nbytes : int
        Total bytes allocated, and bytes that stay allocated after :meth:`launched`.
    """

    def __init__(self, device: Device, stream: int, like: Any = None) -> None:
        self.device, self._stream, self._like = device, stream, like
        self._keep: list[object] = []
        self._brief: list[object] = []
        self.allocated_nbytes = self.kept_nbytes = 0
        self._written: list[tuple[TensorView, int]] = []

    def resume(self) -> AbstractContextManager[Any]:
        """Return a context in which the call's device and stream are current again."""
        return self.device.on(self._stream)

    def wait(self) -> None:
        """Make the host wait until the call's stream has completed all work."""
        self.device.wait()

    def sibling(self) -> "CallMemory":
        """Return a new :class:`CallMemory` for another call on the same stream."""
        return CallMemory(self.device, self._stream, self._like)

    def new(self, nbytes: int) -> int:
        """Allocate uninitialized device memory that this object owns; return its address, a multiple of 256."""
        address, owner = self.allocate(nbytes)
        self._keep.append(owner)
        self.kept_nbytes += nbytes
        return address

    def temporary(self, nbytes: int) -> int:
        """Return the address of uninitialized bytes that are valid until :meth:`launched`."""
        address, owner = self.allocate(nbytes)
        self._brief.append(owner)
        return address

    def allocate(self, nbytes: int) -> tuple[int, object]:
        """Return the address of uninitialized bytes, and their owner, which the caller must keep alive."""
        self.allocated_nbytes += nbytes
        return self.device.allocate(max(nbytes, 1), self._like)

    def launched(self) -> None:
        """Release temporary memory after the last launch; kernels may still run, as the allocator is stream-ordered."""
        self._brief.clear()

    def keep(self, owner: object, *, brief: bool = False) -> None:
        """Keep the owner of memory alive as long as this object, or with `brief` until :meth:`launched`."""
        (self._brief if brief else self._keep).append(owner)

    def zeros(self, nbytes: int) -> int:
        """Allocate zeroed device memory, and return its address."""
        address = self.new(nbytes)
        self.device.clear(address, nbytes)
        return address

    def send(self, to: int, image: bytes | bytearray) -> None:
        """Copy bytes in host memory to a device address."""
        if image:
            self._keep.append(self.device.upload(to, image))

    def put(self, data: Any) -> int:
        """Copy a buffer in host memory to the device, and return its address."""
        address = self.new(len(data))
        self.send(address, data)
        return address

    def read(self, v: TensorView, multiple: int = 0) -> int:
        """Return the device address of a tensor's values. Tensors that are unaligned or in host memory are copied.

        The address is a multiple of ``multiple`` bytes; by default, of the size of a value.
        """
        self._keep.append(v)
        if v.device == "cpu":
            return self.put(v.array().data)
        if v.address % (multiple or ITEMSIZE[v.dtype]) == 0:
            return v.address
        return self.copy(v)

    def fetch(self, v: TensorView) -> TensorView:
        """Return the tensor in host memory, after waiting for the stream if it is on the device."""
        if v.device == "cpu":
            return v
        return _on_host(v, self.device.download(v.address, v.nbytes))

    def fetch_all(self, views: Sequence[TensorView]) -> list[TensorView]:
        """Return several small tensors in host memory. One copy downloads all tensors that are on the device."""
        there = [v for v in views if v.device != "cpu"]
        if len(there) < 2:
            return [self.fetch(v) for v in views]
        at, places = self.gather([(v.address, v.nbytes) for v in there])
        data = memoryview(self.device.download(at, places[-1] + there[-1].nbytes))
        found = iter([data[place:] for place in places])
        return [v if v.device == "cpu" else _on_host(v, next(found)) for v in views]

    def gather(self, pieces: Sequence[tuple[int, int]]) -> tuple[int, list[int]]:
        """Copy pieces of device memory, each an (address, bytes) pair, into one buffer.

        Returns
        -------
        int, list of int
            Address of the buffer, and the offset of each piece in it.
        """
        if len(pieces) == 1:
            return pieces[0][0], [0]
        sizes = [PIECE.size * len(pieces), *(aligned(nbytes) for _, nbytes in pieces)]
        at = self.new(sum(sizes))
        places = list(itertools.accumulate(sizes, initial=at))[1:-1]
        self.send(at, b"".join(PIECE.pack(a, place, n) for (a, n), place in zip(pieces, places, strict=True)))
        self.device.prepare(["gather"])
        self.device.launch("gather", (len(pieces), 1), pointer(at))
        return places[0], [place - places[0] for place in places]

    def copy(self, v: TensorView) -> int:
        """Copy a tensor on the device, and return the copy's address."""
        address = self.new(v.nbytes)
        self.device.copy(address, v.address, v.nbytes)
        return address

    def write(self, v: TensorView, *, read: bool = False, apart: bool = False) -> int:
        """Return the address to which kernels write a tensor: its own, or a buffer that :meth:`finish` copies to it.

        Parameters
        ----------
        v : TensorView
            Tensor to write.
        read : bool, optional
            True if kernels also read the tensor's values at that address.
        apart : bool, optional
            True if the tensor itself must stay unchanged until :meth:`finish`.
        """
        self._keep.append(v)
        if v.device != "cpu" and v.address % ITEMSIZE[v.dtype] == 0 and not apart:
            return v.address
        address = self.new(v.nbytes) if not read else self.read(v) if v.device == "cpu" else self.copy(v)
        self._written.append((v, address))
        return address

    def finite(self, address: int, n: int) -> bool:
        """Wait for the stream, and return True if the ``n`` float32 values at an address are all finite."""
        found = self.zeros(4)
        self.device.launch("check_finite", (grid_for(self.device, n), 1), pointer(address), wide(n), pointer(found))
        return not any(self.device.download(found, 4))

    def finish(self) -> None:
        """Copy values that kernels have written to temporary buffers to the tensors."""
        for v, address in self._written:
            self.deliver(v, address, v.nbytes)

    def deliver(self, v: TensorView, address: int, nbytes: int) -> None:
        """Copy bytes at a device address to the beginning of a tensor."""
        if v.device == "cpu":
            ffi.memmove(v.data, self.device.download(address, nbytes), nbytes)
        elif v.address != address:
            self.device.copy(v.address, address, nbytes)


def _on_host(v: TensorView, data: Any) -> TensorView:
    """Return the view of a tensor's copy in host memory; `data`: the copied bytes."""
    return v._replace(data=ffi.from_buffer(data), owner=data, device="cpu", stream=None)


def pointer(address: int) -> Any:
    """Return an address as a kernel argument."""
    return ctypes.c_uint64(address)


def wide(n: int) -> Any:
    """Return a uint64 as a kernel argument."""
    return ctypes.c_uint64(n)


def small(n: int) -> Any:
    """Return a uint32 as a kernel argument."""
    return ctypes.c_uint32(n)


def launch_each(device: Device, kernel: str, grids: Sequence[int], at: int, nbytes: int, *more: Any) -> None:
    """Launch a kernel for adjacent structs of ``nbytes`` bytes at ``at``; struct i needs ``grids[i]`` thread blocks.

    A launch receives the address of its first struct, and `more`.

    In a launch, every struct receives as many thread blocks as the struct with the largest grid. To limit idle thread
    blocks, structs whose grids differ much are launched separately; if `grids` descends, few launches are needed.
    """
    if len(grids) == 1:
        device.launch(kernel, (grids[0], 1), pointer(at), *more)
        return
    first = most = used = 0
    for i, grid in enumerate(grids):
        count, largest = i - first + 1, max(most, grid)
        if count > MAX_GRID_Y or largest * count - used - grid > MAX_IDLE:
            device.launch(kernel, (most, count - 1), pointer(at + nbytes * first), *more)
            first, largest, used = i, grid, 0
        most, used = largest, used + grid
    device.launch(kernel, (most, len(grids) - first), pointer(at + nbytes * first), *more)


def grid_for(device: Device, n: int) -> int:
    """Return the number of thread blocks for an elementwise kernel over ``n`` values."""
    return max(1, min(-(-n // lib.ELEMENTWISE_VALUES), lib.ELEMENTWISE_BLOCKS * device.processors))
