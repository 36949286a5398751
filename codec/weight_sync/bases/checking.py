"""Check the digest of an update, and keep the changes in its frames until the update is applied."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import numpy as np

from codec._c.library import ITEMSIZE
from codec.delta import DeltaChanges
from codec.errors import ChecksumError, CodecError
from codec.weight_sync.updates.kinds import PIECE_NBYTES, Bytes, TensorKind, WeightsSize
from codec.weight_sync.updates.shards import Name
from codec.weight_sync.updates.update import Update

_SHARE = 16  # changes are kept up to this share of the bytes of the weights: 2% of the values of bfloat16


class KeptChanges:
    """Changes of the pieces of an update that was checked against the weights, which have not changed since.

    A piece whose changes are kept need not be decoded again.

    Parameters
    ----------
    update : Update, optional
        The update. Default: no changes are kept.
    kinds : mapping of names to TensorKind
        Kinds of the weights, whose size limits the memory for changes.
    """

    def __init__(self, update: Update | None = None, kinds: Mapping[Name, TensorKind] = MappingProxyType({})) -> None:
        self._update, self._room = update, WeightsSize.of(kinds.values()).nbytes // _SHARE
        self._found: dict[tuple[Name, int], DeltaChanges] = {}

    def add(self, name: Name, k: int, changes: DeltaChanges | None) -> None:
        """Keep the changes of piece `k` of a tensor, unless there is no room. None: the changes are too many."""
        if changes is not None and changes.nbytes <= self._room:
            self._room -= changes.nbytes
            self._found[name, k] = changes

    def of(self, update: Update, name: Name, k: int) -> DeltaChanges | None:
        """Return the changes of piece `k` of a tensor; None if they are not kept, or are those of another update."""
        return self._found.get((name, k)) if update is self._update else None


def packed(changes: DeltaChanges) -> Bytes:
    """Return the bytes of changes: itemsize and number of the values in 4 bytes each, positions, values."""
    head = np.array([changes.values.itemsize, len(changes.values)], np.uint32)
    return np.concatenate([x.view(np.uint8) for x in (head, *changes)])


def with_packed(piece: Bytes, data: Bytes) -> Bytes:
    """Return a copy of a piece with the changes that `data` begins with; the piece itself if `data` has none for it."""
    itemsize, count = data[:8].view(np.uint32).tolist() if len(data) >= 8 else (0, 0)
    end = 8 + (4 + itemsize) * count
    if itemsize not in ITEMSIZE.values() or end > len(data) or len(piece) % itemsize:
        return piece
    new, values = piece.copy(), data[8 + 4 * count : end].view(f"uint{8 * itemsize}")
    changes = DeltaChanges(data[8 : 8 + 4 * count].view(np.uint32), values)
    if (changes.positions < len(piece) // itemsize).all():
        changes.put(new.view(values.dtype))
    return new


def scratch_for(update: Update) -> Bytes:
    """Return memory for the largest piece that `update` changes."""
    largest = max((entry.kind.nbytes for entry in update.entries.values()), default=0)
    return np.empty(min(largest, PIECE_NBYTES), np.uint8)


def check_digest(update: Update, digest: bytes) -> None:
    """Raise ChecksumError unless `update` names this digest of the weights after it."""
    if digest != update.digest:
        raise ChecksumError("the weights after the update do not have the digest that the update names")


@contextmanager
def named(name: Name) -> Generator[None]:
    """Context that adds the name of a tensor to errors."""
    try:
        yield
    except CodecError as e:
        e.of(name)
        raise
