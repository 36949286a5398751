"""Time of whole training steps over slow links, and the overhead of the hook beyond computing and sending.

    sudo python bench/network/steps.py                                   # 4 ranks at 100 Mbit and 1 Gbit, five codecs
    sudo python bench/network/steps.py --ranks 2 --links 100mbit --codecs Lossless Float8

Ranks are processes in network namespaces (bench/network/netns.py: Linux, root, iproute2) that train a transformer on
text (bench/support/models.py, wider) with DistributedDataParallel and its buckets.

step        seconds between two steps of the optimizer: median of the slowest rank
compute     `step` with torch's noop_hook: DistributedDataParallel without communication
codec       time in which all ranks encode all gradients, sum a slice, encode the sum, and decode all sums
wire        bytes that a rank sends in a step / TCP rate measured before
model       compute + codec + wire: the time without any overlap
over        step / model
x DDP       speed relative to DDP without a hook on the same link
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

CODECS = ("Lossless", "Truncate", "Float8", "Quantize 4", "Sign")


def spec_of(name: str) -> Any:
    """Return the spec for a name, and True if the name selects error feedback."""
    import codec

    return {
        "Lossless": (codec.Lossless(), False),
        "Truncate": (codec.Truncate(level_coding="shared", granularity="bit", guard="feedback"), True),
        "Float8": (codec.Float8(group_size=128), False),
        "Quantize 4": (codec.Quantize(4), True),
        "Sign": (codec.Sign(group_size=1024), True),
    }[name]


def most(seconds: float) -> float:
    """Return the maximum of `seconds` over all ranks."""
    import torch
    import torch.distributed as dist

    t = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return float(t)


class Training:
    """Data-parallel training of a model, with or without a hook."""

    def __init__(self, name: str | None, width: int, layers: int) -> None:
        import torch
        from models import Language
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        net = Language(width, layers, 64)
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        self.hook = None
        if name is not None:
            import codec.torch

            spec, feedback = spec_of(name)
            options = codec.options(algorithm="two_shot")
            self.hook = codec.torch.ddp_hook(spec, feedback=feedback, optimizer=self.optimizer, options=options)
            self.hook.register(self.model)

    def step(self, batch: int) -> None:
        import torch
        from torch.nn import functional as F

        x = torch.randint(256, (batch, 65), generator=self.generator)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x[:, :-1]).flatten(0, -2), x[:, 1:].flatten()).backward()
        self.optimizer.step()

    def seconds(self, batch: int, steps: int) -> float:
        """Return the median seconds of a step."""
        import torch.distributed as dist

        times: list[float] = []
        for _ in range(steps):
            dist.barrier()
            begin = time.perf_counter()
            self.step(batch)
            times.append(most(time.perf_counter() - begin))
        return statistics.median(times)


def codec_seconds(training: Training, name: str, world: int) -> float:
    """Return the seconds to encode all gradients, add all ranks' frames of a slice, encode the sum, and decode all."""
    import torch
    import torch.distributed as dist

    import codec
    from codec.advisor import advise, cost_model, sampling

    spec, feedback = spec_of(name)
    optimizer = training.optimizer if name == "Truncate" else None
    tensors, _ = sampling.tensors_of(training.model.module, optimizer)
    dist.barrier()
    total = 0.0
    for s in sampling.samples(tensors, world, optimizer):
        cost = advise.measure(s, spec, None, feedback, codec.options(threads=torch.get_num_threads()))
        total += cost_model.compute_seconds(cost, world) * s.n / s.x.size
    return most(total)


def worker(plan: dict[str, Any]) -> None:
    """Measure all codecs and links on one rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    torch.set_num_threads(plan["threads"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for turn, link in enumerate(plan["links"]):
        netns.shape(link)
        address = f"tcp://{os.environ['MASTER_ADDR']}:{netns.PORT + 1 + turn}"
        dist.init_process_group("gloo", address, timedelta(seconds=300), world, rank)
        rate = netns.tcp_rate(rank, world)
        idle = Training(None, plan["width"], plan["layers"])
        idle.model.register_comm_hook(None, noop_hook)
        for name in [None, *plan["codecs"]]:
            training = Training(name, plan["width"], plan["layers"])
            for _ in range(2):  # untimed steps: DDP rebuilds buckets after the first step
                training.step(plan["batch"])
            before = training.hook.stats().sent_nbytes if training.hook else 0
            step = training.seconds(plan["batch"], plan["steps"])
            values = sum(p.numel() for p in training.model.parameters())
            sent = 2 * (world - 1) / world * 4 * values
            if training.hook:
                sent = (training.hook.stats().sent_nbytes - before) / plan["steps"]
            compute = idle.seconds(plan["batch"], plan["steps"])
            codec = codec_seconds(training, name, world) if name else 0.0
            row = {"link": link, "codec": name or "DDP", "step": step, "compute": compute, "codec_seconds": codec}
            row |= {"wire": most(8 * sent / rate), "sent": sent, "values": values, "rate": rate}
            if rank == 0:
                print(json.dumps(row), flush=True)
            del training
        del idle
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--steps", type=int, default=8, help="number of timed steps (8)")
    parser.add_argument("--width", type=int, default=256, help="width of the transformer (256)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the transformer (4: 3.3 million parameters)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 64 bytes on each rank (8)")
    parser.add_argument("--congestion", help="TCP's congestion control (the machine's)")
    parser.add_argument("--unbound", action="store_true", help="do not bind ranks to cores")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker))
        return
    from rich.progress import Progress

    netns.require()
    plan = {k: getattr(args, k) for k in ("links", "codecs", "steps", "width", "layers", "batch")}
    command, threads = netns.worker_of(__file__, plan, args.ranks)
    with netns.Network(args.ranks, congestion=args.congestion) as network, Progress(transient=True) as bar:
        task = bar.add_task("steps", total=len(args.links) * (1 + len(args.codecs)))

        def tick(rank: int, line: str) -> None:
            if rank == 0 and line.startswith("{"):
                bar.update(task, advance=1)

        rows = network.run(command, environment=threads, timeout=1800, on_line=tick, bind=not args.unbound)[0]
    for row in rows:
        row["model"] = row["compute"] + row["codec_seconds"] + row["wire"]
        row["over"] = row["step"] / row["model"]
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)
    show(rows, args.ranks)


def show(rows: list[dict[str, Any]], ranks: int) -> None:
    for link in dict.fromkeys(row["link"] for row in rows):
        some = [row for row in rows if row["link"] == link]
        plain = some[0]
        print(f"{ranks} ranks, {netns.shown(link)}, TCP {plain['rate'] / 1e6:.0f} Mbit/s, {plain['values']:,} values")
        heads = ("step ms", "compute", "codec", "wire", "model", "over", "x DDP")
        print(f"{'':12}" + "".join(f"{head:>9}" for head in heads))
        for row in some:
            ms = (f"{1e3 * row[k]:9.1f}" for k in ("step", "compute", "codec_seconds", "wire", "model"))
            print(f"{row['codec']:12}{''.join(ms)}{row['over']:9.2f}{plain['step'] / row['step']:9.2f}")
        print()


if __name__ == "__main__":
    main()
