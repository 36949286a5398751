"""Compression of gradients in a training run: ratio by step, truncation strategies, sources of codebooks.

One process trains a task of bench/support/models.py uncompressed. In some steps, all methods compress the whole
gradient as one bucket, with the shapes of its parameters as segments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import huffman
import methods
import numpy as np
import torch
from family import step_of
from gradients import SAMPLE, exponents, segments
from models import TASKS

import codec
from codec.optimizers import from_optimizer, state_of

METHODS = (methods.LOSSLESS, methods.PLANE, methods.NEAR, methods.BY_BIT, *methods.BASELINES)
STRATEGIES = (  # (name in the table, spec) of each truncation strategy
    ("level 1 for all values (drops 6 bits)", "Truncate(1)"),
    ("level 2 for all values (drops 12 bits)", "Truncate(2)"),
    ("level 3 for all values (drops 18 bits)", "Truncate(3)"),
    ("optimizer metric, guard exact", 'Truncate(guard="exact")'),
    ("optimizer metric, guard near, 2-bit level plane", methods.PLANE),
    ("optimizer metric, guard near", methods.NEAR),
    ("optimizer metric, guard near, truncating", 'Truncate(rounding="truncate")'),
    ("optimizer metric, guard near, shared levels", 'Truncate(level_coding="shared")'),
    ("optimizer metric, guard near, shared, by bit", methods.BY_BIT),
    ("optimizer metric, guard feedback", 'Truncate(guard="feedback")'),
)
OWN, PREVIOUS, REFRESHED, STALE, PRIOR = "own", "previous", "refreshed", "stale", "prior"
SOURCES = {
    OWN: "this step's gradient, sent in the frame",
    PREVIOUS: "gradient of the step before",
    REFRESHED: "CodebookRefresher: every 50 steps, used 10 steps later",
    STALE: "gradient of 50 steps before",
    PRIOR: "gradient of another model (bench/data)",
}
INTERVAL, DELAY = 50, 10
LATE = 0.8  # fraction of the steps after which training is late
PRIORS = {"digits": "transformer_autocast", "text": "cnn_float32"}  # by task: capture of the prior exponents


@dataclass
class Bucket:
    """Gradient of all parameters, last parameter first, and the optimizer's state before the step."""

    grad: np.ndarray[Any, Any]
    shapes: list[tuple[int, ...]]
    optimizer: Any
    state: dict[str, np.ndarray[Any, Any]]

    def bound(self, spec: codec.Spec) -> Any:
        return spec.bind(self.optimizer, **self.state) if isinstance(spec, codec.Truncate) else spec


@dataclass
class Sizes:
    """Results of a task in the measured steps, whose numbers are in `steps`.

    Attributes
    ----------
    saved : dict of str to list of float
        By method: fraction of bytes saved in each step.
    strategies : dict of str to dict of str to list of float
        By strategy: ``saved`` (fraction of bytes), ``error`` (relative error of the gradient) and ``changed`` (fraction
        of parameters that differ after the optimizer's step), in each step.
    exponents : dict of str to dict of str to list of float
        By source of codebooks, and for "entropy": mean bits per exponent with ``capped`` and ``native`` code lengths,
        and bits of the longest native code, ``longest``, in each step.
    """

    task: str
    values: int
    steps: list[int] = field(default_factory=list[int])
    losses: list[float] = field(default_factory=list[float])
    saved: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    strategies: dict[str, dict[str, list[float]]] = field(default_factory=dict[str, dict[str, list[float]]])
    exponents: dict[str, dict[str, list[float]]] = field(default_factory=dict[str, dict[str, list[float]]])


def bucket_of(task: Any) -> Bucket:
    """Return the gradients of a task after backward(), and the optimizer's state."""
    parameters = list(task.model.parameters())[::-1]

    def flat(tensors: Sequence[torch.Tensor]) -> np.ndarray[Any, Any]:
        return torch.cat([t.detach().reshape(-1) for t in tensors]).numpy()

    states = [state_of(task.optimizer, p) for p in parameters]
    state = {name: flat([s[name] for s in states]) for name in states[0]}
    grad = flat([p.grad for p in parameters if p.grad is not None])
    return Bucket(grad, [tuple(p.shape) for p in parameters], from_optimizer(task.optimizer), state)


def frame_of(b: Bucket, spec: codec.Spec) -> bytes:
    return bytes(codec.encode(codec.view(b.grad, segments=segments(b.shapes)), b.bound(spec)))


def saved(b: Bucket, method: str) -> float:
    """Return the fraction of float32's bytes that a method saves."""
    n = b.grad.size
    if method in (methods.ZLIB, methods.ZSTD):
        nbytes = len(methods.byte_coder(method)[0](b.grad.tobytes()))
    elif method in methods.BASELINES:
        k = methods.kept(n)
        fixed = {methods.FP16: 2 * n, methods.TOP_K: 8 * k, methods.RANDOM_K: 4 * k}
        nbytes = fixed.get(method) or 4 * methods.power_sgd_values(b.shapes)
    else:
        nbytes = len(frame_of(b, methods.runs.spec_of(method)))
    return 1 - nbytes / (4 * n)


