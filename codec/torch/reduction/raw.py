"""Uncompressed values: an all-reduce, for links that are faster than encoding, and the reduction within a machine."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from codec.torch._compat import from_numpy
from codec.torch.network.inbox import Receive
from codec.torch.network.version import hash64
from codec.torch.reduction.host import FLOATS, Reduction, Values, nonfinite_error
from codec.torch.reduction.partition import Piece, cut, sent, windows
from codec.torch.transport.collective import Collective, CollectivePart
from codec.torch.transport.levels import Members
from codec.torch.transport.messages import Array
from codec.torch.transport.rooms import Rooms

_CHUNK_NBYTES = 3 << 18  # bytes of a chunk
_TILE = 1 << 16  # number of values that are summed and divided at a time, so that they stay in the cache


async def two_shot(part: CollectivePart, r: Reduction) -> Array:
    """Run two-shot with uncompressed values. The result is bit-identical to that with lossless frames."""
    size, me, x = part.size, part.rank, r.x
    # use the slices of encoded collectives, since residuals of sums belong to slices
    slices = cut(x.size, size, x.itemsize, r.segments, _CHUNK_NBYTES, r.weights)
    result = r.result(part, x.size)
    rooms = Rooms(part, max(piece.n for piece in slices[me]), x.dtype)
    if r.residual is not None:
        x = np.empty_like(x)
        with part.clock.during("encode_s"):
            _round_with_residual(r.as_float32(r.x), r, r.residual, x)
    check_finite(r, x)
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


def check_finite(r: Reduction, x: Array) -> None:
    """Raise ArgumentError if values of this rank contain NaN or Inf, and the codec refuses them."""
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
    _round_with_residual(reduce_terms(terms, r, total), r, residual, total)
    fault = nonfinite_error(r, total, summed=True)
    if fault is not None and not any(nonfinite_error(r, term) for term in terms):
        raise fault


def reduce_terms(parts: Sequence[Array], r: Reduction, total: Array) -> Array:
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


def windows_of(r: Reduction, members: Members) -> list[Piece]:
    """Return the window of a tensor that each rank of a machine reduces with other machines."""
    return windows(r.n, members.size, r.x.itemsize, r.segments)


def window_of(r: Reduction, members: Members) -> tuple[int, int]:
    """Return the begin and end of this rank's window of a tensor."""
    mine = windows_of(r, members)[members.rank]
    return mine.begin, mine.end


class Within:
    """Reduction of tensors within a machine, before and after they are reduced between machines.

    :meth:`scatter` reduces the values of the machine's ranks, so that each rank has one window of each tensor. Then the
    ranks at the same place of all machines reduce their windows. :meth:`gather` completes the tensors. If each machine
    has one rank, a window is the whole tensor, and nothing is sent.

    Parameters
    ----------
    collective : Collective
        Collective that reduces the tensors.
    whole : sequence of Reduction
        The tensors, without residuals.
    item : int, str or None
        Item that must be equal on all ranks, as for :func:`codec.torch.reduction.execution.run_several`.
    """

    def __init__(self, collective: Collective, whole: Sequence[Reduction], item: int | str | None = None) -> None:
        self._collective, self._members, self._item = collective, collective.levels.within, item
        self._flat = collective.levels.flat
        self._whole = whole
        self._on_host = whole if self._flat else [r.on_host() for r in whole]
        self._outs: list[Array] = []  # memory for the result of each tensor

    def window(self, r: Reduction) -> tuple[int, int]:
        """Return the begin and end of this rank's window of a tensor."""
        return window_of(r, self._members)

    async def scatter(self) -> list[Reduction]:
        """Return the reduction of this rank's window of each tensor between machines."""
        if self._flat:
            return [*self._whole]
        part = self._part("scatter")
        for r in self._on_host:
            r.deferred = None
            self._outs.append(part.arena.result_buffer(r.n, r.x.dtype) if r.out is None else r.out)
        incoming = [self._request(part, r) for r in self._on_host]
        for r in self._on_host:
            check_finite(r, r.x)
            self._send(part, {o: r.x[w.begin : w.end] for o, w in enumerate(windows_of(r, self._members))})
        found = [
            await self._reduced(part, r, rooms, out)
            for r, rooms, out in zip(self._on_host, incoming, self._outs, strict=True)
        ]
        await part.sent()
        return found

    async def gather(self, results: Sequence[Values]) -> list[Values]:
        """Return the whole tensors, of which `results` are this rank's windows after :meth:`scatter`."""
        if self._flat:
            return [*results]
        part, incoming = self._part("gather"), list[Receive]()
        for r, out, result in zip(self._on_host, self._outs, results, strict=True):
            begin, end = self.window(r)
            if result.ctypes.data != out[begin:end].ctypes.data:
                out[begin:end] = result
            for o, w in enumerate(windows_of(r, self._members)):
                if o != part.rank and w.n:
                    incoming.append(part.receive_values(out[w.begin : w.end], o))
            self._send(part, dict.fromkeys(part.others, out[begin:end]))
        for each in incoming:
            await part.frame(each)
        await part.sent()
        return [r.from_host(out) for r, out in zip(self._whole, self._outs, strict=True)]

    def _part(self, name: str) -> CollectivePart:
        """Begin a part of the collective among the ranks of this machine."""
        sizes = ", ".join(f"{r.n} of {r.dtype}" for r in self._whole)
        fields = {"collective": f"{name} within a machine", "values": sizes, "levels": str(self._collective.levels)}
        if self._item is not None:
            fields["step"] = str(self._item)
        return self._collective.part(hash64(*fields.items()), fields, self._members)

    def _request(self, part: CollectivePart, r: Reduction) -> dict[int, tuple[Array, Receive]]:
        """Request the values of a tensor's window from the other ranks of the machine."""
        begin, end = self.window(r)
        nbytes = (end - begin) * r.x.itemsize
        part.arena.reserve(part.arena.nbytes_of([nbytes] * len(part.others)))
        rooms = {o: part.arena.allocate(nbytes).view(r.x.dtype) for o in part.others}
        return {o: (room, part.receive_values(room, o)) for o, room in rooms.items()} if nbytes else {}

    def _send(self, part: CollectivePart, values: Mapping[int, Array]) -> None:
        for o in part.others:
            if values[o].size:
                part.send_values(values[o], o)

    async def _reduced(
        self, part: CollectivePart, r: Reduction, incoming: Mapping[int, tuple[Array, Receive]], out: Array
    ) -> Reduction:
        """Return the reduction of this rank's window of a tensor, when the values of the machine have arrived."""
        mine = windows_of(r, self._members)[part.rank]
        terms = {part.rank: r.x[mine.begin : mine.end]}
        for o, (room, receive) in incoming.items():
            await part.frame(receive)
            terms[o] = room
        values = part.arena.result_buffer(mine.n, r.x.dtype)
        if mine.n:
            with part.clock.during("decode_s"):
                values[:] = r.rounded(reduce_terms([terms[rank] for rank in range(part.size)], r, values))
        return r.narrowed(mine, values, out[mine.begin : mine.end])
