"""Messages between pipeline stages; docs/spec/activation-messages.md specifies the format."""

import struct
import zlib
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from codec._c.library import DTYPE_NAMES, DTYPES
from codec.errors import ChecksumError, FrameError, Status, UnsupportedError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Ids = np.ndarray[Any, np.dtype[np.int64]]
Checks = np.ndarray[Any, np.dtype[np.uint64]]

MAGIC = b"CODA"
VERSION = 1
HEAD = struct.Struct("<4sBBBBQQQQQQII")
CRC_AT = 56  # byte offset of the checksum of head and table
ROW = 16  # bytes per sample in the table
DTYPE_CODES = ("float32", "bfloat16", "float16")  # supported dtypes of activations
ENTRY_CODES = ("float32", "bfloat16", "8bit")  # dtypes of the store's entries, by their code in a message

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class ContentKind(IntEnum):
    """Kind of a message: its contents, as a number in its head."""

    RAW = 0  # activations of all samples, none as a delta
    DELTA = 1  # deltas of all samples
    MIXED = 2  # activations of some samples, deltas of the others
    POISON = 3  # no values: the gradient on the sender contains NaN or Inf
    DIRECT = 4  # activations without sample ids, such as in an evaluation, which do not use m
    GRADIENT = 5  # gradient of activations


class MessageHead(NamedTuple):
    """Fields at the beginning of a message, before the table of samples."""

    kind: ContentKind
    dtype: str  # dtype of the activations
    entries: str  # dtype of the store's entries
    edge: int
    session: int  # random number of the sending object
    number: int  # number of the message within its session, ascending


class Message(NamedTuple):
    """Parsed message. Arrays and frames refer to the bytes of the message."""

    head: MessageHead
    samples: Ids
    checks: Checks  # for each sample the check of the m to which its delta refers; 0 for samples sent raw
    raw: Bytes  # frame of the samples sent raw; empty if no sample is sent raw
    delta: Bytes  # frame of the deltas; empty if no sample is sent as a delta


