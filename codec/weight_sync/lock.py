"""Lock of a folder of weights, which only the process that has locked it may use."""

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path

from codec.errors import StateError


class Lock:
    """Lock of a folder, held until :meth:`release`, or until the process ends.

    A lock belongs to an open file, which forked processes share: a child could unlock the folder of its parent, and a
    child that outlives its parent would keep the folder locked. So children close their copy of the file.

    Parameters
    ----------
    path : path
        File to lock in the folder; it is created if it does not exist.

    Raises
    ------
    StateError
        Another object holds the lock, in this process or in another one.
    """

    def __init__(self, path: Path) -> None:
        self._folder, self._pid = path.parent, os.getpid()
        self.closed = False  # True after release() in the process that holds the lock
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(fd)
            if not isinstance(e, BlockingIOError):
                raise
            raise StateError(
                f"{self._folder} is in use by another sender or receiver: give each of them a folder of its own"
            ) from None
        self._release = weakref.finalize(self, _unlock, fd, self._pid)
        _locks.add(self)

    def check(self) -> None:
        """Raise StateError after :meth:`release`, or in a process forked from the one that has locked the folder."""
        if self.closed:
            raise StateError(f"the sender or receiver of {self._folder} is closed: make a new one")
        if os.getpid() != self._pid:
            raise StateError(
                f"{self._folder} was opened by process {self._pid}, from which this process was forked: use its sender "
                "or receiver only there"
            )

    def release(self) -> None:
        """Unlock the folder. A second call, or a call in a forked process, changes nothing."""
        self.closed |= os.getpid() == self._pid
        self._release()


def _unlock(fd: int, pid: int) -> None:
    with suppress(OSError):
        if os.getpid() == pid:
            fcntl.flock(fd, fcntl.LOCK_UN)  # also for children, which may not have closed their copy yet
        os.close(fd)


_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _locks:
        lock.release()  # closes the child's copy


os.register_at_fork(after_in_child=_after_fork)
