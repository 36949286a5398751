"""Step time of DistributedDataParallel on links with latency: float32, torch's hooks, and this library's.

    sudo python bench/network/latency.py --quick                       # 8 cells of 6 methods: about 3 minutes
    sudo python bench/network/latency.py                               # all round-trip times, rates, buckets: an hour
    sudo python bench/network/latency.py --rtt 0 100 --rates 100mbit --buckets 1 7 --methods float32 small

Ranks are processes in network namespaces (bench/network/netns.py: Linux, root, iproute2, TUN devices). A token bucket
limits the rate at which a rank sends, and packets are delayed by half of the round-trip time. The model is a stack of
equal layers of ``--width`` x ``--width`` values, so that a bucket cap sets the number of buckets. Ranks train without
pauses and without barriers. Each rank is bound to its own cores if there are enough.

step        milliseconds between two steps of the optimizer: median of the slowest rank
sent        bytes that left a rank's interface per step, including headers and acknowledgements: maximum over ranks
cpu         CPU milliseconds of a rank per step, excluding the kernel's network stack: maximum over ranks
trips       round trips for which a step waits, including those of TCP's slow start: (step - step at the shortest
            round-trip time) / difference of the round-trip times; only if several round-trip times are measured
model       time of a step if all buckets are in flight at once: max(compute, sent / rate + least trips x round-trip
            time) + cpu beyond that of the local step. `compute` is the step without communication (row "local").
            The least number of trips is 1, and 2 for PowerSGD, whose second factor depends on the first. This
            assumes two ranks; a ring of more ranks needs more trips
over        step / model
x float32   speed relative to float32 in the same cell

`small` is ``ddp_hook("small")`` with ``algorithm="two_shot"``; `small, auto` has the default algorithm, whose trials
are not counted. `OneBitAdam` is measured after its freeze. torch's PowerSGD hook hangs on Gloo with several buckets,
whose collectives ranks start in different orders, so it runs with one.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import netns

METHODS = ("local", "float32", "fp16", "powersgd", "small", "small, auto", "onebit")
NAMES = {"powersgd": "PowerSGD, rank 2", "onebit": "OneBitAdam, frozen", "fp16": "fp16 hook"}
LEAST_TRIPS = {"local": 0, "powersgd": 2}
RTTS, RATES, BUCKETS = (0, 20, 100, 200), ("20mbit", "100mbit", "1gbit"), (1, 7, 50)
QUICK = {"rtt": (0, 100), "rates": ("20mbit", "100mbit"), "buckets": (1, 7)}
WARMUP = 4  # untimed steps: DDP rebuilds its buckets, and PowerSGD and OneBitAdam begin to compress in step 3
FEWEST = 3  # minimum number of timed steps

Cell = dict[str, Any]


# Functions that run on each rank


class Training:
    """Data-parallel training of equal layers with one method of communication."""

    def __init__(self, method: str, plan: Cell, buckets: int) -> None:
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        width, layers = plan["width"], plan["layers"]
        net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        for layer in net:
            nn.init.orthogonal_(layer.weight)  # gives gradients of all layers the same magnitude
        self.values = width * width * layers
        per_bucket = -(-layers // buckets)
        self.model = DistributedDataParallel(net, bucket_cap_mb=per_bucket * width * width * 4 / 2**20)
        self.optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-4)
        self.generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        self.batch, self.width, self.pause = plan["batch"], width, plan["pause"]
        self.warmup = WARMUP
        self.hook: Any = None  # hook of codec.torch.ddp_hook, if the method has one
        self.register(method)

    def register(self, method: str) -> None:
        """Register the method's communication hook with the model, or replace the optimizer."""
        from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook

        import codec.torch
        from codec.torch.group import autotune

        two_shot = codec.options(algorithm="two_shot")
        if method == "local":
            self.model.register_comm_hook(None, debugging_hooks.noop_hook)
        elif method == "fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif method == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif method == "small":
            self.hook = codec.torch.ddp_hook("small", options=two_shot).register(self.model)
        elif method == "small, auto":
            self.hook = codec.torch.ddp_hook("small").register(self.model)
            self.warmup += autotune.TRIALS
        elif method == "onebit":
            parameters: Any = list(self.model.parameters())
            self.optimizer = codec.torch.OneBitAdam(parameters, lr=1e-4, freeze_step=2)
            self.optimizer.register(self.model, options=two_shot)
        else:
            assert method == "float32"  # this method is DistributedDataParallel without a hook

    def step(self) -> None:
        import torch

        x = torch.randn(self.batch, self.width, generator=self.generator)
        self.optimizer.zero_grad()
        loss = (self.model(x) - x.roll(1, 1)).square().mean()
        if self.pause:
            time.sleep(self.pause / 1000)
        loss.backward()
        self.optimizer.step()

    def buckets(self) -> int:
        """Return the number of DDP's buckets."""
        data: Any = self.model._get_ddp_logging_data()
        return len(str(data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]).split(","))


