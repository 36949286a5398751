"""All-reduce of uncompressed values, for links that are so fast that encoding takes longer than sending."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from codec.torch._compat import from_numpy
from codec.torch.network.inbox import Receive
from codec.torch.reduction.device import DeviceReduction
from codec.torch.reduction.host import FLOATS, Reduction, Values, nonfinite_error
from codec.torch.reduction.partition import Piece, cut, sent
from codec.torch.transport.collective import CollectivePart
from codec.torch.transport.messages import Array

_CHUNK_NBYTES = 3 << 18  # bytes of a chunk
_TILE = 1 << 16  # number of values that are summed and divided at a time, so that they stay in the cache


async def two_shot(part: CollectivePart, r: Reduction) -> Array:
    """Run two-shot with uncompressed values. The result is bit-identical to that with lossless frames."""
    size, me, x = part.size, part.rank, r.x
    # use the slices of encoded collectives, since residuals of sums belong to slices
    slices = cut(x.size, size, x.itemsize, r.segments, _CHUNK_NBYTES)
    result = r.result(part, x.size)
    rooms = _Rooms(part, max(piece.n for piece in slices[me]), x.dtype)
    if r.residual is not None:
        x = np.empty_like(x)
        with part.clock.during("encode_s"):
            _round_with_residual(r.as_float32(r.x), r, r.residual, x)
    _check_finite(r, x)
    pieces = sent(slices)
    mine = pieces[me]
    terms = {c: rooms.receive(c, mine[c].n) for c in (0, 1) if c in mine}
    for c in (0, 1):
        _send(part, x, pieces, c)
    sums: list[Receive] = []
    for c, piece in enumerate(slices[me]):
        total = result[piece.begin : piece.end]
        if c in mine:
            own = {me: x[piece.begin : piece.end]}
            found = own | {o: await rooms.values(*each) for o, each in terms.pop(c).items()}
            with part.clock.during("decode_s"):
                _sum_piece([found[rank] for rank in range(size)], r, piece, total)
        theirs = [(o, pieces[o][c]) for o in part.others if c in pieces[o]]
        sums += [part.receive_values(result[other.begin : other.end], o) for o, other in theirs]
        if c + 2 in mine:  # request and send the terms of chunk c + 2 after the sums of this chunk
            terms[c + 2] = rooms.receive(c + 2, mine[c + 2].n)
        if c in mine:
            for o in part.others:
                part.send_values(total, o)
        _send(part, x, pieces, c + 2)
    for each in sums:
        await part.frame(each)
    await part.sent()
    part.counters.round_trips += 1
    return result


class _Rooms:
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


def _check_finite(r: Reduction, x: Array) -> None:
    if (error := nonfinite_error(r, x)) is not None:
        raise error


def _send(part: CollectivePart, x: Array, pieces: list[dict[int, Piece]], c: int) -> None:
    """Send each other rank chunk `c` of its slice, if it has this chunk."""
    for o in part.others:
        if c in pieces[o]:
            part.send_values(x[pieces[o][c].begin : pieces[o][c].end], o)


def _sum_piece(terms: Sequence[Array], r: Reduction, piece: Piece, total: Array) -> None:
    """Store the sum of a piece, plus the residual of sums, in `total`, rounded to the dtype of `total`.

    Raises
    ------
    ArgumentError
        The sum contains NaN or Inf, but no term does. (For a term with NaN or Inf, its rank raises the error.)
    """
    residual = None if r.sum_residual is None else r.sum_residual(piece.begin, piece.end)
    _round_with_residual(_reduce_terms(terms, r, total), r, residual, total)
    fault = nonfinite_error(r, total, summed=True)
    if fault is not None and not any(nonfinite_error(r, term) for term in terms):
        raise fault


def _reduce_terms(parts: Sequence[Array], r: Reduction, total: Array) -> Array:
    """Reduce terms in float32 as codec.reduce does (float64: in float64). Return `total`, or a new float32 array."""
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
    """Write float32 values plus their residual to `place`, in the dtype of x; the rounding errors become the residual.

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


async def plain(part: CollectivePart, r: DeviceReduction) -> Values:
    """Run NCCL's uncompressed all-reduce, which adds in the tensor's dtype and in an order that NCCL chooses.

    For a mean, values are divided before the sum, as in DDP. Residuals are added to the values; new residuals are the
    errors of rounding to the tensor's dtype.
    """
    values = _shares(part, r)
    if r.rejects_nonfinite:  # raise the error that encoding the values would raise
        r.refuse_nonfinite(values)
        r.settle(part.device)
    await part.gather([0])  # wait for all ranks, since NCCL's messages could not be cancelled if a rank had failed
    part.counters.round_trips += 1
    with part.device.phase():
        part.device.all_reduce(values, part.counters)
    if r.rejects_nonfinite:
        r.refuse_overflow(values)
    if r.out is None:
        return values
    return r.out.copy_(values)


def _shares(part: CollectivePart, r: DeviceReduction) -> torch.Tensor:
    """Return the values that this rank contributes to the sum, in new memory, and update the residuals."""
    share = part.size if r.op == "mean" else 1
    if r.residual is None and r.sum_residual is None:
        return r.x / share
    exact = r.as_float32(r.x) if r.residual is None else r.as_float32(r.x) + r.residual
    exact = exact / share
    if r.sum_residual is not None:
        mine = r.slices(part.size)[part.rank]
        sums = r.sum_residual(mine[0].begin, mine[-1].end)
        exact[mine[0].begin : mine[-1].end] += sums
        sums.zero_()
    values = exact.to(FLOATS[r.dtype])
    if r.residual is not None:
        r.residual.copy_(((exact - values.float()) * share).nan_to_num_(0.0, 0.0, 0.0))
    return values
