"""TernGrad's all-reduce: all ranks share one scale, so that ternary values are integers and their sums are exact."""

import math
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from codec import ArgumentError, CallOptions, FrameError, SpecError, Status
from codec.arguments import float32
from codec.explain import nonfinite_message
from codec.specs import Lossless, Spec, Ternary
from codec.tensors.segments import Records, Segments, unpack
from codec.tensors.view import view
from codec.torch._compat import from_numpy
from codec.torch.reduction.algorithms import all_gather, two_shot
from codec.torch.reduction.host import Reduction, Values, bound
from codec.torch.reduction.partition import Piece
from codec.torch.transport.collective import CollectivePart
from codec.torch.transport.messages import Array

_Part = tuple[int, int, int]  # begin and end of values that share a scale; number of the scale


def check(spec: Spec, op: str) -> None:
    """Raise SpecError or ArgumentError unless ranks can share the scales of a reduction."""
    if not isinstance(spec, Ternary):
        raise SpecError(f'spec must be Ternary for algorithm="shared_scale", got {spec}')
    if spec.scale is not None:
        raise SpecError(
            f'leave out scale={spec.scale} with algorithm="shared_scale", in which the ranks agree on the scale'
        )
    if op == "max":
        raise ArgumentError('op must be a sum or a mean for algorithm="shared_scale", got a maximum')


async def shared_scale(part: CollectivePart, r: Reduction) -> Values:
    """Agree on a scale for each parameter, then run two-shot with ternary terms and integer sums.

    The scale is the largest magnitude on any rank, limited by ``clip`` of the spec. Ternary is not a contraction, so
    there is no error feedback.
    """
    x = r.tensor_of(r.x).float().numpy()
    parts = _parts(r.n, r.segments)
    mine = np.zeros(1 + len(_pairs(r.segments)), np.float32)
    try:
        for begin, end, i in parts:
            mine[i] = max(mine[i], magnitude(x[begin:end], r.spec))
    except ArgumentError:
        raise ArgumentError(r.nonfinite_text(), Status.NONFINITE) from None
    bounded = CallOptions(max_norm=r.settings.max_norm)  # a scale is a magnitude of the tensor
    scales = await all_gather(
        part, Reduction(mine, "float32", Lossless(), "max", r.stream, settings=bounded, summed=r.summed)
    )
    if not np.isfinite(scales).all():
        raise FrameError("a rank has sent a scale that is not finite")
    return await two_shot(part, _Shared(r, x, parts, scales.copy(), part.size))


def _pairs(segments: Records | None) -> Segments:
    return unpack(segments) if segments else []


def _parts(n: int, segments: Records | None) -> list[_Part]:
    """Return the ranges of values, with their scales: one scale per segment, and one for all values in no segment."""
    found: list[_Part] = []
    rest, at = len(_pairs(segments)), 0
    for i, (offset, shape) in enumerate(_pairs(segments)):
        found += [(at, offset, rest), (offset, offset + prod(shape), i)]
        at = offset + prod(shape)
    return [part for part in [*found, (at, n, rest)] if part[0] < part[1]]


def magnitude(x: Array, spec: Spec) -> float:
    """Return the largest magnitude of x, limited to `spec.clip` standard deviations unless these are 0."""
    most = abs(max(float(x.max()), -float(x.min())))
    if not math.isfinite(most):
        raise ArgumentError(nonfinite_message(view(x), spec, "the tensor"), Status.NONFINITE)
    assert isinstance(spec, Ternary)
    if spec.clip is None:
        return most
    return min(most, float32(spec.clip * float(from_numpy(x).std(correction=0))) or most)


