"""Encode and decode arrays for federated learning; shared by the Flower and NVFlare integrations.

An array is sent as a frame. A lossy codec encodes the difference from the base instead: the array of the same name that
the server sent at the start of the round, which both sides store.
"""

from typing import Any

import numpy as np

import codec
from codec._c.traits import is_lossless
from codec.arguments import shown
from codec.errors import ArgumentError, FrameError, SpecError, StateError
from codec.presets import resolve
from codec.spec_text import spec_of
from codec.specs import BoundSpec, Delta, Lossless, Spec, check_contraction, require_feedback

FRAME = "codec.frame"  # kind of bytes: a frame of the array; a Delta frame refers to the base
DIFFERENCE = "codec.difference"  # kind of bytes: digest of the base, 8 bytes, then a frame of the float32 difference

_FLOATS = "float32", "float64", "bfloat16", "float16"


def checked_spec(spec: Any, feedback: bool) -> Spec:
    """Return `spec` as a Spec; it may be a string such as "Quantize(4)".

    Raises
    ------
    SpecError
        `spec` is not a spec, or is bound to an optimizer. Or training with it does not converge with this `feedback`.
    """
    kind, bound = resolve(spec_of(spec) if isinstance(spec, str) else spec)
    if isinstance(bound, BoundSpec):
        raise SpecError(f"spec must not be bound to an optimizer, got {shown(bound)}: pass the spec itself")
    if not feedback:
        require_feedback(kind, "leave feedback=False out")
    elif not is_lossless(kind):
        check_contraction(kind)
    return kind


def encode_array(x: Any, spec: Spec, base: Any, residual: np.ndarray[Any, Any] | None) -> tuple[str, bytes]:
    """Encode an array. Return the kind of the bytes, FRAME or DIFFERENCE, and the bytes.

    Parameters
    ----------
    x : array or tensor
        Values. Integers, bool and float8 are encoded losslessly.
    spec : Spec
        Codec. Lossy codecs encode the difference from the base.
    base : array or tensor, or None
        Array at the start of the round, with the shape of `x`. None: lossy codecs encode `x` itself.
    residual : float32 array or None
        Residual of error feedback, updated in place. None: no error feedback.

    Raises
    ------
    CodecError
        As in :func:`codec.encode`.
    """
    if base is not None and tuple(base.shape) != tuple(x.shape):
        raise ArgumentError(
            f"the array must keep the shape that it had when the round began, {tuple(base.shape)}, got {tuple(x.shape)}"
        )
    # Dtypes differ if averaging made floats of integers.
    if isinstance(spec, Delta) and base is not None and x.dtype == base.dtype:
        return FRAME, codec.encode(x, spec, base=base)
    if is_lossless(spec) or not is_float(x):
        return FRAME, codec.encode(x, spec if isinstance(spec, Lossless) else Lossless())
    values = _wide(x) if base is None else _wide(x) - _wide(base)
    values = np.ascontiguousarray(values, np.float32).reshape(tuple(x.shape))  # numpy makes scalars 1-d
    stream = codec.digest(values)  # random stream, which differs between clients, rounds and arrays
    frame = codec.encode(values, spec, residual=residual, feedback=residual is not None, stream=stream)
    if base is None:
        return FRAME, frame
    return DIFFERENCE, codec.digest(base).to_bytes(8, "little") + frame


def decode_array(kind: str, data: bytes, base: Any, like: Any = None) -> Any:
    """Decode bytes of :func:`encode_array`.

    Parameters
    ----------
    kind : str
        FRAME or DIFFERENCE.
    data : bytes
        Encoded bytes, which may come from an untrusted sender.
    base : array or tensor, or None
        Array at the start of the round. A frame of another shape raises FrameError before the result is allocated.
    like : tensor, optional
        Array that sets library and device of the result of FRAME, as in :func:`codec.decode`.

    Returns
    -------
    array
        Values. With DIFFERENCE, the sum of base and difference, a numpy array of float32, or float64 if the base is
        float64.

    Raises
    ------
    CodecError
        The bytes are damaged, or were encoded for another shape or base.
    """
    if kind not in (FRAME, DIFFERENCE):
        raise FrameError(f"the kind of an encoded array must be {FRAME!r} or {DIFFERENCE!r}, got {shown(kind)}")
    frame = memoryview(data)[8:] if kind == DIFFERENCE else memoryview(data)
    if base is not None and (shape := codec.inspect(frame).shape) != tuple(base.shape):
        raise FrameError(f"the frame has shape {shape}, but the array had {tuple(base.shape)} when the round began")
    if kind == FRAME:
        return codec.decode(frame, base=base, like=like)
    if base is None or codec.digest(base).to_bytes(8, "little") != data[:8]:
        raise StateError(
            "the difference is not one from the arrays of this round: the client must train from the arrays that it "
            "received"
        )
    difference = np.empty(tuple(base.shape), np.float32)
    codec.decode(frame, out=difference)
    return np.asarray(_wide(base) + difference)  # numpy adds 0-d arrays to a scalar


def is_float(x: Any) -> bool:
    """Return True if lossy codecs can encode the array: floats of at least 16 bits."""
    return str(x.dtype).removeprefix("torch.") in _FLOATS


def _wide(x: Any) -> Any:
    """Return an array or tensor as a numpy array; 16-bit floats are converted to float32."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        return (x.float() if x.dtype.itemsize == 2 else x).numpy()
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x
