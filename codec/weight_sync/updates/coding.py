"""Encode and decode pieces of tensors: as Delta frames in updates, and as Lossless frames in snapshots."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from codec import delta
from codec._c.library import DTYPES, UNSIGNED, lib
from codec._options import CallOptions
from codec.batch import encode_many
from codec.decoding import decode
from codec.delta import DeltaChanges, compose_deltas
from codec.errors import FrameError, Status
from codec.inspection import digest, inspect, read_header
from codec.specs import Delta, Lossless, Spec
from codec.tensors.view import view_bytes
from codec.tensors.wrapper import View, view

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_CODECS: dict[type[Spec], int] = {Delta: lib.CODEC_DELTA, Lossless: lib.CODEC_LOSSLESS}


def digest_of(piece: Bytes) -> bytes:
    """Return the digest of a piece, 8 bytes, as :class:`codec.Delta` frames store it."""
    return digest(piece).to_bytes(8, "little")


def digests_in(frame: Any) -> tuple[bytes, bytes]:
    """Return the digests of base and result that a :class:`codec.Delta` frame stores, 8 bytes each."""
    v = view_bytes(frame)
    info = read_header(v)
    if info.spec.codec != lib.CODEC_DELTA or v.nbytes < info.side_offset + info.side_nbytes:
        raise FrameError("a frame of the update is not one of Delta, or is truncated", Status.BAD_HEADER)
    return info.base_digest.to_bytes(8, "little"), info.result_digest.to_bytes(8, "little")


def encode_deltas(
    pieces: Sequence[Bytes], bases: Sequence[Bytes], dtypes: Sequence[str], options: CallOptions | None
) -> list[bytes]:
    """Encode the differences of pieces from their bases as Delta frames."""
    new, old = ([_values(x, dtype) for x, dtype in zip(xs, dtypes, strict=True)] for xs in (pieces, bases))
    return encode_many(new, Delta(), base=old, options=options)


def encode_full(pieces: Sequence[Bytes], dtypes: Sequence[str], options: CallOptions | None) -> list[bytes]:
    """Encode pieces as Lossless frames, which need no base."""
    return encode_many(
        [_values(x, dtype) for x, dtype in zip(pieces, dtypes, strict=True)], Lossless(), options=options
    )


def decode_delta(frame: Bytes, base: Bytes, out: Bytes, dtype: str, options: CallOptions | None) -> None:
    """Decode a Delta frame of a piece; `out` may be `base`. Both are unchanged after an error."""
    _check(frame, Delta, dtype, len(out))
    decode(frame, base=bits_of(base, dtype), out=bits_of(out, dtype), options=options)


def find_changes(frame: Bytes, base: Bytes, dtype: str, options: CallOptions | None) -> DeltaChanges | None:
    """Check a Delta frame of a piece, and return its changes; None if they are too many to be listed."""
    _check(frame, Delta, dtype, len(base))
    return delta.find_changes(frame, base=bits_of(base, dtype), options=options)


def merge_deltas(frames: Sequence[Bytes], base: Bytes, dtype: str) -> bytes:
    """Merge Delta frames of one piece, given in the order of application, into one frame."""
    for frame in frames:
        _check(frame, Delta, dtype, len(base))
    return compose_deltas(frames, base=bits_of(base, dtype))


def decode_full(frame: Bytes, out: Bytes, dtype: str, options: CallOptions | None) -> None:
    """Decode a Lossless frame of a piece in a snapshot."""
    _check(frame, Lossless, dtype, len(out))
    decode(frame, out=bits_of(out, dtype), options=options)


def _check(frame: Bytes, spec: type[Spec], dtype: str, nbytes: int) -> None:
    """Raise FrameError unless a frame has the codec, the dtype and the size that the update's index states."""
    head = read_header(view_bytes(frame))  # inspect() takes several times as long
    if (head.spec.codec, head.dtype, head.tensor_nbytes, head.rank) != (_CODECS[spec], DTYPES[dtype], nbytes, 1):
        info = inspect(frame)
        found = f"{type(info.spec).__name__}, {info.dtype} and {info.tensor_nbytes} bytes"
        message = f"the frame has {found}, but the index names {spec.__name__}, {dtype} and {nbytes} bytes"
        raise FrameError(message, Status.BAD_HEADER)


def bits_of(piece: Bytes, dtype: str) -> Any:
    """Return a view of a piece as unsigned integers of the dtype's size."""
    return piece.view(UNSIGNED[dtype])


def _values(piece: Bytes, dtype: str) -> View:
    """Return a view of a piece as a tensor of the dtype."""
    return view(bits_of(piece, dtype), dtype)
