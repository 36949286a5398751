"""Tasks of a worker: functions and coroutines, several of which may be in flight."""

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from codec import PeerError
from codec.torch.group.work import Work
from codec.torch.network.waits import FirstOf, Wait
from codec.torch.transport.streams import StreamOrder


class Task:
    """Function to run in a worker's thread. If it returns a coroutine, the task runs the coroutine, which may wait.

    Parameters
    ----------
    work : Work
        Handle in which the result is stored.
    function : callable
        Function that returns the result, or a coroutine with the result.
    order : StreamOrder
        Order of the task's work on GPU streams.
    alone : bool
        True: start only when every collective in flight waits for collectives that this rank has not started yet.
    of_callback : bool
        True: a callback has submitted the function.
    """

    def __init__(
        self, work: Work, function: Callable[[], Any], order: StreamOrder, *, alone: bool, of_callback: bool
    ) -> None:
        self.work, self.alone, self.of_callback = work, alone, of_callback
        self.wait: Wait | None = None  # event for which the coroutine waits
        self._function: Callable[[], Any] | None = function
        self._order = order
        self._coroutine: Coroutine[Wait, None, Any] | None = None
        self._since = 0.0  # start time of the wait

    @property
    def begun(self) -> bool:
        """True after the first :meth:`step`."""
        return self._function is None

    @property
    def waits_for_a_rank(self) -> bool:
        """False if the coroutine waits only for another coroutine of this rank."""
        return self.wait is None or self.wait.source is not None

    @property
    def waits_for_the_program(self) -> bool:
        """True if the coroutine waits for collectives that the program of this rank has not started yet."""
        return self.wait is not None and self.wait.of_program

    def step(self) -> bool:
        """Run the task until its coroutine waits or ends; return True if it has ended."""
        try:
            with self._order.step():
                try:
                    self.wait = self._go_on()
                except StopIteration as end:
                    result = end.value
                else:
                    self._since = time.monotonic()
                    return False
                finally:
                    if self.wait is None:
                        self._order.finish()
        except BaseException as e:
            self.work.set_error(e)
        else:
            self.work.set_result(result)
        return True

    def _go_on(self) -> Wait:
        """Resume the coroutine, and return the event for which it waits; at its end raise StopIteration(result)."""
        self.wait = None
        if self._function is not None:
            function, self._function = self._function, None
            result = function()
            if not isinstance(result, Coroutine):
                raise StopIteration(result)
            self._coroutine = cast(Coroutine[Wait, None, Any], result)
        assert self._coroutine is not None
        return self._coroutine.send(None)

    def deadline(self, timeout: float) -> float:
        """Return the time (monotonic clock) at which the wait times out; inf if there is no limit."""
        wait = self.wait
        if wait is None or wait.source is None:
            return float("inf")
        return max(self._since, wait.progress) + wait.timeouts * timeout

    def expire(self) -> None:
        """End the wait with a PeerError, because it has timed out."""
        if self.wait is not None:
            self.wait.complete(
                PeerError(f"rank {self.wait.source} is gone or does not answer within the timeout: make a new group")
            )

    def cancel(self, error: Exception) -> None:
        """End the task with an error, without running it on."""
        try:
            if self._coroutine is not None:
                with self._order.step():
                    self._coroutine.close()
                self._order.finish()
        finally:
            self.work.set_error(error)


class Together:
    """Awaitable that runs several coroutines concurrently, and returns the list of their results.

    If one coroutine fails, the others are closed.

    Parameters
    ----------
    coroutines : sequence of coroutine
        Coroutines, in the order in which they start.
    """

    def __init__(self, coroutines: Sequence[Coroutine[Wait, None, Any]]) -> None:
        self._coroutines = coroutines

    def __await__(self) -> Any:
        found: dict[int, Any] = {}
        waits: dict[int, Wait] = {}
        try:
            while len(found) < len(self._coroutines):
                for i, coroutine in enumerate(self._coroutines):
                    if i not in found and (i not in waits or waits[i].done):
                        try:
                            waits[i] = coroutine.send(None)
                        except StopIteration as end:
                            found[i] = end.value
                            waits.pop(i, None)
                if waits and not any(wait.done for wait in waits.values()):
                    yield FirstOf([*waits.values()])
        finally:
            for coroutine in self._coroutines:
                coroutine.close()
        return [found[i] for i in range(len(self._coroutines))]
