"""Clock and generated tensors for benchmarks."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np


def best(f: Callable[[], Any], seconds: float = 0.4) -> tuple[float, Any]:
    """Repeat a call for `seconds`; return the shortest time of a call in seconds, and its result."""
    result = f()
    shortest, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        result = f()
        shortest = min(shortest, time.perf_counter() - start)
        if time.perf_counter() > end:
            return shortest, result


def tensor(dtype: str, n: int, cols: int = 1024) -> np.ndarray[Any, Any]:
    """Return the bits of a matrix whose rows and columns have different scales, as in a gradient."""
    rng = np.random.default_rng(0)
    cols = min(cols, n)
    rows = n // cols
    x = rng.standard_normal((rows, cols), np.float32)
    x *= np.exp(rng.standard_normal((rows, 1), np.float32))
    x *= np.exp(0.5 * rng.standard_normal(cols, np.float32))
    if dtype == "float64":
        return x.astype(np.float64) * (1 + 1e-9)
    if dtype == "float16":
        return x.astype(np.float16)
    if dtype == "bfloat16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "float32:bfloat16":
        return (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    if dtype == "int8":
        return np.clip(x * 8, -127, 127).astype(np.int8)
    return x