def largest(*values: float) -> list[float]:
    """Return, for each value, the maximum over ranks."""
    import torch
    import torch.distributed as dist

    t = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.tolist()


def measured(method: str, plan: Cell, buckets: int) -> Cell:
    """Train with one method and number of buckets, and return the row of the table."""
    training = Training(method, plan, buckets)
    for _ in range(training.warmup):
        start = time.perf_counter()
        training.step()
        took = time.perf_counter() - start
    (took,) = largest(took)
    count = max(FEWEST, min(plan["steps"], int(plan["seconds"] / took)))
    training.step()  # an untimed step, because ranks leave the exchange above at different times
    times, sent, cpu = [time.perf_counter()], netns.sent_nbytes(), time.process_time()
    for _ in range(count):
        training.step()
        times.append(time.perf_counter())
    cpu, sent = (time.process_time() - cpu) / count, (netns.sent_nbytes() - sent) // count
    step = statistics.median(b - a for a, b in itertools.pairwise(times))
    step, cpu, most = largest(step, cpu, sent)
    return {
        "method": method,
        "wanted_buckets": buckets,
        "buckets": training.buckets(),
        "steps": count,
        "step_ms": 1e3 * step,
        "cpu_ms": 1e3 * cpu,
        "sent": int(most),
        "values": training.values,
    }


def worker(plan: Cell) -> None:
    """Measure all methods and buckets of a link on one rank; rank 0 prints the rows."""
    import torch.distributed as dist

    rank, rtt = netns.join(plan["threads"], 300)
    for buckets in plan["buckets"]:
        for method in plan["methods"]:
            if method == "powersgd" and buckets > 1:
                continue
            row = measured(method, plan, buckets) | {"measured_rtt_ms": 1e3 * rtt}
            if rank == 0:
                print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# Functions that compute and print the tables


def models(rows: Sequence[Cell]) -> None:
    """Add the modelled time, the round trips, and the speed relative to float32 to each row."""
    cells = {(row["rate"], row["rtt"], row["wanted_buckets"], row["method"]): row for row in rows}
    nearest = min(row["rtt"] for row in rows)
    for (rate, rtt, buckets, method), row in cells.items():
        local = cells.get((rate, rtt, buckets, "local"), {"step_ms": 0.0, "cpu_ms": 0.0})
        speed = netns.bits(rate)
        wire = 8e3 * row["sent"] / speed if speed else 0.0
        extra = max(0.0, row["cpu_ms"] - local["cpu_ms"])
        row["model_ms"] = max(local["step_ms"], wire + LEAST_TRIPS.get(method, 1) * rtt) + extra
        row["over"] = row["step_ms"] / row["model_ms"] if row["model_ms"] else 1.0
        near, plain = cells.get((rate, nearest, buckets, method)), cells.get((rate, rtt, buckets, "float32"))
        if near and rtt > nearest:
            row["trips"] = (row["step_ms"] - near["step_ms"]) / (rtt - nearest)
        if plain:
            row["speed"] = plain["step_ms"] / row["step_ms"]


