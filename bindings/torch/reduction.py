"""All-reduces of frames: two-shot, all-gather, ring. Nothing of the caller's is written."""

import functools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

import codec
from codec import Codebook, CodecError, SpecError, Status
from codec.core import DTYPES, lib
from codec.decoding import check_values
from codec.frame import read_header
from codec.segmenting import Records
from codec.specs import Lossless, Spec, Truncate
from codec.torch.channel import Array, Channel, Incoming
from codec.torch.slices import Piece, chunk_nbytes, cut, cut_evenly
from codec.view import view_bytes

bound = functools.lru_cache(1024)(codec.bound)  # of few sizes, again and again
_LARGE = 1 << 21  # values
_APART = 0x9E3779B97F4A7C15  # odd: so far do streams lie apart that numbers of pieces do not meet the next one's
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Reduction:
    """What is to be reduced, and how it is encoded: the same on all ranks but for the values."""

    x: Array  # flat; bfloat16 as uint16
    dtype: str
    spec: Spec
    op: str
    stream: int
    segments: Records | None = None
    metric: Any = None
    state: Mapping[str, Any] | None = None  # flat, each as long as x
    residual: Array | None = None  # float32, as long as x: what this rank's frames have lost; written
    sums_residual: Callable[[int, int], Array] | None = None  # the same of the sums [begin, end) that it encodes
    codebook: Codebook | None = None  # that all ranks encode with
    codebooks: Sequence[Codebook] = ()  # that frames may name
    count: Callable[..., None] | None = None  # told what was encoded: values, segments, metric and state
    out: Array | None = None  # for what comes out; None: memory of the channel's
    # What is to be done when all ranks have succeeded, if the result goes to x itself and is left in frames until then:
    # where values are many but frames small that is sooner than to decode them elsewhere and copy what comes out.
    late: list[Callable[[], None]] | None = None

    def bound(self, n: int) -> int:
        """Bytes of the largest frame of n values."""
        return bound(n, self.dtype, self.spec)

    def slices(self, size: int) -> list[list[Piece]]:
        """A slice for each of `size` ranks, in chunks."""
        return cut(self.x.size, size, self.x.itemsize, self.segments, self._chunk_nbytes)

    def even_slices(self, size: int) -> list[list[Piece]]:
        """The same, of one size."""
        return cut_evenly(self.x.size, size, self.x.itemsize, self._chunk_nbytes)

    @property
    def _chunk_nbytes(self) -> int:
        return chunk_nbytes(self.x.itemsize, self.bound)

    def encode(self, piece: Piece, out: Array, number: int) -> int:
        """Put the frame of a piece into `out`; its size in bytes."""
        residual = None if self.residual is None else self.residual[piece.begin : piece.end]
        return self._encode(self.own(piece), piece, out, residual, number)

    def encode_sum(self, total: Array, piece: Piece, out: Array, number: int) -> int:
        """The same of a piece's sum, float32."""
        residual = None if self.sums_residual is None else self.sums_residual(piece.begin, piece.end)
        return self._encode(self.rounded(total), piece, out, residual, number)

    def _encode(self, x: Array, piece: Piece, out: Array, residual: Array | None, number: int) -> int:
        how: dict[str, Any] = {"segments": piece.segments, **self._state(piece)}
        if residual is not None:
            how |= {"residual": residual, "feedback": True}
        frame = codec.encode(
            x,
            self.spec,
            dtype=self.dtype,
            out=out,
            threads=_threads(piece),
            stream=(self.stream * _APART + number) % (1 << 64),
            codebook=self.codebook,
            **how,
        )
        if self.count is not None:
            self.count(self.tensor_of(x), segments=piece.segments, **self._state(piece))
        return len(frame)

    @property
    def own_as_is(self) -> bool:
        """Whether frames would say of this rank's values just what they are, so that it needs none for itself."""
        return isinstance(self.spec, Lossless) and self.op != "max"

    @property
    def only_numbers(self) -> bool:
        """Whether encoding refuses NaN and Inf: frames have no words for them."""
        return not isinstance(self.spec, Lossless | Truncate) and getattr(self.spec, "nonfinite", "") != "propagate"

    def result(self, channel: Channel, n: int) -> Array:
        """Where n values go that come out."""
        if self.late is not None:
            return self.x
        return channel.result(n, self.x.dtype) if self.out is None else self.out

    @property
    def can_wait(self) -> bool:
        """Whether results are sooner decoded late than copied."""
        entropy = getattr(self.spec, "entropy", False) or getattr(self.spec, "packing", "") == "entropy"
        return self.past_caches and not entropy and not isinstance(self.spec, Lossless | Truncate)

    def settle(self, frame: Array, piece: Piece, into: Array) -> None:
        """Decode a frame to a piece of the result; what waits is only checked now."""
        if self.late is None:
            self.decode(frame, piece, into)
            return
        self.check(frame, piece)
        check_values(frame, into[piece.begin : piece.end], threads=_threads(piece))
        self.late.append(partial(self.decode, frame, piece, into))

    def add(self, owed: Array) -> None:
        """Reduce x and these values, float32, instead of x."""
        if owed.any():
            self.x = self.rounded(floats(self.x, self) + owed)

    def own(self, piece: Piece) -> Array:
        """What there is on this rank."""
        return self.x[piece.begin : piece.end]

    def decode(self, frame: Array, piece: Piece, into: Array) -> None:
        """The values of a frame, to a piece of a tensor like x."""
        self.check(frame, piece)
        into = into[piece.begin : piece.end]
        how: dict[str, Any] = {"threads": _threads(piece), "check_first": False, **self.shared(piece)}
        codec.decode(frame, out=into, nontemporal=self.past_caches, **how)

    @property
    def past_caches(self) -> bool:
        """How results are stored that are not read again."""
        return self.x.nbytes >= lib.CODEC_UNCACHED_NBYTES

    def sum(
        self,
        parts: Sequence[Array | None],
        piece: Piece,
        total: Array,
        *,
        nontemporal: bool = False,
        check_finite: bool = False,
    ) -> None:
        """Frames of a piece to their sum, mean or maximum, in the order of ranks; None: this rank's values.

        If there are frames of all ranks, then as :func:`codec.reduce` is told.
        """
        frames = [part for part in parts if part is not None]
        for frame in frames:
            self.check(frame, piece)
        how: dict[str, Any] = {"threads": _threads(piece), "check_first": False, **self.shared(piece)}
        if len(frames) == len(parts):
            codec.reduce(frames, self.op, out=total, nontemporal=nontemporal, check_finite=check_finite, **how)
            return
        for i, part in enumerate(parts):
            if part is None:
                own = floats(self.own(piece), self)
                with np.errstate(over="ignore", invalid="ignore"):  # what comes out says so
                    np.add(total, own, out=total) if i else np.copyto(total, own)
            elif i:
                codec.accumulate(part, total, **how)
            else:
                codec.reduce([part], "sum", out=total, **how)
        if self.op == "mean":
            total /= np.float32(len(parts))
        if total.size and np.isnan(total.min()):  # which of two a sum keeps depends on how it is added
            total[np.isnan(total)] = np.nan

    def check(self, frame: Array, piece: Piece) -> None:
        """Raise FrameError unless it is a frame of such a piece."""
        info = read_header(view_bytes(frame))
        if info.dtype != DTYPES[self.dtype] or info.rank != 1 or info.n != piece.n:
            found = codec.inspect(frame)
            raise codec.FrameError(f"a frame of {found.dtype} {found.shape} came for {self.dtype} ({piece.n},)")

    def _state(self, piece: Piece) -> dict[str, Any]:
        if self.metric is None:
            return {}
        state = {name: x[piece.begin : piece.end] for name, x in (self.state or {}).items()}
        return {"metric": _metric_of(self.metric, piece), "state": state}

    def shared(self, piece: Piece) -> dict[str, Any]:
        """What decoding needs of the state, and codebooks."""
        how = self._state(piece) if isinstance(self.spec, Truncate) and self.spec.levels == "shared" else {}
        return {**how, "codebooks": self.codebooks} if self.codebooks else how

    def tensor_of(self, x: Array) -> torch.Tensor:
        """Values in the dtype of x as a tensor of the same memory."""
        return torch.from_numpy(x).view(FLOATS[self.dtype])

    def rounded(self, total: Array) -> Array:
        """Float32 sums in the dtype of x."""
        if self.dtype == "float32":
            return total
        rounded = torch.from_numpy(total).to(FLOATS[self.dtype])
        return rounded.view(torch.uint16).numpy().view(self.x.dtype)


