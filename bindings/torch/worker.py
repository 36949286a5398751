"""Collectives one after the other, in a thread of their own."""

import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch

_PATIENCE = 2.0  # seconds


class Pending:
    """A collective that goes on in the background."""

    def __init__(self, done: "Future[Any]") -> None:
        self._done = done

    def wait(self, timeout: float | timedelta | None = None) -> Any:
        """Its result, once it is there; or its error; or, after so many seconds, TimeoutError."""
        return self._done.result(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._done.done()

    def when_over(self, then: Callable[[], None]) -> None:
        """Call this once it is over, in the thread of the collectives, or now if it is."""
        self._done.add_done_callback(lambda _: then())

    def get_future(self) -> "torch.futures.Future[Any]":
        """The same as a future of torch's, as hooks return them."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def pass_on(done: "Future[Any]") -> None:
            error = done.exception()
            if error is None:
                future.set_result(done.result())
            else:
                future.set_exception(error)

        self._done.add_done_callback(pass_on)
        return future


class Worker:
    """A thread that does what it is given in the order in which it came.

    Gloo matches collectives by their order, so two threads must not begin them on one group; and a collective that is
    begun inside a future's callback may wait for the thread that it runs on.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._clock = 0
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> Pending:
        """Do this after what was submitted before."""
        done: Future[Any] = Future()
        self._queue.put((done, work))
        return Pending(done)

    def stop(self) -> None:
        """End the thread, after what was submitted before.

        Wait for that while it computes: a process that ends while one of its threads is about to return from C++, or
        closes connections, is aborted. Not while it waits for peers, who may not answer.
        """
        self._queue.put(None)
        if threading.current_thread() is self._thread:
            return
        used = None
        while self._thread.is_alive() and used != (now := self._seconds()):
            used = now
            self._thread.join(_PATIENCE)

    def _seconds(self) -> float:
        """What the thread has computed so far; 0 before and after."""
        try:
            return time.clock_gettime(self._clock) if self._clock else 0.0
        except OSError:
            return 0.0

    def _serve(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        while (item := self._queue.get()) is not None:
            done, work = item
            try:
                done.set_result(work())
            except BaseException as e:
                let_go(e)
                done.set_exception(e)
            del item, done, work


def let_go(error: BaseException | None) -> None:
    """Forget what an error's frames hold: messages under way keep connections open, whose other ends wait for them.

    Frames keep their functions, so no closure may hold a message.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
