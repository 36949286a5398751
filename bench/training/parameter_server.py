"""Accuracy of training through parameter servers: compressed gradients and means against float32, from the same seeds.

    python bench/training/parameter_server.py                    # 3 seeds of 400 steps: some minutes
    python bench/training/parameter_server.py --workers 4 --servers 2 --seeds 1

Ranks are processes on this machine. Workers train the convolutional network on scikit-learn's handwritten digits
(bench/support/models.py) by SGD with momentum; ParameterClient.average returns the mean of their gradients. float32
gradients and means are sent as Lossless frames. Servers send exact sums down with Ternary, and Lossless means with
"Quantize(4) up". Other rows encode the means, too, with or without error feedback on the server.

accuracy    held-out accuracy at the end in percent, mean over seeds
vs float32  difference from float32's accuracy in percentage points, mean over seeds
loss        held-out loss at the end, mean over seeds
up, down    bits that worker 0 sends and receives for each gradient value, headers included
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

import codec
import codec.torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from models import digits_task

Q4 = codec.Quantize(4)
CODECS = {  # specs of gradients and of means, and True for error feedback on the server
    "float32": (codec.Lossless(), codec.Lossless(), True),
    "Ternary, clip 2.5": (codec.Ternary("base3", clip=2.5), codec.Lossless(), True),
    "Quantize(4) up": (Q4, codec.Lossless(), True),
    "Quantize(4) up and down": (Q4, Q4, True),
    "Quantize(4) up and down, no feedback": (Q4, Q4, False),
    "Quantize(4) up, Sign down": (Q4, codec.Sign(), True),
    "Quantize(4) up, Sign down, no feedback": (Q4, codec.Sign(), False),
}
WIDTH = max(map(len, CODECS))


def train(name: str, servers: int, seed: int, steps: int) -> dict[str, float] | None:
    """Run this rank as a server or a worker; return the results on workers, and None on servers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    workers = size - servers
    spec, mean_spec, feedback = CODECS[name]
    if rank < servers:
        codec.torch.ParameterServer(range(servers), range(servers, size), feedback=feedback).serve()
        sums = torch.zeros(3, dtype=torch.float64)
        dist.all_reduce(sums)
        return None
    task = digits_task(seed, steps, rank - servers, workers)
    parameters = dict(task.model.named_parameters())
    with codec.torch.ParameterClient(range(servers)) as client:
        client.init(parameters)
        for step in range(steps):
            task.optimizer.zero_grad()
            task.loss(task.model, task.batch()).backward()
            gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
            for n, value in client.average(step, gradients, spec, mean_spec=mean_spec).items():
                parameters[n].grad = value
            task.optimizer.step()
            task.schedule.step()
        stats = client.stats()
    sums = task.evaluate()
    dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    values = steps * sum(p.numel() for p in parameters.values())
    bits = {"up": 8 * stats.sent_nbytes / values, "down": 8 * stats.received_nbytes / values}
    return {"accuracy": 100 * right / count, "loss": loss / count} | bits


def rank_main(rank: int, size: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=size)
    for name in CODECS:
        for seed in range(args.seeds):
            found = train(name, args.servers, seed, args.steps)
            if rank == args.servers:
                with open(f"{folder}/rows", "a") as f:
                    f.write(json.dumps({"codec": name, "seed": seed} | (found or {})) + "\n")
                print(f"{name}, seed {seed}: done", file=sys.stderr, flush=True)
    dist.destroy_process_group()


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'':{WIDTH}}{'accuracy':>10}{'vs float32':>12}{'loss':>8}{'up':>7}{'down':>7}")
    plain = [row["accuracy"] for row in rows if row["codec"] == "float32"]
    for name in CODECS:
        some = [row for row in rows if row["codec"] == name]
        means = {key: mean(row[key] for row in some) for key in ("accuracy", "loss", "up", "down")}
        difference = mean(row["accuracy"] - plain[row["seed"]] for row in some)
        print(
            f"{name:{WIDTH}}{means['accuracy']:10.2f}{difference:+12.2f}{means['loss']:8.3f}{means['up']:7.2f}"
            f"{means['down']:7.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CODEC_NUM_THREADS": "1"}
    size = args.servers + args.workers
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (size, args, folder), nprocs=size)
        rows = [json.loads(line) for line in Path(folder, "rows").read_text().splitlines()]
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    show(rows)


if __name__ == "__main__":
    main()
