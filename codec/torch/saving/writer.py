"""Storage writer of ``torch.distributed.checkpoint`` that writes frames: full checkpoints, or changes of earlier ones.

The coordinator chooses the base of a checkpoint, and sends its choice to all ranks as part of their plans. Each rank
encodes its items against the same items of the base, which it has kept in memory or reads from the base's files. The
coordinator then collects the digests of all items, checks that the base is still there, and writes the list of items
before torch writes `.metadata`, which makes the checkpoint complete. After a failure the next checkpoint is a full one.
"""

import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass, replace
from errno import EINVAL, ENOTSUP
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from codec.arguments import shown, whole
from codec.checkpoints.chain import Checkpoint
from codec.checkpoints.index import MAX_DEPTH, METADATA, Item, Key, NamedBase, item_digest, read_head, write_index
from codec.checkpoints.retention import delete_old
from codec.checkpoints.streams import Bytes, Chunks, StreamWriter, dtype_named
from codec.errors import ArgumentError, CodecError, StateError
from codec.torch.saving.reader import key_of
from codec.torch.saving.staging import StagingMemory
from codec.torch.saving.stream import CHANGES, FULL

_log = logging.getLogger("codec.torch")
_carried_out: set[str] = (
    set()
)  # tokens of all saves of this process; planners cache plans, which must not be used again


@dataclass(frozen=True)
class _Saved:
    """Complete checkpoint that may be the base of the next one. `token` identifies the save to its ranks."""

    folder: str
    digest: str
    depth: int
    token: str | None = None


@dataclass(frozen=True)
class _Attempt:
    """Part of a plan that tells a rank how to write: torch's prefix of file names, and the base, if any."""

    prefix: str
    token: str | None
    base: _Saved | None


@dataclass(frozen=True)
class _Result(WriteResult):
    """Result of writing one item, with its entry in the list of items."""

    item: Item
    token: str | None


class _Kept:
    """Chunks of one item that a rank keeps in memory. Each chunk of the base is replaced once it was used."""

    def __init__(self, chunks: list[Bytes]) -> None:
        self.chunks = chunks
        self._at = 0

    def next(self) -> Bytes | None:
        """Return the next chunk of the base."""
        return self.chunks[self._at] if self._at < len(self.chunks) else None

    def keep(self, piece: Bytes) -> None:
        """Keep a chunk of the new checkpoint."""
        if self._at < len(self.chunks) and len(self.chunks[self._at]) == len(piece):
            self.chunks[self._at][:] = piece
        else:
            self.chunks[self._at : self._at + 1] = [piece.copy()]
        self._at += 1

    def end(self) -> list[Bytes]:
        """Return the chunks of the new checkpoint."""
        del self.chunks[self._at :]
        return self.chunks


class _Writing:
    """One save on one rank: opens the streams of items, as ``transforms`` of torch's writer do.

    Parameters
    ----------
    base : _Saved or None
        Base of the checkpoint.
    kept : dict or None
        Chunks of the base in memory, which are replaced by those of the new checkpoint. None: keep no chunks.
    has_base : bool
        True if `kept` has the chunks of the base.
    """

    def __init__(self, base: _Saved | None, kept: dict[Key, list[Bytes]] | None, has_base: bool) -> None:
        self._base, self._kept, self._has_base = base, kept, has_base
        self._folder: Checkpoint | None = None
        self._streams: dict[Key, tuple[StreamWriter, _Kept | None]] = {}

    def transform_save_stream(self, write_item: Any, raw_stream: Any) -> tuple[Any, list[str]]:
        """Return a stream that encodes an item to `raw_stream`, and its descriptors."""
        key = key_of(write_item.index)
        dtype = "uint8"
        if write_item.tensor_data is not None:
            dtype = dtype_named(str(write_item.tensor_data.properties.dtype).removeprefix("torch."))
        kept = None
        if self._kept is not None:
            kept = _Kept(self._kept.pop(key, []))
        base = self._chunks(key, kept)
        stream = StreamWriter(raw_stream, dtype, base, None if kept is None else kept.keep)
        self._streams[key] = stream, kept
        return stream, [FULL]

    def _chunks(self, key: Key, kept: _Kept | None) -> Chunks | None:
        """Return the chunks of the base of an item; None if there is no base."""
        if self._base is None:
            return None
        if self._has_base and kept is not None and kept.chunks:
            return kept
        if self._folder is None:
            self._folder = Checkpoint(self._base.folder)
        return self._folder.chunks(key) if key in self._folder.items else None

    def result(self, done: WriteResult, token: str | None) -> _Result:
        """Return the result of writing an item with its entry in the list of items."""
        key = key_of(done.index)
        stream = self._streams[key][0]
        at = done.storage_data
        item = Item(*key, at.relative_path, at.offset, at.length, stream.nbytes, item_digest(stream.digests),
                    stream.uses_base)  # fmt: skip
        if stream.uses_base:
            at = replace(at, transform_descriptors=[CHANGES])
        return _Result(done.index, done.size_in_bytes, at, item, token)

    def kept(self) -> dict[Key, list[Bytes]]:
        """Return the chunks of the new checkpoint that are kept."""
        return {key: kept.end() for key, (_, kept) in self._streams.items() if kept is not None}


