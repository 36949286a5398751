"""Messages of errors about a tensor's dtype or values; each names the fault, the accepted input and a remedy."""

import math

import numpy as np

from codec import _call
from codec._c.library import DTYPES, UNSIGNED, ffi, lib
from codec._c.spec_structs import spec_struct
from codec.engines.request import EncodeRequest
from codec.errors import ArgumentError, CodecError, SpecError, Status
from codec.specs import Spec
from codec.tensors.view import Array, TensorView, fetch

CARRIES_NONFINITE = 'Lossless or Float8(nonfinite="propagate")'
# By dtype: masks of the exponent bits, which are all set in NaN and Inf, and of the sign bit.
_EXPONENT = {"float32": (0x7F800000, 1 << 31), "bfloat16": (0x7F80, 1 << 15), "float16": (0x7C00, 1 << 15)}


def explain(error: ArgumentError | SpecError, r: EncodeRequest) -> None:
    """Replace the message of an encoding error about dtype, values or scale by one that names the fault and a remedy.

    Parameters
    ----------
    error : ArgumentError or SpecError
        Error that an engine has raised; its arguments are replaced.
    r : EncodeRequest
        Request that the engine refused.
    """
    explain_dtype(error, r.spec, r.x.dtype, "x")
    scale, total = f"scale={getattr(r.spec, 'scale', None)}", "x" if r.residual is None else "x + residual"
    if error.code == Status.NONFINITE:
        error.args = (nonfinite_message(r.x, r.spec, "x"),)
    elif error.code == Status.BAD_SCALE:
        error.args = (f"{scale} is smaller than the largest magnitude in {total}: use a larger scale=, or None",)
    elif error.code == Status.ROUNDED_SCALE:
        error.args = (f"{scale} is 0 or Inf in {r.x.dtype}, the dtype of x: use another scale=, or None",)


def explain_dtype(error: CodecError, spec: Spec, dtype: str, name: str) -> None:
    """Replace the message of an error about a dtype that a codec does not accept by one that lists those it accepts."""
    if error.code == Status.BAD_DTYPE:
        struct, size = spec_struct(spec), ffi.new("size_t *")
        *most, last = [
            d for d, n in reversed(DTYPES.items()) if not lib.codec_bound(struct, _call.new_tensor(n, ()), size)
        ]
        accepted = f"{', '.join(most)} or {last}"
        error.args = (f"{type(spec).__name__} accepts {accepted}, got {dtype}: convert {name}, or use Lossless",)


def nonfinite_message(x: TensorView, spec: Spec, name: str, shape: tuple[int, ...] | None = None) -> str:
    """Return the message for NaN or Inf that a codec refuses: their number, the first one's index, and remedies.

    Parameters
    ----------
    x : TensorView
        Tensor that was refused. If all its values are finite, the NaN or Inf is in its sum with the residual.
    spec : Spec
        The codec.
    name : str
        Name of the tensor.
    shape : tuple of int, optional
        Shape for the index of the first NaN or Inf. Default: the shape of `x`.
    """
    remedy = f"{type(spec).__name__} accepts only finite values. Correct them, or use {CARRIES_NONFINITE}"
    try:
        found = count_nonfinite(bits_of(x), x.dtype, shape or x.shape)
    except CodecError:  # the host cannot read the tensor's device
        found = "NaN or Inf"
    if found is None:
        return f"{name} + residual overflows {x.dtype}, or the residual holds NaN or Inf: reset the residual to zeros"
    return f"{name} holds {found}: {remedy}"


def overflow_message(x: TensorView, terms: str) -> str:
    """Return the message for a sum `x` that overflows although the added tensors, named `terms`, are finite."""
    found = count_nonfinite(bits_of(x), x.dtype, x.shape)
    return f"the sum of {terms} overflows {x.dtype}: it holds {found}. Scale them down before they are reduced"


def bits_of(v: TensorView) -> Array:
    """Return the values of a tensor as a flat array of unsigned integers in host memory."""
    host = fetch("x", v)
    return host.array(UNSIGNED[v.dtype])


def count_nonfinite(bits: Array, dtype: str, shape: tuple[int, ...]) -> str | None:
    """Return a phrase with the number of NaN and Inf in a tensor and the index of the first one.

    Parameters
    ----------
    bits : ndarray of unsigned integers
        Flat values.
    dtype : {"float32", "bfloat16", "float16"}
        Dtype of the values.
    shape : tuple of int
        Shape of the tensor.

    Returns
    -------
    str or None
        Such as "NaN or Inf in 2 of 10 values, the first, -Inf, at (0, 3)"; None if all values are finite.
    """
    exponent, sign = _EXPONENT[dtype]
    where = (bits & exponent) == exponent
    if not (count := int(np.count_nonzero(where))):
        return None
    at = int(where.argmax())
    first = int(bits[at])
    kind = "NaN" if first & ~(exponent | sign) else "-Inf" if first & sign else "Inf"
    place = f"({', '.join(map(str, np.unravel_index(at, shape)))})" if len(shape) > 1 else f"index {at}"
    return f"NaN or Inf in {count} of {math.prod(shape)} values, the first, {kind}, at {place}"
