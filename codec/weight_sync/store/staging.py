"""Temporary folder for the files of updates that are uploaded to a bucket."""

import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

from codec.errors import ArgumentError

_PREFIX = "codec-updates-"
_NEW = 60.0  # seconds in which a folder may not be locked yet


class StagingFolder:
    """Temporary folder, which is deleted with the object, or by a later object if the process was killed.

    Attributes
    ----------
    folder : Path
        The folder.

    Raises
    ------
    ArgumentError
        The folder cannot be created.
    """

    def __init__(self) -> None:
        root = tempfile.gettempdir()
        try:
            _delete_abandoned(Path(root))
            self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
            fd = _locked(self.folder)
        except OSError as e:
            raise ArgumentError(f"no folder for updates can be created in {root!r}: {e.strerror}") from None
        self._delete = weakref.finalize(self, _delete, self.folder, fd, os.getpid())


def _locked(folder: Path) -> int:
    """Open and lock a folder; the lock ends with the process, and with those forked from it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _delete(folder: Path, fd: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked process must leave the folder to its parent
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        os.close(fd)


def _delete_abandoned(root: Path) -> None:
    """Delete folders of this user that killed processes have left."""
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and found.st_mtime < time.time() - _NEW:
                fd = _locked(folder)
                try:
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(fd)
