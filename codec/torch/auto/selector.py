"""Choose a level from predicted and measured times of steps. Equal inputs give equal choices on all ranks."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

# A level is the index of a spec, or of a pair of specs, in a list that starts with the least lossy one.
_SKIPPED = 1  # steps after a switch that are not measured, since they allocate memory
_TRIAL = 3  # measured steps of a new level before it is compared with others
_WINDOW = 6  # number of last measured steps of a level on which decisions are based
_EQUAL, _MOST_EQUAL = 1.05, 1.1  # bounds of the ratio up to which times count as equal; it grows if times vary
_HOPE = 1.1  # factor by which a level without measurements is assumed to be faster than predicted, so that it is tried
_GAIN = 3.0  # factor by which a lossier level without measurements is assumed to save more time than predicted
# A level is left immediately if its first two measured steps are slower than the previous level by this factor.
_ABORT = 1.5
_MOVED = 0.3  # drop measurements of a level if its prediction changes by this share of its time: the link has changed
_LASTS = 200  # steps after which measurements of a level that is not current expire
# A level is near if it is slower than the current one by a factor below _NEAR. Its measurements expire after
# _NEAR_LASTS steps.
_NEAR, _NEAR_LASTS = 1.25, 50
_HOLD = 16  # steps after the first return to a level measured earlier, in which small gains cause no switch
_MOST_HOLD = 128  # upper bound of _HOLD, which doubles with each further return


@dataclass
class _Record:
    """Measurements of steps at a level."""

    predicted: float  # predicted seconds at the first measured step
    last_predicted: float = 0.0  # predicted seconds at the last measured step
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))  # measured seconds, oldest first
    step: int = 0  # number of the last measured step

    @property
    def usual(self) -> float:
        """Lower quartile of the measured seconds, because other work on the machine only makes steps longer."""
        return sorted(self.seconds)[len(self.seconds) // 4]

    @property
    def equal(self) -> float:
        """Ratio of times up to which two levels count as equally fast; larger if times vary."""
        ordered = sorted(self.seconds)
        return min(_MOST_EQUAL, max(_EQUAL, ordered[len(ordered) // 2] / max(1e-9, ordered[0])))


@dataclass(frozen=True)
class Switch:
    """Change of the level after a step, from `former` to `level`."""

    former: int
    level: int
    seconds: float  # seconds of a step at the former level, measured
    expected: float  # seconds of a step at the new level, predicted or measured earlier


class Selector:
    """Chooses among levels, which are numbered from the least lossy one.

    Predictions may be wrong: a level that is predicted to be faster is tried, and left if it is slower. It is tried
    again after 200 steps, or when its prediction changes by 30% of its measured time, because the link has changed.

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
        self._former: float | None = None  # seconds of a step at the previous level while this one is tried; else None
        self._skip, self._hold, self._step = _SKIPPED, 0, 0
        self._next_hold = _HOLD
        self._wish = 0  # level that looked better after the last step: lossier (1), less lossy (-1) or none (0)

    def begin(self, predicted: Sequence[float]) -> Switch | None:
        """Drop all measurements, and choose by predictions alone. Call this once, before the first :meth:`observe`."""
        self._records.clear()
        best = min(predicted)
        level = next(i for i, seconds in enumerate(predicted) if seconds <= _EQUAL * best)
        return self._switch(level, predicted[self.level], predicted[level]) if level != self.level else None

    def observe(self, seconds: float, predicted: Sequence[float]) -> Switch | None:
        """Record the time of a step at the current level, and choose the level of the next step.

        Parameters
        ----------
        seconds : float
            Seconds of the step.
        predicted : sequence of float
            Predicted seconds of a step at each level.

        Returns
        -------
        Switch or None
            Change of the level; None if the level stays.
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
            return None  # switch only if two steps in a row look better in the same direction
        return self._switch(level, record.usual, expected[level])

    def _hoped(self, level: int, here: float, expected: float) -> float:
        """Return an optimistic estimate of a level's seconds per step: `expected`, or less if it was not measured."""
        if level in self._records:
            return expected
        if level < self.level:
            return expected / _HOPE
        return min(expected, max(expected / _HOPE, here - _GAIN * (here - expected)))

    def _expected(self, level: int, here: float, predicted: Sequence[float]) -> float:
        """Return the expected seconds of a step at a level, given the seconds `here` at the current level."""
        if level == self.level:
            return here
        if (record := self._records.get(level)) is not None:
            # Use the fastest step: the level may have been left only because other work slowed the machine down.
            best = min(record.seconds)
            return max(0.0, best + predicted[level] - record.last_predicted)
        now = predicted[self.level]
        # If the prediction is too high at the current level, scale the predicted difference down.
        scale = min(1.0, here / now) if now > 0 else 1.0
        return max(0.0, here + (predicted[level] - now) * scale)

    def _forget(self, predicted: Sequence[float]) -> None:
        """Drop measurements that are old, or whose prediction has changed because the link has changed."""
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
