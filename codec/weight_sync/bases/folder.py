"""Weights in a memory-mapped file in a folder, which survive the process. The system can evict their memory pages.

The folder has a file ``state`` with run, version, names, dtypes, shapes, digests and the name of the file of values.
Renaming a new ``state`` commits a version. A snapshot is written to a new file of values first. An update overwrites
the file of values, so all that it needs is on the disk before the first value changes: the new ``state`` as ``next``,
the update as ``pending``, and room for one piece as ``piece``, to which each new piece, or its changed values, are
written before they overwrite the old ones. If a process is killed during an update, the next process that opens the
folder completes the update.
"""

import mmap
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from codec._options import CallOptions
from codec.arguments import whole
from codec.delta import DeltaChanges
from codec.errors import ArgumentError, FrameError, StateError
from codec.files.replacing import replaced
from codec.stores.locations import folder_at
from codec.weight_sync.bases.base import Base
from codec.weight_sync.bases.checking import packed, with_packed
from codec.weight_sync.bases.folder_state import FolderState, read_state, state_of, write_state
from codec.weight_sync.bases.lock import Lock
from codec.weight_sync.updates.coding import digest_of, digests_in
from codec.weight_sync.updates.identity import MAX_VERSION
from codec.weight_sync.updates.kinds import Bytes, TensorKind
from codec.weight_sync.updates.shards import Name, Selection, check_name
from codec.weight_sync.updates.update import Update
from codec.weight_sync.updates.weights import (
    Given,
    Rest,
    Weights,
    allocated,
    items,
    kind_of,
    memory_nbytes,
    pieces_of,
    view_of,
)
from codec.weight_sync.updates.writing import remove_temporary

_FILES = ("state", "next", "pending")  # files that are written under a temporary name first


