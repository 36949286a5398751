"""`Spec.contraction` is true exactly for codecs whose error is smaller than the norm of every tensor."""

import itertools

import numpy as np
import pytest

import codec
from support.specs import LOSSY, TOPKS

SPECS = [
    *LOSSY.values(),
    *(spec for spec in TOPKS.values() if spec.rounding == "nearest"),
    # those with the largest errors of a codec
    codec.Sign(group_size=64),
    codec.Float8(scale=1.0),
    codec.Float8(scale=1.0, rounding="stochastic"),
    codec.Truncate(3),
    codec.TopK(1 / 4096),
    codec.TopK(1 / 2, 1, 64),
    codec.TopK(1 / 2, 2, 64, "stochastic"),
    *(
        codec.Quantize(bits, group, levels, rounding)
        for bits, group, levels, rounding in itertools.product(
            (1, 2, 3, 4, 8), (8, 64, 1024), ("even", "odd"), ("stochastic", "nearest")
        )
        if bits > 1 or levels == "even"
    ),
    *(codec.Quantize(bits, group, zero_point=True) for bits, group in itertools.product((1, 2, 4), (8, 20, 400, 1024))),
]
DRAWS = 24


def tensors():
    """Yield tensors of 4,096 values, each of which has a large relative error under some codec."""
    rng = np.random.default_rng(0)
    n = 4096
    yield "normal", rng.standard_normal(n)
    for zeros in (0.5, 0.9, 0.99):
        yield f"zeros {zeros}", rng.standard_normal(n) * (rng.random(n) > zeros)
    one = np.zeros(n)
    one[::1024] = 1
    yield "one value in 1,024", one
    # Each is half a quantization step of some codec, relative to the largest value
    for small in (1e-4, 0.03, 0.06, 0.13, 0.25, 0.5):
        x = np.full(n, small)
        x[::64] = 1
        yield f"one beside {small}", x
    yield "most magnitudes between two far apart", np.tile([1, *[0.1] * 30, 0.001, *[0] * 32], n // 64)
    yield "heavy tails", rng.standard_normal(n) ** 7
    yield "far below a scale of 1", np.full(n, 2.0**-13)


def loss(spec, x):
    """Return E||x - C(x)||^2 / ||x||^2, averaged over several random streams."""
    total = 0.0
    for stream in range(DRAWS):
        decoded = codec.decode(codec.encode(x, spec, stream=stream)).astype(np.float64)
        total += np.square(x - decoded).sum()
    return total / DRAWS / np.square(x.astype(np.float64)).sum()


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_contraction_agrees_with_the_measured_error(spec):
    """The error of a contraction is below the norm of every tensor; that of any other spec reaches the norm of some
    tensor, unless its groups are too large to construct the worst one.
    """
    losses = {name: loss(spec, x.astype(np.float32)) for name, x in tensors()}
    worst = max(losses, key=losses.__getitem__)
    if spec.contraction:
        assert losses[worst] < 1, worst
    # Quantize's `contraction` is a sufficient condition, not a necessary one
    elif not isinstance(spec, codec.Quantize):
        assert losses[worst] >= 1, losses


def test_quantize_is_a_contraction_up_to_the_largest_allowed_group_size():
    """With the largest allowed groups, even the largest relative error of a tensor is below 1."""
    for bits, levels in itertools.product((2, 3, 4), ("even", "odd")):
        top = (1 << bits) - 1 if levels == "even" else (1 << bits - 1) - 1
        most = top**2 if levels == "even" else 8 * top**2
        spec = codec.Quantize(bits, most, levels)
        assert spec.contraction
        assert not codec.Quantize(bits, most + 1, levels).contraction
        hardest = 0.0 if levels == "even" else 1 / (4 * top)
        x = np.full((4096 // most + 1) * most, hardest, np.float32)
        x[::most] = 1
        assert loss(spec, x) < 1
    for bits in (2, 3, 4):
        most = 2 * ((1 << bits) - 1) ** 2 + 1
        spec = codec.Quantize(bits, most, zero_point=True)
        assert spec.contraction
        assert not codec.Quantize(bits, most + 1, zero_point=True).contraction
        x = np.zeros((4096 // most + 1) * most, np.float32)
        x[::most], x[1::most] = 1, -1
        assert loss(spec, x) < 1
