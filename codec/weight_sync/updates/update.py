"""Format of an update: a header, an index of the changed tensors, and a frame for each changed piece.

docs/spec/weight-updates.md specifies the bytes.

Every byte is protected: header and index by a BLAKE2b digest, each frame by the checksum in the frame.
"""

import functools
import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from struct import Struct
from typing import Any, NamedTuple, cast

import numpy as np

from codec._c.library import DTYPE_NAMES, DTYPES
from codec.errors import ChecksumError, FrameError, Status, UnsupportedError
from codec.files.signing import SigningKey
from codec.tensors.view import fetch, view_bytes
from codec.weight_sync.updates.identity import MAX_VERSION, NO_DIGEST, UpdateHead
from codec.weight_sync.updates.kinds import Bytes, Span, TensorKind, WeightsSize
from codec.weight_sync.updates.mapping import mapped
from codec.weight_sync.updates.shards import Box, Name, Shard, tensor_of
from codec.weight_sync.updates.signatures import check_signature, signature_in

MAGIC = b"\x89CWU\r\n\x1a\n"
FORMAT = 4
MAX_RANK = 8

_MOST_VALUES = 1 << 60  # limit of the product of the dimensions that are not 0: without it, no array has such a shape
_SHARD = 0x80  # bit of the rank of an entry that describes a shard
_NO_BASE = (1 << 64) - 1
_HEAD = Struct("<8sIIQQQQQQ16s16s16s")
HEAD_NBYTES = _HEAD.size + 16  # size of the header in bytes, with the digest of header and index
_NAME, _KIND, _SIZE, _LENGTH = Struct("<H"), Struct("<BB"), Struct("<Q"), Struct("<I")


class TensorEntry(NamedTuple):
    """Entry of a tensor in the index of an update."""

    kind: TensorKind
    # Byte range of each piece's frame in the update. An empty range: the piece is unchanged.
    frames: tuple[Span, ...]


