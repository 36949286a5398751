"""Messages between ranks as bytes (docs/protocol.md, section 3): numbers, frames, uncompressed values."""

import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from codec import FrameError, PeerError
from codec.torch.transport.counters import Counters

Array = np.ndarray[Any, Any]

FRAME_LENGTH = struct.Struct("<Q")  # before each frame; 0: the sender has no frame
FRAME_BEGIN = FRAME_LENGTH.size + 48  # bytes of a message that hold the length and the header of a frame
NUMBERS_WORDS = 8  # 64-bit words of a message of numbers: their count, then the numbers
FRAMES_TAG, NUMBERS_TAG = range(2)  # a message of one tag never arrives in a receive of the other one


def numbers_message(numbers: Sequence[int]) -> Array:
    """Return the message that holds some integers, as bytes.

    Parameters
    ----------
    numbers : sequence of int
        At most 7 integers of 64 bits. Gloo aborts the receiver of a longer message.
    """
    message = np.zeros(NUMBERS_WORDS, np.int64)
    message[: 1 + len(numbers)] = len(numbers), *numbers
    return message.view(np.uint8)


def check_frame_nbytes(source: int, nbytes: int, most: int) -> None:
    """Raise the error for a frame's length that a rank has sent, unless it is 1 to `most` bytes."""
    if not nbytes:
        raise PeerError(f"rank {source} sent no frame, because of an error")
    if nbytes > most:
        raise FrameError(f"rank {source} sends a frame of {nbytes} bytes, but at most {most} are possible")


def new_mark() -> int:
    """Return a random mark for :class:`IncomingValues`.

    Returns
    -------
    int
        64 bits that are a NaN in float64; their lower 32 or 16 bits are one in the other dtypes. It is a signaling NaN,
        which no arithmetic returns, except in float16.
    """
    return 0x7FF00001_7F807F81 | int.from_bytes(os.urandom(8), "little") & 0x8007FFFE_803F803E


class IncomingFrame:
    """Message with a frame whose receive is posted.

    Parameters
    ----------
    buffer : ndarray of uint8
        Gets the message.
    source : int
        Rank that sends the message.
    wait : callable
        Returns when the message has arrived.
    counters : Counters
        Counts the bytes.
    """

    def __init__(self, buffer: Array, source: int, wait: Callable[[], None], counters: Counters) -> None:
        self._buffer, self._source, self._wait, self._counters = buffer, source, wait, counters

    def frame(self) -> Array:
        """Wait for the message and return its frame.

        Raises
        ------
        PeerError
            The connection broke, nothing came in time, or the sender had no frame to send.
        FrameError
            The length is larger than the buffer.
        """
        self._wait()
        header = FRAME_LENGTH.size
        (nbytes,) = FRAME_LENGTH.unpack(self._buffer[:header].tobytes())
        check_frame_nbytes(self._source, nbytes, self._buffer.nbytes - header)
        self._counters.received_nbytes += header + nbytes
        return self._buffer[header : header + nbytes]


class IncomingValues:
    """Message with uncompressed values, whose number both ranks know.

    Gloo does not report the length of a message. So the last value of the buffer is a mark, a NaN with random bits,
    until the message has overwritten it. If the mark is still there, the message was too short: no former content of
    the buffer is taken for values of the sender.

    Parameters
    ----------
    buffer : ndarray
        Gets the values: floats, or uint16 for bfloat16.
    source : int
        Rank that sends the values.
    mark : int
        Random bits of :func:`new_mark`.
    """

    def __init__(self, buffer: Array, source: int, mark: int) -> None:
        self._source = source
        self._last = buffer.view(f"u{buffer.itemsize}")[-1:]
        self._last[:] = mark & (1 << 8 * buffer.itemsize) - 1
        self._mark = int(self._last[0]) if buffer.nbytes else 0
        self._wait: Callable[[], None] = lambda: None

    def posted(self, wait: Callable[[], None]) -> "IncomingValues":
        """Note that the receive was posted; wait() returns when the message has arrived."""
        self._wait = wait
        return self

    def wait(self) -> FrameError | None:
        """Wait for the values; return an error if some are missing."""
        self._wait()
        if self._last.size and int(self._last[0]) == self._mark:
            return FrameError(f"rank {self._source} has sent fewer values than agreed")
        return None
