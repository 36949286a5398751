"""Endurance test: repeated training with codec.torch.ddp_hook, with many small buckets on several processes.

    python bench/network/soak.py                 # 20 runs of 200 steps, 4 ranks, 10 buckets: more than five minutes
    python bench/network/soak.py --codec lossless --runs 3

Prints a line for each run. A run fails if it takes longer than --limit, or if ranks end with different bits.
"""

import argparse
import hashlib
import multiprocessing
import os
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch

CODECS: dict[str, tuple[codec.Spec, dict[str, Any]]] = {
    "lossless": (codec.Lossless(), {}),
    "float8": (codec.Float8(group_size=128), {}),
    "quantize4": (codec.Quantize(4), {"feedback": True}),
    "sign": (codec.Sign(group_size=1024), {"feedback": True}),
}


def rank_of(rank: int, ranks: int, path: str, name: str, steps: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    torch.manual_seed(0)
    layers = [m for _ in range(9) for m in (torch.nn.Linear(96, 96), torch.nn.GELU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(96, 8)), bucket_cap_mb=0.03)
    spec, how = CODECS[name]
    hook = codec.torch.ddp_hook(spec, options=codec.options(algorithm="two_shot"), **how).register(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(32, 96, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), x[:, :8].argmax(1)).backward()
        optimizer.step()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    results.put((rank, digest, hook.stats().buckets / steps))
    results.close()
    results.join_thread()
    os._exit(0)


def run(name: str, ranks: int, steps: int, limit: float) -> float:
    """Run training once on new processes; return the number of buckets per step."""
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = (ranks, f"{folder}/store", name, steps, results)
        processes = [context.Process(target=rank_of, args=(r, *args), daemon=True) for r in range(ranks)]
        for p in processes:
            p.start()
        end = time.monotonic() + limit
        try:
            found = [results.get(timeout=max(0.1, end - time.monotonic())) for _ in processes]
        except Exception:
            raise SystemExit(f"\n{name}: not all ranks were done after {limit:.0f} s") from None
        finally:
            for p in processes:
                p.kill()
                p.join()
    if len({digest for _, digest, _ in found}) > 1:
        raise SystemExit(f"\n{name}: ranks differ")
    return found[0][2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--codec", choices=CODECS, help="codec of all runs (default: all in turn)")
    parser.add_argument("--limit", type=float, default=300, help="maximum seconds of a run (300)")
    args = parser.parse_args()
    begin, buckets = time.monotonic(), 0.0
    for i in range(args.runs):
        name = args.codec or list(CODECS)[i % len(CODECS)]
        print(f"\r{i + 1} of {args.runs}: {name}      ", end="", file=sys.stderr, flush=True)
        buckets = run(name, args.ranks, args.steps, args.limit)
    print(
        f"\r{args.runs} runs of {args.steps} steps, {args.ranks} ranks, {buckets:.1f} buckets a step: 0 hangs, "
        f"replicas identical, {time.monotonic() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
