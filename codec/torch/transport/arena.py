"""Host memory for the messages, the result and the sums of one collective."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from codec.torch.transport.buffers import Buffers
from codec.torch.transport.messages import Array

_ALIGN = 64  # alignment of messages in bytes


def aligned_begins(bounds: Sequence[int]) -> list[int]:
    """Return the offsets of messages of at most `bounds` bytes, stored one after another at aligned offsets."""
    return [0, *itertools.accumulate(-(-n // _ALIGN) * _ALIGN for n in bounds)][: len(bounds)]


class Arena:
    """Memory of one collective, taken from the buffers of its channel.

    Messages are stored one after another in one array. An algorithm first reserves memory for all of its messages. If
    the array must grow, messages allocated before stay in the old array.

    An allocation beyond the reserved bytes is a bug in an algorithm, and raises AssertionError.

    Parameters
    ----------
    buffers : Buffers
        Pool from which memory is allocated.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._taken: list[tuple[Array, bool]] = []  # pairs (buffer in use, True if it is pinned)
        self._messages = np.empty(0, np.uint8)
        self._left = 0  # bytes that are reserved but not allocated
        self._used = self._last = 0  # bytes of `_messages` in use; offset of the last allocated message
        self._sum = np.empty(0, np.float32)

    @staticmethod
    def nbytes_of(bounds: Sequence[int]) -> int:
        """Return the bytes of memory that messages of at most `bounds` bytes need, including alignment."""
        return sum(-(-n // _ALIGN) * _ALIGN for n in bounds)

    def reserve(self, nbytes: int, *, pinned: bool = False) -> None:
        """Reserve memory for the messages of an algorithm, in addition to memory already reserved.

        Parameters
        ----------
        nbytes : int
            Number of bytes, computed by :meth:`nbytes_of`.
        pinned : bool
            True: use page-locked memory, since frames are copied from and to a GPU.
        """
        self._left += nbytes
        if self._messages.nbytes - self._used < self._left:
            self._messages, self._used = self._take(self._left, pinned), 0

    def allocate(self, nbytes: int) -> Array:
        """Return memory for a message of at most `nbytes` bytes."""
        taken = -(-nbytes // _ALIGN) * _ALIGN
        if taken > self._left:
            raise AssertionError(f"a collective allocates {taken} bytes of messages; {self._left} are reserved")
        begin = self._last = self._used
        self._used += taken
        self._left -= taken
        return self._messages[begin : begin + nbytes]

    def shrink(self, message: Array, nbytes: int) -> Array:
        """Shrink the last allocated message to its first `nbytes` bytes, and free the rest of its memory."""
        self._left += self._used
        self._used = -(-(self._last + nbytes) // _ALIGN) * _ALIGN
        self._left -= self._used
        return message[:nbytes]

    def result_buffer(self, n: int, dtype: Any) -> Array:
        """Allocate an array of `n` values for the result of the collective."""
        nbytes = n * np.dtype(dtype).itemsize
        return self._take(nbytes)[:nbytes].view(dtype)

    def sum_buffer(self, n: int) -> Array:
        """Allocate an array of `n` float32 values for a sum; the next call may return the same memory."""
        if self._sum.size < n:
            self._sum = self._take(4 * n)[: 4 * n].view(np.float32)
        return self._sum[:n]

    def release(self) -> None:
        """Return all memory to the pool. Arrays of this arena must not be used afterwards."""
        for buffer, pinned in self._taken:
            self._buffers.give(buffer, pinned=pinned)
        self._taken.clear()
        self._messages, self._sum, self._left = np.empty(0, np.uint8), np.empty(0, np.float32), 0

    def _take(self, nbytes: int, pinned: bool = False) -> Array:
        buffer = self._buffers.take(nbytes, pinned=pinned)
        self._taken.append((buffer, pinned))
        return buffer
