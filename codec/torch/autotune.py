"""Whether frames pay: decided from what collectives have taken, alike on all ranks."""

import logging
import time
from collections import defaultdict, deque
from statistics import median_low

_WARM = 1  # collectives of a kind that are not timed: they allocate, and connections are slow at first
_TIMED = 4  # by their median: what else a machine does makes single ones longer by half, and the best are luck
_LAST = 8  # of what is sent: where it comes to take longer than what was not chosen, that is chosen
TRIALS = 2 * (_WARM + _TIMED)  # collectives of a kind until it is chosen
_AGAIN = 200  # collectives until it is looked at again: links and loads change
_MOST = 4  # times as long as frames values may come to take where they are tried
_BUSY = 4  # a rank that computes for a fourth of the time or more may be what all wait for

_log = logging.getLogger("codec.torch")

Report = list[int]  # the largest of all ranks' is what Choice goes by


def report(began: tuple[float, float], sent_nbytes: int, nbytes: int) -> Report:
    """What a collective took this rank, which has sent so many bytes, and would have sent `nbytes` of values.

    Microseconds, how many thousandths of them it computed, and how many microseconds it would have waited for values.
    """
    wall, busy = time.perf_counter() - began[0], time.thread_time() - began[1]
    waited = (wall - busy) * nbytes / max(1, sent_nbytes)
    return [round(wall * 1e6), round(busy / wall * 1e3), round(waited * 1e6)]


class Choice:
    """For collectives of one size and spec: frames at first; values too if ranks are busy; then what took less time.

    With the end of a collective all ranks learn the largest of their reports, and so choose alike. On a slow link the
    processor waits, values would take longer still, and are never tried: they need at least the time that ranks did not
    compute, as often as they are larger than frames. (Less, for ranks wait for each other, too: so what turns out to
    take twice as long as frames is not tried to the end.)
    """

    def __init__(self, what: str = "tensors") -> None:
        self._what = what  # description of the tensors, for log messages
        self._decided = "frames"  # outcome of the last trial, or of later measurements
        self._over = 0  # collectives
        self._took: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=_LAST))  # microseconds
        self._worth_trying = False

    @property
    def kind(self) -> str:
        """Of the next collective: `frames` or `values`."""
        i = self._over % _AGAIN
        if i < TRIALS // 2 or not self._worth_trying:
            return "frames"
        if i < TRIALS:
            return "values"
        return min(self._took, key=self._median, default="frames")

    def _median(self, kind: str) -> int:
        return median_low(self._took[kind])

    def learn(self, largest: Report) -> None:
        """The next collective is over."""
        wall, load, waited = largest
        kind, i, half = self.kind, self._over % _AGAIN, TRIALS // 2
        self._over += 1
        if i < _WARM:
            self._took.clear()
            self._worth_trying = False
        elif not half <= i < half + _WARM:
            self._took[kind].append(wall)
            if kind == "frames":
                self._worth_trying |= i < half and load * _BUSY >= 1000 and waited <= _MOST * wall
            elif i < TRIALS and "frames" in self._took:
                self._worth_trying &= wall <= 2 * self._median("frames")
        if self._over % _AGAIN >= TRIALS and self.kind != self._decided:
            self._decided = self.kind
            self._log_switch()

    def _log_switch(self) -> None:
        """Log to which way of sending later collectives switch, and the medians that decided it."""
        way = "uncompressed" if self._decided == "values" else "as frames"
        times = [
            f"{name} {self._median(kind) / 1e3:.2f} ms"
            for kind, name in (("frames", "frames"), ("values", "uncompressed"))
            if self._took[kind]
        ]
        _log.info("all-reduces of %s: sent %s from now on; median times: %s", self._what, way, ", ".join(times))