def show(rows: Sequence[Cell], ranks: int) -> None:
    """Print a table for each link and number of buckets."""
    heads = ("step ms", "sent kB", "cpu ms", "trips", "model ms", "over", "x float32")
    for rate, rtt, wanted in dict.fromkeys((row["rate"], row["rtt"], row["wanted_buckets"]) for row in rows):
        some = [row for row in rows if (row["rate"], row["rtt"], row["wanted_buckets"]) == (rate, rtt, wanted)]
        first = some[0]
        trip = f"round trip {rtt:g} ms (measured {first['measured_rtt_ms']:.1f})"
        print(f"{ranks} ranks, {netns.shown(rate)}, {trip}, {first['buckets']} buckets, {first['values']:,} values")
        print(f"{'':20}" + "".join(f"{head:>10}" for head in heads))
        for row in some:
            numbers = (f"{row['step_ms']:10.1f}", f"{row['sent'] / 1e3:10.1f}", f"{row['cpu_ms']:10.1f}")
            trips = f"{row['trips']:10.1f}" if "trips" in row else f"{'':10}"
            speed = f"{row['speed']:10.2f}" if "speed" in row else ""
            line = f"{''.join(numbers)}{trips}{row['model_ms']:10.1f}{row['over']:10.2f}{speed}"
            print(f"{NAMES.get(row['method'], row['method']):20}{line}")
        print(flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rtt", nargs="+", type=float, help="round-trip times in milliseconds (0 20 100 200)")
    parser.add_argument("--rates", nargs="+", help="links (20mbit 100mbit 1gbit)")
    parser.add_argument("--buckets", nargs="+", type=int, help="numbers of gradient buckets (1 7 50)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--quick", action="store_true", help="0 and 100 ms, 20 and 100 Mbit/s, 1 and 7 buckets")
    parser.add_argument("--width", type=int, default=128, help="width of a layer (128)")
    parser.add_argument("--layers", type=int, default=50, help="number of layers (50: 819,200 values with width 128)")
    parser.add_argument("--batch", type=int, default=8, help="rows of a batch on each rank (8)")
    parser.add_argument(
        "--pause", type=float, default=0, help="milliseconds of a step that are slept, as if a GPU computed"
    )
    parser.add_argument("--steps", type=int, default=12, help="most timed steps of a row (12)")
    parser.add_argument("--seconds", type=float, default=6, help="seconds after which a row has enough steps (6)")
    parser.add_argument("--congestion", help="TCP's congestion control (the machine's)")
    parser.add_argument("--no-restart", action="store_true", help="net.ipv4.tcp_slow_start_after_idle=0")
    parser.add_argument("--unbound", action="store_true", help="do not bind ranks to cores")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    every = {"rtt": RTTS, "rates": RATES, "buckets": BUCKETS}
    for name, values in (QUICK if args.quick else every).items():
        if getattr(args, name) is None:
            setattr(args, name, list(values))
    if min(args.buckets) < 1 or max(args.buckets) > args.layers:
        parser.error(f"--buckets {max(args.buckets)}: give a number from 1 to that of --layers, {args.layers}")
    return args


def main() -> None:
    args = arguments()
    if args.worker:
        worker(json.loads(args.worker))
        return
    from rich.progress import Progress

    plan = {
        k: getattr(args, k) for k in ("buckets", "methods", "width", "layers", "batch", "pause", "steps", "seconds")
    }
    command, threads = netns.worker_of(__file__, plan, args.ranks)
    links = [(rate, rtt) for rate in args.rates for rtt in args.rtt]
    each = sum(method != "powersgd" or buckets == 1 for method in args.methods for buckets in args.buckets)
    how = {"congestion": args.congestion, "slow_start_after_idle": not args.no_restart}
    rows: list[Cell] = []
    with netns.ending(__file__), Progress(transient=True) as bar:
        task = bar.add_task("cells", total=len(links) * each)

        def tick(rank: int, line: str) -> None:
            if rank == 0 and line.startswith("{"):
                bar.update(task, advance=1)

        for rate, rtt in links:
            bar.update(task, description=f"{netns.shown(rate)}, {rtt:g} ms")
            with netns.Network(args.ranks, rate, rtt=rtt, **how) as network:
                run = {"environment": threads, "timeout": 3600, "on_line": tick, "bind": not args.unbound}
                found = network.run(command, **run)[0]
            rows += [{"rate": rate, "rtt": rtt, **row} for row in found]
            if args.json:  # written after each link, so that an interruption loses no complete link
                models(rows)
                with open(args.json, "w") as f:
                    json.dump(rows, f, indent=1)
    models(rows)
    show(rows, args.ranks)


if __name__ == "__main__":
    main()
