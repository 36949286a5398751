"""TernGrad's all-reduce: under one scale of all ranks ternary values are integers, whose sums travel back whole."""

import math
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import torch

from codec import ArgumentError, FrameError, SpecError, Status
from codec.arguments import float32
from codec.specs import Lossless, Spec, Ternary
from codec.tensors.segments import Records, Segments, unpack
from codec.torch.algorithms import all_gather, two_shot
from codec.torch.channel import Channel
from codec.torch.messages import Array
from codec.torch.partition import Piece
from codec.torch.reduction import Reduction, bound

_Part = tuple[int, int, int]  # begin, end, number of the scale


def check(spec: Spec, op: str) -> None:
    """Raise ArgumentError unless such a reduction can have scales that ranks share."""
    if not isinstance(spec, Ternary):
        raise SpecError(f"only values of Ternary have a scale that ranks can share, not those of {spec}")
    if spec.scale is not None:
        raise SpecError("ranks find out themselves which scale they share: leave out scale=")
    if op == "max":
        raise ArgumentError("sums of ternary values say nothing of the largest: op must be mean or sum")


def shared_scale(channel: Channel, r: Reduction) -> tuple[Array, Exception | None]:
    """Agree on a scale for each parameter, then two-shot: ternary values to the owners of slices, sums to all.

    The scale is the largest magnitude on any rank, clipped if the spec says so. Sums are exact, so that all that is
    lost is lost by the rank that knows it, and no residual of sums is needed.
    """
    # in the residual's place: there it becomes what the frames lose
    x = r.tensor_of(r.x).float().numpy()
    owed = x if r.residual is None else np.add(x, r.residual, out=r.residual)
    parts = _parts(r.x.size, r.segments)
    mine = np.zeros(1 + len(_pairs(r.segments)), np.float32)
    error: Exception | None = None
    try:
        for begin, end, i in parts:
            mine[i] = max(mine[i], _magnitude(owed[begin:end], r.spec))
    except ArgumentError as e:
        error = e
    scales, fault = all_gather(channel, Reduction(mine, "float32", Lossless(), "max", r.stream))
    if fault is None and not np.isfinite(scales).all():
        fault = FrameError("a rank has sent a scale that is not finite")
    return two_shot(channel, _Shared(r, owed, parts, scales.copy(), channel.size, error or fault))


def _pairs(segments: Records | None) -> Segments:
    return unpack(segments) if segments else []


def _parts(n: int, segments: Records | None) -> list[_Part]:
    """Values that share a scale: those of a segment, and all that segments leave out."""
    found: list[_Part] = []
    rest, at = len(_pairs(segments)), 0
    for i, (offset, shape) in enumerate(_pairs(segments)):
        found += [(at, offset, rest), (offset, offset + prod(shape), i)]
        at = offset + prod(shape)
    return [part for part in [*found, (at, n, rest)] if part[0] < part[1]]


def _magnitude(x: Array, spec: Spec) -> float:
    """The largest magnitude, or as many standard deviations as the spec allows; without any there are none to clip."""
    most = abs(max(float(x.max()), -float(x.min())))
    if not math.isfinite(most):
        raise ArgumentError("the tensor holds NaN or Inf, which this codec does not take", Status.NONFINITE)
    assert isinstance(spec, Ternary)
    if spec.clip is None:
        return most
    return min(most, float32(spec.clip * float(torch.from_numpy(x).std(correction=0))) or most)


