"""Phase of a run of OneBitAdam: number of steps, drift of second moments, and the decision to freeze them."""

import atexit
import json
import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any, Literal, NamedTuple

import torch

from codec import StateError
from codec.torch._compat import local
from codec.torch.one_bit_adam.schedule import Kind, VarianceSchedule

logger = logging.getLogger("codec.torch")

STABLE = 0.04  # drift at which freeze_step="auto" freezes: 1 minus the ratio 0.96 in the paper on 1-bit Adam
# Drift above which a freeze logs a warning: the error of sqrt(v), and so of the step size, is then a seventh or more.
MOVING = 0.25
_MEASUREMENTS = 16  # measurements per window


class Drift:
    """Measures how much the sum of the bias-corrected second moments changes.

    Only some steps are measured, because a measurement reads all second moments. Measurements are more frequent at the
    beginning.

    Parameters
    ----------
    window : int
        Number of steps over which the change is measured: 1 / (1 - b2).
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.samples: list[tuple[int, float]] = []  # measurements (step, sum), oldest first

    def is_due(self, step: int) -> bool:
        """Return True if the sum should be measured after a step."""
        last = self.samples[-1][0] if self.samples else 0
        return step - last >= max(1, min(last // 8, self.window // _MEASUREMENTS))

    def add(self, step: int, total: float) -> None:
        """Add the sum measured after a step; drop measurements that are no longer needed."""
        if self.samples and self.samples[-1][0] >= step:
            return
        self.samples.append((step, total))
        while len(self.samples) > 2 and self.samples[1][0] <= self._begin(step):
            del self.samples[0]

    def _begin(self, step: int) -> float:
        """Return the earlier step with which a measurement after `step` is compared."""
        return max(step - self.window, step / 2)

    @property
    def has_window(self) -> bool:
        """True if the measurements span at least one window."""
        return bool(self.samples) and self.samples[-1][0] - self.samples[0][0] >= self.window

    @property
    def span(self) -> int:
        """Number of steps over which :attr:`value` is measured; 0 before the second measurement."""
        return self.samples[-1][0] - self._former[0] if len(self.samples) > 1 else 0

    @property
    def _former(self) -> tuple[int, float]:
        """Earlier measurement (step, sum) with which the last measurement is compared."""
        begin = self._begin(self.samples[-1][0])
        return max((s for s in self.samples[:-1] if s[0] <= begin), default=self.samples[0])

    @property
    def value(self) -> float:
        """Relative change of the sum of second moments over the last :attr:`span` steps; NaN if unknown."""
        if len(self.samples) < 2:
            return math.nan
        now, before = self.samples[-1][1], self._former[1]
        largest = max(before, now)
        return 1 - min(before, now) / largest if largest > 0 else 0.0

    def state(self) -> str:
        """Return the measurements in JSON, as a list of pairs (step, sum)."""
        return json.dumps(self.samples)

    def loaded(self, samples: Iterable[tuple[int, float]]) -> "Drift":
        """Return a Drift with the same window and the given measurements."""
        drift = Drift(self.window)
        drift.samples = list(samples)
        return drift


def total(states: Iterable[tuple[Mapping[str, Any], float]]) -> float:
    """Return the sum of this rank's bias-corrected second moments; `states` are pairs of a parameter's state and b2."""
    found = 0.0
    for state, beta2 in states:
        if state["variance_step"]:
            found += local(state["exp_avg_sq"]).sum(dtype=torch.float64).item() / (1 - beta2 ** state["variance_step"])
    return found


class Unfit(NamedTuple):
    """Indices of parameters whose frozen second moments do not suit later steps."""

    still: list[int]  # parameters whose second moments are all 0, so that they never change
    tiny: list[int]  # parameters with second moments far below their mean, if steps have no bound


class AdamPhase:
    """Counts the steps of an optimizer, and decides after which step second moments are frozen.

    Parameters
    ----------
    freeze_step : int or "auto"
        Number of steps before the freeze; "auto": freeze when the drift of second moments is small.
    schedule : VarianceSchedule or None
        Schedule of 0/1 Adam.
    window : int
        Number of steps over which the drift is measured.
    """

    def __init__(self, freeze_step: int | Literal["auto"], schedule: VarianceSchedule | None, window: int) -> None:
        self.steps = 0  # number of steps taken
        self.frozen = False
        # True while this rank updates parameters and state. The other ranks update theirs, too, so after an error in
        # this work, parameters differ between ranks until a state is loaded.
        self.updating = False
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
        """True if second moments are not frozen although `freeze_step` steps were taken, as in a loaded state."""
        return not self.frozen and isinstance(self._freeze_step, int) and self.steps >= self._freeze_step

    def ends(
        self,
        kind: Kind,
        measure: Callable[[], float],
        agree: Callable[[bool], bool],
    ) -> bool:
        """Measure the drift after a step if that is due; return True if second moments must be frozen now.

        Parameters
        ----------
        kind : str
            Kind of tensors that the step has sent.
        measure : callable
            Returns the sum of the bias-corrected second moments of all parameters.
        agree : callable
            Returns True on all ranks if its argument is True on any of them.
        """
        if self.frozen:
            return False
        last = self.steps == self._freeze_step
        if last or (kind == "gradients" and self.drift.is_due(self.steps)):
            self.drift.add(self.steps, measure())
            if self._freeze_step == "auto" and self.drift.has_window:
                return agree(self.drift.value <= STABLE)
        return last

    def warn_of_freeze(self, unfit: Unfit | None) -> None:
        """Warn of second moments that were frozen, but do not suit later steps; None: they were not frozen now."""
        if unfit is None:
            return
        if unfit.tiny:
            warnings.warn(
                f"{len(unfit.tiny)} parameters have second moments below 1/10,000 of their mean, such as those of "
                "rarely used rows of an embedding. As max_ratio=None, their steps may be hundreds of times the "
                f"learning rate, also after a later freeze: use max_ratio=1. Their indices: {unfit.tiny[:5]}",
                stacklevel=5,  # the caller of step()
            )
        if self.drift.value > MOVING:
            warnings.warn(
                f"second moments were frozen after {self.steps} steps, but still changed by {self.drift.value:.0%} "
                f"over the last {self.drift.span} steps. Compare the loss with AdamW's. If it is higher, freeze later "
                "or use a smaller b2; with signs, use spec=Quantize(4, levels='odd', rounding='nearest') or smaller "
                "groups",
                stacklevel=5,  # the caller of step()
            )
        if unfit.still:
            warnings.warn(
                f"{len(unfit.still)} parameters had no gradient before the freeze, and will not move any more: those "
                f"with indices {unfit.still[:5]}",
                stacklevel=5,  # the caller of step()
            )

    def check_complete(self) -> None:
        """Raise StateError if an error has interrupted this rank while it updated parameters and state."""
        if self.updating:
            raise StateError(
                f"an error or Ctrl-C has interrupted this rank while it updated parameters, about step {self.steps}: "
                "they may differ from those of the other ranks. Load the model and the optimizer's state on all ranks"
            )

    def check_saving(self, synchronized: bool) -> None:
        """Raise StateError unless `synchronized`, that is, unless the parameters are equal on all ranks."""
        self.check_complete()
        if not synchronized:
            interval = self._schedule.max_interval if self._schedule else 1
            raise StateError(
                f"the state cannot be saved now, because step {self.steps} was local and parameters of ranks differ: "
                f"call finish() on all ranks first, or save after a step that is a multiple of {interval}"
            )

    def loaded(self, steps: int, frozen: bool, refreshed: bool, drift: Iterable[tuple[int, float]]) -> "AdamPhase":
        """Return the phase that a checkpoint restores.

        Parameters
        ----------
        steps : int
            Number of steps.
        frozen : bool
            True if second moments were frozen. They are unfrozen if this schedule's `freeze_step` is later.
        refreshed : bool
            True if all steps have updated the second moments.
        drift : iterable of (int, float)
            Measurements of the drift.

        Raises
        ------
        StateError
            The checkpoint is of 0/1 Adam before the freeze, and there is no schedule.
        """
        if self._schedule is None and not refreshed and not frozen:
            raise StateError(
                "the state was saved by 0/1 Adam before its freeze: pass a VarianceSchedule as freeze_step="
            )
        phase = copy(self)
        early = self._schedule is not None and steps < self._schedule.freeze_step
        phase.steps, phase.frozen, phase.drift = steps, frozen and not early, self.drift.loaded(drift)
        return phase

    def adopt(self, other: "AdamPhase") -> None:
        """Copy the steps, the freeze and the drift of another phase."""
        self.steps, self.frozen, self.drift = other.steps, other.frozen, other.drift

    def watch(self) -> None:
        """Log a warning at the end of the process if "auto" has never frozen the second moments."""
        if self._freeze_step == "auto":
            _waiting.add(self)


_waiting: "weakref.WeakSet[AdamPhase]" = weakref.WeakSet()  # phases with freeze_step="auto" in this process


@atexit.register
def _warn_of_unfrozen() -> None:
    for phase in _waiting:
        if phase.steps and not phase.frozen:
            logger.warning(
                'OneBitAdam(freeze_step="auto") has not frozen second moments in %d steps, so that all steps sent '
                "gradients: they must change by at most %.0f%% over 1 / (1 - b2) = %d steps, and have changed by "
                "%.0f%% over the last %d. Use a smaller b2, or a number of steps as freeze_step.",
                phase.steps,
                100 * STABLE,
                phase.drift.window,
                100 * phase.drift.value,
                phase.drift.span,
            )
