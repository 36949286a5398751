"""Choose between frames and uncompressed values on all ranks (docs/spec/protocol/collectives.md, section 6)."""

import logging
import time
from collections import defaultdict
from typing import Literal

from codec.torch.group.shares import LinkShares
from codec.torch.network.waits import Turns, Wait
from codec.torch.transport.channel import Channel

Way = Literal["frames", "values"]

_WARMUP = 1  # number of untimed collectives, in which memory is allocated and connections are still slow
# Number of timed collectives for frames, and for uncompressed values. The fastest counts, since other load slows some.
_TIMED = 2
TRIALS = _WARMUP + 2 * _TIMED  # number of collectives before the decision
_PERIOD = 200  # number of collectives after which the trials are repeated, since links and loads change
# Uncompressed values are tried if their transfer would take at most this multiple of the time with frames.
_MOST_WAIT = 4
_BUSY = 4  # uncompressed values are tried only if a rank computes for at least 1 / _BUSY of the time

_log = logging.getLogger("codec.torch")

Report = list[int]
TIMES = 3  # number of integers at the start of each report: duration, load and wait, see Timing.report


class Tuner:
    """Chooses the way of collectives or of a hook's steps. This class always chooses frames; subclasses measure.

    All ranks choose alike, because they learn from the same numbers: the maxima of all ranks' reports.
    """

    def begin(self, channel: Channel) -> "Timing":
        """Begin a collective or step."""
        return Timing(self, channel)

    def way(self, index: int) -> Way:
        """Return the way of a collective: "frames" or "values" (uncompressed). :meth:`begin` assigns the index."""
        return "frames"

    def report(self, channel: Channel) -> Report:
        """Return the numbers that this rank reports in addition to its times."""
        return []

    def learn(self, index: int, way: Way, largest: Report) -> None:
        """Record a collective that has succeeded, given the maximum over all ranks of each number of their reports."""


class Timing:
    """Way and times of one collective or step.

    Await :meth:`wait`, then pass the maxima of all ranks' :meth:`report` to :meth:`learn`. Call :meth:`end` also after
    errors.

    Parameters
    ----------
    tuner, channel, index
        Tuner that chooses the way, channel of the group, and index of the collective.
    before, after : Wait, optional
        Events at the end of the collectives on which the way depends, and at the end of this collective.
    """

    def __init__(
        self, tuner: Tuner, channel: Channel, index: int = 0, before: Wait | None = None, after: Wait | None = None
    ) -> None:
        self._tuner, self._channel, self._index, self._before, self._after = tuner, channel, index, before, after
        self.way: Way = "frames"
        self.shares: LinkShares | None = None  # slices by the rates of links, which this collective measures
        self._n_rates = 0  # number of integers of `shares` in the report

    async def wait(self) -> Way:
        """Wait for the collectives on which the way depends, start the timer, and return the way."""
        if self._before is not None:
            await self._before
        self.way = self._tuner.way(self._index)
        self._rtt, self._wire_s = self._channel.mesh.rtt(self._channel.peers), self._channel.counters.wire_s
        self._started = time.perf_counter(), time.thread_time()
        if self.shares is not None:
            self.shares.begin(self._channel)
        return self.way

    def report(self, sent_nbytes: int, raw_nbytes: int, round_trips: float, *, on_device: bool) -> Report:
        """Return the measurements of this rank.

        Parameters
        ----------
        sent_nbytes : int
            Bytes that this rank has sent; in two levels, to other machines.
        raw_nbytes : int
            Bytes of the tensors; in two levels, of this rank's windows of them.
        round_trips : float
            Number of round trips in the collective.
        on_device : bool
            True if a tensor is on a GPU, which computes while this thread waits.

        Returns
        -------
        list of int
            Duration of the collective in microseconds; share of it in which this rank computed, in thousandths; and
            estimated wait for uncompressed values in microseconds. In the estimate, the latency of round trips stays
            the same, and the remaining wait grows in proportion to the bytes. The numbers of the tuner follow. If
            measurements of links are due, they precede all of these.
        """
        channel = self._channel
        wall, busy = time.perf_counter() - self._started[0], time.thread_time() - self._started[1]
        if on_device:
            # With NCCL, waits for messages and for kernels cannot be separated: uncompressed values are always tried.
            wire_s = 0.0 if channel.device.connected else channel.counters.wire_s - self._wire_s
            busy = max(0.0, wall - wire_s)
        latency = min(max(0.0, wall - busy), round_trips * self._rtt)
        size = channel.levels.between.size
        uncompressed_nbytes = 2 * raw_nbytes * (size - 1) // size
        waited = latency + (wall - busy - latency) * uncompressed_nbytes / max(1, sent_nbytes)
        times = [round(wall * 1e6), round(busy / wall * 1e3), round(waited * 1e6)]
        rates = [] if self.shares is None else self.shares.report(channel, raw_nbytes)
        self._n_rates = len(rates)
        return rates + times + self._tuner.report(channel)

    def learn(self, largest: Report) -> None:
        """Record that the collective has succeeded; see :meth:`Tuner.learn`."""
        if self.shares is not None:
            self.shares.learn(largest[: self._n_rates])
        self._tuner.learn(self._index, self.way, largest[self._n_rates :])

    def end(self) -> None:
        """Let the next collective begin."""
        if self._after is not None:
            self._after.complete()