class _Shared(Reduction):
    """What two-shot sends: ternary values of the scale 1, and their sums as integers, a few to a byte."""

    def __init__(
        self, r: Reduction, owed: Array, parts: Sequence[_Part], scales: Array, size: int, error: Exception | None
    ) -> None:
        super().__init__(r.x, r.dtype, r.spec, r.op, r.stream, out=r.out)
        assert isinstance(r.spec, Ternary)
        self._owed, self._parts, self._scales, self._error = owed, parts, scales, error
        self._lossy = r.residual is not None
        self._begins = np.array([begin for begin, _, _ in parts])
        self._signs = Reduction(owed, "float32", Ternary(r.spec.packing, scale=1.0, seed=r.spec.seed), "sum", r.stream)
        self._most, self._base = size, 2 * size + 1  # sums are from -size to size
        self._wide = self._base > 256
        self._digits = 1 if self._wide else int(math.log(256, self._base))
        self._divide = size if r.op == "mean" else 1

    def _within(self, piece: Piece) -> Iterator[tuple[slice, slice, np.float32]]:
        """What of the parts lies in a piece: where in the piece, where in all, and its scale."""
        first = int(np.searchsorted(self._begins, piece.begin, side="right")) - 1
        for begin, end, i in self._parts[max(0, first) :]:
            a, b = max(begin, piece.begin), min(end, piece.end)
            if begin >= piece.end:
                return
            if a < b:
                yield slice(a - piece.begin, b - piece.begin), slice(a, b), self._scales[i]

    def bound(self, n: int) -> int:
        """Bytes of the largest frame of n values, whichever way it goes."""
        return max(self._signs.bound(n), bound(*self._room(n), Lossless()))

    def _room(self, n: int) -> tuple[int, str]:
        """How many integers hold n sums, and of which dtype."""
        return -(-n // self._digits), "uint16" if self._wide else "uint8"

    def encode(self, piece: Piece, out: Array, number: int) -> int:
        """Put the frame of a piece's ternary values into `out`; its size in bytes."""
        if self._error is not None:
            raise self._error
        x = np.zeros(piece.n, np.float32)
        for here, there, scale in self._within(piece):
            if scale:
                np.divide(self._owed[there], scale, out=x[here])
        nbytes = self._signs.encode_sum(np.clip(x, -1, 1, out=x), piece, out, number)
        if self._lossy:
            self._signs.decode(out[:nbytes], Piece(0, piece.n, None), x)
            for here, there, scale in self._within(piece):
                self._owed[there] -= scale * x[here]
        return nbytes

    def sum(self, parts: Sequence[Array | None], piece: Piece, total: Array, **_: bool) -> None:
        """The sum of ternary values, exact; it is read at once, and a number."""
        self._signs.sum(parts, piece, total)

    def encode_sum(self, total: Array, piece: Piece, out: Array, number: int) -> int:
        """The frame of such a sum."""
        digits = total + np.float32(self._most)
        count, dtype = self._room(piece.n)
        padded = np.zeros(count * self._digits, dtype)
        with np.errstate(invalid="ignore"):
            padded[: piece.n] = digits
        if not ((padded[: piece.n] == digits) & (digits < self._base)).all():
            raise FrameError("values came that are not ternary ones of the scale 1")
        columns = padded.reshape(count, self._digits).T
        packed = columns[0].copy()
        for column in columns[1:]:
            packed *= self._base
            packed += column
        return Reduction(packed, dtype, Lossless(), "sum", 0).encode(Piece(0, count, None), out, number)

    def decode(self, frame: Array, piece: Piece, into: Array) -> None:
        """The values that sums stand for, in the dtype of x; rounded once, and alike on all ranks."""
        count, dtype = self._room(piece.n)
        packed = np.empty(count, dtype)
        Reduction(packed, dtype, Lossless(), "sum", 0).decode(frame, Piece(0, count, None), packed)
        if (packed >= self._base**self._digits).any():
            raise FrameError("sums came that cannot be")
        digits = np.empty((count, self._digits), dtype)
        for column in digits.T[::-1]:
            packed, digit = packed // self._base, packed
            np.subtract(digit, packed * self._base, out=column)
        sums = (digits.reshape(-1)[: piece.n] - digits.dtype.type(self._most)).view(f"i{digits.itemsize}")
        values = np.empty(piece.n, np.float32)
        with np.errstate(over="ignore"):
            for here, _, scale in self._within(piece):
                np.multiply(sums[here], np.float64(scale) / self._divide, out=values[here], casting="same_kind")
        into[piece.begin : piece.end] = self.rounded(values)