def _threads(piece: Piece) -> int | None:
    """For a chunk that is not large one is enough: other ranks on this machine have work for other cores."""
    return 1 if piece.n <= _LARGE else None


def _metric_of(metric: Any, piece: Piece) -> Any:
    """The metric, or metrics with the offsets where they begin, of a piece."""
    if not isinstance(metric, list):
        return metric
    groups: list[tuple[int, Any]] = []
    for offset, each in metric:
        if offset <= piece.begin:
            groups = [(0, each)]
        elif offset < piece.end:
            groups.append((offset - piece.begin, each))
    return groups


class Attempt:
    """A collective goes on after an error, without frames, so that no rank waits for what never comes."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.error: Exception | None = None

    def __call__(self, step: Callable[..., Any], *args: Any) -> Any:
        """step(*args), or None after an error; but where no connection is left there is nothing to go on with."""
        try:
            return self.at_once(step, *args)
        finally:
            let_others()

    def at_once(self, step: Callable[..., Any], *args: Any) -> Any:
        """The same for what is sent: others who wait for this core get it only then."""
        return None if self.error is not None else self._tried(step, *args)

    def frame(self, incoming: Incoming) -> Array | None:
        """The frame of a message, waited for whatever has happened."""
        return self._tried(incoming.frame)

    def _tried(self, step: Callable[..., Any], *args: Any) -> Any:
        try:
            return step(*args)
        except CodecError as e:
            if self._channel.closed:
                raise
            if self.error is None:
                self.error = e
            return None


def let_others() -> None:
    """Gloo's thread goes next, if it waits for this core: no connection is locked now, so it need not spin."""
    os.sched_yield()


