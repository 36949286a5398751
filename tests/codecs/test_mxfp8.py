"""MXFP8 frames hold the bytes of the OCP specification's conversion, computed by torch's own casts.

Default scales equal those of torchao's ``ScaleCalculationMode.FLOOR``, which follows the specification. Scales of
``scale="rceil"`` and of stochastic rounding equal those of torchao's ``RCEIL``.
"""

import numpy as np
import pytest
import torch

import codec
from codec.errors import CodecError, Status

F32 = np.float32
KINDS = {  # element dtype, exponent of its largest power of two, largest number
    "mxfp8_e4m3": (torch.float8_e4m3fn, 8, 448.0),
    "mxfp8_e5m2": (torch.float8_e5m2, 15, 57344.0),
}
FORMATS = pytest.mark.parametrize("format", KINDS)


def groups_of(x):
    """Return float32 values in groups of 32; the last group is padded with zeros."""
    return torch.nn.functional.pad(torch.from_numpy(x).float(), (0, -len(x) % 32)).reshape(-1, 32)


def mx_of(x, format):
    """Compute the stored scales, the elements and the decoded values of MXFP8 by torch."""
    dtype, emax, most = KINDS[format]
    x = groups_of(x)
    # The exponent of the largest magnitude, floor(log2(x)); -127 for subnormal numbers
    exponent = (x.abs().amax(1).view(torch.int32) >> 23) - 127
    stored = ((exponent - emax).clamp(-127, 127) + 127).to(torch.uint8)
    scale = stored.view(torch.float8_e8m0fnu).float()[:, None]
    elements = (x / scale).clamp(-most, most).to(dtype)
    return stored.numpy(), elements.view(torch.uint8).ravel().numpy(), (elements.float() * scale).ravel().numpy()


def values():
    """Return finite values, in groups of 32, that reach every branch of the conversion."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 1 << 14, dtype=np.uint32)
    any_bits = np.where(bits >> 23 & 255 == 255, bits & 0x807FFFFF, bits).view(F32)
    octaves = np.exp2(rng.uniform(-160, 127.9, (1024, 1)) + rng.uniform(-20, 0, (1024, 32))) * rng.choice([-1, 1], 32)
    edges = np.zeros((256, 32))
    # Groups whose largest magnitude is 2^k
    edges[:254] = np.ldexp(1.0, np.arange(-126, 128))[:, None] * np.linspace(0, 1, 32)
    edges[1:254:2, 31] *= 1.75  # 1.75 * 2^k, which scales to the largest element
    # Almost 2^(k+1), which saturates
    edges[2:254:4, 31] = np.nextafter(F32(2), F32(0)) * np.ldexp(1.0, np.arange(-124, 128, 4))
    ties = np.outer(np.ldexp(1.0, [-149, -140, -130, 0, 100]), np.arange(-1024, 1024)).reshape(-1, 32)
    zeros = np.array([0.0, -0.0] * 16)
    tiny = np.arange(32, dtype=np.uint32).view(F32)
    with np.errstate(over="ignore", under="ignore"):
        parts = [any_bits, octaves, edges, ties, zeros, tiny]
        return np.concatenate([np.asarray(part, F32).ravel() for part in parts])


def region_of(frame, n):
    """Return the scales and the elements of a frame of one block, n values."""
    rows = -(-n // 32)
    region = frame[-(-(-(rows + n) // 8) * 8) :]
    return region[:rows], region[rows : rows + n]


@FORMATS
def test_frames_hold_the_bytes_of_torch_casts(format, isa):
    x = values()
    assert np.isfinite(x).all()
    stored, elements, expected = mx_of(x, format)
    for first in range(0, len(x), 1 << 14):  # a frame per block of 2^14 values
        here = slice(first, first + (1 << 14))
        frame = codec.encode(x[here], codec.Float8(format))
        scales, codes = region_of(frame, len(x[here]))
        assert scales == stored[first // 32 :][: len(scales)].tobytes()
        assert codes == elements[here].tobytes()
        assert codec.decode(frame).tobytes() == expected[here].tobytes()


@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_tensors_give_the_same_elements(format, dtype):
    """Half-precision tensors give torch's elements for all finite patterns, and for a shorter last group."""
    x = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    x = x[x.isfinite()][:-7]
    expected = torch.from_numpy(mx_of(x.float().numpy(), format)[2][: len(x)])
    most = torch.finfo(dtype).max
    y = codec.decode(codec.encode(x, codec.Float8(format)), out=torch.empty_like(x))
    assert torch.equal(y, expected.to(dtype).clamp(-most, most))


