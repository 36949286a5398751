"""Memory on the host for the messages, the result and the sums of a collective, used again by the next one."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from codec.torch.transport.messages import FRAME_LENGTH, Array
from codec.torch.transport.streams import host_memory

_ALIGN = 64  # bytes: messages begin at multiples of this


class Arena:
    """Memory of one collective at a time.

    Messages lie one behind another in one array. A collective first reserves memory for all of its messages, in one or
    several calls. Messages allocated before the array grows keep the old array.

    No method waits for other ranks or closes connections. An allocation beyond the reserved bytes is a mistake in an
    algorithm: AssertionError.
    """

    def __init__(self) -> None:
        self._messages = np.empty(0, np.uint8)
        self._pinned = False  # the array of messages is page-locked
        self._reserved = 0  # bytes of it that algorithms have reserved
        self._used = self._last = 0  # bytes of it in use; offset of the message allocated last
        self._result = np.empty(0, np.uint8)
        self._sum = np.empty(0, np.float32)

    @staticmethod
    def nbytes_of(bounds: Sequence[int]) -> int:
        """Return the bytes that messages take whose frames have at most `bounds` bytes."""
        return sum(-(-(n + FRAME_LENGTH.size) // _ALIGN) * _ALIGN for n in bounds)

    def clear(self) -> None:
        """Free the messages of the collective before, and what it has reserved."""
        self._reserved = self._used = 0

    def reserve(self, nbytes: int, *, pinned: bool = False) -> None:
        """Reserve memory for the messages of an algorithm, in addition to what is reserved.

        Parameters
        ----------
        nbytes : int
            Bytes by :meth:`nbytes_of`.
        pinned : bool
            Frames are copied from and to a GPU.
        """
        self._reserved += nbytes
        if self._messages.nbytes < self._reserved or pinned > self._pinned:
            self._pinned = self._pinned or pinned
            self._messages = host_memory(self._reserved, pinned=self._pinned)

    def allocate(self, nbytes: int) -> Array:
        """Return memory for a message whose frame has at most `nbytes` bytes."""
        begin = self._last = self._used
        end = begin + FRAME_LENGTH.size + nbytes
        if end > self._messages.nbytes:
            raise AssertionError(
                f"a collective allocates {end} bytes of messages; it has reserved {self._messages.nbytes}"
            )
        self._used = -(-end // _ALIGN) * _ALIGN
        return self._messages[begin:end]

    @staticmethod
    def frame_buffer(message: Array) -> Array:
        """Return the bytes of a message that hold the frame."""
        return message[FRAME_LENGTH.size :]

    def finish_message(self, message: Array, nbytes: int) -> Array:
        """Write the length of the frame into the message allocated last, and free the memory behind the frame.

        Parameters
        ----------
        message : ndarray of uint8
            Memory that :meth:`allocate` returned last.
        nbytes : int
            Bytes of the frame in it.

        Returns
        -------
        ndarray of uint8
            Message to send.
        """
        FRAME_LENGTH.pack_into(message.data, 0, nbytes)
        message = message[: FRAME_LENGTH.size + nbytes]
        self._used = -(-(self._last + message.nbytes) // _ALIGN) * _ALIGN
        return message

    def result_buffer(self, n: int, dtype: Any) -> Array:
        """Return an array of `n` values; it shares memory with the one returned before."""
        nbytes = n * np.dtype(dtype).itemsize
        if self._result.nbytes < nbytes:
            self._result = np.empty(nbytes, np.uint8)
        return self._result[:nbytes].view(dtype)

    def sum_buffer(self, n: int) -> Array:
        """Return an array of `n` float32 values; it shares memory with the one returned before."""
        if self._sum.size < n:
            self._sum = np.empty(n, np.float32)
        return self._sum[:n]

    def release(self) -> None:
        """Give up the memory of messages and result: messages in flight may still be written to it."""
        self._messages = self._result = np.empty(0, np.uint8)
