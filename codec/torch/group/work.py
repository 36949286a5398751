"""Handle of a collective in flight, like that of torch.distributed for ``async_op=True``."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from codec.torch.network.waits import WAKE_SECONDS

Callback = Callable[[], Any]


class Work(dist.Work):
    """Handle of a collective in flight: a ``torch.distributed.Work``.

    Collectives with ``async_op=True`` return one, and so does the backend `codec`.

    Parameters
    ----------
    before_wait : callable
        Called in a thread that begins to wait for the collective; raises an error if the thread must not wait.

    Examples
    --------
    >>> x = torch.ones(4)
    >>> work = codec.torch.all_reduce(x, async_op=True)
    >>> work.wait()
    True
    """

    def __init__(self, before_wait: Callable[[], object]) -> None:
        super().__init__()
        self.overlaps = False  # True: later collectives need not wait for the callbacks of this one
        self._before_wait = before_wait
        self._lock = threading.Lock()  # guards registration of callbacks
        self._done: Future[Any] = Future()
        self._over: torch.futures.Future[None] | None = None  # completed when callbacks may run
        self._future: torch.futures.Future[Any] | None = None
        self._callbacks_taken = False

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait until the collective has succeeded.

        Parameters
        ----------
        timeout : float or timedelta, optional
            Longest time to wait, in seconds; 0 or None: no limit.

        Returns
        -------
        bool
            True.

        Raises
        ------
        TimeoutError
            The collective is still in flight after `timeout`.
        CodecError
            The collective failed.
        """
        self._result(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
        return True

    def synchronize(self) -> None:
        """Wait until the collective has succeeded, as :meth:`wait` does."""
        self._result()

    def is_completed(self) -> bool:
        """Return True if the collective has succeeded or failed."""
        return self._done.done()

    def is_success(self) -> bool:
        """Return True if the collective has succeeded."""
        return self._done.done() and self._done.exception() is None

    def exception(self) -> Any:
        """Return the error if the collective has failed, otherwise None."""
        return self._done.exception() if self._done.done() else None

    def result(self) -> Any:
        """Wait until the collective has succeeded, and return its output tensors.

        Returns
        -------
        list of torch.Tensor
            Tensors that the collective has written.

        Raises
        ------
        CodecError
            The collective failed.
        """
        return self._result()

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future with the list of output tensors, or with the error as a RuntimeError that names its type.

        Callbacks (``then``, ``add_done_callback``) run one after the other, in the order in which the collectives were
        started, in a separate thread. If this collective and all earlier ones have completed, a new callback runs at
        once in the calling thread. Callbacks may start collectives and wait for them. So that the collectives of
        callbacks have the same order on all ranks, later collectives of the group start only when the callbacks have
        returned or wait for a collective, or after one second.

        Returns
        -------
        torch.futures.Future
            Future; each call returns the same object.
        """
        # The error must be raised in a callback: C++ code would treat an exception set from Python as a result.
        with self._lock:
            if self._over is None or self._future is None:
                self._over = torch.futures.Future()
                self._future = self._over.then(lambda _: self._result())
            complete_now = self._callbacks_taken and not self._over.done()
        if complete_now:
            self._over.set_result(None)
        return self._future

    @property
    def delays_others(self) -> bool:
        """True if later collectives must wait for the callbacks of this one, which may start collectives."""
        return self._over is not None and not self.overlaps

    def set_result(self, result: Any) -> None:
        """End the collective with a result, in the worker's thread."""
        self._done.set_result(result)

    def set_error(self, error: BaseException) -> None:
        """End the collective with an error, in the worker's thread."""
        self._done.set_exception(error)

    def take_callbacks(self) -> Callback | None:
        """Return a function that runs the callbacks of the future, or None without a future.

        Callbacks that are added later run at once.
        """
        with self._lock:
            self._callbacks_taken = True
            over = self._over
        return None if over is None else lambda: over.set_result(None)

    def _result(self, seconds: float | None = None) -> Any:
        if not self._done.done():
            self._before_wait()
        end = time.monotonic() + seconds if seconds else math.inf
        while not self._done.done() and (left := end - time.monotonic()) > 0:
            with suppress(TimeoutError):
                self._done.exception(min(left, WAKE_SECONDS))
        return self._done.result(0)


class JoinedWork(Work):
    """Handle of a collective for several callers, each of which has a handle of its own: see :meth:`new_member`.

    The result of the collective is a list with the result of each member.
    """

    def __init__(self, before_wait: Callable[[], object]) -> None:
        super().__init__(before_wait)
        self._members: list[Work] = []

    def new_member(self) -> Work:
        """Return the handle of the next member, before the collective ends."""
        member = _Member(self._before_wait, self._done, len(self._members))
        self._members.append(member)
        return member

    def take_callbacks(self) -> Callback | None:
        """Return a function that runs the callbacks of all members, in their order, or None without a future."""
        taken = [callbacks for member in self._members if (callbacks := member.take_callbacks()) is not None]
        return (lambda: [callbacks() for callbacks in taken]) if taken else None


class _Member(Work):
    """Handle of one member of a :class:`JoinedWork`, which completes with it."""

    def __init__(self, before_wait: Callable[[], object], done: Future[Any], index: int) -> None:
        super().__init__(before_wait)
        self._done, self._index = done, index

    def _result(self, seconds: float | None = None) -> Any:
        return super()._result(seconds)[self._index]
