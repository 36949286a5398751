"""reduce() of any two frames gives the same bits or the same error with the native and the Numba engine."""

import itertools

import numpy as np
import pytest

import codec
from support import flatcall
from support.engine_comparison import agreed, level_arguments, outcome, sample_bits, unify_nan
from support.specs import FAMILIES, SPECS
from support.tensors import LOSSY_DTYPES

SIZES = (1, 5, 4000)


def frames_of(dtype, n, names):
    """Return a frame of each spec, of different tensors of `dtype` with n values."""
    return {
        name: bytes(
            flatcall.encode(
                sample_bits(dtype, n, "normal", seed), SPECS[name], dtype=dtype, **level_arguments(SPECS[name], n)
            )
        )
        for seed, name in enumerate(names)
    }


def reduce_bits(frames, n, engine, with_out, **how):
    """Return the bits of a reduction with all NaNs made equal; check that an error leaves `out` unchanged."""
    out = np.full(n, 7, np.float32) if with_out else None
    result = outcome(lambda: unify_nan(flatcall.reduce(frames, out=out, engine=engine, **how)))
    if isinstance(result, tuple):
        assert out is None or (out == 7).all()
        return result[:2]  # type and code only: the message names a block, which depends on how an engine groups blocks
    return result


def check_pair(first, second, n, **how):
    """Compare the engines on two frames, undamaged, and with the last byte of the second frame changed."""
    damaged = second[:-1] + bytes([second[-1] ^ 0x55])
    for with_out in (False, True):
        whole = agreed(lambda engine: reduce_bits([first, second], n, engine, with_out, **how))  # noqa: B023
        assert isinstance(whole, bytes)
        error = agreed(lambda engine: reduce_bits([first, damaged], n, engine, with_out, **how))  # noqa: B023
        assert issubclass(error[0], codec.FrameError)


def check_pairs(dtypes, n, names):
    """Compare the engines on all pairs of specs, for frames of two dtypes."""
    a, b = (frames_of(dtype, n, names) for dtype in dtypes)
    for first, second in itertools.product(names, names):
        how = level_arguments(SPECS[first], n) or level_arguments(SPECS[second], n)
        check_pair(a[first], b[second], n, **how)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", LOSSY_DTYPES)
def test_reduce_of_two_specs_agrees_with_native(dtype, n):
    check_pairs((dtype, dtype), n, FAMILIES)


@pytest.mark.parametrize("dtypes", [*itertools.permutations(LOSSY_DTYPES, 2)], ids="-".join)
def test_reduce_of_two_dtypes_agrees_with_native(dtypes):
    check_pairs(dtypes, 5, FAMILIES)


@pytest.mark.nightly
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtypes", [*itertools.product(LOSSY_DTYPES, LOSSY_DTYPES)], ids="-".join)
def test_reduce_of_all_pairs_agrees_with_native(dtypes, n):
    check_pairs(dtypes, n, SPECS)
