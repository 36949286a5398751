"""Files of fixed-size slots that store entries, the activations m of samples. Each slot has a checksum."""

import errno
import os
import re
import stat
import struct
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from codec.errors import StateError
from codec.stateful.activation.entries import Bytes, largest_nbytes
from codec.stateful.activation.message import ENTRY_CODES

MAGIC = b"CODS"
VERSION = 1
_NAME = re.compile(r"([1-9][0-9]*)\.slots")  # file name; the number is the number of values per sample
_MOST_VALUES = 1 << 48  # maximum number of values per sample
_FILE_HEAD = struct.Struct("<4sIIIQQQ")  # magic, version, dtype of entries, zero, edge, values, size of a slot
_SLOT_HEAD = struct.Struct("<qQQII28x")  # sample, check, visits, size and CRC of the entry, zeros
_START = 4096  # byte offset of the first slot
_CRC = struct.Struct("<I")
_HEAD = 64  # size of a slot's head in bytes; its last 4 bytes are its CRC
_PAGE = 4096


def slot_files(folder: Path) -> list[tuple[int, Path]]:
    """Return the slot files in a folder as pairs (number of values per sample, path), sorted."""
    found: list[tuple[int, Path]] = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and len(match[1]) <= 15 and int(match[1]) <= _MOST_VALUES:
            found.append((int(match[1]), path))
    return sorted(found)


def slot_file(folder: Path, n: int) -> Path:
    """Return the path of the slot file for samples of `n` values."""
    return folder / f"{n}.slots"


class SlotHead(NamedTuple):
    """Head of a slot that contains the entry of a sample."""

    sample: int
    check: int
    visits: int
    nbytes: int
    crc: int  # CRC-32 of the entry's bytes