class Update:
    """Update of weights from one version to a later one, or snapshot of a version.

    The constructor checks header and index; :meth:`WeightReceiver.stage` checks the frames.

    Parameters
    ----------
    data : bytes, buffer, array or tensor
        Bytes of the whole update. Data in host memory are not copied, and must not change.

    Attributes
    ----------
    data : memoryview
        Bytes of the update, to write to a file or send over a connection.
    nbytes : int
        Size of the update in bytes.
    signature : bytes or None
        Signature of a trainer with ``sign=``, which only :class:`WeightReceiver` with ``verify=`` checks.
    run : bytes or None
        Run of the trainer, 16 random bytes: each sender that begins with new weights begins a run. None: the update was
        made from files.
    version : int
        Version of the weights after the update.
    base : int or None
        Version to which the update must be applied. None: the update is a snapshot, which needs no base.
    tensors : dict of str to TensorKind
        ``dtype`` and ``shape`` of the tensors that the update changes; of all tensors for a snapshot.
    total : WeightsSize
        Number of all ``tensors`` of the weights, including unchanged ones, and bytes of their values, ``nbytes``.
    base_digest, digest : bytes
        Digests of the weights before and after the update, 16 bytes. `base_digest` of a snapshot is all zeros.
    sha256 : bytes
        SHA-256 of the update's bytes, 32 bytes.

    Raises
    ------
    FrameError
        The bytes are not an update. ChecksumError, a subclass: they are damaged. UnsupportedError, a subclass: they
        have another format version.

    See Also
    --------
    WeightSender.diff, WeightReceiver.apply

    Examples
    --------
    >>> sender = codec.WeightSender({"w": np.zeros(5, np.float32), "b": np.zeros(2, np.float32)})
    >>> update = sender.diff({"w": np.ones(5, np.float32), "b": np.zeros(2, np.float32)})
    >>> received = codec.Update(bytes(update.data))
    >>> received.base, received.version, list(received.tensors)
    (0, 1, ['w'])
    """

    __slots__ = ("_sha256", "entries", "head", "memory", "signature", "total")
    absent = 0  # number that parts which are not at hand add to the digest of the weights
    nparts = 0  # number of parts

    def __init__(self, data: Any) -> None:
        self.memory: Bytes = fetch("an update", view_bytes(data)).array()
        self._sha256: bytes | None = None
        self.head, self.total, self.entries, self.signature = parse(self.memory)

    @classmethod
    def open(cls, path: str | PathLike[str]) -> "Update":
        """Open the update in a file, which is mapped to memory. The file must not change.

        Raises
        ------
        ArgumentError
            The file cannot be read.
        FrameError
            The file is not an update.
        """
        try:
            return cls(mapped(path))
        except FrameError as e:
            e.of(os.fspath(path))
            raise

    @property
    def data(self) -> memoryview:
        """Bytes of the update."""
        return self.memory.data

    @property
    def nbytes(self) -> int:
        """Size of the update in bytes."""
        return len(self.memory)

    @property
    def sha256(self) -> bytes:
        """SHA-256 of the bytes, by which receivers recognize a file that a mirror has sent."""
        if self._sha256 is None:
            self._sha256 = hashlib.sha256(self.data).digest()
        return self._sha256

    @property
    def run(self) -> bytes | None:
        """Run of the trainer, 16 random bytes; None for an update that was made from files."""
        return self.head.run

    @property
    def version(self) -> int:
        """Version of the weights after the update."""
        return self.head.version

    @property
    def base(self) -> int | None:
        """Version to which the update must be applied; None for a snapshot."""
        return self.head.base

    @property
    def base_digest(self) -> bytes:
        """Digest of the weights before the update, 16 bytes; all zeros for a snapshot."""
        return self.head.base_digest

    @property
    def digest(self) -> bytes:
        """Digest of the weights after the update, 16 bytes."""
        return self.head.digest

    @property
    def tensors(self) -> dict[str, TensorKind]:
        """Dtype and shape of the tensors that the update changes, by name; of all tensors for a snapshot."""
        return {tensor_of(key): whole_kind(key, entry.kind) for key, entry in self.entries.items()}

    @property
    def kinds(self) -> dict[Name, TensorKind]:
        """Dtype and shape of the entries: of whole tensors, or of their shards."""
        return {key: entry.kind for key, entry in self.entries.items()}

    def frame(self, name: Name, piece: int) -> Bytes | None:
        """Return the frame of a piece; None if the piece is unchanged."""
        if (entry := self.entries.get(name)) is None:
            return None
        begin, end = entry.frames[piece]
        return self.memory[begin:end] if begin < end else None

    def chunks(self) -> Iterator[memoryview | bytes]:
        """Yield the bytes of an update of the same values in one file."""
        yield self.data

    def check_signature(self, key: SigningKey) -> None:
        """Raise FrameError if the update has no signature, or that of another key."""
        check_signature(self.data, self.signature, key)

    def fits(self, kinds: Mapping[Name, TensorKind]) -> bool:
        """Return True if the update is one of weights with tensors of these kinds."""
        return self.total == WeightsSize.of(kinds.values()) and all(
            kinds.get(name) == entry.kind for name, entry in self.entries.items()
        )

    def __repr__(self) -> str:
        kind = "snapshot" if self.base is None else f"from version {self.base}"
        changed = f"{len(self.entries)} of {self.total.tensors} tensors changed"
        return f"<codec.Update to version {self.version}, {kind}, {changed}, {self.nbytes} bytes>"


