"""Algorithms that exchange frames (docs/spec/protocol/collectives.md, section 3), and their phases.

In a phase, a rank sends frames to the owners of slices, or to all ranks.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

import codec
from codec._c.traits import is_lossless
from codec.torch.network.inbox import Receive
from codec.torch.reduction.arguments import nonfinite_error
from codec.torch.reduction.host import Frame, Reduction, Values
from codec.torch.reduction.partition import Piece, sent
from codec.torch.transport.collective import CollectivePart
from codec.torch.transport.messages import Array
from codec.torch.transport.rooms import copied, encode_message


async def two_shot(part: CollectivePart, r: Reduction) -> Values:
    """Run a two-shot all-reduce: each rank sums one slice over all ranks, and sends the sum to all ranks.

    A rank sends frames of 2 (N - 1) / N tensors. Slices are sent in chunks, so that encoding, transfer and decoding
    overlap.
    """
    size, me, others = part.size, part.rank, part.others
    slices = r.slices(size)
    bounds = [[r.frame_bound(piece) for piece in pieces] for pieces in slices]
    scatter = ScatterPhase(part, r, slices, part.arena.nbytes_of([b for each in bounds for b in each]))
    chunks, travelling = len(slices[me]), sent(slices)
    sums = {(c, o): part.receive(bounds[o][c], o) for c in range(chunks) for o in others if c in travelling[o]}
    await scatter.send()
    result = r.result(part, r.n)
    for c, piece in travelling[me].items():
        terms = await scatter.terms(c)
        r.check_terms(part, terms, piece)
        number = (size * size + me) * chunks + c
        frame = _encode_sum(part, r, piece, bounds[me][c], terms, result, number)
        for o in others:
            part.send_frame(frame, o)
    part.counters.round_trips += 0.5
    for (c, o), receive in sums.items():
        _decode(part, r, await part.frame(receive), slices[o][c], result, o)
    await part.sent()
    return result


def _decode(part: CollectivePart, r: Reduction, frame: Array, piece: Piece, result: Values, rank: int) -> None:
    """Decode a frame of a sum over all ranks that `rank` has sent."""
    with part.clock.during("decode_s"):
        r.decode_or_defer(frame, piece, result)
        if r.settings.max_norm is not None:
            r.check_values(part, rank, r.as_float32(result[piece.begin : piece.end]), r.ranks_in_sum(part.size))


def _encode_sum(
    part: CollectivePart,
    r: Reduction,
    piece: Piece,
    bound: int,
    terms: Sequence[Array | None],
    result: Values,
    number: int,
) -> Array:
    """Encode the sum of a piece, and store in `result` the values that other ranks will decode."""
    place = result[piece.begin : piece.end]
    with part.clock.during("decode_s"):
        total = place if r.dtype == "float32" and is_lossless(r.spec) else r.sum_buffer(part, piece.n)
        r.sum(terms, piece, total)
        frame = encode_message(part, bound, lambda room: r.encode_sum(total, piece, room, number))
        if not is_lossless(r.spec):
            r.decode_or_defer(frame, piece, result)
        elif total is not place:
            place[:] = r.rounded(total)
    return frame


async def all_gather(part: CollectivePart, r: Reduction) -> Values:
    """Run an all-gather all-reduce: each rank sends its frames to all N - 1 others, and sums all frames."""
    result = r.result(part, r.n)
    async for piece, terms in BroadcastPhase(part, r).terms():
        with part.clock.during("decode_s"):
            r.check_terms(part, terms, piece)
            _store_or_defer_sum(part, r, piece, terms, result[piece.begin :])
    return result


async def senders(part: CollectivePart, r: Reduction) -> Values:
    """Run an all-gather all-reduce that divides each sum by the number of ranks that have sent a nonzero value.

    Sparse frames leave most values out. A value that one rank has sent is the mean of one value, not of N.
    """
    result = r.result(part, r.n)
    async for piece, terms in BroadcastPhase(part, r).terms():
        with part.clock.during("decode_s"):
            r.check_terms(part, terms, piece)
            r.mean_of_senders(terms, piece, result[piece.begin : piece.end])
    return result


def _store_or_defer_sum(
    part: CollectivePart, r: Reduction, piece: Piece, terms: Sequence[Array | None], place: Values
) -> None:
    """Store the sum of a piece in the result, and check that it is finite in the tensor's dtype.

    With deferred results, only check the sum now, and store it after all ranks have succeeded.
    """
    if r.deferred is None:
        store_sum(part, r, piece, terms, place, check=True)
        return
    aside = r.sum_buffer(part, piece.n) if r.dtype == "float32" else np.empty(piece.n, place.dtype)
    store_sum(part, r, piece, terms, aside, check=True, reused=True)
    r.deferred.append(partial(store_sum, part, r, piece, terms, place))


async def reduce_scatter(part: CollectivePart, r: Reduction) -> Values:
    """Run a reduce-scatter: each rank sums one slice over all ranks. All slices have equal size.

    A rank sends frames of (N - 1) / N tensors.
    """
    slices = r.even_slices(part.size)
    scatter = ScatterPhase(part, r, slices)
    await scatter.send()
    mine = slices[part.rank]
    result = r.result(part, r.n // part.size)
    for c, piece in enumerate(mine):
        terms = await scatter.terms(c)
        with part.clock.during("decode_s"):
            r.check_terms(part, terms, piece)
            store_sum(part, r, piece, terms, result[piece.begin - mine[0].begin :], check=True)
    await part.sent()
    return result


def store_sum(
    part: CollectivePart,
    r: Reduction,
    piece: Piece,
    terms: Sequence[Frame | None],
    place: Values,
    *,
    check: bool = False,
    reused: bool = False,
) -> None:
    """Store the sum of a piece.

    Parameters
    ----------
    check : bool
        True: raise ArgumentError for NaN and Inf, as encoding the sum would.
    reused : bool
        True: `place` is read again soon, so it is written with ordinary stores, which keep it in the cache.
    """
    place, check = place[: piece.n], check and r.rejects_nonfinite
    if r.dtype == "float32":
        r.sum(terms, piece, place, nontemporal=r.nontemporal and not reused, check_finite=check)
        return
    total = r.sum_buffer(part, piece.n)
    r.sum(terms, piece, total, check_finite=check)
    place[:] = r.rounded(total)
    # Check the sum as stored: it may be finite in float32 and overflow in the tensor's dtype.
    if check and (fault := nonfinite_error(r, place, summed=True)):
        raise fault


async def all_to_all(part: CollectivePart, r: Reduction) -> Values:
    """Run an all-to-all: each rank sends slice i to rank i. All slices have equal size."""
    slices = r.even_slices(part.size)
    scatter = ScatterPhase(part, r, slices)
    await scatter.send()
    result = r.result(part, r.n)
    for c in range(len(slices[0])):
        for rank, frame in enumerate(await scatter.terms(c)):
            _store_term(part, r, rank, frame, slices[rank][c], slices[part.rank][c], result)
    await part.sent()
    return result


async def gather(part: CollectivePart, r: Reduction) -> Values:
    """Gather the values of all ranks, in rank order; each rank sends its frames to N - 1 others."""
    n = r.n
    result = r.result(part, part.size * n)
    async for piece, frames in BroadcastPhase(part, r).terms():
        for rank, frame in enumerate(frames):
            _store_term(part, r, rank, frame, piece, piece, result[rank * n : (rank + 1) * n])
    return result


def _store_term(
    part: CollectivePart, r: Reduction, rank: int, frame: Array | None, place: Piece, own: Piece, result: Values
) -> None:
    """Store a rank's values of a piece in the result. If `frame` is None, copy this rank's own values."""
    with part.clock.during("decode_s"):
        if frame is None:
            result[place.begin : place.end] = r.own_term(own)
        else:
            r.decode(frame, place, result)
        if r.settings.max_norm is not None:
            r.check_values(part, rank, r.as_float32(result[place.begin : place.end]))


async def ring(part: CollectivePart, r: Reduction) -> Values:
    """Run a ring all-reduce: each rank sends frames of 2 (N - 1) / N tensors, all to the next rank.

    Partial sums travel around the ring; each rank adds its values to them and encodes them again. Then the results
    travel around the ring. A rank sends a chunk as soon as it is summed, while the next chunk is still in transfer.
    Values are added in ring order. Errors of lossy codecs accumulate from rank to rank. Error feedback is impossible,
    because frames contain sums of other ranks' values.
    """
    size, me = part.size, part.rank
    slices = r.slices(size)
    bounds = [[r.frame_bound(piece) for piece in pieces] for pieces in slices]
    left, right, steps = (me - 1) % size, (me + 1) % size, range(size - 1)
    part.arena.reserve(part.arena.nbytes_of(4 * [b for each in bounds for b in each]))
    travelling = sent(slices)

    def received(which: int) -> dict[int, Receive]:
        return {c: part.receive(bounds[which][c], left) for c in travelling[which]}

    sums = [received((me - s - 1) % size) for s in steps]
    results = [received((me - s) % size) for s in steps]
    total = _as_float32(r)
    result = r.result(part, r.n)

    def frame_of(step: int, c: int) -> Array:
        which, last = (me - step) % size, step == size - 1
        piece, bound = slices[which][c], bounds[which][c]
        number = ((size if last else step) * size + me) * len(slices[me]) + c
        if last:
            return _encode_result(part, r, piece, bound, total, result, number)
        return _encode_partial(part, r, piece, bound, total, number)

    for c in travelling[me]:
        part.send_frame(frame_of(0, c), right)
    for s in steps:
        for c, piece in travelling[(me - s - 1) % size].items():
            frame = await part.frame(sums[s][c])
            with part.clock.during("decode_s"):
                r.check_norm(part, left, piece, frame, (s + 1) * r.summed)
                _add(r, frame, piece, total)
            part.send_frame(frame_of(s + 1, c), right)
    for s in steps:
        for c, piece in travelling[(me - s) % size].items():
            frame = await part.frame(results[s][c])
            _decode(part, r, frame, piece, result, left)
            if s < size - 2:
                part.send_frame(copied(part, frame), right)
    await part.sent()
    part.counters.round_trips += size - 1
    return result


def _as_float32(r: Reduction) -> Array:
    """Return a float32 copy of this rank's values."""
    return r.tensor_of(r.x).to(torch.float32, copy=True).numpy()


