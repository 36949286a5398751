"""Compare "auto" with fixed methods on links that change, for auto_ddp.py and bench/pipeline/auto_bits.py.

A script defines a class with the methods of :class:`Training`. :func:`main` starts the script again on each rank, in
network namespaces (bench/network/netns.py), and prints the tables.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import netns

BLOCK = 10  # number of consecutive steps of a method
LEAST_RTT = 0.1  # milliseconds; the devices that delay packets need a nonzero delay

Cell = dict[str, Any]


class Training(Protocol):
    """Training on one rank by one method, "auto" or a fixed one."""

    warmup: int  # untimed steps on an unlimited link, before the first link

    def step(self) -> float:
        """Run one training step, and return its duration in seconds."""
        ...

    def sent(self) -> int:
        """Return the number of bytes that this rank has sent so far."""
        ...

    def choices(self) -> dict[str, int]:
        """Return, for each choice of "auto", the number of steps so far in which it was used."""
        ...

    def size(self, nbytes: float) -> float:
        """Convert the bytes that this rank sent in a step to the table's size. All ranks must call this together."""
        ...


def change_to(link: str, rank: int) -> None:
    """Change this rank's link to RATE,RTT such as "100mbit,20", or "100mbit/1gbit,20" for different rates by rank."""
    rates, rtt = link.split(",")
    if rank == 0:
        print(f"rtt {max(LEAST_RTT, float(rtt))}", flush=True)  # the parent reads this line in run()
    each = rates.split("/")
    netns.shape(each[rank % len(each)])
    time.sleep(0.5)


def in_turn(trainings: dict[str, Training], steps: int) -> dict[str, list[float]]:
    """Run steps of all methods, switching methods every few steps, because the load of the machine varies.

    Returns
    -------
    dict of str to list of float
        By method: seconds of each step on the slowest rank.
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


def grown(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """Return the increase of each count that has grown."""
    return {key: count - before.get(key, 0) for key, count in now.items() if count != before.get(key, 0)}


def worker(make: Callable[[str, Cell], Training], plan: Cell) -> None:
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
        trainings[method] = make(method, plan)
        for _ in range(trainings[method].warmup):
            trainings[method].step()
    for turn, link in enumerate(plan["links"]):
        dist.barrier()
        change_to(link, rank)
        before = {method: (training.sent(), training.choices()) for method, training in trainings.items()}
        for method, seconds in in_turn(trainings, plan["steps"]).items():
            training, (sent, choices) = trainings[method], before[method]
            row: Cell = {"turn": turn, "link": link, "method": method, "steps": [1e3 * s for s in seconds]}
            row["size"] = training.size((training.sent() - sent) / plan["steps"])
            row["choices"] = grown(training.choices(), choices)
            if rank == 0:
                print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(script: str, plan: Cell, ranks: int, *, bind: bool = True) -> list[Cell]:
    """Run ``script --worker`` with a plan on all ranks, and return the rows that rank 0 prints.

    A line "rtt 20" of rank 0 sets the round-trip time in milliseconds; lines that begin with # are printed.
    """
    command, threads = netns.worker_of(script, plan, ranks)
    delayed = any(float(link.split(",")[1]) for link in plan["links"])
    with netns.ending(script), netns.Network(ranks, rtt=LEAST_RTT if delayed else 0) as network:

        def on_line(rank: int, line: str) -> None:
            if rank == 0 and line.startswith("rtt ") and network.delay is not None:
                network.delay.set(float(line.split()[1]) / 2000)
            elif line.startswith("#"):
                print(line, flush=True)

        return network.run(command, environment=threads, timeout=900, on_line=on_line, bind=bind)[0]
    raise AssertionError  # `ending` does not suppress exceptions


def show(rows: list[Cell], unit: str) -> None:
    """Print a table for each link, and the sums over links. `unit` is the heading of the column of sizes."""
    means: dict[str, float] = {}
    medians: dict[str, float] = {}
    for turn in sorted({row["turn"] for row in rows}):
        some = {row["method"]: row for row in rows if row["turn"] == turn}
        rates, rtt = next(iter(some.values()))["link"].split(",")
        shown = " / ".join(map(netns.shown, rates.split("/")))
        print(f"{shown}, {rtt} ms{'':8}mean   median{unit:>9}   / best")
        mean = {key: statistics.mean(row["steps"]) for key, row in some.items()}
        median = {key: statistics.median(row["steps"]) for key, row in some.items()}
        for key, row in some.items():
            means[key], medians[key] = means.get(key, 0.0) + mean[key], medians.get(key, 0.0) + median[key]
            chosen = ", ".join(f"{k} {n}" for k, n in row["choices"].items())
            print(line(key, mean, median, f"{row['size']:9.3g}") + f"  {chosen}")
    print("all links")
    for key in means:
        print(line(key, means, medians, " " * 9))


def line(key: str, mean: dict[str, float], median: dict[str, float], size: str) -> str:
    """Return a line of the table: times of a method, and their ratios to the best fixed method."""
    over = [each[key] / min(each[k] for k in each if k != "auto") for each in (mean, median)]
    return f"  {key:12}{mean[key]:10.1f}{median[key]:9.1f}{size}{over[0]:6.2f}{over[1]:6.2f}"


def parser_of(text: str | None, links: tuple[str, ...], fixed: tuple[str, ...]) -> argparse.ArgumentParser:
    """Return a parser of the arguments common to both scripts, with defaults for ``--links`` and ``--fixed``."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", "--stages", type=int, default=2)
    parser.add_argument("--links", nargs="+", default=list(links), help="rate and round-trip time, as 100mbit,20")
    parser.add_argument("--steps", type=int, default=40, help="steps of each method on each link (40)")
    parser.add_argument("--fixed", nargs="*", default=list(fixed), help="fixed methods to compare with")
    parser.add_argument("--unbound", action="store_true", help="do not bind ranks to cores")
    parser.add_argument("--verbose", action="store_true", help='print what "auto" logs')
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def main(script: str, parser: argparse.ArgumentParser, make: Callable[[str, Cell], Training], unit: str) -> None:
    """Run the command line: start the ranks and print the tables, or with ``--worker`` run one rank.

    Parameters
    ----------
    script : str
        Path of the script that calls this.
    parser : ArgumentParser
        Parser of :func:`parser_of`. Its arguments form the plan that is passed to `make`.
    make : callable
        Returns the Training of a method, given the method's name and the plan.
    unit : str
        Unit of the result of :meth:`Training.size`.
    """
    args = parser.parse_args()
    if args.worker:
        worker(make, json.loads(args.worker))
        return
    plan = vars(args) | {"methods": [*args.fixed, "auto"]}
    rows = run(script, plan, args.ranks, bind=not args.unbound)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    show(rows, unit)
