"""Train a small network on several processes with 1-bit Adam.

    torchrun --nproc-per-node 2 examples/one_bit_adam.py
    torchrun --nproc-per-node 2 examples/one_bit_adam.py --warmup lossless --steps 400
    torchrun --nproc-per-node 2 examples/one_bit_adam.py --zero-one

Before the freeze, processes send gradients; after it, they send the signs of momenta, with error feedback. The program
saves one checkpoint file for all processes, loads it, and continues training. 0/1 Adam also takes steps without
communication.
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

WARMUPS = {"lossless": codec.Lossless(), "quantize4": codec.Quantize(4)}


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random points and their classes, 8 rings around the origin."""
    x = torch.randn(256, 32, generator=generator)
    return x, (x.norm(dim=1) * 2 - 7).clamp(0, 7).long()


def build(
    warmup: str, freeze_step: int | codec.torch.VarianceSchedule
) -> tuple[DistributedDataParallel, codec.torch.OneBitAdam]:
    """Return the model and its optimizer, registered to each other."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)
    )
    model = DistributedDataParallel(net)
    optimizer = codec.torch.OneBitAdam(
        model.parameters(),
        lr=3e-3,
        betas=(0.9, 0.97),
        freeze_step=freeze_step,
        spec=codec.Sign(group_size=1024),  # 1 bit; for short training runs, the default of 4 bits is better
        warmup=WARMUPS[warmup],
    )
    # "auto" would send everything uncompressed, which is faster within one machine
    return model, optimizer.register(model, options=codec.options(algorithm="two_shot"))


def train(
    model: DistributedDataParallel, optimizer: codec.torch.OneBitAdam, generator: torch.Generator, steps: int
) -> list[float]:
    """Take steps, and return the losses of this rank."""
    losses: list[float] = []
    for _ in range(steps):
        x, y = batch(generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def report(name: str, losses: list[float], optimizer: codec.torch.OneBitAdam, sent_before: int) -> int:
    """Print loss and bytes of a phase on rank 0; return the bytes sent so far."""
    sent = optimizer.stats().sent_nbytes
    values = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    world = dist.get_world_size()
    if dist.get_rank() == 0:
        bits = 8 * (sent - sent_before) / len(losses) / values / max(1, 2 * (world - 1) / world)
        print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {bits:.2f} bits a value, frozen: {optimizer.frozen}")
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warmup", choices=WARMUPS, default="quantize4", help="codec of gradients (quantize4)")
    parser.add_argument("--zero-one", action="store_true", help="0/1 Adam in place of 1-bit Adam")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, help="file of the checkpoint; default: a temporary one")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    freeze_step = max(1, args.steps // 4)
    schedule = codec.torch.VarianceSchedule(freeze_step) if args.zero_one else freeze_step
    model, optimizer = build(args.warmup, schedule)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = train(model, optimizer, generator, freeze_step)
    sent = report("warm-up", losses, optimizer, 0)
    losses += train(model, optimizer, generator, args.steps // 4)
    report("0/1 Adam" if args.zero_one else "1-bit Adam", losses[freeze_step:], optimizer, sent)

    optimizer.finish()  # averages parameters, which differ by rank after local steps of 0/1 Adam
    with tempfile.TemporaryDirectory() as folder:
        path = args.checkpoint or Path(folder) / "checkpoint.pt"
        state = optimizer.state_dict(gather=True)  # moments, and the residuals of all ranks
        if dist.get_rank() == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": state}, path)
            saved = [torch.load(path)]
        else:
            saved = [{}]
        dist.broadcast_object_list(saved)
    model, optimizer = build(args.warmup, schedule)
    model.module.load_state_dict(saved[0]["model"])
    optimizer.load_state_dict(saved[0]["optimizer"])  # a gathered state can be loaded on any number of ranks
    losses += train(model, optimizer, generator, max(1, args.steps - len(losses)))
    report("after the checkpoint", losses[freeze_step + args.steps // 4 :], optimizer, 0)
    optimizer.finish()
    if losses[-1] > losses[0]:
        raise SystemExit("the loss has not fallen")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
