"""codec_traits, the only answer to "is a codec lossless, of fixed rate, entropy-coded?", agrees with frames."""

import re
from pathlib import Path

import numpy as np
import pytest

import codec
from codec._c import traits
from codec._c.library import ffi, lib
from codec._c.spec_structs import spec_struct
from codec.specs import CODECS
from support.specs import LOSSLESS, LOSSY, TOPKS

USABLE = {**LOSSLESS, **LOSSY, **TOPKS, "truncate_fixed": codec.Truncate(2), "delta": codec.Delta()}
EACH = pytest.mark.parametrize("spec", USABLE.values(), ids=USABLE)
X = np.random.default_rng(0).standard_normal((70, 130), np.float32)
Y = np.random.default_rng(1).standard_normal((70, 130), np.float32) ** 5


def encode(x, spec):
    return codec.encode(x, spec, base=X if traits.needs_base(spec) else None)


@EACH
def test_lossless_codecs_return_the_tensor_and_have_no_residual(spec):
    frame = encode(Y, spec)
    decoded = codec.decode(frame, base=X) if traits.needs_base(spec) else codec.decode(frame)
    assert traits.is_lossless(spec) == np.array_equal(decoded, Y)
    if traits.is_lossless(spec):
        with pytest.raises(codec.SpecError, match=f"{type(spec).__name__} has no residual"):
            codec.ErrorFeedback(spec)
    else:
        codec.ErrorFeedback(spec)


@EACH
def test_only_codecs_of_fixed_rate_have_frames_of_one_size(spec):
    sizes = {len(encode(x, spec)) for x in (Y, X, np.zeros_like(X))}
    assert traits.has_fixed_rate(spec) == (len(sizes) == 1)
    assert not (traits.has_fixed_rate(spec) and traits.is_entropy_coded(spec))


@EACH
def test_codecs_that_reject_nonfinite_values(spec):
    x = Y.copy()
    x[3, 5] = np.nan
    if traits.rejects_nonfinite(spec):
        with pytest.raises(codec.ArgumentError):
            encode(x, spec)
    else:
        encode(x, spec)


def test_table_of_codecs_states_their_traits():
    """Each row of docs/codecs/index.md is a spec, and has its properties in columns 3 to 5."""
    page = (Path(__file__).parents[2] / "docs/codecs/index.md").read_text()
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| [`")]
    for first, _, *stated in rows:
        spec = eval("codec." + re.findall(r"`(.*?)`", first)[0])
        found = traits.is_lossless(spec), traits.has_fixed_rate(spec), not traits.rejects_nonfinite(spec)
        assert [text in ("yes", "encoded") for text in stated[:3]] == list(found), spec
    assert len(rows) == len(CODECS)


def test_traits_of_an_invalid_spec_are_an_error():
    found, invalid = ffi.new("uint32_t *"), ffi.new("codec_spec *", spec_struct(codec.Quantize())[0])
    invalid.bits = 9
    assert lib.codec_traits(invalid, found) == lib.CODEC_BAD_SPEC
    assert lib.codec_traits(ffi.NULL, found) == lib.CODEC_BAD_ARGUMENT
    assert lib.codec_traits(spec_struct(codec.Quantize()), ffi.NULL) == lib.CODEC_BAD_ARGUMENT
