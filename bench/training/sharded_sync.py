"""Measure ways to send sharded weights from many trainer ranks to rollout workers with another layout.

    python bench/training/sharded_sync.py                          # 5 minutes on two cores; needs root
    python bench/training/sharded_sync.py --rate 1gbit --values 1e9 --ways pairs sharded --json FILE

Trainer ranks have the bfloat16 weights of a language model in FSDP2's layout: DTensors with Shard(0). Two rollout
workers serve it in the layout of tensor parallelism: column-parallel projections have half of the rows, row-parallel
projections half of the columns. In each step, 1% of the values, at random positions, move to a neighboring bfloat16
value, as in reinforcement learning with AdamW. Each process has a network namespace of its own, so bytes are counted by
the kernel. With --rate, each process sends at no more than this rate, as if it had a machine of its own.

    broadcast   gather each tensor on all trainer ranks, broadcast it from rank 0: vLLM, verl's "nccl", slime
    gathered    gather each tensor, publish the difference on rank 0: codec.weight_sync.Publisher
    pairs       find changed values of each shard, gather 32-bit positions and values on rank 0, and broadcast them: the
                scheme of verl's "delta_sharded" [1]_, rebuilt from its description
    sharded     publish the difference of the shards of each rank: codec.weight_sync.Publisher(group=...)

Columns:

sync        seconds from the begin of the step's synchronization until the last worker serves the new weights: median
trainer     seconds until the last trainer rank continues
pause       seconds from the first to the last change of a worker's served weights, the longer of both workers
CPU         CPU seconds of all trainer ranks + of both workers; here all processes share the machine's cores
moved       bytes that trainer ranks send to each other
sent        bytes that both workers receive
memory      largest growth of resident memory, on rank 0 / another trainer rank / a worker
collectives Gloo's collectives on trainer rank 1 in one synchronization, counted by torch.profiler

.. [1] The page "delta weight sync" of verl's documentation. There, values are compared on GPUs, and NCCL carries the
   bytes.
"""

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "network"))
import netns
from sharded_ways import WAYS, WORKERS, Broadcast, Side, Spec, specs

WIDTHS = (9, 9, 9, 14, 13, 13, 20)  # of the columns


def resident(field: str) -> int:
    """Return VmRSS or VmHWM, the resident memory of this process or its maximum, in bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) << 10


def moved() -> tuple[int, int]:
    """Return the numbers of bytes that this process's namespace has received and sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    [counts] = [line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{netns.DEVICE}:")]
    return int(counts[0]), int(counts[8])


def measure(side: Side, name: str, steps: int) -> dict[str, Any]:
    """Synchronize the weights `steps` times after the first time; return figures of this process."""
    import torch
    import torch.distributed as dist

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    before, run = resident("VmRSS"), dict[str, Any](way=name, rank=side.rank, steps=[])
    way = WAYS[name](side)
    for k in range(steps + 1):
        if side.worker < 0 and k:
            side.step()
        dist.barrier()
        bytes_before, cpu, begin = moved(), time.process_time(), time.perf_counter()
        pause = way.receive() if side.worker >= 0 else way.send()
        end, cpu = time.perf_counter(), time.process_time() - cpu
        dist.barrier()
        received, sent = (b - a for a, b in zip(bytes_before, moved(), strict=True))
        row = {"begin": begin, "end": end, "cpu": cpu, "pause": pause or 0.0, "received": received, "sent": sent}
        run["steps"].append(row)
    run["memory"] = resident("VmHWM") - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        way.send() if side.worker < 0 else way.receive()
    run["collectives"] = collectives(profile)
    run["equal"] = equal(side)
    way.close()
    return run


def collectives(profile: Any) -> dict[str, Any]:
    """Return the number of collectives of each kind in a profile."""
    return dict(Counter(event.name for event in profile.events() if event.name.startswith("gloo:")))


def equal(side: Side) -> bool:
    """Compare the workers' weights with the trainers'; return True on trainer ranks."""
    import torch

    if side.worker < 0:
        Broadcast(side).send()
        return True
    same = list[bool]()
    for name, spec in side.specs.items():
        x = side.broadcast(torch.empty(spec.shape, dtype=torch.bfloat16))
        same.append(torch.equal(side.weights[name].view(torch.int16), x[spec.box(side.worker)].view(torch.int16)))
    return all(same)


