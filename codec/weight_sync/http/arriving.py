"""File of a download that others may read while it arrives, in a temporary file, which no other process can change."""

import hashlib
import mmap
import os
import tempfile
import threading
import time

from codec.errors import FrameError
from codec.weight_sync.closing import Closing
from codec.weight_sync.http.temporary import disk


class Arriving(Closing):
    """Temporary file to which one thread appends the bytes of a download, and which other threads read.

    Parameters
    ----------
    name : str
        Name of the file, for errors.
    nbytes : int
        Size of the whole file in bytes, which the list of the store names.

    Attributes
    ----------
    size : int
        Number of bytes that have arrived.
    begun : float
        Time of :func:`time.monotonic` at which the download began.

    Raises
    ------
    ArgumentError
        The temporary file cannot be created.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        self.name, self.nbytes, self.size, self.begun = name, nbytes, 0, time.monotonic()
        with disk():
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - close() closes it
        self._digest = hashlib.sha256()
        self._changed = threading.Condition()

    @property
    def complete(self) -> bool:
        """True if all bytes have arrived."""
        return self.size == self.nbytes

    def append(self, block: memoryview) -> None:
        """Append bytes.

        Raises
        ------
        ArgumentError
            The temporary file cannot be written.
        FrameError
            The file would have more than `nbytes` bytes.
        """
        if len(block) > self.nbytes - self.size:
            raise FrameError(f"{self.name} has more than {self.nbytes} bytes")
        at, rest = self.size, block
        while rest:
            with disk():
                n = os.pwrite(self._file.fileno(), rest, at)
            at, rest = at + n, rest[n:]
        self._digest.update(block)
        with self._changed:
            self.size = at
            self._changed.notify_all()

    def sha256(self) -> bytes:
        """Return the SHA-256 of the bytes that have arrived."""
        return self._digest.digest()

    def opened(self) -> int | None:
        """Return a new descriptor of the temporary file, to read from; None if the file was closed."""
        with self._changed:
            return None if self._file.closed else os.dup(self._file.fileno())

    def await_more(self, than: int, seconds: float) -> int:
        """Wait until more than `than` bytes have arrived, the file is closed, or the time is over; return `size`."""
        with self._changed:
            self._changed.wait_for(lambda: self.size > than or self._file.closed, seconds)
            return self.size

    @property
    def closed(self) -> bool:
        """True if no more bytes will arrive."""
        return self._file.closed

    def mapped(self) -> mmap.mmap | bytes:
        """Return the whole file, mapped to memory; the mapping outlives this object."""
        with disk():
            return mmap.mmap(self._file.fileno(), self.nbytes, prot=mmap.PROT_READ) if self.nbytes else b""

    def close(self) -> None:
        """Delete the file. Those who wait for more bytes wait no longer; those who have opened it may read the rest."""
        with self._changed:
            self._file.close()
            self._changed.notify_all()
