"""Encode and parse requests and replies of a parameter server (docs/spec/protocol/point-to-point.md, section 2)."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import torch

from codec import ArgumentError, CodecError, FrameError, PeerError, SpecError, StateError, Status
from codec.torch.transport.messages import Array

Reduce = Literal["max", "mean", "exact_mean"]

REDUCES: tuple[Reduce, ...] = ("max", "mean", "exact_mean")  # reductions, by their number in a request
INIT, PUSH, PULL, ABANDON, CLOSE = range(5)  # kinds of requests
INTERNAL = "\0"  # prefix of the names of keys that the library registers itself
TAG = -1  # tag of the connections between workers and servers
MAX_STEP = 1 << 62
MAX_NAME_NBYTES = 1024
INIT_NBYTES = 1 << 22  # maximum bytes of a request that registers keys
ITEMSIZE = {  # bytes per value of each dtype that keys may have
    "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1,
}  # fmt: skip
FLOATS = ("float32", "bfloat16", "float16")
DTYPES: dict[torch.dtype, str] = {getattr(torch, name): name for name in ITEMSIZE}

_DTYPES = {  # dtype numbers, as in docs/spec/format.md, section 3
    "float32": 1, "bfloat16": 3, "float16": 4, "int8": 17, "int16": 18, "int32": 19, "int64": 20, "uint8": 21,
}  # fmt: skip
_DTYPE_NAMES = {number: name for name, number in _DTYPES.items()}
_MAX_RANK = 8
_MAX_DIMENSION = 1 << 40
_REQUEST = struct.Struct("<BBHIq")  # kind, argument, 0, number of keys, step
_REPLY = struct.Struct("<BBHI")  # status, 0, 0, number of keys
_KEY = struct.Struct("<HBB")  # bytes of the name, dtype number, number of dimensions
_ERROR_NBYTES = 2000  # maximum bytes of an error message in a reply
_ERRORS: tuple[type[CodecError], ...] = (ArgumentError, SpecError, FrameError, StateError, PeerError)  # statuses 1 to 5
_NONFINITE = 6  # status of a PeerError that is caused by NaN or Inf
ABANDON_ERROR, ABANDON_NONFINITE = range(2)  # argument of ABANDON: reason why the worker abandons the step


def label(name: str) -> str:
    """Return the name of a key for error messages."""
    return "the shared scales" if name.startswith(INTERNAL) else repr(name)


@dataclass(frozen=True)
class Key:
    """Name, dtype and shape of a tensor that workers push and pull."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the uncompressed tensor."""
        return prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def value_limit(self) -> int:
        """Maximum bytes of a frame of the key, or of a reply with its packed sums."""
        return 2 * self.nbytes + 4096


@dataclass(frozen=True)
class Request:
    """Parsed request of a worker."""

    kind: int
    argument: int  # PULL: number of the reduction; ABANDON: reason
    step: int
    keys: Sequence[Key] = ()  # INIT: keys to register
    ids: Sequence[int] = ()  # PUSH and PULL: numbers of keys
    frames: Sequence[Array] = ()  # PUSH: one frame per key
    spec: bytes = b""  # PULL: text of the spec of the results, empty for Lossless()


@dataclass(frozen=True)
class Outgoing:
    """Encoded request."""

    parts: list[Any]  # buffers to send one after the other
    replies: int  # number of keys in the expected reply


def request(
    kind: int,
    step: int = 0,
    ids: Sequence[int] = (),
    frames: Sequence[Any] | None = None,
    argument: int = 0,
    spec: str = "",
) -> Outgoing:
    """Encode a request of any kind but INIT.

    Parameters
    ----------
    kind, argument : int
        Kind of the request; and its argument, which is the number of the reduction for PULL, and the reason for
        ABANDON.
    step : int
        Number of the step.
    ids : sequence of int
        Numbers of keys.
    frames : sequence of buffers, optional
        One frame per key, for PUSH.
    spec : str
        Text of the spec of the results, for PULL; empty for ``Lossless()``.
    """
    head = _REQUEST.pack(kind, argument, 0, len(ids), step)
    parts: list[Any] = [head + np.asarray(ids, "<u4").tobytes() + spec.encode()]
    if frames is not None:
        parts[0] += np.asarray([len(f) for f in frames], "<u8").tobytes()
        parts += frames
    return Outgoing(parts, len(ids) if kind == PULL else 0)


def init_request(keys: Sequence[Key]) -> Outgoing:
    """Encode a request that registers keys."""
    body = bytearray(_REQUEST.pack(INIT, 0, 0, len(keys), 0))
    for key in keys:
        body += key_record(key)
    return Outgoing([bytes(body)], len(keys))


def key_record(key: Key) -> bytes:
    """Encode the record of one key in a request that registers keys."""
    name = key.name.encode()
    head = _KEY.pack(len(name), _DTYPES[key.dtype], len(key.shape))
    return head + struct.pack(f"<{len(key.shape)}Q", *key.shape) + name


