"""Callbacks of collectives, which run in threads of their own, in the order in which the collectives were submitted."""

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

TIMEOUT = 1.0  # seconds for which later callbacks and collectives wait for a callback


class Batch:
    """Callbacks of one collective.

    Parameters
    ----------
    owner : object
        Worker of the collective.
    function : callable
        Function that runs the callbacks.
    """

    def __init__(self, owner: object, function: Callable[[], object]) -> None:
        self.owner = owner
        self.begun = False  # True: a thread runs the callbacks, or has run them
        self.over = False  # True: the callbacks have run
        self._function = function

    def run(self) -> None:
        """Run the callbacks in this thread."""
        running.batch, self.begun = self, True
        try:
            self._function()
        finally:
            running.batch, self.over = None, True


class _Running(threading.local):
    batch: Batch | None = None


running = _Running()  # thread-local: batch whose callbacks this thread runs, or None


class CallbackQueue:
    """Batches that run one after the other. Only the thread of the worker uses this object.

    If a batch waits for another collective, as PyTorch's PowerSGD hook does, or
    takes long, later batches run in a new thread.

    Parameters
    ----------
    name : str
        Name of the threads.
    on_end : callable
        Called as on_end(batch), in the thread of the batch, when it has run. The worker then calls :meth:`release`.
    """

    def __init__(self, name: str, on_end: Callable[[Batch], object]) -> None:
        self.deadline = float("inf")  # time (monotonic clock) at which :meth:`expire` releases the current batch
        self._name, self._on_end = name, on_end
        self._batches: deque[Batch] = deque()  # batches that have not been started
        self._current: Batch | None = None  # running batch, for which later ones wait
        self._thread: SimpleQueue[Batch | None] | None = None  # queue of the current thread; None: no thread
        self._watchers: list[threading.Event] = []  # set when no batch is left

    @property
    def idle(self) -> bool:
        """True if later collectives need not wait for a batch."""
        return self._current is None and not self._batches

    def add(self, batch: Batch) -> None:
        """Run a batch after the earlier ones."""
        self._batches.append(batch)
        self._start_next()

    def watch(self, event: threading.Event) -> None:
        """Set an event when no batch is left."""
        self._watchers.append(event)
        self._start_next()

    def release(self, batch: Batch | None) -> None:
        """Let later batches run, because `batch` has run, waits for a collective, or takes too long."""
        if batch is None or batch is not self._current:
            return
        if not batch.over and self._thread is not None:
            self._thread.put(None)
            self._thread = None
        self._current, self.deadline = None, float("inf")
        self._start_next()

    def expire(self) -> None:
        """Release a batch that takes too long, or give it more time if its thread has not begun it.

        A later batch must not overtake a batch on a busy machine: callbacks start collectives in the same order on all
        ranks.
        """
        if self._current is None or time.monotonic() < self.deadline:
            return
        if self._current.begun:
            self.release(self._current)
        else:
            self.deadline = time.monotonic() + TIMEOUT

    def stop(self) -> None:
        """Run all batches that are left, and end the thread."""
        while self._batches:
            self._run(self._batches.popleft())
        if self._thread is not None:
            self._thread.put(None)

    def _start_next(self) -> None:
        if self._current is None and self._batches:
            self._current, self.deadline = self._batches.popleft(), time.monotonic() + TIMEOUT
            self._run(self._current)
        if self.idle:
            for event in self._watchers:
                event.set()
            self._watchers.clear()

    def _run(self, batch: Batch) -> None:
        if self._thread is None:
            self._thread = SimpleQueue()
            try:
                threading.Thread(target=self._serve, args=(self._thread,), name=self._name, daemon=True).start()
            except RuntimeError:  # no thread can be started, for example during interpreter shutdown
                self._thread = None
                batch.run()
                self._on_end(batch)
                return
        self._thread.put(batch)

    def _serve(self, batches: SimpleQueue[Batch | None]) -> None:
        while (batch := batches.get()) is not None:
            try:
                batch.run()
            finally:
                self._on_end(batch)
