"""Sizes of slices and of joined buckets, by the measured rates of links: a slow link carries a small slice."""

import logging
from collections.abc import Sequence

from codec.torch.network.sockets import ConnectionInfo
from codec.torch.transport.channel import Channel

PERIOD = 16  # steps between two measurements
UNITS = 64  # sum of the weights of all ranks
_FIRST = 4  # steps before the first measurement, whose connections are still slow
_MOST_RANKS = 64  # maximum number of ranks in a group that reports rates of links
_LEAST_BUSY = 0.02  # seconds of sending that a measurement needs, since the kernel's clock has ticks of up to 4 ms
_LITTLE = 0.1  # share of the bytes of the link's busiest connection below which a connection may be left out
_LEAST_GAIN = 0.1  # share of the time of a step's messages that new slices must save
# CPU microseconds of a collective, besides those of its values, and of each of its 2 (N - 1) messages (scale.md)
_COLLECTIVE_US, _MESSAGE_US = 1100, 160
_MOST_NBYTES = 1 << 24  # bytes of joined buckets from which they are unlimited here
_LEAST_CHANGE = 1.5  # factor by which a new limit must differ from the former one

Weights = tuple[int, ...]

_log = logging.getLogger("codec.torch")


class LinkShares:
    """Relative sizes of the ranks' slices in two-shot, equal on all ranks because they learn from the same rates.

    With N ranks, a tensor of S bytes and slices of w_i S bytes, rank i sends S (1 + w_i (N - 2)) bytes. The weights
    minimize the longest time that a rank sends, and change only if that saves a share of it.

    Joined buckets save CPU time, but a slow link is idle while buckets wait for each other. So the size of joined
    buckets is limited to the bytes that keep the slowest link busy for the CPU time of a collective.

    Attributes
    ----------
    weights : tuple of int or None
        Weight of each rank's slice; None: equal slices.
    limit : int or None
        Maximum bytes of gradients in joined buckets; None: the link sets no limit.
    """

    def __init__(self) -> None:
        self.weights: Weights | None = None
        self.limit: int | None = None
        self._count = 0  # steps so far
        self._size, self._within = 1, 1  # ranks between machines, and within
        self._before: Sequence[ConnectionInfo] = ()  # counters at the start of the measurement
        self._moved = False  # True: weights or limit have changed since the last call of :meth:`moved`

    @property
    def is_due(self) -> bool:
        """True if ranks report their rates in this step."""
        return self._count % PERIOD == PERIOD - 1

    def begin(self, channel: Channel) -> None:
        """Begin a step."""
        if self._count % PERIOD == _FIRST:
            self._before = channel.mesh.connections(channel.peers)

    def report(self, channel: Channel, nbytes: int) -> list[int]:
        """Return the measurements of this rank, if they are due; otherwise an empty list.

        With 3 to 64 ranks, the first numbers are one for each rank: the rate of this rank's link in bytes per second, 0
        for the others. In two levels, ranks are those of `between`, and rates of different machines' ranks are combined
        by place. The last number is the time for which a byte of gradients keeps the link busy, in picoseconds.

        Parameters
        ----------
        channel : Channel
            Channel of the group.
        nbytes : int
            Bytes of the gradients of a step before encoding; in two levels, of this rank's windows of them.
        """
        if not self.is_due:
            return []
        ranks, now, steps = channel.levels.between, channel.mesh.connections(channel.peers), PERIOD - 1 - _FIRST
        rate = rate_of(self._before, now, steps)
        rates = [0] * ranks.size if 3 <= ranks.size <= _MOST_RANKS else []
        if rates:
            rates[ranks.rank] = rate
        self._size, self._within = ranks.size, channel.levels.within.size
        each = [(was, last) for was, last in zip(self._before, now, strict=False) if not last.local]
        acked = sum(last.acked_nbytes - was.acked_nbytes for was, last in each)
        return [*rates, round(1e12 * acked / rate / (steps * nbytes)) if rate and nbytes else 0]

    def learn(self, largest: Sequence[int]) -> None:
        """End a step that has succeeded, given the maxima over all ranks of the numbers of :meth:`report`."""
        self._count += 1
        if not largest:
            return
        *rates, pace = largest
        self._learn_limit(pace)
        if not rates or not all(rates):
            return
        size, former = len(rates), self.weights
        equal, found = (1,) * size, weights_for(rates)
        candidate = found if _seconds(found, rates) < (1 - _LEAST_GAIN) * _seconds(equal, rates) else equal
        if _seconds(candidate, rates) < (1 - _LEAST_GAIN) * _seconds(former or equal, rates):
            self.weights = None if candidate == equal else candidate
            self._moved = True
            _log.info("slices of the ranks: %s; rates of their links: %s bytes/s", self.weights or "equal", rates)

    def _learn_limit(self, pace: int) -> None:
        """Set the limit of joined buckets by the picoseconds for which a byte keeps the slowest link busy."""
        cost = _COLLECTIVE_US + 2 * (self._size - 1) * _MESSAGE_US
        found = min(_MOST_NBYTES, self._within * cost * 10**6 // max(1, pace))
        former = self.limit or _MOST_NBYTES
        if not former < _LEAST_CHANGE * found < _LEAST_CHANGE**2 * former:
            self.limit, self._moved = None if found == _MOST_NBYTES else found, True
            _log.info("buckets are joined up to %s bytes; a byte keeps the link busy for %s ps", self.limit, pace)

    def reset(self) -> None:
        """Return to equal slices and unlimited joined buckets, because ranks may have measured different links."""
        self._moved |= self.weights is not None or self.limit is not None
        self.weights, self.limit, self._count, self._before = None, None, 0, ()

    def moved(self) -> bool:
        """Return True in the first step whose slices or limit are not those of the step before."""
        moved, self._moved = self._moved, False
        return moved


def rate_of(before: Sequence[ConnectionInfo], now: Sequence[ConnectionInfo], steps: int) -> int:
    """Return the rate of a link in bytes per second; 0 if it carried too little to be measured.

    The connections send at the same time, so that the rate of the link is the sum of their rates. A round trip of each
    step is subtracted from the time in which a connection was busy: until the first acknowledgement, it sends nothing.
    Connections that carried little are left out if they were too short to be measured: two ranks without slices send
    each other no frames. Connections of a machine to itself are left out, since the kernel acknowledges their small
    messages only when the peer has time to read them.
    """
    rate = 0.0
    if len(before) != len(now):
        return 0
    remote = [(was, last) for was, last in zip(before, now, strict=True) if not last.local]
    most = max((last.acked_nbytes - was.acked_nbytes for was, last in remote), default=0)
    for was, last in remote:
        nbytes, busy = last.acked_nbytes - was.acked_nbytes, last.busy - was.busy
        if busy >= _LEAST_BUSY:
            rate += nbytes / max(busy / 2, busy - steps * last.rtt)
        elif nbytes > _LITTLE * most:
            return 0
    return round(rate)


def weights_for(rates: Sequence[int]) -> Weights:
    """Return weights, in units of 1 / UNITS, that minimize the longest time in which a rank sends its bytes.

    Rank i with rate r_i is finished at T if its weight is (T r_i - 1) / (N - 2); ranks for which that is negative own
    nothing.
    """
    size = len(rates)
    owners = sorted(range(size), key=lambda i: -rates[i])
    while True:
        end = (size - 2 + len(owners)) / sum(rates[i] for i in owners)
        if end * rates[owners[-1]] >= 1:
            break
        owners.pop()
    exact = [(end * rates[i] - 1) / (size - 2) if i in owners else 0.0 for i in range(size)]
    weights = [int(UNITS * x) for x in exact]
    for i in sorted(range(size), key=lambda i: (weights[i] - UNITS * exact[i], i))[: UNITS - sum(weights)]:
        weights[i] += 1
    return tuple(weights)


def _seconds(weights: Weights, rates: Sequence[int]) -> float:
    """Return the longest time in which a rank sends its bytes, for a tensor of one byte."""
    total = sum(weights)
    return max((1 + w / total * (len(rates) - 2)) / rate for w, rate in zip(weights, rates, strict=True))
