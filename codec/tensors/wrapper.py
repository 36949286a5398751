"""Tensors reinterpreted as another dtype, or as a flat bucket of parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from codec.tensors.segments import Records, names_of, pack
from codec.tensors.segments import segments as segments_of
from codec.tensors.view import dtype_name


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Tensor with the dtype and segments to read it with, made by :func:`view`."""

    tensor: Any
    dtype: str | None = None
    segments: Records | None = None
    names: tuple[str, ...] | None = None  # name of each segment


def view(tensor: Any, dtype: Any = None, segments: Any = None) -> View:
    """Read a tensor's memory as another dtype, or as a flat bucket of parameters with shapes.

    Nothing is copied. The result can be given wherever a tensor to encode or to reduce is expected.

    Parameters
    ----------
    tensor : array, tensor or buffer
        Any tensor that :func:`encode` takes, and arrays of dtypes that :func:`encode` does not know.
    dtype : str, type or dtype, optional
        Dtype of the values, such as ``"bfloat16"`` for an array of uint16, or ``"uint64"`` for one of complex64. Only
        the itemsize of the tensor's own dtype counts, which must be that of `dtype`. Default: the tensor's own.
    segments : mapping, torch.nn.Module, or iterable of (int, tuple of int), optional
        Parameters inside a flat bucket. A mapping from names to shapes or tensors, in the order of the bucket without
        gaps, or a module, which stands for its parameters; error feedback keeps residuals by these names. Or pairs of
        an offset, in values, and a shape, ascending; :func:`segments` makes them. Scales of lossy codecs then follow
        the rows of each parameter, and lossless models those of each parameter of 8,192 values or more. Values outside
        all segments are encoded as a vector. Frames of thousands of tiny parameters have a limit (``encoder.md``,
        section 7.1), beyond which those share scales. Default: the tensor's own shape.

    Returns
    -------
    View
        Immutable. Its ``tensor`` is the tensor itself.

    Raises
    ------
    ArgumentError
        `dtype` cannot be encoded, or `segments` are none of these.

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
