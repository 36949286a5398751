"""Algorithms that send frames (docs/protocol.md, section 8). They do not write to tensors of the caller."""

from collections.abc import Generator, Sequence
from functools import partial

import numpy as np
import torch

import codec
from codec.specs import Lossless
from codec.torch.reduction.host import Frame, Reduction, Result, Values, nonfinite_error
from codec.torch.reduction.partition import Piece
from codec.torch.reduction.phases import BroadcastPhase, FirstError, ScatterPhase, copy_to_message, encode_message
from codec.torch.transport.channel import Channel
from codec.torch.transport.messages import Array

# An algorithm as a generator, which yields where it would wait for other ranks. A step posts the receives of its own
# messages, so that interleaved algorithms receive in the order in which they send.
Steps = Generator[None, None, Result]


def interleave(several: Sequence[Steps]) -> list[Result]:
    """Run several algorithms, step by step in turn, so that one computes while messages of the others are in flight.

    Returns
    -------
    list of (ndarray, Exception or None)
        Result of each algorithm, and its error on this rank.
    """
    found: dict[int, Result] = {}
    try:
        while len(found) < len(several):
            for i, steps in enumerate(several):
                if i not in found:
                    try:
                        next(steps)
                    except StopIteration as end:
                        found[i] = end.value
    finally:  # messages in flight keep connections open
        for steps in several:
            steps.close()
    return [found[i] for i in range(len(several))]


def two_shot_steps(channel: Channel, r: Reduction) -> Steps:
    """Run a two-shot all-reduce: each rank sums a slice and sends the sum to all, 2 (N - 1) / N frames a rank.

    Slices are sent in chunks, so that encoding, wire and decoding overlap.
    """
    size, me, others = channel.size, channel.rank, channel.others
    slices = r.slices(size)
    bounds = [[r.bound(piece.n) for piece in pieces] for pieces in slices]
    first_error = FirstError(channel)
    scatter = ScatterPhase(channel, r, slices, first_error)
    scatter.begin(channel.arena.nbytes_of([b for each in bounds for b in each]))
    scatter.send()
    result = r.result(channel, r.n)
    yield
    chunks = range(len(slices[me]))
    sums = {(c, o): channel.frames.receive(bounds[o][c], o) for c in chunks for o in others}
    for c, piece in enumerate(slices[me]):
        parts = scatter.terms(c)
        number = (size * size + me) * len(chunks) + c
        message = first_error(_encode_sum, channel, r, piece, bounds[me][c], parts, result, number)
        for o in others:
            channel.frames.send(message, o)
    yield
    for c in chunks:
        for o in others:
            frame = first_error.frame(sums[c, o])
            first_error(r.decode_or_defer, frame, slices[o][c], result)
    channel.frames.wait_for_sends()
    return result, first_error.error


def two_shot(channel: Channel, r: Reduction) -> Result:
    """Run :func:`two_shot_steps` by itself."""
    return interleave([two_shot_steps(channel, r)])[0]


def _encode_sum(
    channel: Channel, r: Reduction, piece: Piece, bound: int, parts: Sequence[Array | None], result: Values, number: int
) -> Array:
    """Return the message with the sum of a piece, and store the sum as other ranks decode it in the result."""
    place = result[piece.begin : piece.end]
    total = place if r.dtype == "float32" and isinstance(r.spec, Lossless) else r.sum_buffer(channel, piece.n)
    r.sum(parts, piece, total)
    message = encode_message(channel, bound, lambda room: r.encode_sum(total, piece, room, number))
    if not isinstance(r.spec, Lossless):
        r.decode_or_defer(channel.arena.frame_buffer(message), piece, result)
    elif total is not place:
        place[:] = r.rounded(total)
    return message


def all_gather_steps(channel: Channel, r: Reduction) -> Steps:
    """Run an all-gather: each rank sends its frames to all, and sums all of them; one phase, N - 1 frames a rank."""
    result = r.result(channel, r.n)
    first_error = FirstError(channel)
    broadcast = BroadcastPhase(channel, r, first_error)
    yield
    for piece, parts in broadcast.terms():
        first_error(_store_or_defer_sum, channel, r, piece, parts, result[piece.begin :])
    return result, first_error.error


def all_gather(channel: Channel, r: Reduction) -> Result:
    """Run :func:`all_gather_steps` by itself."""
    return interleave([all_gather_steps(channel, r)])[0]


def _store_or_defer_sum(
    channel: Channel, r: Reduction, piece: Piece, parts: Sequence[Array | None], place: Values
) -> None:
    """Store the sum of a piece in the result, if its dtype can hold it; other algorithms check that by encoding."""
    if r.deferred is None:
        store_sum(channel, r, piece, parts, place, check=True)
        return
    aside = r.sum_buffer(channel, piece.n) if r.dtype == "float32" else np.empty(piece.n, place.dtype)
    store_sum(channel, r, piece, parts, aside, check=True, reused=True)
    r.deferred.append(partial(store_sum, channel, r, piece, parts, place))


