"""Errors carry the status codes of the C library."""

import copy
import pickle

import numpy as np
import pytest

import codec
from codec._c.library import ffi, lib

X = np.linspace(-1, 1, 9_000, dtype=np.float32)


def test_status_has_the_names_numbers_and_messages_of_c():
    theirs = {name.removeprefix("CODEC_"): number for number, name in ffi.typeof("codec_status").elements.items()}
    assert {s.name: s.value for s in codec.Status} == theirs
    for status in codec.Status:
        assert ffi.string(lib.codec_strerror(status)) != b"unknown status"


def test_errors_have_the_status_as_code():
    """The `code` of an error is the Status of the C library, or None for an error that was raised in Python."""
    frame = codec.encode(X)
    damaged = frame[:-1] + bytes([frame[-1] ^ 1])
    book = codec.Codebook.from_tensors(X)
    nan = X.copy()
    nan[5] = np.nan
    for status, call in {
        "CHECKSUM": lambda: codec.decode(damaged),
        "TRUNCATED": lambda: codec.decode(frame[:-1]),
        "TRAILING": lambda: codec.decode(frame + b"\0"),
        "BAD_MAGIC": lambda: codec.inspect(b"\0" * 100),
        "LIMIT": lambda: codec.decode(frame, max_nbytes=0),
        "UNKNOWN_CODEBOOK": lambda: codec.decode(codec.encode(X, codebook=book)),
        "MISSING_STATE": lambda: codec.decode(
            codec.encode(X, codec.Truncate(level_coding="shared").bind(codec.optimizers.SGD(0.1), theta=X))
        ),
        "NONFINITE": lambda: codec.encode(nan, codec.Sign()),
        "BAD_SCALE": lambda: codec.encode(X, codec.Ternary(scale=0.5)),
        "ROUNDED_SCALE": lambda: codec.encode(X.astype(np.float16), codec.Ternary(scale=1e9)),
        "SHORT_OUTPUT": lambda: codec.encode(X, out=bytearray(100)),
        "SHAPE_MISMATCH": lambda: codec.decode(frame, out=np.zeros(8_999, np.float32)),
        "BAD_SEGMENTS": lambda: codec.encode(codec.view(X, segments=[(1, (9_000,))])),
        "BAD_DTYPE": lambda: codec.encode(np.arange(9_000), codec.Sign()),
    }.items():
        with pytest.raises(codec.CodecError) as caught:
            call()
        assert caught.value.code is codec.Status[status]
        assert caught.value.code == getattr(lib, f"CODEC_{status}")
    with pytest.raises(codec.ArgumentError) as caught:
        codec.encode(object())
    assert caught.value.code is None


def test_errors_can_be_pickled_with_all_attributes():
    frame = codec.encode(X)
    damaged = frame[:-1] + bytes([frame[-1] ^ 1])
    for call in (
        lambda: codec.decode_many({"a": frame, "b": damaged}),
        lambda: codec.encode(X, out=bytearray(100)),
        lambda: codec.encode(X, options=codec.options(engine="cuda")),
    ):
        with pytest.raises(codec.CodecError) as caught:
            call()
        e = caught.value
        for again in (pickle.loads(pickle.dumps(e)), copy.copy(e)):
            assert (type(again), str(again), vars(again)) == (type(e), str(e), vars(e))
            assert again.item == e.item
