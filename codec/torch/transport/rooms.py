"""Memory for frames, and for the values of an uncompressed all-reduce, which chunks share."""

from collections.abc import Callable
from typing import Any

import numpy as np

from codec.torch.network.inbox import Receive
from codec.torch.transport.collective import CollectivePart
from codec.torch.transport.messages import Array


class Rooms:
    """Buffers for the terms of two chunks from all other ranks.

    Chunk c + 2 is received into the buffers of chunk c, once chunk c has been summed. So all data in flight fit into
    the CPU caches, which matters because CPUs are the bottleneck for uncompressed values.

    Parameters
    ----------
    part : CollectivePart
        Part of the collective.
    n : int
        Maximum number of values of a chunk.
    dtype : dtype
        Dtype of the values.
    """

    def __init__(self, part: CollectivePart, n: int, dtype: Any) -> None:
        self._part = part
        nbytes = n * np.dtype(dtype).itemsize
        part.arena.reserve(part.arena.nbytes_of([nbytes] * 2 * len(part.others)))
        self._rooms = [{o: part.arena.allocate(nbytes).view(dtype) for o in part.others} for _ in range(2)]

    def receive(self, c: int, n: int) -> dict[int, tuple[Array, Receive]]:
        """Request the terms of chunk `c`, `n` values each, from all other ranks."""
        rooms = {o: room[:n] for o, room in self._rooms[c % 2].items()}
        return {o: (room, self._part.receive_values(room, o)) for o, room in rooms.items()}

    async def values(self, room: Array, receive: Receive) -> Array:
        """Wait for the values that :meth:`receive` has requested, and return them."""
        await self._part.frame(receive)
        return room


def encode_message(part: CollectivePart, bound: int, encode: Callable[[Array], int]) -> Array:
    """Encode a frame into memory of the collective's arena, and return it.

    Parameters
    ----------
    part : CollectivePart
        Part of the collective, whose arena allocates the memory.
    bound : int
        Maximum size of the frame in bytes.
    encode : callable
        Function that writes the frame into an array, and returns the frame's size in bytes.
    """
    room = part.arena.allocate(bound)
    with part.clock.during("encode_s"):
        nbytes = encode(room)
    return part.arena.shrink(room, nbytes)


def copied(part: CollectivePart, frame: Array) -> Array:
    """Return a copy of a frame in memory of the collective's arena."""

    def copy(room: Array) -> int:
        room[: frame.nbytes] = frame
        return frame.nbytes

    return encode_message(part, frame.nbytes, copy)
