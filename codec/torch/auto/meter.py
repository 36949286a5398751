"""Rate and round trip of a link, from the kernel's counters of TCP connections."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from codec.torch.network.info import ConnectionInfo

_LEAST_BUSY = 0.02  # seconds of sending that an estimate needs, since kernels count in steps of up to 4 ms
_MOST_STEPS = 16  # steps that an estimate may use
_RTT_STEPS = 4  # steps whose shortest round trip counts, since queues make single ones longer
_LEAST_SHARE = 1 / 2  # share of the time of sending that is the rate's in any case
_CAREFUL = 3  # last estimates of which the slowest counts, since single ones are too fast by chance


class Estimate(NamedTuple):
    """Link of a rank: seconds that a byte takes, 0 if that is too short to measure, and seconds of a round trip."""

    seconds_per_byte: float
    rtt: float


class Meter:
    """Estimates the link of a rank from the totals of its connections after each step.

    A connection is busy while bytes are sent and not acknowledged. A step's time of sending is the busy time until its
    data has arrived, and at most one round trip after that: the last acknowledgement may be delayed by 40 ms. One round
    trip is then subtracted, in which the first acknowledgement travels.

    An estimate uses as few of the last steps as have sent for 20 ms together: one on a slow link, several on a fast
    one. So a link that becomes slow is seen after one step, and one that becomes fast within 16 steps.
    """

    def __init__(self) -> None:
        self._first: Sequence[ConnectionInfo] = ()  # at the begin of the current step
        self._last: Sequence[ConnectionInfo] = ()  # when the data of the current step had arrived
        self._steps: deque[tuple[int, float]] = deque(maxlen=_MOST_STEPS)  # bytes, and seconds of sending
        self._rtts: deque[float] = deque(maxlen=_RTT_STEPS)
        self._estimates: deque[float] = deque(maxlen=_CAREFUL)  # seconds of a byte

    def begin(self, connections: Sequence[ConnectionInfo]) -> None:
        """Begin a step, by the statistics of all connections, and count the step before."""
        if self._last and len(self._last) == len(self._first) == len(connections):
            rtt = min(self._rtts)
            nbytes = sum(now.acked_nbytes - was.acked_nbytes for now, was in zip(connections, self._first, strict=True))
            during, after = _busiest(self._first, self._last), _busiest(self._last, connections)
            self._steps.append((nbytes, during + min(after, rtt)))
            self._estimates.append(self._seconds_per_byte())
        self._first, self._last = connections, ()

    def end(self, connections: Sequence[ConnectionInfo]) -> None:
        """Note the statistics of all connections when the data of the step has arrived."""
        self._last = connections
        self._rtts.append(max((now.rtt for now in connections), default=0.0))

    def estimate(self) -> Estimate | None:
        """Return the estimate by the steps that were counted; None if there are none."""
        return Estimate(max(self._estimates), min(self._rtts)) if self._estimates else None

    def _seconds_per_byte(self) -> float:
        """Return the seconds of a byte in the last steps; 0 if they have sent for too short a time."""
        rtt, nbytes, seconds, busy = min(self._rtts), 0, 0.0, 0.0
        for n, time in reversed(self._steps):
            nbytes, busy = nbytes + n, busy + time
            seconds += max(_LEAST_SHARE * time, time - rtt)
            if busy >= _LEAST_BUSY:
                break
        return seconds / nbytes if nbytes and busy >= _LEAST_BUSY / 4 else 0.0


def _busiest(before: Sequence[ConnectionInfo], now: Sequence[ConnectionInfo]) -> float:
    """Return the longest busy time of a connection between two times."""
    return max((b.busy - a.busy for a, b in zip(before, now, strict=True)), default=0.0)
