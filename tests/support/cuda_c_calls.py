"""Comparison of libcodec_cuda's C interface with the native engine: frames, decoded values and errors."""

import numpy as np
import pytest

import codec
from codec._c.library import ITEMSIZE
from codec.errors import Status
from support import flatcall
from support.cuda_c import Decode, Encode
from support.specs import SPECS

F32 = np.float32
SHARED = [name for name, spec in SPECS.items() if getattr(spec, "level_coding", "") == "shared"]
USABLE = {name: spec for name, spec in SPECS.items() if name not in SHARED}
BAD_ARGUMENT, BAD_SPEC, BAD_DTYPE, SHORT_SCRATCH = 10, 11, 12, 21
NO_DRIVER, NO_DEVICE, NO_KERNELS, DRIVER_ERROR = 70, 71, 72, 73
MISMATCH = (int(Status.SHAPE_MISMATCH), BAD_SPEC)
VERIFY, SLACK = 2, 1  # CODEC_VERIFY_FIRST, CODEC_ALLOW_SLACK


GPU = pytest.param("gpu", marks=pytest.mark.gpu)


on_cpu = pytest.mark.parametrize("cuda", ["cpu"], indirect=True)  # for tests of host code, which need no GPU


def needs_levels(spec):
    return isinstance(spec, codec.Truncate) and spec.fixed_level is None


def values(shape, dtype="float32", seed=0):
    """Return the bits of random floats whose magnitudes every fixed scale in SPECS can represent."""
    x = np.random.default_rng(seed).uniform(-0.4, 0.4, shape).astype(F32)
    if dtype == "float32":
        return x.view(np.uint32)
    return x.astype(np.float16).view(np.uint16) if dtype == "float16" else (x.view(np.uint32) >> 16).astype(np.uint16)


def level_of(x, spec):
    """Return levels 0 to 3 in runs of 7 values, or None if the spec needs no levels."""
    return (np.arange(x.size) // 7 % 4).astype(np.uint8) if needs_levels(spec) else None


def native_frame(x, spec, dtype, **how):
    levels = level_of(x, spec)
    return bytes(flatcall.encode(x, spec, dtype=dtype, **({} if levels is None else {"optimizer": levels}), **how))


def check_round_trip(cuda, x, spec, dtype):
    frame = native_frame(x, spec, dtype)
    [(result, ours)] = cuda.encode(Encode(x, spec, dtype, levels=level_of(x, spec)))
    assert (result, ours) == ((len(frame), 0, 0), frame)
    [(result, back)] = cuda.decode(Decode(frame, spec, dtype, x.shape))
    assert result == (len(frame), 0, 0)
    assert back == np.ascontiguousarray(codec.decode(frame, like=np.empty(0, f"u{ITEMSIZE[dtype]}"))).tobytes()