class SlotFile:
    """File of slots for entries that all have the same number of values.

    Each slot contains checksums, which detect a slot that was only partly written because the process was killed. Slots
    are accessed with pread and pwrite: a full or failing disk raises OSError, where mapped memory would kill the
    process with SIGBUS. Different threads may read and write different slots at the same time, but :meth:`reserve` and
    :meth:`release` must be called on one thread only.

    Parameters
    ----------
    path : Path
        Path of the file. The file is created if it does not exist.
    dtype : {"float32", "bfloat16", "8bit"}
        Dtype of the entries.
    edge : int
        Number of the pipeline edge.
    n : int
        Number of values of an entry.
    writable : bool
        False: only reads are allowed, and the file must exist.

    Raises
    ------
    StateError
        The file is not a slot file, or belongs to another edge or dtype.
    OSError
        The file cannot be opened, read or written.
    """

    def __init__(self, path: Path, dtype: str, edge: int, n: int, writable: bool = True) -> None:
        self.path, self.n, self._dtype = path, n, dtype
        self.slot_nbytes = _slot_nbytes(largest_nbytes(dtype, n))
        self._fd = _open(path, os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY)
        try:
            self._check(_file_head(dtype, edge, n, self.slot_nbytes), writable)
            size = max(0, os.fstat(self._fd).st_size - _START)
        except BaseException:
            os.close(self._fd)
            raise
        self.count = -(-size // self.slot_nbytes)
        self._free: list[int] = []
        self.close = weakref.finalize(self, os.close, self._fd)  # also called on garbage collection

    def sync(self) -> None:
        """Wait until all written data are on the disk."""
        os.fsync(self._fd)

    def reserve(self) -> int:
        """Return the number of an unused slot."""
        if self._free:
            return self._free.pop()
        self.count += 1
        return self.count - 1

    def release(self, slot: int) -> None:
        """Mark a slot as unused, so that :meth:`reserve` can return it again."""
        self._free.append(slot)

    def write(self, slot: int, sample: int, check: int, visits: int, entry: Bytes) -> None:
        """Write the entry of a sample, and a head that describes it, to a slot."""
        head = _SLOT_HEAD.pack(sample, check, visits, len(entry), zlib.crc32(entry.data))
        parts: list[Any] = [head + _CRC.pack(zlib.crc32(head)), entry.data]
        at, rest = self._at(slot), _HEAD + len(entry)
        while (done := os.pwritev(self._fd, parts, at)) < rest:
            parts = [memoryview(b"".join(bytes(p) for p in parts))[done:]]
            at, rest = at + done, rest - done

    def clear(self, slot: int) -> None:
        """Overwrite the head of a slot with zeros, so that the slot contains no entry."""
        os.pwrite(self._fd, bytes(_HEAD), self._at(slot))

    def read(self, slot: int, sample: int, check: int, memory: Bytes) -> Bytes | None:
        """Read the entry of a sample into `memory`, and return the part of `memory` that it fills.

        Return None if the slot is damaged, or contains another sample or another check.
        """
        head_bytes = bytearray(_HEAD)
        got = os.preadv(self._fd, [head_bytes, memory.data], self._at(slot))
        head = _parsed(bytes(head_bytes))
        if head is None or (head.sample, head.check) != (sample, check) or head.nbytes > len(memory):
            return None
        if self._dtype != "8bit" and head.nbytes != largest_nbytes(self._dtype, self.n):
            return None  # the entry is too short, and would leave the end of m undefined
        entry = memory[: head.nbytes]
        while got < _HEAD + head.nbytes:
            more = os.preadv(self._fd, [entry[got - _HEAD :].data], self._at(slot) + got) if got >= _HEAD else 0
            if not more:
                return None
            got += more
        return entry if zlib.crc32(entry.data) == head.crc else None

    def heads(self) -> Iterator[tuple[int, SlotHead | None]]:
        """Yield slot numbers with the heads of the slots; None for a slot without an entry. Entries are not read.

        Holes of a sparse file, which have no data on the disk, are skipped. A hole at the end of the file is removed
        from `count`.
        """
        slot = 0
        while slot < self.count:
            head = os.pread(self._fd, _HEAD, self._at(slot))
            yield slot, _parsed(head)
            slot += 1
            if not head.strip(b"\0"):
                slot = self._next_with_data(slot)

    def _next_with_data(self, slot: int) -> int:
        """Return the first slot from `slot` on that has data on the disk; if there is none, set `count` to `slot`."""
        try:
            at = os.lseek(self._fd, self._at(slot), os.SEEK_DATA)
        except OSError as e:
            if e.errno != errno.ENXIO:
                raise
            self.count = slot
            return slot
        return max(slot, (at - _START) // self.slot_nbytes)

    def _at(self, slot: int) -> int:
        return _START + slot * self.slot_nbytes

    def _check(self, expected: bytes, writable: bool) -> None:
        found = os.pread(self._fd, len(expected), 0)
        if found == expected:
            return
        if found.strip(b"\0"):
            if not MAGIC.startswith(found[: len(MAGIC)]):  # accept a partial magic number, which a crash may leave
                raise StateError(f"{self.path} is not a file of activations: use another folder as store=")
            if len(found) == len(expected) and _crc_matches(found):
                raise StateError(
                    f"{self.path} was written for another edge, format version or dtype: use another folder as store="
                )
        if not writable:
            raise StateError(f"the head of {self.path} is damaged")
        os.ftruncate(self._fd, 0)  # the file is new, or its head is damaged
        os.pwrite(self._fd, expected.ljust(_START, b"\0"), 0)


def described(path: Path) -> tuple[str, int, int]:
    """Return dtype, edge and number of values per sample of a slot file.

    Raises
    ------
    StateError
        The file is not a slot file, or its head is damaged.
    OSError
        The file cannot be read.
    """
    fd = _open(path, os.O_RDONLY)
    try:
        head = os.pread(fd, _FILE_HEAD.size + _CRC.size, 0)
    finally:
        os.close(fd)
    if len(head) == _FILE_HEAD.size + _CRC.size and _crc_matches(head):
        magic, version, code, _, edge, n, _ = cast(
            tuple[bytes, int, int, int, int, int, int], _FILE_HEAD.unpack(head[: _FILE_HEAD.size])
        )
        if magic == MAGIC and version == VERSION and code < len(ENTRY_CODES) and 0 < n <= _MOST_VALUES:
            return ENTRY_CODES[code], edge, n
    raise StateError(f"{path} is not a file of activations, or its head is damaged")


def _open(path: Path, flags: int) -> int:
    """Open a regular file; raise StateError for a pipe or a device, which may block."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise StateError(f"{path} is not a regular file")


def _file_head(dtype: str, edge: int, n: int, slot_nbytes: int) -> bytes:
    head = _FILE_HEAD.pack(MAGIC, VERSION, ENTRY_CODES.index(dtype), 0, edge, n, slot_nbytes)
    return head + _CRC.pack(zlib.crc32(head))


def _crc_matches(data: bytes) -> bool:
    return zlib.crc32(data[: -_CRC.size]) == _CRC.unpack(data[-_CRC.size :])[0]


def _slot_nbytes(entry_nbytes: int) -> int:
    """Return the size of a slot in bytes. Large slots are whole pages, so that two slots do not share a page."""
    unit = _PAGE if entry_nbytes > 4 * _PAGE else _HEAD
    return (_HEAD + entry_nbytes + unit - 1) // unit * unit


def _parsed(head: bytes) -> SlotHead | None:
    if len(head) < _HEAD or not _crc_matches(head):
        return None
    found = SlotHead(*_SLOT_HEAD.unpack(head[: _SLOT_HEAD.size]))
    return found if found.check else None