def mix(x: Any) -> Checks:
    """Apply the mixing function in docs/spec/format.md, section 13, to each item of an array of uint64."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def next_checks(checksum: int, checks: Checks) -> Checks:
    """Return the check of each sample's m after a frame was applied to m.

    Parameters
    ----------
    checksum : int
        Checksum in the header of the frame, which identifies its contents.
    checks : numpy.ndarray of uint64
        Check of each sample's m before the frame; 0 if the sample was sent raw.
    """
    rows = np.arange(1, len(checks) + 1, dtype=np.uint64)
    found = mix(mix(rows * _GOLDEN + np.uint64(checksum)) ^ checks)
    found[found == 0] = 1  # 0 is reserved for samples without m
    return found


def build(head: MessageHead, samples: Ids, checks: Checks, raw: Any = b"", delta: Any = b"") -> bytes:
    """Return the bytes of a message with the given head, table of samples and frames."""
    numbers = (DTYPES[head.dtype], ENTRY_CODES.index(head.entries), head.edge, head.session, head.number)
    start = HEAD.pack(MAGIC, VERSION, head.kind, *numbers, len(samples), len(raw), len(delta), 0, 0)
    table = samples.astype("<i8").tobytes() + checks.astype("<u8").tobytes()
    crc = zlib.crc32(table, zlib.crc32(start))
    return b"".join((start[:CRC_AT], crc.to_bytes(4, "little"), start[CRC_AT + 4 :], table, raw, delta))


def message_nbytes(start: Bytes) -> int:
    """Return the size in bytes of a whole message, given at least its first 64 bytes, which declare the size.

    Raises
    ------
    FrameError
        The bytes are not the beginning of a message.
    """
    return HEAD.size + sum(_head(start)[1])


def _fault(text: str, offset: int, found: int, expected: int) -> FrameError:
    return FrameError(f"not a valid message: {text}", None, offset, found, expected)


def _head(data: Bytes) -> tuple[MessageHead, tuple[int, int, int]]:
    """Parse the head. Return its fields, and the sizes of table, raw frame and delta frame in bytes."""
    if len(data) < HEAD.size:
        text = f"the message is truncated ({len(data)} bytes, {HEAD.size} are needed)"
        raise FrameError(text, Status.TRUNCATED, 0, len(data), HEAD.size)
    fields = HEAD.unpack(data[: HEAD.size].tobytes())
    magic, version, kind, dtype, entries, edge, session, number, count, raw, delta, _, zero = fields
    if magic != MAGIC:
        raise _fault("it does not begin with CODA", 0, int.from_bytes(magic, "little"), int.from_bytes(MAGIC, "little"))
    if version != VERSION:
        raise UnsupportedError(
            f"the message has version {version}, but this library reads version {VERSION}", None, 4, version
        )
    if kind > max(ContentKind):
        raise _fault(f"kind {kind} is unknown", 5, kind, max(ContentKind))
    if DTYPE_NAMES.get(dtype) not in DTYPE_CODES:
        raise _fault(f"dtype {dtype} is not a dtype of activations", 6, dtype, 0)
    if entries >= len(ENTRY_CODES):
        raise _fault(f"dtype {entries} of entries is unknown", 7, entries, len(ENTRY_CODES) - 1)
    if zero:
        raise _fault("reserved bytes are not 0", 60, zero, 0)
    head = MessageHead(ContentKind(kind), DTYPE_NAMES[dtype], ENTRY_CODES[entries], edge, session, number)
    return head, (ROW * count, raw, delta)


def parse(data: Bytes) -> Message:
    """Parse a message, and verify the checksum of head and table. Frames are not checked.

    Raises
    ------
    FrameError
        The bytes are not a message, or are damaged before the first frame.
    """
    head, sizes = _head(data)
    if (expected := HEAD.size + sum(sizes)) != len(data):
        what = "truncated" if expected > len(data) else "followed by other bytes"
        text = f"the message is {what} ({len(data)} bytes, {expected} are needed)"
        raise FrameError(text, Status.TRUNCATED if expected > len(data) else Status.TRAILING, 0, len(data), expected)
    table, raw, _ = sizes
    stored = int.from_bytes(data[CRC_AT : CRC_AT + 4].tobytes(), "little")
    begin = data[: HEAD.size].copy()
    begin[CRC_AT : CRC_AT + 4] = 0
    found = zlib.crc32(data[HEAD.size : HEAD.size + table].tobytes(), zlib.crc32(begin.tobytes()))
    if found != stored:
        raise ChecksumError("the message is damaged: its checksum does not match", None, CRC_AT, stored, found)
    half = HEAD.size + table // 2
    samples = np.frombuffer(data[HEAD.size : half].tobytes(), "<i8").astype(np.int64, copy=False)
    checks = np.frombuffer(data[half : HEAD.size + table].tobytes(), "<u8").astype(np.uint64, copy=False)
    frames = data[HEAD.size + table :]
    message = Message(head, samples, checks, frames[:raw], frames[raw:])
    _check_kind(message)
    return message


def _check_kind(m: Message) -> None:
    """Raise FrameError if the table and the frames of a message do not match its kind."""
    deltas = int(np.count_nonzero(m.checks))
    rest = len(m.checks) - deltas
    contents = bool(rest), bool(deltas), len(m.raw) > 0, len(m.delta) > 0
    valid = {
        ContentKind.RAW: ((True, False, True, False), (False, False, True, False)),
        ContentKind.DELTA: ((False, True, False, True),),
        ContentKind.MIXED: ((True, True, True, True),),
        ContentKind.POISON: ((False, False, False, False),),
        ContentKind.DIRECT: ((False, False, True, False),),
        ContentKind.GRADIENT: ((False, False, True, False),),
    }
    if contents not in valid[m.head.kind]:
        raise _fault(f"its samples and frames do not match its kind, {m.head.kind.name}", 5, m.head.kind, 0)
