"""Encode and decode the committed real gradients, bit for bit, and print what it costs."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from peers import SAMPLE, best, block_entropy, exponent_nbytes, exponents, segments, tensors

import codec


def measure(name: str, x: np.ndarray[Any, Any], dtype: str, shapes: list[tuple[int, ...]]) -> dict[str, Any]:
    inside = segments(shapes)
    out = np.empty(codec.bound(x.shape, dtype), np.uint8)
    back = np.empty_like(x)
    enc, frame = best(lambda: codec.encode(x, dtype=dtype, segments=inside, out=out, threads=1))
    dec, _ = best(lambda: codec.decode(frame, out=back, threads=1))
    if back.tobytes() != x.tobytes():
        raise SystemExit(f"{name}: the tensor did not come back")
    info = codec.inspect(frame)
    return {
        "gradients": name,
        "dtype": dtype,
        "values": x.size,
        "parameters": len(shapes),
        "ratio": info.ratio,
        "exponent_entropy_bits": 8 * block_entropy(exponents(x, dtype)) / x.size,
        "exponent_cost_bits": 8 * exponent_nbytes(x, dtype, x.shape, inside) / x.size,
        "encode_gbps": x.nbytes / enc / 1e9,
        "decode_gbps": x.nbytes / dec / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=SAMPLE)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measure(name, *rest) for path in args.files for name, *rest in tensors(path) if rest[2]]
    isa = os.environ.get("CODEC_ISA") or codec.isas()[-1]
    if args.json:
        print(json.dumps({"isa": isa, "rows": rows}, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Lossless, one thread, {isa}: every bit came back", title_justify="left")
    for column in ("gradients of one step", "dtype", "values", "size", "exponent: entropy", "cost", "encode", "decode"):
        left = column in ("gradients of one step", "dtype")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for r in rows:
        table.add_row(
            r["gradients"].split(":")[0].replace("_", " "),
            r["dtype"],
            f"{r['values']:,} in {r['parameters']}",
            f"{100 * r['ratio']:.1f}%",
            f"{r['exponent_entropy_bits']:.2f} bits",
            f"{r['exponent_cost_bits']:.2f} bits",
            f"{r['encode_gbps']:.1f} GB/s",
            f"{r['decode_gbps']:.1f} GB/s",
        )
    console = Console(width=max(124, Console().width))
    console.print(table)
    console.print(
        "Entropy: of the exponents in blocks of 16,384 values, as if tables were free. Cost: what they take in the\n"
        "frame, with tables, scale model, directory and header. It is lower where exponents follow rows and columns."
    )


if __name__ == "__main__":
    main()
