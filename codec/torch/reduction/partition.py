"""Split a flat tensor into slices and pieces. The result depends only on sizes and shapes, so all ranks agree."""

import bisect
import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple, cast

from codec.specs import BoundSpec
from codec.tensors.segments import Records, Segments, pack, unpack

CHUNK_NBYTES = 1 << 20  # bytes of a chunk before encoding; while a chunk is sent, other chunks are encoded and decoded
_FRAME_NBYTES = 1 << 19  # target size of a chunk's frame in bytes; if frames are smaller, chunks are larger
MOST_NBYTES = 1 << 22  # maximum bytes of a chunk before encoding
_MOST = 16  # maximum number of chunks of a slice
_LONG = 1 << 16  # rows with more values than this may be split
_ALIGN = 1024  # cut points outside of rows are multiples of this, so that groups of 1024, 512, ... values stay whole


class Piece(NamedTuple):
    """Values [begin, end) of a flat tensor, and the segments inside, with offsets from `begin`."""

    begin: int
    end: int
    segments: Records | None

    @property
    def n(self) -> int:
        """Number of values."""
        return self.end - self.begin


def chunk_nbytes(itemsize: int, bound: Callable[[int], int]) -> int:
    """Return the size of a chunk before encoding, in bytes; bound(n) is the maximum bytes of a frame of n values."""
    frame_nbytes = bound(CHUNK_NBYTES // itemsize)
    return max(CHUNK_NBYTES, min(MOST_NBYTES, CHUNK_NBYTES * _FRAME_NBYTES // frame_nbytes))


@functools.lru_cache(256)  # a training run splits the same few tensors in each step
def cut(
    n: int,
    size: int,
    itemsize: int,
    segments: Records | None,
    chunk_nbytes: int | None = None,
    weights: tuple[int, ...] | None = None,
) -> list[list[Piece]]:
    """Return a slice for each of `size` ranks, as pieces of about `chunk_nbytes` bytes; pieces may be empty.

    The start of a slice does not depend on `chunk_nbytes`. Rows of segments that are much shorter than a chunk stay
    whole.

    Parameters
    ----------
    n : int
        Number of values.
    size : int
        Number of ranks.
    itemsize : int
        Bytes of a value.
    segments : Records or None
        Shapes of parameters inside the tensor.
    chunk_nbytes : int, optional
        Bytes of a chunk; CHUNK_NBYTES if left out.
    weights : tuple of int, optional
        Relative size of each rank's slice. Default: slices of equal size.

    Returns
    -------
    list of list of Piece
        Pieces by slice. The list is shared by all callers, who must not change it.
    """
    each = weights or (1,) * size
    assert len(each) == size
    total = sum(each)
    chunks = _chunks(n * itemsize * max(each) / total, chunk_nbytes or CHUNK_NBYTES)
    inside = unpack(segments) if segments else []
    starts = _row_starts(inside) if inside else None
    # max keeps cut points ascending: past a segment, rounding to _ALIGN can give a point before the previous cut
    ends = accumulate((weight for weight in each for _ in range(chunks)), initial=0)
    cuts = list(accumulate((_near(end * n // (total * chunks), n, starts) for end in ends), max))
    pieces = [Piece(a, b, pack(_inside(inside, a, b)) if inside else None) for a, b in pairwise(cuts)]
    return [pieces[r * chunks : (r + 1) * chunks] for r in range(size)]


@functools.lru_cache(256)
def windows(n: int, size: int, itemsize: int, segments: Records | None) -> list[Piece]:
    """Return the slices of :func:`cut` as one piece each."""
    inside = unpack(segments) if segments else []
    slices = ((pieces[0].begin, pieces[-1].end) for pieces in cut(n, size, itemsize, segments))
    return [Piece(a, b, pack(_inside(inside, a, b)) if inside else None) for a, b in slices]


@functools.lru_cache(256)
def cut_evenly(
    n: int, size: int, itemsize: int, chunk_nbytes: int, segments: Records | None = None
) -> list[list[Piece]]:
    """Return slices of n / size values each, as :func:`cut` does; `n` is a multiple of `size`.

    Cut points do not depend on the segments. If a cut splits a row, the values of that row belong to no segment.
    """
    each = n // size
    chunks = _chunks(each * itemsize, chunk_nbytes)
    cuts = [r * each + i * each // chunks for r in range(size) for i in range(chunks)] + [n]
    inside = unpack(segments) if segments else []
    offsets, ends = [offset for offset, _ in inside], [offset + prod(shape) for offset, shape in inside]

    def within(a: int, b: int) -> Records | None:
        near = inside[bisect.bisect_right(ends, a) : bisect.bisect_left(offsets, b)]
        return pack(_inside(near, a, b)) if inside else None

    pieces = [Piece(a, b, within(a, b)) for a, b in pairwise(cuts)]
    return [pieces[r * chunks : (r + 1) * chunks] for r in range(size)]


def sent(slices: Sequence[Sequence[Piece]]) -> list[dict[int, Piece]]:
    """Return the pieces of each slice for which ranks send messages, by chunk: those that have values.

    Empty pieces are sent only if the tensor has no values. So all ranks exchange a message with the owner of the last
    slice, which compares their arguments.
    """
    n = slices[-1][-1].end
    return [{c: piece for c, piece in enumerate(pieces) if piece.n or not n} for pieces in slices]


class SentPiece(NamedTuple):
    """Piece of one of several tensors whose pieces are sent together."""

    tensor: int
    piece: Piece
    number: int  # number of the piece among those of its tensor


def messages(slices: Sequence[list[list[Piece]]], itemsizes: Sequence[int], nbytes: int) -> list[list[list[SentPiece]]]:
    """Return the messages with the slice of each rank of several tensors, as the pieces in each message.

    Consecutive pieces of at most `nbytes` bytes together are in one message, since small messages take as long as empty
    ones.

    Parameters
    ----------
    slices : sequence
        Pieces by tensor and rank, as :func:`cut` returns them.
    itemsizes : sequence of int
        Bytes of a value of each tensor; 0: each piece of the tensor is a message.
    nbytes : int
        Maximum bytes of a message with several pieces.
    """
    found: list[list[list[SentPiece]]] = [[] for _ in slices[0]]
    room = [0] * len(found)  # bytes that fit into the last message
    for i, (each, itemsize) in enumerate(zip(slices, itemsizes, strict=True)):
        for rank, pieces in enumerate(sent(each)):
            for c, piece in pieces.items():
                item, needed = SentPiece(i, piece, rank * len(each[rank]) + c), piece.n * itemsize
                if found[rank] and itemsize and needed <= room[rank]:
                    found[rank][-1].append(item)
                    room[rank] -= needed
                else:
                    found[rank].append([item])
                    room[rank] = nbytes - needed if itemsize else -1
    return found


def _chunks(nbytes: float, chunk_nbytes: int) -> int:
    """Return the number of chunks of a slice; at least two unless the slice is small, so that phases overlap."""
    return max(2 if nbytes > CHUNK_NBYTES else 1, min(_MOST, round(nbytes / chunk_nbytes)))


class _SegmentRows(NamedTuple):
    """Offsets, row sizes and sizes, in values, of segments that have a dimension and a value."""

    offset: list[int]
    row: list[int]  # number of values in a row
    n: list[int]  # number of values in the segment


def _row_starts(segments: Segments) -> _SegmentRows:
    """Return the offsets and sizes of the segments that have at least one dimension and one value."""
    shaped = [(offset, shape) for offset, shape in segments if shape and prod(shape)]
    return _SegmentRows(
        [offset for offset, _ in shaped],
        [prod(shape[1:]) for _, shape in shaped],
        [prod(shape) for _, shape in shaped],
    )


def _near(at: int, n: int, rows: _SegmentRows | None) -> int:
    """Return the last valid cut point up to `at`: the start of a row, or outside of rows a multiple of _ALIGN.

    A multiple of _ALIGN inside an earlier segment, whose row it would cut, is replaced by the end of that segment.
    """
    if at >= n:
        return n
    first = 0
    if rows and (i := bisect.bisect_right(rows.offset, at) - 1) >= 0:
        inside = at - rows.offset[i]
        if inside < rows.n[i] and rows.row[i] > 1:
            return at - inside % rows.row[i] if rows.row[i] <= _LONG else at
        first = rows.offset[i] + (0 if inside < rows.n[i] else rows.n[i])
    return max(first, at - at % _ALIGN)


def _inside(segments: Segments, begin: int, end: int) -> Segments:
    """Return the segments in [begin, end): whole ones, and the whole rows of segments that are cut."""
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


def bound_to_range(spec: BoundSpec, begin: int, end: int) -> BoundSpec:
    """Return the bound spec for the values [begin, end) of a flat tensor: the same slice of each of its arrays."""
    if spec.levels is not None:
        return spec.spec.bind(levels=spec.levels[begin:end])
    optimizer = spec.optimizer
    if isinstance(optimizer, list | tuple):
        groups: list[tuple[int, Any]] = []
        for offset, each in cast(Sequence[tuple[int, Any]], optimizer):
            if offset <= begin:
                groups = [(0, each)]
            elif offset < end:
                groups.append((offset - begin, each))
        optimizer = groups
    return spec.spec.bind(optimizer, **{name: x[begin:end] for name, x in spec.state.items()})
