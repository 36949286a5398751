"""Schedules of 1-bit Adam and 0/1 Adam: which steps send gradients, momenta or nothing."""

from dataclasses import dataclass
from typing import Any, Literal

from codec import ArgumentError
from codec.arguments import whole

Kind = Literal["gradients", "momenta", "local"]  # tensors that a step sends; "local": none


@dataclass(frozen=True)
class VarianceSchedule:
    """Schedule of 0/1 Adam (Lu et al. 2023): few steps update second moments; after the freeze, few steps communicate.

    Provisional: may change in any version.

    Up to `freeze_step`, some steps send gradients, which update (refresh) the second moments v. At first, each step
    refreshes v; the interval between refreshes doubles after every `refreshes` of them. All other steps send momenta.

    After `freeze_step`, v is frozen. The ranks then synchronize by sending momenta in each step whose number is a
    multiple of a second interval. It is 1 at first, and doubles after every `double_every` steps up to `max_interval`.
    The other steps are local: each rank updates its parameters by its own momentum.

    Parameters
    ----------
    freeze_step : int
        Last step that may refresh v, at least 1. Use the end of the learning rate's warm-up.
    refreshes : int
        Number of refreshes after which the interval between them doubles, at least 1.
    double_every : int, optional
        Number of steps after which the interval between synchronizations doubles, at least 1. Default: `freeze_step`.
    max_interval : int
        Largest interval between synchronizations, a power of 2. With 1, no step is local.

    Raises
    ------
    ArgumentError
        An argument has a wrong type or value.

    Examples
    --------
    >>> schedule = codec.torch.VarianceSchedule(freeze_step=4, refreshes=2, max_interval=2)
    >>> [schedule.kind(step) for step in range(1, 7)]
    ['gradients', 'gradients', 'momenta', 'gradients', 'momenta', 'momenta']
    >>> [schedule.kind(step) for step in range(9, 13)]
    ['local', 'momenta', 'local', 'momenta']
    """

    freeze_step: int
    refreshes: int = 16
    double_every: int | None = None
    max_interval: int = 16

    def __post_init__(self) -> None:
        whole("freeze_step", self.freeze_step, 1)
        whole("refreshes", self.refreshes, 1)
        whole("max_interval", self.max_interval, 1)
        if self.double_every is not None:
            whole("double_every", self.double_every, 1)
        if self.max_interval & (self.max_interval - 1):
            raise ArgumentError(f"max_interval must be a power of 2, got {self.max_interval}")

    def kind(self, step: int) -> Kind:
        """Return the kind of tensors that a step sends.

        Parameters
        ----------
        step : int
            Number of the step; the first step is 1.

        Returns
        -------
        str
            "gradients", "momenta", or "local" for nothing.
        """
        if step <= self.freeze_step:
            return "gradients" if self._refreshes(step) else "momenta"
        return "momenta" if step % self._interval(step) == 0 else "local"

    def _refreshes(self, step: int) -> bool:
        begin, distance = 0, 1  # refreshes after step `begin` are `distance` steps apart
        while step > begin + distance * self.refreshes:
            begin += distance * self.refreshes
            distance *= 2
        return (step - begin) % distance == 0

    def _interval(self, step: int) -> int:
        doublings = (step - self.freeze_step - 1) // (self.double_every or self.freeze_step)
        return min(self.max_interval, 1 << min(doublings, 62))


def parsed(freeze_step: Any) -> tuple[VarianceSchedule | None, int | Literal["auto"]]:
    """Return the schedule, or None, and the step of the freeze that an argument `freeze_step` stands for.

    Raises
    ------
    ArgumentError
        `freeze_step` is neither a number of steps, nor "auto", nor a VarianceSchedule.
    """
    if isinstance(freeze_step, VarianceSchedule):
        return freeze_step, freeze_step.freeze_step
    if freeze_step == "auto":
        return None, "auto"
    return None, whole('freeze_step, unless "auto" or a VarianceSchedule,', freeze_step, 1)
