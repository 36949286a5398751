"""Views of C memory as numpy arrays."""

from typing import Any

import numpy as np

from codec._c.library import ffi

Array = np.ndarray[Any, Any]
NOTHING: Array = np.empty(0, np.uint8)


def memory_of(pointer: Any, nbytes: int) -> Array:
    """Return the ``nbytes`` bytes at a C pointer as a uint8 array, without a copy."""
    return np.frombuffer(ffi.buffer(ffi.cast("uint8_t *", pointer), nbytes), np.uint8) if nbytes else NOTHING
