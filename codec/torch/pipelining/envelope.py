"""Envelope of a pipeline message: the tensors of one micro-batch that one stage sends to another one."""

import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from codec import ChecksumError, FrameError, StateError

HEAD = struct.Struct("<4sBBHIQI")  # magic, version, kind, tensors, micro-batch, run, CRC-32 of the rest of the envelope
SIZE = struct.Struct("<Q")  # bytes of a tensor's part
MAGIC, VERSION = b"CDPL", 1
MOST_TENSORS = 1 << 8


class Kind(IntEnum):
    """Contents of a message."""

    ACTIVATIONS = 0
    GRADIENTS = 1
    ABORTED = 2  # nothing: the sender has an error, or was sent none itself


class Place(NamedTuple):
    """Place of a message in the run of a schedule."""

    chunk: int  # number of the micro-batch
    run: int  # number of the run of the schedule, from 1


def pack(kind: Kind, place: Place, parts: Sequence[bytes] = ()) -> bytes:
    """Return a message with one part for each tensor."""
    sizes = b"".join(SIZE.pack(len(p)) for p in parts)
    head = HEAD.pack(MAGIC, VERSION, kind, len(parts), *place, 0)
    crc = zlib.crc32(sizes, zlib.crc32(head))
    return b"".join((head[:-4], crc.to_bytes(4, "little"), sizes, *parts))


def envelope_nbytes(tensors: int) -> int:
    """Return the size of a message without its parts."""
    return HEAD.size + SIZE.size * tensors


def unpack(message: bytes, kind: Kind, place: Place, tensors: int) -> list[memoryview] | None:
    """Return the parts of a message; None if the sender has aborted the step.

    Parameters
    ----------
    message : bytes
        Whole message.
    kind, place
        Kind and place of the message that is expected.
    tensors : int
        Number of tensors that are expected.

    Raises
    ------
    FrameError, ChecksumError
        The bytes are no message, or are damaged.
    StateError
        The message has another kind, place or number of tensors.
    """
    if len(message) < HEAD.size:
        raise FrameError(f"not a pipeline message: it has {len(message)} bytes")
    magic, version, found, count, chunk, run, stored = HEAD.unpack_from(message)
    start = HEAD.size + SIZE.size * count
    if magic != MAGIC or version != VERSION or len(message) < start:
        raise FrameError("not a pipeline message of version 1")
    crc = zlib.crc32(message[HEAD.size : start], zlib.crc32(message[: HEAD.size - 4] + bytes(4)))
    if crc != stored:
        raise ChecksumError("the pipeline message is damaged: its checksum does not match", None, 0, stored, crc)
    if found == Kind.ABORTED and (chunk, run) == place:
        return None
    if (found, chunk, run, count) != (kind, *place, tensors):
        raise StateError(
            f"a message of kind {found}, micro-batch {chunk}, run {run} with {count} tensors arrived where kind "
            f"{int(kind)}, micro-batch {place.chunk}, run {place.run} with {tensors} are expected: all ranks must run "
            "the same schedule the same number of times"
        )
    parts: list[memoryview] = []
    for (nbytes,) in SIZE.iter_unpack(message[HEAD.size : start]):
        if nbytes > len(message) - start:
            raise FrameError("not a pipeline message: a part is longer than the message")
        parts.append(memoryview(message)[start : start + nbytes])
        start += nbytes
    if start != len(message):
        raise FrameError("not a pipeline message: other bytes follow its parts")
    return parts
