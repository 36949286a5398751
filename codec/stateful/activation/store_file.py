"""Store of activations in files. A background thread prefetches and writes entries."""

import fcntl
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from codec.errors import CodecError, StateError
from codec.stateful.activation.entries import Bytes, Floats, SampleEntry, check_entry, largest_nbytes, pack, unpack
from codec.stateful.activation.slots import SlotFile, slot_file, slot_files

MOST_NBYTES = 256 << 20  # maximum bytes of queued writes, and maximum bytes of prefetched entries

logger = logging.getLogger("codec")


class _Place(NamedTuple):
    file: SlotFile
    slot: int
    check: int


class _Write(NamedTuple):
    sample: int
    place: _Place
    future: Future[None]
    entry: Bytes  # part of `memory` with the entry's bytes
    memory: Bytes


class _Ahead(NamedTuple):
    future: Future[Bytes | None]
    memory: Bytes


class FileStore:
    """Entries by sample in the files of a folder. There is one file per number of values of a sample.

    A background thread runs all operations on files in order. Exception: the calling thread itself reads an entry that
    was not prefetched and has no queued write. After a crash at any point, an entry is either complete or missing.

    Parameters
    ----------
    path : Path
        Path of the folder. The folder is created if it does not exist.
    dtype : {"float32", "bfloat16", "8bit"}
        Dtype of the entries.
    edge : int
        Number of the pipeline edge.

    Raises
    ------
    StateError
        The folder is in use, or belongs to another edge or dtype.
    OSError
        The folder or a file cannot be read or written.

    Attributes
    ----------
    found : dict of int to SampleEntry
        Entries that the files contained when they were opened.
    """

    persistent = True

    def __init__(self, path: Path, dtype: str, edge: int) -> None:
        self._path, self._dtype, self._edge, self._pid = path, dtype, edge, os.getpid()
        path.mkdir(parents=True, exist_ok=True)
        self._lock = _Lock(path)
        self._files: dict[int, SlotFile] = {}
        self._places: dict[int, _Place] = {}
        self._writes: deque[_Write] = deque()  # queued writes, oldest first
        self._pending: dict[int, _Write] = {}  # latest unfinished write of each sample
        self._ahead: dict[int, _Ahead] = {}  # prefetched entry of each sample
        self._waiting = self._reading = 0  # total bytes of `_writes` and of `_ahead`
        self._spare: list[Bytes] = []  # unused buffers
        self._warned = self._closed = False
        self.found: dict[int, SampleEntry] = {}
        try:
            for n, _ in slot_files(path):
                self._load(self._file(n))
        except BaseException:
            self._release()
            raise
        self._executor = ThreadPoolExecutor(1, "codec-activations")

    def read(self, sample: int, row: Floats) -> bool:
        """Read a sample's m into `row`. Return False if the entry is missing or damaged; `row` is then undefined."""
        self._check_open()
        self._settle()
        place = self._places.get(sample)
        if place is None or place.file.n != len(row):
            return False
        if (write := self._pending.get(sample)) is not None:
            unpack(write.entry, self._dtype, row)
            return True
        entry, memory = self._fetch(sample, place, row.view(np.uint8) if self._dtype == "float32" else None)
        try:
            if entry is None:
                return False
            if entry.ctypes.data != row.ctypes.data:
                unpack(entry, self._dtype, row)
            return True
        except CodecError:
            return False
        finally:
            self._recycle(memory)

    def write(self, sample: int, entry: SampleEntry, row: Floats) -> None:
        """Queue a write of a sample's m, which replaces the sample's old entry.

        Raises
        ------
        ArgumentError
            The row contains NaN or Inf, and the dtype is "8bit". The sample then keeps its old entry.
        """
        memory = self._memory(largest_nbytes(self._dtype, len(row)))
        self._write(sample, entry, memory[: pack(row, self._dtype, memory)], memory)

    def delete(self, sample: int) -> None:
        """Queue the removal of a sample's entry, if there is one."""
        self._check_open()
        self._drop_ahead(sample)
        self._pending.pop(sample, None)
        place = self._places.pop(sample, None)
        if place is not None:
            self._submit(place.file.clear, place.slot)
            place.file.release(place.slot)

    def entry(self, sample: int) -> Bytes | None:
        """Return the bytes of a sample's entry; None if it is damaged."""
        self.flush()
        entry, _ = self._fetch(sample, self._places[sample], None) if sample in self._places else (None, None)
        return entry

    def restore(self, sample: int, entry: SampleEntry, contents: Bytes) -> None:
        """Queue a write of an entry given as bytes.

        Raises
        ------
        CodecError
            The bytes are not a valid entry with this number of values.
        """
        check_entry(contents, self._dtype, entry.n)
        self._write(sample, entry, contents, contents)

    def prefetch(self, samples: Iterable[int]) -> None:
        """Queue reads of the entries of samples; :meth:`read` later waits for the result."""
        self._check_open()
        self._settle()
        for sample in samples:
            place = self._places.get(sample)
            if place is None or sample in self._pending or sample in self._ahead:
                continue
            memory = self._memory(largest_nbytes(self._dtype, place.file.n))
            future = self._submit(place.file.read, place.slot, sample, place.check, memory)
            self._ahead[sample] = _Ahead(future, memory)
            self._reading += len(memory)
            while self._reading > MOST_NBYTES and len(self._ahead) > 1:
                self._drop_ahead(next(iter(self._ahead)))

    def flush(self) -> None:
        """Wait until all entries are on the disk."""
        self._check_open()
        self._settle(0)
        for file in self._files.values():
            self._submit(file.sync).result()

    def close(self) -> None:
        """Wait for all queued writes, and close the files."""
        self._closed = True
        if os.getpid() == self._pid:
            self._settle(0)
            self._executor.shutdown()
        self._release()

    def _release(self) -> None:
        for file in self._files.values():
            file.close()
        self._lock.close()

    def _fetch(self, sample: int, place: _Place, memory: Bytes | None) -> tuple[Bytes | None, Bytes | None]:
        """Return an entry, prefetched or read now into `memory`, and a buffer to recycle once the entry was used."""
        ahead = self._ahead.pop(sample, None)
        try:
            if ahead is not None:
                self._reading -= len(ahead.memory)
                if not ahead.future.cancel():
                    return ahead.future.result(), ahead.memory
            own = None if memory is not None else self._memory(largest_nbytes(self._dtype, place.file.n))
            target = memory if own is None else own
            assert target is not None
            return place.file.read(place.slot, sample, place.check, target), own
        except OSError as e:
            self._warn("read", e)
            return None, None

    def _write(self, sample: int, entry: SampleEntry, contents: Bytes, memory: Bytes) -> None:
        self._check_open()
        self._drop_ahead(sample)
        place = self._places.get(sample)
        if place is not None and place.file.n != entry.n:
            self.delete(sample)
            place = None
        if place is None:
            try:
                file = self._file(entry.n)
            except OSError as e:
                self._warn("created", e)
                return
            slot = file.reserve()
        else:
            file, slot = place.file, place.slot
        place = _Place(file, slot, entry.check)
        future = self._submit(file.write, slot, sample, entry.check, entry.visits, contents)
        write = _Write(sample, place, future, contents, memory)
        self._places[sample] = place
        self._pending[sample] = write
        self._writes.append(write)
        self._waiting += len(memory)
        self._settle()

    def _settle(self, most: int = MOST_NBYTES) -> None:
        """Handle finished writes, and wait until at most `most` bytes are queued. Forget samples whose write failed."""
        while self._writes and (self._waiting > most or self._writes[0].future.done()):
            error = self._writes[0].future.exception()
            write = self._writes.popleft()
            self._waiting -= len(write.memory)
            latest = self._pending.get(write.sample) is write
            if latest:
                del self._pending[write.sample]
            if error is None:
                self._recycle(write.memory)
                continue
            if not isinstance(error, OSError):
                raise error
            self._warn("written", error)
            if latest:
                del self._places[write.sample]
                write.place.file.release(write.place.slot)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"the store {self._path} is closed: create a new ActivationDelta to use the folder again")

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if os.getpid() != self._pid:
            raise StateError(
                f"the store {self._path} was opened by the parent process: create the ActivationDelta after fork()"
            )
        return self._executor.submit(_run, self._lock, function, arguments)

    def _file(self, n: int) -> SlotFile:
        if n not in self._files:
            self._files[n] = SlotFile(slot_file(self._path, n), self._dtype, self._edge, n)
        return self._files[n]

    def _load(self, file: SlotFile) -> None:
        for slot, head in file.heads():
            if head is None or head.sample in self._places:
                file.release(slot)
            else:
                self._places[head.sample] = _Place(file, slot, head.check)
                self.found[head.sample] = SampleEntry(head.check, file.n, head.visits)

    def _drop_ahead(self, sample: int) -> None:
        ahead = self._ahead.pop(sample, None)
        if ahead is not None:
            self._reading -= len(ahead.memory)
            ahead.future.cancel()

    def _memory(self, nbytes: int) -> Bytes:
        while self._spare:
            memory = self._spare.pop()
            if len(memory) == nbytes:
                return memory
        return np.empty(nbytes, np.uint8)

    def _recycle(self, memory: Bytes | None) -> None:
        if memory is not None and len(self._spare) < 64:
            self._spare.append(memory)

    def _warn(self, what: str, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "stored activations in %s cannot be %s, so that their samples are sent raw: %s", self._path, what, error
            )


class _Lock:
    """Exclusive lock of a folder, held until this object is closed or garbage-collected."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.close = weakref.finalize(self, os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise StateError(f"the store {path} is in use: give each side of each edge a folder of its own") from None


def _run(lock: _Lock, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call a function. The reference `lock` keeps the folder locked while calls are queued."""
    del lock
    return function(*arguments)
