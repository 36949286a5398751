"""Phase of a run: number of steps, drift of second moments, and the step of their freeze."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from codec.torch.one_bit_adam.drift import MOVING, STABLE, Drift, total
from codec.torch.one_bit_adam.schedule import Kind, ZeroOneSchedule


class Phase:
    """Counts the steps of an optimizer, and decides after which one second moments are frozen.

    Parameters
    ----------
    freeze_step : int or "auto"
        The step; "auto": when the drift of second moments is small.
    schedule : ZeroOneSchedule or None
        Steps of 0/1 Adam.
    window : int
        Steps over which the drift is measured.
    """

    def __init__(self, freeze_step: int | Literal["auto"], schedule: ZeroOneSchedule | None, window: int) -> None:
        self.steps = 0  # steps that were taken
        self.frozen = False
        self.drift = Drift(window)
        self._freeze_step, self._schedule = freeze_step, schedule

    @property
    def kind(self) -> Kind:
        """Kind of tensors that the next step sends."""
        if self._schedule is not None:
            return self._schedule.kind(self.steps + 1)
        return "momenta" if self.frozen else "gradients"

    @property
    def is_overdue(self) -> bool:
        """True if second moments are not frozen, although a state was loaded that has taken enough steps."""
        return not self.frozen and isinstance(self._freeze_step, int) and self.steps >= self._freeze_step

    def ends(
        self,
        kind: Kind,
        states: Callable[[], Iterable[tuple[Mapping[str, Any], float]]],
        agree: Callable[[bool], bool],
    ) -> bool:
        """Measure the drift after a step if that is due; return True if second moments must be frozen now.

        Parameters
        ----------
        kind : str
            Kind of tensors that the step has sent.
        states : callable
            Returns the state and b2 of each parameter that has moments.
        agree : callable
            Makes a decision of this rank one of all ranks.
        """
        if self.frozen:
            return False
        last = self.steps == self._freeze_step
        if last or (kind == "gradients" and self.drift.is_due(self.steps)):
            self.drift.add(self.steps, total(states()))
            if self._freeze_step == "auto" and self.drift.has_window:
                return agree(self.drift.value <= STABLE)
        return last

    def warn_of_freeze(self, still: list[int]) -> None:
        """Warn if second moments were frozen too early; `still` are numbers of parameters that have only zeros."""
        if self.drift.value > MOVING:
            warnings.warn(
                f"second moments were frozen after {self.steps} steps, but still changed by {self.drift.value:.0%} "
                f"over the last {self.drift.span} steps: freeze later, or use a smaller b2",
                stacklevel=6,  # the caller of step()
            )
        if still:
            warnings.warn(
                f"{len(still)} parameters had no gradient before the freeze and will not move: numbers {still[:5]}",
                stacklevel=6,  # the caller of step()
            )
