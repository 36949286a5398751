"""Encode and decode allocate at most 2.5% of the tensor's size plus 1 MiB (float8: 5%), besides input and output."""

import numpy as np
import pytest

from codec._c.library import DTYPES, ITEMSIZE, ffi, lib
from codec._c.spec_structs import spec_struct
from codec._call import SMALL_FRAME, SMALL_SCRATCH, new_tensor
from codec.specs import Lossless
from support.specs import LOSSY, TOPKS, TRUNCATES


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_memory_of_lossless(dtype):
    # float8 has as many offsets of rows and columns as bfloat16, in half of the bytes
    share = 0.05 if dtype.startswith(("float8_e4", "float8_e5")) else 0.025
    for n in (0, 1, 1000, 4096, 1 << 14, 1 << 18, 1 << 24, 1 << 30, 1 << 36):
        for shape in ((n,), (1, n), (64, n // 64)):
            total = int(np.prod(shape, dtype=object)) * ITEMSIZE[dtype]
            t = new_tensor(DTYPES[dtype], shape)
            size = ffi.new("size_t *")
            assert lib.codec_scratch(spec_struct(Lossless()), t, size) == 0
            assert size[0] <= total * share + (1 << 20)


@pytest.mark.parametrize("spec", [*LOSSY.values(), *TOPKS.values(), *TRUNCATES.values()])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_lossy_codecs(spec, dtype):
    for n in (0, 1, 1000, 1 << 14, 1 << 18, 1 << 24, 1 << 30, 1 << 36):
        t = new_tensor(DTYPES[dtype], (n,))
        size = ffi.new("size_t *")
        assert lib.codec_scratch(spec_struct(spec), t, size) == 0
        assert size[0] <= n * ITEMSIZE[dtype] / 40 + (1 << 20)


def test_calls_succeed_with_small_buffers():
    size = ffi.new("size_t *")
    for dtype, number in DTYPES.items():
        t = new_tensor(number, ((1 << 16) // ITEMSIZE[dtype],))
        assert lib.codec_scratch(spec_struct(Lossless()), t, size) == 0
        assert size[0] <= SMALL_SCRATCH
        t = new_tensor(number, (1,) * 7 + ((1 << 16) // ITEMSIZE[dtype],))
        assert lib.codec_bound(spec_struct(Lossless()), t, size) == 0
        assert size[0] <= SMALL_FRAME
