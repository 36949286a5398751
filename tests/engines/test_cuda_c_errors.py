"""libcodec_cuda returns statuses for wrong arguments, for errors of the driver, and for a missing driver."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest

import codec
from codec.errors import Status
from support import cuda_c
from support.cuda_c import Decode, Encode, Failed
from support.cuda_c_calls import (
    BAD_ARGUMENT,
    BAD_DTYPE,
    DRIVER_ERROR,
    F32,
    NO_DEVICE,
    NO_DRIVER,
    NO_KERNELS,
    SHORT_SCRATCH,
    native_frame,
    on_cpu,
    values,
)
from support.specs import TRUNCATES


def fails_with(status, call, *args, **how):
    with pytest.raises(Failed) as caught:
        call(*args, **how)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("struct_nbytes", 8),
        ("flags", 1),
        ("flags", 16),  # flag CODEC_FEEDBACK, but no residual
        ("plan", None),
        ("tensor", None),
        ("tensor", 4098),
        ("frame", None),
        ("frame", 4100),
        ("result", None),
        ("result", 4100),
        ("residual", 4097),
    ],
)
def test_wrong_arguments_of_encoding(cuda, field, value):
    item = Encode(values(3000), codec.Quantize(4), "float32").item(cuda)
    setattr(item, field, value)
    fails_with(BAD_ARGUMENT, cuda.run, "encode", [item])


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("struct_nbytes", 8, BAD_ARGUMENT),
        ("into", 4, BAD_ARGUMENT),
        ("plan", None, BAD_ARGUMENT),
        ("tensor", None, BAD_ARGUMENT),
        ("frame", 4100, BAD_ARGUMENT),
        ("frame_nbytes_at", 4100, BAD_ARGUMENT),
        ("result", None, BAD_ARGUMENT),
        ("divide", 2, BAD_ARGUMENT),
        ("divide", float("nan"), BAD_ARGUMENT),
        ("into", 1, BAD_DTYPE),
    ],
)
def test_wrong_arguments_of_decoding(cuda, field, value, status):
    x = np.arange(3000, dtype=np.int32)
    item = Decode(native_frame(x, codec.Lossless(), "int32"), codec.Lossless(), "int32", x.shape).item(cuda)
    setattr(item, field, value)
    fails_with(status, cuda.run, "decode", [item], 0)


def test_wrong_arguments_of_other_functions(cuda):
    x = values(3000)
    fails_with(Status.MISSING_STATE, cuda.encode, Encode(x, TRUNCATES["truncate_plane"], "float32"))
    residual = np.zeros(3000, F32)
    fails_with(Status.SHORT_OUTPUT, cuda.encode, Encode(x, codec.Sign(), "float32", residual=residual, capacity=100))
    fails_with(BAD_ARGUMENT, cuda.decode, Decode(b"", codec.Sign(), "float32", (3000,)), flags=4)
    fails_with(Status.UNSUPPORTED, cuda.plan, TRUNCATES["truncate_shared"], "float32", (3000,))
    fails_with(BAD_DTYPE, cuda.plan, codec.Sign(), "int32", (3000,))
    # A reserved byte of the segment is not 0
    fails_with(14, cuda.plan, codec.Sign(), "float32", (3000,), bytes(12) + b"\1" + bytes(67))
    item = Encode(x, codec.Sign(), "float32").item(cuda)
    array, none = (cuda_c.EncodeItem * 1)(item), ctypes.c_uint64(0)
    memory = cuda_c.Memory(1 << 20)
    call = cuda.lib.codec_cuda_encode
    assert call(array, ctypes.c_size_t(1), ctypes.c_void_p(memory.address), none, None) == SHORT_SCRATCH
    odd = ctypes.c_void_p(memory.address + 8)
    assert call(array, ctypes.c_size_t(1), odd, ctypes.c_uint64(1 << 20), None) == BAD_ARGUMENT
    assert call(None, ctypes.c_size_t(0), None, none, None) == 0
    assert cuda.fake.fake_cuda_log() == b""  # the log shows that no kernel was launched


FUNCTIONS = ["cuCtxPushCurrent", "cuMemsetD8Async", "cuLaunchKernel"]


@on_cpu
@pytest.mark.parametrize("function", FUNCTIONS)
def test_errors_of_the_driver_are_reported(cuda, function):
    cuda.fake.fake_cuda_fail(function.encode(), 700)
    try:
        fails_with(DRIVER_ERROR, cuda.encode, Encode(values(3000), codec.Sign(), "float32"))
    finally:
        cuda.fake.fake_cuda_fail(b"", 0)
    assert cuda.lib.codec_cuda_driver_error() == 700
    assert cuda.fake.fake_cuda_contexts() == 0


def opened(cuda, ordinal=0):
    """Open and close another device; return the status."""
    another = ctypes.c_void_p()
    status = cuda.lib.codec_cuda_open(ordinal, ctypes.byref(another))
    assert bool(another) == (status == 0)
    cuda.lib.codec_cuda_close(another)
    assert cuda.fake.fake_cuda_contexts() == 0
    return status


@on_cpu
def test_errors_of_opening_a_device(cuda):
    assert opened(cuda) == 0
    assert opened(cuda, 1) == opened(cuda, -1) == NO_DEVICE
    for function in ("cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuModuleGetFunction", "cuModuleGetGlobal"):
        cuda.fake.fake_cuda_fail(function.encode(), 200)
        status = opened(cuda)
        cuda.fake.fake_cuda_fail(b"", 0)
        assert status == DRIVER_ERROR, function
    for arch, status in ((75, NO_KERNELS), (88, DRIVER_ERROR), (90, 0), (91, 0), (100, NO_KERNELS)):
        cuda.fake.fake_cuda_arch(arch)  # the image for sm_80 is not valid machine code
        try:
            assert opened(cuda) == status, arch
        finally:
            cuda.fake.fake_cuda_arch(90)


def test_every_status_has_a_sentence(cuda):
    sentences = {cuda.lib.codec_cuda_strerror(status) for status in (0, 10, 40, 70, 71, 72, 73, 74)}
    assert len(sentences) == 8


NO_DRIVER_CODE = """
import ctypes, sys
device = ctypes.c_void_p()
print(ctypes.CDLL(sys.argv[1]).codec_cuda_open(0, ctypes.byref(device)))
"""


def test_no_driver_is_a_status():
    """Without a CUDA driver, the library can be loaded, and returns the status for a missing driver."""
    command = [sys.executable, "-c", NO_DRIVER_CODE, str(cuda_c.library())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(NO_DRIVER)