def head_and_index(
    head: UpdateHead, total: WeightsSize, tensors: Sequence[tuple[Name, TensorKind, Sequence[int]]]
) -> bytes:
    """Return the header and the index of an update.

    Parameters
    ----------
    head : UpdateHead
        Versions and digests.
    total : WeightsSize
        Size of the weights.
    tensors : sequence of (name, kind, frame sizes)
        Tensors in the order of their frames. Frame sizes are in bytes, one per piece; 0 for an unchanged piece.
    """
    index = bytearray()
    for name, kind, sizes in tensors:
        index += entry_head(name, kind) + b"".join(map(_LENGTH.pack, sizes))
    nbytes = HEAD_NBYTES + len(index) + sum(sum(sizes) for _, _, sizes in tensors)
    base = _NO_BASE if head.base is None else head.base
    numbers = MAGIC, FORMAT, len(tensors), len(index), nbytes, head.version, base, *total
    fixed = _HEAD.pack(*numbers, head.base_digest, head.digest, head.run or NO_DIGEST)
    return fixed + _check(fixed, index) + index


def index_nbytes(tensors: Mapping[Name, TensorKind]) -> int:
    """Return the size in bytes of the header and the index of an update of these tensors."""
    return HEAD_NBYTES + sum(len(entry_head(name, kind)) + _LENGTH.size * kind.pieces for name, kind in tensors.items())


@functools.lru_cache(1 << 17)
def entry_head(key: Name, kind: TensorKind) -> bytes:
    """Return the first bytes of an entry: name, dtype and shape; of a shard, also its tensor's shape, and offsets."""
    encoded, rank = tensor_of(key).encode(), len(kind.shape)
    numbers = kind.shape if isinstance(key, str) else (*kind.shape, *key.shape, *key.offsets)
    fixed = _NAME.pack(len(encoded)) + encoded
    fixed += _KIND.pack(DTYPES[kind.dtype], rank if isinstance(key, str) else rank | _SHARD)
    return fixed + b"".join(map(_SIZE.pack, numbers))


def whole_kind(key: Name, kind: TensorKind) -> TensorKind:
    """Return the dtype and shape of the whole tensor of an entry."""
    return kind if isinstance(key, str) else TensorKind(kind.dtype, key.shape)


def parse(data: Bytes) -> tuple[UpdateHead, WeightsSize, dict[Name, TensorEntry], bytes | None]:
    """Parse and check the header and the index of an update, and return them with the signature.

    Raises
    ------
    FrameError
        The bytes are not an update.
    """
    if len(data) < HEAD_NBYTES:
        if not MAGIC.startswith(data[: len(MAGIC)].tobytes()):
            raise FrameError("not an update of weights: the bytes do not begin with its magic", Status.BAD_MAGIC)
        raise _truncated(len(data), HEAD_NBYTES)
    fixed = data[: _HEAD.size].tobytes()
    magic, version, count, index_size, nbytes, new, base, *sizes, base_digest, digest, run = cast(
        tuple[bytes, int, int, int, int, int, int, int, int, bytes, bytes, bytes], _HEAD.unpack(fixed)
    )
    if magic != MAGIC:
        raise FrameError("not an update of weights: the bytes do not begin with its magic", Status.BAD_MAGIC)
    if version != FORMAT:
        raise UnsupportedError(f"the update has format {version}, but this library reads format {FORMAT}", offset=8)
    if index_size > len(data) - HEAD_NBYTES:
        raise _truncated(len(data), HEAD_NBYTES + index_size)
    index = data[HEAD_NBYTES : HEAD_NBYTES + index_size].tobytes()
    if data[_HEAD.size : HEAD_NBYTES].tobytes() != _check(fixed, index):
        raise ChecksumError("the header or index of the update is damaged: its digest does not match", Status.CHECKSUM)
    if nbytes > len(data):
        raise _truncated(len(data), nbytes)
    signature = signature_in(data[nbytes:].data) if nbytes < len(data) else None
    if nbytes < len(data) and signature is None:
        raise FrameError(
            f"bytes follow the end of the update: it has {nbytes} bytes, but {len(data)} were given",
            Status.TRAILING,
            nbytes,
        )
    if new > MAX_VERSION or (base != _NO_BASE and base >= new):
        raise _invalid(f"version {new} does not follow base version {base}")
    try:
        entries = _entries(index, count, HEAD_NBYTES + index_size)
    except (IndexError, ValueError) as e:
        raise _invalid(str(e)) from None
    end = max((end for entry in entries.values() for _, end in entry.frames), default=HEAD_NBYTES + index_size)
    if end != nbytes:
        raise _invalid(f"the frames end at byte {end}, but the update at byte {nbytes}")
    total, listed = WeightsSize(*sizes), WeightsSize.of([entry.kind for entry in entries.values()])
    if base == _NO_BASE:
        if base_digest != NO_DIGEST or any(a == b for e in entries.values() for a, b in e.frames):
            raise _invalid("a snapshot has the digest of a base, or lacks frames")
        if total != listed:
            raise _invalid("the sizes of the weights are not those of the snapshot's tensors")
    elif listed.tensors > total.tensors or listed.nbytes > total.nbytes:
        raise _invalid("the tensors that the update changes are larger than the weights")
    elif not all(any(a < b for a, b in e.frames) for e in entries.values()):
        raise _invalid("a tensor of the index is unchanged")
    known = None if run == NO_DIGEST else run
    return UpdateHead(known, new, None if base == _NO_BASE else base, base_digest, digest), total, entries, signature


