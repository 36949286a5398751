"""Encode and decode the committed gradients with Lossless and the lossy codecs; print sizes and speeds.

Takes 20 seconds. `make demo` installs the requirements and runs this script.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import codec
from codec._c.library import isas

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from family import FAMILY, TRUNCATE, optimizer_state
from gradients import SAMPLE, block_entropy, exponent_nbytes, exponents, segments, tensors
from measure import best


def measure(name: str, x: np.ndarray[Any, Any], dtype: str, shapes: list[tuple[int, ...]]) -> dict[str, Any]:
    inside = segments(shapes)
    out = np.empty(codec.bound(x.shape, dtype), np.uint8)
    back = np.empty_like(x)
    enc, frame = best(
        lambda: codec.encode(codec.view(x, dtype, segments=inside), out=out, options=codec.options(threads=1))
    )
    dec, _ = best(lambda: codec.decode(frame, out=back, options=codec.options(threads=1)))
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


def lossy(path: Path, name: str, x: np.ndarray[Any, Any], shapes: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    """Return a row for each lossy codec, including Truncate if the file has the optimizer's state."""
    given = optimizer_state(path, x.size)
    specs = {"Lossless": codec.Lossless(), **FAMILY} if given is None else {"Lossless": codec.Lossless(), **TRUNCATE}
    out, back = np.empty(2 * x.nbytes + 65536, np.uint8), np.empty_like(x)
    inside = segments(shapes)
    rms = float(np.sqrt((x.astype(np.float64) ** 2).mean()))
    rows: list[dict[str, Any]] = []
    for title, spec in specs.items():
        bound = spec.bind(given[0], **given[1]) if given is not None and isinstance(spec, codec.Truncate) else None
        values = codec.view(x, segments=inside)
        with codec.options(threads=1):
            enc, frame = best(lambda: codec.encode(values, bound or spec, out=out), 0.15)
            dec, _ = best(lambda: codec.decode(frame, bound, out=back), 0.15)
        rows.append(
            {
                "gradients": name,
                "codec": title,
                "bits": 8 * len(frame) / x.size,
                "smaller": x.nbytes / len(frame),
                "error": float(np.sqrt(((back - x.astype(np.float64)) ** 2).mean())) / rms,
                "encode_gbps": x.nbytes / enc / 1e9,
                "decode_gbps": x.nbytes / dec / 1e9,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=SAMPLE)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = [(path, *t) for path in args.files for t in tensors(path) if t[3] and ":grad" in t[0]]
    rows = [measure(*t) for path, *t in found if optimizer_state(path, 1) is None]
    family = [r for path, name, x, dtype, s in found if dtype == "float32" for r in lossy(path, name, x, s)]
    isa = os.environ.get("CODEC_ISA") or isas()[-1]
    if args.json:
        print(json.dumps({"isa": isa, "rows": rows, "family": family}, indent=1))
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
        "frame, with tables, scale model, directory and header. It is lower where exponents follow rows and columns.\n"
    )
    for name in dict.fromkeys(r["gradients"] for r in family):
        n = name.split(":")[0].replace("_", " ")
        table = Table(title=f"{n}: float32 gradients, one thread", title_justify="left")
        for column in ("codec", "bits a value", "smaller", "error", "encode", "decode"):
            table.add_column(column, justify="left" if column == "codec" else "right", no_wrap=True)
        for r in family:
            if r["gradients"] == name:
                table.add_row(
                    r["codec"],
                    f"{r['bits']:.2f}",
                    f"{r['smaller']:.1f}x",
                    f"{r['error']:.2g}" if r["error"] else "none",
                    f"{r['encode_gbps']:.1f} GB/s",
                    f"{r['decode_gbps']:.1f} GB/s",
                )
        console.print(table)
    console.print(
        "Error: root mean square of the error, divided by that of the gradient. GB/s of float32.\n"
        'Truncate drops the bits that AdamW\'s step rounds away. With the guard "exact", more than 99.3% of the\n'
        "parameters are then bit-identical to those that the uncompressed gradient gives, and nearly all others\n"
        "differ by one unit in the last place (bench/codec/quality.py)."
    )


if __name__ == "__main__":
    main()
