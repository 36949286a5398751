"""Opening of regular files, and detection of their format by the first bytes."""

import os
import stat
import sys
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum
from io import BufferedReader
from typing import Any, cast
from zipfile import BadZipFile, ZipFile

import numpy as np

from codec.errors import ArgumentError, CodecError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

NUMPY = b"\x93NUMPY"  # first bytes of a .npy file
_CANNOT_READ = (
    OSError, ValueError, TypeError, LookupError, EOFError, BadZipFile, zlib.error, MemoryError, RuntimeError
)  # fmt: skip


class FileKind(Enum):
    """Format of a file; the value is its name in messages."""

    SAFETENSORS = "a .safetensors file"
    NPZ = "a .npz file"
    NPY = "a .npy file"
    TORCH = "a file of torch.save"
    PICKLE = "a pickle"
    FRAME = "a frame"
    PACK = "a pack"
    UPDATE = "an update of weights"
    GGUF = "a GGUF file"
    ZIP = "a zip file"
    ZSTD = "a zstd file"
    GZIP = "a gzip file"
    HDF5 = "an HDF5 file"
    EMPTY = "empty"
    UNKNOWN = "of an unknown format"


HEAD = 9  # number of bytes at the beginning of a file that tell its format
_MAGIC = (
    (NUMPY, FileKind.NPY), (b"CODC", FileKind.FRAME), (b"CODP", FileKind.PACK),
    (b"\x89CWU\r\n\x1a\n", FileKind.UPDATE),
    (b"GGUF", FileKind.GGUF), (b"\x28\xb5\x2f\xfd", FileKind.ZSTD), (b"\x1f\x8b", FileKind.GZIP),
    (b"\x89HDF", FileKind.HDF5), (b"\x80", FileKind.PICKLE),
)  # fmt: skip


def printable(path: str) -> str:
    """Return a path for a message: unchanged, or its repr if it has unprintable characters."""
    return path if path.isprintable() and path else repr(path)


def standard_input() -> BufferedReader:
    """Return standard input as a binary file; raise ArgumentError if it is closed."""
    if sys.stdin is None:
        raise ArgumentError("standard input is closed: name a file to read")
    return cast(BufferedReader, sys.stdin.buffer)


@contextmanager
def readable(path: str) -> Generator[None]:
    """Context that converts errors of reading a file to ArgumentError with the file's name."""
    try:
        yield
    except CodecError:
        raise
    except _CANNOT_READ as e:
        why = getattr(e, "strerror", None) or str(e) or type(e).__name__
        raise ArgumentError(f"{printable(path)} cannot be read: {why}") from None


def open_regular(path: str) -> int:
    """Open a regular file for reading, and return its descriptor.

    Raises
    ------
    ArgumentError
        The file cannot be opened or is not regular.
    """
    with readable(path):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ArgumentError(f"{printable(path)} cannot be read: it is not a regular file")
        return fd


@contextmanager
def opened(path: str) -> Generator[int]:
    """Open a regular file, and yield its descriptor.

    Raises
    ------
    ArgumentError
        The file cannot be opened or is not regular, or reading it in the ``with`` block fails.
    """
    fd = open_regular(path)
    try:
        with readable(path):
            yield fd
    finally:
        os.close(fd)


def kind_of(fd: int) -> FileKind:
    """Return the format of an open file."""
    kind = kind_of_head(os.pread(fd, HEAD, 0))
    return _kind_of_zip(fd) if kind is FileKind.ZIP else kind


def kind_of_head(head: bytes) -> FileKind:
    """Return the format of a file that begins with `head`: its first HEAD bytes, or all of a shorter file."""
    if head.startswith(b"PK"):
        return FileKind.ZIP
    if head[8:] == b"{":
        return FileKind.SAFETENSORS
    found = next((kind for magic, kind in _MAGIC if head.startswith(magic)), FileKind.UNKNOWN)
    return found if head else FileKind.EMPTY


def _kind_of_zip(fd: int) -> FileKind:
    """Return the format of a zip file, determined from the names of its members."""
    with os.fdopen(fd, "rb", closefd=False) as f, ZipFile(f) as archive:
        names = archive.namelist()
    if any(name.endswith("data.pkl") for name in names):
        return FileKind.TORCH
    return FileKind.NPZ if any(name.endswith(".npy") for name in names) or not names else FileKind.ZIP


class FileBytes:
    """Contents of an open file; any number of threads may read it."""

    def __init__(self, fd: int) -> None:
        self._fd, self.nbytes = fd, os.fstat(fd).st_size

    def read_into(self, out: Bytes, at: int) -> None:
        """Fill `out` with the file's bytes from offset `at` on; raise ArgumentError on failure."""
        done = 0
        while done < len(out):
            try:
                got = os.preadv(self._fd, [memoryview(cast(Any, out[done:]))], at + done)
            except OSError as e:
                raise ArgumentError(f"a file of tensors cannot be read: {e.strerror}") from None
            if not got:
                raise ArgumentError("a file of tensors has become shorter while it was read")
            done += got

    def get(self, at: int, nbytes: int) -> Bytes:
        """Return `nbytes` bytes of the file from offset `at` on, in new memory."""
        out = np.empty(nbytes, np.uint8)
        self.read_into(out, at)
        return out

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class MemoryBytes:
    """Contents of a file in memory, with the interface of :class:`FileBytes`."""

    def __init__(self, data: Any) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self.nbytes = len(self._data)

    def read_into(self, out: Bytes, at: int) -> None:
        """Fill `out` with bytes of the file from offset `at` on."""
        out[:] = self._data[at : at + len(out)]

    def get(self, at: int, nbytes: int) -> Bytes:
        """Return `nbytes` bytes of the file from offset `at` on, without a copy."""
        return self._data[at : at + nbytes]

    def close(self) -> None:
        """Do nothing: there is no file to close."""
