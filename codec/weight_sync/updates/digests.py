"""Digests of weights: sums over pieces, so that the digest of weights is the sum of those of its parts."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from codec.weight_sync.updates.kinds import TensorKind
from codec.weight_sync.updates.shards import Name
from codec.weight_sync.updates.update import entry_head

_MODULUS = (1 << 128) - 1


def piece_digest(key: Name, kind: TensorKind, k: int, digest: bytes) -> int:
    """Return the number that piece `k` of a tensor adds to the digest of weights; `digest` is that of its values."""
    data = entry_head(key, kind) + k.to_bytes(4, "little") + digest
    return int.from_bytes(hashlib.blake2b(data, digest_size=16).digest(), "little")


def sum_of(numbers: Iterable[int]) -> bytes:
    """Return the sum of numbers modulo 2^128, as a digest of 16 bytes."""
    return (sum(numbers) & _MODULUS).to_bytes(16, "little")


def weights_digest(tensors: Mapping[Name, tuple[TensorKind, Sequence[bytes]]]) -> bytes:
    """Return the digest of weights, 16 bytes: a sum over all pieces, so that the digests of parts can be added.

    Parameters
    ----------
    tensors : mapping of names to (TensorKind, sequence of bytes)
        Kind of each tensor, and the digest of each of its pieces. The order of the tensors does not matter.
    """
    return sum_of(
        piece_digest(key, kind, k, digest)
        for key, (kind, digests) in tensors.items()
        for k, digest in enumerate(digests or [b""])
    )
