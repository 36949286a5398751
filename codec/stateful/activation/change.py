"""Measure the relative change of activations between visits of a sample, and warn when the change grows."""

import logging
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from codec.readable import Rounded, count, size
from codec.stateful.activation.coding import difference
from codec.stateful.activation.entries import Floats

MOST_VALUES = 1 << 16  # maximum number of values that are measured per message
LEAST_ROWS = 32  # minimum number of measured rows for which the change at a visit is compared with other visits
GROWTH = 1.5  # a warning is logged if the change is more than this many times the change at an earlier visit

logger = logging.getLogger("codec")


@dataclass(frozen=True, slots=True, repr=False)
class ActivationStats(Rounded):
    """Statistics of one side of a pipeline edge, from :meth:`ActivationDelta.stats`.

    Attributes
    ----------
    messages : int
        Number of messages encoded or decoded.
    nbytes : int
        Total size of these messages in bytes.
    raw_samples : int
        Number of samples sent raw, because they were unseen, evicted or forgotten, or contain NaN or Inf.
    delta_samples : int
        Number of samples sent as deltas.
    entries : int
        Number of samples whose activations m are stored.
    entries_nbytes : int
        Size of the store's entries in bytes.
    evicted : int
        Number of entries that were removed because of the budget.
    damaged : int
        Number of entries that were removed because their checksum was wrong or because reading or writing them failed.
    change : tuple of float
        Relative change ``|a - m| / |a|`` in the sender's messages. Item i is for samples that were sent as a delta for
        the (i + 1)-th time. It is estimated from up to 65,536 values of each message.
    """

    messages: int = 0
    nbytes: int = 0
    raw_samples: int = 0
    delta_samples: int = 0
    entries: int = 0
    entries_nbytes: int = 0
    evicted: int = 0
    damaged: int = 0
    change: tuple[float, ...] = ()

    def __str__(self) -> str:
        """Return one line: numbers of messages, samples and stored entries, and the last item of `change`."""
        change = f", change {self.change[-1]:.3g}" if self.change else ""
        lost = f", {self.evicted} evicted, {self.damaged} damaged" if self.evicted or self.damaged else ""
        stored = f"{count(self.entries, 'sample')} stored in {size(self.entries_nbytes)}"
        return (
            f"{count(self.messages, 'message')} of {size(self.nbytes)}: {count(self.delta_samples, 'delta')}, "
            f"{self.raw_samples} raw{change}; {stored}{lost}"
        )


class Moved(NamedTuple):
    """Measurement of one sample in a message: the number of its visit, and the sums of (a - m)^2 and of a^2."""

    visit: int
    difference: float
    activation: float


class Change:
    """Relative change ``|a - m| / |a|`` by visit. A visit is the number of deltas sent of the sample before."""

    def __init__(self) -> None:
        self._sums: dict[int, list[float]] = {}  # by visit: sum of (a - m)^2, sum of a^2, number of rows
        self._warned = False

    def measure(self, activation: Floats, m: Floats, visits: list[int], start: int) -> list[Moved]:
        """Measure some rows of a message, and return the measurements for :meth:`add`.

        Parameters
        ----------
        activation, m : numpy.ndarray of float32, shape (rows, values)
            Activations a, and the stored activations m to which their deltas refer.
        visits : list of int
            Number of the visit of each row.
        start : int
            Index of the first row to measure, modulo the number of rows. Pass a different index for each message, so
            that all rows are measured in turn.
        """
        count = min(len(visits), max(1, MOST_VALUES // max(1, activation.shape[1])))
        measured: list[Moved] = []
        for i in range(start, start + count):
            row = i % len(visits)
            a = activation[row, :MOST_VALUES]
            d = difference(a, m[row, :MOST_VALUES])
            with np.errstate(over="ignore", invalid="ignore"):
                measured.append(Moved(visits[row], float(np.dot(d, d)), float(np.dot(a, a))))
        return measured

    def add(self, measured: list[Moved]) -> None:
        """Add the measurements of a message, and warn once if the change grows from visit to visit."""
        for moved in measured:
            sums = self._sums.setdefault(moved.visit, [0.0, 0.0, 0])
            sums[0] += moved.difference
            sums[1] += moved.activation
            sums[2] += 1
        self._warn()

    def by_visit(self) -> tuple[float, ...]:
        """Return ``|a - m| / |a|`` for each visit, from the first on; NaN for a visit without measurements."""
        last = max(self._sums, default=-1)
        return tuple(self._ratio(visit) for visit in range(last + 1))

    def _ratio(self, visit: int) -> float:
        difference, activation, _ = self._sums.get(visit, (math.nan, math.nan, 0))
        return math.sqrt(difference / activation) if activation else math.nan

    def _warn(self) -> None:
        if self._warned:
            return
        ratios = [(self._ratio(visit), visit) for visit, sums in sorted(self._sums.items()) if sums[2] >= LEAST_ROWS]
        if len(ratios) < 2:
            return
        (least, early), (last, late) = min(ratios[:-1]), ratios[-1]
        if last > GROWTH * least:
            self._warned = True
            logger.warning(
                "activations move away from the stored ones: |a - m| / |a| grew from %.3f at visit %d to %.3f at visit "
                "%d. The quantization error may not contract: use more bits, smaller groups, or a lower learning rate",
                least,
                early + 1,
                last,
                late + 1,
            )
