"""Chunks of arrays as frames: the common part of the codecs for numcodecs and Zarr."""

from typing import Any

import numpy as np

import codec
from codec._c.library import ITEMSIZE, lib
from codec.errors import ArgumentError, CodecError, FrameError
from codec.spec_config import Config, config_of, self_contained, spec_of_config
from codec.specs import Spec
from codec.tensors.view import Array, dtype_name

CODEC_NAME = "tensor-codec"
MAX_RANK: int = lib.CODEC_MAX_RANK


def checked(spec: Any, dtype: Any) -> tuple[Spec, str | None]:
    """Return the spec and the name of the dtype that a codec was configured with.

    Raises
    ------
    SpecError
        `spec` is no spec, or needs an optimizer or a base.
    ArgumentError
        `dtype` cannot be encoded with this spec.
    """
    plain = self_contained(spec)
    name = None if dtype is None else dtype_name(dtype)
    if name is not None:
        codec.bound((), name, plain)
    return plain, name


def configuration(spec: Spec, dtype: str | None) -> Config:
    """Return the JSON object of a configuration."""
    return config_of(spec) | ({} if dtype is None else {"dtype": dtype})


def configured(config: dict[str, Any]) -> tuple[Spec, Any]:
    """Return spec and dtype of a JSON object; raise SpecError for an unknown key or a wrong value."""
    given = dict(config)
    dtype = given.pop("dtype", None)
    return spec_of_config(given), dtype


def values_of(x: Array, dtype: str | None) -> tuple[Array, str]:
    """Return the memory of a contiguous array as an array to encode or to decode into, and the name of its dtype.

    Parameters
    ----------
    x : numpy.ndarray
        C-contiguous array of any dtype but objects.
    dtype : str, optional
        Dtype as which the items, or the bytes if x has items of one byte, are read. Default: x's own, float32 or
        float64 for complex numbers, int64 for times, and otherwise unsigned integers, such as for big-endian numbers,
        whose bits are kept.

    Raises
    ------
    ArgumentError
        x has no whole items of `dtype`, or items of another size.
    """
    if dtype is not None:
        size = ITEMSIZE[dtype]
        if x.itemsize == 1 < size and x.nbytes % size == 0:
            x = x.reshape(-1)  # bytes
        elif x.itemsize != size:
            raise ArgumentError(f"items of {x.dtype} have {x.itemsize} bytes, those of dtype={dtype!r} have {size}")
        return x.view(f"u{size}"), dtype
    kind, size = x.dtype.kind, x.itemsize
    if kind == "c":
        return x.reshape(-1).view(f"f{size // 2}"), f"float{4 * size}"
    if kind in "mM":
        return x.view(np.int64), "int64"
    if x.dtype.isnative and kind in "biuf" and x.dtype.name in ITEMSIZE:
        return x, x.dtype.name
    bits = x.reshape(-1).view(f"u{size}" if size in (2, 4, 8) else np.uint8)
    return bits, bits.dtype.name


def encode(x: Array, spec: Spec, dtype: str | None) -> bytes:
    """Return the frame of a C-contiguous array, without dimensions if it has more than frames can have.

    Raises
    ------
    ArgumentError
        `spec` does not take this dtype or these values.
    """
    values, name = values_of(x, dtype)
    return codec.encode(codec.view(values if values.ndim <= MAX_RANK else values.reshape(-1), name), spec)


def decode_into(frame: Any, out: Array, dtype: str | None) -> None:
    """Decode the frame that :func:`encode` made of an array like `out`, which is unchanged after an error.

    Raises
    ------
    FrameError
        The bytes are no valid frame, or the frame of another array.
    """
    values, name = values_of(out, dtype)
    values = values if values.ndim <= MAX_RANK else values.reshape(-1)
    info = codec.inspect(frame)
    if (info.dtype, info.shape) != (name, values.shape):
        raise FrameError(f"the chunk holds {info.dtype} of shape {info.shape}, not {name} of {values.shape}")
    decode(frame, out=values)


def decode(frame: Any, **how: Any) -> Array:
    """Return :func:`codec.decode` of a frame, and raise FrameError for one that needs more than its bytes."""
    try:
        return codec.decode(frame, **how)
    except FrameError:
        raise
    except CodecError as e:
        raise FrameError(f"not the frame of a chunk: {e}") from None
