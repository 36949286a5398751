"""Conversion of results to JAX arrays, which are immutable: frames are first decoded into numpy arrays."""

import sys
from typing import Any

import numpy as np

from codec.errors import ArgumentError


def of_kind(x: Any, like: Any) -> Any:
    """Convert `x`, a new numpy array, to a JAX array on the device of `like`, if `like` is a JAX array.

    Any other `x` is returned unchanged. On a CPU, the array is not copied if JAX can use its memory.

    Raises
    ------
    ArgumentError
        The array has 64-bit values, which JAX would convert to 32 bits because ``jax_enable_x64`` is not set.
    """
    jax: Any = sys.modules.get("jax")
    if jax is None or type(x) is not np.ndarray or not isinstance(like, getattr(jax, "Array", ())):
        return x
    devices = like.devices()
    array = jax.device_put(x, next(iter(devices)) if len(devices) == 1 else None)
    if array.dtype != x.dtype:  # pyright: ignore[reportUnknownMemberType]
        raise ArgumentError(
            f"JAX would convert {x.dtype} to {array.dtype}: set jax_enable_x64, or leave out like= for a numpy array"
        )
    return array
