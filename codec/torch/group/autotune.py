"""Choice between frames and uncompressed values, from measured times, equal on all ranks (docs/protocol.md, 11)."""

import logging
import time
from collections import defaultdict, deque
from statistics import median_low

_WARMUP = 1  # untimed collectives of a trial: they allocate memory, and connections are slow at first
_TIMED = 4  # timed collectives of a trial; their median counts, since other load makes single ones half as long again
_RECENT = 8  # collectives of each way whose median is compared after the trials
TRIALS = 2 * (_WARMUP + _TIMED)  # collectives of both trials
_PERIOD = 200  # collectives between the beginnings of two trials, since links and loads change
_MOST_WAIT = 4  # uncompressed values are tried only if ranks would wait at most this many times the time of frames
_BUSY = 4  # uncompressed values are tried only if a rank computes for at least 1 / _BUSY of the time

_log = logging.getLogger("codec.torch")

Report = list[int]


def report(started: tuple[float, float], sent_nbytes: int, raw_nbytes: int) -> Report:
    """Return the measurements of a collective that this rank reports with the verdict.

    Parameters
    ----------
    started : (float, float)
        Wall-clock and CPU time in seconds at its begin.
    sent_nbytes : int
        Bytes that this rank has sent.
    raw_nbytes : int
        Bytes that it would have sent uncompressed.

    Returns
    -------
    list of int
        Microseconds of the collective; thousandths of them in which this thread computed; microseconds that it would
        have waited for uncompressed values.
    """
    wall, busy = time.perf_counter() - started[0], time.thread_time() - started[1]
    waited = (wall - busy) * raw_nbytes / max(1, sent_nbytes)
    return [round(wall * 1e6), round(busy / wall * 1e3), round(waited * 1e6)]


class Choice:
    """Choice for the collectives of one signature.

    All ranks learn the same reports with each verdict, and so choose the same way. A trial of frames comes first. If
    ranks were busy, a trial of uncompressed values follows, and then the faster way is used. On a slow link
    uncompressed values are never tried. They would take the time in which ranks did not compute, times the ratio of the
    bytes. That estimate is too high where ranks wait for each other, so it is compared with a multiple of the time of
    frames; and a trial ends early if values take twice as long as frames.

    Parameters
    ----------
    description : str
        Description of the tensors, for log messages.
    """

    def __init__(self, description: str = "tensors") -> None:
        self._description = description
        self._decided = "frames"  # way that was logged last
        self._count = 0  # collectives that have succeeded
        self._times: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=_RECENT))  # microseconds, by way
        self._worth_trying = False

    @property
    def kind(self) -> str:
        """Way of the next collective: "frames" or "values"."""
        i = self._count % _PERIOD
        if i < TRIALS // 2 or not self._worth_trying:
            return "frames"
        if i < TRIALS:
            return "values"
        return min(self._times, key=self._median, default="frames")

    def _median(self, kind: str) -> int:
        return median_low(self._times[kind])

    def learn(self, largest: Report) -> None:
        """Note a collective that has succeeded.

        Parameters
        ----------
        largest : list of int
            Maximum over all ranks of each number of :func:`report`.
        """
        wall, load, waited = largest
        kind, i, half = self.kind, self._count % _PERIOD, TRIALS // 2
        self._count += 1
        if i < _WARMUP:
            self._times.clear()
            self._worth_trying = False
        elif not half <= i < half + _WARMUP:
            self._times[kind].append(wall)
            if kind == "frames":
                self._worth_trying |= i < half and load * _BUSY >= 1000 and waited <= _MOST_WAIT * wall
            elif i < TRIALS and "frames" in self._times:
                self._worth_trying &= wall <= 2 * self._median("frames")
        if self._count % _PERIOD >= TRIALS and self.kind != self._decided:
            self._decided = self.kind
            self._log_switch()

    def _log_switch(self) -> None:
        """Log the way of later collectives, and the medians that decided it."""
        way = "uncompressed" if self._decided == "values" else "as frames"
        times = [
            f"{name} {self._median(kind) / 1e3:.2f} ms"
            for kind, name in (("frames", "frames"), ("values", "uncompressed"))
            if self._times[kind]
        ]
        _log.info("all-reduces of %s: sent %s from now on; median times: %s", self._description, way, ", ".join(times))
