"""codec_job_launch names the GPU kernels of a job, for all programs that launch kernels."""

import numpy as np
import pytest

import codec
from codec import _call
from codec._c.library import DTYPES, check, ffi, lib, new_bytes
from codec._c.spec_structs import spec_struct

SHAPE = 300, 128
ENCODE_KERNELS = {
    codec.Lossless(): ("choose_lossless", "encode_lossless_fast<4>"),
    codec.Sign(): ("choose_rows", "encode_rows<2>"),
    codec.Quantize(4): ("choose_rows", "encode_rows<6>"),
    codec.Quantize(4, zero_point=True): ("choose_rows", "encode_rows<22>"),
    codec.Truncate(1): ("choose_truncate", "encode_truncate"),
    codec.TopK(): (None, "encode_topk"),
    codec.Delta(): (None, "encode_delta<4>"),
}


def launch_of(job):
    launch = ffi.new("codec_launch *")
    launch.struct_nbytes = ffi.sizeof("codec_launch")
    check(lib.codec_job_launch(job, launch))
    return launch


def name_of(number):
    kernel = lib.codec_kernel_at(number)
    return None if kernel == ffi.NULL else ffi.string(kernel.name).decode()


def job_of(spec):
    """Return new memory for a job of `SHAPE` float32 values."""
    sizes = ffi.new("size_t[2]")
    check(lib.codec_job_nbytes(spec_struct(spec), like(), sizes, sizes + 1))
    return new_bytes(sizes[0]), sizes[0]


def like():
    return _call.new_tensor(DTYPES["float32"], SHAPE, ffi.NULL, 4 * SHAPE[0] * SHAPE[1])


def decoding(frame, spec):
    job, nbytes = job_of(spec)
    check(lib.codec_decode_plan(frame, len(frame), len(frame), ffi.NULL, job, nbytes, ffi.NULL))
    return launch_of(job)


@pytest.mark.parametrize("spec", ENCODE_KERNELS, ids=str)
def test_launch_of_an_encode_job(spec):
    job, nbytes = job_of(spec)
    check(lib.codec_encode_plan(spec_struct(spec), like(), _call.take().context, job, nbytes, ffi.NULL))
    launch = launch_of(job)
    assert (name_of(launch.choose), name_of(launch.encode)) == ENCODE_KERNELS[spec]
    assert name_of(launch.decode).startswith("decode_")


def test_launch_of_a_decode_job_follows_the_frame():
    x = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    bits = np.random.default_rng(0).integers(0, 1 << 32, SHAPE, np.uint32).view(np.float32)
    gradient, stored = decoding(codec.encode(x), codec.Lossless()), decoding(codec.encode(bits), codec.Lossless())
    assert name_of(gradient.decode) == "decode_lossless<4>"
    assert name_of(gradient.decode_fast) == "decode_lossless_fast<4>"
    assert (name_of(stored.decode), name_of(stored.decode_fast)) == ("decode_stored", None)
    assert (gradient.encode, gradient.choose, gradient.encode_scratch.units) == (0, 0, 0)
    assert name_of(decoding(codec.encode(x, codec.Float4()), codec.Float4()).reduce) == "reduce_rows<5>"


def test_launch_refuses_memory_without_a_job():
    launch = ffi.new("codec_launch *")
    launch.struct_nbytes = ffi.sizeof("codec_launch")
    assert lib.codec_job_launch(new_bytes(4096), launch) == lib.CODEC_BAD_ARGUMENT
    assert lib.codec_job_launch(ffi.NULL, launch) == lib.CODEC_BAD_ARGUMENT


def test_kernels_are_numbered_from_one():
    names = [name_of(number) for number in range(1, 200)]
    count = names.index(None)
    assert lib.codec_kernel_at(0) == ffi.NULL
    assert len(set(names[:count])) == count > 50
    assert set(names[count:]) == {None}
