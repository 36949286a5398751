"""Train a small network on several processes with compressed gradients.

    torchrun --nproc-per-node 4 examples/ddp.py
    torchrun --nproc-per-node 4 examples/ddp.py --codec small

Every process trains on its part of each batch. DistributedDataParallel averages the gradients, which the hook sends as
compressed frames. The checkpoint holds the model, the optimizer and, for each rank, the residuals of error feedback.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch

CODECS = {
    "lossless": codec.Lossless(),
    "near": codec.Truncate(),  # drops only bits that the optimizer's step rounds away
    "balanced": codec.Float8(group_size=128),
    "small": codec.Quantize(4),
}


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random points and their classes, 8 rings around the origin."""
    x = torch.randn(256, 32, generator=generator)
    return x, (x.norm(dim=1) * 2 - 7).clamp(0, 7).long()


def train(name: str, steps: int, folder: Path) -> list[float]:
    """Train with a codec, save a checkpoint in `folder`, and return the losses of this rank."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # "auto" would send gradients uncompressed, which is faster within one machine
    hook = codec.torch.ddp_hook(
        CODECS[name], optimizer=optimizer, feedback=name == "small", options=codec.options(algorithm="two_shot")
    ).register(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses: list[float] = []
    for _ in range(steps):
        x, y = batch(generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    rank = dist.get_rank()
    torch.save(hook.state_dict(), folder / f"hook-{rank}.pt")  # the hook's state differs by rank
    if rank == 0:
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, folder / "checkpoint.pt")
        stats = hook.stats()
        print(
            f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {stats.steps} steps; "
            f"sent {stats.sent_nbytes / 1e6:.1f} MB to {dist.get_world_size() - 1} others "
            f"for gradients of {stats.raw_nbytes / 1e6:.1f} MB"
        )
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", choices=CODECS, help="default: all of these, one after the other")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, help="folder for the checkpoint; default: a temporary one")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    with tempfile.TemporaryDirectory() as folder:
        for name in [args.codec] if args.codec else CODECS:
            losses = train(name, args.steps, args.checkpoint or Path(folder))
            if losses[-1] > losses[0]:
                raise SystemExit(f"{name}: the loss has not fallen")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