@FORMATS
@pytest.mark.parametrize("how", [{"scale": "rceil"}, {"rounding": "stochastic"}], ids=str)
def test_rceil_takes_scales_that_saturate_no_value(format, how):
    """rceil chooses the smallest power of two for which no value saturates, as torchao's RCEIL does."""
    x = values()[1 << 14 :]  # leaves out any_bits, which has subnormal scales
    x = x[: len(x) // 32 * 32]
    x = x[np.repeat((abs(x) > 1e-30).reshape(-1, 32).any(1) & (abs(x) < 1e38).reshape(-1, 32).all(1), 32)][: 1 << 14]
    frame = codec.encode(x, codec.Float8(format, **how))
    dtype, _, most = KINDS[format]
    amax = abs(x.reshape(-1, 32)).max(1).astype(np.float64)
    fraction, exponent = np.frexp(amax / most)  # fraction is 0.5 only if amax is exactly `most` times a power of two
    expected = exponent - (fraction == 0.5) + 127
    scales, codes = region_of(frame, len(x))
    assert scales == expected.astype(np.uint8).tobytes()
    if "scale" in how:
        scaled = np.ldexp(x.reshape(-1, 32), 127 - expected[:, None])
        assert abs(scaled).max() <= most
        assert codes == torch.from_numpy(scaled).to(dtype).view(torch.uint8).numpy().tobytes()


@FORMATS
@pytest.mark.parametrize("scale", [None, "rceil"])
def test_decoded_values_are_encoded_without_loss(format, scale):
    """Decoded values can be encoded in MXFP8 again without loss."""
    spec = codec.Float8(format, scale=scale)
    y = codec.decode(codec.encode(values(), spec))
    assert codec.decode(codec.encode(y, spec)).tobytes() == y.tobytes()


@FORMATS
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_nan_and_inf_are_refused_unless_propagated(format, value):
    x = np.ones(100, F32)
    x[40] = value
    with pytest.raises(CodecError) as caught:
        codec.encode(x, codec.Float8(format))
    assert caught.value.code == Status.NONFINITE
    y = codec.decode(codec.encode(x, codec.Float8(format, nonfinite="propagate")))
    assert np.isnan(y[40])
    assert (np.delete(y, 40) == 1).all()


def test_group_size_is_32():
    spec = codec.Float8("mxfp8_e4m3")
    assert spec == codec.Float8("mxfp8_e4m3", group_size=32) == codec.inspect(codec.encode(np.ones(7, F32), spec)).spec
    for wrong in (16, 64):
        with pytest.raises(codec.SpecError, match="group_size must be 32 or None"):
            codec.Float8("mxfp8_e4m3", group_size=wrong)


def test_scale_is_rceil_or_none():
    spec = codec.Float8("mxfp8_e5m2", scale="rceil")
    assert codec.inspect(codec.encode(np.ones(7, F32), spec)).spec == spec
    with pytest.raises(codec.SpecError, match='must be "rceil" or None'):
        codec.Float8("mxfp8_e5m2", scale=1.0)
    with pytest.raises(codec.SpecError, match="scale must be None with rounding"):
        codec.Float8("mxfp8_e5m2", scale="rceil", rounding="stochastic")
    with pytest.raises(codec.SpecError, match="scale must be a positive number or None"):
        codec.Float8(scale="rceil")
