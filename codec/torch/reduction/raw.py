"""All-reduce of uncompressed values, for links so fast that encoding would take longer than sending."""

from collections.abc import Sequence

import numpy as np
import torch

from codec import FrameError
from codec.torch._compat import from_numpy
from codec.torch.reduction.host import FLOATS, Reduction, Result, nonfinite_error
from codec.torch.reduction.partition import Piece, cut
from codec.torch.transport.channel import Channel
from codec.torch.transport.messages import Array, IncomingValues

# Bytes of a chunk. The receives of a chunk are posted when the chunk before has been summed, into the same memory, so
# that all data in flight fits into caches: with uncompressed values the processors are the bottleneck.
_CHUNK_NBYTES = 3 << 18
_TILE = 1 << 16  # values that are summed and divided at a time


def two_shot(channel: Channel, r: Reduction) -> Result:
    """Run two-shot with uncompressed values: each rank sums a slice. Lossless frames would give the same bits.

    Returns
    -------
    ndarray, Exception or None
        Result, and error of this rank.
    """
    size, me, x = channel.size, channel.rank, r.x
    # the slices of frames, so that a residual of sums belongs to the same slice
    slices = cut(x.size, size, x.itemsize, r.segments, _CHUNK_NBYTES)
    others = channel.others
    most = max(piece.n for piece in slices[me])
    result = r.result(channel, x.size)
    channel.begin(channel.arena.nbytes_of([most * x.itemsize] * len(others)))
    buffers = {o: channel.arena.allocate(most * x.itemsize)[: most * x.itemsize].view(x.dtype) for o in others}

    terms = _post_receives(channel, buffers, slices[me][0])
    sums: list[IncomingValues] = []
    if r.residual is not None:
        x = np.empty_like(x)
        with channel.clock.during("encode_s"):
            _round_with_residual(r.as_float32(r.x), r, r.residual, x)
    error = nonfinite_error(r, x)
    chunks = range(len(slices[me]))
    for c in chunks[:2]:
        _send(channel, x, slices, c)
    for c in chunks:
        piece = slices[me][c]
        error = _wait_for(terms) or error
        parts = {o: buffers[o][: piece.n] for o in others} | {me: x[piece.begin : piece.end]}
        total = result[piece.begin : piece.end]
        residual = None if r.sum_residual is None else r.sum_residual(piece.begin, piece.end)
        with channel.clock.during("decode_s"):
            _round_with_residual(_reduce_terms([parts[rank] for rank in range(size)], r, total), r, residual, total)
            fault = nonfinite_error(r, total, summed=True)
            if fault is not None and not any(
                nonfinite_error(r, part) for part in parts.values()
            ):  # else the rank of that term reports it
                error = error or fault
        # post receives in the order in which others send: terms of the next chunk, then sums of this one
        if c + 1 in chunks:
            terms = _post_receives(channel, buffers, slices[me][c + 1])
        sums += [channel.frames.receive_values(result[slices[o][c].begin : slices[o][c].end], o) for o in others]
        for o in others:
            channel.frames.send_values(total, o)
        if c + 2 in chunks:
            _send(channel, x, slices, c + 2)
    error = _wait_for(sums) or error
    channel.frames.wait_for_sends()
    return result, error


def _post_receives(channel: Channel, buffers: dict[int, Array], piece: Piece) -> list[IncomingValues]:
    """Post the receives of a piece's terms from other ranks, into their buffers."""
    return [channel.frames.receive_values(buffer[: piece.n], o) for o, buffer in buffers.items()]


def _wait_for(incoming: Sequence[IncomingValues]) -> FrameError | None:
    """Wait for messages; return the error of the first that lacks values."""
    errors = [each.wait() for each in incoming]
    return next((error for error in errors if error is not None), None)


def _send(channel: Channel, x: Array, slices: list[list[Piece]], c: int) -> None:
    """Send each other rank chunk `c` of its slice."""
    for o in channel.others:
        channel.frames.send_values(x[slices[o][c].begin : slices[o][c].end], o)


def _reduce_terms(parts: Sequence[Array], r: Reduction, total: Array) -> Array:
    """Return the sum, mean or maximum of terms in float32, as codec.reduce does; in `total` if its dtype fits."""
    out = total if r.dtype in ("float32", "float64") else np.empty(total.size, np.float32)
    add = _largest if r.op == "max" else np.add
    with np.errstate(over="ignore", invalid="ignore"):  # the result is checked for Inf and NaN later
        for begin in range(0, out.size, _TILE):
            place = out[begin : begin + _TILE]
            first, second, *more = (r.as_float32(part[begin : begin + _TILE]) for part in parts)
            add(first, second, out=place)
            for each in more:
                add(place, each, out=place)
            if r.op == "mean":
                place /= out.dtype.type(len(parts))
    return out


def _largest(a: Array, b: Array, out: Array) -> None:
    torch.maximum(from_numpy(a), from_numpy(b), out=from_numpy(out))


def _round_with_residual(values: Array, r: Reduction, residual: Array | None, place: Array) -> None:
    """Write float32 values plus their residual to `place`, in the dtype of x; the residual gets the rounding errors.

    As in encoders, finite values stay finite, limited to the largest number of the dtype, and the residual of NaN and
    Inf becomes 0.
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
        seen = r.as_float32(rounded)
        exact = np.where(np.isinf(seen), seen, values) + residual
        finite, most = np.isfinite(exact), torch.finfo(FLOATS[r.dtype]).max
        place[:] = r.rounded(np.where(finite, np.clip(exact, -most, most), exact))
        residual[:] = np.where(finite, exact - r.as_float32(place), 0)
