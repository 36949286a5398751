"""Bytes that leave a machine, and time of a step, if several ranks share each machine: one level against two.

    sudo python bench/network/levels.py                                      # 2 x 4 ranks, 100 Mbit, 20 ms: 2 minutes
    sudo python bench/network/levels.py --ranks 8 --steps 2 --methods float32 flat levels
    sudo python bench/network/levels.py --links 1gbit,0 100mbit,20 --buckets 1 7 --json levels.json

A machine is a network namespace (bench/network/netns.py: Linux, root, iproute2, TUN devices) with a forked process for
each of its ranks. A link is given as the rate at which a machine sends, and an added round-trip time in milliseconds.
Ranks of one machine reach each other without a limit. DistributedDataParallel trains equal layers, 819,200 values.

float32     all-reduce of Gloo: a ring over all ranks
fp16        torch's fp16_compress_hook over Gloo
flat        ddp_hook("small"), each rank to each other rank
ring        ddp_hook(Quantize(4), feedback=False) with algorithm="ring"
levels      ddp_hook("small") with group=mesh: plain sums within a machine, frames between machines
within      levels with options(within=codec.Float8()): frames of 8 bits within a machine, too
local       LocalSteps(every=5, group=mesh): DistributedDataParallel within a machine, 4 bits between machines

step ms     milliseconds of a step on the slowest rank: median over steps (local: mean)
least       the least of the same milliseconds, which other load of the computer raises least
CPU ms      milliseconds of CPU time of a rank in a step: mean over ranks
leaves kB   kilobytes that a machine sends to others in a step, headers included: maximum over machines
/ float32   step ms and leaves kB, divided by those of float32
loss        on held-out data after the last step
equal       True if all ranks have the same parameters, bit for bit
"""

import argparse
import importlib
import json
import logging
import math
import os
import statistics
import sys
import time
import zlib
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import forked
import netns

METHODS = ("float32", "fp16", "flat", "ring", "levels", "within", "local")
BLOCK = EVERY = 5  # consecutive steps of a method; LocalSteps synchronizes at the end of each block
WARMUP = 5  # untimed steps of a method: DistributedDataParallel rebuilds its buckets after the first step
QUIET = 0.3  # seconds until queues are empty, before the bytes of a link are read

Cell = dict[str, Any]


class Training:
    """Data-parallel training of equal layers with one method of communication."""

    def __init__(self, method: str, plan: Cell, mesh: Any) -> None:
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        self.width, layers = plan["width"], plan["layers"]
        net = nn.Sequential(*(nn.Linear(self.width, self.width, bias=False) for _ in range(layers)))
        for weight in net.parameters():
            nn.init.orthogonal_(weight)  # gives gradients of all layers the same magnitude
        each = -(-layers // plan["buckets"]) * self.width**2 * 4
        group = mesh.get_group("within") if method == "local" else None
        self.model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=each / 2**20)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
        self.local: Any = None
        self.register(method, mesh)

    def register(self, method: str, mesh: Any) -> None:
        """Register the communication hook of a method with the model, or create its LocalSteps."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        import codec
        import codec.torch

        if method == "local":
            self.local = codec.torch.LocalSteps(self.model.module, self.optimizer, every=EVERY, group=mesh)
        elif method == "fp16":
            self.model.register_comm_hook(None, fp16_compress_hook)
        elif method == "ring":
            how = codec.options(algorithm="ring")
            codec.torch.ddp_hook(codec.Quantize(4), feedback=False, options=how).register(self.model)
        elif method in ("flat", "levels", "within"):
            group = None if method == "flat" else mesh
            peers = mesh.size() if method == "flat" else mesh.size(0)
            algorithm = "all_gather" if peers == 2 else "two_shot"  # the algorithms of "auto"
            how = codec.options(algorithm=algorithm, within=codec.Float8() if method == "within" else None)
            codec.torch.ddp_hook("small", options=how).register(self.model, group=group)

    def step(self) -> float:
        """Run one training step, and return its duration in seconds."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.loss(self.generator).backward()
        self.optimizer.step()
        if self.local is not None:
            self.local.step()
        return time.perf_counter() - begin

    def loss(self, generator: Any) -> Any:
        """Return the loss of the next batch."""
        import torch

        x = torch.randn(8, self.width, generator=generator)
        return (self.model(x) - x.roll(1, 1)).square().mean()

    def held_out_loss(self) -> float:
        """Return the loss on data that no rank trains on."""
        import torch

        with torch.no_grad():
            return float(self.loss(torch.Generator().manual_seed(0)))

    def digest(self) -> int:
        """Return a checksum of all parameters."""
        digest = 0
        for p in self.model.parameters():
            digest = zlib.crc32(p.detach().numpy().tobytes(), digest)
        return digest


def measured(trainings: dict[str, Training], steps: int) -> dict[str, Cell]:
    """Run steps of all methods, switching methods every few steps, because the load of the computer varies.

    Returns
    -------
    dict of str to dict
        By method: seconds of each step on the slowest rank, seconds of CPU time, and bytes that left a machine.
    """
    import torch
    import torch.distributed as dist

    found: dict[str, Cell] = {key: {"steps": [], "cpu": 0.0, "nbytes": 0} for key in trainings}
    for first in range(0, steps, BLOCK):
        for key, training in trainings.items():
            before, row = settled(), found[key]
            cpu = time.process_time()
            each = torch.tensor([training.step() for _ in range(min(BLOCK, steps - first))], dtype=torch.float64)
            row["cpu"] += time.process_time() - cpu
            row["nbytes"] += settled() - before
            dist.all_reduce(each, op=dist.ReduceOp.MAX)
            row["steps"] += each.tolist()
    return found