def _encode_partial(part: CollectivePart, r: Reduction, piece: Piece, bound: int, total: Array, number: int) -> Array:
    return encode_message(part, bound, lambda room: r.encode_sum(total[piece.begin : piece.end], piece, room, number))


def _add(r: Reduction, frame: Array, piece: Piece, total: Array) -> None:
    r.check_frame(frame, piece)
    place = total[piece.begin : piece.end]
    if r.op == "max":
        np.maximum(place, codec.reduce([frame], r.shared_levels(piece), op="sum", codebooks=r.codebooks), out=place)
    else:
        codec.accumulate(frame, place, r.shared_levels(piece), codebooks=r.codebooks)


def _encode_result(
    part: CollectivePart, r: Reduction, piece: Piece, bound: int, total: Array, result: Array, number: int
) -> Array:
    """Encode the result of a piece, and store in `result` the values that other ranks will decode."""
    with part.clock.during("decode_s"):
        if r.op == "mean":
            total[piece.begin : piece.end] /= np.float32(part.size)
        frame = _encode_partial(part, r, piece, bound, total, number)
        r.decode_or_defer(frame, piece, result)
    return frame


# Phases


def _encode_term(part: CollectivePart, r: Reduction, piece: Piece, bound: int, number: int) -> Array:
    return encode_message(part, bound, lambda room: r.encode(piece, room, number))