class _Shared(Reduction):
    """Reduction whose terms are ternary values with scale 1, and whose sums are integers, packed several per byte."""

    def __init__(self, r: Reduction, values: Array, parts: Sequence[_Part], scales: Array, size: int) -> None:
        bounded = CallOptions(max_norm=r.settings.max_norm)
        super().__init__(r.x, r.dtype, r.spec, r.op, r.stream, settings=bounded, out=r.out, summed=r.summed)
        assert isinstance(r.spec, Ternary)
        self._values, self._parts, self._scales = values, parts, scales
        self._begins = np.array([begin for begin, _, _ in parts])
        self._signs = Reduction(
            values, "float32", Ternary(r.spec.packing, scale=1.0, seed=r.spec.seed), "sum", r.stream
        )
        self._most, self._base = size, 2 * size + 1  # sums are -size to size
        self._wide = self._base > 256
        self._digits = 1 if self._wide else int(math.log(256, self._base))
        self._divide = size if r.op == "mean" else 1

    def _within(self, piece: Piece) -> Iterator[tuple[slice, slice, np.float32]]:
        """Yield, for each part inside a piece: its range in the piece, its range in the tensor, and its scale."""
        first = int(np.searchsorted(self._begins, piece.begin, side="right")) - 1
        for begin, end, i in self._parts[max(0, first) :]:
            a, b = max(begin, piece.begin), min(end, piece.end)
            if begin >= piece.end:
                return
            if a < b:
                yield slice(a - piece.begin, b - piece.begin), slice(a, b), self._scales[i]

    def bound(self, n: int) -> int:
        """Return the upper bound of the bytes of a frame of `n` terms or sums, for choosing chunk sizes."""
        return max(self._signs.bound(n), bound(*self._packed(n), Lossless()))

    def frame_bound(self, piece: Piece) -> int:
        """Return the upper bound of the bytes of the frames of a piece's terms and sums."""
        return max(self._signs.frame_bound(piece), bound(*self._packed(piece.n), Lossless()))

    def _packed(self, n: int) -> tuple[int, str]:
        """Return the number and dtype of the integers that hold `n` sums."""
        return -(-n // self._digits), "uint16" if self._wide else "uint8"

    def encode(self, piece: Piece, out: Array, number: int) -> int:
        """Encode the ternary terms of a piece to `out`; return the frame's size in bytes."""
        x = np.zeros(piece.n, np.float32)
        for here, there, scale in self._within(piece):
            if scale:
                np.divide(self._values[there], scale, out=x[here])
        return self._signs.encode_sum(np.clip(x, -1, 1, out=x), piece, out, number)

    def sum(self, parts: Sequence[Array | None], piece: Piece, total: Array, **_: bool) -> None:
        """Store the exact sum of ternary terms in `total`."""
        self._signs.sum(parts, piece, total)

    def decoded(self, frame: Array, piece: Piece) -> Array:
        """Return the values of a term: ternary values times their scales."""
        values = self._signs.decoded(frame, piece)
        for here, _, scale in self._within(piece):
            values[here] *= scale
        return values

    def encode_sum(self, total: Array, piece: Piece, out: Array, number: int) -> int:
        """Encode the sum of a piece to `out`; return the frame's size in bytes."""
        digits = total + np.float32(self._most)
        count, dtype = self._packed(piece.n)
        padded = np.zeros(count * self._digits, dtype)
        with np.errstate(invalid="ignore"):
            padded[: piece.n] = digits
        if not ((padded[: piece.n] == digits) & (digits < self._base)).all():
            raise FrameError("a rank has sent terms that are not ternary values with scale 1")
        columns = padded.reshape(count, self._digits).T
        packed = columns[0].copy()
        for column in columns[1:]:
            packed *= self._base
            packed += column
        return Reduction(packed, dtype, Lossless(), "sum", 0).encode(Piece(0, count, None), out, number)

    def decode(self, frame: Array, piece: Piece, into: Array) -> None:
        """Decode sums to values in the dtype of the tensor; rounded once, and equal on all ranks."""
        count, dtype = self._packed(piece.n)
        packed = np.empty(count, dtype)
        Reduction(packed, dtype, Lossless(), "sum", 0).decode(frame, Piece(0, count, None), packed)
        if (packed >= self._base**self._digits).any():
            raise FrameError("a rank has sent sums of ternary values that are out of range")
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
