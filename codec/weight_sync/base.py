"""Weights of one version in memory, to which updates are applied."""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from codec._options import CallOptions
from codec.arguments import whole
from codec.errors import ChecksumError, CodecError, LimitError, StateError
from codec.tensors.jax_arrays import of_kind
from codec.weight_sync.coding import decode_delta, decode_full, digest_of, digests_in
from codec.weight_sync.identity import MAX_VERSION, Identity, UpdateHead, other_run
from codec.weight_sync.update import PIECE_NBYTES, Bytes, TensorKind, Update, weights_digest
from codec.weight_sync.weights import Given, Weights, allocated, copied, new_tensor


class Base:
    """Weights of one version. An update is applied to all tensors, or to none.

    An error or interruption before the first value is overwritten leaves the weights unchanged. After this point, the
    update is *in place*: it cannot be undone, and :meth:`settle` completes it.

    Parameters
    ----------
    max_nbytes : int, optional
        Maximum size of all tensors together, in bytes.
    options : CallOptions, optional
        Engine and number of threads for encoding and decoding.

    Attributes
    ----------
    run : bytes or None
        Run of the trainer that the weights belong to; None: unknown.
    version : int or None
        Version of the weights; None before the first weights.
    weights : Weights
        Tensors of this version, with digests.
    """

    def __init__(self, max_nbytes: int | None = None, options: CallOptions | None = None) -> None:
        self.max_nbytes = None if max_nbytes is None else whole("max_nbytes", max_nbytes, 1)
        self.options = options
        self.run: bytes | None = None
        self.version: int | None = None
        self.weights = Weights()
        self.lock = threading.RLock()  # held while the weights change
        self.turn = threading.RLock()  # held by a receiver while it stages, loads and commits an update
        self._applying: Update | None = None  # update in place, which an exception has interrupted
        self._changes = 0  # number of times that the weights began to change
        self._digest: tuple[int, bytes] | None = None  # digest of the weights, and the number of changes before it
        _bases.add(self)

    @property
    def identity(self) -> Identity | None:
        """Identity of the weights; None before the first weights."""
        if self.version is None:
            return None
        if self._digest is None or self._digest[0] != self._changes:
            self._digest = self._changes, self.weights.digest()
        return Identity(self.run, self.version, self._digest[1])

    def kinds_after(self, update: Update) -> dict[str, TensorKind]:
        """Return dtype and shape of all tensors after `update`."""
        return update.tensors if update.base is None else self.weights.kinds

    def fill(self, given: Given, version: int, run: bytes | None = None) -> None:
        """Copy tensors into this object as its weights, and set their run and version."""
        version = whole("version", version, 0, MAX_VERSION)
        self.complete(copied(given), run, version)

    def settle(self) -> None:
        """Complete an update in place that was interrupted by an exception such as KeyboardInterrupt.

        Raises
        ------
        StateError
            The update cannot be completed now, such as on a full disk. A later call tries again.
        """
        with self.lock:
            if self._applying is not None:
                self._overwrite(self._applying, resumed=True)

    def reached(self, update: Update) -> bool:
        """Return True if `update` was applied, or is in place; try to complete it. False: the weights are unchanged."""
        try:
            self.settle()
        except CodecError:
            if self._applying is None:
                raise
            return self._applying is update
        return self.has(update)

    def has(self, update: Update) -> bool:
        """Return True if these are the weights after `update`."""
        return update.head.after.matches(self.identity)

    def check_order(self, update: Update, *, restart: bool = False) -> None:
        """Check that an update is newer than these weights, and of the same run.

        Parameters
        ----------
        update : Update
            The update.
        restart : bool
            True: accept an update of another run, and a snapshot of any version that was not applied already.

        Raises
        ------
        StateError
            The update was applied already, is older, or is of another run.
        """
        if self.has(update):
            raise StateError(f"the update to version {update.version} was applied already; the weights are unchanged")
        if restart and (update.base is None or other_run(update.run, self.run)):
            return
        if other_run(update.run, self.run):
            raise StateError(
                f"the update to version {update.version} is of another run of the trainer than these weights, version "
                f"{self.version}. If the trainer has begun again, pass its snapshot with restart=True; pull() does so "
                "by itself"
            )
        if self.version is not None and update.version <= self.version:
            raise StateError(
                f"the update to version {update.version} is not newer than the current version, {self.version}"
            )

    def check(self, update: Update) -> None:
        """Check that an update can be applied: decode each of its frames into scratch memory, and verify the digests.

        Raises
        ------
        StateError
            The update needs another base than these weights.
        FrameError
            The update is damaged.
        LimitError
            The weights would be larger than `max_nbytes`.
        """
        self.check_size(update)
        scratch = scratch_for(update)
        kept = {} if update.base is None else {n: (slot.kind, slot.digests) for n, slot in self.weights.items()}
        found = {
            name: (entry.kind, [self.piece_after(update, name, k, scratch)[1] for k in range(entry.kind.pieces)])
            for name, entry in update.entries.items()
        }
        check_digest(update, kept | found)

    def check_size(self, update: Update) -> None:
        """Check that an update fits these weights, and does not exceed `max_nbytes`; its frames are not read."""
        self._check_base(update)
        if update.base is not None and not update.fits(self.weights.kinds):
            raise StateError(
                "the names, dtypes or shapes of the update differ from those of its base: publish a snapshot, "
                "diff(..., full=True)"
            )
        self.check_nbytes(update)

    def check_nbytes(self, update: Update) -> None:
        """Raise LimitError if the weights after an update would be larger than `max_nbytes`."""
        if self.max_nbytes is not None and update.total.nbytes > self.max_nbytes:
            raise LimitError(
                f"the weights after the update have {update.total.nbytes} bytes, more than max_nbytes, "
                f"{self.max_nbytes}"
            )

    def _check_base(self, update: Update) -> None:
        mine = self.identity
        if update.base is None or (mine is not None and (update.base, update.base_digest) == mine[1:]):
            return
        needed = f"the update needs version {update.base} as its base, but "
        if self.version is None:
            raise StateError(f"{needed}there are no weights yet: apply a snapshot first")
        if update.base == self.version:
            raise StateError(
                f"{needed}the weights of version {self.version} have other values: apply a snapshot, or begin with the "
                "weights that the sender began with"
            )
        way = "apply the missing updates first, or a snapshot" if update.base > self.version else "apply a snapshot"
        raise StateError(f"{needed}the current version is {self.version}: {way}")

    def piece_after(self, update: Update, name: str, k: int, scratch: Bytes) -> tuple[Bytes, bytes]:
        """Return the values of piece `k` of a tensor after `update`, and their digest.

        The values are a view of `scratch`, or of the weights if the piece is unchanged.
        """
        frame = update.frame(name, k)
        if frame is None:
            slot = self.weights[name]
            return slot.piece(k), slot.digests[k]
        begin, end = update.entries[name].kind.spans[k]
        out = scratch[: end - begin]
        self.decode(update, name, k, out)
        return out, digest_of(out) if update.base is None else digests_in(frame)[1]

    def decode(self, update: Update | None, name: str, k: int, out: Bytes) -> None:
        """Write the values that piece `k` of a tensor has after `update` to `out`, which may be the piece itself.

        If `update` is None, write the current values of the piece.
        """
        frame = None if update is None else update.frame(name, k)
        if update is None or frame is None:
            out[:] = self.weights[name].piece(k)
            return
        kind = update.entries[name].kind
        try:
            if update.base is None:
                decode_full(frame, out, kind.dtype, self.options)
            else:
                decode_delta(frame, self.weights[name].piece(k), out, kind.dtype, self.options)
        except CodecError as e:
            e.of(name)
            raise

    def tensors(self, names: Iterable[str], update: Update | None, like: Any) -> Iterator[tuple[str, Any]]:
        """Yield names and new tensors with the values after `update`, or the current values if `update` is None.

        The weights are unchanged.

        Raises
        ------
        StateError
            The weights have changed since the first tensor was yielded.
        """
        changes = self._changes
        kinds = self.weights.kinds if update is None else self.kinds_after(update)
        for name in names:
            self._check_unchanged(changes)
            kind = kinds[name]
            tensor, memory = new_tensor(kind, like)
            for k, (begin, end) in enumerate(kind.spans):
                self.decode(update, name, k, memory[begin:end])
            self._check_unchanged(changes)  # another thread may have changed them meanwhile
            yield name, of_kind(tensor, like)
            del tensor, memory  # free this tensor before the next one is allocated

    def _check_unchanged(self, changes: int) -> None:
        if changes != self._changes:
            raise StateError(
                "the weights have changed while their tensors were read: the tensors would be of two versions. Read "
                "them again"
            )

    def apply(self, update: Update) -> None:
        """Apply an update that :meth:`check` has accepted."""
        with self.lock:
            if self.in_place(update):
                self.prepare(update)
                self._applying = update
                self._overwrite(update, resumed=False)
                return
            target = self.allocate(update.tensors)
            for name, slot in target.items():
                for k in range(len(slot.digests)):
                    self.decode(update, name, k, slot.piece(k))
                slot.digests = slot.measure()
            self.complete(target, update.run, update.version)

    def _overwrite(self, update: Update, *, resumed: bool) -> None:
        """Overwrite the weights with their values after `update`, or complete an interrupted call if `resumed`."""
        self._changes += 1
        for name, entry in update.entries.items():
            for k, (begin, end) in enumerate(entry.frames):
                if begin < end:
                    self._overwrite_piece(update, name, k, resumed)
        self.complete(self.weights, update.run, update.version)
        self._applying = None

    def _overwrite_piece(self, update: Update, name: str, k: int, resumed: bool) -> None:
        slot = self.weights[name]
        out = slot.piece(k)
        if update.base is None:
            self.decode(update, name, k, out)
            slot.digests[k] = digest_of(out)
            return
        after = digests_in(_frame(update, name, k))[1]
        found = digest_of(out) if resumed else slot.digests[k]
        if found == slot.digests[k] != after:
            self.write(out, lambda scratch: self.decode(update, name, k, scratch))
        elif found != after and not self.restore(out, lambda saved: digest_of(saved) == after):
            raise StateError(f"{name!r} was damaged by an interrupted update: start from a snapshot")
        slot.digests[k] = after

    # Storage of the weights: in memory here. FolderBase in codec/weight_sync/folder.py overrides the methods below to
    # store the weights in files, and SharedFolderBase in codec/weight_sync/shared_folder.py to share the files.

    def in_place(self, update: Update) -> bool:
        """Return True if applying the update overwrites the current weights, False if it writes to new memory."""
        return update.base is not None or update.tensors == self.weights.kinds

    def prepare(self, update: Update) -> None:
        """Save what is needed to complete an update in place. An exception leaves the weights unchanged."""

    def allocate(self, kinds: Mapping[str, TensorKind]) -> Weights:
        """Allocate memory for tensors of these kinds."""
        return allocated(kinds)

    def write(self, out: Bytes, decode: Callable[[Bytes], None]) -> None:
        """Overwrite the piece `out` with its new value; call `decode` with the buffer to write the new value to."""
        decode(out)

    def restore(self, out: Bytes, is_right: Callable[[Bytes], bool]) -> bool:
        """Complete the piece `out`, which an interrupted write has partly overwritten; return False if impossible."""
        return False

    def complete(self, weights: Weights, run: bytes | None, version: int) -> None:
        """Replace the weights and the version of this object, and the run if `run` is known."""
        self._changes += 1
        self.weights, self.run, self.version = weights, run or self.run, version

    def preparing(self) -> AbstractContextManager[None]:
        """Context in which an update is read and checked, by one receiver of a shared folder at a time."""
        return nullcontext()

    def stored(self, heads: Sequence[UpdateHead]) -> tuple[int, Update] | None:
        """Return the last update of a chain whose values a receiver of a shared folder has stored, and its index."""
        return None

    def drop(self) -> None:
        """Release the values of a checked update that is not applied."""

    def close(self) -> None:
        """Release the files of the weights; weights in memory have none."""


_bases: "weakref.WeakSet[Base]" = weakref.WeakSet()


def _after_fork() -> None:
    """Replace the locks, which threads of the parent may hold."""
    for base in _bases:
        base.lock, base.turn = threading.RLock(), threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def scratch_for(update: Update) -> Bytes:
    """Return memory for the largest piece that `update` changes."""
    largest = max((entry.kind.nbytes for entry in update.entries.values()), default=0)
    return np.empty(min(largest, PIECE_NBYTES), np.uint8)


def check_digest(update: Update, after: Mapping[str, tuple[TensorKind, Sequence[bytes]]]) -> None:
    """Check that `update` names the digest of the weights after it, given as in :func:`weights_digest`."""
    if weights_digest(after) != update.digest:
        raise ChecksumError("the weights after the update do not have the digest that the update names")


def _frame(update: Update, name: str, k: int) -> Bytes:
    frame = update.frame(name, k)
    assert frame is not None
    return frame