class FolderBase(Base):
    """Weights in the files of a folder, which one process at a time may open.

    Parameters
    ----------
    path : str or path
        Folder, which is created if it does not exist.
    max_nbytes, options, only : optional
        As in :class:`Base`.

    Raises
    ------
    StateError
        The folder is in use or cannot be used, or its files are damaged.
    """

    _protection = mmap.PROT_READ | mmap.PROT_WRITE  # of the mapped values

    def __init__(
        self,
        path: str | PathLike[str],
        max_nbytes: int | None = None,
        options: CallOptions | None = None,
        only: Selection | None = None,
    ) -> None:
        super().__init__(max_nbytes, options, only)
        self._path = folder_at("folder", path)
        self._current: Path | None = None  # file of the weights
        self._created: Path | None = None  # file of values that was created last
        self._new: FolderState | None = None  # state that complete() makes current
        with self._writing():
            self._path.mkdir(parents=True, exist_ok=True)
            with self.preparing():
                self._lock = self._locked()
                try:
                    self._open()
                except BaseException:
                    self.close()
                    raise

    def _locked(self) -> Lock:
        """Lock the folder until :meth:`close`."""
        return Lock(self._path / "lock")

    @contextmanager
    def _writing(self) -> Generator[None]:
        """Context that converts errors of files to StateError with the name of the folder."""
        try:
            yield
        except (OSError, ArgumentError, ValueError) as e:  # ValueError: a null character in the path
            why = getattr(e, "strerror", None) or e
            raise StateError(f"{self._path} cannot be used: {why}") from None

    def _open(self) -> None:
        remove_temporary(self._path, lambda name: name in _FILES or name.startswith("staged-"))
        state = self._path / "state"
        if state.exists():
            found = read_state(state)
            if found.only != (None if self.only is None else self.only.fingerprint):
                raise StateError(f"{self._path} holds the tensors of another only=: start from an empty folder")
            self._adopt(found, self._mapped(found))
        self._delete_other_values()
        if (update := self._pending()) is not None:
            self._applying = update
            self.settle()
        self._forget()
        if damaged := self.weights.damaged():
            names = ", ".join(map(repr, damaged[:5]))
            raise StateError(f"{len(damaged)} tensors in {self._path} are damaged: {names}. Start from an empty folder")

    def _pending(self) -> Update | None:
        """Return the update that a killed process has left in place; None if there is none."""
        path = self._path / "pending"
        try:
            update = Update.open(path) if path.exists() else None
        except FrameError:  # damaged: whether values were overwritten by then, their digests say
            return None
        if update is None or self.has(update):
            return None
        if update.base != self.version or update.base_digest != self.weights.digest():
            raise StateError(f"{path} needs other weights than those in {self._path}: start from an empty folder")
        return update

    def settle(self) -> None:
        """Complete an interrupted update, or an interrupted commit of a snapshot.

        Raises
        ------
        StateError
            The files cannot be written, or this process was forked from the one that opened the folder.
        """
        if self._lock.closed:
            return
        self._lock.check()
        with self.lock:
            if self._new is not None and self._applying is None:
                with self._writing():
                    state = self._path / "state"
                    if state.exists() and read_state(state) == self._new:
                        self._adopt(self._new, self._mapped(self._new))
                    self._new = None
                    self._delete_other_values()
            super().settle()

    def fill(self, given: Given, version: int, run: bytes | None = None) -> None:
        """Write tensors one by one to a new file of values, and set their run and version.

        Raises
        ------
        StateError
            The folder holds weights, or cannot be written.
        """
        version = whole("version", version, 0, MAX_VERSION)
        if (state := self._path / "state").exists():
            raise StateError(
                f"{self._path} already holds version {read_state(state).version}: leave out weights, or pass an empty "
                "folder"
            )
        kinds: dict[Name, TensorKind] = {}
        digests: dict[Name, list[bytes]] = {}
        begin = 0
        with self._new_values() as fd:
            for name, x in items(given):
                if check_name(name) in kinds:
                    raise ArgumentError(f"tensor {name!r} was given twice")
                v = view_of(name, x)
                kinds[name], digests[name], at = kind_of(name, v), [], begin
                for piece in pieces_of(v):
                    self._write(fd, piece, at)
                    digests[name].append(digest_of(piece))
                    at += len(piece)
                    del piece
                begin += memory_nbytes([kinds[name]])
                del x, v  # free this tensor before a generator gathers the next one
            size = os.fstat(fd).st_size
            self._write(fd, np.zeros(max(1, begin) - size, np.uint8), size)  # padding after the last tensor
            weights = allocated(kinds, self._map(fd, begin))
        for name, slot in weights.items():
            slot.digests = digests[name]
        self.complete(weights, run, version)

    def in_place(self, update: Update) -> bool:
        """Return True for an update with a base, which overwrites the weights; a snapshot is written to a new file."""
        return update.base is not None

    def apply(self, update: Update) -> None:
        """Apply a checked update. If the process is killed, the next process that opens the folder completes it."""
        self._lock.check()
        with self.lock:
            self.settle()
            super().apply(update)

    def tensors(self, names: Iterable[str], update: Update | None, like: Any) -> Iterator[tuple[str, Any]]:
        """Yield names and new tensors, as :meth:`Base.tensors`, while the folder is open."""
        self._lock.check()
        return super().tensors(names, update, like)

    def prepare(self, update: Update) -> None:
        """Write the new state, the update, and a file that has room for its largest piece."""
        assert self._current is not None
        new, largest = state_of(self.weights, update.run or self.run, update.version, self._current.name, self.only), 0
        for name, kind, digests in new.tensors:
            for k, (begin, end) in enumerate(kind.spans):
                if (frame := update.frame(name, k)) is not None:
                    digests[k], largest = digests_in(frame)[1], max(largest, end - begin)
        if self.only is not None:
            new = new._replace(rest=Rest.of(update, {key: (kind, found) for key, kind, found in new.tensors}))
        try:
            with self._writing():
                (self._path / "pending").unlink(missing_ok=True)  # of an update that was completed
                write_state(self._path / "next", new)
                if largest:
                    with _opened(self._path / "piece", os.O_WRONLY | os.O_CREAT) as fd:
                        os.posix_fallocate(fd, 0, largest)
                with replaced(self._path / "pending") as f:
                    for chunk in update.chunks():
                        f.write(chunk)
        except BaseException:
            self._forget()
            raise

    def write(self, out: Bytes, decode: Callable[[Bytes], None], changes: DeltaChanges | None) -> None:
        """Save the new value of a piece, or its changes, to the file ``piece``, and then overwrite the old value."""
        saved = None if changes is None else packed(changes)
        if changes is None or saved is None or len(saved) > len(out):
            changes, saved = None, np.empty(len(out), np.uint8)
            decode(saved)
        with self._writing(), _opened(self._path / "piece", os.O_WRONLY | os.O_CREAT) as fd:
            self._write(fd, saved, 0)
        if changes is None:
            out[:] = saved
        else:
            decode(out)

    def restore(self, out: Bytes, is_right: Callable[[Bytes], bool]) -> bool:
        """Complete `out` from the file ``piece``; return False if the file is missing or is for another piece."""
        with suppress(OSError), _opened(self._path / "piece", os.O_RDONLY) as fd:
            saved = np.frombuffer(os.pread(fd, len(out), 0), np.uint8)
            for new in (saved, with_packed(out, saved)):
                if len(new) == len(out) and is_right(new):
                    out[:] = new
                    return True
        return False

    def complete(self, weights: Weights, run: bytes | None, version: int) -> None:
        """Commit the new file ``state``, and delete the files of the previous version and of the update."""
        file = self._created if weights is not self.weights else self._current
        assert file is not None
        new = state_of(weights, run or self.run, version, file.name, self.only)
        path = self._path / "next"
        with self._writing():
            if not path.exists() or read_state(path) != new:
                write_state(path, new)
            self._new = new  # if this call is interrupted, settle() reads in `state` whether the new state is current
            try:
                path.replace(self._path / "state")
            except OSError:
                self._new = None  # the old state is current
                raise
        self._adopt(new, weights)
        self._new = None
        self._delete_other_values()
        self._forget()

    def _adopt(self, state: FolderState, weights: Weights) -> None:
        """Make weights current whose state is on the disk."""
        super().complete(weights, state.run, state.version)
        self._current = self._path / state.file

    def _forget(self) -> None:
        """Delete the files of an update. Those that cannot be deleted now are deleted later."""
        for name in ("pending", "piece", "next"):
            with suppress(OSError):
                (self._path / name).unlink(missing_ok=True)

    def _delete_other_values(self) -> None:
        """Delete all files of values except the current one, such as those that a killed process has left."""
        for path in (*self._path.glob("values-*"), *self._path.glob("staged-*")):
            if path != self._current:
                with suppress(OSError):
                    path.unlink()

    def allocate(self, kinds: Mapping[Name, TensorKind]) -> Weights:
        """Create a file for weights of these kinds, and map it to memory."""
        nbytes = memory_nbytes(kinds.values())
        with self._new_values() as fd:
            with self._writing():
                # Reserve the blocks: on a full disk, a store to the mapping would kill the process with SIGBUS.
                os.posix_fallocate(fd, 0, max(1, nbytes))
            return allocated(kinds, self._map(fd, nbytes))

    def _next_number(self) -> int:
        return 0 if self._current is None else int(self._current.name.split("-")[1]) + 1

    def _create(self) -> int:
        """Create the next file of values, ``self._created``, and return its descriptor."""
        self._delete_other_values()
        self._created = self._path / f"values-{self._next_number()}"
        with self._writing():
            return os.open(self._created, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    @contextmanager
    def _new_values(self) -> Generator[int]:
        """Context that creates the next file of values, and returns its descriptor. An error deletes the file."""
        fd = self._create()
        file = self._created
        assert file is not None
        try:
            try:
                yield fd
            finally:
                with self._writing():
                    os.close(fd)
        except BaseException:
            with suppress(OSError):
                file.unlink()
            raise

    def _mapped(self, state: FolderState) -> Weights:
        """Map the values of a state to memory."""
        file, nbytes = self._path / state.file, memory_nbytes(state.kinds.values())
        with _opened(file, os.O_RDWR) as fd:
            if os.fstat(fd).st_size < nbytes:
                raise StateError(f"{file} is too short: start from an empty folder")
            weights = allocated(state.kinds, self._map(fd, nbytes))
        for name, _, digests in state.tensors:
            weights[name].digests = list(digests)
        weights.rest = state.rest
        return weights

    def _map(self, fd: int, nbytes: int) -> Bytes:
        with self._writing():
            return np.frombuffer(mmap.mmap(fd, max(1, nbytes), prot=self._protection), np.uint8)

    def _write(self, fd: int, data: Bytes, at: int) -> None:
        rest = memoryview(data)  # pyright: ignore[reportArgumentType] - numpy's stubs
        try:
            while rest:
                at += (n := os.pwrite(fd, rest, at))
                rest = rest[n:]
        except OSError as e:
            raise StateError(f"{len(rest)} bytes of weights cannot be written to {self._path}: {e.strerror}") from None

    def close(self) -> None:
        """Close the files and unlock the folder, so that another object may open it."""
        self.weights, self.run, self.version = Weights(), None, None
        self._lock.release()


class _opened:
    """Context manager that opens a file of the folder and returns its file descriptor."""

    def __init__(self, path: Path, flags: int) -> None:
        self._fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


def base_in(folder: Any, max_nbytes: int | None, options: CallOptions | None, only: Selection | None = None) -> Base:
    """Return a FolderBase for `folder`, or a Base in memory if `folder` is None."""
    return Base(max_nbytes, options, only) if folder is None else FolderBase(folder, max_nbytes, options, only)
