"""Copies of a store's files in temporary files, which no other process can change."""

import mmap
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager

from codec.errors import ArgumentError, FrameError, Status

_CHUNK = 1 << 20


def copied(read: Callable[[memoryview], int], name: str, most: int, length: int | None = None) -> mmap.mmap | bytes:
    """Copy a file to a temporary file, and map the temporary file to memory.

    Parameters
    ----------
    read : callable
        Function that fills the beginning of a buffer, and returns the number of bytes; 0 at the end.
    name : str
        Name of the file, for errors.
    most : int
        Maximum size in bytes.
    length : int, optional
        Size that was announced.

    Raises
    ------
    ArgumentError
        The temporary file cannot be written.
    FrameError
        The file is larger than `most`, or shorter than `length`.
    """
    size, buffer = 0, memoryview(bytearray(_CHUNK))
    with disk():
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed below; only its errors belong to disk()
    with file:
        while n := read(buffer):
            size += n
            if size > most:
                raise FrameError(f"{name} has more than {most} bytes")
            with disk():
                file.write(buffer[:n])
        if length is not None and size < length:
            raise truncated(name, size, length)
        with disk():
            file.flush()
            return mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b""


def truncated(name: str, size: int, length: int) -> FrameError:
    """Return the error of a connection that ended after `size` of `length` bytes of a file."""
    message = f"{name} has {length} bytes, but the connection ended after {size}"
    return FrameError(message, Status.TRUNCATED, size, size, length)


def not_listed(where: str) -> FrameError:
    """Return the error of a file that is not the update which the list of its store names."""
    return FrameError(
        f"{where} is not the update that the list of the store names, but of another run, or an old copy: copy the "
        "store again, and do not let a cache keep its files"
    )


@contextmanager
def disk() -> Generator[None]:
    """Context that converts errors of the temporary file to ArgumentError with its folder."""
    try:
        yield
    except OSError as e:
        where = tempfile.gettempdir()
        raise ArgumentError(f"a download cannot be written to the folder {where!r}: {e.strerror}") from None
