"""Speed of encoding and decoding pieces of a large tensor on one thread, in GB/s, as in an all-reduce.

memory      alternating pieces of eight tensors, which together exceed every cache
cache       one piece repeatedly, as in most benchmarks
past        with non-temporal stores (``CallOptions(nontemporal=True)``); an ordinary store first reads its cache line
            from memory
mean of 2   codec.reduce of two frames, as in an all-gather of two ranks: ordinary and non-temporal stores, and
            ``check_finite=True``
copy        numpy.copyto from memory to memory in the same run

GB are bytes of the tensor, which encoding reads and decoding writes; a frame is at most as large. The run takes 15
seconds.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import codec

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from family import FAMILY
from measure import tensor

CODECS: dict[str, codec.Spec] = {
    "Lossless": codec.Lossless(),
    **{name: FAMILY[name] for name in ("Float8 e5m2", "Quantize 4 nearest", "Sign, groups of 1,024")},
}
TENSORS, ROUNDS = 8, 24


def seconds(do: Callable[[int], Any], tensors: int) -> float:
    """Return the median CPU seconds of do(i) for tensor i."""
    times: list[float] = []
    for i in range(ROUNDS):
        start = time.thread_time()
        do(i % tensors)
        times.append(time.thread_time() - start)
    return statistics.median(times)


def measure(x: np.ndarray[Any, Any], piece: int) -> list[dict[str, Any]]:
    """Return the rows of the table; the first row has the copies."""
    sources = [x + np.float32(0) for _ in range(TENSORS)]
    targets = [np.zeros_like(x) for _ in range(TENSORS)]
    cuts = [slice(i, i + piece) for i in range(0, x.size, piece)]
    copied = {n: seconds(lambda i: np.copyto(targets[i], sources[i - 4]), n) for n in (TENSORS, 1)}
    rows = [
        {"codec": "copy", "memory_gbps": x.nbytes / copied[TENSORS] / 1e9, "cache_gbps": x.nbytes / copied[1] / 1e9}
    ]
    for name, spec in CODECS.items():
        print(f"\r{name:20}", end="", file=sys.stderr, flush=True)
        room = np.empty(codec.bound(piece, "float32", spec), np.uint8)
        frames = [codec.encode(x[cut], spec) for cut in cuts]

        def encode(i: int, spec: codec.Spec = spec, room: Any = room) -> None:
            for cut in cuts:
                codec.encode(sources[i][cut], spec, out=room, options=codec.options(threads=1))

        def decode(i: int, past: bool = False, frames: Any = frames) -> None:
            for cut, frame in zip(cuts, frames, strict=True):
                codec.decode(
                    frame,
                    out=targets[i][cut],
                    options=codec.CallOptions(threads=1, verify_first=False, nontemporal=past),
                )

        def reduce(i: int, past: bool = False, frames: Any = frames) -> None:
            for cut, frame in zip(cuts, frames, strict=True):
                options = codec.CallOptions(threads=1, verify_first=False, nontemporal=past)
                codec.reduce([frame, frame], out=targets[i][cut], check_finite=True, options=options)

        took = {
            "encode_memory": seconds(encode, TENSORS),
            "encode_cache": seconds(encode, 1),
            "decode_memory": seconds(decode, TENSORS),
            "decode_past": seconds(lambda i: decode(i, past=True), TENSORS),
            "decode_cache": seconds(decode, 1),
            "mean_memory": seconds(reduce, TENSORS),
            "mean_past": seconds(lambda i: reduce(i, past=True), TENSORS),
        }
        rows.append({"codec": name} | {f"{k}_gbps": x.nbytes / t / 1e9 for k, t in took.items()})
    print("\r" + " " * 20 + "\r", end="", file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=25, help="size of the tensor in MiB (25)")
    parser.add_argument("--piece", type=int, default=1 << 20, help="number of values of a piece (1,048,576)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = measure(tensor("float32", args.mib << 18).ravel(), args.piece)
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    heads = f"{'encode: memory':>15} {'cache':>8} {'decode: memory':>16} {'past':>8} {'cache':>8}"
    print(f"{'GB/s':20} {heads} {'mean of 2':>11} {'past':>8}")
    copy, *others = rows
    print(f"{'copy':20} {copy['memory_gbps']:15.1f} {copy['cache_gbps']:8.1f}")
    for r in others:
        name, e, f, d, p, c, m, n = r.values()
        print(f"{name:20} {e:15.1f} {f:8.1f} {d:16.1f} {p:8.1f} {c:8.1f} {m:11.1f} {n:8.1f}")


if __name__ == "__main__":
    main()
