"""Whether frames pay: decided from what collectives have taken, alike on all ranks."""

import time
from collections.abc import Sequence

_WARM = 1  # collectives of a kind that are not timed: they allocate, and connections are slow at first
_TIMED = 4  # the best of them: what else a machine does makes single ones longer by half
_AGAIN = 200  # collectives until it is looked at again: links and loads change
_BUSY = 4  # a rank that computes for a fourth of the time or more may be what all wait for

Report = list[int]


class Choice:
    """For collectives of one size and spec: frames at first; values too if ranks are busy; then what took less time.

    Each rank reports, with the next collective, what the last one took; all see all reports, and so decide alike. On a
    slow link the processor waits, values would take longer still, and are never tried: they need at least the time that
    ranks did not compute, as often as they are larger than frames. (Half of that, for ranks wait for each other, too.)
    """

    REPORT = 3

    def __init__(self) -> None:
        self._kind = "frames"  # of the collective that is reported next
        self._wall = self._busy = 0.0
        self._begin = (0.0, 0.0)
        self._calls = 0
        self._best: dict[str, float] = {}  # seconds, of the slowest rank
        self._worth_trying = False
        self.sent_nbytes = 0  # in the collective that is reported next, by this rank: to be set

    def report(self) -> Report:
        """What the collective before took here: microseconds, how many of them this rank computed, bytes sent."""
        return [round(self._wall * 1e6), round(self._busy * 1e6), self.sent_nbytes]

    def decide(self, reports: Sequence[Report], nbytes: int) -> str:
        """`frames` or `values`, of which a rank sends so many bytes, from the reports of all ranks."""
        wall = max(wall for wall, _, _ in reports) / 1e6
        if self._calls and wall:
            self._best[self._kind] = min(wall, self._best.get(self._kind, wall))
            if self._kind == "frames":
                load = max(busy / max(1, took) for took, busy, _ in reports)
                waited = max((took - busy) / 1e6 * nbytes / max(1, sent) for took, busy, sent in reports)
                self._worth_trying = load * _BUSY >= 1 and waited <= 2 * wall
        self._calls += 1
        self._kind = self._next()
        return self._kind

    def _next(self) -> str:
        """By the number of this collective."""
        trial = _WARM + _TIMED
        i = (self._calls - 1) % _AGAIN
        if i == 0:
            self._best.clear()
        if i < trial:
            if i <= _WARM:
                self._best.pop("frames", None)
            return "frames"
        if not self._worth_trying:
            return "frames"
        if i < 2 * trial:
            if i <= trial + _WARM:
                self._best.pop("values", None)
            return "values"
        return min(self._best, key=lambda kind: self._best[kind], default="frames")

    def __enter__(self) -> None:
        self._begin = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        wall, busy = self._begin
        self._wall, self._busy = time.perf_counter() - wall, time.thread_time() - busy
