"""Train a small network with compressed gradients, and write the hook's statistics to TensorBoard.

pip install tensorboard
torchrun --nproc-per-node 4 examples/ddp_tensorboard.py --folder runs
tensorboard --logdir runs
"""

import argparse
import os
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

import codec
import codec.torch

COUNTED = ("steps", "sent_nbytes", "raw_nbytes", "encode_s", "wire_s", "decode_s")


class Monitor:
    """Writes a hook's statistics to TensorBoard, as averages over the steps since the last call.

    Parameters
    ----------
    hook : codec.torch.Hook
        Hook of the model.
    writer : SummaryWriter
        Writer of the log folder.
    """

    def __init__(self, hook: codec.torch.Hook, writer: SummaryWriter) -> None:
        self.hook, self.writer = hook, writer
        self.before = asdict(hook.stats())

    def write(self, step: int) -> None:
        """Write the averages under the number `step`."""
        stats = self.hook.stats()
        now = asdict(stats)
        delta = {name: now[name] - self.before[name] for name in COUNTED}
        self.before = now
        steps = max(1, delta["steps"])
        self.writer.add_scalar("codec/ratio", stats.ratio, step)
        self.writer.add_scalar("codec/sent_MB", delta["sent_nbytes"] / steps / 1e6, step)
        self.writer.add_scalar("codec/residual_ratio", stats.residual_ratio, step)
        for phase in ("encode", "wire", "decode"):
            self.writer.add_scalar(f"codec/{phase}_ms", delta[f"{phase}_s"] / steps * 1e3, step)


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random points and their classes, 8 rings around the origin."""
    x = torch.randn(256, 32, generator=generator)
    return x, (x.norm(dim=1) * 2 - 7).clamp(0, 7).long()


def train(steps: int, every: int, folder: str) -> None:
    """Train; after every `every` steps, rank 0 writes statistics to `folder`."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    hook = codec.torch.ddp_hook(codec.Quantize(4), feedback=True, options=codec.options(algorithm="two_shot")).register(
        model
    )
    writer = SummaryWriter(folder) if dist.get_rank() == 0 else None
    monitor = None if writer is None else Monitor(hook, writer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, steps + 1):
        x, y = batch(generator)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if writer is not None and monitor is not None and step % every == 0:
            writer.add_scalar("loss", loss.item(), step)
            monitor.write(step)
            print(f"step {step}/{steps}: loss {loss.item():.3f}, {hook.stats().ratio:.1%} of the bytes", flush=True)
    if writer is not None:
        writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between two points of a curve")
    parser.add_argument("--folder", default="runs", help="folder for TensorBoard")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    train(args.steps, args.every, args.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
