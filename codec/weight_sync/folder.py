"""Weights in a memory-mapped file in a folder, which survive the process. The system can evict their memory pages.

The folder has a file ``state`` with version, names, dtypes, shapes, digests and the name of the file of values.
A snapshot is written to a new file of values; renaming the new ``state`` makes it current. Updates are crash-safe: an
update is first written to the file ``pending``, and each new piece to the file ``piece`` before it overwrites the old
one. If a process is killed during an update, the next process that opens the folder completes the update.
"""

import fcntl
import hashlib
import json
import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np

from codec._c.library import DTYPES
from codec._options import CallOptions
from codec.arguments import whole
from codec.errors import ArgumentError, CodecError, StateError
from codec.files.replacing import replaced
from codec.weight_sync.base import Base
from codec.weight_sync.coding import digest_of
from codec.weight_sync.update import MAX_RANK, MAX_VERSION, Bytes, Kind, Update, check_name
from codec.weight_sync.weights import (
    Given,
    Weights,
    allocated,
    as_view,
    items,
    kind_of,
    memory_nbytes,
    pieces_of,
)
from codec.weight_sync.writing import remove_temporary

_FORMAT = 1


class FolderBase(Base):
    """Weights in the files of a folder, which one process at a time may open.

    Parameters
    ----------
    path : str or path
        Folder, which is created if it does not exist.
    max_nbytes, options : optional
        As in :class:`Base`.

    Raises
    ------
    StateError
        The folder is in use or cannot be used, or its files are damaged.
    """

    def __init__(
        self, path: str | PathLike[str], max_nbytes: int | None = None, options: CallOptions | None = None
    ) -> None:
        super().__init__(max_nbytes, options)
        self._path = Path(path)
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self._path)
        except OSError as e:
            raise StateError(f"{self._path} cannot be used: {e.strerror}") from None
        self._current: Path | None = None  # file of the weights
        self._next: Path | None = None  # file for the next weights, which is not current yet
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        remove_temporary(self._path)
        state = self._path / "state"
        if state.exists():
            self.version, kinds, digests, name = _read_state(state)
            self._current = self._path / name
            self.weights = allocated(kinds, self._map(self._current, memory_nbytes(kinds.values())))
            for slot, found in zip(self.weights.values(), digests, strict=True):
                slot.digests = found
        self._delete_other_values()
        pending = self._path / "pending"
        if pending.exists():
            update = Update.open(pending)
            if update.version != self.version:
                if update.base != self.version or update.base_digest != self.weights.digest():
                    raise StateError(
                        f"the update in {pending} needs other weights than those in {self._path}: use another folder"
                    )
                self._applying = update
                self.settle()
            self._forget()
        if damaged := self.weights.damaged():
            names = ", ".join(map(repr, damaged[:5]))
            raise StateError(f"{len(damaged)} tensors in {self._path} are damaged: {names}. Start from an empty folder")

    def fill(self, given: Given, version: int) -> None:
        """Write tensors one by one to a new file of values, and set the version."""
        version = whole("version", version, 0, MAX_VERSION)
        self._next = self._new_file()
        kinds: dict[str, Kind] = {}
        digests: dict[str, list[bytes]] = {}
        begin = 0
        with _opened(self._next, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as fd:
            for name, x in items(given):
                if check_name(name) in kinds:
                    raise ArgumentError(f"tensor {name!r} was given twice")
                v = as_view(x)
                kinds[name], digests[name], at = kind_of(name, v), [], begin
                for piece in pieces_of(v):
                    _write(fd, piece, at)
                    digests[name].append(digest_of(piece))
                    at += len(piece)
                begin += memory_nbytes([kinds[name]])
                del x, v  # free this tensor before a generator gathers the next one
            size = os.fstat(fd).st_size
            _write(fd, np.zeros(max(1, begin) - size, np.uint8), size)  # padding after the last tensor
        weights = allocated(kinds, self._map(self._next, begin))
        for name, slot in weights.items():
            slot.digests = digests[name]
        self.complete(weights, version)

    def in_place(self, update: Update) -> bool:
        """Return True for an update with a base, which overwrites the weights; a snapshot is written to a new file."""
        return update.base is not None

    def apply(self, update: Update) -> None:
        """Apply a checked update. If the process is killed, the next process that opens the folder completes it."""
        if update.base is not None and self._applying is None:
            with replaced(self._path / "pending") as f:
                f.write(update.data)
        super().apply(update)

    def write(self, out: Bytes, decode: Callable[[Bytes], None]) -> None:
        """Decode a piece, save it to the file ``piece``, and then overwrite the old value `out`."""
        scratch = np.empty(len(out), np.uint8)
        decode(scratch)
        with _opened(self._path / "piece", os.O_WRONLY | os.O_CREAT) as fd:
            _write(fd, scratch, 0)
        out[:] = scratch

    def restore(self, out: Bytes, is_right: Callable[[Bytes], bool]) -> bool:
        """Copy the piece saved in the file ``piece`` to `out`; return False if it is missing or another piece."""
        with suppress(OSError), _opened(self._path / "piece", os.O_RDONLY) as fd:
            saved = np.frombuffer(os.pread(fd, len(out), 0), np.uint8)
            if len(saved) == len(out) and is_right(saved):
                out[:] = saved
                return True
        return False

    def complete(self, weights: Weights, version: int) -> None:
        """Write the new file ``state``, and delete the files of the previous version and of the update."""
        old, file = self._current, self._next or self._current
        assert file is not None
        _write_state(self._path / "state", version, weights, file.name)
        super().complete(weights, version)
        self._current, self._next = file, None
        if old is not None and old != file:
            old.unlink(missing_ok=True)
        self._forget()

    def _forget(self) -> None:
        for name in ("piece", "pending"):
            (self._path / name).unlink(missing_ok=True)

    def _delete_other_values(self) -> None:
        """Delete all files of values except the current one, such as those that a killed process has left."""
        for path in self._path.glob("values-*"):
            if path != self._current:
                path.unlink()

    def allocate(self, kinds: Mapping[str, Kind]) -> Weights:
        """Create a file for weights of these kinds, and map it to memory."""
        nbytes = memory_nbytes(kinds.values())
        self._next = self._new_file()
        with _opened(self._next, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as fd:
            try:
                # Reserve the blocks: on a full disk, a store to the mapping would kill the process with SIGBUS.
                os.posix_fallocate(fd, 0, max(1, nbytes))
            except OSError as e:
                raise StateError(f"{self._next} cannot be extended to {nbytes} bytes: {e.strerror}") from None
        return allocated(kinds, self._map(self._next, nbytes))

    def _new_file(self) -> Path:
        """Return the path of the next file of values."""
        self._delete_other_values()
        number = 0 if self._current is None else int(self._current.name.split("-")[1]) + 1
        return self._path / f"values-{number}"

    def _map(self, file: Path, nbytes: int) -> Bytes:
        try:
            with _opened(file, os.O_RDWR) as fd:
                if os.fstat(fd).st_size < nbytes:
                    raise StateError(f"{file} is too short: start from an empty folder")
                return np.frombuffer(mmap.mmap(fd, max(1, nbytes)), np.uint8)
        except OSError as e:
            raise StateError(f"{file} cannot be read: {e.strerror}") from None

    def close(self) -> None:
        """Close the files and unlock the folder, so that another object may open it."""
        self.weights, self.version = Weights(), None
        self._lock()


class _opened:
    """Context manager that opens a file of the folder and returns its file descriptor."""

    def __init__(self, path: Path, flags: int) -> None:
        self._fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


def _write(fd: int, data: Bytes, at: int) -> None:
    rest = memoryview(data)  # pyright: ignore[reportArgumentType] - numpy's stubs
    try:
        while rest:
            at += (n := os.pwrite(fd, rest, at))
            rest = rest[n:]
    except OSError as e:
        raise StateError(f"{len(rest)} bytes of weights cannot be written: {e.strerror}") from None


def _lock(path: Path) -> Callable[[], object]:
    """Lock a folder until the returned function is called, or until the process ends."""
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise StateError(
            f"{path} is in use by another sender or receiver: give each of them a folder of its own"
        ) from None
    owner = type("Lock", (), {})()
    release = weakref.finalize(owner, os.close, fd)
    return lambda _=owner: release()


def _write_state(path: Path, version: int, weights: Weights, file: str) -> None:
    tensors = [[n, s.kind.dtype, s.kind.shape, [d.hex() for d in s.digests]] for n, s in weights.items()]
    body = json.dumps({"format": _FORMAT, "version": version, "file": file, "tensors": tensors}).encode()
    with replaced(path) as f:
        f.write(hashlib.blake2b(body, digest_size=16).hexdigest().encode() + b"\n" + body)


def _read_state(path: Path) -> tuple[int, dict[str, Kind], list[list[bytes]], str]:
    """Return the version, the kinds of tensors, the digests of their pieces, and the name of the file of values."""
    try:
        check, _, body = path.read_bytes().partition(b"\n")
        if check.decode() != hashlib.blake2b(body, digest_size=16).hexdigest():
            raise ValueError("its digest does not match its contents")
        state: Any = json.loads(body)
        if state["format"] != _FORMAT:
            raise ValueError(f"it has format {state['format']}, but this library reads format {_FORMAT}")
        version, file = state["version"], state["file"]
        if type(version) is not int or not 0 <= version <= MAX_VERSION or not str(file).startswith("values-"):
            raise ValueError("it has no version or file")
        kinds: dict[str, Kind] = {}
        for name, dtype, shape, _ in state["tensors"]:
            if dtype not in DTYPES or len(shape) > MAX_RANK or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"{name!r} has no dtype or shape")
            kinds[name] = Kind(dtype, tuple(shape))
        digests = [[bytes.fromhex(d) for d in cast(list[str], found)] for _, _, _, found in state["tensors"]]
        return version, kinds, digests, Path(file).name
    except CodecError:
        raise
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise StateError(f"{path} cannot be read: {e}; start from an empty folder") from None


def base_in(folder: Any, max_nbytes: int | None, options: CallOptions | None) -> Base:
    """Return a FolderBase for `folder`, or a Base in memory if `folder` is None."""
    return Base(max_nbytes, options) if folder is None else FolderBase(folder, max_nbytes, options)
