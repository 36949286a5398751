"""Weights in a folder that the receivers of one machine share: the values are stored once, and mapped by all of them.

The folder has the files of :mod:`codec.weight_sync.bases.folder`, except that no file of values is overwritten:

1. A file of values never changes once a state names it. So a receiver can read the version that it has mapped, whatever
   other receivers do. A deleted file exists until no receiver maps it.
2. Each receiver has a version of its own, which changes only when this receiver commits an update. The file ``state``
   names the newest committed version, with which the next receiver of the folder begins.
3. The first receiver that stages an update checks it, writes the values after the update to a new file, and names them
   in a file ``staged-N``. The others wait, and map the same values.
4. The first receiver that commits the update renames ``staged-N`` to ``state``. A receiver that commits an older
   version than that in ``state``, because it is slow, leaves ``state`` as it is.

The lock of the file ``lock`` is shared by all receivers, which excludes a receiver that overwrites values. The file
names their machine, since a network disk loses deleted files that another machine maps, and their key. The lock of
``preparing`` is held by a receiver that opens the folder, or that reads and checks an update. The lock of
``committing`` is held for a short time, in which files are named, found or deleted. The lock of a file of values is
held by each receiver that has staged them. All locks end with their process, and nothing that it did must be undone: a
file of values that is neither locked nor current is deleted by the next receiver that writes one.
"""

import mmap
import os
import platform
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from codec._options import CallOptions
from codec.errors import ArgumentError, StateError
from codec.files.signing import SigningKey
from codec.weight_sync.bases.base import Base
from codec.weight_sync.bases.checking import check_digest, scratch_for
from codec.weight_sync.bases.folder import FolderBase
from codec.weight_sync.bases.folder_state import FolderState, read_state, write_state
from codec.weight_sync.bases.lock import Lock
from codec.weight_sync.bases.stored_update import StoredUpdate
from codec.weight_sync.updates.identity import Identity, UpdateHead, other_run
from codec.weight_sync.updates.kinds import Bytes, TensorKind
from codec.weight_sync.updates.shards import Layout, Name
from codec.weight_sync.updates.update import Update
from codec.weight_sync.updates.weights import Given, Weights, memory_nbytes


class _Version(NamedTuple):
    """Version whose values are stored, and which this receiver may commit."""

    identity: Identity
    state: FolderState
    weights: Weights
    lock: Lock  # of the file of values


@dataclass
class _Turn:
    """Lock that receivers take in turn; the thread that has it may enter again."""

    path: Path
    thread: AbstractContextManager[bool] = field(default_factory=threading.RLock)
    # Lock that this receiver holds. Only the frame that waits for its end refers to it otherwise: if an interrupt
    # comes before the frame can release it, it is released with the frame.
    lock: Callable[[], Lock | None] = lambda: None