async def _in_rank_order(
    part: CollectivePart, incoming: Mapping[int, Receive], own: Array | None
) -> list[Array | None]:
    """Wait for the frames of the other ranks; return one item per rank, in rank order. `own`: item of this rank."""
    found: dict[int, Array | None] = {part.rank: own}
    for o, receive in incoming.items():
        found[o] = await part.frame(receive)
    return [found[rank] for rank in range(part.size)]


class ScatterPhase:
    """First phase of most algorithms: each rank receives the terms of its slice from all ranks.

    Parameters
    ----------
    part : CollectivePart
        Part of the collective.
    r : Reduction
        Values of this rank.
    slices : sequence of sequences of Piece
        Pieces of each rank's slice.
    nbytes : int
        Bytes of arena memory that the algorithm needs in addition to this phase.
    """

    def __init__(self, part: CollectivePart, r: Reduction, slices: Sequence[Sequence[Piece]], nbytes: int = 0) -> None:
        self._part, self._r, self._slices, self._sent = part, r, slices, sent(slices)
        self._bounds = [[r.frame_bound(piece) for piece in pieces] for pieces in slices]
        self._own: dict[int, Array | None] = {}
        mine = self._bounds[part.rank]
        needed = [b for bounds in self._bounds for b in bounds] + mine * (part.size - 1)
        part.arena.reserve(nbytes + part.arena.nbytes_of(needed), pinned=r.on_device)
        self._incoming = {c: {o: part.receive(mine[c], o) for o in part.others} for c in self._sent[part.rank]}

    async def send(self) -> None:
        """Encode and send all terms by chunk; within a chunk, the terms for other ranks before those for this rank."""
        part = self._part
        for c in range(max(map(len, self._slices))):
            for o in [*part.others, part.rank]:
                if c not in self._sent[o]:
                    continue
                if o == part.rank:
                    self._own[c] = None if self._r.own_term_is_exact else self._encode(c, o)
                else:
                    part.send_frame(self._encode(c, o), o)
            await part.breathe()
        part.counters.round_trips += 0.5

    def _encode(self, c: int, o: int) -> Array:
        """Return the frame of chunk `c` of the slice of rank `o`."""
        me, size, most = self._part.rank, self._part.size, max(map(len, self._slices))
        return _encode_term(self._part, self._r, self._slices[o][c], self._bounds[o][c], (me * size + o) * most + c)

    async def terms(self, c: int) -> list[Array | None]:
        """Return the frames of chunk `c` of this rank's slice, in rank order, as :meth:`Reduction.sum` expects."""
        return await _in_rank_order(self._part, self._incoming[c], self._own[c])


