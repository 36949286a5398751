"""codec.options(within=) is a spec, a preset or "bfloat16"; specs without a meaning there are refused at once."""

import pickle

import numpy as np
import pytest

import codec
from codec._options import settings_of


def test_within_is_a_spec_a_preset_or_bfloat16():
    assert codec.options().within is None
    assert codec.options(within="bfloat16").within == "bfloat16"
    assert codec.options(within="small").within == codec.options(within=codec.Quantize(4)).within == codec.Quantize(4)
    for spec in (codec.Lossless(), codec.Float8(), codec.Ternary(), codec.Truncate(2), codec.Truncate(guard="max")):
        found = codec.options(within=spec)
        assert found.within == spec
        assert pickle.loads(pickle.dumps(found)) == found


def test_within_is_inherited_and_overridden():
    with codec.options(within="balanced", threads=2):
        assert settings_of(codec.options(threads=1)).within == codec.preset("balanced")
        assert settings_of(codec.options(within="bfloat16")).within == "bfloat16"
    assert settings_of(None).within is None


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (codec.TopK(), "TopK.* needs error feedback"),
        (codec.Sign(), "Sign.* needs error feedback"),
        ("smallest", "within='smallest' needs error feedback"),
        (codec.Truncate(guard="feedback"), "needs error feedback"),
        (codec.Truncate(), "needs an optimizer's state"),
        ("near", "within='near' needs an optimizer's state"),
        (codec.Truncate(1).bind(levels=np.ones(3, np.uint8)), "needs an optimizer's state"),
        (codec.Delta(), "needs a base"),
        ("float8", "the presets are .*'balanced'"),
        (8, "not a spec: 8"),
        (codec.Float8, "not a spec"),
    ],
)
def test_specs_that_cannot_be_used_within_a_machine_are_refused(wrong, text):
    with pytest.raises(codec.SpecError, match=text):
        codec.options(within=wrong)
