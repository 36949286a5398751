"""What the choices in docs/design.md are worth, in bits a value, on the committed gradients or the files given.

All with length-capped codes of at most 8 bits made from all values, one codebook a file, escapes and nibbles counted,
for the parameters that have rows and columns: the coder's overhead and sampling are left out.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from peers import SAMPLE, exponents, segments, tensors

from codec import Codebook

Array = np.ndarray[Any, Any]


def cost(symbols: Iterable[Array]) -> float:
    """Bits that one codebook for all of these bytes spends on them."""
    counts = np.bincount(np.concatenate([s.ravel() for s in symbols]).astype(np.int64), minlength=256)
    book = Codebook.from_counts(counts)
    lengths = np.frombuffer(book.lengths, np.uint8).astype(np.int64)
    return float((counts * np.where(lengths, lengths, book.escape_length + 8)).sum())


def square(shape: tuple[int, ...]) -> tuple[int, int]:
    """The split that is most nearly square."""
    splits = [int(np.prod(shape[:i])) for i in range(len(shape) + 1)]
    n = int(np.prod(shape))
    return min(((r, n // r) for r in splits), key=max)


def study(x: Array, dtype: str, shapes: list[tuple[int, ...]]) -> dict[str, float]:
    e_all = exponents(x, dtype).astype(np.int64)
    first_bit = (x >> 6 if dtype == "bfloat16" else x.view(np.uint32) >> 22) & 1
    rows: dict[str, list[Array]] = {k: [] for k in ("flat", "apart", "together", "first bit")}
    n = nibbles = 0
    for offset, shape in segments(shapes):
        r, c = square(shape)
        if min(r, c) < 64 or r * c < 8192:
            continue
        e = e_all[offset : offset + r * c].reshape(r, c)
        some = e > 0
        row = (e * some).sum(1) / np.maximum(some.sum(1), 1)
        col = ((e - row[:, None]) * some).sum(0) / np.maximum(some.sum(0), 1)
        apart = np.round(row)[:, None] + np.round(col)
        together = np.round(np.round(4 * row)[:, None] / 4 + np.round(4 * col) / 4)
        rows["flat"].append(e)
        rows["apart"].append(np.where(some, e - apart + 128, 0) % 256)
        rows["together"].append(np.where(some, e - together + 128, 0) % 256)
        bit = first_bit[offset : offset + r * c].reshape(r, c)
        rows["first bit"].append((np.where(some, e - together + 64, 0) % 128) * 2 + bit)
        n += r * c
        nibbles += 4 * (r + c)
    out = {k: cost(v) / n + (nibbles / n if k != "flat" else 0) for k, v in rows.items()}
    out["first bit"] -= 1  # it is no longer among the raw ones
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
    print(f"{'':34} no offsets  rounded apart  together  + first mantissa bit   last bit 0  entropy of low byte")
    for path in args.files:
        for name, x, dtype, shapes in tensors(path):
            if not shapes or "grad" not in name:
                continue
            s = study(x, dtype, shapes)
            print(
                f"{name:34} {s['flat']:10.3f} {s['apart']:14.3f} {s['together']:9.3f} {s['first bit']:21.3f}"
                f" {100 * s['even']:11.0f}% {s['low byte']:20.2f}"
            )


if __name__ == "__main__":
    main()
