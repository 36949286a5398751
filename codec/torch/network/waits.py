"""Awaitable objects of coroutines that run in a worker's thread, and are completed by any thread."""

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

_lock = threading.Lock()  # guards the completion of all waits; held for a few instructions


class Wait:
    """Event that a coroutine awaits. It ends once: with success, or with an error that the coroutine gets.

    Attributes
    ----------
    done : bool
        True after the end.
    source : int or None
        Rank that the coroutine waits for; None: no rank, so that there is no timeout.
    timeouts : int
        Longest wait, in timeouts of the group.
    of_program : bool
        The wait ends when the program of this rank has begun other collectives.
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
        """Time at which the awaited rank has last done something; a timeout begins then."""
        return 0.0

    def complete(self, error: BaseException | None = None) -> None:
        """End the wait, and wake the coroutine; do nothing if the wait has ended."""
        with _lock:
            if self.done:
                return
            self.done, self._error = True, error
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()

    def call_when_done(self, wake: Callable[[], Any]) -> bool:
        """Have `wake` called at the end of the wait; return False, without a call, if the wait has ended."""
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
    """Wait that ends when the first of several waits ends. One of them determines the timeout.

    If this wait is completed with an error, the wait with the timeout raises it in the coroutine that awaits it.

    Parameters
    ----------
    waits : sequence of Wait
        At least one.
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
        """Time at which the rank of the timeout has last done something."""
        return self._timed.progress

    def complete(self, error: BaseException | None = None) -> None:
        """End the wait."""
        if error is not None:
            self._timed.complete(error)
        super().complete()


class Turns:
    """Queue that coroutines pass one at a time, in the order of their calls of :meth:`ask`."""

    def __init__(self) -> None:
        self._last: Wait | None = None

    def ask(self) -> tuple[Wait | None, Wait]:
        """Return the wait for the preceding turn's end, if any, and the wait to complete at the end of this turn."""
        before, self._last = self._last, Wait()
        return before, self._last
