"""Step time of ddp_hook("auto") and of fixed presets on links that change.

    sudo python bench/network/auto_ddp.py                                   # four links, up to three minutes
    sudo python bench/network/auto_ddp.py --links 100mbit,0 none,0 --quality smallest

Ranks are processes in network namespaces (bench/network/netns.py: Linux, root, iproute2, TUN devices). They train a
stack of equal layers with DistributedDataParallel. Links are rates and added round-trip times in milliseconds. On each
link each method takes ``--steps`` steps, 10 at a time in turn; the methods keep their hooks, so that "auto" has to
notice each change of the link.

mean        milliseconds of a step, mean of all steps on this link: with the steps in which "auto" notices and tries
median      median of the same steps
bits        bits that a rank sends for each value and phase of an all-reduce
/ best      mean, and median, over the least one of the fixed methods on this link
all links   the sums over all links: "best" is the fixed method with the least sum
"""

import argparse
import json
import logging
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import netns

FIXED = ("float32", "lossless", "balanced", "small")
LINKS = ("100mbit,0", "1gbit,0", "100mbit,0", "1gbit,100")
BLOCK = 10  # steps of a method before the next one has its turn
LEAST_RTT = 0.1  # milliseconds: the devices that add a round-trip time need one

Cell = dict[str, Any]


class Training:
    """Data-parallel training of equal layers with one method of communication."""

    def __init__(self, method: Any, plan: Cell) -> None:
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        import codec.torch

        torch.manual_seed(0)
        width, self.batch, self.pause = plan["width"], plan["batch"], plan["pause"]
        net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(plan["layers"])))
        for weight in net.parameters():
            nn.init.orthogonal_(weight)  # gradients of all layers have one size
        self.width, self.values = width, width * width * plan["layers"]
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        self.generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        self.hook = None
        if method == "auto":
            self.hook = codec.torch.ddp_hook(codec.torch.Auto(plan["quality"])).register(self.model)
        elif method != "float32":
            algorithm = "all_gather" if int(os.environ["WORLD_SIZE"]) == 2 else "two_shot"  # as "auto" has
            options = codec.options(algorithm=algorithm)
            self.hook = codec.torch.ddp_hook(method, options=options).register(self.model)

    def step(self) -> float:
        """Train for a step, and return its seconds."""
        import torch

        begin = time.perf_counter()
        x = torch.randn(self.batch, self.width, generator=self.generator)
        self.optimizer.zero_grad()
        loss = (self.model(x) - x.roll(1, 1)).square().mean()
        if self.pause:
            time.sleep(self.pause / 1000)
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - begin

    def sent(self) -> int:
        """Return the bytes of gradients that this rank has sent so far."""
        return 0 if self.hook is None else self.hook.stats().sent_nbytes

    def choices(self) -> dict[str, int]:
        """Return the steps by choice."""
        return {} if self.hook is None else self.hook.stats().choices


def change_to(link: str, rank: int) -> None:
    """Change the link of this rank to "100mbit,20", or "100mbit/1gbit,20" where ranks have different rates."""
    rates, rtt = link.split(",")
    if rank == 0:
        print(f"rtt {max(LEAST_RTT, float(rtt))}", flush=True)  # run() sets it
    each = rates.split("/")
    netns.shape(each[rank % len(each)])
    time.sleep(0.5)


def in_turn(trainings: dict[str, Any], steps: int) -> dict[str, list[float]]:
    """Take steps of each training, a few of each in turn, since other work on the machine comes and goes.

    Returns
    -------
    dict of str to list of float
        Seconds of each step on the slowest rank.
    """
    import torch
    import torch.distributed as dist

    found: dict[str, list[float]] = {key: [] for key in trainings}
    for first in range(0, steps, BLOCK):
        for key, training in trainings.items():
            dist.barrier()
            times = torch.tensor([training.step() for _ in range(min(BLOCK, steps - first))], dtype=torch.float64)
            dist.all_reduce(times, op=dist.ReduceOp.MAX)
            found[key] += times.tolist()
    return found


