"""Codebook.to_bytes and from_bytes: round trips, and rejection of all other bytes."""

import numpy as np
import pytest
import torch

import codec
from support import flatcall

rng = np.random.default_rng(0)
X = rng.standard_normal(20_000).astype(np.float32)
SGD = {"optimizer": codec.optimizers.SGD(0.1), "state": {"theta": X}}
BOOKS = [
    codec.Codebook.from_tensors(X),
    codec.Codebook.from_tensors(X, spec=codec.Lossless(max_code_length=4)),
    flatcall.codebook(X, spec=codec.Truncate(), **SGD),
    flatcall.codebook(X.astype(np.float16), spec=codec.Truncate(), **SGD),
    codec.Codebook.from_tensors(X, spec=codec.Truncate(1)),
    *(codec.Codebook.from_counts(counts) for counts in (
        np.zeros(256, int), np.ones(256, int), np.arange(256), np.eye(256, dtype=int)[0], np.eye(256, dtype=int)[255],
        np.eye(256, dtype=int)[3], np.where(np.arange(256) % 2, 5, 0), np.r_[7, np.zeros(255, int)],
    )),
]  # fmt: skip


def test_round_trip():
    """Equal codebooks have equal bytes, and different ones different bytes."""
    for book in BOOKS:
        data = book.to_bytes()
        assert 12 <= len(data) <= 140
        for given in (
            data,
            bytearray(data),
            memoryview(data),
            np.frombuffer(data, np.uint8),
            torch.tensor(list(data), dtype=torch.uint8),
        ):
            again = codec.Codebook.from_bytes(given)
            assert again == book
            assert again.to_bytes() == data
    assert len({book.to_bytes() for book in BOOKS}) == len(set(BOOKS))
    book = BOOKS[0]
    frame = codec.encode(X, codebook=codec.Codebook.from_bytes(book.to_bytes()))
    assert (codec.decode(frame, codebooks=book) == X).all()
    assert len(BOOKS[0].to_bytes()) < 60  # bytes: few, because gradients have few different exponents


def test_damaged_bytes_are_rejected():
    """Truncated, extended, flipped or random bytes raise ArgumentError, since the id is a digest of the other bytes."""
    for book in BOOKS:
        data = book.to_bytes()
        for n in range(len(data)):
            with pytest.raises(codec.ArgumentError):
                codec.Codebook.from_bytes(data[:n])
        for more in (b"\0", b"\xff" * 9, data):
            with pytest.raises(codec.ArgumentError):
                codec.Codebook.from_bytes(data + more)
        for i in range(8 * len(data)):
            bad = bytearray(data)
            bad[i // 8] ^= 1 << i % 8
            with pytest.raises(codec.ArgumentError) as caught:
                codec.Codebook.from_bytes(bad)
            assert caught.value.code == codec.Status.BAD_CODEBOOK
    for n in (0, 8, 9, 12, 20, 140, 141, 1000):
        for _ in range(50):
            with pytest.raises(codec.ArgumentError):
                codec.Codebook.from_bytes(rng.bytes(n))
    for bad in (None, 5, object()):
        with pytest.raises(codec.ArgumentError):
            codec.Codebook.from_bytes(bad)