def settled() -> int:
    """Return the bytes that this machine has sent, once all ranks are here and have sent all their bytes."""
    import torch.distributed as dist

    dist.barrier()
    time.sleep(QUIET)
    nbytes = netns.sent_nbytes()
    dist.barrier()
    return nbytes


def rows_of(plan: Cell, buckets: int, mesh: Any) -> list[Cell]:
    """Measure all methods with a number of buckets; return a row for each of them."""
    import torch
    import torch.distributed as dist

    trainings = {method: Training(method, plan | {"buckets": buckets}, mesh) for method in plan["methods"]}
    for training in trainings.values():
        for _ in range(WARMUP):
            training.step()
    rows: list[Cell] = []
    for method, found in measured(trainings, plan["steps"]).items():
        training, steps = trainings[method], plan["steps"]
        if training.local is not None:
            training.local.finish()
        digest = training.digest()
        most = torch.tensor([found["nbytes"], digest, -digest], dtype=torch.int64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        cpu = torch.tensor(found["cpu"], dtype=torch.float64)
        dist.all_reduce(cpu)
        usual = statistics.mean if method == "local" else statistics.median  # local: one of 5 steps communicates
        row = {"buckets": buckets, "method": method, "step": usual(found["steps"]), "steps": found["steps"]}
        row |= {"cpu": float(cpu) / dist.get_world_size() / steps, "nbytes": int(most[0]) / steps}
        row |= {"loss": training.held_out_loss(), "equal": int(most[1]) == -int(most[2])}
        rows.append({k: plan[k] for k in ("machines", "ranks", "link")} | row)
    return rows


def rank_main(rank: int, store: Any, emit: forked.Emit, *, plan: Cell) -> None:
    """Run one rank; the first rank emits the rows."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    shape = plan["machines"], plan["ranks"]
    dist.init_process_group("gloo", store=store, timeout=timedelta(seconds=300), rank=rank, world_size=math.prod(shape))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("between", "within"))
    for buckets in plan["buckets"]:
        for row in rows_of(plan, buckets, mesh):
            if rank == 0:
                emit(row)
    dist.barrier()


def measure(plan: Cell, timeout: float) -> list[Cell]:
    """Run all methods on one network, and return the rows."""
    rate, rtt = plan["link"].split(",")
    ranks, each = plan["machines"] * plan["ranks"], plan["ranks"]
    with netns.Network(plan["machines"], rate, rtt=float(rtt)) as network:
        return forked.run(ranks, partial(rank_main, plan=plan), network=network, each=each, timeout=timeout)[0]


def show(rows: list[Cell]) -> None:
    """Print a table for each network and number of buckets."""
    cells = {(r["machines"], r["ranks"], r["link"], r["buckets"]): None for r in rows}
    for cell in cells:
        some = [r for r in rows if (r["machines"], r["ranks"], r["link"], r["buckets"]) == cell]
        machines, ranks, link, buckets = cell
        rate, rtt = link.split(",")
        plain = next((r for r in some if r["method"] == "float32"), None)
        title = f"{machines} x {ranks} ranks, {netns.shown(rate)}, {rtt} ms, {buckets} bucket{'s' * (buckets > 1)}"
        heads = f"{'step ms':>9}{'/ float32':>10}{'least':>7}{'CPU ms':>8}{'leaves kB':>11}{'/ float32':>10}"
        print(f"{title:44}{heads}{'loss':>8}  equal")
        for r in some:
            over = [f"{r[k] / plain[k]:.3f}" if plain else "" for k in ("step", "nbytes")]
            step, least, cpu = (1e3 * x for x in (r["step"], min(r["steps"]), r["cpu"]))
            print(
                f"  {r['method']:42}{step:9.0f}{over[0]:>10}{least:7.0f}{cpu:8.1f}{r['nbytes'] / 1e3:11,.0f}"
                f"{over[1]:>10}{r['loss']:8.4f}  {r['equal']}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", nargs="+", type=int, default=[2])
    parser.add_argument("--ranks", nargs="+", type=int, default=[4], help="ranks of each machine (4)")
    parser.add_argument("--links", nargs="+", default=["100mbit,20"], help="rate and round-trip time (100mbit,20)")
    parser.add_argument("--buckets", nargs="+", type=int, default=[1], help="buckets of a step (1)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each method, rounded up to 5 (10)")
    parser.add_argument("--width", type=int, default=128, help="width of a layer (128)")
    parser.add_argument("--layers", type=int, default=50, help="number of layers (50: 819,200 values with width 128)")
    parser.add_argument("--timeout", type=float, default=900, help="maximum seconds of a network (900)")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    args = parser.parse_args()
    for link in args.links:
        if len(link.split(",")) != 2:
            parser.error(f"--links: {link}: a link is a rate and a round-trip time in milliseconds, such as 100mbit,20")
    args.steps = -(-args.steps // BLOCK) * BLOCK
    settings = {k: getattr(args, k) for k in ("buckets", "methods", "steps", "width", "layers")}
    os.environ.update(OMP_NUM_THREADS="1", CODEC_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    importlib.import_module("codec.torch")  # before ranks are forked, which need not import it again
    logging.getLogger("codec.torch").setLevel(logging.ERROR)
    rows: list[Cell] = []
    with netns.ending(__file__):
        for machines in args.machines:
            for ranks in args.ranks:
                for link in args.links:
                    print(f"{machines} x {ranks} ranks, {link}; load {os.getloadavg()[0]:.0f}", file=sys.stderr)
                    plan = settings | {"machines": machines, "ranks": ranks, "link": link}
                    rows += measure(plan, args.timeout)
                    if args.json:
                        Path(args.json).write_text(json.dumps(rows, indent=1))
    show(rows)


if __name__ == "__main__":
    main()
