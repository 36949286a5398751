"""Uncompressed values: an all-reduce, for links that are faster than encoding, and the reduction within a machine."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from codec.specs import Spec
from codec.torch._compat import from_numpy
from codec.torch.network.inbox import Receive
from codec.torch.network.version import hash64
from codec.torch.reduction.arguments import check_finite, nonfinite_error
from codec.torch.reduction.host import FLOATS, Reduction, Values
from codec.torch.reduction.partition import Piece, SentPiece, cut, messages, sent, windows
from codec.torch.transport.collective import Collective, CollectivePart
from codec.torch.transport.levels import Members
from codec.torch.transport.messages import Array
from codec.torch.transport.rooms import Rooms, encode_message
from codec.torch.transport.values import largest_of, reduce_values

_CHUNK_NBYTES = 3 << 18  # bytes of a chunk
# Bytes of a chunk within a machine, so that sums overlap with transfers. For 25 MB and 2 ranks, a rank copies 50 MB to
# and from sockets, in 20 ms of CPU time, as without chunks (Gloo: 14 ms). Chunks of 768 KiB take 27 ms.
_WITHIN_NBYTES = 3 << 20
_SMALL = 1 << 16  # bytes up to which tensors are uncompressed within a machine, and share messages: time is latency
# Numbers of the random streams of frames within a machine, beyond those of frames between machines: rank * _PIECES +
# number of the piece. Results are equal on all machines, so that all machines encode them with the same numbers.
_SCATTER, _GATHER, _PIECES = 1 << 32, 1 << 33, 1 << 12


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
    sums: list[tuple[int, Array, Receive]] = []
    for c, piece in enumerate(slices[me]):
        total = result[piece.begin : piece.end]
        if c in mine:
            found = {me: x[piece.begin : piece.end]} | {o: await rooms.values(*t) for o, t in terms.pop(c).items()}
            with part.clock.during("decode_s"):
                for rank, values in found.items():
                    _check_norm(part, r, rank, values)
                _sum_piece([found[rank] for rank in range(size)], r, piece, total)
        places = [(o, result[pieces[o][c].begin : pieces[o][c].end]) for o in part.others if c in pieces[o]]
        sums += [(o, place, part.receive_values(place, o)) for o, place in places]
        if c + 2 in mine:  # request and send the terms of chunk c + 2 after the sums of this chunk
            terms[c + 2] = rooms.receive(c + 2, mine[c + 2].n)
        if c in mine:
            for o in part.others:
                part.send_values(total, o)
        _send(part, x, pieces, c + 2)
    for o, place, each in sums:
        await part.frame(each)
        _check_norm(part, r, o, place, r.ranks_in_sum(size))
    await part.sent()
    part.counters.round_trips += 1
    return result


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
    """Reduce terms in float32 as codec.reduce does (float64: in float64). Return `total`, or a new float32 array.

    Terms have the dtype of the reduction, or are bfloat16, as uint16.
    """
    out = total if r.dtype in ("float32", "float64") else np.empty(total.size, np.float32)
    reduce_values(parts, r.op, out, lambda x: _as_float32(x, r))
    return out


def _as_float32(x: Array, r: Reduction) -> Array:
    """Return values of the reduction's dtype or of bfloat16 as float32, without a copy if they already are."""
    return r.as_float32(x) if x.dtype == r.x.dtype else from_numpy(x).view(torch.bfloat16).float().numpy()


def _check_norm(part: CollectivePart, r: Reduction, rank: int, values: Array, count: int | None = None) -> None:
    """Check the norm of uncompressed values of a rank, in the reduction's dtype or bfloat16."""
    if r.settings.max_norm is not None:
        r.check_values(part, rank, _as_float32(values, r), count)


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
    return windows_of(r, members)[members.rank][:2]


