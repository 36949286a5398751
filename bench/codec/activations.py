"""Cost of lossless bfloat16 activations in bits per value, for the codec and for other choices of symbols.

    python bench/codec/activations.py                      # trains a small language model first: two minutes
    python bench/codec/activations.py hidden.npz           # arrays of files, read as in bench/codec/peers.py

codec       Lossless frames
openzl      OpenZL frames, whose exponents are coded by FSE (codec/cli/compressors.py), if OpenZL is installed
entropy     entropy of the exponents, plus 8 bits for sign and mantissa: the limit of any coder of exponents only
exponent    prefix codes of at most 8 bits for exponents, plus 8 bits: a frame without its overhead
+1, +2      as `exponent`, with symbols of the exponent and the highest 1 or 2 mantissa bits; 7 or 6 bits are uncoded
low 1, 2    as `exponent`, with symbols of the exponent and the lowest 1 or 2 mantissa bits
both        entropy of the exponents plus entropy of sign and mantissa: the limit if both are coded separately

Codes are built from all values of a tensor; the bits of escaped values are included.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

import codec
from codec.cli.compressors import openzl

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from gradients import tensors

Array = np.ndarray[Any, Any]


def activations(steps: int) -> dict[str, Array]:
    """Return bfloat16 keys, values and hidden states of a causal transformer after some training steps."""
    import torch
    from models import Language, text
    from rich.progress import track
    from torch.nn import functional as F

    torch.manual_seed(0)
    data, context = text(), 128
    model = Language(256, 2, context).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    found: dict[str, torch.Tensor] = {}

    def batch(n: int) -> torch.Tensor:
        at = torch.randint(len(data) - context - 1, (n,))
        return torch.stack([data[i : i + context + 1] for i in at]).long()

    for _ in track(range(steps), "training", transient=True):
        rows = batch(16)
        optimizer.zero_grad()
        F.cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def keep(layer: int, block: torch.nn.Module) -> None:
        def of_qkv(_: Any, __: Any, out: torch.Tensor) -> None:
            found[f"keys {layer}"], found[f"values {layer}"] = out.chunk(3, -1)[1:]

        block.qkv.register_forward_hook(of_qkv)
        block.register_forward_hook(lambda _, __, out: found.__setitem__(f"hidden {layer}", out))

    for layer, block in enumerate(model.blocks):
        keep(layer, block)
    with torch.no_grad():
        model(batch(64)[:, :-1])
    return {name: t.contiguous().view(torch.uint16).numpy() for name, t in found.items()}


def entropy(symbols: Array) -> float:
    counts = np.bincount(symbols.astype(np.int64))
    counts = counts[counts > 0]
    return float((counts * np.log2(counts.sum() / counts)).sum() / counts.sum())


def coded(symbols: Array) -> float:
    """Return the mean bits per symbol with a codebook of the 255 most frequent symbols; other symbols are escaped."""
    counts = np.sort(np.bincount(symbols.astype(np.int64)))[::-1]
    kept, rest = counts[:255], int(counts[255:].sum())
    padded = np.zeros(256, np.int64)
    padded[: len(kept)] = kept
    book = codec.Codebook.from_counts(padded)
    lengths = np.frombuffer(book.lengths, np.uint8).astype(np.int64)
    bits = (padded * np.where(lengths, lengths, book.escape_length + 8)).sum() + rest * (book.escape_length + 8)
    return float(bits / counts.sum())


def study(x: Array) -> dict[str, float | None]:
    """Return the bits per value of a bfloat16 tensor for each column of the table."""
    flat = x.reshape(-1).astype(np.int64)
    exponent, mantissa = flat >> 7 & 255, flat & 127
    try:
        peer = 8 * len(openzl().compress(x.reshape(-1).view(np.uint8), "bfloat16")) / x.size
    except ImportError:
        peer = None
    return {
        "codec": 8 * len(codec.encode(codec.view(x, "bfloat16"))) / x.size,
        "openzl": peer,
        "entropy": entropy(exponent) + 8,
        "exponent": coded(exponent) + 8,
        **{f"+{k}": coded(exponent << k | mantissa >> 7 - k) + 8 - k for k in (1, 2)},
        **{f"low {k}": coded(exponent << k | mantissa & (1 << k) - 1) + 8 - k for k in (1, 2)},
        "both": entropy(exponent) + entropy(flat >> 8 & 128 | mantissa),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--steps", type=int, default=300, help="training steps (300)")
    args = parser.parse_args()
    found = {} if args.files else activations(args.steps)
    for path in args.files:
        for name, x, dtype, _ in tensors(path):
            found[name] = x if dtype == "bfloat16" else (x.view(np.uint32) >> 16).astype(np.uint16)
    rows = {name: study(x) for name, x in found.items()}
    heads = list(next(iter(rows.values())))
    print(f"{'':30}" + "".join(f"{head:>10}" for head in heads))
    for name, row in rows.items():
        print(f"{name:30}" + "".join(f"{'-':>10}" if v is None else f"{v:10.3f}" for v in row.values()))


if __name__ == "__main__":
    main()
