"""A thread that runs the collectives of a group in order, and threads that run their callbacks."""

import logging
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch

from codec import ArgumentError, PeerError

_log = logging.getLogger("codec.torch")
_PATIENCE = 2.0  # seconds that stop() waits for a thread which does not compute
_HOLD = 1.0  # seconds that the next collective waits for callbacks which do not begin one
_FORKED = "the group belongs to the process that forked this one: make a new group here, or start processes by spawn"

Callback = Callable[[], Any]


class Pending:
    """A collective in the background."""

    def __init__(self, worker: "Worker", done: "Future[Any]", batch: "_Batch | None") -> None:
        self._worker, self._done, self._batch = worker, done, batch
        self._callbacks: list[Callback] | None = []  # None once they were handed over

    def wait(self, timeout: float | timedelta | None = None) -> Any:
        """Wait for the collective and return its result.

        Parameters
        ----------
        timeout : float or timedelta, optional
            Seconds to wait; without a limit if left out.

        Raises
        ------
        TimeoutError
            The collective is still in flight after `timeout`.
        CodecError
            The collective failed.
        """
        if not self._done.done():
            self._worker.before_wait(self._batch)
        return self._done.result(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)

    def is_completed(self) -> bool:
        """Return True once the collective has succeeded or failed."""
        return self._done.done()

    def when_over(self, then: Callback) -> None:
        """Call `then` once the collective has succeeded or failed.

        Callbacks of a collective run one after the other in a thread of their own, or at once in this thread if the
        collective is over. Collectives that a callback begins come before all that were begun elsewhere and wait; so
        ranks whose callbacks are alike begin the same collectives in the same order. A callback that waits for
        anything else delays the next collective by at most a second. Exceptions of `then` are logged.
        """
        with self._worker.lock:
            if self._callbacks is not None:
                self._callbacks.append(then)
                return
        _call(then)

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a torch future with the collective's result or error. Its callbacks run as :meth:`when_over` says."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def pass_on() -> None:
            error = self._done.exception()
            if error is None:
                future.set_result(self._done.result())
            else:
                future.set_exception(error)

        self.when_over(pass_on)
        return future

    def run(self, work: Callable[[], Any]) -> list[Callback]:
        """Run the collective; return the callbacks to call now. For the worker's thread."""
        try:
            result = work()
        except BaseException as e:
            let_go(e)
            self._done.set_exception(e)
        else:
            self._done.set_result(result)
        return self.hand_over()

    def hand_over(self) -> list[Callback]:
        """Return the callbacks registered so far; later ones are called when they are registered."""
        with self._worker.lock:
            callbacks, self._callbacks = self._callbacks, None
        return callbacks or []


_Item = tuple[Pending, Callable[[], Any]]


class _Batch:
    """Callbacks of one collective, and the collectives that they begin, which come before all others.

    Parameters
    ----------
    worker : Worker
        Runs the collectives.
    callbacks : list of callable
        Called one after the other.
    """

    def __init__(self, worker: "Worker", callbacks: list[Callback]) -> None:
        self.worker = worker
        self.ended = False
        self._callbacks = callbacks
        self._begun: SimpleQueue[_Item | None] = SimpleQueue()
        self._open = True

    def call(self) -> None:
        """Call the callbacks, in this thread."""
        _running.batch = self
        try:
            for then in self._callbacks:
                _call(then)
        finally:
            _running.batch = None
            self._callbacks.clear()
            self.ended = True
            self.release()

    def submit(self, item: _Item) -> bool:
        """Have the worker run `item` next; return False if the worker does not wait for this batch any more."""
        with self.worker.lock:
            if self._open:
                self._begun.put(item)
            return self._open

    def release(self) -> None:
        """Let the worker go on with other collectives."""
        self._begun.put(None)

    def serve(self, run: Callable[[_Item], None]) -> list[_Item]:
        """Run what callbacks begin, until all have returned or wait for something else; return what was not run."""
        try:
            while (item := self._begun.get(timeout=_HOLD)) is not None:
                run(item)
        except Empty:
            pass
        return self.close()

    def close(self) -> list[_Item]:
        """Take no more collectives; return those that were not run."""
        left: list[_Item] = []
        with self.worker.lock:
            self._open = False
            while not self._begun.empty():
                if (item := self._begun.get()) is not None:
                    left.append(item)
        return left


class _Running(threading.local):
    batch: _Batch | None = None  # whose callbacks this thread runs


