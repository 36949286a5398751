"""Gradients that benchmarks encode: the committed sample in bench/data, or arrays of .npz files."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import codec

SAMPLE = sorted((Path(__file__).parents[1] / "data").glob("*.npz"))


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray[Any, Any], str, list[tuple[int, ...]]]]:
    """Yield each tensor's name, values, dtype, and the shapes of the parameters that it contains, if known."""
    with np.load(path) as file:
        shapes = [tuple(s) for s in ast.literal_eval(str(file["shapes"]))] if "shapes" in file else []
        few = int(file["few"]) if "few" in file else 0
        for key in file.files:
            x = file[key]
            if x.size < 1024 or x.dtype.kind not in "fu":
                continue
            inside: list[tuple[int, ...]] = [x.shape] if x.ndim > 1 else []
            for candidate in (shapes, shapes[:few]):
                if candidate and sum(int(np.prod(s)) for s in candidate) == x.size:
                    inside = candidate
            yield f"{path.stem}:{key}", x.reshape(-1), "bfloat16" if key.endswith("_bits") else x.dtype.name, inside


def segments(shapes: list[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """Return (offset in values, shape) of each parameter in a bucket without gaps."""
    offsets = np.cumsum([0, *(int(np.prod(s)) for s in shapes)])
    return [(int(o), s) for o, s in zip(offsets, shapes, strict=False)]


def exponents(x: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return the exponent bytes of float32 or bfloat16 values."""
    return ((x >> 7) & 255 if dtype == "bfloat16" else (x.view(np.uint32) >> 23) & 255).astype(np.uint8)


def block_entropy(e: np.ndarray[Any, Any], block: int = 16384) -> float:
    """Return the total empirical entropy of exponents in bytes, computed for each block of `block` values."""
    bits = 0.0
    for i in range(0, e.size, block):
        counts = np.bincount(e[i : i + block])
        counts = counts[counts > 0]
        bits += float((counts * np.log2(counts.sum() / counts)).sum())
    return bits / 8


def exponent_nbytes(x: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...], inside: Any) -> float:
    """Return the bytes that exponents take in a frame, including scale model, tables, directory and header.

    This is the frame's size minus the bytes of signs and mantissas. The mantissa's upper byte is taken as its entropy,
    since the scale model changes mantissas, too. Lower bytes, which may be coded or constant, are replaced by random
    bytes.
    """
    noise = np.random.default_rng(0).integers(0, 1 << 8 * x.itemsize, x.size, dtype=f"u{x.itemsize}")
    low = noise.dtype.type(0 if dtype == "bfloat16" else 0xFFFF)
    y = x.view(noise.dtype) & ~low | noise & low
    upper = (y >> noise.dtype.type(8 * x.itemsize - 16)).astype(np.uint16)
    mantissa = (upper >> 8 & 0x80 | upper & 0x7F).astype(np.uint8)
    frame = len(codec.encode(codec.view(y.reshape(shape), dtype, segments=inside)))
    return frame - (x.itemsize - 2) * x.size - block_entropy(mantissa)
