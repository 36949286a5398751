"""Calls of the CUDA engine that return comparable outcomes: bytes, or the code of an error."""

import numpy as np
import pytest

import codec
from support import flatcall
from support.engine_comparison import like
from support.specs import LOSSY, MORE

LOSSY_DTYPES = ("float32", "bfloat16", "float16")
ROWS = {name: spec for name, spec in (LOSSY | MORE).items() if not isinstance(spec, codec.Truncate)}
# (first value, shape) of each segment
BUCKET = [(0, (100, 90)), (9000, (130, 80)), (19_400, (7,)), (19_407, (5000,)), (25_000, (70, 1030))]
GPU = pytest.param("gpu", marks=pytest.mark.gpu)
on_cpu = pytest.mark.parametrize("device", ["cpu"], indirect=True)
by_cupy = pytest.mark.parametrize("device", ["cpu", "cupy", GPU], indirect=True)


def encode(x, spec, dtype, **how):
    return bytes(flatcall.encode(x, spec, dtype=dtype, engine="cuda", **how))


def decode(frame, **how):
    """Return the decoded values' bytes."""
    out = np.empty(codec.inspect(frame).shape, like(codec.inspect(frame).dtype).dtype)
    return flatcall.decode(frame, out=out, engine="cuda", **how).tobytes()


def bytes_of(x):
    """Return the bytes of a frame or a tensor on the host or the device."""
    x = x.get() if hasattr(x, "get") else x
    return x.tobytes() if isinstance(x, np.ndarray) else bytes(x)


def outcome(call, *args, **how):
    """Return the result's bytes, or the error's code."""
    try:
        return bytes_of(call(*args, **how))
    except codec.CodecError as e:
        return e.code


def both_outcomes(frame, dtype, **how):
    """Return two outcomes of decoding a frame: that of the CUDA engine and that of the native one."""
    return [outcome(flatcall.decode, frame, like=like(dtype), engine=name, **how) for name in ("cuda", "native")]
