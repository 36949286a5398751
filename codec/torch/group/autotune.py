"""Choice between frames and raw, equal on all ranks (docs/spec/protocol/collectives.md, section 6)."""

import logging
import time
from collections import defaultdict
from typing import Any, Literal

from codec.torch.network.waits import Turns, Wait

Way = Literal["frames", "values"]

_WARMUP = 1  # untimed collectives: they allocate memory, and connections are slow at first
_TIMED = 2  # timed collectives of each way; the faster one counts, since other load makes single ones slower
TRIALS = _WARMUP + 2 * _TIMED  # collectives before the decision
_PERIOD = 200  # collectives between the beginnings of two trials, since links and loads change
# Uncompressed values are tried if their transfer would take at most this multiple of the time with frames.
_MOST_WAIT = 4
_BUSY = 4  # uncompressed values are tried only if a rank computes for at least 1 / _BUSY of the time

_log = logging.getLogger("codec.torch")

Report = list[int]


class Measurement:
    """Times of a collective, from the moment at which this object is made.

    Parameters
    ----------
    rtt : float
        Round trip between ranks, in seconds.
    """

    def __init__(self, rtt: float) -> None:
        self._rtt = rtt
        self._started = time.perf_counter(), time.thread_time()

    def report(self, sent_nbytes: int, raw_nbytes: int, round_trips: float, wire_s: float | None = None) -> Report:
        """Return what this rank reports of the collective.

        Parameters
        ----------
        sent_nbytes : int
            Bytes that this rank has sent.
        raw_nbytes : int
            Bytes that it would have sent uncompressed.
        round_trips : float
            Round trips that the collective takes.
        wire_s : float, optional
            Seconds in which this rank had nothing to do but to wait for others, for values on GPUs: these work while
            this thread waits, and count as busy for the rest of the time. Default: all time without computation.

        Returns
        -------
        list of int
            Microseconds of the collective; thousandths of them in which this thread computed; microseconds that it
            would have waited for uncompressed values: round trips as measured, and the rest in proportion to bytes.
        """
        wall, busy = time.perf_counter() - self._started[0], time.thread_time() - self._started[1]
        if wire_s is not None:
            busy = max(0.0, wall - wire_s)
        latency = min(max(0.0, wall - busy), round_trips * self._rtt)
        waited = latency + (wall - busy - latency) * raw_nbytes / max(1, sent_nbytes)
        return [round(wall * 1e6), round(busy / wall * 1e3), round(waited * 1e6)]


class Choice:
    """Choice for the collectives of one signature, or for the steps of a hook.

    All ranks learn the same reports, and so choose the same way. Frames are tried first. If ranks were busy,
    uncompressed values follow, and then the faster way is used. On a slow link uncompressed values are never tried.
    They would take the time in which ranks did not compute, times the ratio of the bytes. That estimate is too high
    where ranks wait for each other, so it is compared with a multiple of the time of frames.

    While ways are tried, collectives of this signature follow each other, so that they do not disturb each other.

    Parameters
    ----------
    description : str
        Description of the tensors, for log messages.
    """

    def __init__(self, description: str = "tensors") -> None:
        self._description = description
        self._decided: Way = "frames"  # way that was logged last
        self._count = 0  # collectives that have begun
        self._times: defaultdict[Way, list[int]] = defaultdict(list)  # microseconds of a trial
        self._worth_trying = False
        self._turns = Turns()

    def begin(self) -> "Turn":
        """Begin a collective: await the turn, which has the way to use, and end it."""
        index = self._count % _PERIOD
        self._count += 1
        before, after = self._turns.ask()
        return Turn(self, index, before if index <= TRIALS else None, after)

    def way(self, index: int) -> Way:
        """Return the way of a collective by its number in the period."""
        if index < _WARMUP + _TIMED or not self._worth_trying:
            return "frames"
        if index < TRIALS:
            return "values"
        slower = self._times["values"] and min(self._times["values"]) >= min(self._times["frames"], default=0)
        return "frames" if slower or not self._times["values"] else "values"

    def learn(self, index: int, way: Way, largest: Report) -> None:
        """Note a collective that has succeeded.

        Parameters
        ----------
        index : int
            Number in the period.
        way : str
            Way that it has used.
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
        """Log the way of later collectives, and the times that decided it."""
        how = "uncompressed" if self._decided == "values" else "as frames"
        names: dict[Way, str] = {"frames": "frames", "values": "uncompressed"}
        times = [f"{names[way]} {min(each) / 1e3:.2f} ms" for way, each in self._times.items() if each]
        _log.info("all-reduces of %s: sent %s from now on; times: %s", self._description, how, ", ".join(times))


class Turn:
    """Turn of one collective of a :class:`Choice`."""

    def __init__(self, choice: Choice, index: int, before: Wait | None, after: Wait) -> None:
        self._choice, self._index, self._before, self._after = choice, index, before, after
        self.way: Way = "frames"

    async def wait(self) -> Way:
        """Wait for the collectives before, if the choice depends on them; return the way to use."""
        if self._before is not None:
            await self._before
        self.way = self._choice.way(self._index)
        return self.way

    def report(self, channel: Any) -> Report:
        """Return numbers to report in addition to :meth:`Measurement.report`: none."""
        return []

    def learn(self, largest: Report) -> None:
        """Note that the collective has succeeded; as :meth:`Choice.learn`."""
        self._choice.learn(self._index, self.way, largest)

    def end(self) -> None:
        """Let the next collective begin."""
        self._after.complete()
