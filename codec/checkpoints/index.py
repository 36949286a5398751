"""List of the items of a checkpoint, in the file ``codec.index`` of its folder, with its digest and its base.

The list is text. Its first line is a JSON object with the fields of :class:`IndexHead`; each further line is a JSON
list with the fields of an :class:`Item`. docs/spec/checkpoints.md specifies the file.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from codec.errors import ArgumentError, FrameError, Status
from codec.files.opening import open_regular, printable
from codec.files.replacing import replaced

NAME = "codec.index"
MAX_DEPTH = 100  # maximum number of checkpoints on which another one depends; readers recurse over them
METADATA = ".metadata"  # file that torch.distributed.checkpoint writes last
_FORMAT = 1
_LONGEST_HEAD = 1 << 16  # bytes
_LARGEST = 1 << 28  # bytes of the whole file
_DIGEST_NBYTES = 16

Key = tuple[str, tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class NamedBase:
    """Checkpoint against which another one was encoded: its digest, and its folder relative to the other's."""

    digest: str
    path: str


@dataclass(frozen=True, slots=True)
class IndexHead:
    """Identity of a checkpoint.

    Attributes
    ----------
    digest : str
        Digest of names, offsets and bytes of all items, in hexadecimal.
    base : NamedBase or None
        Checkpoint against which items were encoded; None for a full checkpoint.
    depth : int
        Number of checkpoints on which this one depends.
    saved : int
        Time at which the checkpoint was saved, in nanoseconds since 1970.
    items : int
        Number of items.
    """

    digest: str
    base: NamedBase | None
    depth: int
    saved: int
    items: int


@dataclass(frozen=True, slots=True)
class Item:
    """Stream of one item of a checkpoint: an object, or a tensor or shard of a tensor.

    Attributes
    ----------
    name : str
        Name in the state dict.
    offsets : tuple of int or None
        Position of a shard in its tensor; None for an object.
    file : str
        Name of the file in the checkpoint's folder.
    begin, length : int
        Position of the stream in the file, and its size in bytes.
    nbytes : int
        Size of the uncompressed bytes.
    digest : str
        Digest of the uncompressed bytes, in hexadecimal.
    changes : bool
        True if the stream has frames of changes, so that the item of the base is needed.
    """

    name: str
    offsets: tuple[int, ...] | None
    file: str
    begin: int
    length: int
    nbytes: int
    digest: str
    changes: bool

    @property
    def key(self) -> Key:
        """Name and offsets, by which items of two checkpoints are compared."""
        return self.name, self.offsets

    @property
    def title(self) -> str:
        """Text that names the item in messages."""
        return self.name if not any(self.offsets or ()) else f"{self.name}{list(self.offsets or ())}"


def item_digest(digests: Iterable[bytes]) -> str:
    """Return the digest of an item from the digests of its chunks."""
    return blake2b(b"".join(digests), digest_size=_DIGEST_NBYTES).hexdigest()


def checkpoint_digest(items: Iterable[Item]) -> str:
    """Return the digest of a checkpoint, which does not depend on how its items are stored."""
    rows = sorted(json.dumps([each.name, each.offsets, each.nbytes, each.digest]) for each in items)
    return blake2b("\n".join(rows).encode(), digest_size=_DIGEST_NBYTES).hexdigest()


def write_index(folder: Path, items: Iterable[Item], base: NamedBase | None, depth: int, saved: int) -> IndexHead:
    """Write the list of a checkpoint's items, and return its first line."""
    rows = list(items)
    head = IndexHead(checkpoint_digest(rows), base, depth, saved, len(rows))
    with replaced(folder / NAME) as file:
        file.write(json.dumps({"format": _FORMAT} | asdict(head)).encode() + b"\n")
        for row in rows:
            file.write(json.dumps(list(asdict(row).values())).encode() + b"\n")
    return head


def is_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Return True if a folder has a list of items."""
    return (Path(folder) / NAME).is_file()


def read_head(folder: Path) -> IndexHead:
    """Read the first line of the list of a checkpoint that is complete.

    Raises
    ------
    ArgumentError
        The folder has no complete checkpoint with a list of items.
    FrameError
        The list is damaged.
    """
    path = folder / NAME
    try:
        if not (folder / METADATA).is_file():
            raise ArgumentError(f"{printable(str(folder))} has no complete checkpoint: there is no {METADATA}")
        with os.fdopen(open_regular(str(path)), "rb") as file:
            return _head(path, file.readline(_LONGEST_HEAD))
    except OSError as e:
        raise ArgumentError(f"{printable(str(path))} cannot be read: {e.strerror or e}") from None


def read_items(folder: Path, head: IndexHead) -> dict[Key, Item]:
    """Read the items of a checkpoint whose first line was read.

    Raises
    ------
    ArgumentError
        The list cannot be read.
    FrameError
        The list is damaged.
    """
    path = folder / NAME
    try:
        with os.fdopen(open_regular(str(path)), "rb") as file:
            text = file.read(_LARGEST + 1)
    except OSError as e:
        raise ArgumentError(f"{printable(str(path))} cannot be read: {e.strerror or e}") from None
    lines = text.splitlines()
    if len(text) > _LARGEST or not lines or _head(path, lines[0]) != head or len(lines) != head.items + 1:
        raise _damaged(path, "it is incomplete, or was replaced")
    items = [_item(path, line) for line in lines[1:]]
    if checkpoint_digest(items) != head.digest:
        raise _damaged(path, "the items do not have the digest of the first line")
    return {item.key: item for item in items}


def _head(path: Path, line: bytes) -> IndexHead:
    found = _parsed(path, line)
    match found:
        case {
            "format": int(version), "digest": str(digest), "base": base, "depth": int(depth), "saved": int(saved),
            "items": int(items),
        }:  # fmt: skip
            if version != _FORMAT:
                raise _damaged(path, f"it has the format {version}, but this library reads {_FORMAT}")
            match base:
                case None:
                    named = None
                case {"digest": str(its), "path": str(where)} if where and "\0" not in where:
                    named = NamedBase(its, where)
                case _:
                    raise _damaged(path, "the base is not named by digest and path")
            if (named is None) == (depth == 0) and 0 <= depth <= MAX_DEPTH and items >= 0:
                return IndexHead(digest, named, depth, saved, items)
        case _:
            pass
    raise _damaged(path, "the first line is not as specified")


def _item(path: Path, line: bytes) -> Item:
    row = _parsed(path, line)
    match row:
        case [str(name), offsets, str(file), int(begin), int(length), int(nbytes), str(digest), bool(changes)]:
            numbers = begin >= 0 and length >= 0 and nbytes >= 0
            if numbers and _is_offsets(offsets) and file not in ("", ".", "..") and not set(file) & {"/", "\\", "\0"}:
                place = None if offsets is None else tuple(cast(list[int], offsets))
                return Item(name, place, file, begin, length, nbytes, digest, changes)
        case _:
            pass
    raise _damaged(path, "an item is not as specified")


def _is_offsets(x: Any) -> bool:
    return x is None or (isinstance(x, list) and all(type(i) is int and i >= 0 for i in cast(list[Any], x)))


def _parsed(path: Path, line: bytes) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(line)
    raise _damaged(path, "a line is not JSON")


def _damaged(path: Path, why: str) -> FrameError:
    return FrameError(f"{printable(str(path))} is damaged: {why}", Status.BAD_HEADER)
