"""Small training tasks of further model families: GPT with tied head, LSTM, diffusion, ViT, LoRA, bfloat16 parameters.

:data:`TASKS` has these tasks and those of bench/support/models.py. A run has 300 steps of 5 to 20 milliseconds each.
Texts and images are those of models.py; LoRA adapts to another language, the C++ headers of torch.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import torch
from models import Batch, Task, digits, task_of, text
from torch import nn
from torch.nn import functional as F

CONTEXT = 48
NOISE_LEVELS = 64  # number of noise levels of the diffusion


class Block(nn.Module):
    """Transformer block without biases in attention."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.n1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(b, t, w)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    """Causal transformer over bytes, whose output head shares the weights of the embedding."""

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4, True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.token(x) + self.place[: x.shape[1]])))


class Recurrent(nn.Module):
    """LSTM language model over bytes."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.token, self.lstm = nn.Embedding(256, 48), nn.LSTM(48, width, 2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.token(x))[0])


class Denoiser(nn.Module):
    """Network that predicts the noise in an image of 64 pixels. Its input is the pixels and the noise level."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.level, self.inside, self.outside = (
            nn.Embedding(NOISE_LEVELS, width),
            nn.Linear(64, width),
            nn.Linear(width, 64),
        )
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pixels, level = x[:, :64], x[:, 64].long()
        h = F.silu(self.inside(pixels) + self.level(level))
        for layer in self.layers:
            h = h + F.silu(layer(h))
        return self.outside(h)


class ViT(nn.Module):
    """Vision transformer on 8 x 8 images: 16 patches of 2 x 2."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.patches, self.place = nn.Conv2d(1, width, 2, 2), nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4, False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class LoRA(nn.Module):
    """Frozen linear layer with a trainable low-rank update."""

    def __init__(self, linear: nn.Linear, rank: int = 8, alpha: float = 16) -> None:
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), alpha / rank
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


@dataclass
class Denoising(Task):
    """Training task of a denoiser, whose targets are the noise."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean square error of the predicted noise."""
        return F.mse_loss(model(batch[0]), batch[1])

    @torch.no_grad()
    def evaluate(self) -> torch.Tensor:
        """Return this rank's held-out sum of squared errors, NaN as accuracy, and the number of values."""
        x, y = self.held_out
        total = F.mse_loss(self.model(x), y, reduction="sum").double()
        return torch.stack([total, total * torch.nan, total * 0 + y.numel()])


@functools.cache
def headers() -> torch.Tensor:
    """Return the concatenated C++ headers of torch (ATen/core) as a tensor of bytes."""
    files = sorted((Path(torch.__file__).parent / "include/ATen/core").glob("*.h"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def _windows(source: torch.Tensor, seed: int, rank: int, world: int, batch: int) -> tuple[Callable[[], Batch], Batch]:
    """Return a source of batches from the first 90% of a text, and this rank's part of 256 held-out windows."""
    cut, generator = int(0.9 * len(source)), torch.Generator().manual_seed(seed)

    def windows(first: int, end: int, count: int, g: torch.Generator) -> Batch:
        starts = torch.randint(first, end - CONTEXT - 1, (count,), generator=g)[rank::world]
        rows = source[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        return rows[:, :-1], rows[:, 1:]

    held = windows(cut, len(source), 256, torch.Generator().manual_seed(0))
    return lambda: windows(0, cut, batch, generator), held


def _language(
    make: Callable[[], nn.Module],
    lr: float,
    source: Callable[[], torch.Tensor],
    seed: int,
    steps: int,
    rank: int = 0,
    world: int = 1,
    batch: int = 16,
) -> Task:
    """Return the task that trains a byte-level model by AdamW."""
    share, held = _windows(source(), seed, rank, world, batch)
    torch.manual_seed(seed)
    model = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    return task_of(model, torch.optim.AdamW(trained, lr, weight_decay=0.01), steps, share, held)


@functools.cache
def _pretrained() -> dict[str, Any]:
    """Return the state dict of a GPT after 300 steps on Python source."""
    task = _language(GPT, 3e-3, text, seed=5, steps=300)
    for _ in range(300):
        task.optimizer.zero_grad()
        task.loss(task.model, task.batch()).backward()
        task.optimizer.step()
        task.schedule.step()
    return task.model.state_dict()


def _adapted() -> nn.Module:
    """Return the pretrained GPT, frozen except for low-rank updates (LoRA) of its linear layers."""
    random = torch.random.get_rng_state()
    state = _pretrained()
    torch.random.set_rng_state(random)
    model = GPT()
    model.load_state_dict(state)
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, LoRA(getattr(block, name)))
    return model


def _images(seed: int, rank: int, world: int, batch: int) -> tuple[Callable[[], Batch], Batch]:
    """Return a source of batches of digits, and this rank's part of the held-out fifth."""
    images, labels = digits()
    order, generator = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)), torch.Generator()
    held, kept = order[: len(order) // 5][rank::world], order[len(order) // 5 :]
    generator.manual_seed(seed)

    def share() -> Batch:
        i = kept[torch.randint(len(kept), (batch,), generator=generator)[rank::world]]
        return images[i], labels[i]

    return share, (images[held], labels[held])


def vit_task(seed: int, steps: int, rank: int = 0, world: int = 1, batch: int = 32) -> Task:
    """Return the task that trains the vision transformer on digits by AdamW."""
    share, held = _images(seed, rank, world, batch)
    torch.manual_seed(seed)
    model = ViT()
    return task_of(model, torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05), steps, share, held)


def diffusion_task(seed: int, steps: int, rank: int = 0, world: int = 1, batch: int = 64) -> Task:
    """Return the task that trains the denoiser on digits by AdamW. All evaluations use the same noise."""
    share, held = _images(seed, rank, world, batch)
    noise = torch.Generator().manual_seed(1000 * seed + rank)

    def noisy(images: torch.Tensor, g: torch.Generator) -> Batch:
        clean = images.flatten(1) * 2 - 1
        level = torch.randint(NOISE_LEVELS, (len(clean), 1), generator=g)
        kept = torch.cos(0.5 * torch.pi * (level + 0.5) / NOISE_LEVELS)
        added = torch.randn(clean.shape, generator=g)
        return torch.cat([kept * clean + (1 - kept**2).sqrt() * added, level.float()], 1), added

    torch.manual_seed(seed)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    held_out = noisy(held[0].repeat(8, 1, 1, 1), torch.Generator().manual_seed(7 + rank))
    task = task_of(model, optimizer, steps, lambda: noisy(share()[0], noise), held_out)
    return Denoising(task.model, task.optimizer, task.schedule, task.batch, task.held_out)


TASKS: dict[str, Callable[..., Task]] = {
    **models.TASKS,
    "gpt-tied": functools.partial(_language, GPT, 3e-3, text),
    "gpt-bfloat16": functools.partial(_language, lambda: GPT().bfloat16(), 3e-3, text),
    "lora": functools.partial(_language, _adapted, 5e-3, headers),
    "lstm": functools.partial(_language, Recurrent, 5e-3, text),
    "vit": vit_task,
    "diffusion": diffusion_task,
}