class SharedFolderBase(FolderBase):
    """Weights in the files of a folder that several receivers share, of which each has a version of its own.

    Parameters
    ----------
    path, max_nbytes, options : optional
        As in :class:`FolderBase`.
    key : SigningKey, optional
        Key of the trainer, which all receivers of the folder must have: each of them accepts what another has checked.

    Raises
    ------
    StateError
        The folder is in use by a receiver that does not share it, on another machine or with another key, or belongs to
        another user; it cannot be used, or its files are damaged.
    """

    _protection = mmap.PROT_READ

    def __init__(
        self,
        path: str | PathLike[str],
        max_nbytes: int | None = None,
        options: CallOptions | None = None,
        key: SigningKey | None = None,
    ) -> None:
        self._machine, self._fingerprint = _machine(), b"" if key is None else key.fingerprint
        self._target: _Version | None = None
        self._values_lock: Lock | None = None  # lock of the file of values that was created last
        self._preparing, self._committing = (_Turn(Path(path) / name) for name in ("preparing", "committing"))
        super().__init__(path, max_nbytes, options)

    def _locked(self) -> Lock:
        """Lock the folder; alone, if no other receiver has opened it."""
        path = self._path / "lock"
        if path.exists() and (owner := path.stat().st_uid) != os.geteuid():
            raise StateError(
                f"{self._path} belongs to user {owner}, but this process runs as user {os.geteuid()}: receivers that "
                "share a folder need the same user"
            )
        if (self._path / "pending").exists():  # a killed process has left an update in place: complete it
            FolderBase(self._path).close()
        try:
            self._alone = True
            return Lock(path)
        except StateError:
            self._alone = False
            return Lock(path, shared=True)

    def _open(self) -> None:
        """Read the current version. A receiver that is alone also checks its values, and deletes other files."""
        path = self._path / "lock"
        if self._alone:
            super()._open()
            if path.read_bytes() != self._machine + self._fingerprint:
                path.write_bytes(self._machine + self._fingerprint)
            self._lock.share()
            return
        found = path.read_bytes()
        if not found.startswith(self._machine):
            raise StateError(f"{self._path} is in use on another machine: pass a folder on a disk of this machine")
        if found != self._machine + self._fingerprint:
            raise StateError(
                f"{self._path} is in use by receivers with another key: pass the same verify= to all of them"
            )
        with self._turn(self._committing):
            if (self._path / "state").exists():
                state = read_state(self._path / "state")
                self._adopt(state, self._mapped(state))

    @contextmanager
    def _turn(self, turn: _Turn) -> Generator[None]:
        """Context that waits until no other receiver has the turn. A signal can interrupt the wait."""
        with turn.thread:
            if turn.lock() is not None:
                yield
                return
            with self._writing():
                lock = Lock(turn.path, wait=True)
            turn.lock = weakref.ref(lock)
            try:
                yield
            finally:
                turn.lock = lambda: None
                lock.release()

    @contextmanager
    def preparing(self) -> Generator[None]:
        """Context in which an update is read and checked, by one receiver of the folder at a time."""
        with self._turn(self._preparing):
            yield

    def settle(self) -> None:
        """Check that the folder is open in this process. A commit changes the weights at once, or not at all."""
        if not self._lock.closed:
            self._lock.check()

    def fill(self, given: Given, version: int, run: bytes | None = None) -> None:
        """Write tensors to a folder without weights, and set their run and version."""
        with self.preparing():
            super().fill(given, version, run)

    def complete(self, weights: Weights, run: bytes | None, version: int) -> None:
        """Commit the weights that :meth:`fill` has written."""
        with self._turn(self._committing):
            super().complete(weights, run, version)
            self._unlock_values()

    def kinds_after(self, update: Update | None) -> dict[Name, TensorKind]:
        """Return dtype and shape of all tensors or shards after `update`, or now if `update` is None."""
        return super().kinds_after(update) if (target := self._target_of(update)) is None else target.weights.kinds

    def tensors_after(self, update: Update | None) -> dict[str, TensorKind]:
        """Return dtype and shape of all whole tensors after `update`, or now if `update` is None."""
        return super().tensors_after(update) if (target := self._target_of(update)) is None else target.weights.tensors

    def layouts_after(self, update: Update | None) -> dict[str, Layout]:
        """Return the layout of each tensor after `update`, or now if `update` is None."""
        return super().layouts_after(update) if (target := self._target_of(update)) is None else target.weights.layouts

    def decode(self, update: Update | None, name: Name, k: int, out: Bytes) -> None:
        """Write the values of a piece after `update`, which were stored when it was checked, to `out`."""
        if update is None or (target := self._target_of(update)) is None:
            super().decode(update, name, k, out)
        else:
            out[:] = target.weights[name].piece(k)

    def check(self, update: Update) -> None:
        """Check that an update can be applied, and store the values after it, unless they are stored already.

        Raises
        ------
        StateError, FrameError, LimitError
            As in :meth:`Base.check`, or the values cannot be written.
        """
        self._lock.check()
        if self._target_of(update) is not None:
            self.check_nbytes(update)
        else:
            self.drop()
            self.check_size(update)
            with self.preparing():
                found = self._found([update.head.after])
                self._target = self._store(update) if found is None else found[1]

    def stored(self, heads: Sequence[UpdateHead]) -> tuple[int, Update] | None:
        """Return the last update of a chain whose values are stored, which this receiver can commit, and its index."""
        self._lock.check()
        self.drop()
        if (found := self._found([head.after for head in heads])) is None:
            return None
        k, self._target = found
        return k, StoredUpdate(heads[k], self.weights, self._target.weights)

    def drop(self) -> None:
        """Unlock the values of a checked update that is not applied."""
        target, self._target = self._target, None
        if target is not None:
            target.lock.release()

    def apply(self, update: Update) -> None:
        """Make the stored values of a checked update current for this receiver, and for the next one that opens."""
        self._lock.check()
        with self.lock:
            self.check(update)
            target = self._target
            assert target is not None
            with self._turn(self._committing):
                if self._follows_current(target.identity):
                    staged = self._path / target.state.file.replace("values", "staged")
                    with self._writing():
                        if not staged.exists():
                            write_state(staged, target.state)
                        staged.replace(self._path / "state")
                self._adopt(target.state, target.weights)
                self.drop()
                self._delete_other_values()

    def _follows_current(self, after: Identity) -> bool:
        """Return True if a version that this receiver commits is to replace the one in ``state``."""
        try:
            current = read_state(self._path / "state").identity
        except StateError:
            return True
        is_own = self.identity is not None and current.matches(self.identity)
        is_older = not other_run(current.run, after.run) and current.version < after.version
        return not current.matches(after) and (is_own or is_older)

    def _target_of(self, update: Update | None) -> _Version | None:
        """Return the stored version that `update` leads to; None if this receiver has not staged it."""
        target = self._target
        if target is None or update is None:
            return None
        return target if update.head.after.matches(target.identity) else None

    def _found(self, versions: Sequence[Identity]) -> tuple[int, _Version] | None:
        """Find the last one of `versions` that is stored; return its index, and the version with its file locked."""
        best: tuple[int, Identity, FolderState] | None = None
        with self._turn(self._committing):
            for path in (self._path / "state", *self._path.glob("staged-*")):
                with suppress(StateError):  # missing, or damaged: the version is written again
                    state = read_state(path)
                    identity = state.identity
                    matching = [k for k, version in enumerate(versions) if version.matches(identity)]
                    if matching and (best is None or matching[-1] > best[0]):
                        best = matching[-1], identity, state
            if best is not None:
                k, identity, state = best
                with suppress(StateError), self._writing():  # as above
                    weights = self._mapped(state)
                    return k, _Version(identity, state, weights, Lock(self._path / state.file, shared=True))
        return None

    def _store(self, update: Update) -> _Version:
        """Write the values after an update to a new file, decode each frame, and check the digests."""
        kinds, scratch, begin = super().kinds_after(update), scratch_for(update), 0
        tensors: list[tuple[Name, TensorKind, list[bytes]]] = []
        try:
            with self._new_values() as fd:
                for name, kind in kinds.items():
                    digests = list[bytes]()
                    for k, (at, _) in enumerate(kind.spans):
                        piece, digest = self.piece_after(update, name, k, scratch)
                        self._write(fd, piece, begin + at)
                        digests.append(digest)
                    tensors.append((name, kind, digests))
                    begin += memory_nbytes([kind])
                file = self._created
                assert file is not None
                state = FolderState(update.run or self.run, update.version, tensors, file.name)
                check_digest(update, state.identity.digest)
                with self._writing():
                    os.ftruncate(fd, max(1, begin))  # padding after the last tensor
                    weights = self._mapped(state)
                    write_state(self._path / file.name.replace("values", "staged"), state)
            lock, self._values_lock = self._values_lock, None
            assert lock is not None
            return _Version(state.identity, state, weights, lock)
        except BaseException:
            self._unlock_values()
            raise

    def _next_number(self) -> int:
        """Return a number that no file of values has, of those that receivers have staged."""
        numbers = (path.name.partition("-")[2] for path in self._path.glob("values-*"))
        return max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1

    def _create(self) -> int:
        """Create a file of values, and lock it before another receiver could delete it."""
        with self._turn(self._committing):
            fd = super()._create()
            try:
                assert self._created is not None
                with self._writing():
                    self._values_lock = Lock(self._created, shared=True)
            except BaseException:
                with suppress(OSError):
                    os.close(fd)
                raise
            return fd

    def _unlock_values(self) -> None:
        lock, self._values_lock = self._values_lock, None
        if lock is not None:
            lock.release()

    def _delete_other_values(self) -> None:
        """Delete the files of values that are neither current nor staged by a receiver, and their states."""
        with self._turn(self._committing), suppress(StateError):  # a damaged state may name any of the files
            state = self._path / "state"
            current = read_state(state).file if state.exists() else None
            for path in self._path.glob("values-*"):
                staged = self._path / path.name.replace("values", "staged")
                if path.name != current:
                    with suppress(StateError, OSError):  # a receiver has staged these values
                        lock = Lock(path)
                        staged.unlink(missing_ok=True)
                        path.unlink()
                        lock.release()
            for staged in self._path.glob("staged-*"):
                values = self._path / staged.name.replace("staged", "values")
                if values.name == current or not values.exists():
                    with suppress(OSError):
                        staged.unlink()

    def close(self) -> None:
        """Close the files, so that a receiver that does not share the folder may open it once all have closed it."""
        self.drop()
        self._unlock_values()
        super().close()


def _machine() -> bytes:
    """Return an identity that this machine has until it is started again, in all of its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return platform.node().encode() + b"\n"


def shared_base(folder: Any, max_nbytes: int | None, options: CallOptions | None, key: SigningKey | None) -> Base:
    """Return a SharedFolderBase; raise ArgumentError if `folder` is None."""
    if folder is None:
        raise ArgumentError("shared=True needs folder=, a folder on a disk of this machine")
    return SharedFolderBase(folder, max_nbytes, options, key)
