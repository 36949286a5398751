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


CHUNK_NBYTES = 1 << 10  # bytes of a chunk of a digest (docs/spec/format.md, section 13)


class Checksum:
    """Checksum of bytes that are added piece by piece, so that each piece is still in the CPU's cache.

    It is the upper 32 bits of the digest of all bytes (docs/spec/protocol.md, section 3).

    Parameters
    ----------
    data : buffer
        The bytes, which may be written until they are added.
    first : int
        Number of chunks of 1 KiB that precede the bytes. They do not count, and need not exist.
    """

    __slots__ = ("_chunks", "_data", "_found", "_tensor", "total")

    def __init__(self, data: Any, first: int = 0) -> None:
        self._data, self._chunks, self.total = ffi.from_buffer(data), first, 0
        nbytes = first * CHUNK_NBYTES + len(self._data)
        begin = ffi.cast("void *", int(ffi.cast("uintptr_t", self._data)) - first * CHUNK_NBYTES)
        self._tensor, self._found = new_tensor(DTYPES["uint8"], (nbytes,), begin, nbytes), ffi.new("uint64_t *")

    def add(self, chunks: int) -> None:
        """Add the next chunks, of which the last one of all may be shorter."""
        check(lib.codec_digest(self._tensor, self._chunks, chunks, self._found))
        self._chunks += chunks
        self.total += self._found[0]

    def value(self) -> int:
        """Return the checksum of the bytes so far."""
        return folded(self.total)


def folded(digest: int) -> int:
    """Return the checksum for a digest, which is taken modulo 2^64."""
    return digest % (1 << 64) >> 32


def checksum(parts: Sequence[Any]) -> int:
    """Return the checksum of a body that consists of some buffers, one after the other. Large ones are not copied."""
    total = chunks = 0
    rest = b""  # bytes of a chunk that continues in the next buffer

    def add(data: Any) -> None:
        nonlocal total, chunks
        found = Checksum(data, chunks)
        found.add(chunks_of(len(data)))
        total += found.total
        chunks += chunks_of(len(data))

    for part in parts:
        data = memoryview(part).cast("B")
        if rest:
            missing = CHUNK_NBYTES - len(rest)
            rest, data = rest + data[:missing], data[missing:]
            if len(rest) < CHUNK_NBYTES:
                continue
            add(rest)
        whole = data.nbytes - data.nbytes % CHUNK_NBYTES
        if whole:
            add(data[:whole])
        rest = bytes(data[whole:])
    if rest:
        add(rest)
    return folded(total)


def chunks_of(nbytes: int) -> int:
    """Return the number of chunks of a digest of `nbytes` bytes."""
    return -(-nbytes // CHUNK_NBYTES)


def with_crc(fields: bytes) -> bytes:
    """Return the fields of a message's header, followed by their CRC-32."""
    return fields + zlib.crc32(fields).to_bytes(4, "little")


def without_crc(header: bytes | bytearray) -> bytes | None:
    """Return the fields of a message's header; None if its CRC-32 differs."""
    fields = bytes(header[:-4])
    return fields if with_crc(fields) == header else None
