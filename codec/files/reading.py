"""Readers of packed model files and plain .safetensors files, as a whole or tensor by tensor."""

import os
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from codec._c import pool
from codec.errors import ArgumentError, CodecError
from codec.files.header import Header, read_header
from codec.files.index import (
    DIGEST_KEY,
    INDEX,
    PART_NBYTES,
    FilePart,
    Index,
    check_version,
    damaged,
    index_digest,
    is_container,
)
from codec.files.opening import FileBytes, FileKind, MemoryBytes, kind_of, open_regular, printable, readable
from codec.files.packing import Progress
from codec.files.parts import Bytes, decode_part

_MAX_THREADS = 14  # each thread buffers a part and its stored bytes; all threads together need at most 256 MiB


class PlainFile:
    """Open .safetensors file that is not packed."""

    def __init__(self, file: FileBytes | MemoryBytes, header: Header) -> None:
        self._file, self.header = file, header

    def read(self, k: int, begin: int, out: Bytes) -> None:
        """Fill `out` with the bytes of tensor `k` from offset `begin` on."""
        self._file.read_into(out, len(self.header.prefix) + self.header.tensors[k].begin + begin)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class PackedFile:
    """Open packed model file (container). Any number of threads may read it.

    Raises
    ------
    FrameError
        The container is damaged.
    """

    def __init__(self, file: FileBytes | MemoryBytes, outer: Header) -> None:
        check_version(outer)
        self._file, self._start = file, len(outer.prefix)
        self._group: tuple[FilePart, Bytes] | None = (
            None  # cache: the last part that _decoded() has decoded, and its bytes
        )
        self._lock = threading.Lock()
        entry = next((t for t in outer.tensors if t.name == INDEX), None)
        if entry is None or entry.end != outer.data_nbytes:
            raise damaged(f"it has no entry {INDEX!r} at its end")
        packed = file.get(self._start + entry.begin, entry.nbytes).tobytes()
        if index_digest(packed) != outer.metadata.get(DIGEST_KEY):
            raise damaged("the index does not have the digest in the header")
        self.index = Index.from_bytes(packed, entry.begin)
        self.nbytes = outer.nbytes

    @property
    def header(self) -> Header:
        """Header of the original file."""
        return self.index.header

    def read(self, k: int, begin: int, out: Bytes) -> None:
        """Fill `out` with the bytes of tensor `k` from offset `begin` on; decode only the parts with these bytes."""
        end = begin + len(out)
        for part in self.index.stored_as(k):
            if len(part.tensors) > 1:
                at = begin + self._offset(part, self.index.equal.get(k, k))
                out[:] = self._decoded(part)[at : at + len(out)]
            elif part.begin < end and begin < part.begin + part.size:
                first, last = max(begin, part.begin), min(end, part.begin + part.size)
                target = out[first - begin : last - begin]
                if len(target) == part.size:
                    self.decode(part, target)
                else:
                    target[:] = self._decoded(part)[first - part.begin : last - part.begin]

    def decode(self, part: FilePart, out: Bytes) -> None:
        """Decode a part into `out`, a buffer of the part's uncompressed size."""
        stored = self._file.get(self._start + part.at, part.nbytes)
        first = self.header.tensors[part.tensors[0]]
        try:
            decode_part(part.coding, stored, out, first.wire, part.digest)
        except CodecError as e:
            e.of(first.name)
            raise

    def places(self, part: FilePart) -> list[tuple[int, int, int, int]]:
        """List the tensors that contain bytes of a part, including tensors that equal a stored one.

        Returns
        -------
        list of (int, int, int, int)
            Number of the tensor; then, in bytes, offset in the tensor, offset in the part, and size.
        """
        found, at = list[tuple[int, int, int, int]](), 0
        for k in part.tensors:
            size = part.size if len(part.tensors) == 1 else self.header.tensors[k].nbytes
            found += [(twin, part.begin, at, size) for twin in (k, *self._twins.get(k, ()))]
            at += size
        return found

    @cached_property
    def _twins(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for k, other in self.index.equal.items():
            found.setdefault(other, []).append(k)
        return found

    def _offset(self, part: FilePart, k: int) -> int:
        """Return the offset in bytes of tensor `k` in a part of several tensors."""
        before = part.tensors[: part.tensors.index(k)]
        return sum(self.header.tensors[other].nbytes for other in before)

    def _decoded(self, part: FilePart) -> Bytes:
        """Return the decoded bytes of a part. The last decoded part is cached."""
        with self._lock:
            if self._group is None or self._group[0] is not part:
                values = np.empty(part.size, np.uint8)
                self.decode(part, values)
                self._group = part, values
            return self._group[1]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


ModelFile = PackedFile | PlainFile


def open_model(path: str) -> ModelFile:
    """Open a packed model file, or a .safetensors file.

    Raises
    ------
    ArgumentError
        The file cannot be read, or is of another format.
    FrameError
        The container is damaged.
    """
    fd = open_regular(path)
    try:
        with readable(path):
            kind = kind_of(fd)
            if kind is not FileKind.SAFETENSORS:
                raise ArgumentError(f"{printable(path)} is {kind.value}, not a packed file or a .safetensors file")
            return _opened(FileBytes(fd))
    except BaseException:
        os.close(fd)
        raise


def open_bytes(data: Any) -> ModelFile:
    """Open a packed model file, or a .safetensors file, in memory.

    Raises
    ------
    ArgumentError
        The bytes are not such a file.
    FrameError
        The container is damaged.
    """
    with readable("the file in memory"):
        return _opened(MemoryBytes(data))


def _opened(file: FileBytes | MemoryBytes) -> ModelFile:
    outer = read_header(file)
    return PackedFile(file, outer) if is_container(outer) else PlainFile(file, outer)


def each_part(
    file: PackedFile,
    use: Callable[[FilePart, Bytes], object],
    threads: int | None,
    progress: Progress | None = None,
    target: Callable[[FilePart], Bytes | None] = lambda part: None,
) -> None:
    """Decode all parts with several threads, and call `use` with each part and its bytes.

    Parameters
    ----------
    file : PackedFile
        File to decode.
    use : callable
        Called with a part and its bytes, which are valid only during the call.
    threads : int, optional
        Number of threads. Default: chosen from the size of the tensors.
    progress : callable, optional
        Called with the bytes of tensors decoded so far, and the total.
    target : callable, optional
        Called with a part; returns the buffer of the part's size to decode into, or None for an internal buffer, which
        is reused for other parts.
    """
    parts, total = file.index.parts, file.header.data_nbytes
    threads = None if threads is None else pool.check_threads(threads)
    threads = min(pool.choose_threads(threads, total), _MAX_THREADS)
    rooms = [np.empty(min(PART_NBYTES, total), np.uint8) for _ in range(max(1, min(threads, len(parts))))]
    done, lock = 0, threading.Lock()

    def task(i: int, w: int) -> None:
        nonlocal done
        given = target(parts[i])
        values = rooms[w][: parts[i].size] if given is None else given
        file.decode(parts[i], values)
        use(parts[i], values)
        with lock:
            done += sum(size for *_, size in file.places(parts[i]))
            if progress is not None:
                progress(done, total)

    pool.run(task, len(parts), threads)


def unpack(file: PackedFile, fd: int, *, threads: int | None = None, progress: Progress | None = None) -> None:
    """Restore the original file, bit-identical, and write it to `fd`, the descriptor of an empty file."""
    header = file.header
    os.pwrite(fd, header.prefix, 0)
    os.ftruncate(fd, header.nbytes)

    def write(part: FilePart, values: Bytes) -> None:
        for k, offset, at, size in file.places(part):
            pwrite_all(fd, values[at : at + size], len(header.prefix) + header.tensors[k].begin + offset)

    each_part(file, write, threads, progress)


def pwrite_all(fd: int, values: Any, at: int) -> None:
    """Write all bytes of `values` at offset `at` of a file."""
    left = memoryview(values)
    while left:
        n = os.pwrite(fd, left, at)
        left, at = left[n:], at + n
