"""Step time of a pipeline with forward="auto", backward="auto" and with fixed bits, on links that change.

    sudo python bench/pipeline/auto_bits.py                        # two stages, four links: up to three minutes
    sudo python bench/pipeline/auto_bits.py --stages 3 --links 1gbit/100mbit,0 --quality smallest

Stages are processes in network namespaces (bench/network/netns.py: Linux, root, iproute2, TUN devices). Each stage is
one layer, and the schedule is 1F1B. A link is a rate and an added round-trip time in milliseconds; several rates, as in
1gbit/100mbit, are those of the stages. On each link, each setting runs ``--steps`` steps; settings alternate after 10
steps. All samples have been sent once before, so that activations are sent as deltas. A setting keeps its stages for
all links, so that "auto" must detect each change of the link.

mean        milliseconds per step, mean over all steps on this link, including those in which "auto" tries bits
median      median of the same steps
MB          megabytes that all stages together send in a step
/ best      mean, and median, divided by the least one of the fixed settings on this link
all links   sums over all links; "best" is the fixed setting with the least sum
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "network"))
import changing_links
from systems import parse_bits

LINKS = ("20mbit,0", "1gbit,0", "20mbit,0", "100mbit,50")
FIXED = ("fw8bw8", "fw4bw8", "fw2bw4")


class Training:
    """Training of one stage of the pipeline, with one setting of bits."""

    def __init__(self, setting: str, plan: changing_links.Cell) -> None:
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
        self.warmup = self.batches  # number of first steps, in which each sample is sent for the first time
        generator = torch.Generator().manual_seed(0)
        shape = self.batch * self.batches, plan["length"], plan["width"]
        self.x, self.y = (torch.randn(shape, generator=generator) for _ in range(2))
        torch.manual_seed(rank)
        self.module = nn.Sequential(nn.Linear(plan["width"], plan["width"]), nn.Tanh())
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-2)
        self.stage = CompressedStage(self.module, rank, stages, "cpu", **how)
        self.schedule = Schedule1F1B(self.stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)

    def step(self) -> float:
        """Run one training step, and return its duration in seconds."""
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
        """Return the number of bytes that this stage has sent so far."""
        stats = self.stage.stats()
        return stats.forward_nbytes + stats.backward_nbytes

    def choices(self) -> dict[str, int]:
        """Return, for each choice of "auto", the number of steps so far in which it was used."""
        return self.stage.stats().choices

    def size(self, nbytes: float) -> float:
        """Add up the bytes that each stage sends in a step, and return the sum in megabytes."""
        import torch
        import torch.distributed as dist

        total = torch.tensor(nbytes, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item() / 1e6


def main() -> None:
    parser = changing_links.parser_of(__doc__, LINKS, FIXED)
    parser.add_argument("--quality", default="smallest", help='fewest bits of "auto" (smallest)')
    parser.add_argument("--width", type=int, default=256, help="width of a layer (256)")
    parser.add_argument("--length", type=int, default=64, help="positions of a sample (64)")
    parser.add_argument("--batch", type=int, default=32, help="samples of a batch, which has 4 micro-batches (32)")
    parser.add_argument("--batches", type=int, default=3, help="batches that are visited in turn (3)")
    changing_links.main(__file__, parser, Training, "MB")


if __name__ == "__main__":
    main()
