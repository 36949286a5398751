"""Encoding a delta in one pass gives the same frame of a - m and the same new m as separate calls."""

import numpy as np
import pytest

import codec
from codec.errors import Status
from codec.stateful.activation.coding import add_delta, encode_delta
from support.specs import LOSSY
from support.tiers import NIGHTLY, every

SHAPES = [(1, 1), (3, 70), (2, 5, 64), (7, 2561), (5, 40_000)]
OPTIONS = [codec.options(threads=1), codec.options(threads=3)]
if NIGHTLY:
    OPTIONS.append(codec.options(engine="numba", threads=1))


def pair(shape):
    rng = np.random.default_rng(len(shape))
    a = rng.standard_normal(shape, np.float32)
    return a, a + 0.1 * rng.standard_normal(shape, np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", every(3, LOSSY.values()), ids=str)
def test_delta_equals_separate_calls(spec, shape):
    a, m = pair(shape)
    expected = codec.encode(a - m, spec, stream=9)
    new = codec.accumulate(expected, m.copy())
    for options in OPTIONS:
        sender, receiver = m.copy(), m.copy()
        assert encode_delta(a, sender, spec, 9, options) == expected
        add_delta(expected, receiver, options)
        np.testing.assert_equal(sender.view(np.uint32), new.view(np.uint32))
        np.testing.assert_equal(receiver.view(np.uint32), new.view(np.uint32))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_overflow_of_the_difference_is_reported(options):
    a, m = pair((3, 70))
    a[2, 69], m[2, 69] = 3e38, -3e38
    with pytest.raises(codec.ArgumentError) as e:
        encode_delta(a, m, codec.Quantize(4), 0, options)
    assert e.value.code == Status.NONFINITE
