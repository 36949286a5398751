"""All-reduces of frames: two-shot, all-gather, ring. Nothing of the caller's is written."""

from collections.abc import Generator, Sequence
from functools import partial

import numpy as np
import torch

import codec
from codec import ArgumentError
from codec.specs import Lossless
from codec.torch.channel import Channel
from codec.torch.messages import Array
from codec.torch.partition import Piece
from codec.torch.phases import BroadcastPhase, FirstError, ScatterPhase, copied, encode_message
from codec.torch.reduction import Reduction, refused

# An algorithm in steps: after each of them it would wait for other ranks. What comes in a step is expected in it, so
# that steps of several come in the order in which they are sent.
Steps = Generator[None, None, tuple[Array, Exception | None]]


def interleave(several: Sequence[Steps]) -> list[tuple[Array, Exception | None]]:
    """What several algorithms end with, a step of each after the other: what one waits for is on its way meanwhile."""
    found: dict[int, tuple[Array, Exception | None]] = {}
    try:
        while len(found) < len(several):
            for i, steps in enumerate(several):
                if i not in found:
                    try:
                        next(steps)
                    except StopIteration as end:
                        found[i] = end.value
    finally:  # messages under way keep connections open
        for steps in several:
            steps.close()
    return [found[i] for i in range(len(several))]


def two_shot_steps(channel: Channel, r: Reduction) -> Steps:
    """Each rank reduces a slice of all frames and sends what comes out to all: 2 (N - 1) / N frames on the wire.

    Chunks of slices follow each other, so that encoding, wire and decoding overlap.
    """
    size, me, others = channel.size, channel.rank, channel.others
    slices = r.slices(size)
    bounds = [[r.bound(piece.n) for piece in pieces] for pieces in slices]
    attempt = FirstError(channel)
    scatter = ScatterPhase(channel, r, slices, attempt)
    scatter.begin(Channel.arena_nbytes([b for each in bounds for b in each]))
    scatter.send()
    result = r.result(channel, r.x.size)
    yield
    chunks = range(len(slices[me]))
    sums = {(c, o): channel.receive(bounds[o][c], o) for c in chunks for o in others}
    for c, piece in enumerate(slices[me]):
        parts = scatter.parts(c)
        number = (size * size + me) * len(chunks) + c
        message = attempt(_encode_sum, channel, r, piece, bounds[me][c], parts, result, number)
        for o in others:
            channel.send(message, o)
    yield
    for c in chunks:
        for o in others:
            frame = attempt.frame(sums[c, o])
            attempt(r.decode_or_defer, frame, slices[o][c], result)
    channel.wait_for_sends()
    return result, attempt.error


def two_shot(channel: Channel, r: Reduction) -> tuple[Array, Exception | None]:
    """All steps of :func:`two_shot_steps`."""
    return interleave([two_shot_steps(channel, r)])[0]


def _encode_sum(
    channel: Channel, r: Reduction, piece: Piece, bound: int, parts: Sequence[Array | None], result: Array, number: int
) -> Array:
    """The message with the sum of a piece; its values, as others will see them, are put into the result."""
    place = result[piece.begin : piece.end]
    total = place if r.dtype == "float32" and isinstance(r.spec, Lossless) else channel.sum_buffer(piece.n)
    r.sum(parts, piece, total)
    message = encode_message(channel, bound, lambda room: r.encode_sum(total, piece, room, number))
    if not isinstance(r.spec, Lossless):
        r.decode_or_defer(channel.frame_buffer(message), piece, result)
    elif total is not place:
        place[:] = r.rounded(total)
    return message


def all_gather_steps(channel: Channel, r: Reduction) -> Steps:
    """Each rank sends its frame to all, and each reduces all of them: one phase, N - 1 frames on the wire."""
    result = r.result(channel, r.x.size)
    attempt = FirstError(channel)
    spread = BroadcastPhase(channel, r, attempt)
    yield
    for piece, parts in spread.parts():
        attempt(_store_or_defer_sum, channel, r, piece, parts, result[piece.begin :])
    return result, attempt.error


def all_gather(channel: Channel, r: Reduction) -> tuple[Array, Exception | None]:
    """All steps of :func:`all_gather_steps`."""
    return interleave([all_gather_steps(channel, r)])[0]


STEPS = {"two_shot": two_shot_steps, "all_gather": all_gather_steps}


def _store_or_defer_sum(
    channel: Channel, r: Reduction, piece: Piece, parts: Sequence[Array | None], place: Array
) -> None:
    """The sum of a piece to the result, if its dtype can hold it, as other algorithms find out by encoding sums."""
    if r.deferred is None:
        _sum_into(channel, r, piece, parts, place, check=True)
        return
    aside = channel.sum_buffer(piece.n) if r.dtype == "float32" else np.empty(piece.n, place.dtype)
    _sum_into(channel, r, piece, parts, aside, check=True, again=True)
    r.deferred.append(partial(_sum_into, channel, r, piece, parts, place))


