"""All-to-all of frames or other bytes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from codec import ArgumentError, CallOptions, FrameError
from codec._options import settings_of
from codec.torch.group.communicator import start
from codec.torch.group.levels import all_ranks
from codec.torch.network.version import hash64
from codec.torch.transport.collective import Collective, CollectivePart
from codec.torch.transport.messages import Array

_MOST_NBYTES = 1 << 36  # maximum bytes per rank
_CHUNK_NBYTES = 1 << 22  # bytes of a message; memory for received bytes is allocated message by message
_SIGNATURE = hash64("exchange")


def all_to_all_bytes(frames: Sequence[Any], *, group: Any = None, options: CallOptions | None = None) -> list[bytes]:
    """Send a frame, or any bytes, to each rank, and receive bytes from each rank (all-to-all of bytes).

    Parameters
    ----------
    frames : sequence of bytes or buffers
        Bytes for each rank of the group, in the order of ranks, this rank included; up to 64 GiB each.
    group : ProcessGroup, optional
        Group of ranks. Default: all ranks.
    options : CallOptions, optional
        ``codec.options(timeout=)``, as for :func:`all_reduce`; other settings are ignored.

    Returns
    -------
    list of bytes
        Bytes from each rank, in the order of ranks; empty if this rank is not in the group.

    Raises
    ------
    ArgumentError
        `frames` does not have one buffer per rank.
    FrameError
        A rank announces an impossible size, or there is not enough memory for received bytes.
    PeerError
        As for :func:`all_reduce`.

    Examples
    --------
    >>> codec.torch.all_to_all_bytes([b"bytes for rank 0"])  # with one rank
    [b'bytes for rank 0']
    """
    settings = settings_of(options)
    return start("exchange", all_ranks(group), settings, False, lambda _, c: _exchange(c, frames)) or []


async def _exchange(collective: Collective, frames: Sequence[Any]) -> list[bytes]:
    try:
        arrays = [np.frombuffer(frame, np.uint8) for frame in frames]
    except (TypeError, ValueError, BufferError) as e:
        raise ArgumentError(f"frames must be bytes or buffers, one for each rank: {e}") from None
    if len(arrays) != collective.size:
        raise ArgumentError(f"frames must have one item for each of the {collective.size} ranks, got {len(arrays)}")
    if max(a.nbytes for a in arrays) > _MOST_NBYTES:
        raise ArgumentError(f"a frame has {max(a.nbytes for a in arrays)} bytes; the maximum is {_MOST_NBYTES}")
    received = await swap(collective.part(_SIGNATURE, {"collective": "exchange"}), arrays)
    await collective.agree()
    collective.counters.frame_collectives += 1
    collective.counters.raw_nbytes += sum(a.nbytes for a in arrays)
    return received


async def swap(part: CollectivePart, arrays: Sequence[Array], most: Sequence[int] | None = None) -> list[bytes]:
    """Send an array of bytes to each rank, and return the bytes from each rank, in messages of _CHUNK_NBYTES.

    `most` contains the maximum number of bytes from each rank. Default: _MOST_NBYTES.
    """
    others = part.others
    sizes = await part.scatter([a.nbytes for a in arrays])
    for rank, (nbytes, limit) in enumerate(zip(sizes, most or [_MOST_NBYTES] * part.size, strict=True)):
        if not 0 <= nbytes <= limit:
            raise FrameError(f"rank {rank} announces a frame of {nbytes} bytes; the maximum is {limit}")
    found: dict[int, list[bytes]] = {o: [] for o in others}
    longest = max((max(sizes[o], arrays[o].nbytes) for o in others), default=0)
    for begin in range(0, longest, _CHUNK_NBYTES):
        expected = {o: min(_CHUNK_NBYTES, sizes[o] - begin) for o in others if sizes[o] > begin}
        incoming = {o: part.receive_values(_memory(nbytes, o), o) for o, nbytes in expected.items()}
        for o in others:
            if arrays[o].nbytes > begin:
                part.send_values(arrays[o][begin : begin + _CHUNK_NBYTES], o)
        for o, receive in incoming.items():
            found[o].append((await part.frame(receive)).tobytes())
        await part.sent()
    part.counters.round_trips += 0.5 + 0.5 * -(-longest // _CHUNK_NBYTES)
    found[part.rank] = [arrays[part.rank].tobytes()]
    return _join([found[rank] for rank in range(part.size)])


def _memory(nbytes: int, source: int) -> Array:
    try:
        return np.empty(nbytes, np.uint8)
    except MemoryError as e:
        raise FrameError(f"this rank has too little memory for the frame of rank {source}") from e


def _join(found: list[list[bytes]]) -> list[bytes]:
    joined: list[bytes] = []
    for chunks in found:
        try:
            joined.append(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        except MemoryError as e:
            raise FrameError(f"this rank has too little memory for a frame of {sum(map(len, chunks))} bytes") from e
        chunks.clear()
    return joined
