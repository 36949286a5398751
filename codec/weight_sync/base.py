"""Weights of one version in memory, to which updates are applied."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from codec._options import CallOptions
from codec.arguments import whole
from codec.errors import ChecksumError, CodecError, LimitError, StateError
from codec.tensors.jax_arrays import of_kind
from codec.weight_sync.coding import decode_delta, decode_full, digest_of, digests_in
from codec.weight_sync.update import MAX_VERSION, PIECE_NBYTES, Bytes, Kind, Update, weights_digest
from codec.weight_sync.weights import Given, Slot, Weights, allocated, copied, new_tensor


class Base:
    """Weights of one version. An update is applied to all tensors, or to none.

    Parameters
    ----------
    max_nbytes : int, optional
        Maximum size of all tensors together, in bytes.
    options : CallOptions, optional
        Engine and number of threads for encoding and decoding.

    Attributes
    ----------
    version : int or None
        Version of the weights; None before the first weights.
    weights : Weights
        Tensors of this version, with digests.
    """

    def __init__(self, max_nbytes: int | None = None, options: CallOptions | None = None) -> None:
        self.max_nbytes = None if max_nbytes is None else whole("max_nbytes", max_nbytes, 1)
        self.options = options
        self.version: int | None = None
        self.weights = Weights()
        self._applying: Update | None = None  # update that an exception interrupted while it overwrote the weights

    def fill(self, given: Given, version: int) -> None:
        """Copy tensors into this object as its weights, and set their version."""
        version = whole("version", version, 0, MAX_VERSION)
        self.complete(copied(given), version)

    def settle(self) -> None:
        """Complete an update that was interrupted by an exception such as KeyboardInterrupt."""
        if self._applying is not None:
            self.apply(self._applying)

    def check(self, update: Update) -> None:
        """Check that an update can be applied: decode each of its frames into scratch memory, and verify the digests.

        Raises
        ------
        StateError
            The update needs another base, is older than these weights, or was applied already.
        FrameError
            The update is damaged.
        LimitError
            The weights would be larger than `max_nbytes`.
        """
        if update.digest == self.weights.digest() and update.version == self.version:
            raise StateError(f"the update to version {update.version} was applied already; the weights are unchanged")
        if self.version is not None and update.version <= self.version:
            raise StateError(
                f"the update to version {update.version} is not newer than the current version, {self.version}"
            )
        if update.base is not None and (update.base != self.version or update.base_digest != self.weights.digest()):
            here = "there are no weights yet" if self.version is None else f"the current version is {self.version}"
            same = " with other values" if update.base == self.version else ""
            raise StateError(
                f"the update needs version {update.base} as its base, but {here}{same}: apply the missing updates "
                "first, or a snapshot"
            )
        if update.base is not None and update.tensors != self.weights.kinds:
            raise StateError(
                "the names, dtypes or shapes of the update differ from those of its base: publish a snapshot, "
                "diff(..., full=True)"
            )
        total = sum(kind.nbytes for kind in update.tensors.values())
        if self.max_nbytes is not None and total > self.max_nbytes:
            raise LimitError(
                f"the weights after the update have {total} bytes, more than max_nbytes, {self.max_nbytes}"
            )
        largest = max((entry.kind.nbytes for entry in update.entries.values()), default=0)
        scratch = np.empty(min(largest, PIECE_NBYTES), np.uint8)
        found = {n: (entry.kind, self._check_frames(update, n, scratch)) for n, entry in update.entries.items()}
        if weights_digest(found) != update.digest:
            raise ChecksumError("the weights after the update do not have the digest that the update names")

    def _check_frames(self, update: Update, name: str, scratch: Bytes) -> list[bytes]:
        """Decode the frames of a tensor, and return the digests of its pieces after the update."""
        digests = list[bytes]()
        for k, (begin, end) in enumerate(update.entries[name].kind.spans):
            frame = update.frame(name, k)
            if frame is None:
                digests.append(self.weights[name].digests[k])
                continue
            out = scratch[: end - begin]
            self.decode(update, name, k, out)
            digests.append(digest_of(out) if update.base is None else digests_in(frame)[1])
        return digests

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
        """
        for name in names:
            kind = self.weights[name].kind if update is None else update.entries[name].kind
            tensor, memory = new_tensor(kind, like)
            for k, (begin, end) in enumerate(kind.spans):
                self.decode(update, name, k, memory[begin:end])
            yield name, of_kind(tensor, like)
            del tensor, memory  # free this tensor before the next one is allocated

    def apply(self, update: Update) -> None:
        """Apply an update that :meth:`check` has accepted. If a call is interrupted, a second call completes it."""
        resumed = self._applying is not None
        self._applying = update
        target = self.weights if self.in_place(update) else self.allocate(update.tensors)
        for name, entry in update.entries.items():
            for k, (begin, end) in enumerate(entry.frames):
                if begin < end:
                    self._apply_piece(update, name, k, target[name], resumed)
        self.complete(target, update.version)
        self._applying = None

    def _apply_piece(self, update: Update, name: str, k: int, slot: Slot, resumed: bool) -> None:
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
    # store the weights in files.

    def in_place(self, update: Update) -> bool:
        """Return True if applying the update overwrites the current weights, False if it writes to new memory."""
        return update.tensors == self.weights.kinds

    def allocate(self, kinds: Mapping[str, Kind]) -> Weights:
        """Allocate memory for tensors of these kinds."""
        return allocated(kinds)

    def write(self, out: Bytes, decode: Callable[[Bytes], None]) -> None:
        """Overwrite the piece `out` with its new value; call `decode` with the buffer to write the new value to."""
        decode(out)

    def restore(self, out: Bytes, is_right: Callable[[Bytes], bool]) -> bool:
        """Complete the piece `out`, which an interrupted write has partly overwritten; return False if impossible."""
        return False

    def complete(self, weights: Weights, version: int) -> None:
        """Replace the weights and the version of this object."""
        self.weights, self.version = weights, version

    def close(self) -> None:
        """Release the files of the weights; weights in memory have none."""


def _frame(update: Update, name: str, k: int) -> Bytes:
    frame = update.frame(name, k)
    assert frame is not None
    return frame
