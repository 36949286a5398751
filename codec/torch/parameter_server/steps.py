"""Steps of a parameter server: stores pushed frames, lets workers wait for complete keys, and frees the frames."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from codec import CodecError, PeerError, SpecError, StateError, Status
from codec.specs import Spec

_CHECK_SECONDS = 0.25  # seconds between two checks of the connection of a waiting worker
_REMEMBERED = 1024  # number of ended steps whose late pushes are recognized


class KeyFrames:
    """Frames of one key in one step, and their reductions.

    The thread of the first worker that requests a reduction computes it; the others reuse the result.
    """

    def __init__(self) -> None:
        self.frames: dict[int, Any] = {}  # frame that each worker has pushed
        self.pushed: set[int] = set()  # workers that have pushed the key
        self.pulled: set[int] = set()  # workers that have pulled the key
        self.users = 0  # number of threads that compute or send a result
        self.nbytes = 0  # bytes of all frames
        self._lock = threading.Lock()
        self._specs: dict[str, Spec] = {}  # by reduction: spec of the result
        self._results: dict[str, Any] = {}  # by reduction: result, or CodecError

    def result(self, reduce: str, spec: Spec, compute: Callable[[Sequence[Any]], Any]) -> Any:
        """Return the result of a reduction, or raise its error; `compute` receives the frames in rank order.

        Raises
        ------
        SpecError
            Another worker has pulled the reduction with another spec than `spec`.
        """
        with self._lock:
            if self._specs.setdefault(reduce, spec) != spec:
                raise SpecError(f"all workers must pull with one spec, but got {spec} after {self._specs[reduce]}")
            if reduce not in self._results:
                try:
                    self._results[reduce] = compute([self.frames[w] for w in sorted(self.frames)])
                except CodecError as e:
                    self._results[reduce] = e
            found = self._results[reduce]
        if isinstance(found, CodecError):
            raise type(found)(str(found), found.code)
        return found

    def drop(self) -> None:
        """Free the frames and results."""
        self.frames, self._results, self.nbytes = {}, {}, 0


class _Step:
    """Step in flight: keys that were pushed, and workers that take part."""

    def __init__(self, number: int, expected: frozenset[int]) -> None:
        self.number, self.expected = number, expected  # `expected`: workers that must push each key
        self.entries: dict[int, KeyFrames] = {}  # entry of each pushed key, by number of the key
        self.gone: dict[int, PeerError] = {}  # workers that push no more keys in this step, each with the reason
        self.left: set[int] = set()  # workers that no longer take part in this step, and pull no more keys


def _check_keys(keys: Collection[int]) -> None:
    """Raise StateError if there are no keys, because a step without keys would never end."""
    if not keys:
        raise StateError("the request must name at least one key")


def _abandoned(worker: int, number: int, *, nonfinite: bool) -> PeerError:
    """Return the error that is reported to other workers in a step that a worker has abandoned."""
    text = f"worker {worker} has abandoned step {number}"
    if nonfinite:
        return PeerError(f"{text}, because its tensor holds NaN or Inf", Status.NONFINITE)
    return PeerError(f"{text} because of an error")


class ServerSteps:
    """Steps in flight, and the state of workers. Any thread may call all methods.

    When the first key of a step is pushed, the step expects all workers that are active, or have not connected yet. A
    key is complete when all expected workers have pushed it. It never completes if one of them was lost, was too late,
    or abandoned the step before it pushed the key. So either all workers that pull a key receive its value, or none
    does.

    A step is in flight only while some worker takes part in it, and a worker takes part in at most `max_steps` steps.
    So the number of steps in flight is at most `max_steps` times the number of workers, even if workers misbehave.

    Parameters
    ----------
    workers : sequence of int
        Ranks of the workers.
    max_steps : int
        Maximum number of steps in which a worker can take part at once.
    """

    def __init__(self, workers: Sequence[int], max_steps: int) -> None:
        self.changed = threading.Condition()
        self.completed = 0  # number of steps that have ended
        # State of each worker; also "active", "absent", "lost" or "closed".
        self.state = dict.fromkeys(workers, "expected")
        self.reasons: dict[int, str] = {}  # reason why a worker was lost
        self._max_steps = max_steps
        self._steps: dict[int, _Step] = {}  # steps in flight
        # `gone` of the last ended steps, by step
        self._ended: OrderedDict[int, Mapping[int, PeerError]] = OrderedDict()
        self._of: dict[int, list[int]] = {w: [] for w in workers}  # steps in which each worker takes part, oldest first
        # By worker: steps that the worker abandoned before the step began, each with True if NaN or Inf was the reason.
        # Only the last _REMEMBERED steps are stored.
        self._abandoned: dict[int, OrderedDict[int, bool]] = {w: OrderedDict() for w in workers}

    # Workers

    def join(self, worker: int) -> None:
        """Mark a worker as active, because it has connected or sent a request. Steps that begin later expect it."""
        with self.changed:
            self.state[worker] = "active"
            self.reasons.pop(worker, None)

    def leave(self, worker: int, state: str, reason: str) -> None:
        """Mark a worker as lost, absent or closed. It pushes no more keys in the steps in flight."""
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
                    # No worker takes part any more, and none has received a value: the step may begin again.
                    self._steps.pop(step.number, None)
            self.changed.notify_all()

    def abandon(self, worker: int, number: int, *, nonfinite: bool) -> None:
        """Record that a worker pushes no more keys in a step, because of an error."""
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
        """Store the frames that a worker pushes, by number of the key. After an error, no frame is stored.

        Raises
        ------
        StateError
            The worker has already pushed a key, is too late, or has too many steps in flight; or there are no frames.
        """
        _check_keys(frames)
        with self.changed:
            step = self._joined(worker, number)
            for key in frames:
                if key in step.entries and worker in step.entries[key].pushed:
                    raise StateError(f"worker {worker} has already pushed {names(key)} in step {number}")
            for key, frame in frames.items():
                entry = step.entries.setdefault(key, KeyFrames())
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
    ) -> list[KeyFrames]:
        """Wait until all expected workers of a step have pushed `keys`, and return the entries of these keys.

        The caller must release the entries by :meth:`release`. During the wait, `check` is called at least every
        0.25 s; its errors end the wait.

        Raises
        ------
        StateError
            There are no keys, the worker has not pushed one of them, or has already pulled it; or the step has ended.
        PeerError
            A worker was lost, or has not pushed a key within `seconds`. Then no worker receives that key.
        """
        _check_keys(keys)
        deadline = time.monotonic() + seconds
        with self.changed:
            step = self._taken_part(worker, number)
            for key in keys:
                entry = step.entries.get(key) if step is not None else None
                if entry is None or worker not in entry.pushed:
                    raise StateError(
                        f"worker {worker} pulls {names(key)} in step {number}, but has not pushed it: push first, "
                        "since all workers contribute to the value"
                    )
                if worker in entry.pulled:
                    raise StateError(f"worker {worker} has already pulled {names(key)} in step {number}")
            assert step is not None  # there is at least one key, for which the loop raises if there is no step
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

    def release(self, number: int, entries: Iterable[KeyFrames]) -> None:
        """Release entries of :meth:`wait` after their results were sent; free entries that all workers have pulled."""
        with self.changed:
            for entry in entries:
                entry.users -= 1
            step = self._steps.get(number)
            if step is not None:
                self._tidy(step)

    @staticmethod
    def _missing(step: _Step, entries: Iterable[KeyFrames]) -> set[int]:
        return {w for e in entries if len(e.pushed) < len(step.expected) for w in step.expected - e.pushed}

    @staticmethod
    def _go(step: _Step, worker: int, reason: PeerError) -> None:
        if worker in step.expected:
            step.gone.setdefault(worker, reason)

    def _taken_part(self, worker: int, number: int) -> _Step | None:
        """Return step `number`, if the worker may take part in it; None if it has not begun.

        Raises
        ------
        StateError
            The step has ended, or has begun without the worker, or the worker no longer takes part in it.
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
            raise StateError(f"worker {worker} no longer takes part in step {number}, because it has begun later steps")
        return step

    @staticmethod
    def _check_expected(step: _Step, worker: int) -> None:
        if worker not in step.expected:
            raise StateError(
                f"step {step.number} has begun without worker {worker}, which had not connected or was late then: take "
                "part from a later step on"
            )

    def _joined(self, worker: int, number: int) -> _Step:
        """Add a worker to step `number`, and return the step; begin the step if it has not begun."""
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
        """Create a step that expects all active and not yet connected workers; mark those that have abandoned it."""
        step = _Step(number, frozenset(w for w, state in self.state.items() if state in ("active", "expected")))
        for w, early in self._abandoned.items():
            nonfinite = early.pop(number, None)
            if nonfinite is not None and w in step.expected:
                self._go(step, w, _abandoned(w, number, nonfinite=nonfinite))
                step.left.add(w)
        return step

    def _go_on(self, worker: int, oldest: _Step) -> None:
        """End a worker's participation in its oldest step, so that it can take part in another one."""
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
        """Free keys that no worker will pull any more; end the step if no worker takes part in it any more."""
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
