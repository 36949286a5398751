"""Writer of packed model files: several threads encode parts, which are written in order."""

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from codec._c import pool
from codec.errors import CodecError
from codec.files.header import MAX_JSON, MAX_RANK, FileTensor, Header, compose, parse
from codec.files.index import (
    DIGEST_KEY,
    FORMAT,
    GROUPS,
    INDEX,
    VERSION_KEY,
    FilePart,
    Index,
    index_digest,
)
from codec.files.parts import Bytes, EncodedPart, encode_part, repeats, room_for
from codec.files.sources import TensorSource

Progress = Callable[[int, int], object]  # called with the bytes of tensors processed so far, and the total

SMALL_NBYTES = 1 << 16  # tensors with fewer bytes are small: several of them are encoded in one part
_GROUP_NBYTES = 1 << 20  # bytes of a group of small tensors; reading one of them decodes the whole group
_STEP, _MIXED_STEP = 1 << 22, 1 << 17  # bytes per part of a large tensor, and of a mixed tensor
_WINDOW = 28  # maximum number of parts in memory at once; with 8 MiB each, less than 256 MiB
_COMPARED = 1 << 22  # bytes per comparison of two tensors
_PROBE = 64  # bytes per probe, a short read that shows if a tensor may be equal to another one, or mixed
_PROBES = 128  # number of positions at which a tensor is probed for being mixed


class PackJob(NamedTuple):
    """Part to encode; fields as in :class:`codec.files.index.FilePart`."""

    tensors: tuple[int, ...]
    begin: int
    size: int


def pack(
    source: TensorSource, file: BinaryIO, *, threads: int | None = None, progress: Progress | None = None
) -> Index:
    """Encode tensors, and write them to a packed model file.

    Parameters
    ----------
    source : TensorSource
        Tensors to pack.
    file : binary file
        Seekable, open for writing, and empty.
    threads : int, optional
        Number of threads. Default: chosen from the size of the tensors.
    progress : callable, optional
        Called with the bytes of tensors encoded so far, and the total.

    Returns
    -------
    Index
        Index that has been written to the file.

    Raises
    ------
    CodecError
        A reader would refuse the file, or restore another header from it.
    """
    threads = None if threads is None else pool.check_threads(threads)
    header = source.header
    equal = _equal_tensors(source)
    jobs, entries = plan(source, equal)
    reserved = len(_outer(dict.fromkeys(entries, header.nbytes + room_for(_STEP)), "0" * 32).prefix)
    file.seek(reserved)
    parts, done, at = list[FilePart](), 0, 0
    sizes = dict.fromkeys(entries, 0)
    for job, encoded in _encoded(source, jobs, pool.choose_threads(threads, header.data_nbytes)):
        nbytes = len(encoded.data)
        file.write(encoded.data)
        parts.append(FilePart(job.tensors, job.begin, job.size, encoded.coding, at, nbytes, encoded.digest))
        sizes[_entry(header, job)] += nbytes
        at, done = at + nbytes, done + job.size
        if progress is not None:
            progress(done, header.data_nbytes)
    index = Index(header, tuple(parts), equal)
    packed = index.to_bytes()
    file.write(packed)
    sizes[INDEX] = len(packed)
    prefix = _outer(sizes, index_digest(packed)).prefix
    text = prefix[8:].ljust(reserved - 8)
    _check_readable(text, packed, index)
    file.seek(0)
    file.write(len(text).to_bytes(8, "little") + text)
    return index


def _check_readable(text: bytes, packed: bytes, index: Index) -> None:
    """Raise CodecError unless a reader accepts the header and the index of a new file, and finds what was written."""
    try:
        if len(text) > MAX_JSON:
            raise ValueError(f"its header has {len(text)} bytes, more than {MAX_JSON}")
        outer = parse(text)
        same = Index.from_bytes(packed, outer.data_nbytes - len(packed)) == index
    except (CodecError, ValueError) as e:
        raise CodecError(f"the tensors cannot be packed, because no reader would accept the file: {e}") from None
    if not same:
        raise CodecError("the tensors cannot be packed, because a reader would find other tensors in the file")


def plan(source: TensorSource, equal: dict[int, int]) -> tuple[list[PackJob], list[str]]:
    """Return the parts to encode, and the names of the container's entries, both in the order of the container."""
    jobs, small, entries = list[PackJob](), dict[tuple[str, bool], list[int]](), list[str]()
    room = np.empty(SMALL_NBYTES, np.uint8)
    for k, t in enumerate(source.header.tensors):
        if k in equal or not t.nbytes:
            continue
        if t.nbytes < SMALL_NBYTES:
            again = repeats(source.read(k, 0, t.nbytes, room), t.itemsize)
            small.setdefault((t.dtype, again), []).append(k)
            continue
        step = _rows_nbytes(t, _MIXED_STEP if _is_mixed(source, k, t) else _STEP)
        jobs += [PackJob((k,), begin, min(step, t.nbytes - begin)) for begin in range(0, t.nbytes, step)]
        entries.append(_entry(source.header, jobs[-1]))
    for numbers in small.values():
        jobs += _groups(source.header, numbers)
    # move groups of small tensors to the end; the sort is stable, so large tensors stay in order
    jobs.sort(key=lambda job: _entry(source.header, job) == GROUPS)
    return jobs, [*dict.fromkeys(name for name in entries if name != GROUPS), GROUPS, INDEX]


def _groups(header: Header, numbers: list[int]) -> Iterator[PackJob]:
    """Divide small tensors of one dtype into groups of about 1 MiB, and yield each as a part."""
    at = 0

    def group_of(k: int) -> int:
        nonlocal at
        at += header.tensors[k].nbytes
        return (at - 1) // _GROUP_NBYTES

    for _, together in groupby(numbers, key=group_of):
        group = tuple(together)
        yield PackJob(group, 0, sum(header.tensors[k].nbytes for k in group))


