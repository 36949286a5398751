"""Reference implementation of Truncate's rounding in numpy."""

import numpy as np

from support.tensors import NUMPY_DTYPES

F32 = np.float32
MBITS = {"float32": 23, "bfloat16": 7, "float16": 10}
DROPS = {"float32": (0, 6, 12, 18), "bfloat16": (0, 2, 4, 6), "float16": (0, 3, 5, 8)}


def a_exponents(metric, arrays):
    """Compute, in numpy, the exponent field of the metric A for each value from the metric's terms."""
    t = metric.final(arrays)
    with np.errstate(all="ignore"):
        factor = F32(t.theta)
        if t.theta_v:
            factor = (np.sqrt(F32(t.v) * arrays["v"]) + F32(t.eps)) * F32(t.theta_v) + F32(t.theta)
        a = arrays["theta"] * factor
        if t.m:
            a = a + F32(t.m) * arrays["m"]
    return np.where(np.isnan(a), 0, a.view(np.uint32) >> 23 & 255).astype(np.uint8)


def cut(x, k, nearest=True):
    """Return x with the lowest k bits of each bit pattern rounded to 0, computed in integers."""
    size = 8 * x.dtype.itemsize
    mbits, last = (23, 255) if size == 32 else (7, 255) if x.dtype == NUMPY_DTYPES["bfloat16"] else (10, 31)
    u = x.view(f"u{x.dtype.itemsize}").astype(np.int64)
    e = u >> mbits & last
    down = u >> k << k
    rest = u - down
    up = (rest * 2 > 1 << k) | ((rest * 2 == 1 << k) & (u >> k & 1 == 1) & (k > 0))
    y = np.where(up & nearest, down + (1 << k), down)
    y = np.where((y >> mbits & last) == last, down, y)
    return np.where(e == 0, 0, y).astype(f"u{x.dtype.itemsize}").view(x.dtype)
