"""Size and error of ternary all-reduces of gradients: two-shot, all-gather and shared scales. Takes a minute.

Ranks are processes on this machine. Each has the committed gradients, or those of the given .npz files, with the rows
of each parameter rotated, so that ranks differ.

bits        bits that a rank sends, relative to an all-reduce (both phases) of 1 bit per value; headers included
error       root mean square of the result minus the exact mean, relative to that of the mean
"""

import argparse
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing

import codec
import codec.torch
from codec.specs import Packing
from codec.torch.group import communicator

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from gradients import SAMPLE, segments, tensors

ALGORITHMS = ("two_shot", "all_gather", "shared_scale")
CLIPS = (None, 2.5)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def turned(x: np.ndarray[Any, Any], shapes: list[tuple[int, ...]], rank: int) -> np.ndarray[Any, Any]:
    """Return a bucket with the rows of each parameter rotated by rank, so that ranks differ."""
    parts = np.split(x, np.cumsum([math.prod(s) for s in shapes])[:-1])
    return np.concatenate([np.roll(p, 97 * rank) for p in parts])


def measured(path: Path, rank: int, world: int) -> list[str]:
    """Measure one file, and return the rows of its table."""
    channel = communicator.communicator_of(None).channel
    lines: list[str] = []
    for name, x, dtype, shapes in tensors(path):
        if ":grad" not in name or not shapes or dtype not in DTYPES:
            continue
        every = [torch.from_numpy(turned(x, shapes, r)).view(DTYPES[dtype]) for r in range(world)]
        mean = sum(t.double() for t in every) / world
        both = 2 * (world - 1) / world * x.size / 8  # bytes that a rank sends in both phases at one bit per value
        for clip in CLIPS:
            for packing in get_args(Packing):
                for algorithm in ALGORITHMS:
                    t, sent = every[rank].clone(), channel.counters.sent_nbytes
                    codec.torch.all_reduce(
                        codec.view(t, segments=segments(shapes)),
                        codec.Ternary(packing, clip=clip),
                        op="mean",
                        options=codec.options(algorithm=algorithm),
                    )
                    error = float((t.double() - mean).norm() / mean.norm())
                    most = torch.tensor(float(channel.counters.sent_nbytes - sent))
                    dist.all_reduce(most, op=dist.ReduceOp.MAX)
                    bits = float(most) / both
                    how = f"{packing}, clip {clip}" if clip else packing
                    lines.append(f"{name:32} {how:20} {algorithm:14} {bits:6.2f} {error:8.3f}")
    return lines


def rank_main(rank: int, world: int, paths: list[Path], meet: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=world)
    for path in paths:
        lines = measured(path, rank, world)
        if rank == 0 and lines:
            print(*lines, sep="\n", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=SAMPLE)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CODEC_NUM_THREADS": "1"}
    print(f"{'gradients':32} {f'{args.ranks} ranks':20} {'algorithm':14} {'bits':>6} {'error':>8}")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (args.ranks, args.files, f"{folder}/meet"), nprocs=args.ranks)


if __name__ == "__main__":
    main()