def _message(channel: Channel, nbytes: int, encode: Callable[[Array], int]) -> Array:
    """A message with a frame of so many bytes at most, which encode(room) makes; how many it takes."""
    message = channel.take(nbytes)
    return channel.give_back(message, encode(channel.frame_room(message)))


class Scatter:
    """The first phase of most algorithms: each rank gets the frames of its slice from all."""

    def __init__(self, channel: Channel, r: Reduction, slices: Sequence[Sequence[Piece]], attempt: Attempt) -> None:
        self._channel, self._r, self._slices, self._attempt = channel, r, slices, attempt
        self._bounds = [[r.bound(piece.n) for piece in pieces] for pieces in slices]
        self._incoming: list[dict[int, Incoming]] = []
        self._own: list[Array | None] = []
        # the first chunks of all slices are sent first, and this rank's own are made after those of others
        ranks = [*channel.others, channel.rank]
        self._order = [(c, o) for c in range(max(map(len, slices))) for o in ranks if c < len(slices[o])]
        self._first: Array | None = None

    def begin(self, room: int = 0) -> None:
        """Begin the collective, which takes so much room beside, and send a frame, made before all agreed to begin."""
        sent = [b for bounds in self._bounds for b in bounds]
        mine = self._bounds[self._channel.rank]
        received = mine * (self._channel.size - 1)
        self._channel.begin(Channel.room_for(sent + received) + room, self._encode_first)
        self._incoming = [{o: self._channel.receive(b, o) for o in self._channel.others} for b in mine]
        self._pass_on(self._order[0][1], self._first)

    def send(self) -> None:
        """Send all other slices' chunks."""
        for c, o in self._order[1:]:
            self._pass_on(o, self._encoded(c, o))

    def _encode_first(self) -> None:
        self._first = self._encoded(*self._order[0])

    def _encoded(self, c: int, o: int) -> Array | None:
        """The message with chunk c of the slice of rank o."""
        me, size, most = self._channel.rank, self._channel.size, max(map(len, self._slices))
        if o == me and self._r.own_as_is:
            return None
        piece, bound = self._slices[o][c], self._bounds[o][c]
        number = (me * size + o) * most + c
        return self._attempt.at_once(_encoded, self._channel, self._r, piece, bound, number)

    def _pass_on(self, o: int, message: Array | None) -> None:
        """What all wait for is the slowest rank's: it may be one that waits for this core."""
        if o == self._channel.rank:
            self._own.append(message)
        else:
            self._channel.send(message, o)
        let_others()

    def parts(self, c: int) -> list[Array | None] | None:
        """Chunk c of this rank's slice from all ranks, in their order, as :meth:`Reduction.sum` takes them."""
        own = None if self._r.own_as_is else self._own[c]
        return _ordered(self._channel, self._r, self._attempt, self._incoming[c], own)


