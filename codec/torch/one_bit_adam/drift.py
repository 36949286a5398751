"""Drift of Adam's second moments, by which the step of the freeze is judged."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch

from codec import StateError

STABLE = 0.04  # drift at which freeze_step="auto" freezes: the ratio of 0.96 of the paper on 1-bit Adam
MOVING = 0.45  # drift above which a freeze is warned of: step sizes are then off by a third or more
_MEASUREMENTS = 16  # in a window


class Drift:
    """Sums of the bias-corrected second moments at some steps.

    Steps lie closer together at the beginning: a measurement reads all second moments.

    Parameters
    ----------
    window : int
        Steps over which a drift is measured: 1 / (1 - b2).
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.samples: list[tuple[int, float]] = []  # step and sum, oldest first

    def is_due(self, step: int) -> bool:
        """Return True if the sum after a step is to be measured."""
        last = self.samples[-1][0] if self.samples else 0
        return step - last >= max(1, min(last // 8, self.window // _MEASUREMENTS))

    def add(self, step: int, total: float) -> None:
        """Add the sum after a step; drop those that no drift needs any more."""
        if self.samples and self.samples[-1][0] >= step:
            return
        self.samples.append((step, total))
        while len(self.samples) > 2 and self.samples[1][0] <= self._begin(step):
            del self.samples[0]

    def _begin(self, step: int) -> float:
        """Return the step with which a later one is compared."""
        return max(step - self.window, step / 2)

    @property
    def has_window(self) -> bool:
        """True if the measurements span a whole window."""
        return bool(self.samples) and self.samples[-1][0] - self.samples[0][0] >= self.window

    @property
    def span(self) -> int:
        """Number of steps over which :attr:`value` is measured; 0 if there is none."""
        return self.samples[-1][0] - self._former[0] if len(self.samples) > 1 else 0

    @property
    def _former(self) -> tuple[int, float]:
        """Measurement with which the last one is compared."""
        begin = self._begin(self.samples[-1][0])
        return max((s for s in self.samples[:-1] if s[0] <= begin), default=self.samples[0])

    @property
    def value(self) -> float:
        """Relative change of the sum over the last window, or over half of all steps if those are fewer; else nan."""
        if len(self.samples) < 2:
            return math.nan
        now, before = self.samples[-1][1], self._former[1]
        largest = max(before, now)
        return 1 - min(before, now) / largest if largest > 0 else 0.0

    def state(self) -> torch.Tensor:
        """Return the measurements as a float64 tensor of shape (measurements, 2)."""
        return torch.tensor(self.samples, dtype=torch.float64, device="cpu").reshape(-1, 2)

    def loaded(self, state: Any) -> "Drift":
        """Return a drift over the same window with the measurements of :meth:`state`; None: without any.

        Raises
        ------
        StateError
            `state` is something else.
        """
        drift = Drift(self.window)
        if state is None:
            return drift
        if not isinstance(state, torch.Tensor) or state.dim() != 2 or state.shape[1] != 2 or len(state) > 1 << 16:
            raise StateError("'drift' of this state is no table of steps and sums: the state is damaged")
        drift.samples = [(int(step), float(total)) for step, total in cast(Any, state).tolist()]
        return drift


def total(states: Iterable[tuple[Mapping[str, Any], float]]) -> float:
    """Return the sum of the bias-corrected second moments of parameters, given by their states and b2."""
    found = 0.0
    for state, beta2 in states:
        updates = float(state.get("variance_step", state["step"]))
        found += state["exp_avg_sq"].sum(dtype=torch.float64).item() / (1 - beta2**updates)
    return found
