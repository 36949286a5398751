"""Where a flat tensor is cut: equally on all ranks, for it follows from sizes and shapes alone."""

import bisect
import functools
from collections.abc import Callable
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from codec.tensors.segments import Records, Segments, pack, unpack

CHUNK_NBYTES = 1 << 20  # of a tensor: while one is on the wire, others are encoded and decoded
_FRAME_NBYTES = 1 << 19  # each chunk costs messages: if their frames are smaller than that, chunks are larger,
MOST_NBYTES = 1 << 22  # up to this
_MOST = 16  # chunks of a slice
_LONG = 1 << 16  # values of a row that is cut like any others
_ALIGN = 1024  # values: no block or group of a codec of rows is cut, as long as it divides this


class Piece(NamedTuple):
    """Values [begin, end) of a flat tensor, and what has a shape in it, counted from `begin`."""

    begin: int
    end: int
    segments: Records | None

    @property
    def n(self) -> int:
        """How many values."""
        return self.end - self.begin


def chunk_nbytes(itemsize: int, bound: Callable[[int], int]) -> int:
    """About how large chunks of a tensor are whose frames of n values have bound(n) bytes at most."""
    frame_nbytes = bound(CHUNK_NBYTES // itemsize)
    return max(CHUNK_NBYTES, min(MOST_NBYTES, CHUNK_NBYTES * _FRAME_NBYTES // frame_nbytes))


@functools.lru_cache(256)  # of few tensors, again and again
def cut(
    n: int, size: int, itemsize: int, segments: Records | None, chunk_nbytes: int | None = None
) -> list[list[Piece]]:
    """A slice for each of `size` ranks, in chunks of CHUNK_NBYTES or as many as are given; some may be empty.

    Where slices begin does not depend on them. Rows of parameters stay whole where they are much shorter than a chunk.
    What is returned is for all who ask: not to be changed.
    """
    chunks = _chunks(n * itemsize / size, chunk_nbytes or CHUNK_NBYTES)
    inside = unpack(segments) if segments else []
    starts = _row_starts(inside) if inside else None
    # max: rounding to _ALIGN behind a segment can give a cut point before the last one inside the segment
    cuts = list(accumulate((_near(i * n // (size * chunks), n, starts) for i in range(size * chunks + 1)), max))
    pieces = [Piece(a, b, pack(_inside(inside, a, b)) if inside else None) for a, b in pairwise(cuts)]
    return [pieces[r * chunks : (r + 1) * chunks] for r in range(size)]


def cut_evenly(n: int, size: int, itemsize: int, chunk_nbytes: int) -> list[list[Piece]]:
    """The same with slices of n / size values, a whole number."""
    each = n // size
    chunks = _chunks(each * itemsize, chunk_nbytes)
    cuts = [i * each // chunks for i in range(chunks + 1)]
    return [[Piece(r * each + a, r * each + b, None) for a, b in pairwise(cuts)] for r in range(size)]


def _chunks(nbytes: float, chunk_nbytes: int) -> int:
    """At least two of a slice that is not small: while the sum of one goes out, the other one comes in."""
    return max(2 if nbytes > CHUNK_NBYTES else 1, min(_MOST, round(nbytes / chunk_nbytes)))


class _Rows(NamedTuple):
    offset: list[int]
    row: list[int]
    n: list[int]


def _row_starts(segments: Segments) -> _Rows:
    """Of parameters with values: where they begin, and their rows."""
    shaped = [(offset, shape) for offset, shape in segments if shape and prod(shape)]
    return _Rows(
        [offset for offset, _ in shaped],
        [prod(shape[1:]) for _, shape in shaped],
        [prod(shape) for _, shape in shaped],
    )


def _near(at: int, n: int, rows: _Rows | None) -> int:
    """A good place to cut at or before `at`."""
    if at >= n:
        return n
    i = bisect.bisect_right(rows.offset, at) - 1 if rows else -1
    if rows and i >= 0 and at < rows.offset[i] + rows.n[i] and rows.row[i] > 1:
        inside = at - rows.offset[i]
        return at - inside % rows.row[i] if rows.row[i] <= _LONG else at
    return at - at % _ALIGN


def _inside(segments: Segments, begin: int, end: int) -> Segments:
    """What of the parameters lies in [begin, end): whole ones, and whole rows of those that are cut."""
    found: Segments = []
    for offset, shape in segments:
        count = prod(shape)
        if offset >= end or offset + count <= begin or not count:
            continue
        if begin <= offset and offset + count <= end:
            found.append((offset - begin, shape))
            continue
        row = prod(shape[1:])
        first = -(-max(0, begin - offset) // row)
        last = min(count, end - offset) // row
        if last > first:
            found.append((offset + first * row - begin, (last - first, *shape[1:])))
    return found
