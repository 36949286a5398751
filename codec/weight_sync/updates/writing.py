"""Encode an update: read tensors one by one, and write each frame as soon as it is encoded."""

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from io import SEEK_END, BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from codec._options import CallOptions
from codec.errors import ArgumentError
from codec.files.replacing import replaced
from codec.files.signing import SigningKey
from codec.tensors.view import TensorView
from codec.weight_sync.updates.coding import digest_of, digests_in, encode_deltas, encode_full
from codec.weight_sync.updates.digests import weights_digest
from codec.weight_sync.updates.identity import NO_DIGEST, UpdateHead
from codec.weight_sync.updates.kinds import Bytes, TensorKind, WeightsSize
from codec.weight_sync.updates.shards import Name, check_name
from codec.weight_sync.updates.signatures import signed
from codec.weight_sync.updates.update import Update, head_and_index, index_nbytes
from codec.weight_sync.updates.weights import (
    Given,
    Slot,
    Weights,
    is_streamed,
    items,
    kind_of,
    kinds_of,
    pieces_of,
    view_of,
)

BATCH_NBYTES = 1 << 26  # bytes of tensor values after which waiting pieces are encoded, in one call
BATCH_PIECES = 1024  # number of pieces after which waiting pieces are encoded
SMALL_NBYTES = 1 << 16  # maximum size of tensors that are compared with the base before they are encoded
_NOTHING: Bytes = np.empty(0, np.uint8)

Progress = Callable[[int, int], object]  # function of (bytes of the tensors read so far, bytes of all tensors)


class TensorPiece(NamedTuple):
    """Piece of a tensor that waits to be encoded."""

    name: Name
    new: Bytes
    old: Bytes  # piece of the base; empty in a snapshot
    old_digest: bytes


class Encoder:
    """Encoder and writer of one update. Frames are written in the order in which tensors are added.

    Parameters
    ----------
    kinds : mapping of str to TensorKind, or None
        Dtype and shape of all tensors. None, for snapshots only: those of the tensors that are added.
    base : Weights or None
        Weights before the update. None: write a snapshot.
    file : binary file
        Seekable file. Frames are written first; :meth:`finish` then writes header and index in front of them.
    options : CallOptions, optional
        Engine and number of threads.
    """

    def __init__(
        self, kinds: Mapping[Name, TensorKind] | None, base: Weights | None, file: BinaryIO, options: Any
    ) -> None:
        self._given, self._base, self._file, self._options = kinds, base, file, options
        self._kinds = dict[Name, TensorKind]() if kinds is None else dict(kinds)
        self._waiting: list[TensorPiece] = []
        self._nbytes = 0  # bytes of waiting pieces
        self._sizes: dict[Name, list[int]] = {}
        self._digests: dict[Name, list[bytes]] = {}
        # finish() moves the frames if the index does not end here: it lists the tensors that have changed
        self._begin = 0 if kinds is None else index_nbytes(kinds)
        file.seek(self._begin)

    def add(self, name: Name, tensor: Any) -> int:
        """Add a tensor, and return its size in bytes. Its memory must not change before :meth:`flush`."""
        v = view_of(name, tensor)
        if name in self._sizes:
            raise ArgumentError(f"tensor {name!r} was given twice")
        if self._given is None:
            self._kinds[name] = kind_of(name, v)
        if (known := self._kinds.get(name)) is None or kind_of(name, v) != known:
            was = "no such tensor" if known is None else str(known)
            raise ArgumentError(
                f"tensor {name!r} is {TensorKind(v.dtype, v.shape)}, but the base has {was}: write a snapshot, "
                "diff(..., full=True), to change names, dtypes or shapes"
            )
        old = None if self._base is None else self._base[name]
        if old is not None and _is_equal(v, old):
            self._sizes[name], self._digests[name] = [0] * len(old.digests), old.digests
            return v.nbytes
        self._sizes[name], self._digests[name] = [], []
        for k, new in enumerate(pieces_of(v)):
            self._waiting.append(
                TensorPiece(name, new, *((_NOTHING, b"") if old is None else (old.piece(k), old.digests[k])))
            )
            self._nbytes += len(new)
            if self._nbytes >= BATCH_NBYTES or len(self._waiting) >= BATCH_PIECES:
                self.flush()
        if v.nbytes > BATCH_NBYTES:
            self.flush()  # pieces that wait keep the whole copy of a tensor that is not contiguous
        return v.nbytes

    def flush(self) -> None:
        """Encode all waiting pieces, and write their frames."""
        waiting, self._waiting, self._nbytes = self._waiting, [], 0
        dtypes = [self._kinds[p.name].dtype for p in waiting]
        new = [p.new for p in waiting]
        if self._base is None:
            frames = encode_full(new, dtypes, self._options)
            digests = [digest_of(x) for x in new]
        else:
            frames = encode_deltas(new, [p.old for p in waiting], dtypes, self._options)
            digests = [digests_in(frame)[1] for frame in frames]
        for piece, frame, digest in zip(waiting, frames, digests, strict=True):
            self._write(piece.name, frame, digest, piece.old_digest)

    def put(self, name: Name, frames: Iterable[tuple[bytes | None, bytes]]) -> None:
        """Write frames of a tensor that are encoded already; an alternative to :meth:`add`.

        Parameters
        ----------
        name : str
            Name of the tensor.
        frames : iterable of (bytes or None, bytes)
            For each piece its frame, None if it is unchanged, and the digest of the piece in the base.
        """
        self.flush()
        self._sizes[name], self._digests[name] = [], []
        for frame, old_digest in frames:
            digest = old_digest if frame is None else digests_in(frame)[1]
            self._write(name, frame or b"", digest, old_digest)

    def _write(self, name: Name, frame: bytes, digest: bytes, old_digest: bytes) -> None:
        frame = b"" if digest == old_digest else frame
        self._file.write(frame)
        self._sizes[name].append(len(frame))
        self._digests[name].append(digest)

    def finish(self, version: int, base: int | None, run: bytes | None = None) -> bytes:
        """Write header and index, and return the digest of the weights after the update.

        Raises
        ------
        ArgumentError
            A tensor of `kinds` was not added.
        """
        self.flush()
        if missing := self._kinds.keys() - self._sizes.keys():
            names = ", ".join(sorted(map(repr, missing))[:5])
            raise ArgumentError(
                f"{len(missing)} tensors of the base are missing: {names}. Pass all tensors, in any order"
            )
        digest = weights_digest({name: (self._kinds[name], d) for name, d in self._digests.items()})
        before = NO_DIGEST if self._base is None else self._base.digest()
        changed = {name: sizes for name, sizes in self._sizes.items() if self._base is None or any(sizes)}
        index = head_and_index(
            UpdateHead(run, version, base, before, digest),
            WeightsSize.of(self._kinds.values()),
            [(name, self._kinds[name], sizes) for name, sizes in changed.items()],
        )
        _move(self._file, self._begin, self._file.tell(), len(index) - self._begin)
        self._file.seek(0)
        self._file.write(index)
        return digest