class BroadcastPhase:
    """Phase in which each rank sends its frames to all ranks, as in an all-gather.

    Parameters
    ----------
    part : CollectivePart
        Part of the collective.
    r : Reduction
        Values of this rank.
    """

    def __init__(self, part: CollectivePart, r: Reduction) -> None:
        self._part, self._r = part, r
        self._pieces = [piece for pieces in r.slices(1) for piece in pieces]
        self._bounds = [r.frame_bound(piece) for piece in self._pieces]
        part.arena.reserve(part.arena.nbytes_of(self._bounds * part.size), pinned=r.on_device)
        self._incoming = [{o: part.receive(b, o) for o in part.others} for b in self._bounds]

    async def terms(self) -> AsyncIterator[tuple[Piece, list[Array | None]]]:
        """Send this rank's frames, and yield each piece with its frames from all ranks, in rank order."""
        part, r = self._part, self._r
        own: list[Array | None] = []
        for c, (piece, bound) in enumerate(zip(self._pieces, self._bounds, strict=True)):
            frame = _encode_term(part, r, piece, bound, part.rank * len(self._pieces) + c)
            for o in part.others:
                part.send_frame(frame, o)
            own.append(None if r.own_term_is_exact else frame)
            await part.breathe()
        part.counters.round_trips += 0.5
        for c, piece in enumerate(self._pieces):
            yield piece, await _in_rank_order(part, self._incoming[c], own[c])
        await part.sent()