def _entries(index: bytes, count: int, at: int) -> dict[Name, TensorEntry]:
    """Parse an index of `count` tensors; frames begin at byte `at` of the update. Raise ValueError if invalid."""
    entries: dict[Name, TensorEntry] = {}
    p = 0

    def take(form: Struct) -> tuple[int, ...]:
        nonlocal p
        if form.size > len(index) - p:
            raise ValueError("the index ends inside an entry")
        p += form.size
        return form.unpack_from(index, p - form.size)

    for _ in range(count):
        (length,) = take(_NAME)
        encoded, p = index[p : p + length], p + length
        name = encoded.decode()
        dtype, given = take(_KIND)
        rank = given & ~_SHARD
        if len(encoded) != length or not length or dtype not in DTYPE_NAMES or rank > MAX_RANK:
            raise ValueError(f"tensor {name!r:.120} has an invalid name, dtype or number of dimensions")
        shape, *more = (tuple(take(_SIZE)[0] for _ in range(rank)) for _ in range(3 if given & _SHARD else 1))
        if any(math.prod(filter(None, sizes)) >= _MOST_VALUES for sizes in (shape, *more[:1])):
            raise ValueError(f"tensor {name!r:.120} has more values than a tensor can have")
        key, kind = Shard(name, *more) if more else name, TensorKind(DTYPE_NAMES[dtype], shape)
        if key in entries or (isinstance(key, Shard) and not key.whole.holds(Box(key.offsets, shape))):
            raise ValueError(f"tensor {key!r:.120} occurs twice, or is not a box of its tensor")
        pieces = kind.pieces
        if pieces * _LENGTH.size > len(index) - p:
            raise ValueError("the index ends inside an entry")
        frames: list[Span] = []
        for size in np.frombuffer(index, "<u4", pieces, p).tolist() if pieces else ():
            frames.append((at, at + size))
            at += size
        p += pieces * _LENGTH.size
        entries[key] = TensorEntry(kind, tuple(frames))
    if p != len(index):
        raise ValueError("the index is longer than its entries")
    return entries


def _check(fixed: bytes, index: bytes | bytearray) -> bytes:
    h = hashlib.blake2b(fixed, digest_size=16)
    h.update(index)
    return h.digest()


def _truncated(found: int, expected: int) -> FrameError:
    message = f"the update is truncated: it needs {expected} bytes, but {found} were given"
    return FrameError(message, Status.TRUNCATED, found, found, expected)


def _invalid(why: str) -> FrameError:
    return FrameError(f"the index of the update is invalid: {why}", Status.BAD_HEADER)
