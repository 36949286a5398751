"""Wrapper of a tensor that is encoded as another dtype, or as a flat bucket of parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from codec.tensors.segments import Records, names_of, pack
from codec.tensors.segments import segments as segments_of
from codec.tensors.view import dtype_name


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Tensor, together with the dtype and the segments with which to encode it, made by :func:`view`."""

    tensor: Any
    dtype: str | None = None
    segments: Records | None = None
    names: tuple[str, ...] | None = None  # name of each segment


def view(tensor: Any, dtype: Any = None, segments: Any = None) -> View:
    """Interpret a tensor as another dtype, or as a flat bucket of parameters with shapes.

    Nothing is copied. The result is accepted wherever a tensor to encode or to reduce is.

    Parameters
    ----------
    tensor : array, tensor or buffer
        Any tensor that :func:`encode` accepts, or an array of a dtype that :func:`encode` does not accept.
    dtype : str, type or dtype, optional
        Dtype as which the bits are read, such as ``"bfloat16"`` for an array of uint16, or ``"uint64"`` for one of
        complex64. It must have the itemsize of the tensor's own dtype, which is the default.
    segments : mapping, torch.nn.Module, or iterable of (int, tuple of int), optional
        Parameters inside a flat bucket: a mapping from names to shapes or tensors, in the order of the bucket and
        without gaps; a module, whose parameters are used; or ascending pairs of an offset, in values, and a shape, as
        :func:`segments` returns them. Error feedback stores residuals under the names, if there are names. With
        segments, the groups of lossy codecs follow the rows of each parameter, and so do the scale models of lossless
        frames for each parameter of 8,192 values or more. Values outside all segments are encoded as a vector. The
        number of segments with their own scales is limited (``encoder.md``, section 7.1): tiny parameters beyond the
        limit share scales. Default: the tensor's own shape.

    Returns
    -------
    View
        Immutable object, whose attribute ``tensor`` is the given tensor.

    Raises
    ------
    ArgumentError
        `dtype` cannot be encoded, or `segments` has another type.

    Examples
    --------
    >>> bits = np.arange(1000, dtype=np.uint16)
    >>> codec.inspect(codec.encode(codec.view(bits, "bfloat16"))).dtype
    'bfloat16'
    >>> parameters = {"weight": np.ones((64, 100), np.float32), "bias": np.zeros(64, np.float32)}
    >>> bucket = np.concatenate([p.ravel() for p in parameters.values()])
    >>> frame = codec.encode(codec.view(bucket, segments=parameters))
    """
    names = None
    if hasattr(segments, "named_parameters"):
        segments = dict(segments.named_parameters())
    if isinstance(segments, Mapping):
        names = names_of(cast(Mapping[Any, Any], segments))
        segments = segments_of(cast(Mapping[Any, Any], segments))
    return View(
        tensor,
        None if dtype is None else dtype_name(dtype),
        None if segments is None else pack(segments),
        names,
    )
