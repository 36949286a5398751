"""Values as they are instead of frames: where a link is so fast that encoding would take longer than sending."""

from collections.abc import Sequence

import numpy as np
import torch

from codec import FrameError
from codec.torch.channel import Channel
from codec.torch.messages import Array, IncomingValues
from codec.torch.partition import Piece, cut
from codec.torch.reduction import FLOATS, Reduction, floats, refused

# Where values travel as they are, all wait for processors. A chunk of all ranks is expected when the one before it has
# been added up, in the same memory: so little is on its way at a time that caches hold it.
_CHUNK_NBYTES = 3 << 18
_TILE = 1 << 16  # values that are added up at a time, and divided


def two_shot(channel: Channel, r: Reduction) -> tuple[Array, Exception | None]:
    """Two-shot with the values themselves. Lossless frames would give the same bits."""
    size, me, x = channel.size, channel.rank, r.x
    # as for frames: what is owed to sums is owed to those of this rank's slice
    slices = cut(x.size, size, x.itemsize, r.segments, _CHUNK_NBYTES)
    others = channel.others
    room = max(piece.n for piece in slices[me])
    result = r.result(channel, x.size)
    channel.begin(Channel.arena_nbytes([room * x.itemsize] * len(others)))
    rooms = {o: channel.allocate(room * x.itemsize)[: room * x.itemsize].view(x.dtype) for o in others}

    terms = _number_receives(channel, rooms, slices[me][0])
    sums: list[IncomingValues] = []
    if r.residual is not None:
        x = np.empty_like(x)
        with channel.clock.during("encode_s"):
            _settle(floats(r.x, r), r, r.residual, x)
    error = refused(r, x)
    chunks = range(len(slices[me]))
    for c in chunks[:2]:
        _send(channel, x, slices, c)
    for c in chunks:
        piece = slices[me][c]
        error = _arrived(terms) or error
        parts = {o: rooms[o][: piece.n] for o in others} | {me: x[piece.begin : piece.end]}
        total = result[piece.begin : piece.end]
        residual = None if r.sum_residual is None else r.sum_residual(piece.begin, piece.end)
        with channel.clock.during("decode_s"):
            _settle(_add_up([parts[rank] for rank in range(size)], r, total), r, residual, total)
            fault = refused(r, total)
            if fault is not None and not any(refused(r, part) for part in parts.values()):  # whose rank says so itself
                error = error or fault
        # expected in the order in which others send: terms of the next chunk, sums of this one, terms of the one after
        if c + 1 in chunks:
            terms = _number_receives(channel, rooms, slices[me][c + 1])
        sums += [channel.receive_values(result[slices[o][c].begin : slices[o][c].end], o) for o in others]
        for o in others:
            channel.send_values(total, o)
        if c + 2 in chunks:
            _send(channel, x, slices, c + 2)
    error = _arrived(sums) or error
    channel.wait_for_sends()
    return result, error


def _number_receives(channel: Channel, rooms: dict[int, Array], piece: Piece) -> list[IncomingValues]:
    """Expect the values of a piece from other ranks, in their rooms."""
    return [channel.receive_values(room[: piece.n], o) for o, room in rooms.items()]


def _arrived(incoming: Sequence[IncomingValues]) -> FrameError | None:
    """Wait for values; return the error of one of them if any are missing."""
    errors = [each.wait() for each in incoming]
    return next((error for error in errors if error is not None), None)


def _send(channel: Channel, x: Array, slices: list[list[Piece]], c: int) -> None:
    """Chunk c of each other rank's slice."""
    for o in channel.others:
        channel.send_values(x[slices[o][c].begin : slices[o][c].end], o)


def _add_up(parts: Sequence[Array], r: Reduction, total: Array) -> Array:
    """Sum, mean or maximum as codec.reduce has it, in float32; in `total` if that is its dtype."""
    out = total if r.dtype in ("float32", "float64") else np.empty(total.size, np.float32)
    add = _largest if r.op == "max" else np.add
    with np.errstate(over="ignore", invalid="ignore"):  # who refuses Inf and NaN looks at what comes out
        for begin in range(0, out.size, _TILE):
            place = out[begin : begin + _TILE]
            first, second, *more = (floats(part[begin : begin + _TILE], r) for part in parts)
            add(first, second, out=place)
            for each in more:
                add(place, each, out=place)
            if r.op == "mean":
                place /= out.dtype.type(len(parts))
    return out


def _largest(a: Array, b: Array, out: Array) -> None:
    torch.maximum(torch.from_numpy(a), torch.from_numpy(b), out=torch.from_numpy(out))


def _settle(values: Array, r: Reduction, residual: Array | None, place: Array) -> None:
    """Put float32 values into `place`, in the dtype of x, with what is owed to them; the residual gets what is lost.

    As encoders have it: what is finite stays so, at most the largest number; what is not is owed nothing.
    """
    rounded = r.rounded(values)
    if residual is None:
        if values is not place:
            place[:] = rounded
        return
    with np.errstate(over="ignore", invalid="ignore"):
        if r.dtype == "float32":
            np.add(values, residual, out=place)
            residual[:] = 0
            return
        seen = floats(rounded, r)
        owed = np.where(np.isinf(seen), seen, values) + residual
        finite, most = np.isfinite(owed), torch.finfo(FLOATS[r.dtype]).max
        place[:] = r.rounded(np.where(finite, np.clip(owed, -most, most), owed))
        residual[:] = np.where(finite, owed - floats(place, r), 0)
