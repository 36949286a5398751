"""Version of the protocol between ranks, and hashes that are equal on all ranks."""

import hashlib
from typing import Any

PROTOCOL_VERSION = 5  # version of protocol.md; increment it with each incompatible change


def hash64(*values: Any) -> int:
    """Return a signed 64-bit hash of the repr() of some values, which is equal in all processes."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little", signed=True)


def protocol_hash() -> int:
    """Return the hash of the protocol's version, which ranks compare when they connect."""
    return hash64("codec.torch", PROTOCOL_VERSION)