class Within:
    """Reduction of tensors within a machine, before and after they are reduced between machines.

    :meth:`scatter` reduces the values of the machine's ranks, so that each rank has one window of each tensor. Then the
    ranks at the same place of all machines reduce their windows. :meth:`gather` completes the tensors. If each machine
    has one rank, a window is the whole tensor, and nothing is sent.

    Values are sent as ``codec.options(within=)`` says, without error feedback. A rank adds its own values unrounded. In
    :meth:`gather`, it decodes its own messages, too, so that results are bit-identical on all ranks.

    Parameters
    ----------
    collective : Collective
        Collective that reduces the tensors.
    whole : sequence of Reduction
        The tensors, without residuals.
    item : int, str or None
        Item that must be equal on all ranks, as for :func:`codec.torch.reduction.execution.run_several`.
    """

    _on_gpus = False  # True: a subclass reduces values on GPUs

    def __init__(self, collective: Collective, whole: Sequence[Reduction], item: int | str | None = None) -> None:
        self._collective, self._members, self._item = collective, collective.levels.within, item
        self._flat, self._whole = collective.levels.flat, whole
        if self._flat or self._on_gpus:
            return
        self._on_host = [r.on_host() for r in whole]
        self._outs: list[Array] = []  # memory for the result of each tensor
        self._codings = [_coding_of(r) for r in self._on_host]
        slices = [coding.slices(self._members.size) for coding in self._codings]
        self._messages = messages(slices, [coding.itemsize for coding in self._codings], _SMALL)

    def window(self, r: Reduction) -> tuple[int, int]:
        """Return the begin and end of this rank's window of a tensor."""
        return window_of(r, self._members)

    async def scatter(self) -> list[Reduction]:
        """Return the reduction of this rank's window of each tensor between machines."""
        if self._flat:
            return [*self._whole]
        self._scatter = part = self._part("scatter")
        found, mine = [self._narrowed(part, r) for r in self._on_host], self._messages[part.rank]
        rooms = [self._nbytes(each) for each in mine for _ in range(len(part.others) - self._is_direct(each))]
        part.arena.reserve(part.arena.nbytes_of(rooms) + self._encoded_nbytes(part, part.others))
        first = min(part.others)  # its values are received into the memory of the sum, whose first or second term it is
        incoming: list[dict[int, Receive]] = []
        for message in mine:
            places = {first: self._place(message, found)}
            incoming.append({o: self._request(part, message, o, places.get(o)) for o in part.others})
        for r, coding in zip(self._on_host, self._codings, strict=True):
            r.deferred = None
            check_finite(r, r.x)
            coding.check(r.x)
        number = _SCATTER + self._collective.rank * _PIECES
        for turn in self._turns(part):
            for o, message in turn:
                body = [self._codings[i].encode(part, self._on_host[i].x, p, number + n) for i, p, n in message]
                part.send(body, o, data=True)
            await part.breathe()
        for message, receives in zip(mine, incoming, strict=True):
            theirs = {o: self._split(await part.frame(receive), message) for o, receive in receives.items()}
            with part.clock.during("decode_s"):
                for at, each in enumerate(message):
                    terms = [theirs[rank][at] if rank in theirs else None for rank in range(part.size)]
                    for rank, term in enumerate(terms):
                        self._codings[each.tensor].check_norm(part, rank, each.piece, term)
                    self._codings[each.tensor].reduce(terms, each.piece, self._place([each], found))
        return found

    def _narrowed(self, part: CollectivePart, r: Reduction) -> Reduction:
        """Return the reduction of this rank's window of a tensor, with memory for the values and the result."""
        w = windows_of(r, self._members)[part.rank]
        self._outs.append(part.arena.result_buffer(r.n, r.x.dtype) if r.out is None else r.out)
        return r.narrowed(w, part.arena.result_buffer(w.n, r.x.dtype), self._outs[-1][w.begin : w.end], part.size)

    def _place(self, message: list[SentPiece], found: list[Reduction]) -> Array:
        """Return the memory for the sum of the first piece in a message."""
        i, piece, _ = message[0]
        begin, _ = self.window(self._on_host[i])
        return found[i].x[piece.begin - begin : piece.end - begin]

    async def gather(self, results: Sequence[Values]) -> list[Values]:
        """Return the whole tensors, of which `results` are this rank's windows after :meth:`scatter`."""
        if self._flat:
            return [*results]
        part = self._part("gather")
        for r, coding, out, result in zip(self._on_host, self._codings, self._outs, results, strict=True):
            begin, end = self.window(r)
            if result.ctypes.data != out[begin:end].ctypes.data:
                out[begin:end] = result
            coding.check(out[begin:end], summed=True)
        theirs = [each for turn in self._turns(part) for each in turn]
        rooms = [self._nbytes(message) for _, message in theirs if not self._is_direct(message)]
        part.arena.reserve(part.arena.nbytes_of(rooms) + self._encoded_nbytes(part, [part.rank]))
        incoming: list[Receive] = []
        for o, message in theirs:
            i, piece, _ = message[0]
            incoming.append(self._request(part, message, o, self._outs[i][piece.begin : piece.end]))
        for message in self._messages[part.rank]:
            body = [self._codings[i].encode(part, self._outs[i], p, _GATHER + number) for i, p, number in message]
            self._decode(part, part.rank, body, message)
            for o in part.others:
                part.send(body, o, data=True)
            await part.breathe()
        for (o, message), receive in zip(theirs, incoming, strict=True):
            self._decode(part, o, self._split(await part.frame(receive), message), message)
        await self._scatter.sent()
        await part.sent()
        return [r.from_host(out) for r, out in zip(self._whole, self._outs, strict=True)]

    def _part(self, name: str, collective: Collective | None = None) -> CollectivePart:
        """Begin a part among the ranks of this machine, by default of the collective that reduces the tensors."""
        values = ", ".join(f"{r.n} of {r.dtype}, {r.op} by {r.spec}" for r in self._whole)
        fields = {"collective": f"{name} within a machine{' by NCCL' * self._on_gpus}", "values": values}
        fields |= self._collective.levels.signed(self._whole[0].settings.within)
        fields |= {} if self._item is None else {"step": str(self._item)}
        return (collective or self._collective).part(hash64(*fields.items()), fields, self._members)

    def _turns(self, part: CollectivePart) -> Iterator[list[tuple[int, list[SentPiece]]]]:
        """Yield the messages with the windows of other ranks, those that are sent at the same time together."""
        for k in range(max(map(len, self._messages))):
            yield [(o, self._messages[o][k]) for o in part.others if k < len(self._messages[o])]

    def _nbytes(self, message: list[SentPiece]) -> int:
        """Return the maximum bytes of a message."""
        return sum(self._codings[i].nbytes(piece) for i, piece, _ in message)

    def _encoded_nbytes(self, part: CollectivePart, ranks: Sequence[int]) -> int:
        """Return the bytes of arena memory for encoding the messages with the windows of some ranks."""
        pieces = [(self._codings[i], piece) for o in ranks for message in self._messages[o] for i, piece, _ in message]
        return part.arena.nbytes_of([coding.nbytes(piece) for coding, piece in pieces if coding.encodes])

    def _is_direct(self, message: list[SentPiece]) -> bool:
        """Return True if a message can be received into the memory of a tensor."""
        return len(message) == 1 and not self._codings[message[0].tensor].encodes

    def _request(self, part: CollectivePart, message: list[SentPiece], source: int, place: Array | None) -> Receive:
        """Request a message from a rank, into `place` if possible, otherwise into memory of the arena."""
        nbytes = self._nbytes(message)
        if not self._codings[message[0].tensor].itemsize:
            return part.receive(nbytes, source)
        if place is None or not self._is_direct(message):
            place = part.arena.allocate(nbytes)
        return part.receive_values(place, source)

    def _split(self, body: Array, message: list[SentPiece]) -> list[Array]:
        """Return the bytes of each piece in a message."""
        return np.split(body, np.cumsum([self._codings[i].nbytes(piece) for i, piece, _ in message[:-1]], dtype=int))

    def _decode(self, part: CollectivePart, rank: int, body: Sequence[Array], message: list[SentPiece]) -> None:
        """Decode the pieces in a message of a rank into the results."""
        with part.clock.during("decode_s"):
            for data, (i, piece, _) in zip(body, message, strict=True):
                count = self._on_host[i].ranks_in_sum(self._collective.size)
                self._codings[i].check_norm(part, rank, piece, data, count)
                self._codings[i].decode(data, piece, self._outs[i])


