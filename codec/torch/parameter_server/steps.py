"""Pushed frames of a parameter server, step by step: who has pushed, who may pull, and when frames are dropped."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from codec import CodecError, PeerError, StateError, Status

_CHECK_SECONDS = 0.25  # between two looks at the connection of a worker that waits
_REMEMBERED = 1024  # steps that have ended and whose late pushes are recognized


class Entry:
    """Frames of one key in one step.

    A result is computed once for each reduction, by the first worker that asks for it.
    """

    def __init__(self) -> None:
        self.frames: dict[int, Any] = {}  # by worker
        self.pushed: set[int] = set()
        self.pulled: set[int] = set()
        self.users = 0  # calls that compute or send a result
        self.nbytes = 0
        self._lock = threading.Lock()
        self._results: dict[str, Any] = {}

    def result(self, reduce: str, compute: Callable[[Sequence[Any]], Any]) -> Any:
        """Return the result of a reduction, or raise its error; `compute` gets the frames in the order of workers."""
        with self._lock:
            if reduce not in self._results:
                try:
                    self._results[reduce] = compute([self.frames[w] for w in sorted(self.frames)])
                except CodecError as e:
                    self._results[reduce] = e
            found = self._results[reduce]
        if isinstance(found, CodecError):
            raise type(found)(str(found))
        return found

    def drop(self) -> None:
        """Free the frames and results."""
        self.frames, self._results, self.nbytes = {}, {}, 0


class _Step:
    """Step that has begun and not ended."""

    def __init__(self, number: int, expected: frozenset[int]) -> None:
        self.number, self.expected = number, expected
        self.entries: dict[int, Entry] = {}  # by key
        self.gone: dict[int, PeerError] = {}  # workers that push nothing more in this step
        self.left: set[int] = set()  # workers that have gone on to later steps


def _check_keys(keys: Collection[int]) -> None:
    """Raise StateError for no keys: a step without keys would never end."""
    if not keys:
        raise StateError("the request names no key")


def _abandoned(worker: int, number: int, *, nonfinite: bool) -> PeerError:
    """Return the error that other workers get in a step that a worker has abandoned."""
    text = f"worker {worker} has abandoned step {number}"
    if nonfinite:
        return PeerError(f"{text}: it has NaN or Inf", Status.NONFINITE)
    return PeerError(f"{text} because of an error")


class Steps:
    """Steps in flight, and the state of workers. All methods may be called by any thread.

    A step expects the workers that take part when its first key is pushed. A key is complete when all of them have
    pushed it. It never completes if one of them was lost, was too late, or abandoned the step before it pushed the key;
    so all workers that pull a key get its value, or none does.

    Each step is one in which some worker takes part at the moment, and a worker takes part in at most `max_steps`. So
    there are at most `max_steps` times the number of workers, whatever workers send.

    Parameters
    ----------
    workers : sequence of int
        Ranks of the workers.
    max_steps : int
        Most steps in which a worker can take part at once.
    """

    def __init__(self, workers: Sequence[int], max_steps: int) -> None:
        self.changed = threading.Condition()
        self.completed = 0  # steps that have ended
        self.state = dict.fromkeys(workers, "expected")  # or "active", "absent", "lost", "closed"
        self.reasons: dict[int, str] = {}  # why workers were lost
        self._max_steps = max_steps
        self._steps: dict[int, _Step] = {}
        self._ended: OrderedDict[int, Mapping[int, PeerError]] = OrderedDict()
        self._of: dict[int, list[int]] = {w: [] for w in workers}  # steps in which a worker takes part
        # Steps that a worker has abandoned before they began; True: because of NaN or Inf. Old entries are dropped.
        self._abandoned: dict[int, OrderedDict[int, bool]] = {w: OrderedDict() for w in workers}

    # Workers

    def join(self, worker: int) -> None:
        """Note that a worker has connected or sent a request: it takes part in steps that begin from now on."""
        with self.changed:
            self.state[worker] = "active"
            self.reasons.pop(worker, None)

    def leave(self, worker: int, state: str, reason: str) -> None:
        """Note that a worker is lost, absent or closed: it pushes nothing more in the steps that have begun."""
        with self.changed:
            self.state[worker] = state
            if state == "lost":
                self.reasons[worker] = reason
            self._of[worker].clear()
            for step in list(self._steps.values()):
                self._go(step, worker, PeerError(f"worker {worker} {reason}"))
                step.left.add(worker)
                self._tidy(step)
                if not any(step.number in mine for mine in self._of.values()):
                    # Nobody has received a value: the step may begin again without the worker.
                    self._steps.pop(step.number, None)
            self.changed.notify_all()

    def abandon(self, worker: int, number: int, *, nonfinite: bool) -> None:
        """Note that a worker pushes nothing more in a step, because of an error."""
        with self.changed:
            if number in self._ended:
                return
            step = self._steps.get(number)
            if step is None:
                early = self._abandoned[worker]
                early.setdefault(number, nonfinite)
                if len(early) > _REMEMBERED:
                    early.popitem(last=False)
                return
            self._check_expected(step, worker)
            self._go(step, worker, _abandoned(worker, number, nonfinite=nonfinite))
            step.left.add(worker)
            self._tidy(step)
            self.changed.notify_all()

    def nbytes(self) -> int:
        """Return the bytes of all frames in flight."""
        with self.changed:
            return sum(e.nbytes for s in self._steps.values() for e in s.entries.values())

    def in_flight(self) -> int:
        """Return the number of steps in flight."""
        with self.changed:
            return len(self._steps)

    # Frames

    def push(self, worker: int, number: int, frames: Mapping[int, Any], names: Callable[[int], str]) -> None:
        """Store the frames of a worker, all or none.

        Raises
        ------
        StateError
            The worker has pushed a key before, is too late, or has too many steps in flight; or there are no frames.
        """
        _check_keys(frames)
        with self.changed:
            step = self._joined(worker, number)
            for key in frames:
                if key in step.entries and worker in step.entries[key].pushed:
                    raise StateError(f"worker {worker} has pushed {names(key)} in step {number} before")
            for key, frame in frames.items():
                entry = step.entries.setdefault(key, Entry())
                entry.frames[worker] = frame
                entry.pushed.add(worker)
                entry.nbytes += len(frame)
            self.changed.notify_all()

    def wait(
        self,
        worker: int,
        number: int,
        keys: Sequence[int],
        names: Callable[[int], str],
        seconds: float,
        check: Callable[[], None],
    ) -> list[Entry]:
        """Wait until all workers of a step have pushed some keys, and return the entries of these.

        The caller releases the entries. During the wait, `check` is called from time to time; its errors end the wait.

        Raises
        ------
        StateError
            There are no keys, or the worker has not pushed one itself, or has pulled it before; or the step has ended.
        PeerError
            A worker was lost, or has not pushed a key within `seconds`; no worker gets that key then.
        """
        _check_keys(keys)
        deadline = time.monotonic() + seconds
        with self.changed:
            step = self._taken_part(worker, number)
            for key in keys:
                entry = step.entries.get(key) if step is not None else None
                if entry is None or worker not in entry.pushed:
                    raise StateError(
                        f"worker {worker} pulls {names(key)} in step {number} before it has pushed it: push first, "
                        "since all workers contribute to the value"
                    )
                if worker in entry.pulled:
                    raise StateError(f"worker {worker} has pulled {names(key)} in step {number} before")
            assert step is not None  # keys are not empty, and the loop raises without a step
            entries = [step.entries[key] for key in keys]
            while missing := self._missing(step, entries):
                for w in sorted(missing & step.gone.keys()):
                    key = next(k for k, e in zip(keys, entries, strict=True) if w not in e.pushed)
                    cause = step.gone[w]
                    raise PeerError(f"{cause} before it pushed {names(key)} in step {number}", cause.code)
                left = deadline - time.monotonic()
                if left > 0:
                    check()
                    self.changed.wait(min(left, _CHECK_SECONDS))
                    continue
                for w in missing:
                    self._go(step, w, PeerError(f"worker {w} was too late ({seconds:g} s)"))
                    if self.state[w] in ("active", "expected"):
                        self.state[w] = "absent"
                self.changed.notify_all()
            for entry in entries:
                entry.pulled.add(worker)
                entry.users += 1
            return entries

    def release(self, number: int, entries: Iterable[Entry]) -> None:
        """Note that a worker has the results of entries that :meth:`wait` returned; free those that all have."""
        with self.changed:
            for entry in entries:
                entry.users -= 1
            step = self._steps.get(number)
            if step is not None:
                self._tidy(step)

    @staticmethod
    def _missing(step: _Step, entries: Iterable[Entry]) -> set[int]:
        return {w for e in entries if len(e.pushed) < len(step.expected) for w in step.expected - e.pushed}

    @staticmethod
    def _go(step: _Step, worker: int, reason: PeerError) -> None:
        if worker in step.expected:
            step.gone.setdefault(worker, reason)

    def _taken_part(self, worker: int, number: int) -> _Step | None:
        """Return a step in which a worker can take part; None if it has not begun.

        Raises
        ------
        StateError
            The step has ended or begun without the worker, or the worker has left it.
        """
        if number in self._ended:
            cause = self._ended[number].get(worker)
            raise StateError(f"step {number} has ended" + (f": {cause}" if cause else ""))
        step = self._steps.get(number)
        if step is None:
            if number in self._abandoned[worker]:
                raise StateError(f"worker {worker} has abandoned step {number}: take part from a later step on")
            return None
        self._check_expected(step, worker)
        if worker in step.gone:
            raise StateError(f"{step.gone[worker]} in step {number}: take part from a later step on")
        if worker in step.left:
            raise StateError(f"worker {worker} has gone on to later steps than {number}")
        return step

    @staticmethod
    def _check_expected(step: _Step, worker: int) -> None:
        if worker not in step.expected:
            raise StateError(
                f"step {step.number} has begun without worker {worker}, which did not take part then: take part from a "
                "later step on"
            )

    def _joined(self, worker: int, number: int) -> _Step:
        """Return a step in which a worker takes part; begin it if it has not begun."""
        step = self._taken_part(worker, number)
        mine = self._of[worker]
        if step is not None and number in mine:
            return step
        if len(mine) >= self._max_steps:
            self._go_on(worker, self._steps[mine[0]])
        if step is None:
            step = self._steps[number] = self._begin(number)
        mine.append(number)
        return step

    def _begin(self, number: int) -> _Step:
        """Return a new step, without the workers that have abandoned it."""
        step = _Step(number, frozenset(w for w, state in self.state.items() if state in ("active", "expected")))
        for w, early in self._abandoned.items():
            nonfinite = early.pop(number, None)
            if nonfinite is not None and w in step.expected:
                self._go(step, w, _abandoned(w, number, nonfinite=nonfinite))
                step.left.add(w)
        return step

    def _go_on(self, worker: int, oldest: _Step) -> None:
        """End the part of a worker in its oldest step, so that it can begin another one."""
        pushed = [e for e in oldest.entries.values() if worker in e.pushed]
        missing = self._missing(oldest, pushed) - oldest.gone.keys()
        if missing:
            raise StateError(
                f"worker {worker} has {self._max_steps} steps in flight, the most that the server allows, and worker "
                f"{min(missing)} has not pushed all keys of step {oldest.number} yet: pull before you push more"
            )
        oldest.left.add(worker)
        self._of[worker].remove(oldest.number)
        self._tidy(oldest)

    def _tidy(self, step: _Step) -> None:
        """Free the memory of keys that nobody will pull, and of a step in which no worker takes part any more."""
        waiting = step.expected - step.left - step.gone.keys()
        for entry in step.entries.values():
            if waiting <= entry.pulled and not entry.users:
                entry.drop()
        if waiting or step.number not in self._steps:
            return
        del self._steps[step.number]
        for mine in self._of.values():
            if step.number in mine:
                mine.remove(step.number)
        self.completed += 1
        self._ended[step.number] = step.gone
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
