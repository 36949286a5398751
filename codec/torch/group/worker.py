"""Thread that runs the collectives of a group in order, and threads that run their callbacks."""

import os
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from codec import ArgumentError, PeerError
from codec.torch.group.work import Callback, Work
from codec.torch.transport.streams import in_stream_order

_STOP_INTERVAL = 2.0  # seconds between two looks at the CPU time of a thread that is to end
_CALLBACK_TIMEOUT = 1.0  # seconds that the next collective waits for callbacks that begin no collective
_FORKED = "the group belongs to the process that forked this one: make a new group here, or start processes by spawn"

_Item = tuple[Work, Callable[[], Any]]


class _Batch:
    """Callbacks of one collective, and the collectives that they begin, which run before all others.

    Parameters
    ----------
    worker : Worker
        Runs the collectives.
    callbacks : callable
        Runs the callbacks.
    """

    def __init__(self, worker: "Worker", callbacks: Callback) -> None:
        self.worker = worker
        self.ended = False
        self._callbacks: Callback | None = callbacks
        self._begun: SimpleQueue[_Item | None] = SimpleQueue()
        self._open = True

    def run_callbacks(self) -> None:
        """Run the callbacks, in this thread."""
        callbacks, self._callbacks = self._callbacks, None
        _running.batch = self
        try:
            if callbacks is not None:
                callbacks()
        finally:
            _running.batch = None
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
        """Run collectives that callbacks begin, until all callbacks have returned or wait for something else.

        Returns
        -------
        list
            Items that were not run.
        """
        try:
            while (item := self._begun.get(timeout=_CALLBACK_TIMEOUT)) is not None:
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
    batch: _Batch | None = None  # batch whose callbacks this thread runs


_running = _Running()


class _CallbackThread:
    """Thread that runs batches of callbacks."""

    def __init__(self, name: str) -> None:
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def run(self, batch: _Batch) -> None:
        """Run the callbacks of a batch after those of earlier batches."""
        self._batches.put(batch)

    def stop(self) -> None:
        """End the thread after its batches."""
        self._batches.put(None)

    def _serve(self) -> None:
        while (batch := self._batches.get()) is not None:
            batch.run_callbacks()
            del batch


class Worker:
    """Thread that runs submitted functions in the order of submission.

    Gloo matches collectives by their order, so one thread begins all those of a group. Callbacks run in another
    thread, so that they can begin collectives and wait for them.

    Parameters
    ----------
    name : str
        Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self.lock = threading.Lock()  # guards registration of callbacks, and batches that end
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._name = name
        self._clock = 0
        self._callback_thread: _CallbackThread | None = None
        self.forked = False  # True in a child process, where the thread does not run
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        _workers.add(self)

    def submit(self, function: Callable[[], Any]) -> Work:
        """Run `function` after what was submitted before; within a callback, after the collective of that callback.

        On GPUs its work follows that of this thread, and is complete when `function` has returned.

        Raises
        ------
        PeerError
            This process was forked from the one that made the worker.
        """
        if self.forked:
            raise PeerError(_FORKED)
        function = in_stream_order(function)
        batch = _running.batch
        if batch is not None and batch.worker is not self:
            batch = None
        work = Work(self, batch)
        if batch is None or not batch.submit((work, function)):
            self._queue.put((work, function))
        return work

    def check_thread(self) -> None:
        """Check that this thread may wait for a collective.

        Raises
        ------
        PeerError
            This process was forked from the one that made the worker.
        ArgumentError
            This is the worker's own thread, which alone could run the collective.
        """
        if self.forked:
            raise PeerError(_FORKED)
        if threading.current_thread() is self._thread:
            raise ArgumentError("the thread that runs collectives cannot wait for one: begin it with async_op=True")

    def before_wait(self, batch: _Batch | None) -> None:
        """Let the worker go on, if this thread runs callbacks and is about to wait for a later collective.

        Parameters
        ----------
        batch : _Batch or None
            Callbacks that have begun the collective.
        """
        self.check_thread()
        mine = _running.batch
        if mine is not None and mine.worker is self and mine is not batch:
            mine.release()

    def stop(self) -> None:
        """End the thread, after what was submitted before.

        Waits while the thread computes: a process that ends while one of its threads is about to return from C++, or
        closes connections, is aborted. Does not wait while the thread waits for peers, who may not answer.
        """
        self._queue.put(None)
        if self.forked or threading.current_thread() is self._thread:
            return
        used = None
        while self._thread.is_alive() and used != (now := self._cpu_seconds()):
            used = now
            self._thread.join(_STOP_INTERVAL)

    def after_fork(self) -> None:
        """Fail what is in flight: a forked child has no thread to run it. For the child."""
        self.lock = threading.Lock()
        self.forked = True

    def _cpu_seconds(self) -> float:
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
        if self._callback_thread is not None:
            self._callback_thread.stop()

    def _run(self, item: _Item) -> None:
        """Run a collective, then the collectives that its callbacks begin."""
        work, function = item
        work.run(function)
        if (callbacks := work.take_callbacks()) is not None:
            self._run_callbacks(_Batch(self, callbacks))

    def _run_callbacks(self, batch: _Batch) -> None:
        # callbacks of collectives that the batch begins need a thread other than the one of the batch
        thread, self._callback_thread = self._callback_thread, None
        try:
            thread = thread or _CallbackThread(f"{self._name}, callbacks")
        except RuntimeError:  # no thread can be started, for instance because the interpreter ends
            batch.close()
            batch.run_callbacks()
            return
        thread.run(batch)
        for item in batch.serve(self._run):
            self._queue.put(item)
        if batch.ended and self._callback_thread is None:
            self._callback_thread = thread
        else:  # the thread ends when its callbacks have returned
            thread.stop()


_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


def _after_fork() -> None:
    for worker in list(_workers):
        worker.after_fork()


os.register_at_fork(after_in_child=_after_fork)
