"""Pack and unpack the envelope of a pipeline message, which carries the tensors of one micro-batch."""

import struct
import zlib
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from codec import ChecksumError, FrameError, StateError

HEAD = struct.Struct("<4sBBHIQI")  # magic, version, kind, tensors, micro-batch, run, CRC-32 of the rest of the envelope
RECORD = struct.Struct("<QQ")  # record of a tensor: bytes of its part, number of dimensions; the shape follows
MAGIC, VERSION = b"CDPL", 1
MOST_TENSORS = 1 << 8  # maximum number of tensors in a message
_MOST_DIMENSIONS = 64  # maximum number of dimensions of a torch tensor
_DIMENSION = struct.Struct("<Q")

Shape = tuple[int, ...]


class MessageKind(IntEnum):
    """Kind of a message."""

    ACTIVATIONS = 0
    GRADIENTS = 1
    ABORTED = 2  # no tensors: the step has failed on the sender, or the sender itself has received ABORTED


class Place(NamedTuple):
    """Micro-batch and run of the schedule to which a message belongs."""

    chunk: int  # number of the micro-batch
    run: int  # number of the run of the schedule, from 1


class Contents(NamedTuple):
    """Parsed contents of a message."""

    shapes: list[Shape]  # shape of each tensor
    parts: list[memoryview] | None  # encoded bytes of each tensor; None: the sender has aborted the step


def pack(kind: MessageKind, place: Place, shapes: Sequence[Shape], parts: Sequence[bytes] = ()) -> bytes:
    """Build a message from the shapes and the encoded bytes (parts) of its tensors; no parts for ABORTED."""
    sizes = [len(p) for p in parts] or [0] * len(shapes)
    records = b"".join(
        RECORD.pack(nbytes, len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        for nbytes, shape in zip(sizes, shapes, strict=True)
    )
    head = HEAD.pack(MAGIC, VERSION, kind, len(shapes), *place, 0)
    crc = zlib.crc32(records, zlib.crc32(head))
    return b"".join((head[:-4], crc.to_bytes(4, "little"), records, *parts))


def envelope_nbytes(shapes: Iterable[Shape]) -> int:
    """Return the size in bytes of a message without its parts."""
    return HEAD.size + sum(RECORD.size + _DIMENSION.size * len(shape) for shape in shapes)


def unpack(message: bytes, kind: MessageKind, place: Place, tensors: int) -> Contents:
    """Parse a message, and check that it is the expected one.

    Parameters
    ----------
    message : bytes
        Whole message.
    kind, place
        Expected kind, and expected micro-batch and run. MessageKind ABORTED is always accepted.
    tensors : int
        Expected number of tensors.

    Raises
    ------
    FrameError, ChecksumError
        The bytes are not a message, or are damaged.
    StateError
        The message has another kind, micro-batch, run or number of tensors.
    """
    if len(message) < HEAD.size:
        raise FrameError(f"not a pipeline message: it has {len(message)} bytes, and its head alone {HEAD.size}")
    magic, version, found, count, chunk, run, stored = HEAD.unpack_from(message)
    if magic != MAGIC or version != VERSION:
        raise FrameError("not a pipeline message of version 1")
    records, start = _records(message, count)
    crc = zlib.crc32(message[HEAD.size : start], zlib.crc32(message[: HEAD.size - 4] + bytes(4)))
    if crc != stored:
        raise ChecksumError("the pipeline message is damaged: its checksum does not match", None, 0, stored, crc)
    shapes = [shape for _, shape in records]
    if (found, chunk, run, count) == (MessageKind.ABORTED, *place, tensors):
        return Contents(shapes, None)
    if (found, chunk, run, count) != (kind, *place, tensors):
        raise StateError(
            f"a message of kind {found}, micro-batch {chunk}, run {run} with {count} tensors has arrived, but kind "
            f"{int(kind)}, micro-batch {place.chunk}, run {place.run} with {tensors} tensors is expected: all ranks "
            "must run the same schedule the same number of times"
        )
    parts: list[memoryview] = []
    for nbytes, _ in records:
        if nbytes > len(message) - start:
            raise FrameError("not a pipeline message: a part is longer than the message")
        parts.append(memoryview(message)[start : start + nbytes])
        start += nbytes
    if start != len(message):
        raise FrameError("not a pipeline message: other bytes follow its parts")
    return Contents(shapes, parts)


def _records(message: bytes, count: int) -> tuple[list[tuple[int, Shape]], int]:
    """Parse the records. Return the encoded size and the shape of each tensor, and the offset of the first part."""
    found: list[tuple[int, Shape]] = []
    at = HEAD.size
    for _ in range(count):
        nbytes, dimensions = RECORD.unpack_from(message, at) if at + RECORD.size <= len(message) else (0, len(message))
        at += RECORD.size
        if dimensions > min(_MOST_DIMENSIONS, (len(message) - at) // _DIMENSION.size):
            raise FrameError("not a pipeline message of version 1: it ends before its first tensor")
        found.append((nbytes, struct.unpack_from(f"<{dimensions}Q", message, at)))
        at += _DIMENSION.size * dimensions
    return found, at
