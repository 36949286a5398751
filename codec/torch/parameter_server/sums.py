"""Encode sums of ternary codes for replies to workers: as a Lossless frame of integers, or packed bits."""

import struct
from collections.abc import Sequence
from math import isfinite, prod
from typing import Any

import numpy as np
import torch

import codec
from codec import FrameError, SpecError
from codec.torch import _compat
from codec.torch.transport.messages import Array

_HEAD = struct.Struct("<IfI")  # number of terms, scale, form (_FRAME or _PACKED)
_FRAME, _PACKED = range(2)  # Lossless frame of the sums; bit-packed sums
_MOST_TERMS = 32_767  # maximum number of terms, so that their sum fits int16


def bits_per_sum(terms: int) -> int:
    """Return the number of bits that hold a sum of W = `terms` ternary codes, ceil(log2(2 W + 1))."""
    return (2 * terms).bit_length()


def encode_average(frames: Sequence[Any]) -> tuple[bytes, bytes]:
    """Add the codes of ternary frames, and encode the sums with their scale.

    Parameters
    ----------
    frames : sequence of buffers
        Frames of :class:`codec.Ternary`, which must have the same scale.

    Returns
    -------
    head, body : bytes
        The head holds the number of frames, the scale and the form. The body holds the sums in the smaller of the two
        forms.

    Raises
    ------
    SpecError
        A frame is not ternary, or scales differ.
    """
    try:
        sums, scale = codec.sum_codes(frames)
    except codec.ArgumentError as e:
        raise SpecError(f"exact_mean needs Ternary frames with one scale: {e}") from None
    terms, flat = len(frames), sums.reshape(-1)
    frame = bytes(codec.encode(flat))
    if len(frame) <= -(-flat.size * bits_per_sum(terms) // 8):
        return _HEAD.pack(terms, scale, _FRAME), frame
    return _HEAD.pack(terms, scale, _PACKED), _pack(flat, terms)


def _pack(sums: Array, terms: int) -> bytes:
    digits = (sums.astype(np.int32) + terms).astype("<u4").view(np.uint8).reshape(-1, 4)
    bits = np.unpackbits(digits, axis=1, count=bits_per_sum(terms), bitorder="little")
    return np.packbits(bits.reshape(-1), bitorder="little").tobytes()


def exact_mean(value: Array, shape: tuple[int, ...], dtype: torch.dtype, scale: float | None) -> torch.Tensor:
    """Decode a result of :func:`encode_average` to the mean of W workers, float32(sum * (scale / W)) as `dtype`.

    Parameters
    ----------
    value : ndarray of uint8
        Head and body.
    shape, dtype
        Shape and dtype of the tensor to return.
    scale : float or None
        Scale that all workers have agreed on; None: unknown.

    Raises
    ------
    FrameError
        The value is malformed, has sums that are out of range, or has another scale.
    """
    n = prod(shape)
    if value.nbytes < _HEAD.size:
        raise FrameError(
            f"a sum of codes must have at least {_HEAD.size} bytes, the size of its head, got {value.nbytes}"
        )
    terms, found, form = _HEAD.unpack(value[: _HEAD.size].tobytes())
    if not 0 < terms <= _MOST_TERMS or not isfinite(found) or found < 0 or form not in (_FRAME, _PACKED):
        raise FrameError(f"a sum of codes with {terms} terms, scale {found} and form {form} is not valid")
    if scale is not None and found != scale and n:
        raise FrameError(f"a sum of codes has the scale {found}, but the workers have agreed on {scale}")
    sums = _unpack(value[_HEAD.size :], n, terms, form)
    if n and (int(sums.min()) < -terms or int(sums.max()) > terms):
        raise FrameError(
            f"a sum of {terms} ternary codes must be from -{terms} to {terms}, but the server has sent larger ones"
        )
    mean = np.empty(n, np.float32)
    with np.errstate(over="ignore"):
        np.multiply(sums, np.float64(found) / terms, out=mean, casting="same_kind")
    return _compat.from_numpy(mean).to(dtype).reshape(shape)


def _unpack(body: Array, n: int, terms: int, form: int) -> Array:
    if form == _FRAME:
        sums = np.empty(n, np.int8 if terms <= 127 else np.int16)
        try:
            codec.decode(body, out=sums)
        except codec.ArgumentError as e:
            raise FrameError(f"the sums of codes are not a frame of {n} integers: {e}") from None
        return sums
    bits = bits_per_sum(terms)
    if body.nbytes != -(-n * bits // 8):
        raise FrameError(f"{n} sums of {bits} bits must have {-(-n * bits // 8)} bytes, got {body.nbytes}")
    found = np.unpackbits(body, bitorder="little")
    if found[n * bits :].any():
        raise FrameError("the bits after the last sum must be 0")
    digits = np.zeros((n, 4), np.uint8)
    digits[:, : -(-bits // 8)] = np.packbits(found[: n * bits].reshape(n, bits), axis=1, bitorder="little")
    return digits.view("<u4").reshape(-1).astype(np.int32) - terms
