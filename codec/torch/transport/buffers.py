"""Memory of collectives: a pool of host buffers, a counter of GPU scratch memory, and an allocator on GPUs."""

from typing import Any

import torch

from codec.stateful.ranges import Memory
from codec.torch.transport.messages import Array
from codec.torch.transport.streams import host_memory

_MOST = 128  # maximum number of free buffers
_SPARE = 2  # all buffers together have at most _SPARE times the peak of the bytes in use
_WASTE = 4  # a request is served by a buffer of at most _WASTE times its size, or of at most _SMALL bytes
_SMALL = 1 << 16  # size in bytes up to which a free buffer serves any smaller request


class Buffers:
    """Pool of host buffers of a channel. Only the thread that runs the collectives may use it.

    Attributes
    ----------
    nbytes : int
        Total bytes of all buffers, free and in use.
    """

    def __init__(self) -> None:
        self.nbytes = self._used = self._most_used = 0
        self._free: list[tuple[Array, bool]] = []  # pairs (buffer, pinned); most recently freed last

    def take(self, nbytes: int, *, pinned: bool = False) -> Array:
        """Allocate an array of at least `nbytes` bytes, in page-locked memory if `pinned`."""
        fits = [
            i
            for i, (each, kind) in enumerate(self._free)
            if kind == pinned and nbytes <= each.nbytes <= max(_SMALL, _WASTE * nbytes)
        ]
        if fits:
            buffer, _ = self._free.pop(min(fits, key=lambda i: self._free[i][0].nbytes))
        else:
            buffer = host_memory(max(nbytes, 1), pinned=pinned)
            self.nbytes += buffer.nbytes
        self._used += buffer.nbytes
        self._most_used = max(self._most_used, self._used)
        return buffer

    def give(self, buffer: Array, *, pinned: bool = False) -> None:
        """Free a buffer that :meth:`take` returned; it must not be used afterwards."""
        self._free.append((buffer, pinned))
        self._used -= buffer.nbytes
        while len(self._free) > _MOST or self.nbytes > _SPARE * self._most_used:
            self.nbytes -= self._free.pop(0)[0].nbytes


class ScratchCounter:
    """Counter of the GPU scratch memory that the CUDA engine allocates, besides tensors and frames.

    Attributes
    ----------
    nbytes, most_nbytes : int
        Bytes in use now, and their maximum so far.
    """

    def __init__(self) -> None:
        self.nbytes = self.most_nbytes = 0

    def note(self, kept: int, most: int) -> None:
        """Count a call that has used up to `most` bytes and keeps `kept` bytes; `kept` < 0 if it has freed memory."""
        self.most_nbytes = max(self.most_nbytes, self.nbytes + most)
        self.nbytes += kept


class DeviceMemory(Memory):
    """Memory of a GPU, whose arrays are flat tensors of float32."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, n: int) -> Any:
        """Allocate a tensor of `n` uninitialized values."""
        return torch.empty(n, dtype=torch.float32, device=self._device)

    def zeros(self, n: int) -> Any:
        """Return a tensor of `n` zeros."""
        return torch.zeros(n, dtype=torch.float32, device=self._device)

    def has(self, array: Any) -> bool:
        """Return True if an array is a tensor on this GPU."""
        return isinstance(array, torch.Tensor) and array.device == self._device

    def bring(self, array: Any) -> Any:
        """Return `array` if it is a tensor on this GPU; otherwise copy it there."""
        return torch.as_tensor(array, device=self._device)
