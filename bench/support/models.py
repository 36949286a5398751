"""Small real models and data for benchmarks, and their training as one of several ranks.

The models are a convolutional network on scikit-learn's handwritten digits, and a causal transformer on the bytes of
the source of Python's standard library. :data:`TASKS` has a function for each that creates a :class:`Task`. The seed
determines the initial parameters and all batches. Ranks split the same global batch, so the number of ranks changes
only the order of sums and the statistics of batch norms.
"""

import functools
import importlib.util
import math
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, torch.Tensor]


class Residual(nn.Module):
    """Two 3x3 convolutions with a residual connection."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(inside, outside, 3, padding=1, bias=False),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
        )
        self.na, self.nb = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.short = nn.Conv2d(inside, outside, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.nb(self.b(F.relu(self.na(self.a(x))))) + self.short(x))


class Attention(nn.Module):
    """Transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.n1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Language(nn.Module):
    """Causal language model over bytes."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Attention(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.token(x) + self.place.weight[: x.shape[1]])))


def cnn_model() -> nn.Module:
    return nn.Sequential(
        Residual(1, 32),
        Residual(32, 64),
        nn.MaxPool2d(2),
        Residual(64, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def digits() -> Batch:
    """Return images and labels of scikit-learn's digits, read from its file, since importing sklearn takes seconds."""
    sklearn = importlib.util.find_spec("sklearn")
    if sklearn is None or sklearn.origin is None:
        raise ModuleNotFoundError("digits are part of scikit-learn; install the extra `bench` of this project")
    rows = np.loadtxt(Path(sklearn.origin).parent / "datasets/data/digits.csv.gz", np.float32, delimiter=",")
    images, labels = torch.from_numpy(rows).split([64, 1], dim=1)
    return images.reshape(-1, 1, 8, 8) / 16, labels.flatten().long()


def text() -> torch.Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


@dataclass
class Task:
    """Training of a model on one rank: optimizer, batches and held-out data."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    batch: Callable[[], Batch]  # returns this rank's part of the next batch
    held_out: Batch  # this rank's part of the held-out data

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean cross-entropy of a batch. `model` is the task's model or a wrapper of it."""
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, -2).float(), y.flatten())

    @torch.no_grad()
    def evaluate(self) -> torch.Tensor:
        """Return three sums over this rank's held-out data: loss, correct predictions, predictions."""
        self.model.eval()
        found = torch.zeros(3, dtype=torch.float64)
        for x, y in zip(*(part.split(128) for part in self.held_out), strict=True):
            out, to = self.model(x).flatten(0, -2).float(), y.flatten()
            right = (out.argmax(-1) == to).sum()
            found += torch.stack(
                [F.cross_entropy(out, to, reduction="sum").double(), right.double(), right * 0 + len(to)]
            )
        self.model.train()
        return found


def _warmup_cosine(steps: int) -> Callable[[int], float]:
    """Return a learning-rate schedule: linear warm-up over 1/20 of the steps, then a cosine down to 1/50."""
    warmup = max(1, steps // 20)
    return lambda step: min((step + 1) / warmup, 0.51 + 0.49 * math.cos(math.pi * step / steps))


def task_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, batch: Callable[[], Batch], held_out: Batch
) -> Task:
    """Return a task whose learning rate follows :func:`_warmup_cosine`."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warmup_cosine(steps))
    return Task(model, optimizer, schedule, batch, held_out)


def digits_task(seed: int, steps: int, rank: int = 0, world: int = 1, batch: int = 32) -> Task:
    """Return the task that trains the CNN by SGD with momentum. A fixed fifth of the digits is held out."""
    images, labels = digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held, kept = order[: len(order) // 5][rank::world], order[len(order) // 5 :]
    generator = torch.Generator().manual_seed(seed)

    def share() -> Batch:
        i = kept[torch.randint(len(kept), (batch,), generator=generator)[rank::world]]
        return images[i], labels[i]

    torch.manual_seed(seed)
    model = cnn_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    return task_of(model, optimizer, steps, share, (images[held], labels[held]))


def _text_task(
    optimizer_of: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    seed: int,
    steps: int,
    rank: int = 0,
    world: int = 1,
    batch: int = 16,
    width: int = 64,
) -> Task:
    """Return the task that trains the transformer. Every 16th piece of 4 KiB is held out (512 windows)."""
    context, stretch = 32, 4096
    stretches = text().unfold(0, stretch, stretch)
    held = torch.arange(len(stretches)) % 16 == 0
    windows = stretches[held].unfold(1, context + 1, context + 1).flatten(0, 1)
    windows = windows[:: len(windows) // 512][:512][rank::world].long()
    kept, within = stretches[~held], torch.arange(context + 1)
    generator = torch.Generator().manual_seed(seed)

    def share() -> Batch:
        of = torch.randint(len(kept), (batch,), generator=generator)[rank::world]
        at = torch.randint(stretch - context, (batch,), generator=generator)[rank::world]
        rows = kept[of[:, None], at[:, None] + within].long()
        return rows[:, :-1], rows[:, 1:]

    torch.manual_seed(seed)
    model = Language(width, 2, context)
    return task_of(model, optimizer_of(model.parameters()), steps, share, (windows[:, :-1], windows[:, 1:]))


def _sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def _adamw(parameters: Iterator[nn.Parameter], lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)


TASKS: dict[str, Callable[..., Task]] = {
    "digits-sgd": digits_task,
    "text-sgd": functools.partial(_text_task, _sgd),
    "text-adamw": functools.partial(_text_task, _adamw),
    "text-adamw-wide": functools.partial(_text_task, functools.partial(_adamw, lr=3e-3), width=256),
}
