"""Results as arrays of JAX, which cannot be written to: values are decoded into numpy arrays first."""

import sys
from typing import Any

import numpy as np

from codec.errors import ArgumentError


def of_kind(x: Any, like: Any) -> Any:
    """Return a new numpy array as a JAX array on the device of `like`, if `like` is one; any other tensor unchanged.

    On a CPU the array is not copied, if JAX can use its memory.

    Raises
    ------
    ArgumentError
        JAX has no values of 64 bits, because ``jax_enable_x64`` is not set.
    """
    jax: Any = sys.modules.get("jax")
    if jax is None or type(x) is not np.ndarray or not isinstance(like, getattr(jax, "Array", ())):
        return x
    devices = like.devices()
    array = jax.device_put(x, next(iter(devices)) if len(devices) == 1 else None)
    if array.dtype != x.dtype:  # pyright: ignore[reportUnknownMemberType]
        raise ArgumentError(
            f"JAX would turn {x.dtype} into {array.dtype}: set jax_enable_x64, or leave out like= for a numpy array"
        )
    return array
