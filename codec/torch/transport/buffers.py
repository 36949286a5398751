"""Memory of collectives: buffers on the host that they take and give back, memory of GPUs and its count."""

from typing import Any

import torch

from codec.stateful.ranges import Memory
from codec.torch.transport.messages import Array
from codec.torch.transport.streams import host_memory

_MOST = 128  # buffers that are kept
_SPARE = 2  # all buffers together have at most _SPARE times the bytes that were in use at once
_WASTE = 4  # a request gets a buffer of at most _WASTE times its size, unless the buffer is small
_SMALL = 1 << 16  # bytes


class Buffers:
    """Buffers of a channel. Only the thread that runs the collectives takes them and gives them back.

    Attributes
    ----------
    nbytes : int
        Bytes of all buffers, free ones and those in use.
    """

    def __init__(self) -> None:
        self.nbytes = self._used = self._most_used = 0
        self._free: list[tuple[Array, bool]] = []  # buffer, pinned; the last ones given back come last

    def take(self, nbytes: int, *, pinned: bool = False) -> Array:
        """Return an array of at least `nbytes` bytes; `pinned`: page-locked."""
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
        """Give back what :meth:`take` returned; nobody may use it any more."""
        self._free.append((buffer, pinned))
        self._used -= buffer.nbytes
        while len(self._free) > _MOST or self.nbytes > _SPARE * self._most_used:
            self.nbytes -= self._free.pop(0)[0].nbytes


class Scratch:
    """Count of the memory of GPUs that the CUDA engine takes beside tensors and frames.

    Attributes
    ----------
    nbytes, most_nbytes : int
        Bytes in use, and the most so far.
    """

    def __init__(self) -> None:
        self.nbytes = self.most_nbytes = 0

    def note(self, kept: int, most: int) -> None:
        """Count a call that has had `most` bytes at once, and keeps `kept` bytes, which are negative if released."""
        self.most_nbytes = max(self.most_nbytes, self.nbytes + most)
        self.nbytes += kept


class DeviceMemory(Memory):
    """Memory of a GPU, whose arrays are flat tensors of float32."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, n: int) -> Any:
        """Return a tensor of `n` values."""
        return torch.empty(n, dtype=torch.float32, device=self._device)

    def zeros(self, n: int) -> Any:
        """Return a tensor of `n` zeros."""
        return torch.zeros(n, dtype=torch.float32, device=self._device)

    def has(self, array: Any) -> bool:
        """Return True if an array is a tensor on this GPU."""
        return isinstance(array, torch.Tensor) and array.device == self._device

    def bring(self, array: Any) -> Any:
        """Return a tensor if it is on this GPU, else a copy of an array or tensor there."""
        return torch.as_tensor(array, device=self._device)