def _ordered(
    channel: Channel, r: Reduction, attempt: Attempt, incoming: Mapping[int, Incoming], own: Array | None
) -> list[Array | None] | None:
    """Frames of all ranks, in their order; of this one what it sends, or None for its values; no list if one lacks."""
    found: dict[int, Array | None] = {o: attempt.frame(there) for o, there in incoming.items()}
    found[channel.rank] = None if own is None else channel.frame_room(own)
    lacks = [rank for rank, frame in found.items() if frame is None]
    if lacks and not (r.own_as_is and lacks == [channel.rank]):
        return None
    return [found[rank] for rank in range(channel.size)]


class Spread:
    """The only phase of others: this rank's frames are sent to all."""

    def __init__(self, channel: Channel, r: Reduction, attempt: Attempt) -> None:
        self._channel, self._r, self._attempt = channel, r, attempt
        self._pieces = [piece for pieces in r.slices(1) for piece in pieces]
        bounds = [r.bound(piece.n) for piece in self._pieces]
        channel.begin(Channel.room_for(bounds * channel.size))
        self._incoming = [{o: channel.receive(b, o) for o in channel.others} for b in bounds]
        self._own: list[Array | None] = []
        for c, piece in enumerate(self._pieces):
            number = channel.rank * len(self._pieces) + c
            self._own.append(attempt(_encoded, channel, r, piece, bounds[c], number))
            for o in channel.others:
                channel.send(self._own[c], o)

    def parts(self) -> Iterator[tuple[Piece, list[Array | None] | None]]:
        """The pieces, and what there is of all ranks."""
        for c, piece in enumerate(self._pieces):
            own = None if self._r.own_as_is else self._own[c]
            yield piece, _ordered(self._channel, self._r, self._attempt, self._incoming[c], own)
        self._channel.finish()


# An algorithm in steps: after each of them it would wait for other ranks. What comes in a step is expected in it, so
# that steps of several come in the order in which they are sent.
Steps = Generator[None, None, tuple[Array, Exception | None]]


def in_turn(several: Sequence[Steps]) -> list[tuple[Array, Exception | None]]:
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
    attempt = Attempt(channel)
    scatter = Scatter(channel, r, slices, attempt)
    scatter.begin(Channel.room_for([b for each in bounds for b in each]))
    scatter.send()
    result = r.result(channel, r.x.size)
    yield
    chunks = range(len(slices[me]))
    sums = {(c, o): channel.receive(bounds[o][c], o) for c in chunks for o in others}
    for c, piece in enumerate(slices[me]):
        parts = scatter.parts(c)
        number = (size * size + me) * len(chunks) + c
        message = attempt.at_once(_summed, channel, r, piece, bounds[me][c], parts, result, number)
        for o in others:
            channel.send(message, o)
        attempt(_seen, channel, r, piece, message, result)
    yield
    for c in chunks:
        for o in others:
            frame = attempt.frame(sums[c, o])
            attempt(r.settle, frame, slices[o][c], result)
    channel.finish()
    return result, attempt.error


def two_shot(channel: Channel, r: Reduction) -> tuple[Array, Exception | None]:
    """All steps of :func:`two_shot_steps`."""
    return in_turn([two_shot_steps(channel, r)])[0]


