"""Histograms of gradients in a training run: exponents, exponents of gradient/parameter ratios, and zeros.

One process trains a task of bench/support/models.py uncompressed. In some steps, histograms are built of the exponents
of all gradient values, and of the exponents of each gradient value divided by its parameter.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import huffman
import numpy as np
import torch
from family import step_of
from gradients import exponents
from models import TASKS
from sizes import Bucket, bucket_of

QUANTILES = (0.01, 0.5, 0.99)
BIAS = 127  # exponent bias of float32
TOP = 16  # number of distinct exponents that 4-bit codes can represent


@dataclass
class Distributions:
    """Results of a task. Each list has one entry per measured step; the numbers of these steps are in `steps`.

    Attributes
    ----------
    exponents, ratios : list of list of int
        Histograms of exponent bytes: of nonzero gradient values, and of gradient/parameter ratios, zeros excluded.
    zeros : list of float
        Fraction of gradient values that are zero.
    still : list of float
        Fraction of parameters that the optimizer's step leaves unchanged.
    entropy : list of float
        Entropy of the exponents in bits per value.
    """

    task: str
    values: int
    steps: list[int] = field(default_factory=list[int])
    exponents: list[list[int]] = field(default_factory=list[list[int]])
    ratios: list[list[int]] = field(default_factory=list[list[int]])
    zeros: list[float] = field(default_factory=list[float])
    still: list[float] = field(default_factory=list[float])
    entropy: list[float] = field(default_factory=list[float])

    def add(self, step: int, b: Bucket) -> None:
        """Append the measurements of a step's gradient."""
        theta = b.state["theta"]
        self.steps.append(step)
        self.exponents.append(counts(b.grad[b.grad != 0]))
        both = (b.grad != 0) & (theta != 0)
        with np.errstate(over="ignore", under="ignore"):
            self.ratios.append(counts(b.grad[both] / theta[both]))
        self.zeros.append(float((b.grad == 0).mean()))
        self.still.append(float((step_of(b.optimizer, b.grad, b.state) == theta).mean()))
        self.entropy.append(huffman.entropy(np.bincount(exponents(b.grad, "float32"), minlength=huffman.SYMBOLS)))


def counts(x: np.ndarray[Any, Any]) -> list[int]:
    """Return the number of values with each exponent byte."""
    return np.bincount(exponents(np.ascontiguousarray(x), "float32"), minlength=256).tolist()


def quantile(of: list[int], share: float) -> int:
    """Return the quantile `share` of a histogram of exponents, as an unbiased exponent."""
    total = np.cumsum(of)
    return int(np.searchsorted(total, share * total[-1])) - BIAS


def top_share(of: list[int]) -> float:
    """Return the fraction of values whose exponents are among the TOP most frequent ones."""
    return sum(sorted(of)[-TOP:]) / max(1, sum(of))


def measure(name: str, steps: int, samples: int, tick: Callable[[], None]) -> Distributions:
    """Train a task, and measure the gradient in `samples` of its steps; call `tick` after each step."""
    task = TASKS[name](0, steps)
    result = Distributions(name, sum(p.numel() for p in task.model.parameters()))
    every = max(1, steps // samples)
    for step in range(1, steps + 1):
        loss: torch.Tensor = task.loss(task.model, task.batch())
        task.optimizer.zero_grad()
        loss.backward()
        if step > 1 and (step == 2 or step % every == 0 or step == steps):  # step 1 has no optimizer state
            result.add(step, bucket_of(task))
        task.optimizer.step()
        task.schedule.step()
        tick()
    return result