def _rows_nbytes(t: FileTensor, step: int) -> int:
    """Return the bytes per part of a tensor: `step`, rounded down to whole rows of the first dimension if possible."""
    row = t.nbytes // max(1, t.shape[0]) if t.shape else t.nbytes
    return step // row * row if _has_rows(t) and row <= step else step


def _is_mixed(source: TensorSource, k: int, t: FileTensor) -> bool:
    """Return True if some, but not all, runs of values in a float32 tensor are zero or fit a 16-bit dtype.

    An example is an embedding with rows that were never trained. A mixed tensor is divided into small parts, and each
    part has its own coding.
    """
    if t.wire != "float32":
        return False
    room = np.empty(_PROBE, np.uint8)
    step = t.nbytes // _PROBES // t.itemsize * t.itemsize
    some = [source.read(k, i * step, i * step + _PROBE, room).view(np.uint32) & 0x1FFF for i in range(_PROBES)]
    return 0.01 < sum(not bits.any() for bits in some) / _PROBES < 0.99


def _has_rows(t: FileTensor) -> bool:
    """Return True if a frame can represent the tensor's shape: its values are whole bytes, and its rank fits."""
    return 0 < len(t.shape) <= MAX_RANK and int(np.prod(t.shape)) * t.itemsize == t.nbytes


def _shape(t: FileTensor, size: int) -> tuple[int, ...]:
    """Return the shape with which `size` bytes of a tensor are encoded: whole rows if possible, otherwise flat."""
    row = t.nbytes // max(1, t.shape[0]) if t.shape else t.nbytes
    return (size // row, *t.shape[1:]) if _has_rows(t) and size % row == 0 else (size // t.itemsize,)


def _entry(header: Header, job: PackJob) -> str:
    """Return the name of the container's entry for a part: a large tensor's name, or GROUPS for small tensors."""
    name = header.tensors[job.tensors[0]].name
    large = len(job.tensors) == 1 and header.tensors[job.tensors[0]].nbytes >= SMALL_NBYTES
    return name if large and name not in (INDEX, GROUPS) else GROUPS


def _outer(sizes: dict[str, int], digest: str) -> Header:
    """Return the container's header. `sizes`: bytes of each entry, by name; `digest`: digest of the index."""
    named = [(name, "U8", (n,), n) for name, n in sizes.items()]
    return compose(named, {VERSION_KEY: str(FORMAT), DIGEST_KEY: digest})


def _encoded(source: TensorSource, jobs: list[PackJob], threads: int) -> Iterator[tuple[PackJob, EncodedPart]]:
    """Encode parts with several threads, and yield them in order."""
    threads = min(threads, _WINDOW, max(1, len(jobs)))
    window = min(len(jobs), threads * 2, _WINDOW)
    rooms = [np.empty(min(_STEP, source.header.data_nbytes), np.uint8) for _ in range(threads)]
    outs = [np.empty(room_for(_STEP), np.uint8) for _ in range(window)]

    for first in range(0, len(jobs), max(1, window)):
        batch = jobs[first : first + window]

        def task(i: int, w: int, batch: list[PackJob] = batch) -> EncodedPart:
            return _encode(source, batch[i], rooms[w], outs[i])

        yield from zip(batch, pool.run(task, len(batch), threads), strict=True)


def _encode(source: TensorSource, job: PackJob, room: Bytes, out: Bytes) -> EncodedPart:
    tensors = [source.header.tensors[k] for k in job.tensors]
    if len(tensors) == 1:
        values = source.read(job.tensors[0], job.begin, job.begin + job.size, room)
        return encode_part(values, tensors[0].wire, _shape(tensors[0], job.size), out)
    at, segments = 0, list[tuple[int, tuple[int, ...]]]()
    for k, t in zip(job.tensors, tensors, strict=True):
        place = room[at : at + t.nbytes]
        place[:] = source.read(k, 0, t.nbytes, place)
        if t.nbytes:
            segments.append((at // t.itemsize, _shape(t, t.nbytes)))
        at += t.nbytes
    return encode_part(room[:at], tensors[0].wire, (at // tensors[0].itemsize,), out, segments)


def _equal_tensors(source: TensorSource) -> dict[int, int]:
    """Map each tensor whose bytes equal those of an earlier tensor to the earlier one's number.

    Probes at three positions are compared first, so that few bytes of unequal tensors are read.
    """
    seen: dict[Any, list[int]] = {}
    found: dict[int, int] = {}
    room = np.empty(_PROBE, np.uint8)
    sizes = [t.nbytes for t in source.header.tensors]
    shared = {n for n, run in groupby(sorted(sizes)) if n >= _PROBE and len(list(run)) > 1}
    for k, n in enumerate(sizes):
        if n not in shared:
            continue
        places = {0, n // 2, max(0, n - _PROBE)}
        probe = (n, *(source.read(k, b, min(n, b + _PROBE), room).tobytes() for b in sorted(places)))
        others = seen.setdefault(probe, [])
        same = next((other for other in others if _is_equal(source, k, other, n)), None)
        if same is None:
            others.append(k)
        else:
            found[k] = same
    return found


def _is_equal(source: TensorSource, k: int, other: int, nbytes: int) -> bool:
    rooms = np.empty((2, min(nbytes, _COMPARED)), np.uint8)
    return all(
        np.array_equal(source.read(k, b, e, rooms[0]), source.read(other, b, e, rooms[1]))
        for b in range(0, nbytes, _COMPARED)
        for e in [min(nbytes, b + _COMPARED)]
    )