def _coding_of(r: Reduction) -> "_Plain | _Frames":
    """Return the coding of a tensor that ``codec.options(within=)`` has chosen; small tensors stay uncompressed."""
    within = None if r.x.nbytes <= _SMALL else r.settings.within
    return _Frames(r, within) if isinstance(within, Spec) else _Plain(r, narrow=within == "bfloat16")


class _Plain:
    """Uncompressed values; with `narrow`, float32 values are rounded to bfloat16."""

    def __init__(self, r: Reduction, *, narrow: bool) -> None:
        self._r = r
        self.encodes = narrow and r.dtype == "float32"  # True: encoding needs memory of the arena
        self._dtype = np.dtype(np.uint16) if self.encodes else r.x.dtype
        self.itemsize = self._dtype.itemsize  # bytes of a value in messages; 0: messages are frames

    def slices(self, size: int) -> list[list[Piece]]:
        """Return the pieces of the window of each rank."""
        return cut(self._r.n, size, self._r.x.itemsize, self._r.segments, _WITHIN_NBYTES)

    def nbytes(self, piece: Piece) -> int:
        """Return the maximum bytes of a piece in a message."""
        return piece.n * self.itemsize

    def check(self, x: Array, *, summed: bool = False) -> None:
        """Raise ArgumentError if values of this rank, or sums over ranks if `summed`, cannot be encoded."""

    def encode(self, part: CollectivePart, x: Array, piece: Piece, number: int) -> Array:
        """Return the bytes of a piece of the flat tensor `x`; frames use random stream `number`."""
        values = x[piece.begin : piece.end]
        if not self.encodes:
            return np.ascontiguousarray(values).view(np.uint8)
        room = part.arena.allocate(self.nbytes(piece))
        with part.clock.during("encode_s"):
            from_numpy(room).view(torch.bfloat16).copy_(from_numpy(values))
        return room

    def check_norm(self, part: CollectivePart, rank: int, piece: Piece, data: Array | None, count: int = 1) -> None:
        """Check the norm of a rank's bytes of a piece; None: this rank's own values."""
        _check_norm(part, self._r, rank, self._r.own_term(piece) if data is None else data.view(self._dtype), count)

    def reduce(self, terms: Sequence[Array | None], piece: Piece, place: Array) -> None:
        """Store the sum, mean or maximum of a piece over the ranks' bytes in `place`; None: this rank's own values."""
        own = self._r.own_term(piece)
        total = reduce_terms([own if term is None else term.view(self._dtype) for term in terms], self._r, place)
        if total is not place:
            place[:] = self._r.rounded(total)

    def decode(self, data: Array, piece: Piece, out: Array) -> None:
        """Store the values of a piece in the flat tensor `out`."""
        place = out[piece.begin : piece.end]
        if self.encodes:
            from_numpy(place).copy_(from_numpy(data).view(torch.bfloat16))
        elif data.ctypes.data != place.ctypes.data:
            place[:] = data.view(self._dtype)


