"""Choose between frames and uncompressed values on all ranks (docs/spec/protocol/collectives.md, section 6)."""

import logging
import time
from collections import defaultdict
from typing import Any, Literal

from codec.torch.network.waits import Turns, Wait

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


class Measurement:
    """Timer of one collective; it starts when this object is created.

    Parameters
    ----------
    rtt : float
        Round-trip time between ranks, in seconds.
    """

    def __init__(self, rtt: float) -> None:
        self._rtt = rtt
        self._started = time.perf_counter(), time.thread_time()

    def report(self, sent_nbytes: int, raw_nbytes: int, round_trips: float, wire_s: float | None = None) -> Report:
        """Return the measurements of this rank.

        Parameters
        ----------
        sent_nbytes : int
            Bytes that this rank has sent.
        raw_nbytes : int
            Bytes that this rank would have sent uncompressed.
        round_trips : float
            Number of round trips in the collective.
        wire_s : float, optional
            For tensors on GPUs: seconds in which this rank only waited for other ranks. GPUs compute while this thread
            waits, so the rest of the time counts as computing. Default: the time in which this thread used no CPU.

        Returns
        -------
        list of int
            Duration of the collective in microseconds; share of it in which this rank computed, in thousandths; and
            estimated wait for uncompressed values in microseconds. In the estimate, the latency of round trips stays
            the same, and the remaining wait grows in proportion to the bytes.
        """
        wall, busy = time.perf_counter() - self._started[0], time.thread_time() - self._started[1]
        if wire_s is not None:
            busy = max(0.0, wall - wire_s)
        latency = min(max(0.0, wall - busy), round_trips * self._rtt)
        waited = latency + (wall - busy - latency) * raw_nbytes / max(1, sent_nbytes)
        return [round(wall * 1e6), round(busy / wall * 1e3), round(waited * 1e6)]


class Choice:
    """Choice between frames and uncompressed values, for the collectives of one signature or for the steps of a hook.

    All ranks use the same reports, and so choose the same way. Frames are timed first. If ranks were busy computing,
    uncompressed values are timed, too, and the faster way is then used. On a slow link, uncompressed values are not
    tried. Their time is estimated as the time in which ranks did not compute, times the ratio of the bytes. This
    estimate is too high if ranks wait for each other, so it is compared with a multiple of the time with frames.

    During the trials, collectives of this signature do not overlap, so that they do not distort each other's times.

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

    def begin(self) -> "Turn":
        """Begin a collective. On the returned Turn, await ``wait()`` for the way to use; call ``end()`` at the end."""
        index = self._count % _PERIOD
        self._count += 1
        before, after = self._turns.ask()
        return Turn(self, index, before if index <= TRIALS else None, after)

    def way(self, index: int) -> Way:
        """Return the way, "frames" or "values" (uncompressed), for the `index`-th collective of a period."""
        if index < _WARMUP + _TIMED or not self._worth_trying:
            return "frames"
        if index < TRIALS:
            return "values"
        slower = self._times["values"] and min(self._times["values"]) >= min(self._times["frames"], default=0)
        return "frames" if slower or not self._times["values"] else "values"

    def learn(self, index: int, way: Way, largest: Report) -> None:
        """Record a collective that has succeeded.

        Parameters
        ----------
        index : int
            Number of the collective in the period.
        way : str
            Way that the collective has used.
        largest : list of int
            Maximum over all ranks of each number of :meth:`Measurement.report`.
        """
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


class Turn:
    """One collective of a :class:`Choice`: waits until frames or uncompressed values are chosen, and times them."""

    def __init__(self, choice: Choice, index: int, before: Wait | None, after: Wait) -> None:
        self._choice, self._index, self._before, self._after = choice, index, before, after
        self.way: Way = "frames"

    async def wait(self) -> Way:
        """Wait for earlier collectives, if the choice depends on them; return "frames" or "values" (uncompressed)."""
        if self._before is not None:
            await self._before
        self.way = self._choice.way(self._index)
        return self.way

    def report(self, channel: Any) -> Report:
        """Return numbers to report in addition to :meth:`Measurement.report`; there are none."""
        return []

    def learn(self, largest: Report) -> None:
        """Record that the collective has succeeded; see :meth:`Choice.learn`."""
        self._choice.learn(self._index, self.way, largest)

    def end(self) -> None:
        """Let the next collective begin."""
        self._after.complete()
