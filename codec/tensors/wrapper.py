"""Tensors reinterpreted as another dtype, or as a flat bucket of parameters."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from codec.tensors.segments import Records, pack
from codec.tensors.view import dtype_name


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Tensor with the dtype and segments to read it with, made by :func:`view`."""

    tensor: Any
    dtype: str | None = None
    segments: Records | None = None


def view(tensor: Any, dtype: Any = None, segments: Iterable[tuple[int, tuple[int, ...]]] | None = None) -> View:
    """Read a tensor's memory as another dtype, or as a flat bucket of parameters with shapes.

    Nothing is copied. The result can be given wherever a tensor to encode or to reduce is expected.

    Parameters
    ----------
    tensor : array, tensor or buffer
        Any tensor that :func:`encode` takes, and arrays of dtypes that :func:`encode` does not know.
    dtype : str, type or dtype, optional
        Dtype of the values, such as ``"bfloat16"`` for an array of uint16, or ``"uint64"`` for one of complex64. Only
        the itemsize of the tensor's own dtype counts, which must be that of `dtype`. Default: the tensor's own.
    segments : iterable of (int, tuple of int), optional
        Offset, in values, and shape of each parameter inside a flat bucket, ascending; :func:`segments` makes them.
        Lossless models and scales of lossy codecs then follow the rows of each parameter of 4,096 values or more.
        Values outside all segments are encoded as a vector. Default: the tensor's own shape.

    Returns
    -------
    View
        Immutable. Its ``tensor`` is the tensor itself.

    Raises
    ------
    ArgumentError
        `dtype` cannot be encoded, or `segments` are not pairs (offset, shape).

    Examples
    --------
    >>> bits = np.arange(1000, dtype=np.uint16)
    >>> codec.inspect(codec.encode(codec.view(bits, "bfloat16"))).dtype
    'bfloat16'
    >>> parameters = [np.ones((64, 100), np.float32), np.zeros(64, np.float32)]
    >>> bucket = np.concatenate([p.ravel() for p in parameters])
    >>> frame = codec.encode(codec.view(bucket, segments=codec.segments(parameters)))
    """
    return View(
        tensor,
        None if dtype is None else dtype_name(dtype),
        None if segments is None else pack(segments),
    )