def reduce_scatter(channel: Channel, r: Reduction) -> tuple[Array, Exception | None]:
    """Each rank reduces a slice of all frames: (N - 1) / N frames on the wire. The slices are of one size."""
    slices = r.even_slices(channel.size)
    attempt = Attempt(channel)
    scatter = Scatter(channel, r, slices, attempt)
    scatter.begin()
    scatter.send()
    mine = slices[channel.rank]
    result = r.result(channel, r.x.size // channel.size)
    for c, piece in enumerate(mine):
        parts = scatter.parts(c)
        attempt(_sum_into, channel, r, piece, parts, result[piece.begin - mine[0].begin :])
    channel.finish()
    return result, attempt.error


def all_to_all(channel: Channel, r: Reduction) -> tuple[Array, Exception | None]:
    """Slice i of each rank goes to rank i: (N - 1) / N frames on the wire. The slices are of one size."""
    slices = r.even_slices(channel.size)
    attempt = Attempt(channel)
    scatter = Scatter(channel, r, slices, attempt)
    scatter.begin()
    scatter.send()
    result = r.result(channel, r.x.size)
    for c in range(len(slices[0])):
        for rank, part in enumerate(scatter.parts(c) or ()):
            attempt(_put, r, part, slices[rank][c], result)
    channel.finish()
    return result, attempt.error


def _encoded(channel: Channel, r: Reduction, piece: Piece, bound: int, number: int) -> Array:
    return _message(channel, bound, lambda room: r.encode(piece, room, number))


def _summed(
    channel: Channel, r: Reduction, piece: Piece, bound: int, parts: Sequence[Array | None], result: Array, number: int
) -> Array:
    """The message with the sum of a piece; lossless, its values are put into the result."""
    place = result[piece.begin : piece.end]
    total = place if r.dtype == "float32" and isinstance(r.spec, Lossless) else channel.total(piece.n)
    r.sum(parts, piece, total)
    message = _message(channel, bound, lambda room: r.encode_sum(total, piece, room, number))
    if isinstance(r.spec, Lossless) and total is not place:
        place[:] = r.rounded(total)
    return message


def _seen(channel: Channel, r: Reduction, piece: Piece, message: Array, result: Array) -> None:
    """The values of a sum, as others will see them, to the result."""
    if not isinstance(r.spec, Lossless):
        r.settle(channel.frame_room(message), piece, result)


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
    place, check = place[: piece.n], check and r.only_numbers
    if r.dtype == "float32":
        r.sum(parts, piece, place, nontemporal=r.past_caches and not again, check_finite=check)
        return
    total = channel.total(piece.n)
    r.sum(parts, piece, total, check_finite=check)
    place[:] = r.rounded(total)
    if check and (fault := refused(r, place)):  # what the sum's dtype holds and this one does not
        raise fault


def _put(r: Reduction, part: Array | None, piece: Piece, result: Array) -> None:
    """What there is of a rank into a piece of the result; None: this rank's own values."""
    if part is None:
        result[piece.begin : piece.end] = r.own(piece)
    else:
        r.decode(part, piece, result)


def all_gather_steps(channel: Channel, r: Reduction) -> Steps:
    """Each rank sends its frame to all, and each reduces all of them: one phase, N - 1 frames on the wire."""
    result = r.result(channel, r.x.size)
    attempt = Attempt(channel)
    spread = Spread(channel, r, attempt)
    yield
    for piece, parts in spread.parts():
        attempt(_settle_sum, channel, r, piece, parts, result[piece.begin :])
    return result, attempt.error


def all_gather(channel: Channel, r: Reduction) -> tuple[Array, Exception | None]:
    """All steps of :func:`all_gather_steps`."""
    return in_turn([all_gather_steps(channel, r)])[0]


STEPS = {"two_shot": two_shot_steps, "all_gather": all_gather_steps}


def _settle_sum(channel: Channel, r: Reduction, piece: Piece, parts: Sequence[Array | None], place: Array) -> None:
    """The sum of a piece to the result, if its dtype can hold it, as other algorithms find out by encoding sums."""
    if r.late is None:
        _sum_into(channel, r, piece, parts, place, check=True)
        return
    aside = channel.total(piece.n) if r.dtype == "float32" else np.empty(piece.n, place.dtype)
    _sum_into(channel, r, piece, parts, aside, check=True, again=True)
    r.late.append(partial(_sum_into, channel, r, piece, parts, place))


def gather(channel: Channel, r: Reduction) -> tuple[Array, Exception | None]:
    """The values of all ranks, one after the other: N - 1 frames on the wire."""
    n = r.x.size
    result = r.result(channel, channel.size * n)
    attempt = Attempt(channel)
    for piece, parts in Spread(channel, r, attempt).parts():
        for rank, part in enumerate(parts or ()):
            attempt(_put, r, part, piece, result[rank * n : (rank + 1) * n])
    return result, attempt.error


def ring(channel: Channel, r: Reduction) -> tuple[Array, Exception | None]:
    """Sums of slices go around, encoded anew by each rank, then what comes out: 2 (N - 1) / N frames, to one peer only.

    A chunk goes on as soon as it is added to, while the next one is on the wire. Sums are added in the order in which
    they pass the ranks; what lossy codecs lose adds up.
    """
    size, me = channel.size, channel.rank
    if r.residual is not None or r.sums_residual is not None:
        raise SpecError("a ring has no error feedback: its frames hold sums of other ranks' values")
    slices = r.slices(size)
    bounds = [[r.bound(piece.n) for piece in pieces] for pieces in slices]
    left, right, steps = (me - 1) % size, (me + 1) % size, range(size - 1)
    channel.begin(Channel.room_for(4 * [b for each in bounds for b in each]))
    sums = [[channel.receive(b, left) for b in bounds[(me - s - 1) % size]] for s in steps]
    results = [[channel.receive(b, left) for b in bounds[(me - s) % size]] for s in steps]
    attempt = Attempt(channel)
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
            attempt(r.settle, frame, piece, result)
            if s < size - 2:
                channel.send(attempt(copied, channel, frame), right)
    channel.finish()
    return result, attempt.error


def floats(x: Array, r: Reduction) -> Array:
    """Values in the dtype of a reduction as float32; the same memory if they are."""
    return torch.from_numpy(x).view(FLOATS[r.dtype]).float().numpy()


def _as_float32(r: Reduction) -> Array:
    """A copy of the values."""
    return torch.from_numpy(r.x).view(FLOATS[r.dtype]).to(torch.float32, copy=True).numpy()


def _partial(channel: Channel, r: Reduction, piece: Piece, bound: int, total: Array, number: int) -> Array:
    return _message(channel, bound, lambda room: r.encode_sum(total[piece.begin : piece.end], piece, room, number))


def _add(r: Reduction, frame: Array, piece: Piece, total: Array) -> None:
    r.check(frame, piece)
    part = total[piece.begin : piece.end]
    if r.op == "max":
        np.maximum(part, codec.reduce([frame], "sum", **r.shared(piece)), out=part)
    else:
        codec.accumulate(frame, part, **r.shared(piece))


def _last(channel: Channel, r: Reduction, piece: Piece, bound: int, total: Array, result: Array, number: int) -> Array:
    """The message with what comes out for a piece, which is put into the result as others will see it."""
    if r.op == "mean":
        total[piece.begin : piece.end] /= np.float32(channel.size)
    message = _partial(channel, r, piece, bound, total, number)
    r.settle(channel.frame_room(message), piece, result)
    return message


def copied(channel: Channel, frame: Array) -> Array:
    """The message with a frame that there is already."""

    def copy(room: Array) -> int:
        room[: frame.nbytes] = frame
        return frame.nbytes

    return _message(channel, frame.nbytes, copy)


def refused(r: Reduction, x: Array) -> SpecError | None:
    """What encoding would have said of NaN and Inf: which way values travel must not decide whether a step is good."""
    if not r.only_numbers or not x.size or all(torch.isfinite(t) for t in torch.aminmax(r.tensor_of(x))):
        return None
    return SpecError("the tensor holds NaN or Inf, which this codec does not take", Status.NONFINITE)
