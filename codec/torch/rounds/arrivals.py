"""Arrival times of the sites' changes, as one site sees them, and the time for which a round waits for late ones."""

from collections import deque
from collections.abc import Iterable
from statistics import median

from codec.torch.rounds.names import ChangeName

_MOST_DELAYS = 64  # number of last delays from which the grace time is computed
_DEVIATIONS = 5.0  # median absolute deviations above the median delay after which a site counts as lost
_PART = 0.25  # maximum grace time as a part of the time between two changes of this site
_LEAST_SECONDS = 0.2  # minimum of the computed grace time


class Arrivals:
    """Delays of changes after the moment in which their round had a quorum.

    Parameters
    ----------
    grace : float or None
        Seconds for which a round with a quorum waits for other sites. None: the time is computed from the delays.

    Attributes
    ----------
    pace : float
        Seconds between the last two changes of this site; 0 if unknown.
    """

    def __init__(self, grace: float | None) -> None:
        self._given = grace
        self._delays: deque[float] = deque(maxlen=_MOST_DELAYS)
        self._quorums: dict[int, float] = {}  # time at which each of the last rounds had a quorum
        self._seen = set[ChangeName]()
        self.pace = 0.0

    def see(self, changes: Iterable[ChangeName], now: float) -> None:
        """Record the delay of each change that was not seen before. `now` is the monotonic time."""
        changes = set(changes)
        for change in changes - self._seen:
            if change.round in self._quorums:
                self._delays.append(now - self._quorums[change.round])
        self._seen = changes

    def waits(self, number: int, now: float) -> bool:
        """Return True if round `number`, which has a quorum, still waits for other sites."""
        return now < self._quorums.setdefault(number, now) + self.grace

    def forget(self, number: int) -> None:
        """Forget the rounds before `number`."""
        self._quorums = {n: at for n, at in self._quorums.items() if n >= number}

    @property
    def grace(self) -> float:
        """Seconds for which a round with a quorum waits: median + 5 median absolute deviations of the last delays.

        At most a quarter of the time between two changes of this site, which is also the time without any delay.
        """
        if self._given is not None:
            return self._given
        most = max(_LEAST_SECONDS, _PART * self.pace)
        if not self._delays:
            return most
        middle = median(self._delays)
        spread = median(abs(delay - middle) for delay in self._delays)
        return min(most, max(_LEAST_SECONDS, middle + _DEVIATIONS * spread))
