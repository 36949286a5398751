"""Train all stages in one process; edges between stages encode and decode the messages of the real pipeline.

Stages, micro-batches, messages and random bits are the same as in separate processes, so losses are equal.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from systems import Setting, side_of, uses_samples
from tasks import Data, Optimizer, Sizes, batches, data_of, loss_of, parts_of

import codec


@dataclass
class Training:
    """Result of a simulated training run."""

    task: str
    stages: int
    setting: dict[str, Any]
    label: str
    losses: list[float] = field(default_factory=list)  # training loss of each step
    first_nbytes: float = 0.0  # bytes that all stages send in a step of the first epoch
    later_nbytes: float = 0.0
    raw_nbytes: int = 0
    held_loss: float = math.nan
    accuracy: float = math.nan
    change: list[float] = field(default_factory=list)  # relative change |a - m| / |a| at the first edge, by epoch
    state_nbytes: int = 0  # bytes of m on one side of all edges together
    diverged: str = ""


class Edge:
    """Sender and receiver of a simulated edge between stages."""

    def __init__(self, setting: Setting, number: int, seed: int) -> None:
        self.sides = [side_of(setting, number, role, seed) for role in (0, 1)]
        self.samples = uses_samples(setting)
        self.nbytes = 0

    def forward(self, x: torch.Tensor, ids: list[int]) -> torch.Tensor:
        known = ids if self.samples else None
        message = self.sides[0].encode(x.contiguous(), known)
        self.nbytes += len(message)
        return self.sides[1].decode(message, known, out=torch.empty_like(x))

    def backward(self, g: torch.Tensor) -> torch.Tensor:
        message = self.sides[1].encode_gradient(g.contiguous())
        self.nbytes += len(message)
        return self.sides[0].decode_gradient(message, out=torch.empty_like(g))

    def commit(self) -> None:
        for side in self.sides:
            side.commit()


def micro_batch(modules: list[Any], edges: list[Edge], x: torch.Tensor, y: torch.Tensor, ids: list[int]) -> float:
    """Run forward and backward passes of a micro-batch, which add to the gradients; return the loss."""
    sent: list[torch.Tensor] = []  # outputs of stages, before encoding
    received: list[torch.Tensor] = []  # inputs of stages, after decoding
    h = modules[0](x)
    for module, edge in zip(modules[1:], edges, strict=True):
        sent.append(h)
        received.append(edge.forward(h.detach(), ids).requires_grad_())
        h = module(received[-1])
    loss = loss_of(h, y)
    loss.backward()
    for edge, output, entered in zip(reversed(edges), reversed(sent), reversed(received), strict=True):
        assert entered.grad is not None
        output.backward(edge.backward(entered.grad))
    return float(loss.detach())


def train(setting: Setting, task: str, stages: int, sizes: Sizes, weights: dict[str, torch.Tensor]) -> Training:
    """Train for all epochs. If training diverges, stop, and set the result's `diverged` to the reason."""
    found = Training(task, stages, asdict(setting), setting.label)
    data, modules = data_of(sizes, task), parts_of(sizes, task, stages, weights)
    edges = [Edge(setting, i, sizes.seed) for i in range(stages - 1)]
    optimizer, an_epoch = Optimizer(modules, sizes), sizes.steps_an_epoch
    found.raw_nbytes = 2 * (stages - 1) * sizes.micro_batches * sizes.values * 4
    for step, ids in enumerate(batches(sizes)):
        before = sum(e.nbytes for e in edges)
        try:
            found.losses.append(one_step(modules, edges, optimizer, data, ids, sizes.micro_batches))
        except codec.CodecError as e:  # quantizers refuse NaN and Inf
            found.diverged = f"step {step}: {e}"
            break
        if not math.isfinite(found.losses[-1]):
            found.diverged = f"step {step}: the loss is {found.losses.pop()}"
            break
        share = (sum(e.nbytes for e in edges) - before) / (an_epoch if step < an_epoch else sizes.steps - an_epoch)
        if step < an_epoch:
            found.first_nbytes += share
        else:
            found.later_nbytes += share
    if not found.diverged and len(found.losses) > an_epoch and mean(found.losses[-an_epoch:]) > found.losses[0]:
        found.diverged = "the last epoch's loss is above that of the first step"
    found.held_loss, found.accuracy = evaluate(modules, data)
    if uses_samples(setting) and edges:
        stats = [e.sides[0].stats() for e in edges]
        found.change, found.state_nbytes = list(stats[0].change), sum(s.entries_nbytes for s in stats)
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def one_step(
    modules: list[Any], edges: list[Edge], optimizer: Optimizer, data: Data, ids: torch.Tensor, micro_batches: int
) -> float:
    """Run one training step, and return the mean loss of its micro-batches."""
    optimizer.zero_grad()
    losses = [
        micro_batch(modules, edges, data.x[some], data.y[some], some.tolist()) for some in ids.chunk(micro_batches)
    ]
    for module in modules:
        for p in module.parameters():
            if p.grad is not None:
                p.grad.div_(micro_batches)
    optimizer.step()
    for edge in edges:
        edge.commit()
    return mean(losses)


@torch.no_grad()
def evaluate(modules: list[Any], data: Data) -> tuple[float, float]:
    """Return loss and accuracy of the held-out samples, without quantizers."""
    h = data.held_x
    for module in modules:
        h = module(h)
    right = (h.argmax(-1) == data.held_y).double().mean()
    return float(loss_of(h, data.held_y)), float(right)