def strategy(b: Bucket, text: str) -> dict[str, float]:
    """Return a spec's fraction of bytes saved, its relative error, and the fraction of parameters that it changes."""
    spec = methods.runs.spec_of(text)
    frame = frame_of(b, spec)
    y = codec.decode(frame, b.bound(spec))
    exact, lossy = (step_of(b.optimizer, g, b.state) for g in (b.grad, y))
    error = np.linalg.norm(y.astype(np.float64) - b.grad) / np.linalg.norm(b.grad.astype(np.float64))
    return {"saved": 1 - len(frame) / b.grad.nbytes, "error": float(error), "changed": float((exact != lossy).mean())}


def exponent_counts(grad: np.ndarray[Any, Any]) -> huffman.Counts:
    return np.bincount(exponents(grad, "float32"), minlength=huffman.SYMBOLS)


def prior_counts(task: str) -> huffman.Counts:
    """Return the histogram of exponents in a committed gradient of the other task's model."""
    name = PRIORS[task.partition("-")[0]]
    with np.load(next(p for p in SAMPLE if p.stem == name)) as file:
        return exponent_counts(file["grad"])


class Codes:
    """Codebooks built from exponents of earlier steps, and their cost in a later step."""

    def __init__(self, task: str) -> None:
        self.prior = prior_counts(task)
        self.history: list[huffman.Counts] = []
        self.refresher = codec.CodebookRefresher(interval=INTERVAL, delay=DELAY)

    def add(self, step: int, grad: np.ndarray[Any, Any]) -> None:
        """Record the exponents of step number `step`, counted from 0."""
        self.history.append(exponent_counts(grad))
        if self.refresher.due(step):
            counts = self.history[step]
            book = codec.Codebook.from_counts(counts)
            own = counts.sum() * huffman.bits(counts, huffman.capped_lengths(book)) + 8 * len(book.to_bytes())
            self.refresher.propose(step, np.append(counts, round(own)))

    def costs(self, step: int) -> dict[str, dict[str, float]]:
        """Return the mean bits per exponent of a step, for each source of codebooks available in that step."""
        now = self.history[step]
        found = {OWN: now, PRIOR: self.prior}
        if step >= 1:
            found[PREVIOUS] = self.history[step - 1]
        if step >= INTERVAL:
            found[STALE] = self.history[step - INTERVAL]
        costs = {"entropy": {"capped": huffman.entropy(now), "native": huffman.entropy(now)}}
        for source, counts in found.items():
            costs[source] = self.cost(now, counts, codec.Codebook.from_counts(counts))
        at = (step - DELAY) // INTERVAL * INTERVAL
        if at >= INTERVAL and (book := self.refresher.current(step)) is not None:
            costs[REFRESHED] = self.cost(now, self.history[at], book)
        return costs

    @staticmethod
    def cost(now: huffman.Counts, counts: huffman.Counts, book: codec.Codebook) -> dict[str, float]:
        native = huffman.native_lengths(counts)
        capped = huffman.bits(now, huffman.capped_lengths(book))
        return {"capped": capped, "native": huffman.bits(now, native), "longest": float(native.max())}


def measure(name: str, steps: int, samples: int, tick: Callable[[], None]) -> Sizes:
    """Train a task, and compress the gradient in `samples` of its steps; call `tick` after each step."""
    task, codes = TASKS[name](0, steps), Codes(name)
    result = Sizes(name, sum(p.numel() for p in task.model.parameters()))
    every = max(1, steps // samples)
    for step in range(steps):
        loss = task.loss(task.model, task.batch())
        task.optimizer.zero_grad()
        loss.backward()
        b = bucket_of(task) if step else None  # before the first step, the optimizer has no state
        if b is not None and ((step + 1) % every == 0 or step == steps - 1):
            codes.add(step, b.grad)
            add(result, step, loss.item(), b, codes.costs(step))
        else:
            codes.add(
                step, torch.cat([p.grad.reshape(-1) for p in task.model.parameters() if p.grad is not None]).numpy()
            )
        task.optimizer.step()
        task.schedule.step()
        tick()
    return result


def add(result: Sizes, step: int, loss: float, b: Bucket, costs: dict[str, dict[str, float]]) -> None:
    """Append the measurements of a step to a task's results."""
    result.steps.append(step + 1)
    result.losses.append(loss)
    for method in METHODS:
        result.saved.setdefault(method, []).append(saved(b, method))
    for name, text in STRATEGIES:
        for key, value in strategy(b, text).items():
            result.strategies.setdefault(name, {}).setdefault(key, []).append(value)
    for source in ("entropy", *SOURCES):
        for key in ("capped", "native", "longest"):
            of = result.exponents.setdefault(source, {}).setdefault(key, [])
            of.append(costs.get(source, {}).get(key, float("nan")))


def late(result: Sizes, values: Sequence[float]) -> float:
    """Return the mean of `values` over the measured steps in late training, the last fifth."""
    first = next(
        i for i, step in enumerate(result.steps) if step > LATE * result.steps[-1] or i == len(result.steps) - 1
    )
    return float(np.mean(values[first:]))


def saved_late(result: Sizes, method: str) -> float:
    return late(result, result.saved[method])