class _Frames:
    """Frames of a spec."""

    itemsize, encodes = 0, True

    def __init__(self, r: Reduction, spec: Spec) -> None:
        self._r = Reduction(r.x, r.dtype, spec, r.op, r.stream, r.segments, settings=r.settings)

    def slices(self, size: int) -> list[list[Piece]]:
        return self._r.slices(size)

    def nbytes(self, piece: Piece) -> int:
        return self._r.frame_bound(piece)

    def check(self, x: Array, *, summed: bool = False) -> None:
        if (error := nonfinite_error(self._r, x, summed=summed)) is not None:
            raise error

    def encode(self, part: CollectivePart, x: Array, piece: Piece, number: int) -> Array:
        r = replace(self._r, x=x)
        return encode_message(part, self.nbytes(piece), lambda room: r.encode(piece, room, number))

    def check_norm(self, part: CollectivePart, rank: int, piece: Piece, data: Array | None, count: int = 1) -> None:
        self._r.check_norm(part, rank, piece, data, count)

    def reduce(self, terms: Sequence[Array | None], piece: Piece, place: Array) -> None:
        r, is_max = self._r, self._r.op == "max"
        total = place if r.dtype == "float32" else np.empty(piece.n, np.float32)
        r.sum([term for term in terms if term is not None] if is_max else terms, piece, total)
        if is_max:
            largest_of(total, r.as_float32(r.own_term(piece)), total)
        if total is not place:
            place[:] = r.rounded(total)

    def decode(self, data: Array, piece: Piece, out: Array) -> None:
        self._r.decode(data, piece, out)
