"""Compare alternatives to the design in docs/internals/lossless.md, in bits per value. Takes 5 seconds.

Data are the matrices in the committed gradients or in the given files. Each alternative uses one codebook per file, of
codes with at most 8 bits, built from all values. Bits of escapes and nibbles are included; the overhead of the coder
and of sampling is not.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from codec import Codebook

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from gradients import SAMPLE, exponents, segments, tensors

Array = np.ndarray[Any, Any]


def cost(symbols: Iterable[Array]) -> float:
    """Return the total number of bits of the symbols (bytes), coded with one common codebook."""
    counts = np.bincount(np.concatenate([s.ravel() for s in symbols]).astype(np.int64), minlength=256)
    book = Codebook.from_counts(counts)
    lengths = np.frombuffer(book.lengths, np.uint8).astype(np.int64)
    return float((counts * np.where(lengths, lengths, book.escape_length + 8)).sum())


def square(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the split of a shape into rows and columns that is closest to square."""
    splits = [int(np.prod(shape[:i])) for i in range(len(shape) + 1)]
    n = int(np.prod(shape))
    return min(((r, n // r) for r in splits), key=max)


def study(x: Array, dtype: str, shapes: list[tuple[int, ...]]) -> dict[str, float]:
    e_all = exponents(x, dtype).astype(np.int64)
    pattern = (x if dtype == "bfloat16" else x.view(np.uint32) >> 16).astype(np.int64) & 0x7FFF
    first_bit = pattern >> 6 & 1
    rows: dict[str, list[Array]] = {k: [] for k in ("flat", "whole", "quarters", "eighths", "first bit")}
    n = nibbles = 0
    for offset, shape in segments(shapes):
        r, c = square(shape)
        if min(r, c) < 64 or r * c < 8192:
            continue
        e = e_all[offset : offset + r * c].reshape(r, c)
        p = pattern[offset : offset + r * c].reshape(r, c)
        some = e > 0
        row = (p * some).sum(1) / np.maximum(some.sum(1), 1)
        col = ((p - row[:, None]) * some).sum(0) / np.maximum(some.sum(0), 1)

        def lowered(unit: int, p: Array = p, some: Array = some, row: Array = row, col: Array = col) -> Array:
            """Return plane 0 after subtracting multiples of `unit` that move the mean pattern just below an octave."""
            by = unit * np.round(row / unit).astype(np.int64)[:, None] + unit * np.round(col / unit).astype(np.int64)
            return np.where(some, p - by + (128 << 7) + 112 & 0x7FFF, 0)

        rows["flat"].append(e)
        rows["whole"].append(lowered(128) >> 7)
        rows["quarters"].append(lowered(32) >> 7)
        rows["eighths"].append(lowered(16) >> 7)
        bit = first_bit[offset : offset + r * c].reshape(r, c)
        rows["first bit"].append((lowered(128) >> 7) % 128 * 2 + bit)
        n += r * c
        nibbles += 4 * (r + c)
    if not n:
        return {}  # no parameter has rows and columns
    out = {k: cost(v) / n + (nibbles / n if k != "flat" else 0) for k, v in rows.items()}
    out["first bit"] -= 1  # this bit is coded, so it is not sent uncoded as well
    low = (x if dtype == "bfloat16" else x.view(np.uint32)) & 255
    counts = np.bincount(low.astype(np.int64), minlength=256)
    counts = counts[counts > 0]
    out["even"] = float((low % 2 == 0).mean())
    out["low byte"] = float((counts * np.log2(counts.sum() / counts)).sum() / counts.sum())
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=SAMPLE)
    args = parser.parse_args()
    print(f"{'':34} no offsets  whole octaves  quarters  eighths  whole + first bit   last bit 0  entropy of low byte")
    for path in args.files:
        for name, x, dtype, shapes in tensors(path):
            if not shapes or "grad" not in name:
                continue
            s = study(x, dtype, shapes)
            if not s:
                continue
            print(
                f"{name:34} {s['flat']:10.3f} {s['whole']:14.3f} {s['quarters']:9.3f} {s['eighths']:8.3f}"
                f" {s['first bit']:18.3f} {100 * s['even']:11.0f}% {s['low byte']:20.2f}"
            )


if __name__ == "__main__":
    main()
