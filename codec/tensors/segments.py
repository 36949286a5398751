"""Segments: offsets and shapes of the parameters in a flat bucket."""

import functools
import struct
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, cast

from codec.arguments import shown, whole
from codec.errors import ArgumentError

Segments = list[tuple[int, tuple[int, ...]]]

_PAIRS = "segments must be a list of pairs (offset, shape), as codec.segments() returns"
_RECORD = "QII8Q"  # layout of the C struct codec_segment, as a format of the module struct
_OF_RANK = [struct.Struct(f"QII{rank}Q{8 * (8 - rank)}x").pack for rank in range(9)]  # by rank: packs a codec_segment


def segments(tensors: Any) -> Segments:
    """Return the offsets and shapes of tensors that are concatenated in a flat bucket, for :func:`view`.

    Parameters
    ----------
    tensors : iterable of tensors or shapes, mapping of them, or torch.nn.Module
        Tensors, or their shapes, in the order of the bucket. A shape is a tuple or list of ints, () for a scalar. For a
        module, its parameters are used.

    Returns
    -------
    list of (int, tuple of int)
        Offset, in values, and shape of each tensor.

    Raises
    ------
    ArgumentError
        An item has no shape, or `tensors` is a single tensor.

    Examples
    --------
    >>> codec.segments([np.zeros((64, 100)), np.zeros(64)])
    [(0, (64, 100)), (6400, (64,))]
    """
    if hasattr(tensors, "parameters"):
        tensors = tensors.parameters()
    if hasattr(tensors, "shape") or not isinstance(tensors, Iterable):
        raise ArgumentError(f"segments() takes a sequence of tensors or shapes, got {type(tensors).__name__}")
    items = cast(Mapping[Any, Any], tensors).values() if isinstance(tensors, Mapping) else cast(Iterable[Any], tensors)
    found: Segments = []
    offset = 0
    for item in items:
        shape = getattr(item, "shape", item)
        try:
            sizes = tuple(whole("a dimension", n, 0) for n in shape)
        except TypeError:
            raise ArgumentError(f"item {len(found)} must be a tensor or a shape, got {shown(item)}") from None
        found.append((offset, sizes))
        offset += prod(sizes)
    return found


def names_of(mapping: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return the keys of a mapping, the parameters' names; raise ArgumentError if a key is not a str."""
    names = tuple(mapping)
    if wrong := [name for name in names if type(name) is not str]:
        raise ArgumentError(
            f"the keys of a mapping of segments must be names, got {shown(wrong[0])}: pass the values of the mapping "
            "instead"
        )
    return names


class Records(bytes):
    """Validated segments of a bucket, packed as an array of the C struct ``codec_segment``."""


def pack(pairs: Any) -> Records:
    """Pack an iterable of pairs (offset, shape) as Records; return Records unchanged."""
    if type(pairs) is Records:
        return pairs
    try:
        items = tuple(pairs)
    except TypeError:
        raise ArgumentError(f"{_PAIRS}, got {shown(pairs)}") from None
    try:
        return _packed(items)
    except TypeError:  # a shape is a list, which is not hashable: call the function without its cache
        return _packed.__wrapped__(items)


@functools.lru_cache(64)  # a training loop passes the same list of hundreds of parameters in every step
def _packed(items: tuple[Any, ...]) -> Records:
    try:
        pairs = [(offset, tuple(shape)) for offset, shape in items]
    except (TypeError, ValueError):
        raise ArgumentError(f"{_PAIRS}, got {shown(items)}") from None
    try:
        return Records(b"".join([_OF_RANK[len(shape)](offset, len(shape), 0, *shape) for offset, shape in pairs]))
    except IndexError:
        most = max(len(shape) for _, shape in pairs)
        raise ArgumentError(f"a segment has {most} dimensions; the maximum is {len(_OF_RANK) - 1}") from None
    except struct.error as e:
        raise ArgumentError(f"segments must be pairs (offset, shape) of integers, none below 0: {e}") from None


@functools.lru_cache(256)
def unpack(records: Records) -> Segments:
    """Return the (offset, shape) pairs of packed records. The list is cached: do not modify it."""
    return [(offset, tuple(shape[:rank])) for offset, rank, _, *shape in struct.iter_unpack(_RECORD, records)]
