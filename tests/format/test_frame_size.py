"""codec.frame_nbytes returns the size of the frames that the encoder makes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec.frame_size import has_fixed_rate
from support.specs import SPECS

FIXED = {name: spec for name, spec in SPECS.items() if has_fixed_rate(spec)}
SHAPES = [(), (0,), (1,), (5,), (3, 7), (16_384,), (16_385,), (100, 1000), (81_921,), (3, 70_000)]
SEGMENTS = [
    [(0, (64, 100)), (6400, (64,)), (7000, (50, 3000))],
    [(10, (9000,)), (9010, (3, 20_000)), (69_010, (2, 2, 1500))],
    [(0, (200_000,))],
    [],
]


def values(shape):
    return np.random.default_rng(0).uniform(-0.4, 0.4, shape).astype(np.float32)  # within all scales of SPECS


@pytest.mark.parametrize("spec", FIXED.values(), ids=FIXED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_frame_nbytes_is_exact_for_every_fixed_rate_spec(spec, dtype):
    for shape in SHAPES:
        x = values(shape)
        x = x.astype(np.float16) if dtype == "float16" else x
        x = (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else x
        assert codec.frame_nbytes(shape, dtype, spec) == len(codec.encode(codec.view(x, dtype), spec)), shape


@pytest.mark.parametrize("spec", FIXED.values(), ids=FIXED)
def test_frame_nbytes_is_exact_for_buckets_of_parameters(spec):
    x = values(200_000)
    for segments in SEGMENTS:
        frame = codec.encode(codec.view(x, segments=segments), spec)
        assert codec.frame_nbytes(x.shape, "float32", spec, segments=segments) == len(frame), segments


@given(st.sampled_from([*FIXED.values()]), st.lists(st.integers(0, 300), max_size=3))
def test_frame_nbytes_is_exact_for_any_shape(spec, shape):
    shape = tuple(min(size, 40) for size in shape) if len(shape) == 3 else tuple(shape)
    assert codec.frame_nbytes(shape, "float32", spec) == len(codec.encode(values(shape), spec))


def test_frame_nbytes_takes_mappings_and_presets():
    parameters = {"weight": (64, 100), "bias": (64,)}
    x = values(6464)
    frame = codec.encode(codec.view(x, segments=parameters), codec.preset("smallest"))
    assert codec.frame_nbytes(6464, "f4", "smallest", segments=parameters) == len(frame)


@pytest.mark.parametrize("spec", [spec for spec in SPECS.values() if not has_fixed_rate(spec)])
def test_frame_nbytes_rejects_specs_of_variable_rate(spec):
    with pytest.raises(codec.SpecError, match="depends on the values"):
        codec.frame_nbytes(1000, "float32", spec)


def test_frame_nbytes_rejects_impossible_tensors():
    with pytest.raises(codec.ArgumentError):
        codec.frame_nbytes(1000, "int32", codec.Quantize(4))
    with pytest.raises(codec.ArgumentError):
        codec.frame_nbytes(1000, "float32", codec.Quantize(4), segments=[(0, (1001,))])
    with pytest.raises(codec.LimitError):
        codec.frame_nbytes(1 << 50, "float32", codec.Quantize(4))
