"""Step time of a pipeline with forward="auto", backward="auto" and of fixed bits, on links that change.

    sudo python bench/pipeline/auto_bits.py                        # two stages, four links: up to three minutes
    sudo python bench/pipeline/auto_bits.py --stages 3 --links 1gbit/100mbit,0 --quality smallest

Stages are processes in network namespaces (bench/network/netns.py: Linux, root, iproute2, TUN devices). Each has a
layer, and they train under 1F1B, with deltas of activations. Links are rates and added round-trip times in
milliseconds; several rates, as 1gbit/100mbit, are those of the stages. On each link each setting takes ``--steps``
steps, 10 at a time in turn. All samples have been sent before, so that activations travel as deltas. Settings keep
their stages, so that "auto" has to notice each change of the link.

mean        milliseconds of a step, mean of all steps on this link: with the steps in which "auto" notices and tries
median      median of the same steps
MB          megabytes that all stages send in a step
/ best      mean, and median, over the least one of the fixed settings on this link
all links   the sums over all links: "best" is the fixed setting with the least sum
"""

import argparse
import json
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "network"))
from auto_ddp import change_to, in_turn, new, run, show
from systems import parse_bits

LINKS = ("20mbit,0", "1gbit,0", "20mbit,0", "100mbit,50")
FIXED = ("fw8bw8", "fw4bw8", "fw2bw4")

Cell = dict[str, Any]


class Training:
    """One stage of a pipeline, by one setting."""

    def __init__(self, setting: str, plan: Cell) -> None:
        import torch
        from torch import nn
        from torch.distributed.pipelining import Schedule1F1B

        import codec.torch
        from codec.torch.pipelining import CompressedStage

        rank, stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        auto = codec.torch.Auto(plan["quality"])
        how: dict[str, Any] = {"forward": auto, "backward": auto}
        if setting != "auto":
            forward, backward = parse_bits(setting)
            how = {"forward": codec.Quantize(forward, rounding="nearest"), "backward": codec.Quantize(backward)}
        self.batch, self.batches, self.count = plan["batch"], plan["batches"], 0
        generator = torch.Generator().manual_seed(0)
        shape = self.batch * self.batches, plan["length"], plan["width"]
        self.x, self.y = (torch.randn(shape, generator=generator) for _ in range(2))
        torch.manual_seed(rank)
        self.module = nn.Sequential(nn.Linear(plan["width"], plan["width"]), nn.Tanh())
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-2)
        self.stage = CompressedStage(self.module, rank, stages, "cpu", **how)
        self.schedule = Schedule1F1B(self.stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)

    def step(self) -> float:
        """Train for a step, and return its seconds."""
        import torch

        from codec.torch.pipelining import attempts

        begin = time.perf_counter()
        ids = torch.arange(self.batch) + self.batch * (self.count % self.batches)
        self.count += 1
        self.optimizer.zero_grad()
        for attempt in attempts(self.stage):
            with attempt:
                if self.stage.is_first:
                    self.schedule.step(self.x[ids], sample_ids=ids)
                elif self.stage.is_last:
                    self.schedule.step(target=self.y[ids])
                else:
                    self.schedule.step()
        self.optimizer.step()
        return time.perf_counter() - begin

    def sent(self) -> int:
        """Return the bytes that this stage has sent so far."""
        stats = self.stage.stats()
        return stats.forward_nbytes + stats.backward_nbytes


def worker(plan: Cell) -> None:
    """Measure all settings on all links on one rank; rank 0 prints the rows."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(plan["threads"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0 and plan["verbose"]:
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="# %(message)s")
    dist.init_process_group("gloo", "env://", timedelta(seconds=300), world, rank)
    trainings: dict[str, Training] = {}
    for setting in plan["settings"]:
        trainings[setting] = Training(setting, plan)
        for _ in range(plan["batches"]):  # the first visit of all samples; links have no limit yet
            trainings[setting].step()
    for turn, link in enumerate(plan["links"]):
        dist.barrier()
        change_to(link, rank)
        sent = {setting: training.sent() for setting, training in trainings.items()}
        before = {setting: training.stage.stats().choices for setting, training in trainings.items()}
        for setting, seconds in in_turn(trainings, plan["steps"]).items():
            training = trainings[setting]
            nbytes = torch.tensor(training.sent() - sent[setting])
            dist.all_reduce(nbytes)
            row: Cell = {"turn": turn, "link": link, "setting": setting, "steps": [1e3 * s for s in seconds]}
            row["MB"] = float(nbytes) / plan["steps"] / 1e6
            row["choices"] = new(training.stage.stats().choices, before[setting])
            if rank == 0:
                print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--links", nargs="+", default=list(LINKS), help="rates and round-trip time, as 100mbit,20")
    parser.add_argument("--steps", type=int, default=40, help="steps of each setting on each link (40)")
    parser.add_argument("--fixed", nargs="*", default=list(FIXED), help="bits to compare with, as fw4bw8")
    parser.add_argument("--quality", default="smallest", help='fewest bits of "auto" (smallest)')
    parser.add_argument("--width", type=int, default=256, help="width of a layer (256)")
    parser.add_argument("--length", type=int, default=64, help="positions of a sample (64)")
    parser.add_argument("--batch", type=int, default=32, help="samples of a batch, which has 4 micro-batches (32)")
    parser.add_argument("--batches", type=int, default=3, help="batches that are visited in turn (3)")
    parser.add_argument("--verbose", action="store_true", help='print what "auto" logs')
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker))
        return
    names = ("links", "steps", "quality", "width", "length", "batch", "batches", "verbose")
    plan = {k: getattr(args, k) for k in names} | {"settings": [*args.fixed, "auto"]}
    rows = run(__file__, plan, args.stages)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)
    show(rows, "setting", "MB")


if __name__ == "__main__":
    main()