class CheckpointWriter(FileSystemWriter):
    """Writer of :func:`checkpoint_writer`. Several saves may run at the same time, in threads of their own."""

    def __init__(
        self, path: Any, *, full_every: int, base: Any, base_in_memory: bool, keep: int | None, **how: Any
    ) -> None:
        self._in_thread = threading.local()  # path and state of the save that runs in this thread
        self.full_every = whole("full_every", full_every, 1, MAX_DEPTH)
        self.keep = None if keep is None else whole("keep", keep, 1)
        self.base_in_memory = base_in_memory and self.full_every > 1
        if "_extensions" in how:
            raise ArgumentError("checkpoint_writer takes no other extensions: streams are frames, compressed already")
        self._how = how
        self._time = 0  # of the last checkpoint, in nanoseconds since 1970
        self._last = None if base is None else self._saved(base)  # on the coordinator: base of the next checkpoint
        self._kept: tuple[str | None, dict[Key, list[Bytes]]] | None = None  # token of a save, and its chunks
        super().__init__(path, **how)  # pyright: ignore[reportUnknownMemberType]
        self._staging = StagingMemory()

    def __reduce__(self) -> Any:
        if self.full_every > 1:
            raise ArgumentError(
                "checkpoint_writer(full_every=...) remembers the last checkpoint, and cannot be sent to another "
                "process: use async_checkpointer_type=AsyncCheckpointerType.THREAD, the default"
            )
        return _unpickled, (self.path, self.keep, self._how)

    @property
    def path(self) -> Any:
        """Folder of the checkpoint that this thread saves."""
        return getattr(self._in_thread, "path", self._path)

    @path.setter
    def path(self, path: Any) -> None:
        self._in_thread.path = self._path = path

    def _saved(self, base: Any) -> _Saved:
        if self.full_every == 1:
            raise ArgumentError(f"base={shown(base)} needs full_every= of at least 2: with 1, all checkpoints are full")
        head = read_head(Path(base))
        self._time = head.saved
        return _Saved(str(Path(base).absolute()), head.digest, head.depth)

    def stage(self, state_dict: Any) -> Any:
        """Copy a state dict to host memory, for ``async_save``. The memory is used again after the save."""
        self.per_thread_copy_ahead = 0
        return self._staging.copy(state_dict)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder. Refuse to replace a checkpoint that others may need."""
        if self.full_every > 1 or self.keep is not None:
            if not self.use_collectives:
                raise ArgumentError("full_every= and keep= need use_collectives=True")
            if (Path(self.path) / METADATA).exists():
                raise ArgumentError(
                    f"{str(self.path)!r} has a checkpoint, which others may need as their base: save to another folder"
                )
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose the base, on the coordinator."""
        base, self._last = self._last, None  # a save that fails leaves None, and the next checkpoint is full
        if base is not None and (base.depth + 1 >= self.full_every or not self._is_there(base)):
            base = None
        self._in_thread.token, self._in_thread.base = secrets.token_hex(16), base
        return [
            replace(plan, storage_data=_Attempt(plan.storage_data.prefix, self._in_thread.token, base))
            for plan in super().prepare_global_plan(plans)
        ]

    def _is_there(self, base: _Saved) -> bool:
        try:
            there = read_head(Path(base.folder)).digest == base.digest
        except CodecError as e:
            _log.warning("the next checkpoint is a full one, since its base cannot be used: %s", e)
            return False
        if not there:
            _log.warning("the next checkpoint is a full one, since its base %r was replaced", base.folder)
        return there

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write the items of this rank."""
        attempt: Any = plan.storage_data
        if not isinstance(attempt, _Attempt) or attempt.token is None or attempt.token in _carried_out:
            attempt = _Attempt(attempt.prefix, None, None)
        else:
            _carried_out.add(attempt.token)
        (found, chunks), self._kept = self._kept or (None, {}), None
        base = attempt.base
        has_base = base is not None and base.token is not None and base.token == found
        writing = _Writing(base, chunks if self.base_in_memory else None, has_base)
        self._in_thread.transforms = writing
        try:
            done = super().write_data(plan, planner).value()
        finally:
            del self._in_thread.transforms
        if len(done) != len(plan.items):  # torch ignores the errors of its threads
            raise StateError(
                f"only {len(done)} of {len(plan.items)} items were written: see the error of a thread above"
            )
        results: list[WriteResult] = [writing.result(each, attempt.token) for each in done]
        if self.base_in_memory:
            self._kept = attempt.token, writing.kept()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @property
    def transforms(self) -> Any:
        """Save in this thread, which opens the streams of items."""
        return self._in_thread.transforms

    @transforms.setter
    def transforms(self, given: Any) -> None:
        """Ignore the transforms of the base class."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint, on the coordinator."""
        if not self.use_collectives:  # each rank writes a file of metadata, and there is no list of all items
            super().finish(metadata, results)
            return
        folder = Path(self.path)
        written = [cast(_Result, each) for rank in results for each in rank]
        items = [each.item for each in written]
        if any(each.item.changes and each.token != self._in_thread.token for each in written):
            raise StateError("a rank has written its part of another save: save again")
        base: _Saved | None = self._in_thread.base if any(item.changes for item in items) else None
        if base is not None and not self._is_there(base):
            raise StateError(f"the base {base.folder!r} was deleted or replaced while the checkpoint was saved")
        named = None if base is None else NamedBase(base.digest, os.path.relpath(base.folder, folder.absolute()))
        depth = 0 if base is None else base.depth + 1
        self._time = max(time.time_ns(), self._time + 1)  # a clock that was set back must not make this one the oldest
        head = write_index(folder, items, named, depth, self._time)
        self._sync(folder, folder.absolute().parent)
        super().finish(metadata, results)
        self._sync(folder)
        if self.full_every > 1:
            self._last = _Saved(str(folder.absolute()), head.digest, depth, self._in_thread.token)
        if self.keep is not None:
            try:
                delete_old(folder, self.keep)
            except CodecError as e:
                _log.warning("%s", e)

    def _sync(self, *folders: Path) -> None:
        """Write the entries of folders to storage."""
        for folder in folders if self.sync_files else ():
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            except OSError as e:
                if e.errno not in (EINVAL, ENOTSUP):  # some network file systems have no fsync of folders
                    raise
            finally:
                os.close(fd)