def work(plan: dict[str, Any]) -> None:
    """Measure all ways on this rank, and print a JSON line for each."""
    import torch.distributed as dist

    rank, _ = netns.join(plan["threads"], 600)
    side = Side(rank, plan)
    for name in plan["ways"]:
        print(json.dumps(measure(side, name, plan["steps"])), flush=True)
        if side.worker >= 0:
            side.values.zero_()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=float, default=0.25e9, help="number of weights; default: 0.25e9")
    parser.add_argument("--ranks", type=int, default=8, help="trainer ranks")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rate", default="none", help="what each process may send: 1gbit; default: no limit")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="place of the files that hold the weights")
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(json.loads(args.worker))
        return
    with netns.ending(__file__), ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="codec-shards-", dir=args.folder)
        stack.callback(shutil.rmtree, folder)
        plan = {name: getattr(args, name) for name in ("values", "ranks", "steps", "ways")} | {"folder": folder}
        command, environment = netns.worker_of(__file__, plan, args.ranks + WORKERS)
        network = stack.enter_context(netns.Network(args.ranks + WORKERS, args.rate))
        found = network.run(command, environment=environment, timeout=7200)
    print(
        f"{sum(size(spec) for spec in specs(args.values).values()) / 1e6:.0f} million weights, {args.ranks} ranks,",
        end=" ",
    )
    print(f"links {netns.shown(args.rate)}, {len(os.sched_getaffinity(0))} cores")
    report(found, args.ranks)
    if args.json:
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "runs": found}, indent=1))


def size(spec: Spec) -> int:
    n = 1
    for k in spec.shape:
        n *= k
    return n


def report(found: list[list[Any]], ranks: int) -> None:
    """Print a line for each way."""
    names = ("sync", "trainer", "pause", "CPU", "moved", "sent", "memory, MB")
    print(f"{'':10}" + "".join(f"{name:>{width}}" for name, width in zip(names, WIDTHS, strict=True)) + "  collectives")
    for runs in zip(*found, strict=True):
        trainers, workers = runs[:ranks], runs[ranks:]
        steps = [report_step([run["steps"][k] for run in runs], ranks) for k in range(1, len(runs[0]["steps"]))]
        median = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
        memory = [trainers[0]["memory"], max(run["memory"] for run in trainers[1:]), max(r["memory"] for r in workers)]
        cells = [
            f"{median['sync']:.2f} s",
            f"{median['trainer']:.2f} s",
            f"{median['pause']:.2f} s",
            f"{median['cpu']:.1f} + {median['worker_cpu']:.1f} s",
            f"{median['moved'] / 1e6:,.1f} MB",
            f"{median['sent'] / 1e6:,.1f} MB",
            " / ".join(f"{max(n, 0) / 1e6:.0f}" for n in memory),
        ]
        print(f"{runs[0]['way']:10}" + "".join(f"{c:>{w}}" for c, w in zip(cells, WIDTHS, strict=True)), end="  ")
        print(
            ", ".join(f"{n} {name.removeprefix('gloo:')}" for name, n in trainers[1]["collectives"].items()) or "none"
        )
        if not all(run["equal"] for run in runs):
            raise SystemExit(f"{runs[0]['way']}: the workers' weights differ from the trainer's")


def report_step(rows: list[Any], ranks: int) -> dict[str, float]:
    """Return the figures of one synchronization, from those of all processes."""
    trainers, workers = rows[:ranks], rows[ranks:]
    begin, received = min(row["begin"] for row in rows), sum(row["received"] for row in workers)
    return {
        "sync": max(row["end"] for row in rows) - begin,
        "trainer": max(row["end"] for row in trainers) - begin,
        "pause": max(row["pause"] for row in workers),
        "cpu": sum(row["cpu"] for row in trainers),
        "worker_cpu": sum(row["cpu"] for row in workers),
        "moved": sum(row["sent"] for row in trainers) - received,
        "sent": received,
    }


if __name__ == "__main__":
    main()
