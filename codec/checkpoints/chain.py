"""Checkpoints and their bases: decode the items of a checkpoint, and find the folders of its bases by digest."""

import os
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import IO, Any, cast

from codec.checkpoints.index import IndexHead, Item, Key, NamedBase, is_checkpoint, item_digest, read_head, read_items
from codec.checkpoints.streams import Bytes, StreamChunks
from codec.errors import ChecksumError, CodecError, FrameError, StateError
from codec.files.opening import open_regular, printable


class Checkpoint:
    """Complete checkpoint in a folder. Its base is opened when an item needs it.

    Parameters
    ----------
    folder : path
        Folder of the checkpoint.

    Raises
    ------
    ArgumentError
        The folder has no complete checkpoint with a list of items.
    FrameError
        The list of items is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.head: IndexHead = read_head(self.folder)
        self.items: dict[Key, Item] = read_items(self.folder, self.head)
        self._base: Checkpoint | None = None

    @property
    def base(self) -> "Checkpoint":
        """Checkpoint against which items were encoded.

        Raises
        ------
        StateError
            The base is missing; the message names its folder.
        """
        if self._base is None:
            named = self.head.base
            if named is None:
                raise FrameError(f"{printable(str(self.folder))} has items of changes, but no base")
            self._base = Checkpoint(find_base(self.folder, named, self.head.depth))
        return self._base

    def bases(self) -> "Iterator[Checkpoint]":
        """Yield the base, the base of the base, and so on, to a full checkpoint."""
        at = self
        while at.head.base is not None:
            at = at.base
            yield at

    def chunks(self, key: Key) -> "ItemChunks":
        """Return the decoded chunks of an item.

        Raises
        ------
        FrameError
            There is no such item, or its file is too short.
        ArgumentError
            The file of the item cannot be read.
        """
        if key not in self.items:
            raise FrameError(f"the checkpoint {printable(str(self.folder))} has no item {key[0]!r}")
        return ItemChunks(self, self.items[key])


class ItemChunks:
    """Decoded chunks of an item, whose digest is checked after the last chunk.

    Parameters
    ----------
    checkpoint : Checkpoint
        Checkpoint of the item.
    item : Item
        The item.
    source : binary file, optional
        Open stream of the item. Default: the file that the list names.
    """

    def __init__(self, checkpoint: Checkpoint, item: Item, source: IO[bytes] | None = None) -> None:
        self._checkpoint, self._item = checkpoint, item
        stream = cast(IO[bytes], _ItemFile(checkpoint.folder / item.file, item)) if source is None else source
        self._stream = StreamChunks(stream, lambda: checkpoint.base.chunks(item.key))

    def next(self) -> Bytes | None:
        """Return the next chunk, or None after the last one; errors name the item and its checkpoint."""
        try:
            chunk = self._stream.next()
            if self._stream.nbytes > self._item.nbytes or (chunk is None and not self._is_whole()):
                raise ChecksumError("the bytes do not have the digest in the list of items")
            return chunk
        except CodecError as e:
            e.of(f"{self._item.title} of {printable(str(self._checkpoint.folder))}")
            raise

    def _is_whole(self) -> bool:
        return self._stream.nbytes == self._item.nbytes and item_digest(self._stream.digests) == self._item.digest

    def __iter__(self) -> Iterator[Bytes]:
        while (chunk := self.next()) is not None:
            yield chunk


class _ItemFile(RawIOBase):
    """Part of a file that has the stream of an item."""

    def __init__(self, path: Path, item: Item) -> None:
        self._fd = -1  # which close() skips, if opening fails
        self._fd = open_regular(str(path))
        size = os.fstat(self._fd).st_size
        self._at, self._end = item.begin, item.begin + item.length
        if self._end > size:
            self.close()
            raise FrameError(f"{printable(str(path))} is too short for {item.title}: {size} bytes, needs {self._end}")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = os.pread(self._fd, min(len(buffer), self._end - self._at), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            if self._fd >= 0:
                os.close(self._fd)
            super().close()


def find_base(folder: Path, base: NamedBase, depth: int) -> Path:
    """Return the folder of a base: the named path, or else a folder beside `folder` with the base's digest.

    A base depends on fewer checkpoints than `depth`, so that chains end.

    Raises
    ------
    StateError
        No such folder has a complete checkpoint of this digest.
    """
    named = Path(os.path.normpath(folder.absolute() / base.path))
    why = "is missing"
    if is_checkpoint(named):
        try:
            found = read_head(named)
            if found.digest == base.digest and found.depth < depth:
                return named
            why = f"has the digest {printable(found.digest)} and {found.depth} bases"
        except CodecError as e:
            why = f"cannot be used: {e}"
    for path, head in beside(folder):
        if head.digest == base.digest and head.depth < depth:
            return path
    raise StateError(
        f"the checkpoint {printable(str(folder))} needs its base {printable(str(named))} of digest "
        f"{printable(base.digest)}, which {why}, and no folder beside it is this checkpoint: restore the base, or load "
        "another checkpoint"
    )


def beside(folder: Path) -> Iterator[tuple[Path, IndexHead]]:
    """Yield the folders of complete checkpoints beside `folder`, by name, and the first lines of their lists."""
    try:
        folders = sorted(path for path in folder.absolute().parent.iterdir() if is_checkpoint(path))
    except OSError:
        return
    for path in folders:
        try:
            yield path, read_head(path)
        except CodecError:  # damaged or incomplete: it cannot be a base
            continue


def verify_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Decode all items of a checkpoint, with the items of its bases that they need, and check their digests.

    Raises
    ------
    CodecError
        The checkpoint or a base is damaged or missing.
    """
    checkpoint = Checkpoint(folder)
    for key in checkpoint.items:
        for _ in checkpoint.chunks(key):
            pass
    return checkpoint
