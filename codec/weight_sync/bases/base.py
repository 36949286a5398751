"""Weights of one version in memory, to which updates are applied."""

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from codec._options import CallOptions
from codec.arguments import whole
from codec.delta import DeltaChanges
from codec.errors import CodecError, LimitError, StateError
from codec.tensors.jax_arrays import of_kind
from codec.weight_sync.bases.checking import KeptChanges, check_digest, named, scratch_for
from codec.weight_sync.updates.assembly import BoxTarget, check_cover, write_target
from codec.weight_sync.updates.coding import bits_of, decode_delta, decode_full, digest_of, digests_in, find_changes
from codec.weight_sync.updates.digests import piece_digest, sum_of
from codec.weight_sync.updates.identity import MAX_VERSION, Identity, UpdateHead
from codec.weight_sync.updates.kinds import Bytes, TensorKind, WeightsSize
from codec.weight_sync.updates.order import check_base, check_order
from codec.weight_sync.updates.parts import PartedUpdate
from codec.weight_sync.updates.shards import Box, Layout, Name, Selection, layouts, tensor_of
from codec.weight_sync.updates.update import Update, whole_kind
from codec.weight_sync.updates.weights import Given, Rest, Weights, allocated, copied, new_tensor


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
    only : Selection, optional
        Tensors, or boxes of them, whose values are kept. Default: all.

    Attributes
    ----------
    run : bytes or None
        Run of the trainer that the weights belong to; None: unknown.
    version : int or None
        Version of the weights; None before the first weights.
    weights : Weights
        Tensors of this version, with digests.
    unneeded : dict of int to bytes
        Digests of parts of this version, by the rank that wrote the part, of which this object keeps no tensor. Empty
        after a restart.
    """

    def __init__(
        self, max_nbytes: int | None = None, options: CallOptions | None = None, only: Selection | None = None
    ) -> None:
        self.max_nbytes = None if max_nbytes is None else whole("max_nbytes", max_nbytes, 1)
        self.options, self.only = options, only
        self.run: bytes | None = None
        self.version: int | None = None
        self.weights = Weights()
        self.unneeded: dict[int, bytes] = {}
        self.lock = threading.RLock()  # held while the weights change
        self.turn = threading.RLock()  # held by a receiver while it stages, loads and commits an update
        self._applying: Update | None = None  # update in place, which an exception has interrupted
        self._kept = KeptChanges()  # of the update that was checked last
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

    def kinds_after(self, update: Update | None) -> dict[Name, TensorKind]:
        """Return dtype and shape of all tensors or shards after `update`, or now if `update` is None."""
        if update is None or update.base is not None:
            return self.weights.kinds
        return {key: kind for key, kind in update.kinds.items() if self._keeps(key, kind)}

    def tensors_after(self, update: Update | None) -> dict[str, TensorKind]:
        """Return dtype and shape of all whole tensors after `update`, or now if `update` is None."""
        if update is None or update.base is not None:
            return self.weights.tensors
        return {tensor_of(key): whole_kind(key, kind) for key, kind in self.kinds_after(update).items()}

    def layouts_after(self, update: Update | None) -> dict[str, Layout]:
        """Return the layout of each tensor after `update`, or now if `update` is None."""
        if update is None or update.base is not None:
            return self.weights.layouts
        return layouts({key: kind.shape for key, kind in self.kinds_after(update).items()})

    def _keeps(self, key: Name, kind: TensorKind) -> bool:
        return self.only is None or self.only.keeps(key, kind.shape)

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
        """Check that an update is newer than these weights, and of the same run, as :func:`check_order`."""
        check_order(update, self.identity, restart=restart)

    def check(self, update: Update) -> None:
        """Check that an update can be applied: decode each of its frames, and verify the digests.

        The changes that are decoded here are kept, as far as there is room, until the update is applied or dropped.

        Raises
        ------
        StateError
            The update needs another base than these weights.
        FrameError
            The update is damaged.
        LimitError
            The weights would be larger than `max_nbytes`.
        """
        self.drop()
        self.check_size(update)
        after, scratch = self.kinds_after(update), scratch_for(update)
        found = KeptChanges(update, self.weights.kinds)
        before = 0 if update.base is None else int.from_bytes(update.base_digest, "little")
        changes = [self._check_frames(update, key, scratch if key in after else None, found) for key in update.entries]
        if update.base is not None or len(after) == len(update.entries):  # else the digest covers other tensors, too
            check_digest(update, sum_of([before, update.absent, *changes]))
        self._kept = found

    def check_size(self, update: Update) -> None:
        """Check that an update fits these weights, and does not exceed `max_nbytes`; its frames are not read."""
        check_base(update, self.identity)
        if update.base is None:
            check_cover(update)
        elif not self._fits(update):
            raise StateError(
                "the names, dtypes or shapes of the update differ from those of its base: publish a snapshot, "
                "diff(..., full=True)"
            )
        self.check_nbytes(update)

    def check_nbytes(self, update: Update) -> None:
        """Raise LimitError if the weights after an update would be larger than `max_nbytes`."""
        nbytes = WeightsSize.of(self.kinds_after(update).values()).nbytes
        if self.max_nbytes is not None and nbytes > self.max_nbytes:
            raise LimitError(
                f"the weights after the update have {nbytes} bytes, more than max_nbytes, {self.max_nbytes}"
            )

    def _fits(self, update: Update) -> bool:
        """Return True if `update` is one of weights with the same tensors."""
        kinds, rest = self.weights.kinds, self.weights.rest
        size = WeightsSize.of(kinds.values())
        return update.total == (size.tensors + rest.tensors, size.nbytes + rest.nbytes) and all(
            kinds.get(key) == kind or not self._keeps(key, kind) for key, kind in update.kinds.items()
        )

    def piece_after(self, update: Update, name: Name, k: int, scratch: Bytes) -> tuple[Bytes, bytes]:
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

    def _check_frames(self, update: Update, key: Name, scratch: Bytes | None, found: KeptChanges) -> int:
        """Decode the frames of a tensor, and return what the update adds to the digest of the weights.

        If `scratch` is None, the tensor is not kept: the digests are those that the frames state.
        """
        kind = update.entries[key].kind
        change = 0 if kind.nbytes or update.base is not None else piece_digest(key, kind, 0, b"")
        for k, (begin, end) in enumerate(kind.spans):
            if (frame := update.frame(key, k)) is None:
                continue
            if update.base is not None:
                if scratch is not None:
                    with named(key):
                        found.add(key, k, find_changes(frame, self.weights[key].piece(k), kind.dtype, self.options))
                before, after = digests_in(frame)
                change += piece_digest(key, kind, k, after) - piece_digest(key, kind, k, before)
            elif scratch is not None:
                self.decode(update, key, k, scratch[: end - begin])
                change += piece_digest(key, kind, k, digest_of(scratch[: end - begin]))
        return change

    def decode(self, update: Update | None, name: Name, k: int, out: Bytes) -> None:
        """Write the values that piece `k` of a tensor has after `update` to `out`, which may be the piece itself.

        If `update` is None, write the current values of the piece.
        """
        frame = None if update is None else update.frame(name, k)
        changes = None if update is None else self._kept.of(update, name, k)
        if update is None or frame is None or changes is not None:
            out[:] = self.weights[name].piece(k)
            if changes is not None:
                changes.put(bits_of(out, self.weights[name].kind.dtype))
            return
        kind = update.entries[name].kind
        with named(name):
            if update.base is None:
                decode_full(frame, out, kind.dtype, self.options)
            else:
                decode_delta(frame, self.weights[name].piece(k), out, kind.dtype, self.options)

    def tensors(self, names: Iterable[str], update: Update | None, like: Any) -> Iterator[tuple[str, Any]]:
        """Yield names and new tensors with the values after `update`, or the current values if `update` is None.

        The weights are unchanged.

        Raises
        ------
        StateError
            The weights have changed since the first tensor was yielded.
        """
        changes = self._changes
        tensors, layouts, kinds = self.tensors_after(update), self.layouts_after(update), self.kinds_after(update)
        for name in names:
            self._check_unchanged(changes)
            whole = Box((0,) * len(tensors[name].shape), tensors[name].shape)
            if not layouts[name].covers(whole):
                raise StateError(f"the receiver keeps {name!r} in part, as its only= says: pass into=, or other only=")
            tensor, memory = new_tensor(tensors[name], like)
            target = BoxTarget(tensors[name], whole, tensor, memory)
            write_target(target, layouts[name], kinds, functools.partial(self.decode, update))
            self._check_unchanged(changes)  # another thread may have changed them meanwhile
            yield name, of_kind(tensor, like)
            del tensor, memory, target  # free this tensor before the next one is allocated

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
            target = self.allocate(self.kinds_after(update))
            for name, slot in target.items():
                for k in range(len(slot.digests)):
                    self.decode(update, name, k, slot.piece(k))
                slot.digests = slot.measure()
            self._note_rest(target, update)
            self.complete(target, update.run, update.version)

    def _overwrite(self, update: Update, *, resumed: bool) -> None:
        """Overwrite the weights with their values after `update`, or complete an interrupted call if `resumed`."""
        self._changes += 1
        for name, entry in update.entries.items():
            for k, (begin, end) in enumerate(entry.frames):
                if begin < end and name in self.weights:
                    self._overwrite_piece(update, name, k, resumed)
        self._note_rest(self.weights, update)
        self.complete(self.weights, update.run, update.version)
        self._applying = None

    def _note_rest(self, weights: Weights, update: Update) -> None:
        """Note the digest and the size of the tensors that are not kept."""
        if self.only is not None:
            weights.rest = Rest.of(update, weights.pieces)
            parts = update.parts.parts if isinstance(update, PartedUpdate) else ()
            self.unneeded = {rank: part.digest for rank, part in enumerate(parts) if self._skips(update, rank)}

    def _skips(self, update: Update, rank: int) -> bool:
        """Return True if it is known that no tensor of a part is kept."""
        if update.base is not None:
            return rank in self.unneeded
        return not any(self._keeps(key, kind) for key, kind in cast(PartedUpdate, update).found[rank].kinds.items())

    def _overwrite_piece(self, update: Update, name: Name, k: int, resumed: bool) -> None:
        slot = self.weights[name]
        out = slot.piece(k)
        if update.base is None:
            self.decode(update, name, k, out)
            slot.digests[k] = digest_of(out)
            return
        after = digests_in(_frame(update, name, k))[1]
        found = digest_of(out) if resumed else slot.digests[k]
        if found == slot.digests[k] != after:
            changes = self._kept.of(update, name, k)
            self.write(out, lambda scratch: self.decode(update, name, k, scratch), changes)
        elif found != after and not self.restore(out, lambda saved: digest_of(saved) == after):
            raise StateError(f"{name!r} was damaged by an interrupted update: start from a snapshot")
        slot.digests[k] = after

    # Storage of the weights: in memory here. FolderBase in folder.py overrides the methods below to store the weights
    # in files, and SharedFolderBase in shared_folder.py to share the files.

    def in_place(self, update: Update) -> bool:
        """Return True if applying the update overwrites the current weights, False if it writes to new memory."""
        return update.base is not None or self.kinds_after(update) == self.weights.kinds

    def prepare(self, update: Update) -> None:
        """Save what is needed to complete an update in place. An exception leaves the weights unchanged."""

    def allocate(self, kinds: Mapping[Name, TensorKind]) -> Weights:
        """Allocate memory for tensors of these kinds."""
        return allocated(kinds)

    def write(self, out: Bytes, decode: Callable[[Bytes], None], changes: DeltaChanges | None) -> None:
        """Overwrite the piece `out` with its new value; call `decode` with the buffer to write the new value to.

        `changes` are those of the piece, if they are kept.
        """
        decode(out)

    def restore(self, out: Bytes, is_right: Callable[[Bytes], bool]) -> bool:
        """Complete the piece `out`, which an interrupted write has partly overwritten; return False if impossible."""
        return False

    def complete(self, weights: Weights, run: bytes | None, version: int) -> None:
        """Replace the weights and the version of this object, and the run if `run` is known."""
        self._changes += 1
        self._kept = KeptChanges()
        self.weights, self.run, self.version = weights, run or self.run, version

    def preparing(self) -> AbstractContextManager[None]:
        """Context in which an update is read and checked, by one receiver of a shared folder at a time."""
        return nullcontext()

    def stored(self, heads: Sequence[UpdateHead]) -> tuple[int, Update] | None:
        """Return the last update of a chain whose values a receiver of a shared folder has stored, and its index."""
        return None

    def drop(self) -> None:
        """Release the values or changes of a checked update that is not applied."""
        self._kept = KeptChanges()

    def close(self) -> None:
        """Release the files of the weights; weights in memory have none."""


_bases: "weakref.WeakSet[Base]" = weakref.WeakSet()


def _after_fork() -> None:
    """Replace the locks, which threads of the parent may hold."""
    for base in _bases:
        base.lock, base.turn = threading.RLock(), threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def _frame(update: Update, name: Name, k: int) -> Bytes:
    frame = update.frame(name, k)
    assert frame is not None
    return frame