def reduce_scatter(channel: Channel, r: Reduction) -> Result:
    """Run a reduce-scatter: each rank sums a slice; (N - 1) / N frames a rank. Slices have one size."""
    slices = r.even_slices(channel.size)
    first_error = FirstError(channel)
    scatter = ScatterPhase(channel, r, slices, first_error)
    scatter.begin()
    scatter.send()
    mine = slices[channel.rank]
    result = r.result(channel, r.n // channel.size)
    for c, piece in enumerate(mine):
        parts = scatter.terms(c)
        place = result[piece.begin - mine[0].begin :]
        first_error(partial(store_sum, check=True), channel, r, piece, parts, place)
    channel.frames.wait_for_sends()
    return result, first_error.error


def store_sum(
    channel: Channel,
    r: Reduction,
    piece: Piece,
    parts: Sequence[Frame | None],
    place: Values,
    *,
    check: bool = False,
    reused: bool = False,
) -> None:
    """Store the sum of a piece.

    Parameters
    ----------
    check : bool
        Check for NaN and Inf, as encoding the sum would.
    reused : bool
        `place` is memory that is read soon, so it should stay in the cache.
    """
    place, check = place[: piece.n], check and r.rejects_nonfinite
    if r.dtype == "float32":
        r.sum(parts, piece, place, nontemporal=r.nontemporal and not reused, check_finite=check)
        return
    total = r.sum_buffer(channel, piece.n)
    r.sum(parts, piece, total, check_finite=check)
    place[:] = r.rounded(total)
    if check and (fault := nonfinite_error(r, place, summed=True)):  # the sum overflows only in the tensor's dtype
        raise fault


def all_to_all(channel: Channel, r: Reduction) -> Result:
    """Run an all-to-all: slice i of each rank goes to rank i; (N - 1) / N frames a rank. Slices have one size."""
    slices = r.even_slices(channel.size)
    first_error = FirstError(channel)
    scatter = ScatterPhase(channel, r, slices, first_error)
    scatter.begin()
    scatter.send()
    result = r.result(channel, r.n)
    for c in range(len(slices[0])):
        for rank, part in enumerate(scatter.terms(c) or ()):
            first_error(_store_term, r, part, slices[rank][c], result)
    channel.frames.wait_for_sends()
    return result, first_error.error


def gather(channel: Channel, r: Reduction) -> Result:
    """Gather the values of all ranks, in their order; N - 1 frames a rank."""
    n = r.n
    result = r.result(channel, channel.size * n)
    first_error = FirstError(channel)
    for piece, parts in BroadcastPhase(channel, r, first_error).terms():
        for rank, part in enumerate(parts or ()):
            first_error(_store_term, r, part, piece, result[rank * n : (rank + 1) * n])
    return result, first_error.error


def _store_term(r: Reduction, part: Array | None, piece: Piece, result: Values) -> None:
    """Store a rank's values of a piece in the result, from their frame; None: this rank's own values."""
    if part is None:
        result[piece.begin : piece.end] = r.own_term(piece)
    else:
        r.decode(part, piece, result)


def ring(channel: Channel, r: Reduction) -> Result:
    """Run a ring all-reduce: 2 (N - 1) / N frames a rank, all to one peer.

    Partial sums pass all ranks, each of which adds its values and encodes them anew; then the results pass all ranks. A
    chunk is sent on as soon as it is summed, while the next one is on the wire. Values are summed in the order in which
    they pass the ranks. Errors of lossy codecs add up. There is no error feedback, because frames hold sums of other
    ranks' values.
    """
    size, me = channel.size, channel.rank
    slices = r.slices(size)
    bounds = [[r.bound(piece.n) for piece in pieces] for pieces in slices]
    left, right, steps = (me - 1) % size, (me + 1) % size, range(size - 1)
    channel.begin(channel.arena.nbytes_of(4 * [b for each in bounds for b in each]))
    sums = [[channel.frames.receive(b, left) for b in bounds[(me - s - 1) % size]] for s in steps]
    results = [[channel.frames.receive(b, left) for b in bounds[(me - s) % size]] for s in steps]
    first_error = FirstError(channel)
    total = _as_float32(r)
    result = r.result(channel, r.n)

    def message(step: int, c: int) -> Array:
        which, last = (me - step) % size, step == size - 1
        piece, bound = slices[which][c], bounds[which][c]
        number = ((size if last else step) * size + me) * len(slices[me]) + c
        if last:
            return first_error(_encode_result, channel, r, piece, bound, total, result, number)
        return first_error(_encode_partial, channel, r, piece, bound, total, number)

    for c in range(len(slices[me])):
        channel.frames.send(message(0, c), right)
    for s in steps:
        for c, piece in enumerate(slices[(me - s - 1) % size]):
            first_error(_add, r, first_error.frame(sums[s][c]), piece, total)
            channel.frames.send(message(s + 1, c), right)
    for s in steps:
        for c, piece in enumerate(slices[(me - s) % size]):
            frame = first_error.frame(results[s][c])
            first_error(r.decode_or_defer, frame, piece, result)
            if s < size - 2:
                channel.frames.send(first_error(copy_to_message, channel, frame), right)
    channel.frames.wait_for_sends()
    return result, first_error.error


def _as_float32(r: Reduction) -> Array:
    """Return a copy of the values."""
    return r.tensor_of(r.x).to(torch.float32, copy=True).numpy()


def _encode_partial(channel: Channel, r: Reduction, piece: Piece, bound: int, total: Array, number: int) -> Array:
    return encode_message(
        channel, bound, lambda room: r.encode_sum(total[piece.begin : piece.end], piece, room, number)
    )


def _add(r: Reduction, frame: Array, piece: Piece, total: Array) -> None:
    r.check_frame(frame, piece)
    part = total[piece.begin : piece.end]
    if r.op == "max":
        np.maximum(part, codec.reduce([frame], r.shared_levels(piece), op="sum", codebooks=r.codebooks), out=part)
    else:
        codec.accumulate(frame, part, r.shared_levels(piece), codebooks=r.codebooks)


def _encode_result(
    channel: Channel, r: Reduction, piece: Piece, bound: int, total: Array, result: Array, number: int
) -> Array:
    """Return the message with the result of a piece, and store the result as other ranks decode it."""
    if r.op == "mean":
        total[piece.begin : piece.end] /= np.float32(channel.size)
    message = _encode_partial(channel, r, piece, bound, total, number)
    r.decode_or_defer(channel.arena.frame_buffer(message), piece, result)
    return message
