"""Fine-tune a byte transformer in a pipeline that sends activations as 4-bit deltas (AQ-SGD).

    torchrun --nproc-per-node 4 examples/pipeline.py
    torchrun --nproc-per-node 4 examples/pipeline.py --activations direct --forward 2 --backward 4

Each process is a stage with one block of the transformer. The model is first trained on the source of Python's standard
library, and then fine-tuned on the text of Python's help for some epochs. From the second epoch on, stages send the
changes of a sample's activations since the last epoch.
"""

import argparse
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F

import codec
from codec.torch.pipelining import CompressedStage, attempts

CONTEXT, WIDTH, HEADS, BATCH, MICRO_BATCHES = 32, 64, 4, 32, 4


class Block(nn.Module):
    """Causal transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.n2(x))


class Embedding(nn.Module):
    """Sum of the embeddings of bytes and of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.byte(x) + self.place.weight


def stage_module(rank: int, size: int) -> nn.Module:
    """Return the module of a stage: its block of the transformer, with the embedding or the head at the ends."""
    torch.manual_seed(rank)
    parts: list[nn.Module] = [Block()]
    if rank == 0:
        parts.insert(0, Embedding())
    if rank == size - 1:
        parts += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)]
    return nn.Sequential(*parts)


def rows(paths: list[Path], count: int) -> torch.Tensor:
    """Return `count` distinct rows of CONTEXT + 1 bytes from files."""
    text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8)
    starts = torch.randperm(len(text) // (CONTEXT + 1), generator=torch.Generator().manual_seed(0))[:count]
    return torch.stack([text[i : i + CONTEXT + 1] for i in (starts * (CONTEXT + 1)).tolist()]).long()


def batches(count: int, epochs: int) -> Iterator[torch.Tensor]:
    """Yield the sample ids of each batch, equal on all ranks. The order of samples differs between epochs."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator).split(BATCH)


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def train(stage: CompressedStage, data: torch.Tensor, epochs: int, lr: float) -> list[list[float]]:
    """Train for some epochs, and return the losses of each epoch on the last stage."""
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=lr)
    steps = len(data) // BATCH
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, epochs * steps)
    found: list[list[float]] = [[] for _ in range(epochs)]
    for step, ids in enumerate(batches(len(data), epochs)):
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        for attempt in attempts(stage):
            with attempt:
                if stage.is_first:
                    schedule.step(data[ids, :-1], sample_ids=ids)
                else:
                    schedule.step(target=data[ids, 1:], losses=losses)
        optimizer.step()
        decay.step()
        if losses:
            found[step // steps].append(float(torch.stack(losses).detach().mean()))
    return found


def report(stage: CompressedStage, text: str) -> None:
    """Print the number of bytes that all stages have sent."""
    stats = stage.stats()
    numbers = torch.tensor([stats.forward_nbytes, stats.backward_nbytes, stats.raw_nbytes], dtype=torch.float64)
    dist.all_reduce(numbers)
    forward, backward, raw = (numbers / 1e6).tolist()
    if stage.is_last:
        print(f"{text}: sent {forward:.1f} MB of activations and {backward:.1f} MB of gradients for {raw:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--activations", choices=["delta", "direct"], default="delta")
    parser.add_argument("--forward", type=int, default=4, metavar="BITS", help="bits of activations, 1 to 8")
    parser.add_argument("--backward", type=int, default=8, metavar="BITS", help="bits of gradients, 1 to 8")
    parser.add_argument("--pretraining", type=int, default=200, metavar="STEPS")
    parser.add_argument("--samples", type=int, default=256, help="samples of the fine-tuning")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    module = stage_module(rank, size)
    library = Path(sysconfig.get_paths()["stdlib"])

    # Pretraining uses each sample once, so there are no earlier activations for a delta.
    stage = CompressedStage(module, rank, size, "cpu", forward=codec.Quantize(8), activations="direct")
    source = rows(sorted(library.glob("*.py")), args.pretraining * BATCH)
    losses = train(stage, source, 1, 2e-3)[0]
    if stage.is_last and losses:
        print(f"pretraining: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    report(stage, "pretraining")

    stage = CompressedStage(
        module,
        rank,
        size,
        "cpu",
        forward=codec.Quantize(args.forward, rounding="nearest"),
        backward=codec.Quantize(args.backward),
        activations=args.activations,
    )
    help_text = rows([library / "pydoc_data/topics.py"], args.samples // BATCH * BATCH)
    epochs = train(stage, help_text, args.epochs, 5e-4)
    if stage.is_last:
        print("fine-tuning: loss of each epoch", *(f"{sum(e) / len(e):.3f}" for e in epochs))
    report(stage, "fine-tuning")
    change = stage.stats().sender[0].change if stage.is_first else ()
    if change:
        print("change of activations between epochs:", *(f"{x:.3f}" for x in change))
    if stage.is_last and epochs[-1][-1] > epochs[0][0]:
        raise SystemExit("the loss has not fallen")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