def _unpickled(path: Any, keep: int | None, how: dict[str, Any]) -> CheckpointWriter:
    return CheckpointWriter(path, full_every=1, base=None, base_in_memory=True, keep=keep, **how)


def checkpoint_writer(
    path: Any,
    *,
    full_every: int = 1,
    base: Any = None,
    base_in_memory: bool = True,
    keep: int | None = None,
    **how: Any,
) -> FileSystemWriter:
    """Return a ``FileSystemWriter`` for ``torch.distributed.checkpoint`` that writes lossless frames.

    With ``full_every=n``, one writer saves all checkpoints of a training, each to a folder of its own, which
    ``checkpoint_id=`` names. Every n-th checkpoint is full; the others store the changes since the previous one, where
    these are smaller. Loading such a checkpoint needs the previous ones, back to a full one.

    Parameters
    ----------
    path : str or path
        Directory of the checkpoint. The argument ``checkpoint_id=`` of ``save`` and ``async_save`` replaces it.
    full_every : int
        Largest number of checkpoints that are read to load one of them. 1: all checkpoints are full.
    base : str or path, optional
        Directory of the checkpoint whose changes the first checkpoint stores, such as that from which a training was
        resumed. Default: the first checkpoint is full.
    base_in_memory : bool
        True: each rank keeps a copy of what it has saved, in host memory. False: ranks read the base from its files.
    keep : int, optional
        Number of checkpoints to keep. After each save, older ones in the same parent directory are deleted, except
        those that the kept ones need.
    **how
        Further arguments of ``torch.distributed.checkpoint.FileSystemWriter``.

    Raises
    ------
    ArgumentError
        `base` has no complete checkpoint, or an argument is invalid.

    Examples
    --------
    >>> import torch.distributed.checkpoint as dcp
    >>> state, loaded = {"weight": torch.randn(1000)}, {"weight": torch.empty(1000)}
    >>> folder = tempfile.mkdtemp()
    >>> writer = codec.torch.checkpoint_writer(folder, full_every=10)
    >>> for step in range(3):
    ...     metadata = dcp.save(state, checkpoint_id=f"{folder}/{step}", storage_writer=writer)
    ...     state["weight"][step] = 0
    >>> dcp.load(loaded, storage_reader=codec.torch.checkpoint_reader(f"{folder}/2"))
    >>> loaded["weight"][:2], torch.equal(loaded["weight"][3:], state["weight"][3:])
    (tensor([0., 0.]), True)
    """
    return CheckpointWriter(path, full_every=full_every, base=base, base_in_memory=base_in_memory, keep=keep, **how)