def reduce_scatter(channel: Channel, r: Reduction) -> tuple[Array, Exception | None]:
    """Each rank reduces a slice of all frames: (N - 1) / N frames on the wire. The slices are of one size."""
    slices = r.even_slices(channel.size)
    attempt = FirstError(channel)
    scatter = ScatterPhase(channel, r, slices, attempt)
    scatter.begin()
    scatter.send()
    mine = slices[channel.rank]
    result = r.result(channel, r.x.size // channel.size)
    for c, piece in enumerate(mine):
        parts = scatter.parts(c)
        attempt(_sum_into, channel, r, piece, parts, result[piece.begin - mine[0].begin :])
    channel.wait_for_sends()
    return result, attempt.error


def _sum_into(
    channel: Channel,
    r: Reduction,
    piece: Piece,
    parts: Sequence[Array | None],
    place: Array,
    *,
    check: bool = False,
    again: bool = False,
) -> None:
    """The sum of a piece to where it goes; `check`: as encoding it would; `again`: into memory used again and again."""
    place, check = place[: piece.n], check and r.rejects_nonfinite
    if r.dtype == "float32":
        r.sum(parts, piece, place, nontemporal=r.nontemporal and not again, check_finite=check)
        return
    total = channel.sum_buffer(piece.n)
    r.sum(parts, piece, total, check_finite=check)
    place[:] = r.rounded(total)
    if check and (fault := refused(r, place)):  # what the sum's dtype holds and this one does not
        raise fault


def all_to_all(channel: Channel, r: Reduction) -> tuple[Array, Exception | None]:
    """Slice i of each rank goes to rank i: (N - 1) / N frames on the wire. The slices are of one size."""
    slices = r.even_slices(channel.size)
    attempt = FirstError(channel)
    scatter = ScatterPhase(channel, r, slices, attempt)
    scatter.begin()
    scatter.send()
    result = r.result(channel, r.x.size)
    for c in range(len(slices[0])):
        for rank, part in enumerate(scatter.parts(c) or ()):
            attempt(_put, r, part, slices[rank][c], result)
    channel.wait_for_sends()
    return result, attempt.error


def gather(channel: Channel, r: Reduction) -> tuple[Array, Exception | None]:
    """The values of all ranks, one after the other: N - 1 frames on the wire."""
    n = r.x.size
    result = r.result(channel, channel.size * n)
    attempt = FirstError(channel)
    for piece, parts in BroadcastPhase(channel, r, attempt).parts():
        for rank, part in enumerate(parts or ()):
            attempt(_put, r, part, piece, result[rank * n : (rank + 1) * n])
    return result, attempt.error


def _put(r: Reduction, part: Array | None, piece: Piece, result: Array) -> None:
    """What there is of a rank into a piece of the result; None: this rank's own values."""
    if part is None:
        result[piece.begin : piece.end] = r.own_term(piece)
    else:
        r.decode(part, piece, result)


def ring(channel: Channel, r: Reduction) -> tuple[Array, Exception | None]:
    """Sums of slices go around, encoded anew by each rank, then what comes out: 2 (N - 1) / N frames, to one peer only.

    A chunk goes on as soon as it is added to, while the next one is on the wire. Sums are added in the order in which
    they pass the ranks; what lossy codecs lose adds up.
    """
    size, me = channel.size, channel.rank
    if r.residual is not None or r.sum_residual is not None:
        raise SpecError("a ring has no error feedback: its frames hold sums of other ranks' values")
    slices = r.slices(size)
    bounds = [[r.bound(piece.n) for piece in pieces] for pieces in slices]
    left, right, steps = (me - 1) % size, (me + 1) % size, range(size - 1)
    channel.begin(Channel.arena_nbytes(4 * [b for each in bounds for b in each]))
    sums = [[channel.receive(b, left) for b in bounds[(me - s - 1) % size]] for s in steps]
    results = [[channel.receive(b, left) for b in bounds[(me - s) % size]] for s in steps]
    attempt = FirstError(channel)
    total = _as_float32(r)
    result = r.result(channel, r.x.size)

    def message(step: int, c: int) -> Array:
        which, last = (me - step) % size, step == size - 1
        piece, bound = slices[which][c], bounds[which][c]
        number = ((size if last else step) * size + me) * len(slices[me]) + c
        if last:
            return attempt(_last, channel, r, piece, bound, total, result, number)
        return attempt(_partial, channel, r, piece, bound, total, number)

    for c in range(len(slices[me])):
        channel.send(message(0, c), right)
    for s in steps:
        for c, piece in enumerate(slices[(me - s - 1) % size]):
            attempt(_add, r, attempt.frame(sums[s][c]), piece, total)
            channel.send(message(s + 1, c), right)
    for s in steps:
        for c, piece in enumerate(slices[(me - s) % size]):
            frame = attempt.frame(results[s][c])
            attempt(r.decode_or_defer, frame, piece, result)
            if s < size - 2:
                channel.send(attempt(copied, channel, frame), right)
    channel.wait_for_sends()
    return result, attempt.error


def _as_float32(r: Reduction) -> Array:
    """A copy of the values."""
    return r.tensor_of(r.x).to(torch.float32, copy=True).numpy()


def _partial(channel: Channel, r: Reduction, piece: Piece, bound: int, total: Array, number: int) -> Array:
    return encode_message(
        channel, bound, lambda room: r.encode_sum(total[piece.begin : piece.end], piece, room, number)
    )


def _add(r: Reduction, frame: Array, piece: Piece, total: Array) -> None:
    r.check_frame(frame, piece)
    part = total[piece.begin : piece.end]
    if r.op == "max":
        np.maximum(part, codec.reduce([frame], "sum", **r.decode_arguments(piece)), out=part)
    else:
        codec.accumulate(frame, part, **r.decode_arguments(piece))


def _last(channel: Channel, r: Reduction, piece: Piece, bound: int, total: Array, result: Array, number: int) -> Array:
    """The message with what comes out for a piece, which is put into the result as others will see it."""
    if r.op == "mean":
        total[piece.begin : piece.end] /= np.float32(channel.size)
    message = _partial(channel, r, piece, bound, total, number)
    r.decode_or_defer(channel.frame_buffer(message), piece, result)
    return message
