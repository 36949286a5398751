"""Step time of ddp_hook("auto") and of fixed presets on links that change.

    sudo python bench/network/auto_ddp.py                                   # four links, up to three minutes
    sudo python bench/network/auto_ddp.py --links 100mbit,0 none,0 --quality smallest

Ranks are processes in network namespaces (bench/network/netns.py: Linux, root, iproute2, TUN devices). They train a
stack of equal layers with DistributedDataParallel. A link is given as a rate and an added round-trip time in
milliseconds. On each link, each method runs ``--steps`` steps; methods alternate after 10 steps. A method keeps its
hook for all links, so that "auto" must detect each change of the link.

mean        milliseconds per step, mean over all steps on this link, including those in which "auto" tries methods
median      median of the same steps
bits        bits that a rank sends per value and phase of an all-reduce
/ best      mean, and median, divided by the least one of the fixed methods on this link
all links   sums over all links; "best" is the fixed method with the least sum
"""

import os
import time
from typing import Any

import changing_links

FIXED = ("float32", "lossless", "balanced", "small")
LINKS = ("100mbit,0", "1gbit,0", "100mbit,0", "1gbit,100")


class Training:
    """Data-parallel training of equal layers with one method of communication."""

    warmup = 3  # untimed steps: DDP rebuilds its buckets after the first step

    def __init__(self, method: Any, plan: changing_links.Cell) -> None:
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        import codec.torch

        torch.manual_seed(0)
        width, self.batch, self.pause = plan["width"], plan["batch"], plan["pause"]
        net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(plan["layers"])))
        for weight in net.parameters():
            nn.init.orthogonal_(weight)  # gives gradients of all layers the same magnitude
        self.width, self.values = width, width * width * plan["layers"]
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        self.generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        self.hook, self.taken = None, 0
        if method == "auto":
            self.hook = codec.torch.ddp_hook(codec.torch.Auto(plan["quality"])).register(self.model)
        elif method != "float32":
            algorithm = "all_gather" if int(os.environ["WORLD_SIZE"]) == 2 else "two_shot"  # the algorithms of "auto"
            options = codec.options(algorithm=algorithm)
            self.hook = codec.torch.ddp_hook(method, options=options).register(self.model)

    def step(self) -> float:
        """Run one training step, and return its duration in seconds."""
        import torch

        begin = time.perf_counter()
        x = torch.randn(self.batch, self.width, generator=self.generator)
        self.optimizer.zero_grad()
        loss = (self.model(x) - x.roll(1, 1)).square().mean()
        if self.pause:
            time.sleep(self.pause / 1000)
        loss.backward()
        self.optimizer.step()
        self.taken += 1
        return time.perf_counter() - begin

    def sent(self) -> int:
        """Return the number of gradient bytes that this rank has sent so far."""
        return 4 * self.values * self.taken if self.hook is None else self.hook.stats().sent_nbytes

    def choices(self) -> dict[str, int]:
        """Return, for each choice of "auto", the number of steps so far in which it was used."""
        return {} if self.hook is None else self.hook.stats().choices

    def size(self, nbytes: float) -> float:
        """Convert the bytes sent in a step to bits per value and phase of an all-reduce."""
        world = int(os.environ["WORLD_SIZE"])
        return 8 * nbytes / self.values * world / (2 * (world - 1))


def main() -> None:
    parser = changing_links.parser_of(__doc__, LINKS, FIXED)
    parser.add_argument("--quality", default="small", help='floor of "auto" (small)')
    parser.add_argument("--width", type=int, default=128, help="width of a layer (128)")
    parser.add_argument("--layers", type=int, default=50, help="number of layers (50: 819,200 values with width 128)")
    parser.add_argument("--batch", type=int, default=8, help="rows of a batch on each rank (8)")
    parser.add_argument("--pause", type=float, default=0, help="milliseconds of a step that are slept, as on a GPU (0)")
    changing_links.main(__file__, parser, Training, "bits")


if __name__ == "__main__":
    main()
