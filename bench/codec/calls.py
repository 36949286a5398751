"""Microseconds per call for small tensors, where the overhead of a call dominates; bytes of a tensor. Takes 20 seconds.

``1 of 200`` is the time of encode_many or decode_many for 200 tensors, divided by 200; ``packed``: with pack=True;
``alone`` is that of a single call for one such tensor. Calls of all kinds alternate, so that caches and branch
predictors are in similar states.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import codec

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from measure import tensor

COUNT = 200
ROUNDS = 400


def calls_of(x: np.ndarray[Any, Any]) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Return the calls to time, by name; each with the number of tensors that it processes."""
    frame, many = codec.encode(x), [x.copy() for _ in range(COUNT)]
    frames, pack = codec.encode_many(many), codec.encode_many(many, pack=True)
    out, back = np.empty(codec.bound(x.shape, x.dtype), np.uint8), np.empty_like(x)
    return {
        "encode": (1, lambda: codec.encode(x)),
        "encode, out=": (1, lambda: codec.encode(x, out=out)),
        "decode": (1, lambda: codec.decode(frame)),
        "decode, out=": (1, lambda: codec.decode(frame, out=back)),
        f"encode_many, 1 of {COUNT}": (COUNT, lambda: codec.encode_many(many, options=codec.options(threads=1))),
        "encode, alone": (COUNT, lambda: [codec.encode(y, options=codec.options(threads=1)) for y in many]),
        f"decode_many, 1 of {COUNT}": (COUNT, lambda: codec.decode_many(frames, options=codec.options(threads=1))),
        f"encode_many, packed, 1 of {COUNT}": (COUNT, lambda: codec.encode_many(many, pack=True)),
        f"decode_many, packed, 1 of {COUNT}": (COUNT, lambda: codec.decode_many(pack)),
        "decode, alone": (COUNT, lambda: [codec.decode(f, options=codec.options(threads=1)) for f in frames]),
    }


def measure(x: np.ndarray[Any, Any]) -> dict[str, float]:
    """Return, by name of the call, the microseconds per tensor."""
    shortest: dict[str, float] = {}
    calls = calls_of(x)
    for _ in range(ROUNDS):
        for name, (count, call) in calls.items():
            times = 1 if count > 1 else 12
            begin = time.perf_counter()
            for _ in range(times):
                call()
            took = (time.perf_counter() - begin) / (times * count)
            shortest[name] = min(took * 1e6, shortest.get(name, took * 1e6))
    return shortest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--values", nargs="+", type=int, default=[64, 1024], help="values of a float32 tensor (64 1024)"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = {n: measure(tensor("float32", n)) for n in args.values}
    for n, result in results.items():
        many = [*tensor("float32", n * COUNT, n).reshape(COUNT, n)]
        result["bytes, frame"] = sum(map(len, codec.encode_many(many))) / COUNT
        result["bytes, packed"] = len(codec.encode_many(many, pack=True)) / COUNT
    if args.json:
        print(json.dumps(results, indent=1))
        return
    print(f"{'us':32}" + "".join(f"{n:>14,}" for n in results) + "  float32 values")
    for name in next(iter(results.values())):
        print(f"{name:32}" + "".join(f"{r[name]:14.1f}" for r in results.values()))


if __name__ == "__main__":
    main()