class RawFallback(Tuner):
    """Chooses between frames and uncompressed values, for the collectives of one signature or for the steps of a hook.

    Frames are timed first. If ranks were busy computing, uncompressed values are timed, too, and the faster way is then
    used. On a slow link, uncompressed values are not tried. Their time is estimated as the time in which ranks did not
    compute, times the ratio of the bytes. This estimate is too high if ranks wait for each other, so it is compared
    with a multiple of the time with frames.

    During the trials, collectives of this signature do not overlap, so that they do not distort each other's times.
    Later ones overlap, so their way must not depend on the times of collectives that may still be in flight.

    Parameters
    ----------
    description : str
        Description of the tensors, for log messages.
    """

    def __init__(self, description: str = "tensors") -> None:
        self._description = description
        self._decided: Way = "frames"  # last decision, which was logged
        self._count = 0  # number of collectives so far
        self._times: defaultdict[Way, list[int]] = defaultdict(list)  # durations of the trials in microseconds
        self._worth_trying = False  # True: uncompressed values may be faster
        self._turns = Turns()

    def begin(self, channel: Channel) -> Timing:
        """Begin a collective, which waits for the previous one during the trials."""
        index = self._count % _PERIOD
        self._count += 1
        before, after = self._turns.ask()
        return Timing(self, channel, index, before if index <= TRIALS else None, after)

    def way(self, index: int) -> Way:
        """Return the way, "frames" or "values" (uncompressed), for the `index`-th collective of a period."""
        if index < _WARMUP + _TIMED or not self._worth_trying:
            return "frames"
        if index < TRIALS:
            return "values"
        slower = self._times["values"] and min(self._times["values"]) >= min(self._times["frames"], default=0)
        return "frames" if slower or not self._times["values"] else "values"

    def learn(self, index: int, way: Way, largest: Report) -> None:
        """Record the times of the `index`-th collective of a period; see :meth:`Tuner.learn`."""
        wall, load, waited = largest
        if index < _WARMUP:
            self._times.clear()
            self._worth_trying = False
        elif index < TRIALS:
            self._times[way].append(wall)
            if way == "frames" and index < _WARMUP + _TIMED:
                self._worth_trying |= load * _BUSY >= 1000 and waited <= _MOST_WAIT * wall
        if index == TRIALS - 1 and (decided := self.way(TRIALS)) != self._decided:
            self._decided = decided
            self._log_switch()

    def _log_switch(self) -> None:
        """Log the new decision, and the times on which it is based."""
        how = "uncompressed" if self._decided == "values" else "as frames"
        names: dict[Way, str] = {"frames": "frames", "values": "uncompressed"}
        times = [f"{names[way]} {min(each) / 1e3:.2f} ms" for way, each in self._times.items() if each]
        _log.info(
            "all-reduces of %s are sent %s from now on; measured times: %s", self._description, how, ", ".join(times)
        )