_running = _Running()


class _Helper:
    """A thread that runs batches of callbacks."""

    def __init__(self, name: str) -> None:
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def run(self, batch: _Batch) -> None:
        """Run the callbacks of a batch after those of earlier ones."""
        self._batches.put(batch)

    def stop(self) -> None:
        """End the thread after its batches."""
        self._batches.put(None)

    def _serve(self) -> None:
        while (batch := self._batches.get()) is not None:
            batch.call()
            del batch


class Worker:
    """A thread that runs what is submitted, in that order.

    Gloo matches collectives by their order, so one thread begins all those of a group. Callbacks run in another
    thread, so that they can begin collectives and wait for them.

    Parameters
    ----------
    name : str
        Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self.lock = threading.Lock()  # guards lists of callbacks, and batches that end
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._name = name
        self._clock = 0
        self._helper: _Helper | None = None
        self.forked = False  # True in a child process, where the thread does not run
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        _workers.add(self)

    def submit(self, work: Callable[[], Any]) -> Pending:
        """Run `work` after what was submitted before; inside a callback, after the collective of that callback.

        Raises
        ------
        PeerError
            This process was forked from the one that made the worker.
        """
        if self.forked:
            raise PeerError(_FORKED)
        batch = _running.batch
        if batch is not None and batch.worker is not self:
            batch = None
        pending = Pending(self, Future(), batch)
        if batch is None or not batch.submit((pending, work)):
            self._queue.put((pending, work))
        return pending

    def check_thread(self) -> None:
        """Check that this thread may wait for a collective.

        Raises
        ------
        PeerError
            This process was forked from the one that made the worker.
        ArgumentError
            Only this thread could run the collective.
        """
        if self.forked:
            raise PeerError(_FORKED)
        if threading.current_thread() is self._thread:
            raise ArgumentError("the thread that runs collectives cannot wait for one: begin it with async_op=True")

    def before_wait(self, batch: _Batch | None) -> None:
        """Let callbacks go on whose thread is about to wait for a collective that was submitted within `batch`."""
        self.check_thread()
        mine = _running.batch
        if mine is not None and mine.worker is self and mine is not batch:
            mine.release()  # the collective may be one that comes after the callbacks

    def stop(self) -> None:
        """End the thread, after what was submitted before.

        Waits while the thread computes: a process that ends while one of its threads is about to return from C++, or
        closes connections, is aborted. Does not wait while the thread waits for peers, who may not answer.
        """
        self._queue.put(None)
        if self.forked or threading.current_thread() is self._thread:
            return
        used = None
        while self._thread.is_alive() and used != (now := self._seconds()):
            used = now
            self._thread.join(_PATIENCE)

    def after_fork(self) -> None:
        """Fail what is in flight: a forked child has no thread to run it. For the child."""
        self.lock = threading.Lock()
        self.forked = True

    def _seconds(self) -> float:
        """Return the CPU time that the thread has used; 0 before it has begun and after it has ended."""
        try:
            return time.clock_gettime(self._clock) if self._clock else 0.0
        except OSError:
            return 0.0

    def _serve(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        while (item := self._queue.get()) is not None:
            self._run(item)
            del item
        if self._helper is not None:
            self._helper.stop()

    def _run(self, item: _Item) -> None:
        """Run a collective, then what its callbacks begin."""
        pending, work = item
        if callbacks := pending.run(work):
            self._run_callbacks(_Batch(self, callbacks))

    def _run_callbacks(self, batch: _Batch) -> None:
        helper, self._helper = self._helper, None  # callbacks of what is begun meanwhile need another one
        try:
            helper = helper or _Helper(f"{self._name}, callbacks")
        except RuntimeError:  # no thread can be started: the interpreter ends, for instance
            batch.close()
            batch.call()
            return
        helper.run(batch)
        for item in batch.serve(self._run):
            self._queue.put(item)
        if batch.ended and self._helper is None:
            self._helper = helper
        else:  # the thread ends when its callbacks have returned
            helper.stop()


_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


def _after_fork() -> None:
    for worker in list(_workers):
        worker.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _call(then: Callback) -> None:
    """Call a callback; log what it raises."""
    try:
        then()
    except BaseException:
        _log.exception("a callback of a collective raised")


def let_go(error: BaseException | None) -> None:
    """Clear the frames of an error's traceback: messages in flight keep connections open, whose other ends wait.

    Frames keep their functions, so no closure may hold a message.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
