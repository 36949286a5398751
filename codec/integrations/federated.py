"""Arrays of federated learning as bytes: the common part of the integrations of Flower and NVFlare.

An array travels as a frame, or, with a lossy codec, as the difference to the base: the array of this name that the
round began with, which both sides hold.
"""

from typing import Any

import numpy as np

import codec
from codec.arguments import shown
from codec.errors import ArgumentError, FrameError, SpecError, StateError
from codec.presets import resolve
from codec.spec_text import spec_of
from codec.specs import BoundSpec, Delta, Lossless, Spec, check_contraction, require_feedback

FRAME = "codec.frame"  # a frame of the array; one of Delta refers to the base
DIFFERENCE = "codec.difference"  # digest of the base, 8 bytes, little-endian; then a frame of the float32 difference

_FLOATS = "float32", "float64", "bfloat16", "float16"


def checked_spec(spec: Any, feedback: bool) -> Spec:
    """Return the spec of an argument, which may be a text such as "Quantize(4)".

    Raises
    ------
    SpecError
        It is none, is bound to an optimizer, or does not converge with, or without, error feedback.
    """
    kind, bound = resolve(spec_of(spec) if isinstance(spec, str) else spec)
    if isinstance(bound, BoundSpec):
        raise SpecError(f"clients have no use for {shown(bound)}: pass a spec that is not bound to an optimizer")
    if not feedback:
        require_feedback(kind, "leave feedback=False out")
    elif not isinstance(kind, Lossless | Delta):
        check_contraction(kind)
    return kind


def encode_array(x: Any, spec: Spec, base: Any, residual: np.ndarray[Any, Any] | None) -> tuple[str, bytes]:
    """Return an array as its kind, FRAME or DIFFERENCE, and bytes.

    Parameters
    ----------
    x : array or tensor
        Values. Integers, bool and float8 are sent without loss.
    spec : Spec
        Codec. Lossy ones code the difference to the base.
    base : array or tensor, or None
        Array that the round began with, of the shape of `x`. None: lossy codecs code `x` itself.
    residual : float32 array or None
        Residual of error feedback, which is replaced. None: without.

    Raises
    ------
    CodecError
        As in :func:`codec.encode`.
    """
    if base is not None and tuple(base.shape) != tuple(x.shape):
        raise ArgumentError(f"the array has shape {tuple(x.shape)}, but {tuple(base.shape)} when the round began")
    if isinstance(spec, Delta) and base is not None and x.dtype == base.dtype:  # a mean of counters is no counter
        return FRAME, codec.encode(x, spec, base=base)
    if isinstance(spec, Lossless | Delta) or not is_float(x):
        return FRAME, codec.encode(x, spec if isinstance(spec, Lossless) else Lossless())
    values = _wide(x) if base is None else _wide(x) - _wide(base)
    values = np.ascontiguousarray(values, np.float32)
    stream = codec.digest(values)  # another one for each client, round and array
    frame = codec.encode(values, spec, residual=residual, feedback=residual is not None, stream=stream)
    if base is None:
        return FRAME, frame
    return DIFFERENCE, codec.digest(base).to_bytes(8, "little") + frame


def decode_array(kind: str, data: bytes, base: Any, like: Any = None) -> Any:
    """Return the array of :func:`encode_array`.

    Parameters
    ----------
    kind : str
        FRAME or DIFFERENCE.
    data : bytes
        Bytes, which may be hostile.
    base : array or tensor, or None
        Array that the round began with. Another shape is an error, so that no frame allocates more than `base` has.
    like : tensor, optional
        Kind of the result of a frame, as in :func:`codec.decode`.

    Returns
    -------
    array
        Values. A difference is added to the base in float32, or float64 if the base is, and that is the result's dtype.

    Raises
    ------
    CodecError
        The bytes are damaged, or are of another shape or base.
    """
    if kind not in (FRAME, DIFFERENCE):
        raise FrameError(f"the array is of the kind {shown(kind)}, not {FRAME!r} or {DIFFERENCE!r}")
    frame = memoryview(data)[8:] if kind == DIFFERENCE else memoryview(data)
    if base is not None and (shape := codec.inspect(frame).shape) != tuple(base.shape):
        raise FrameError(f"the frame has shape {shape}, but the array had {tuple(base.shape)} when the round began")
    if kind == FRAME:
        return codec.decode(frame, base=base, like=like)
    if base is None or codec.digest(base).to_bytes(8, "little") != data[:8]:
        raise StateError("the difference refers to other values than those of the round: send values of this round")
    difference = np.empty(tuple(base.shape), np.float32)
    codec.decode(frame, out=difference)
    return _wide(base) + difference


def is_float(x: Any) -> bool:
    """Return True for arrays whose difference lossy codecs can code: floats of 16 bits and more."""
    return str(x.dtype).removeprefix("torch.") in _FLOATS


def _wide(x: Any) -> Any:
    """Return the values of an array or tensor in numpy, as float32 if they have 16 bits."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        return (x.float() if x.dtype.itemsize == 2 else x).numpy()
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x
