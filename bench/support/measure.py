"""Clock and generated tensors for benchmarks."""

from typing import Any

import numpy as np

from codec.cli.compressors import best

__all__ = ["best", "tensor"]


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
    if dtype == "float8_e4m3fn":  # with a scale per row
        import ml_dtypes

        return (x * (448 / np.abs(x).max(1, keepdims=True))).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    if dtype == "int8":
        return np.clip(x * 8, -127, 127).astype(np.int8)
    return x
