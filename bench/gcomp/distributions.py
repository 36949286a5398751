"""Distribution of the gradients of a training: exponents, magnitudes beside those of the parameters, zeros.

One process trains a task of bench/support/models.py uncompressed. In some of its steps the exponents of the whole
gradient are counted, and those of each gradient over its parameter.
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
TOP = 16  # exponents of which a code of 4 bits has one each


@dataclass
class Distributions:
    """Results of a task, each list with one entry for each of `steps`.

    Attributes
    ----------
    exponents, ratios : list of list of int
        Counts by exponent byte: of the gradients that are not zero, and of gradients over parameters. The latter leave
        zeros out.
    zeros : list of float
        Share of the gradients that are zero.
    still : list of float
        Share of the parameters that the optimizer's step leaves unchanged.
    entropy : list of float
        Bits of an exponent.
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
        """Add the gradient of a step."""
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
    """Return the exponent, without its bias, below or at which a share of the counted values lies."""
    total = np.cumsum(of)
    return int(np.searchsorted(total, share * total[-1])) - BIAS


def top_share(of: list[int]) -> float:
    """Return the share of the most frequent exponents."""
    return sum(sorted(of)[-TOP:]) / max(1, sum(of))


def measure(name: str, steps: int, samples: int, tick: Callable[[], None]) -> Distributions:
    """Train a task, and count the gradients of `samples` of its steps; call `tick` after each step."""
    task = TASKS[name](0, steps)
    result = Distributions(name, sum(p.numel() for p in task.model.parameters()))
    every = max(1, steps // samples)
    for step in range(1, steps + 1):
        loss: torch.Tensor = task.loss(task.model, task.batch())
        task.optimizer.zero_grad()
        loss.backward()
        if step > 1 and (step == 2 or step % every == 0 or step == steps):  # the first step has no state
            result.add(step, bucket_of(task))
        task.optimizer.step()
        task.schedule.step()
        tick()
    return result
