"""Model and tasks of the benchmark: a byte transformer that is split into stages, and two fine-tuning tasks.

`language` fine-tunes a language model on the text of Python's help. `classify` classifies scikit-learn's handwritten
digits, each a sequence of 64 pixels. Both start from a transformer trained on the source of Python's standard library.
Each stage has one block of the transformer; the first stage also embeds bytes, and the last one has the task's head.
"""

import math
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from models import Language, digits, text

LANGUAGE, CLASSIFY = "language", "classify"
TASKS = (LANGUAGE, CLASSIFY)
CLASSES = 10
HELD_OUT = 512  # number of held-out samples


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of its training."""

    width: int = 64
    context: int = 64
    batch: int = 128
    micro_batches: int = 4
    samples: int = 1024
    epochs: int = 8
    rate: float = 1e-3  # peak learning rate, after a warm-up of 10 steps; then it decays to zero
    pretraining: int = 400  # number of pretraining steps
    seed: int = 0

    @property
    def values(self) -> int:
        """Return the number of values in a message, the activations of a micro-batch."""
        return self.batch // self.micro_batches * self.context * self.width

    @property
    def steps_an_epoch(self) -> int:
        return self.samples // self.batch

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_an_epoch


class Part(nn.Module):
    """Module of one pipeline stage: a block of the transformer, with the embedding or the head at the ends."""

    def __init__(self, model: Language, head: nn.Module, index: int, stages: int) -> None:
        super().__init__()
        each = len(model.blocks) // stages
        self.first, self.last = index == 0, index == stages - 1
        self.blocks = model.blocks[index * each : (index + 1) * each]
        if self.first:
            self.token, self.place = model.token, model.place
        if self.last:
            self.norm, self.head = model.norm, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.token(x) + self.place.weight[: x.shape[1]]
        x = self.blocks(x)
        return self.head(self.norm(x)) if self.last else x


class Classifier(nn.Module):
    """Linear classifier on the mean of the transformer's outputs over all positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mean(1))


def pretrained(sizes: Sizes, blocks: int) -> dict[str, torch.Tensor]:
    """Train a language model on the standard library's source, and return its parameters."""
    torch.manual_seed(sizes.seed)
    model, data = Language(sizes.width, blocks, sizes.context), text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(sizes.seed)
    steps = sizes.pretraining
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 100) * (0.51 + 0.49 * math.cos(math.pi * step / steps))
        at = torch.randint(len(data) - sizes.context - 1, (32, 1), generator=generator)
        rows = data[at + torch.arange(sizes.context + 1)].long()
        optimizer.zero_grad()
        F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.state_dict()


def parts_of(sizes: Sizes, task: str, stages: int, weights: dict[str, torch.Tensor] | None) -> list[Part]:
    """Return the modules of all stages, with pretrained `weights`, or randomly initialized if `weights` is None."""
    torch.manual_seed(sizes.seed + 1)
    model = Language(sizes.width, stages, sizes.context)
    if weights is not None:
        model.load_state_dict(weights)
    head = model.head if task == LANGUAGE else Classifier(sizes.width)
    return [Part(model, head, i, stages) for i in range(stages)]


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, -2), target.flatten())


@dataclass(frozen=True)
class Data:
    """Training samples and held-out samples of a task."""

    x: torch.Tensor
    y: torch.Tensor
    held_x: torch.Tensor
    held_y: torch.Tensor


def library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def windows(data: bytes, length: int) -> torch.Tensor:
    """Split a text into consecutive, non-overlapping windows of `length` bytes."""
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return values[: len(values) // length * length].view(-1, length).long()


def data_of(sizes: Sizes, task: str) -> Data:
    """Return the samples of a task.

    Raises
    ------
    ValueError
        The data has fewer samples than `sizes.samples`.
    ModuleNotFoundError
        scikit-learn is not installed.
    """
    if task == LANGUAGE:
        topics = (library() / "pydoc_data/topics.py").read_bytes().replace(b"\\n", b"\n").replace(b"'\n", b"\n")
        rows = windows(topics, sizes.context + 1)
        x, y = rows[:, :-1], rows[:, 1:]
    else:
        images, y = digits()
        x = (images.flatten(1) * 16).round().long()[:, : sizes.context]
    if len(x) < sizes.samples + HELD_OUT:
        raise ValueError(f"{task}: {len(x)} samples of {sizes.context} bytes exist, {sizes.samples + HELD_OUT} needed")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    train, held = order[: sizes.samples], order[sizes.samples : sizes.samples + HELD_OUT]
    return Data(x[train], y[train], x[held], y[held])


def batches(sizes: Sizes) -> list[torch.Tensor]:
    """Return the sample ids of each step's batch. The order of samples differs between epochs."""
    generator = torch.Generator().manual_seed(sizes.seed + 2)
    orders = [torch.randperm(sizes.samples, generator=generator) for _ in range(sizes.epochs)]
    return [ids for order in orders for ids in order.split(sizes.batch)]


def rate_of(sizes: Sizes, step: int) -> float:
    """Return the learning rate of a step, counted from 0."""
    return max(sizes.rate * min(1, (step + 1) / 10) * (1 - step / sizes.steps), 0.0)


class Optimizer:
    """AdamW that clips the gradient norm of each stage separately, since stages do not exchange norms."""

    def __init__(self, modules: list[Any], sizes: Sizes) -> None:
        self._modules, self._sizes, self._step = modules, sizes, 0
        self._adam = [torch.optim.AdamW(m.parameters(), lr=sizes.rate, weight_decay=0.01) for m in modules]

    def zero_grad(self) -> None:
        for adam in self._adam:
            adam.zero_grad()

    def step(self) -> None:
        for module, adam in zip(self._modules, self._adam, strict=True):
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            for group in adam.param_groups:
                group["lr"] = rate_of(self._sizes, self._step)
            adam.step()
        self._step += 1
