"""Encode chunks of arrays as frames; shared by the codecs for numcodecs and Zarr."""

from typing import Any

import numpy as np

import codec
from codec._c.library import ITEMSIZE, UNSIGNED, lib
from codec.errors import ArgumentError, CodecError, FrameError
from codec.spec_config import Config, config_of, self_contained, spec_of_config
from codec.specs import Spec
from codec.tensors.view import Array, dtype_name

CODEC_NAME = "tensor-codec"
MAX_RANK: int = lib.CODEC_MAX_RANK


def checked(spec: Any, dtype: Any) -> tuple[Spec, str | None]:
    """Validate the arguments of a codec, and return the spec and the name of the dtype.

    Raises
    ------
    SpecError
        `spec` is not a spec, or needs an optimizer or a base.
    ArgumentError
        `dtype` cannot be encoded with this spec.
    """
    plain = self_contained(spec)
    name = None if dtype is None else dtype_name(dtype)
    if name is not None:
        codec.bound((), name, plain)
    return plain, name


def configuration(spec: Spec, dtype: str | None) -> Config:
    """Return spec and dtype as a JSON object, from which :func:`configured` restores them."""
    return config_of(spec) | ({} if dtype is None else {"dtype": dtype})


def configured(config: dict[str, Any]) -> tuple[Spec, Any]:
    """Return the spec and the dtype that `config`, a JSON object, describes.

    Raises
    ------
    SpecError
        `config` has an unknown key or an invalid value.
    """
    given = dict(config)
    dtype = given.pop("dtype", None)
    return spec_of_config(given), dtype


def values_of(x: Array, dtype: str | None) -> tuple[Array, str]:
    """Return a view of a contiguous array with a dtype that frames support, and the name of that dtype.

    Parameters
    ----------
    x : numpy.ndarray
        C-contiguous array of any dtype except objects.
    dtype : str, optional
        Dtype as which the memory of x is interpreted. Items of x must have the size of this dtype, or one byte.
        Default: the dtype of x; float32 or float64 for complex numbers; int64 for dates and time differences. Other
        dtypes, such as big-endian numbers, are interpreted as unsigned integers with the same bits.

    Raises
    ------
    ArgumentError
        Items of x have neither the size of `dtype` nor one byte, or x is not a whole number of items of `dtype`.
    """
    if dtype is not None:
        size = ITEMSIZE[dtype]
        if x.itemsize == 1 < size and x.nbytes % size == 0:
            x = x.reshape(-1)  # items are single bytes of values
        elif x.itemsize != size:
            raise ArgumentError(f"items of {x.dtype} have {x.itemsize} bytes, those of dtype={dtype!r} have {size}")
        return x.view(UNSIGNED[dtype]), dtype
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
    """Return the frame of a C-contiguous array. The array is flattened if it has more than MAX_RANK dimensions.

    Raises
    ------
    ArgumentError
        `spec` does not support this dtype or these values.
    """
    values, name = values_of(x, dtype)
    return codec.encode(codec.view(values if values.ndim <= MAX_RANK else values.reshape(-1), name), spec)


def decode_into(frame: Any, out: Array, dtype: str | None) -> None:
    """Decode a frame of :func:`encode` into `out`, which is unchanged after an error.

    Raises
    ------
    FrameError
        The bytes are not a valid frame, or the frame has another dtype or shape than `out`.
    """
    values, name = values_of(out, dtype)
    values = values if values.ndim <= MAX_RANK else values.reshape(-1)
    info = codec.inspect(frame)
    if (info.dtype, info.shape) != (name, values.shape):
        raise FrameError(f"the chunk holds {info.dtype} of shape {info.shape}, not {name} of {values.shape}")
    decode(frame, out=values)


def decode(frame: Any, **how: Any) -> Array:
    """Decode a frame with :func:`codec.decode`; raise FrameError also if decoding needs a base or other state."""
    try:
        return codec.decode(frame, **how)
    except FrameError:
        raise
    except CodecError as e:
        raise FrameError(f"not the frame of a chunk: {e}") from None