def _is_equal(v: TensorView, old: Slot) -> bool:
    """Return True if a tensor is a view of the base, or small and equal to the base, which encoding finds later."""
    if v.device != "cpu":
        return False
    return v.address == old.view.address or (v.nbytes <= SMALL_NBYTES and np.array_equal(v.array(), old.memory))


def _move(file: BinaryIO, begin: int, end: int, by: int) -> None:
    """Move the bytes from `begin` to the end of a file, `end`, by `by` bytes towards its end, or its begin if `by` < 0.

    They are moved in blocks, in an order that overwrites no byte before it is read.
    """
    starts = range(begin, end, BATCH_NBYTES) if by else ()
    for at in starts if by < 0 else reversed(starts):
        file.seek(at)
        block = file.read(min(BATCH_NBYTES, end - at))
        file.seek(at + by)
        file.write(block)
    if by < 0:
        file.truncate(end + by)


def write_update(
    given: Given,
    version: int,
    base: Weights | None,
    base_version: int | None,
    *,
    file: str | PathLike[str] | None,
    options: CallOptions | None,
    progress: Progress | None = None,
    run: bytes | None = None,
    key: SigningKey | None = None,
) -> Update:
    """Encode an update, to a file or in memory.

    Parameters
    ----------
    given : mapping or iterable of (str, tensor)
        All tensors of the new weights, in any order. An iterable is read once, and each of its tensors is encoded
        before the next one is requested, so that a generator may use one buffer for all tensors.
    version, base_version : int
        Versions after and before the update.
    base : Weights or None
        Weights before the update. None: encode a snapshot.
    file : path or None
        File to write, which appears once it is complete. None: return the update in memory.
    options : CallOptions, optional
        Engine and number of threads.
    progress : callable, optional
        Called after each tensor with the number of bytes read so far, and with the total; in a snapshot of an
        iterable, the total is the number of bytes read so far.
    run : bytes or None
        Run of the trainer; None: the update belongs to no run.
    key : SigningKey, optional
        Key that signs the update.
    """
    failed: list[OSError] = []
    pairs, streamed = items(given), is_streamed(given)
    if streamed:
        pairs = _noting_errors(pairs, failed)
    kinds = (None if streamed else kinds_of(given)) if base is None else base.kinds
    total, done = sum(kind.nbytes for kind in (kinds or {}).values()), 0

    def encode_to(target: BinaryIO) -> None:
        nonlocal done
        encoder = Encoder(kinds, base, target, options)
        for name, tensor in pairs:
            done += encoder.add(check_name(name), tensor)
            if streamed:
                encoder.flush()  # a generator may write its next tensor to the same memory
            del tensor  # free this tensor before a generator gathers the next one
            if progress is not None:
                progress(done, max(done, total))
        encoder.finish(version, base_version if base is not None else None, run)

    if file is None:
        memory = BytesIO()
        encode_to(memory)
        if key is not None:
            with memory.getbuffer() as data:
                signature = signed(data, key)
            memory.seek(0, SEEK_END)
            memory.write(signature)
        return Update(memory.getbuffer())
    try:
        with replaced(Path(file)) as target:
            encode_to(target)
            target.flush()
            if key is not None:
                with mmap.mmap(target.fileno(), 0, prot=mmap.PROT_READ) as data:
                    signature = signed(data, key)
                target.seek(0, SEEK_END)
                target.write(signature)
                target.flush()
            return Update(mmap.mmap(target.fileno(), 0, prot=mmap.PROT_READ))  # what readers refuse, replaces nothing
    except ArgumentError:
        if failed:
            raise failed[0] from None
        raise


def _noting_errors(pairs: Iterable[tuple[Name, Any]], failed: list[OSError]) -> Iterator[tuple[Name, Any]]:
    """Yield pairs; note an OSError of the iterable, such as a lost connection, which is none of the written file."""
    try:
        yield from pairs
    except OSError as e:
        failed.append(e)
        raise


def remove_temporary(folder: Path, is_own: Callable[[str], object]) -> None:
    """Delete temporary files that a killed process has left in a folder. No other process may write to the folder.

    Parameters
    ----------
    folder : path
        The folder.
    is_own : callable
        Function that returns True for the names of the files that were being written.
    """
    for path in folder.glob(".*.tmp"):
        if is_own(path.name[1:-4].rpartition(".")[0]):
            with suppress(OSError):
                path.unlink()
