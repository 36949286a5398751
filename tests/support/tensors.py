"""Tensors that tests encode: bits of every dtype and distribution, normal values, gradients with optimizer state."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np

from codec import optimizers
from codec._c.library import DTYPES, ITEMSIZE

F32 = np.float32
ALL_DTYPES = sorted(DTYPES)
LOSSY_DTYPES = ("float32", "bfloat16", "float16")  # dtypes that lossy codecs accept
NUMPY_DTYPES = {"float32": np.dtype(F32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}

FLOAT8_DTYPES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")

# names of the distributions that random_bits() generates
KINDS = ("noise", "few", "normal", "zeros", "sparse", "mixed", "constant", "wide")


def random_bits(dtype: str, n: int, kind: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return the bit patterns of n random values of a dtype and distribution, as unsigned integers."""
    rng = np.random.default_rng([seed, n, KINDS.index(kind)])
    size = ITEMSIZE[dtype]
    u = np.dtype(f"u{size}")
    noise = rng.integers(0, 256, (n, size), dtype=np.uint8).view(u).reshape(n)
    scale = np.exp(rng.standard_normal() + rng.standard_normal(n) * (40 if kind == "wide" else 0.3))
    x = rng.standard_normal(n) * scale
    with np.errstate(over="ignore", under="ignore"):
        if dtype == "float64":
            normal = x.view(u)
        elif dtype == "float16":
            normal = x.astype(np.float16).view(u)
        elif dtype in FLOAT8_DTYPES:
            normal = x.astype(getattr(ml_dtypes, dtype)).view(u)
        elif size == 1:
            normal = np.clip(x * 10, -127, 127).astype(np.int8).view(u)
        else:
            bits = x.astype(np.float32).view(np.uint32)
            normal = (bits >> 16).astype(u) if size == 2 else bits.astype(u)
    if kind == "noise":
        return noise
    if kind == "few":
        return rng.integers(0, 20, n).astype(u)
    if kind == "zeros":
        return np.where(rng.random(n) < 0.6, 0, normal).astype(u)
    if kind == "sparse":
        return np.where((np.arange(n) // 300) % 7 == 3, normal, 0).astype(u)
    if kind == "mixed":
        return np.where(rng.random(n) < 0.02, noise, normal).astype(u)
    if kind == "constant":
        return np.full(n, normal[0] if n else 0, u)
    return normal


def float8_tensors(dtype):
    """Yield bits of float8 tensors with different shares of raw bits and offsets: weights, gradients, activations."""
    rng = np.random.default_rng(8)
    scaled = np.exp2(1.5 * rng.standard_normal((1100, 1))) * np.exp2(rng.standard_normal(70))
    tensors = [
        rng.standard_normal((70, 300)),  # weights
        rng.standard_normal((1100, 70)) * scaled,  # gradients: more rows than a sample has
        (rng.standard_normal((66, 80)) * scaled[:66, :1])[:, :77],
        *(x / (1 + np.exp(-x)) for x in rng.standard_normal((1, 9001))),  # the sign depends on the magnitude
        np.maximum(rng.standard_normal((70, 257)), 0),
        np.rint(4 * rng.standard_normal(700)),
    ]
    for x in tensors:
        yield x.astype(F32).astype(getattr(ml_dtypes, dtype)).view(np.uint8)


def with_empty_rows(x, rows):
    """Return x with 0 in the quad rows (128 values) whose numbers are in `rows`."""
    return np.where(np.isin(np.arange(x.size) // 128, rows), 0, x).astype(x.dtype)


def gap_tensors(dtype):
    """Yield bits of tensors in which some quad rows are empty: the first, the last, all but one, whole blocks."""
    x = random_bits(dtype, 20_000, "normal")
    x |= x.dtype.type(1)
    rows = np.arange(157)
    for empty in (rows[1:], rows[:-1], rows[rows != 100], rows[rows % 25 > 0], rows[:128], [5], [128], [156], rows):
        yield with_empty_rows(x, empty)
    for n, empty in itertools.product((513, 640, 4097), (0, 1, 2)):
        yield with_empty_rows(x[:n], ([n // 128], range(n // 128), [0, 3])[empty])


def normal_values(shape, seed=0, scale=0.01):
    """Return float32 values of a normal distribution with standard deviation `scale`."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(F32)


def gradient(n, seed=0, dtype="float32", scale=1e-3):
    """Return n values distributed like a gradient's: heavy tails, and 5% zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n) * scale * np.exp(rng.standard_normal(n))
    x[rng.random(n) < 0.05] = 0
    return x.astype(F32).astype(NUMPY_DTYPES[dtype])


def optimizer_state(n, seed=1):
    """Return the state of an Adam optimizer for n parameters: theta, m and v in float32."""
    rng = np.random.default_rng(seed)
    m, v = rng.standard_normal(n) * 1e-3, rng.standard_normal(n) ** 2 * 1e-6
    return {"theta": (rng.standard_normal(n) * 0.02).astype(F32), "m": m.astype(F32), "v": v.astype(F32)}


ADAMW = optimizers.AdamW(1e-3, step=99)
