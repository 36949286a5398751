"""Specs and page shapes that the adapters for KV caches share."""

import math
from functools import lru_cache
from typing import Any

from codec.kv import PageCodec
from codec.specs import Lossless, Quantize, Spec

FLOATS = ("bfloat16", "float16", "float32")


def page_spec(bits: int | None, row: int, group_size: int) -> Spec:
    """Return Quantize with the largest group of at most `group_size` values that divides a row.

    Return Lossless if `bits` is None, or if the group would have less than 16 values.
    """
    group = next(n for n in range(min(group_size, row), 0, -1) if row % n == 0)
    if bits is None or group < 16:
        return Lossless()
    return Quantize(bits, group_size=group, rounding="nearest", zero_point=True)


@lru_cache(64)
def page_codec(
    shape: tuple[int, ...], dtype: str, key_bits: int | None, value_bits: int | None, group_size: int
) -> PageCodec:
    """Return the codec for pages of a shape and dtype. Dtypes that are not in FLOATS are encoded losslessly."""
    if dtype not in FLOATS:
        key_bits = value_bits = None
    key = page_spec(key_bits, shape[2], group_size)
    return PageCodec(shape, dtype, key=key, value=page_spec(value_bits, math.prod(shape[3:]), group_size))


def flat_page(x: Any, columns: int = 128) -> Any:
    """Return a contiguous tensor as a page of one layer and one side, in rows of at most `columns` values."""
    return x.reshape(1, 1, -1, math.gcd(x.numel(), columns))


def dtype_of(x: Any) -> str:
    """Return the name of a torch tensor's dtype."""
    return str(x.dtype).removeprefix("torch.")
