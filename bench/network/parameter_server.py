"""Time and bits of a step through parameter servers on a slow link: ternary gradients against float32.

    sudo python bench/network/parameter_server.py                            # 1 server, 4 workers at 100 Mbit: a minute
    sudo python bench/network/parameter_server.py --servers 2 --workers 2 --rate 1gbit --json steps.json

Ranks are processes in network namespaces (bench/network/netns.py: Linux, root, iproute2), with limited rates of sending
and receiving. Each worker has the gradients of a transformer on text (bench/support/models.py) for another batch, and
calls ParameterClient.average.

step ms     milliseconds from the start of the first worker until the last one has all means: median over steps
up, down    bits per value that a worker sends and receives, headers included: maximum over workers
x float32   speed relative to float32, sent as Lossless frames through the same servers
error       root mean square of the result minus the exact mean, relative to that of the mean
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

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

CODECS = ("float32", "Float8", "Ternary", "Ternary, clip 2.5")


def spec_of(name: str) -> Any:
    """Return the spec that a name in the command line stands for."""
    import codec

    return {
        "float32": codec.Lossless(),
        "Float8": codec.Float8(group_size=128),
        "Ternary": codec.Ternary("base3"),
        "Ternary, clip 2.5": codec.Ternary("base3", clip=2.5),
    }[name]


def gradients(seed: int, width: int, layers: int) -> dict[str, Any]:
    """Return the gradients of a transformer for a batch of text that the seed selects."""
    import torch
    from models import Language, text
    from torch.nn import functional as F

    torch.manual_seed(0)
    net = Language(width, layers, 64)
    data, generator = text(), torch.Generator().manual_seed(seed)
    x = data[torch.randint(len(data) - 65, (16, 1), generator=generator) + torch.arange(65)].long()
    F.cross_entropy(net(x[:, :-1]).flatten(0, -2), x[:, 1:].flatten()).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def worker(plan: dict[str, Any]) -> None:
    """Run this rank as a server or a worker, for all codecs. Workers print a row per codec."""
    import torch
    import torch.distributed as dist

    import codec.torch

    torch.set_num_threads(plan["threads"])
    rank, world, nservers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), plan["servers"]
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rate = netns.tcp_rate(rank, world)
    servers, workers = range(nservers), range(nservers, world)
    if rank in servers:
        for _ in plan["codecs"]:
            codec.torch.ParameterServer(servers, workers).serve()
            dist.barrier()
        return
    every = [gradients(w, plan["width"], plan["layers"]) for w in workers]
    mine = every[rank - nservers]
    exact = {name: sum(g[name].double() for g in every) / len(every) for name in mine}
    values = sum(g.numel() for g in mine.values())
    together = dist.new_group(list(workers), use_local_synchronization=True)
    for name in plan["codecs"]:
        with codec.torch.ParameterClient(servers) as client:
            client.init(mine)
            mean = client.average(0, mine, spec_of(name))  # untimed: registers the key of the scales on the servers
            before, times = client.stats(), list[tuple[float, float]]()
            for step in range(1, plan["steps"] + 1):
                dist.barrier(together)
                begin = time.perf_counter()
                client.average(step, mine, spec_of(name))
                times.append((begin, time.perf_counter()))
            after = client.stats()
        error = sum(float((mean[n].double() - exact[n]).square().sum()) for n in mine)
        norm = sum(float(exact[n].square().sum()) for n in mine)
        per_value = 8 / (values * plan["steps"])
        row = {"codec": name, "times": times, "values": values, "rate": rate, "error": (error / norm) ** 0.5}
        row["up"] = (after.sent_nbytes - before.sent_nbytes) * per_value
        row["down"] = (after.received_nbytes - before.received_nbytes) * per_value
        print(json.dumps(row), flush=True)
        dist.barrier()


def joined(of_workers: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the rows of all workers, which share the clock of one machine, into one row."""
    steps = zip(*(row["times"] for row in of_workers), strict=True)
    seconds = [max(end for _, end in step) - min(begin for begin, _ in step) for step in steps]
    row = {key: of_workers[0][key] for key in ("codec", "values", "error")}
    most = {key: max(r[key] for r in of_workers) for key in ("up", "down")}
    return row | most | {"seconds": statistics.median(seconds), "rate": min(r["rate"] for r in of_workers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=1, help="number of servers (1)")
    parser.add_argument("--workers", type=int, default=4, help="number of workers (4)")
    parser.add_argument("--rate", default="100mbit", help="of each rank's link, in both directions (100mbit)")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--steps", type=int, default=3, help="number of timed steps (3)")
    parser.add_argument("--width", type=int, default=256, help="width of the transformer (256)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the transformer (4: 3.3 million parameters)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker))
        return
    from rich.progress import Progress

    netns.require()
    ranks = args.servers + args.workers
    plan = {k: getattr(args, k) for k in ("servers", "steps", "width", "layers", "codecs")}
    command, threads = netns.worker_of(__file__, plan, ranks)
    with netns.Network(ranks, args.rate, both_ways=True) as network, Progress(transient=True) as bar:
        task = bar.add_task("codecs", total=len(args.codecs))

        def tick(rank: int, line: str) -> None:
            if rank == ranks - 1 and line.startswith("{"):
                bar.update(task, advance=1)

        found = network.run(command, environment=threads, timeout=1800, on_line=tick)
    rows = [joined(list(rows)) for rows in zip(*found[args.servers :], strict=True)]
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)
    first = rows[0]
    print(
        f"servers: {args.servers}, workers: {args.workers}, {netns.shown(args.rate)} in each direction, TCP "
        f"{first['rate'] / 1e6:.0f} Mbit/s, {first['values']:,} values"
    )
    print(f"{'':18}{'step ms':>9}{'up':>8}{'down':>8}{'error':>8}{'x ' + first['codec']:>11}")
    for row in rows:
        print(
            f"{row['codec']:18}{1e3 * row['seconds']:9.1f}{row['up']:8.2f}{row['down']:8.2f}{row['error']:8.2f}"
            f"{first['seconds'] / row['seconds']:11.2f}"
        )


if __name__ == "__main__":
    main()