def new(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """Return the counts that have grown, and by how much."""
    return {key: count - before.get(key, 0) for key, count in now.items() if count != before.get(key, 0)}


def worker(plan: Cell) -> None:
    """Measure all methods on all links on one rank; rank 0 prints the rows."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(plan["threads"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0 and plan["verbose"]:
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="# %(message)s")
    dist.init_process_group("gloo", "env://", timedelta(seconds=300), world, rank)
    trainings: dict[str, Training] = {}
    for method in plan["methods"]:
        trainings[method] = Training(method, plan)
        for _ in range(3):  # DDP rebuilds its buckets after the first step; links have no limit yet
            trainings[method].step()
    for turn, link in enumerate(plan["links"]):
        dist.barrier()
        change_to(link, rank)
        sent = {method: training.sent() for method, training in trainings.items()}
        before = {method: training.choices() for method, training in trainings.items()}
        for method, seconds in in_turn(trainings, plan["steps"]).items():
            training = trainings[method]
            nbytes = training.sent() - sent[method] if training.hook else plan["steps"] * 4 * training.values
            row: Cell = {"turn": turn, "link": link, "method": method, "steps": [1e3 * s for s in seconds]}
            row["bits"] = 8 * nbytes / plan["steps"] / training.values * world / (2 * (world - 1))
            row["choices"] = new(training.choices(), before[method])
            if rank == 0:
                print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(script: str, plan: Cell, ranks: int, *, bind: bool = True) -> list[Cell]:
    """Run ``script --worker`` with a plan on all ranks, and return the rows that rank 0 prints.

    A line "rtt 20" of rank 0 sets the round-trip time in milliseconds; lines that begin with # are printed.
    """
    netns.end_on_sigterm()
    plan |= {"threads": max(1, len(os.sched_getaffinity(0)) // ranks)}
    threads = {k: str(plan["threads"]) for k in ("OMP_NUM_THREADS", "CODEC_NUM_THREADS")}
    command = [sys.executable, script, "--worker", json.dumps(plan)]
    delayed = any(float(link.split(",")[1]) for link in plan["links"])
    try:
        with netns.Network(ranks, rtt=LEAST_RTT if delayed else 0) as network:

            def on_line(rank: int, line: str) -> None:
                if rank == 0 and line.startswith("rtt ") and network.delay is not None:
                    network.delay.set(float(line.split()[1]) / 2000)
                elif line.startswith("#"):
                    print(line, flush=True)

            return network.run(command, environment=threads, timeout=900, on_line=on_line, bind=bind)[0]
    except netns.NetworkError as e:
        raise SystemExit(f"{Path(script).name}: {e}") from None
    except KeyboardInterrupt:
        sys.exit(130)


def show(rows: list[Cell], name: str, column: str) -> None:
    """Print a table for each link, and the sums. `name` and `column` are the keys of a row's name and of its size."""
    means: dict[str, float] = {}
    medians: dict[str, float] = {}
    for turn in sorted({row["turn"] for row in rows}):
        some = {row[name]: row for row in rows if row["turn"] == turn}
        rates, rtt = next(iter(some.values()))["link"].split(",")
        shown = " / ".join(map(netns.shown, rates.split("/")))
        print(f"{shown}, {rtt} ms{'':8}mean   median{column:>9}   / best")
        mean = {key: statistics.mean(row["steps"]) for key, row in some.items()}
        median = {key: statistics.median(row["steps"]) for key, row in some.items()}
        for key, row in some.items():
            means[key], medians[key] = means.get(key, 0.0) + mean[key], medians.get(key, 0.0) + median[key]
            chosen = ", ".join(f"{k} {n}" for k, n in row["choices"].items())
            print(line(key, mean, median, f"{row[column]:9.3g}") + f"  {chosen}")
    print("all links")
    for key in means:
        print(line(key, means, medians, " " * 9))


def line(key: str, mean: dict[str, float], median: dict[str, float], size: str) -> str:
    """Return a line of a table."""
    over = [each[key] / min(each[k] for k in each if k != "auto") for each in (mean, median)]
    return f"  {key:12}{mean[key]:10.1f}{median[key]:9.1f}{size}{over[0]:6.2f}{over[1]:6.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--links", nargs="+", default=list(LINKS), help="rate and round-trip time, as 100mbit,20")
    parser.add_argument("--steps", type=int, default=40, help="steps of each method on each link (40)")
    parser.add_argument("--fixed", nargs="*", default=list(FIXED), help="presets to compare with, and float32")
    parser.add_argument("--quality", default="small", help='floor of "auto" (small)')
    parser.add_argument("--width", type=int, default=128, help="width of a layer (128)")
    parser.add_argument("--layers", type=int, default=50, help="number of layers (50: 819,200 values with width 128)")
    parser.add_argument("--batch", type=int, default=8, help="rows of a batch on each rank (8)")
    parser.add_argument("--pause", type=float, default=0, help="milliseconds of a step that are slept, as on a GPU (0)")
    parser.add_argument("--unbound", action="store_true", help="do not bind ranks to cores")
    parser.add_argument("--verbose", action="store_true", help='print what "auto" logs')
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker))
        return
    names = ("links", "steps", "quality", "width", "layers", "batch", "pause", "verbose")
    plan = {k: getattr(args, k) for k in names} | {"methods": [*args.fixed, "auto"]}
    rows = run(__file__, plan, args.ranks, bind=not args.unbound)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)
    show(rows, "method", "bits")


if __name__ == "__main__":
    main()
