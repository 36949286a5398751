"""Measure what codec.options(max_norm=) costs: CPU time of all-reduces of two ranks over the loopback interface.

    python bench/network/norms.py

Each rank reduces a tensor of 25 MB with and without a bound, in turn. Columns: CPU milliseconds of a rank for one
all-reduce, as the lower quartile of --calls calls: all threads of the process of rank 0.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

import codec

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from summary import table

CASES: list[tuple[str, Any]] = [
    ("raw", codec.Lossless()),
    ("two_shot", codec.Quantize(4)),
    ("two_shot", codec.Lossless()),
]


def measure(rank: int, folder: str, calls: int) -> None:
    """Print the table on rank 0."""
    import codec.torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    x = torch.randn(25_000_000 // 4, generator=torch.Generator().manual_seed(rank))
    rows: list[list[str]] = []
    for algorithm, spec in CASES:
        times: dict[float | None, list[float]] = {None: [], 1e6: []}
        for call in range(calls + 2):
            for bound, seconds in times.items():
                y, begin = x.clone(), time.process_time()
                codec.torch.all_reduce(y, spec, options=codec.options(algorithm=algorithm, max_norm=bound))
                if call >= 2:
                    seconds.append(time.process_time() - begin)
        found = [f"{1e3 * statistics.quantiles(seconds, n=4)[0]:.1f}" for seconds in times.values()]
        rows.append([f"{algorithm}, {type(spec).__name__}", *found])
    if rank == 0:
        print(table(["all-reduce", "no bound", "max_norm="], rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=12, help="all-reduces of each kind (12)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, (folder, args.calls), nprocs=2)


if __name__ == "__main__":
    main()
