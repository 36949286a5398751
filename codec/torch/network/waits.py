"""Events that coroutines in a worker's thread await, and that any thread may complete."""

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

# A thread that waits without limit for a condition wakes up after these seconds, again and again. The kernel may
# deliver SIGINT to another thread, for example after the process was stopped. Python then runs its handler in the main
# thread when that thread next executes bytecode, but does not wake it.
WAKE_SECONDS = 1.0

_lock = threading.Lock()  # guards the completion of all waits; held for a few instructions


class Wait:
    """Event that a coroutine awaits. It completes once: with success, or with an error, which the coroutine raises.

    Attributes
    ----------
    done : bool
        True if the event has completed.
    source : int or None
        Rank for which the coroutine waits; None: no rank, and so no timeout.
    timeouts : int
        Longest wait, as a multiple of the group's timeout.
    of_program : bool
        True: the event completes when the program of this rank has started other collectives.
    """

    def __init__(self) -> None:
        self.done = False
        self.source: int | None = None
        self.timeouts = 1
        self.of_program = False
        self._error: BaseException | None = None
        self._wakes: list[Callable[[], Any]] = []

    @property
    def progress(self) -> float:
        """Time of the last activity of the awaited rank, from which the timeout counts."""
        return 0.0

    def complete(self, error: BaseException | None = None) -> None:
        """Complete the event, and wake the coroutine; do nothing if the event has completed already."""
        with _lock:
            if self.done:
                return
            self.done, self._error = True, error
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()

    def call_when_done(self, wake: Callable[[], Any]) -> bool:
        """Register `wake` to be called on completion. If the event has completed already, only return False."""
        with _lock:
            if not self.done:
                self._wakes.append(wake)
            return not self.done

    def __await__(self) -> Generator["Wait", None, None]:
        if not self.done:
            yield self
        if self._error is not None:
            raise self._error


class FirstOf(Wait):
    """Event that completes when the first of several events completes. One of them determines the timeout.

    If this event is completed with an error, the error is passed to the event that determines the timeout.

    Parameters
    ----------
    waits : sequence of Wait
        Events; at least one.
    """

    def __init__(self, waits: Sequence[Wait]) -> None:
        super().__init__()
        self._timed = next((w for w in waits if w.source is not None), waits[0])
        self.source, self.timeouts = self._timed.source, self._timed.timeouts
        for wait in waits:
            if not wait.call_when_done(self.complete):
                self.complete()

    @property
    def progress(self) -> float:
        """Time of the last activity of the awaited rank, from which the timeout counts."""
        return self._timed.progress

    def complete(self, error: BaseException | None = None) -> None:
        """Complete the event; pass an error to the event that determines the timeout."""
        if error is not None:
            self._timed.complete(error)
        super().complete()


class Turns:
    """Queue through which coroutines pass one at a time, in the order of their calls of :meth:`ask`."""

    def __init__(self) -> None:
        self._last: Wait | None = None

    def ask(self) -> tuple[Wait | None, Wait]:
        """Return the event at the end of the previous turn, or None, and the event to complete at this turn's end."""
        before, self._last = self._last, Wait()
        return before, self._last
