"""Files that a server offers: those in the folder of a store, or those that a mirror has downloaded."""

import os
import threading
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Protocol

from codec.weight_sync.closing import Closing
from codec.weight_sync.http.arriving import Arriving
from codec.weight_sync.http.hints import SECONDS
from codec.weight_sync.updates.listing import Listed
from codec.weight_sync.updates.mapping import regular

_WAIT_SECONDS = 0.5  # time between looks at whether the server was closed


class OfferedFile(Closing):
    """Open file that a server sends.

    Parameters
    ----------
    fd : int
        Descriptor of the file, which this object closes.
    nbytes : int
        Size of the whole file in bytes.
    arriving : Arriving, optional
        Download that appends to the file.
    """

    def __init__(self, fd: int, nbytes: int, arriving: Arriving | None = None) -> None:
        self.file = os.fdopen(fd, "rb", 0)
        self.nbytes, self._arriving = nbytes, arriving

    @property
    def identity(self) -> Hashable:
        """Identity of the file, which differs from that of a later file with the same name."""
        status = os.fstat(self.file.fileno())
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size

    def available(self, than: int) -> int | None:
        """Return the number of bytes that can be sent, more than `than`; None if there will not be more.

        After half a second without more bytes, the result is `than`.
        """
        if self._arriving is None:
            return self.nbytes
        size = self._arriving.await_more(than, _WAIT_SECONDS)
        return None if size == than and self._arriving.closed else size

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class OfferedFiles(Protocol):
    """Files that a server offers."""

    def open(self, name: str) -> OfferedFile:
        """Open a file; raise OSError if it is not offered."""
        ...

    def expire(self) -> None:
        """Delete files that are offered no longer. The server calls this every 50 ms."""
        ...


class ServedFolder:
    """Files in the folder of a store."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, name: str) -> OfferedFile:
        """Open a file; raise OSError if the folder does not have it."""
        # no links: who may write to the folder must not make this process serve other files
        return OfferedFile(*regular(self._root / name, os.O_NOFOLLOW))

    def expire(self) -> None:
        """Do nothing: the writer of the store deletes files."""


class MirroredFiles:
    """Files that a mirror has begun to download in the last two minutes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, Arriving] = {}

    def begin(self, one: Listed) -> Arriving:
        """Begin a download, which replaces an older one of the same name."""
        file = Arriving(one.file, one.nbytes)
        with self._lock:
            old, self._files[one.file] = self._files.get(one.file), file
        if old is not None:
            old.close()
        return file

    def found(self, one: Listed) -> Arriving | None:
        """Return the complete file of an update, if it was downloaded already."""
        with self._lock:
            file = self._files.get(one.file)
        return file if file is not None and file.complete and file.sha256() == one.sha256 else None

    def open(self, name: str) -> OfferedFile:
        """Open a file, which may still arrive; raise OSError if the mirror does not have it."""
        with self._lock:
            file = self._files.get(name)
        fd = None if file is None else file.opened()
        if file is None or fd is None:
            raise FileNotFoundError(name)
        return OfferedFile(fd, file.nbytes, file)

    def expire(self) -> None:
        """Delete files after the time in which the server names this mirror for them. Those that arrive stay."""
        self._close(time.monotonic() - SECONDS)

    def close(self) -> None:
        """Delete all complete files. The download of others deletes them itself."""
        self._close(time.monotonic())

    def _close(self, until: float) -> None:
        with self._lock:
            old = [name for name, file in self._files.items() if file.begun <= until and (file.complete or file.closed)]
            files = [self._files.pop(name) for name in old]
        for file in files:
            file.close()
