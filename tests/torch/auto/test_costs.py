"""codec.torch.auto measures the errors and costs of specs on gradients, and applies quality floors."""

import pytest
import torch

import codec
from codec.torch.auto import costs
from codec.torch.auto.quality import bits_of, quality_of

OPTIONS = codec.options(threads=1)


SPECS = codec.Lossless(), codec.Float8(group_size=128), codec.Quantize(4)


def numbers(values, names=None):
    names = names or list(values)
    found = costs.numbers_of(costs.Samples(values), names, 4_000_000, SPECS, 2, OPTIONS)
    assert len(found) == costs.length(len(names), len(SPECS))
    return costs.costs_of(found, len(SPECS)), costs.errors_of(found, names, len(SPECS))


def test_errors_are_those_of_frames_for_each_tensor_and_dtype():
    torch.manual_seed(0)
    even = torch.randn(64, 64)
    spiky = torch.zeros(64, 64)
    spiky[:, ::64] = 1000.0
    spiky += 1e-3 * even
    values = {"even": even, "zero": torch.zeros(8), "half": even.bfloat16(), "spiky": spiky}
    found, errors = numbers(values, names=[*values, "unused"])
    back = codec.decode(codec.encode(even, codec.Quantize(4)), like=even)
    assert errors["even"][1] / costs.MILLION == pytest.approx(float((back - even).norm() / even.norm()), rel=0.05)
    assert errors["even"][0] < errors["even"][1]
    assert errors["half"][1] == pytest.approx(errors["even"][1], rel=0.1)
    assert errors["zero"] == errors["unused"] == [costs.UNKNOWN] * 2
    lossless, float8, quantize = found
    assert 4_000_000 * 4.4 / 8 < quantize.frame_nbytes < 4_000_000 * 5 / 8
    assert quantize.frame_nbytes < float8.frame_nbytes < lossless.frame_nbytes
    assert min(quantize.encode, quantize.reduce) > 0


def test_nan_says_nothing():
    found, errors = numbers({"a": torch.full((512,), torch.nan)})
    assert errors["a"] == [costs.UNKNOWN] * 2
    assert found[2].frame_nbytes == 0


def test_samples_are_whole_rows():
    x = torch.arange(1_000_000.0)
    taken = costs.take(x, (1000, 1000), 4_000_000, 10)
    assert taken.shape == (65, 1000)
    assert taken[0, 0] % 1000 == 0
    assert costs.take(x, (10, 100_000), 4_000_000, 10).shape == (65_536,)
    assert costs.take(x[:7], (7,), 4_000_000, 10).tolist() == list(range(7))


def test_quality_names_the_lossiest_preset():
    assert quality_of(None) == quality_of("lossless")
    assert quality_of("small").specs == tuple(map(codec.preset, ("lossless", "balanced", "small")))
    assert quality_of(0.05).limit == 0.05
    assert [len(bits_of(name)) for name in ("balanced", "small", "smallest")] == [1, 2, 4]


@pytest.mark.parametrize("given", ["near", "auto", 0, 1.0, -0.1, float("nan"), True, codec.Lossless()])
def test_wrong_qualities_are_refused(given):
    with pytest.raises(codec.ArgumentError, match="quality"):
        quality_of(given)
    with pytest.raises(codec.ArgumentError, match="quality of a pipeline"):
        bits_of(given)
