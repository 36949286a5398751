"""Measure how long a program waits for synchronizations, and warn if they do not fit into the steps beside them."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from time import perf_counter

_MOST_WAIT = 0.1  # maximum share of a synchronization for which the program waits, if it fits into the delay
_IN_A_ROW = 3  # number of synchronizations that do not fit before the warning

_log = logging.getLogger("codec.torch")


class Overlap:
    """Counts the time in which a program waits for synchronizations in the background.

    Parameters
    ----------
    delay : int
        Number of steps for which a synchronization runs in the background.

    Attributes
    ----------
    blocked_s : float
        Seconds in which calls of the program have waited for synchronizations.
    """

    def __init__(self, delay: int) -> None:
        self.blocked_s = 0.0
        self._delay = delay
        self._begun = 0.0  # time at which the last synchronization began (perf_counter, in seconds)
        self._waits = 0  # number of last synchronizations that did not fit
        self._warned = False

    def begin(self) -> None:
        """Record that a synchronization begins."""
        self._begun = perf_counter()

    @contextmanager
    def waiting(self, *, delayed: bool) -> Generator[None]:
        """Count the time of the block as waiting. `delayed`: the delay is over, so long waits are reported."""
        start = perf_counter()
        try:
            yield
        finally:
            now = perf_counter()
            self.blocked_s += now - start
            if delayed:
                self._check(now - start, now - self._begun)

    def _check(self, waited: float, total: float) -> None:
        """Warn once after several synchronizations in a row that do not fit into the steps of the delay."""
        self._waits = self._waits + 1 if waited > _MOST_WAIT * total else 0
        if self._waits == _IN_A_ROW and not self._warned:
            self._warned = True
            _log.warning(
                "synchronizations do not fit into delay=%d steps: this rank has waited for the last one for %.3g ms of "
                "%.3g ms. Use a larger delay, fewer fragments or a spec that sends less; or a rank is slower than this "
                "one",
                self._delay,
                1e3 * waited,
                1e3 * total,
            )
