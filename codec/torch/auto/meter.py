"""Estimate the rate and the round trip of a link from the kernel's counters of TCP connections."""

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from codec.advisor.cost_model import LinkModel
from codec.torch.network.sockets import ConnectionInfo

PICO, MICRO = 1e12, 1e6
STEP = 3  # number of integers of StepMeter.report
_LEAST_BUSY = 0.02  # seconds of sending that an estimate needs, since the kernel's clock has ticks of up to 4 ms
_MOST_STEPS = 16  # maximum number of steps that an estimate uses
_RTT_STEPS = 4  # the shortest round trip of this many last steps is used, since queues lengthen some round trips
_LEAST_SHARE = 1 / 2  # minimum share of a step's sending time that remains after a round trip is subtracted
_CAREFUL = 3  # the slowest of this many last estimates is returned, since some are too fast by chance


class Estimate(NamedTuple):
    """Link of a rank: seconds per byte (0: too short to be measured), and seconds per round trip."""

    seconds_per_byte: float
    rtt: float


class Meter:
    """Estimates the link of a rank from the counters of its connections after each step.

    A connection is busy while it has sent bytes that are not acknowledged. The sending time of a step is the busy time
    until its data has arrived, plus at most one round trip of the busy time after that, because the last
    acknowledgement may be delayed by 40 ms. One round trip is then subtracted, in which the first acknowledgement
    travels.

    An estimate uses the fewest last steps whose sending times add up to 20 ms: one step on a slow link, several on a
    fast link. A slowdown of the link is therefore seen after one step, and a speedup within 16 steps.
    """

    def __init__(self) -> None:
        self._first: Sequence[ConnectionInfo] = ()  # counters at the start of the current step
        self._last: Sequence[ConnectionInfo] = ()  # counters when the data of the current step had arrived
        self._steps: deque[tuple[int, float]] = deque(maxlen=_MOST_STEPS)  # per step: bytes, seconds of sending
        self._rtts: deque[float] = deque(maxlen=_RTT_STEPS)  # round-trip time of each step in seconds
        self._estimates: deque[float] = deque(maxlen=_CAREFUL)  # last estimates in seconds per byte

    def begin(self, connections: Sequence[ConnectionInfo]) -> None:
        """Begin a step, given the counters of all connections, and add the previous step to the estimate."""
        if self._last and len(self._last) == len(self._first) == len(connections):
            rtt = min(self._rtts)
            nbytes = sum(now.acked_nbytes - was.acked_nbytes for now, was in zip(connections, self._first, strict=True))
            during, after = _busiest(self._first, self._last), _busiest(self._last, connections)
            self._steps.append((nbytes, during + min(after, rtt)))
            self._estimates.append(self._seconds_per_byte())
        self._first, self._last = connections, ()

    def end(self, connections: Sequence[ConnectionInfo]) -> None:
        """Record the counters of all connections when the data of the step has arrived."""
        self._last = connections
        self._rtts.append(max((now.rtt for now in connections), default=0.0))

    def estimate(self) -> Estimate | None:
        """Return the current estimate; None before the second step."""
        return Estimate(max(self._estimates), min(self._rtts)) if self._estimates else None

    def _seconds_per_byte(self) -> float:
        """Return the seconds per byte in the last steps; 0 if their sending time is too short."""
        rtt, nbytes, seconds, busy = min(self._rtts), 0, 0.0, 0.0
        for n, spent in reversed(self._steps):
            nbytes, busy = nbytes + n, busy + spent
            seconds += max(_LEAST_SHARE * spent, spent - rtt)
            if busy >= _LEAST_BUSY:
                break
        return seconds / nbytes if nbytes and busy >= _LEAST_BUSY / 4 else 0.0


class StepMeter:
    """Measures the duration of a hook's steps and the link, as integers of which all ranks receive the maxima.

    Parameters
    ----------
    stated : LinkModel or None
        Link that the user has stated; None: measure the link.

    Attributes
    ----------
    link : LinkModel or None
        Slowest link of any rank as last measured, or the link that the user stated.
    """

    def __init__(self, stated: LinkModel | None) -> None:
        self.stated = stated
        self.reset()

    def reset(self) -> None:
        """Drop all measurements."""
        self.link = self.stated
        self._meter = Meter()
        self._last = 0.0  # time of the last report (perf_counter, in seconds); 0: no report yet

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickle and copy, without the measurements that belong to this process."""
        return self.__dict__ | {"_meter": Meter(), "_last": 0.0}

    def begin(self, connections: Sequence[ConnectionInfo]) -> None:
        """Begin a step, given the counters of all connections."""
        self._meter.begin(connections)

    def report(self, connections: Sequence[ConnectionInfo]) -> list[int]:
        """Return the microseconds since the last report, picoseconds per byte, and microseconds per round trip.

        Unknown time is 0, an unknown link is -1.
        """
        self._meter.end(connections)
        found = self._meter.estimate()
        last, self._last = self._last, time.perf_counter()
        link = [-1, -1] if found is None else [round(PICO * found.seconds_per_byte), round(MICRO * found.rtt)]
        return [round(MICRO * (self._last - last)) if last else 0, *link]

    def learn(self, largest: Sequence[int]) -> float:
        """Update the link from the maxima of all ranks' reports; return the seconds of the step, 0 if unknown."""
        microseconds, picoseconds, rtt = largest
        if self.stated is None and picoseconds >= 0:
            self.link = LinkModel(8 * PICO / picoseconds if picoseconds else math.inf, 1e-6 * rtt)
        return microseconds / MICRO


def _busiest(before: Sequence[ConnectionInfo], now: Sequence[ConnectionInfo]) -> float:
    """Return the longest busy time, in seconds, of any connection between two readings of the counters."""
    return max((b.busy - a.busy for a, b in zip(before, now, strict=True)), default=0.0)
