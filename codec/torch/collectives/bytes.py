"""Exchange of bytes: an all-to-all of frames or of any bytes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from codec import ArgumentError, CallOptions, FrameError
from codec._options import settings_of
from codec.torch.group.communicator import Communicator, close_on_error, exchange_requests, start
from codec.torch.reduction.phases import FirstError
from codec.torch.transport.channel import Channel
from codec.torch.transport.messages import Array

_MOST_NBYTES = 1 << 36  # upper bound of the bytes of a frame
_CHUNK_NBYTES = 1 << 22  # bytes of a message; memory for a frame is allocated as its messages arrive
_END_NBYTES = 8  # bytes behind those of a chunk, by which a message that is too short is recognized


def exchange(frames: Sequence[Any], *, group: Any = None, options: CallOptions | None = None) -> list[bytes]:
    """Send a frame, or any bytes, to each rank, and receive one from each: an all-to-all of bytes.

    Parameters
    ----------
    frames : sequence of bytes or buffers
        Bytes for each rank of the group, in the order of ranks, this rank included; up to 64 GiB each.
    group : ProcessGroup, optional
        Ranks. Default: all.
    options : CallOptions, optional
        ``codec.options(timeout=)``, as for :func:`all_reduce`; other settings are ignored.

    Returns
    -------
    list of bytes
        Bytes from each rank, in the order of ranks; empty if this rank is not of the group.

    Raises
    ------
    ArgumentError
        `frames` are not as many buffers as there are ranks.
    FrameError
        A rank announces an impossible size, after which a new group is needed; or there is no memory for a frame, or a
        message was shorter than announced, after which the group can still be used.
    PeerError
        As for :func:`all_reduce`.

    Examples
    --------
    >>> codec.torch.exchange([b"bytes for rank 0"])  # with one rank
    [b'bytes for rank 0']
    """
    settings = settings_of(options)
    return start("exchange", group, settings.timeout, False, lambda comm: _exchange(comm, frames)) or []


def _exchange(comm: Communicator, frames: Sequence[Any]) -> list[bytes]:
    channel = comm.channel

    def prepare() -> tuple[list[Array], list[int]]:
        try:
            arrays = [np.frombuffer(frame, np.uint8) for frame in frames]
        except (TypeError, ValueError, BufferError) as e:
            raise ArgumentError(f"frames must be bytes or buffers, one for each rank: {e}") from None
        if len(arrays) != channel.size:
            raise ArgumentError(f"{len(arrays)} frames were given for {channel.size} ranks")
        if max(a.nbytes for a in arrays) > _MOST_NBYTES:
            raise ArgumentError(f"a frame has more than {_MOST_NBYTES} bytes")
        return arrays, [0]

    arrays, _ = exchange_requests(channel, prepare)
    with close_on_error(channel):
        received, error = swap(channel, arrays)
    channel.requests.exchange_verdict(error)
    channel.counters.frame_collectives += 1
    channel.counters.raw_nbytes += sum(a.nbytes for a in arrays)
    return received


def swap(channel: Channel, arrays: Sequence[Array]) -> tuple[list[bytes], Exception | None]:
    """Send an array of bytes to each rank and receive one from each, in messages of _CHUNK_NBYTES.

    Returns
    -------
    list of bytes, Exception or None
        Bytes of each rank, in order, all empty after an error; and the error.
    """
    sizes, others = channel.numbers.scatter([a.nbytes for a in arrays]), channel.others
    for rank, nbytes in enumerate(sizes):
        if not 0 <= nbytes <= _MOST_NBYTES:
            raise FrameError(
                f"rank {rank} announces a frame of {nbytes} bytes, but at most {_MOST_NBYTES} are possible"
            )
    buffers = [_buffer_nbytes(nbytes) for o in others for nbytes in (sizes[o], arrays[o].nbytes)]
    channel.begin(channel.arena.nbytes_of(buffers))
    incoming = {o: channel.arena.allocate(_buffer_nbytes(sizes[o])) for o in others}
    outgoing = {o: channel.arena.allocate(_buffer_nbytes(arrays[o].nbytes)) for o in others}
    found: dict[int, list[bytes]] = {o: [] for o in others}
    first_error = FirstError(channel)
    longest = max((max(sizes[o], arrays[o].nbytes) for o in others), default=0)
    for begin in range(0, longest, _CHUNK_NBYTES):
        expected = {o: _post_receive(channel, incoming[o], sizes[o] - begin, o) for o in others if sizes[o] > begin}
        for o in others:
            if arrays[o].nbytes > begin:
                _send(channel, outgoing[o], arrays[o][begin : begin + _CHUNK_NBYTES], o)
        for o, (message, work) in expected.items():
            channel.connections.wait(work, o)
            first_error(_keep, found[o], message, o)
        channel.frames.wait_for_sends()
    found[channel.rank] = [arrays[channel.rank].tobytes()]
    joined = first_error(_join, [found[rank] for rank in range(channel.size)])
    return joined or [b""] * channel.size, first_error.error


def _buffer_nbytes(nbytes: int) -> int:
    return min(nbytes, _CHUNK_NBYTES) + _END_NBYTES


def _end(nbytes: int) -> Array:
    """Return the end of a message with `nbytes` bytes of a frame."""
    return np.frombuffer((~nbytes % (1 << 64)).to_bytes(_END_NBYTES, "little"), np.uint8)


def _send(channel: Channel, buffer: Array, chunk: Array, to: int) -> None:
    message = buffer[: chunk.nbytes + _END_NBYTES]
    message[: chunk.nbytes] = chunk
    message[chunk.nbytes :] = _end(chunk.nbytes)
    channel.frames.send_values(message, to)


def _post_receive(channel: Channel, buffer: Array, left: int, source: int) -> tuple[Array, Any]:
    message = buffer[: _buffer_nbytes(left)]
    message[-_END_NBYTES:] = 0  # no _end() is 0
    channel.counters.received_nbytes += message.nbytes
    return message, channel.connections.post("recv", message, source)


def _keep(found: list[bytes], message: Array, source: int) -> None:
    """Append the bytes of a message to those received before."""
    nbytes = message.nbytes - _END_NBYTES
    if message[nbytes:].tobytes() != _end(nbytes).tobytes():
        raise FrameError(f"a message of rank {source} is shorter than the {nbytes} bytes that it announced")
    try:
        found.append(message[:nbytes].tobytes())
    except MemoryError as e:
        raise FrameError(f"there is no memory for the frame of rank {source}") from e


def _join(found: list[list[bytes]]) -> list[bytes]:
    joined: list[bytes] = []
    for chunks in found:
        try:
            joined.append(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        except MemoryError as e:
            raise FrameError(f"there is no memory for a frame of {sum(map(len, chunks))} bytes") from e
        chunks.clear()
    return joined
