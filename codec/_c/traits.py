"""Properties of specs, which the C library knows: lossless, of fixed rate, entropy-coded, and others."""

from typing import Any

from codec._c.library import check, ffi, lib
from codec._c.spec_structs import spec_struct
from codec.specs import Spec


def _has(spec: Spec, trait: int) -> bool:
    found = ffi.new("uint32_t *")
    check(lib.codec_traits(spec_struct(spec), found))
    return bool(found[0] & trait)


def is_lossless(spec: Spec) -> bool:
    """Return True if decoding returns exactly the tensor. All other codecs take a residual."""
    return _has(spec, lib.CODEC_TRAIT_LOSSLESS)


def has_fixed_rate(spec: Spec) -> bool:
    """Return True if the size of a frame depends on the shape of the tensor alone."""
    return _has(spec, lib.CODEC_TRAIT_FIXED_RATE)


def is_entropy_coded(spec: Spec) -> bool:
    """Return True if symbols are coded with a codebook."""
    return _has(spec, lib.CODEC_TRAIT_ENTROPY)


def rejects_nonfinite(spec: Spec) -> bool:
    """Return True if encoding refuses NaN and Inf."""
    return _has(spec, lib.CODEC_TRAIT_FINITE)


def needs_base(spec: Spec) -> bool:
    """Return True if values are encoded against a base."""
    return _has(spec, lib.CODEC_TRAIT_BASE)


def sums_codes(struct: Any) -> bool:
    """Return True if codes of several frames can be added as integers. `struct`: codec_spec of a frame."""
    found = ffi.new("uint32_t *")
    lib.codec_traits(ffi.addressof(struct), found)  # stays 0 if the parameters are invalid
    return bool(found[0] & lib.CODEC_TRAIT_SUMS)
