"""Locks of a folder of weights, and of files in it."""

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path

from codec.errors import StateError


class Lock:
    """Lock of a file, held until :meth:`release`, or until the process ends.

    A lock belongs to an open file, which forked processes share: a child could unlock the folder of its parent, and a
    child that outlives its parent would keep the folder locked. So children close their copy of the file.

    Parameters
    ----------
    path : path
        File to lock in the folder; it is created if it does not exist.
    shared : bool
        True: other objects may hold the lock at the same time, if they share it, too.
    wait : bool
        True: wait until no other object holds the lock. A signal can interrupt the wait.

    Raises
    ------
    StateError
        Another object holds the lock, in this process or in another one.
    """

    def __init__(self, path: Path, *, shared: bool = False, wait: bool = False) -> None:
        self._folder, self._pid = path.parent, os.getpid()
        self.closed = False  # True after release() in the process that holds the lock
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._fd = fd
        try:
            self._acquire((fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BaseException:
            os.close(fd)
            raise
        self._release = weakref.finalize(self, _unlock, fd, self._pid)
        _locks.add(self)

    def _acquire(self, operation: int) -> None:
        try:
            fcntl.flock(self._fd, operation)
        except BlockingIOError:
            raise StateError(
                f"{self._folder} is in use by another sender or receiver: give each of them a folder of its own, or "
                "pass shared=True to all receivers of the folder"
            ) from None

    def share(self) -> None:
        """Allow other objects to share the lock.

        Raises
        ------
        StateError
            Another object has locked the file before it could be shared.
        """
        self._acquire(fcntl.LOCK_SH | fcntl.LOCK_NB)

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
