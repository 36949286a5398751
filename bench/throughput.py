"""GB/s of tensor bytes, into memory that exists, and microseconds of calls that make their own result.

Per dtype, instruction set, size and number of threads.

``copy`` is the bandwidth of numpy.copyto over the same tensor in the same run; machines differ and are noisy, so the
fractions of it are what to compare. A copy reads and writes every byte of the tensor; lossless coding reads it and
writes `size` of it (and back), so no coder can go faster than 2 / (1 + size) copies.
"""

import argparse
import json
import os
import sys
from typing import Any

import numpy as np
from peers import best

import codec


def tensor(dtype: str, n: int) -> np.ndarray[Any, Any]:
    """A matrix with scales by row and column, as gradients have, as bits."""
    rng = np.random.default_rng(0)
    cols = min(1024, n)
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
    if dtype == "int8":
        return np.clip(x * 8, -127, 127).astype(np.int8)
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16", "float64", "int8"])
    parser.add_argument("--isas", nargs="+", default=list(codec.isas()))
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[1 << 12, 1 << 20, 1 << 26], help="of tensors, in bytes"
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        for nbytes in args.sizes:
            x = tensor(dtype, nbytes // codec.core.ITEMSIZE[dtype])
            out, back = np.empty(codec.bound(x.shape, dtype) * 2 + (1 << 20), np.uint8), np.empty_like(x)
            for isa in args.isas:
                for threads in args.threads:
                    if threads > 1 and nbytes < 1 << 22:
                        continue
                    print(f"\r{dtype} {nbytes} {isa} {threads}   ", end="", file=sys.stderr, flush=True)
                    with codec.use_isa(isa):
                        enc, frame = best(lambda: codec.encode(x, dtype=dtype, out=out, threads=threads))
                        dec, _ = best(lambda: codec.decode(frame, out=back, threads=threads))
                        # small tensors: what a call takes that makes its own result
                        enc_new, _ = best(lambda: codec.encode(x, dtype=dtype, threads=threads))
                        dec_new, _ = best(lambda: codec.decode(frame, like=x, threads=threads))
                    copy, _ = best(lambda: np.copyto(back, x))
                    rows.append(
                        {
                            "dtype": dtype,
                            "nbytes": x.nbytes,
                            "isa": isa,
                            "threads": threads,
                            "ratio": len(frame) / x.nbytes,
                            "encode_gbps": x.nbytes / enc / 1e9,
                            "decode_gbps": x.nbytes / dec / 1e9,
                            "copy_gbps": x.nbytes / copy / 1e9,
                            "encode_us": enc_new * 1e6,
                            "decode_us": dec_new * 1e6,
                        }
                    )
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    print(
        f"{'dtype':9} {'bytes':>10} {'isa':7} thr   size {'encode':>17} {'decode':>17} {'copy':>9} {'us enc|dec':>17}"
    )
    for r in rows:
        enc, dec = (f"{r[k]:6.2f} GB/s {100 * r[k] / r['copy_gbps']:3.0f}%" for k in ("encode_gbps", "decode_gbps"))
        print(
            f"{r['dtype']:9} {r['nbytes']:10} {r['isa']:7} {r['threads']:3}  {r['ratio']:.3f} {enc:>17} {dec:>17} "
            f"{r['copy_gbps']:9.1f} {r['encode_us']:8.1f}|{r['decode_us']:8.1f}"
        )


if __name__ == "__main__":
    main()