class _MessageReader:
    """Bounds-checked reader of a message. Reading past the end raises FrameError."""

    def __init__(self, message: Array) -> None:
        self._message, self._at = message, 0

    def take(self, nbytes: int) -> Array:
        if nbytes > self._message.nbytes - self._at:
            raise FrameError(f"the message ends at byte {self._message.nbytes}; {nbytes} more are expected")
        self._at += nbytes
        return self._message[self._at - nbytes : self._at]

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.take(layout.size).tobytes())

    def numbers(self, dtype: str, n: int) -> list[int]:
        return self.take(n * np.dtype(dtype).itemsize).view(dtype).tolist()

    def rest(self) -> Array:
        return self.take(self._message.nbytes - self._at)

    def end(self) -> None:
        if self._at != self._message.nbytes:
            raise FrameError(f"{self._message.nbytes - self._at} bytes follow the end of the message")


def read_request(message: Array) -> Request:
    """Parse a request.

    Raises
    ------
    FrameError
        The bytes are no valid request.
    """
    reader = _MessageReader(message)
    kind, argument, zero, count, step = reader.unpack(_REQUEST)
    if zero or not 0 <= step < MAX_STEP:
        raise FrameError(f"the step of a request must be from 0 to {MAX_STEP - 1}, got {step}")
    keys, ids, frames, spec = [], [], [], b""
    if kind == INIT:
        keys = [_read_key(reader) for _ in range(count)]
    elif kind in (PUSH, PULL):
        ids = reader.numbers("<u4", count)
        if len(set(ids)) != count:
            raise FrameError("a request names a key twice")
        if kind == PUSH:
            frames = [reader.take(nbytes) for nbytes in reader.numbers("<u8", count)]
        elif argument >= len(REDUCES):
            raise FrameError(f"the reduction of a request must be below {len(REDUCES)}, got {argument}")
        else:
            spec = reader.rest().tobytes()
    elif kind not in (ABANDON, CLOSE):
        raise FrameError(f"a request has the unknown kind {kind}")
    reader.end()
    return Request(kind, argument, step, keys, ids, frames, spec)


def _read_key(reader: _MessageReader) -> Key:
    nbytes, dtype, rank = reader.unpack(_KEY)
    if dtype not in _DTYPE_NAMES or rank > _MAX_RANK or not 0 < nbytes <= MAX_NAME_NBYTES:
        raise FrameError(f"a key with a name of {nbytes} bytes, dtype {dtype} and {rank} dimensions is not valid")
    shape = tuple(reader.numbers("<u8", rank))
    if max(shape, default=0) > _MAX_DIMENSION:
        raise FrameError(f"a key has a dimension of {max(shape)}; the maximum is {_MAX_DIMENSION}")
    try:
        return Key(reader.take(nbytes).tobytes().decode(), _DTYPE_NAMES[dtype], shape)
    except UnicodeDecodeError:
        raise FrameError("the name of a key is not UTF-8") from None


def reply(ids: Sequence[int] = (), values: Sequence[Sequence[Any]] | None = None) -> list[Any]:
    """Encode a reply to a successful request, as a list of buffers.

    Parameters
    ----------
    ids : sequence of int
        Numbers of the registered keys, for INIT.
    values : sequence of (head, body), optional
        Encoded result for each key, for PULL.
    """
    if values is None:
        return [_REPLY.pack(0, 0, 0, len(ids)) + np.asarray(ids, "<u4").tobytes()]
    sizes = [sum(len(part) for part in value) for value in values]
    head = _REPLY.pack(0, 0, 0, len(values)) + np.asarray(sizes, "<u8").tobytes()
    return [head, *(part for value in values for part in value)]


def error_reply(error: CodecError) -> list[Any]:
    """Encode a reply that reports an error, as a list of buffers."""
    status = next((i for i, kind in enumerate(_ERRORS, 1) if isinstance(error, kind)), len(_ERRORS))
    if isinstance(error, PeerError) and error.code == Status.NONFINITE:
        status = _NONFINITE
    return [_REPLY.pack(status, 0, 0, 0) + str(error).encode()[:_ERROR_NBYTES]]


def _read_status(reader: _MessageReader, server: int, count: int) -> None:
    """Raise the error that a reply of a server reports; raise FrameError unless the reply has `count` keys."""
    status, _, _, found = reader.unpack(_REPLY)
    if status:
        text = f"server {server}: {reader.rest().tobytes().decode(errors='replace')}"
        if status == _NONFINITE:
            raise PeerError(text, Status.NONFINITE)
        raise _ERRORS[min(status, len(_ERRORS)) - 1](text)
    if found != count:
        raise FrameError(f"server {server} has sent a reply for {found} keys, but {count} were requested")


def read_ids(message: Array, server: int, count: int) -> list[int]:
    """Parse a reply to INIT, and return the numbers of the registered keys; raise the error that it reports."""
    reader = _MessageReader(message)
    _read_status(reader, server, count)
    found = reader.numbers("<u4", count)
    reader.end()
    return found


def read_values(message: Array, server: int, count: int) -> list[Array]:
    """Parse a reply, and return its values, if the request was PULL, or []; raise the error that it reports."""
    reader = _MessageReader(message)
    _read_status(reader, server, count)
    values = [reader.take(nbytes) for nbytes in reader.numbers("<u8", count)]
    reader.end()
    return values
