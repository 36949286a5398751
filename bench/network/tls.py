"""Cost of TLS: all-reduces of a gradient over slow links with and without it, in turn, in the same processes.

    sudo python bench/network/tls.py                                       # 2 ranks, 25 MB, 100 Mbit and 1 Gbit
    sudo python bench/network/tls.py --links 10gbit --steps 50 --codecs raw

Ranks are processes in network namespaces (bench/network/netns.py: Linux, root, iproute2), each bound to its own cores.
The gradient is float32, computed in bfloat16. Each rank has two groups, one of which uses TLS with a secret.

plain, TLS  seconds of an all-reduce, of the slower rank: median
ratio       median over pairs of all-reduces, one of each kind, with its interquartile range
cpu         CPU seconds of a rank in an all-reduce, with the kernel's network stack: mean

The last lines are the seconds in which two ranks connect over a link with a round-trip time of 100 ms.
"""

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import netns

SECRET = "0123456789abcdef0123456789abcdef"
PROTECTIONS: dict[str, dict[str, str]] = {
    "plain": {},
    "secret": {"secret": SECRET},
    "TLS and secret": {"secret": SECRET, "tls": "psk"},
}
RTT = 100  # ms


def groups(names: list[str]) -> dict[str, tuple[Any, Any]]:
    """Return a group of all ranks, and the options of its first call, for each kind of protection."""
    import torch.distributed as dist

    import codec

    ranks = list(range(dist.get_world_size()))
    return {name: (dist.new_group(ranks), codec.options(**PROTECTIONS[name])) for name in names}  # type: ignore[arg-type]


def worst(values: list[float]) -> list[float]:
    """Return the maximum over all ranks of each value."""
    import torch
    import torch.distributed as dist

    t = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.tolist()


def cpu() -> float:
    times = os.times()
    return times.user + times.system


def measure(args: argparse.Namespace) -> None:
    """Time all-reduces with and without TLS on this rank; rank 0 prints them."""
    import torch
    import torch.distributed as dist

    import codec.torch

    pair = groups(["plain", "TLS and secret"])
    x = torch.randn(args.nbytes // 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    x = x.bfloat16().float()
    for name in args.codecs:
        algorithm = "raw" if name == "raw" else "two_shot"
        seconds: dict[str, list[float]] = {key: [] for key in pair}
        busy = dict.fromkeys(pair, 0.0)
        for step in range(args.steps + 2):
            order = list(pair.items())
            for key, (group, options) in order[:: -1 if step % 2 else 1]:
                out = x.clone()
                dist.barrier()
                began, used = time.perf_counter(), cpu()
                with options:
                    codec.torch.all_reduce(out, group=group, options=codec.options(algorithm=algorithm))
                took = time.perf_counter() - began
                if step >= 2:
                    seconds[key].append(took)
                    busy[key] += (cpu() - used) / args.steps
        slowest = {key: worst(each) for key, each in seconds.items()}
        busiest = dict(zip(busy, worst(list(busy.values())), strict=True))
        protections = [codec.torch.group_stats(group).connections for group, _ in pair.values()]
        if not dist.get_rank():
            print(json.dumps({"codec": name, "seconds": slowest, "cpu": busiest, "connections": protections}))


def connect() -> None:
    """Time the first exchange of groups of each kind, without the time of a second one; rank 0 prints the times."""
    import torch.distributed as dist

    import codec.torch

    found: dict[str, float] = {}
    for name, (group, options) in groups(list(PROTECTIONS)).items():
        times: list[float] = []
        for _ in range(2):
            dist.barrier()
            began = time.perf_counter()
            with options:
                codec.torch.all_to_all_bytes([b""] * dist.get_world_size(), group=group)
            times.append(time.perf_counter() - began)
        found[name] = worst([times[0] - times[1]])[0]
    if not dist.get_rank():
        print(json.dumps({"connect": found}))


def rank(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    if args.connect:
        connect()
    else:
        measure(args)
    dist.destroy_process_group()


def report(row: dict[str, Any], link: str) -> str:
    plain, tls = row["seconds"].values()
    ratios = sorted(b / a for a, b in zip(plain, tls, strict=True))
    low, _, high = statistics.quantiles(ratios, n=4)
    used = list(row["cpu"].values())
    return (
        f"{netns.shown(link):>12}  {row['codec']:<9} {statistics.median(plain):8.3f} {statistics.median(tls):8.3f} "
        f"{statistics.median(ratios):8.3f} ({low:.3f} to {high:.3f}) {used[0]:7.3f} "
        f"{used[1]:7.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit"], help="rates of links")
    parser.add_argument("--codecs", nargs="+", default=["Lossless", "raw"], choices=["Lossless", "raw"])
    parser.add_argument("--nbytes", type=int, default=25_000_000, help="bytes of the gradient")
    parser.add_argument("--steps", type=int, default=12, help="all-reduces of each kind")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--connect", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank(args)
        return
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    env = {"OMP_NUM_THREADS": "1"}
    print(f"{'link':>12}  {'codec':<9} {'plain':>8} {'TLS':>8} {'ratio':>8} {'':<16} {'cpu':>7} {'TLS':>7}")
    for link in args.links:
        with netns.Network(args.ranks, link, both_ways=True) as network:
            for row in network.run(command, environment=env, bind=True)[0]:
                print(report(row, link), flush=True)
    with netns.Network(args.ranks, rtt=RTT) as network:
        (row,) = network.run([*command, "--connect"], environment=env)[0]
    for name, seconds in row["connect"].items():
        print(f"connect at {RTT} ms, {name}: {seconds:.3f} s")


if __name__ == "__main__":
    main()
