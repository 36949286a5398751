"""Choice of a level from predicted and measured times of steps. Pure: equal inputs give equal choices on all ranks."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_SKIPPED = 1  # steps after a switch that are not measured, since they allocate memory
_TRIAL = 3  # measured steps after which a new level is compared
_WINDOW = 6  # measured steps of a level that count
_EQUAL, _MOST_EQUAL = 1.05, 1.1  # ratio of times that count as equal, and the most where times of steps vary
_HOPE = 1.1  # factor by which a level without measurements may be faster than predicted, so that it is tried
_GAIN = 3.0  # factor by which a lossier level without measurements may save more time than predicted
# A level is left immediately if its first two measured steps are slower than the previous level by this factor.
_ABORT = 1.5
_MOVED = 0.3  # measurements of a level are dropped when its prediction changes by this share: the link has changed
_LASTS = 200  # steps for which measurements of another level count
_NEAR, _NEAR_LASTS = 1.25, 50  # factor of small differences, and steps for which measurements of near levels count
_HOLD = 16  # steps without a switch for small gains after the first return to a measured level
_MOST_HOLD = 128  # upper bound of these steps, which each further return doubles


@dataclass
class _Record:
    """Measured seconds of steps at a level, predicted seconds before the first and after the last, and its number."""

    predicted: float
    last_predicted: float = 0.0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    step: int = 0

    @property
    def usual(self) -> float:
        """Lower quartile of the measured seconds: other work on the machine only makes steps longer."""
        return sorted(self.seconds)[len(self.seconds) // 4]

    @property
    def equal(self) -> float:
        """Ratio of times that count as equal: it is larger where times vary."""
        ordered = sorted(self.seconds)
        return min(_MOST_EQUAL, max(_EQUAL, ordered[len(ordered) // 2] / max(1e-9, ordered[0])))


@dataclass(frozen=True)
class Switch:
    """Change of the level after a step: from level `former` to `level`, and seconds of a step at both."""

    former: int
    level: int
    seconds: float  # measured at the former level
    expected: float  # predicted, or measured before, at the new one


class Selector:
    """Choice among levels that are numbered from the least lossy one.

    Predictions need not be right: a level that is predicted to be faster is tried, and left if it is not. It is tried
    again after 200 steps, or when its prediction changes by 30% of its time, which is when the link changes.

    Parameters
    ----------
    level : int
        First level.

    Attributes
    ----------
    level : int
        Level of the next step.
    """

    def __init__(self, level: int) -> None:
        self.level = level
        self._records: dict[int, _Record] = {}
        self._former: float | None = None  # seconds of the level before, while this one is tried
        self._skip, self._hold, self._step = _SKIPPED, 0, 0
        self._next_hold = _HOLD
        self._wish = 0  # 1 or -1: the last step has called for a lossier or a less lossy level

    def begin(self, predicted: Sequence[float]) -> Switch | None:
        """Drop all measurements and choose by predictions: before the first decision, and when costs have changed."""
        self._records.clear()
        best = min(predicted)
        level = next(i for i, seconds in enumerate(predicted) if seconds <= _EQUAL * best)
        return self._switch(level, predicted[self.level], predicted[level]) if level != self.level else None

    def observe(self, seconds: float, predicted: Sequence[float]) -> Switch | None:
        """Note the time of a step at the current level, and choose the level of the next one.

        Parameters
        ----------
        seconds : float
            Seconds of the step.
        predicted : sequence of float
            Predicted seconds of a step at each level.

        Returns
        -------
        Switch or None
            Change of the level; None: the level stays.
        """
        self._step += 1
        self._forget(predicted)
        if self._skip:
            self._skip -= 1
            return None
        record = self._records.setdefault(self.level, _Record(predicted[self.level]))
        record.seconds.append(seconds)
        record.step, record.last_predicted = self._step, predicted[self.level]
        former, count = self._former, len(record.seconds)
        is_slow = former is not None and count > 1 and record.usual > _ABORT * former
        if former is not None and count < _TRIAL and not is_slow:
            return None
        self._former = None
        self._hold = max(0, self._hold - 1)
        return self._decide(predicted)

    def _decide(self, predicted: Sequence[float]) -> Switch | None:
        """Choose the least lossy level that is about as fast as the fastest one."""
        record = self._records[self.level]
        expected = [self._expected(i, record.usual, predicted) for i in range(len(predicted))]
        hoped = [self._hoped(i, record.usual, seconds) for i, seconds in enumerate(expected)]
        level = next(i for i, seconds in enumerate(hoped) if seconds <= record.equal * min(hoped))
        if self._hold and record.usual < _NEAR * expected[level]:
            level = self.level
        wish, self._wish = self._wish, (level > self.level) - (level < self.level)
        if not self._wish or wish != self._wish:
            return None  # two steps in a row must agree
        return self._switch(level, record.usual, expected[level])

    def _hoped(self, level: int, here: float, expected: float) -> float:
        """Return the seconds that a level may take, for which it is tried if it was not measured."""
        if level in self._records:
            return expected
        if level < self.level:
            return expected / _HOPE
        return min(expected, max(expected / _HOPE, here - _GAIN * (here - expected)))

    def _expected(self, level: int, here: float, predicted: Sequence[float]) -> float:
        """Return the expected seconds of a step at a level, from those of the current one."""
        if level == self.level:
            return here
        if (record := self._records.get(level)) is not None:
            # Fastest step: the level may have been left because of other work on the machine
            best = min(record.seconds)
            return max(0.0, best + predicted[level] - record.last_predicted)
        now = predicted[self.level]
        # Correct predictions by their error at the current level, if they are too high.
        scale = min(1.0, here / now) if now > 0 else 1.0
        return max(0.0, here + (predicted[level] - now) * scale)

    def _forget(self, predicted: Sequence[float]) -> None:
        """Drop measurements of another link, and old ones."""
        for level, record in list(self._records.items()):
            before = record.predicted if level == self.level else record.last_predicted
            moved = abs(predicted[level] - before) > _MOVED * record.usual
            age = 0 if level == self.level else self._step - record.step
            here = self._records.get(self.level, record).usual
            if moved or age > (_NEAR_LASTS if record.usual < _NEAR * here else _LASTS):
                del self._records[level]
                if moved:
                    self._hold, self._next_hold = 0, _HOLD
                self._former = None if level == self.level else self._former

    def _switch(self, level: int, seconds: float, expected: float) -> Switch:
        found = Switch(self.level, level, seconds, expected)
        self._hold = 0
        if level in self._records:
            self._hold, self._next_hold = self._next_hold, min(_MOST_HOLD, 2 * self._next_hold)
        self.level, self._former, self._skip, self._wish = level, seconds, _SKIPPED, 0
        return found
