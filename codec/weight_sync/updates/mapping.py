"""Open regular files, and map them to memory."""

import mmap
import os
import stat
from errno import EINVAL
from os import PathLike

from codec.errors import ArgumentError


def mapped(path: str | PathLike[str]) -> mmap.mmap | bytes:
    """Return the contents of a regular file, mapped to memory.

    Raises
    ------
    ArgumentError
        The file cannot be read, or is not a regular file.
    """
    try:
        fd, nbytes = regular(path)
        try:
            return mmap.mmap(fd, nbytes, prot=mmap.PROT_READ) if nbytes else b""
        finally:
            os.close(fd)
    except (OSError, ValueError) as e:
        raise ArgumentError(f"{os.fspath(path)!r} cannot be read: {getattr(e, 'strerror', None) or e}") from None


def regular(path: str | PathLike[str], flags: int = 0) -> tuple[int, int]:
    """Open a regular file for reading, without waiting for a pipe or device; return its descriptor and its size."""
    fd = os.open(path, flags | os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        return fd, status.st_size
    os.close(fd)
    raise OSError(EINVAL, "it is not a regular file")
