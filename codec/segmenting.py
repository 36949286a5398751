"""Parts of a flat bucket that have shapes of their own."""

import struct
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, cast

from codec.errors import SpecError
from codec.specs import whole

Segments = list[tuple[int, tuple[int, ...]]]

_RECORD = "QII8Q"  # codec_segment: packed at once, for a gradient bucket may have hundreds
_NO_SHAPE = (0,) * 8


def segments(tensors: Any) -> Segments:
    """Where tensors lie in a flat bucket that has all of them, one after the other: what ``segments=`` takes.

    Parameters
    ----------
    tensors : iterable of tensors or shapes, mapping of them, or torch.nn.Module
        In the order of the bucket; a shape is a tuple or list of ints. Scalars have the shape (). Of a module its
        parameters.

    Returns
    -------
    list of (int, tuple of int)
        Offset, in values, and shape of each.

    Raises
    ------
    SpecError
        One of them has no shape, or it is a single tensor.

    Examples
    --------
    >>> parameters = [np.zeros((64, 100), np.float32), np.zeros(64, np.float32)]
    >>> codec.segments(parameters)
    [(0, (64, 100)), (6400, (64,))]
    >>> bucket = np.concatenate([p.ravel() for p in parameters])
    >>> frame = codec.encode(bucket, segments=codec.segments(parameters))
    """
    if hasattr(tensors, "parameters"):
        tensors = tensors.parameters()
    if hasattr(tensors, "shape") or not isinstance(tensors, Iterable):
        raise SpecError(f"segments are made of many tensors or shapes, not of {type(tensors).__name__}")
    items = cast(Mapping[Any, Any], tensors).values() if isinstance(tensors, Mapping) else cast(Iterable[Any], tensors)
    found: Segments = []
    offset = 0
    for item in items:
        shape = getattr(item, "shape", item)
        try:
            sizes = tuple(whole("a dimension", n, 0) for n in shape)
        except TypeError:
            raise SpecError(f"segment {len(found)} is neither a tensor nor a shape: {item!r}") from None
        found.append((offset, sizes))
        offset += prod(sizes)
    return found


def pairs_of(given: Any) -> Segments:
    """``segments=``, which may be any iterable of pairs."""
    try:
        return [(offset, tuple(shape)) for offset, shape in given]
    except (TypeError, ValueError):
        raise SpecError("segments are pairs (offset, shape)") from None


def pack(pairs: Any) -> bytes:
    """``segments=`` as an array of codec_segment."""
    pairs = pairs_of(pairs)
    for _, shape in pairs:
        if len(shape) > len(_NO_SHAPE):
            raise SpecError(f"segment of rank {len(shape)} is above {len(_NO_SHAPE)}")
    fields = [x for offset, shape in pairs for x in (offset, len(shape), 0, *shape, *_NO_SHAPE[len(shape) :])]
    try:
        return struct.pack(_RECORD * len(pairs), *fields)
    except struct.error as e:
        raise SpecError(f"segments are pairs (offset, shape) of integers, none below 0: {e}") from None
