"""Compare size and speed with other compressors of floating-point data, on the same bytes, in one run and one thread.

The tensors are the committed gradients or the given .npz files. Every array of a file is a tensor. If a file has
``shapes`` (the text of a list of shapes), a 1-D array with their total number of values is a bucket of tensors of these
shapes. A uint16 array whose name ends in ``_bits`` is bfloat16. ``--made`` generates matrices of 9 MB instead, whose
rows and columns have different scales, and one matrix without its shape.

The time of ZipNN includes a copy of its input, which ZipNN overwrites. Its size is 1 for tensors of less than 64 KiB,
outside of which it may read.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import codec
from codec._c.library import isas
from codec.cli.compressors import Compressor, best, blosc2, openzl, pcodec, zipnn, zstd

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from gradients import SAMPLE, block_entropy, exponent_nbytes, exponents, segments, tensors
from measure import tensor


def made() -> Iterator[tuple[str, np.ndarray[Any, Any], str, list[tuple[int, ...]]]]:
    """Yield generated matrices in float32 and bfloat16, the latter also without its shape."""
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        x = tensor(dtype, (9 << 20) // size)
        yield f"matrix {x.shape[0]}x{x.shape[1]}", x.reshape(-1), dtype, [x.shape]
    yield "flat", x.reshape(-1), dtype, []


def peers() -> list[Compressor]:
    return [zipnn(), openzl(), zstd(1), blosc2("zstd", level=1), blosc2("lz4", "bitshuffle", 1), pcodec()]


def measure(
    name: str, x: np.ndarray[Any, Any], dtype: str, shapes: list[tuple[int, ...]], speed: bool
) -> dict[str, Any]:
    """Return a row: frame sizes as fractions of the tensor's size, and speeds in GB/s of tensor bytes."""
    seconds = 0.4 if speed else 0.0
    inside = segments(shapes) or None
    shape = shapes[0] if len(shapes) == 1 else x.shape
    y = x.reshape(shape)
    if len(shapes) == 1:
        inside = None
    buffer = np.empty(codec.bound(shape, dtype), np.uint8)
    restored = np.empty_like(y)
    enc, frame = best(
        lambda: codec.encode(codec.view(y, dtype, segments=inside), out=buffer, options=codec.options(threads=1)),
        seconds,
    )
    dec, _ = best(
        lambda: codec.decode(frame, out=restored, max_nbytes=1 << 40, options=codec.options(threads=1)), seconds
    )
    assert restored.tobytes() == x.tobytes()
    enc_new, _ = best(
        lambda: codec.encode(codec.view(y, dtype, segments=inside), options=codec.options(threads=1)), seconds
    )
    dec_new, _ = best(
        lambda: codec.decode(frame, like=y, max_nbytes=1 << 40, options=codec.options(threads=1)), seconds
    )
    copy, _ = best(lambda: np.copyto(restored, y), seconds)
    e = exponents(x, dtype)
    row: dict[str, Any] = {
        "tensor": name,
        "dtype": dtype,
        "nbytes": x.nbytes,
        "segments": len(shapes),
        "ratio": len(frame) / x.nbytes,
        "exponent_nbytes": exponent_nbytes(x, dtype, shape, inside),
        "exponent_entropy_nbytes": block_entropy(e),
        "copy_gbps": x.nbytes / copy / 1e9,
        "encode_gbps": x.nbytes / enc / 1e9,
        "decode_gbps": x.nbytes / dec / 1e9,
        "encode_new_gbps": x.nbytes / enc_new / 1e9,
        "decode_new_gbps": x.nbytes / dec_new / 1e9,
        "peers": {},
    }
    values = x.view(np.uint8)
    for peer in peers():
        enc, packed = best(lambda p=peer: p.compress(values, dtype), seconds)
        dec, back = best(lambda p=peer, f=packed: p.decompress(f, dtype), seconds)
        assert np.array_equal(np.frombuffer(back, np.uint8)[: x.nbytes], values), peer.name
        row["peers"][peer.name] = {
            "ratio": len(packed) / x.nbytes,
            "encode_gbps": x.nbytes / enc / 1e9,
            "decode_gbps": x.nbytes / dec / 1e9,
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=SAMPLE)
    parser.add_argument("--made", action="store_true", help="use generated matrices of 9 MB instead of files")
    parser.add_argument(
        "--each", action="store_true", help="also compress each tensor of a bucket that has more than 65,536 values"
    )
    parser.add_argument("--flat", action="store_true", help="also compress each bucket without its shapes")
    parser.add_argument("--sizes-only", action="store_true", help="print sizes only")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for source in [made()] if args.made else map(tensors, args.files):
        for name, x, dtype, shapes in source:
            cases = [(name, x, shapes)]
            if args.flat and shapes:
                cases.append((f"{name} flat", x, []))
            if args.each and len(shapes) > 1:
                for i, (offset, shape) in enumerate(segments(shapes)):
                    n = int(np.prod(shape))
                    if n > 65536:
                        cases.append((f"{name}[{i}] {'x'.join(map(str, shape))}", x[offset : offset + n], [shape]))
            for case, values, inside in cases:
                print(f"\r{case:60}", end="", file=sys.stderr, flush=True)
                rows.append(measure(case, np.ascontiguousarray(values), dtype, inside, not args.sizes_only))
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    if args.json:
        print(json.dumps({"isa": isas()[-1], "rows": rows}, indent=1))
        return
    report(rows)


def report(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = list(rows[0]["peers"])
    table = Table(
        title="size / tensor, GB/s of tensor bytes encode|decode (into memory that exists)", title_justify="left"
    )
    for column in ("tensor", "codec", "exponents/entropy", *names, "copy", "size / zipnn, openzl", "speed / zipnn"):
        table.add_column(column, justify="left" if column == "tensor" else "right", no_wrap=column == "tensor")
    for r in rows:
        cheapest = min(p["ratio"] for p in r["peers"].values())
        cells = [r["tensor"], f"{r['ratio']:.4f} {r['encode_gbps']:.1f}|{r['decode_gbps']:.1f}"]
        cells.append(f"{r['exponent_nbytes'] / r['exponent_entropy_nbytes']:.3f}")
        for p in names:
            mark = "*" if r["peers"][p]["ratio"] == cheapest else ""
            peer = r["peers"][p]
            cells.append(f"{peer['ratio']:.4f}{mark} {peer['encode_gbps']:.1f}|{peer['decode_gbps']:.1f}")
        z = r["peers"]["zipnn"]
        cells += [
            f"{r['copy_gbps']:.1f}",
            f"{r['ratio'] / min(z['ratio'], r['peers']['openzl']['ratio']):.4f}",
            f"{r['encode_new_gbps'] / z['encode_gbps']:.1f}x {r['decode_new_gbps'] / z['decode_gbps']:.1f}x",
        ]
        table.add_row(*cells)
    Console(width=max(200, Console().width)).print(table)
    # leave out single parameters, which are parts of buckets; group buckets of gradients with shapes, and all other
    # tensors
    whole = [r for r in rows if "[" not in r["tensor"]]
    for what, shaped in (("gradients with shapes", True), ("all else", False)):
        some = [r for r in whole if (":grad" in r["tensor"] and r["segments"] > 0) == shaped]
        if some:
            ratio = sum(r["exponent_nbytes"] for r in some) / sum(r["exponent_entropy_nbytes"] for r in some)
            worst = max(r["ratio"] / min(p["ratio"] for p in r["peers"].values()) for r in some)
            print(f"{what}: exponents / entropy {ratio:.4f} in all; size / best peer {worst:.4f} at worst")


if __name__ == "__main__":
    main()
