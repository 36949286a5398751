"""Two threads beside one, for one lossless tensor: wall time, CPU time, system time and page faults of a call.

    python bench/codec/threads.py                                       # everything: about three minutes
    python bench/codec/threads.py --dtypes bfloat16 --megabytes 37 --rounds 200

Calls with one thread and with several alternate. Wall and CPU time are minima over all rounds; page faults are medians.
System time is a mean, because the kernel counts it in ticks. `speedup` is the ratio of the wall times of one thread and
of several, and `cpu` that of the CPU times of several and of one.

encode, decode    return new memory, which the kernel maps and clears page by page during the call
out=              write memory that exists; decoding then validates the frame before it writes

Other load on the machine lengthens calls with several threads most: the speedup is then too small, the CPU time is not.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import codec
from codec._c.library import ITEMSIZE

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from measure import tensor


class Cost(NamedTuple):
    """Cost of a call: milliseconds of wall, CPU and system time, and the number of page faults."""

    wall: float
    cpu: float
    system: float
    faults: float


def bits(dtype: str, nbytes: int) -> np.ndarray[Any, Any]:
    """Return the bits of a tensor; float8_e5m2 is the upper byte of float16."""
    if dtype == "float8_e5m2":
        return (tensor("float16", nbytes).view(np.uint16) >> 8).astype(np.uint8)
    return tensor(dtype, nbytes // ITEMSIZE[dtype])


def cost(call: Callable[[], Any]) -> Cost:
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    result = call()
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    del result
    system = after.ru_stime - before.ru_stime
    cpu = after.ru_utime - before.ru_utime + system
    return Cost(1e3 * wall, 1e3 * cpu, 1e3 * system, after.ru_minflt - before.ru_minflt)


def calls_of(dtype: str, nbytes: int) -> dict[str, Callable[[codec.CallOptions], Any]]:
    """Return the calls to measure, by name. All numbers of threads use the same memory."""
    array = bits(dtype, nbytes)
    x, back = codec.view(array, dtype), np.zeros_like(array)
    frame = codec.encode(x)
    out = np.zeros(codec.bound(array.shape, dtype), np.uint8)
    return {
        "encode": lambda by: codec.encode(x, options=by),
        "encode, out=": lambda by: codec.encode(x, out=out, options=by),
        "decode": lambda by: codec.decode(frame, options=by),
        "decode, out=": lambda by: codec.decode(frame, out=back, options=by),
    }


def measure(dtype: str, nbytes: int, threads: int, rounds: int) -> list[dict[str, Any]]:
    by = [codec.options(threads=n) for n in (1, threads)]
    rows: list[dict[str, Any]] = []
    for name, call in calls_of(dtype, nbytes).items():
        costs: list[list[Cost]] = [[], []]
        for _ in range(rounds):
            for options, own in zip(by, costs, strict=True):
                own.append(cost(lambda: call(options)))
        one, many = (
            Cost(
                min(c.wall for c in own),
                min(c.cpu for c in own),
                statistics.fmean(c.system for c in own),
                statistics.median(c.faults for c in own),
            )
            for own in costs
        )
        rows.append(
            {
                "dtype": dtype,
                "megabytes": nbytes / 1e6,
                "call": name,
                "one": one._asdict(),
                "many": many._asdict(),
                "speedup": one.wall / many.wall,
                "cpu": many.cpu / one.cpu,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32", "float16", "float8_e5m2", "int8"])
    parser.add_argument("--megabytes", nargs="+", type=float, default=[1, 8, 37])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if not args.json:
        print(f"{'one / many':32} {'wall, ms':>15} {'CPU, ms':>15} {'system, ms':>13} {'faults':>11}  speedup   cpu")
    for megabytes in args.megabytes:
        for dtype in args.dtypes:
            nbytes = int(megabytes * 1e6) // 8192 * 8192
            for r in measure(dtype, nbytes, args.threads, max(args.rounds, int(8 * args.rounds / megabytes))):
                rows.append(r)
                if not args.json:
                    a, b = r["one"], r["many"]
                    print(
                        f"{dtype:12} {megabytes:4g} {r['call']:14} {a['wall']:7.2f} {b['wall']:7.2f} "
                        f"{a['cpu']:7.2f} {b['cpu']:7.2f} {a['system']:6.2f} {b['system']:6.2f} "
                        f"{a['faults']:5.0f} {b['faults']:5.0f} {r['speedup']:8.2f} {r['cpu']:5.2f}",
                        flush=True,
                    )
    if args.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
