"""Version of the protocol between ranks, and hashes that are equal on all ranks."""

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

from codec._c.library import DTYPES, check, ffi, lib
from codec._call import new_tensor

PROTOCOL_VERSION = 5  # version of protocol.md; increment it with each incompatible change


def hash64(*values: Any) -> int:
    """Return a signed 64-bit hash of the repr() of some values, which is equal in all processes."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little", signed=True)


def protocol_hash() -> int:
    """Return the hash of the protocol's version, which ranks compare when they connect."""
    return hash64("codec.torch", PROTOCOL_VERSION)


_CHUNK = 1 << 10  # bytes of a chunk of a digest (docs/spec/format.md, section 13)


class Checksum:
    """Checksum of a message's body, whose bytes are added piece by piece, while they are in the CPU's cache.

    It is the upper 32 bits of the body's digest (docs/spec/protocol.md, section 3).
    """

    def __init__(self) -> None:
        self._total = self._chunks = 0  # sum of the digests of the chunks so far, and their number
        self._rest = b""  # bytes of a chunk that is not complete

    def add(self, data: Any) -> None:
        """Add the next bytes of the body, a buffer. Only bytes that are no complete chunk of 1 KiB are copied."""
        data = memoryview(data).cast("B")
        if self._rest:
            missing = _CHUNK - len(self._rest)
            self._rest, data = self._rest + data[:missing], data[missing:]
            if len(self._rest) < _CHUNK:
                return
            self._add(self._rest)
        whole = data.nbytes - data.nbytes % _CHUNK
        if whole:
            self._add(data[:whole])
        self._rest = bytes(data[whole:])

    def _add(self, data: Any) -> None:
        self._total += _digest(data, self._chunks)
        self._chunks += len(data) // _CHUNK

    def value(self) -> int:
        """Return the checksum of all bytes so far."""
        total = self._total + (_digest(self._rest, self._chunks) if self._rest else 0)
        return total % (1 << 64) >> 32


def checksum(parts: Sequence[Any]) -> int:
    """Return the checksum of a body that consists of some buffers, one after the other."""
    found = Checksum()
    for part in parts:
        found.add(part)
    return found.value()


def _digest(data: Any, first: int) -> int:
    """Return the digest of bytes that follow `first` chunks."""
    nbytes = first * _CHUNK + len(data)
    # the library reads chunk `first` and later ones only, so the bytes before `data` need not exist
    begin = int(ffi.cast("uintptr_t", ffi.from_buffer(data))) - first * _CHUNK
    found = ffi.new("uint64_t *")
    tensor = new_tensor(DTYPES["uint8"], (nbytes,), ffi.cast("void *", begin), nbytes)
    check(lib.codec_digest(tensor, first, -(-len(data) // _CHUNK), found))
    return found[0]


def with_crc(fields: bytes) -> bytes:
    """Return the fields of a message's header, followed by their CRC-32."""
    return fields + zlib.crc32(fields).to_bytes(4, "little")


def without_crc(header: bytes | bytearray) -> bytes | None:
    """Return the fields of a message's header; None if its CRC-32 differs."""
    fields = bytes(header[:-4])
    return fields if with_crc(fields) == header else None
