"""Run the callbacks of collectives in separate threads, in the order in which the collectives were submitted."""

import threading
import time
from collections import deque
from collections.abc import Callable

Callback = Callable[[], object]

_TIMEOUT = 1.0  # seconds after which the next callbacks run, even if earlier ones have not returned


class Batch:
    """Callbacks of one collective.

    Parameters
    ----------
    owner : object
        Worker of the collective.
    callbacks : callable
        Function that runs the callbacks.
    """

    def __init__(self, owner: object, callbacks: Callback) -> None:
        self.owner, self._callbacks = owner, callbacks

    def run(self) -> None:
        """Run the callbacks in this thread."""
        running.batch = self
        try:
            self._callbacks()
        finally:
            running.batch = None


class _Running(threading.local):
    batch: Batch | None = None


running = _Running()  # thread-local: batch whose callbacks this thread runs, or None


class CallbackThreads:
    """Runs batches of callbacks one after the other.

    If a batch takes long, or waits for another collective, the next batches run in another thread.

    Parameters
    ----------
    name : str
        Name of the threads.
    on_idle : callable
        Called when no batch is queued or running any more.
    """

    def __init__(self, name: str, on_idle: Callable[[], object]) -> None:
        self._name, self._on_idle = name, on_idle
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._current: Batch | None = None  # running batch; None: the thread waits for a batch
        self._since = 0.0  # time at which the running batch was started
        self._thread = 0  # number of the current thread; threads with other numbers end after their batch
        self._alive = False  # True: the current thread is running
        self._stopped = False

    def run(self, batch: Batch) -> None:
        """Run a batch after the earlier ones."""
        with self._changed:
            self._batches.append(batch)
            start = not self._alive
            self._changed.notify_all()
        if start:
            self._start()

    @property
    def idle(self) -> bool:
        """True if no batch is queued or running."""
        with self._changed:
            return self._current is None and not self._batches

    def wait(self) -> None:
        """Wait until no batch is queued or running, for at most _TIMEOUT seconds."""
        end = time.monotonic() + _TIMEOUT
        with self._changed:
            while (self._current is not None or self._batches) and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)

    def release(self, batch: Batch) -> None:
        """Run the next batches in another thread, because `batch` waits or takes too long."""
        with self._changed:
            if self._current is not batch:
                return
            self._current, self._alive = None, False
            self._thread += 1
            start = bool(self._batches)
            self._changed.notify_all()
        if start:
            self._start()
        else:
            self._on_idle()

    def look(self) -> float | None:
        """Release a batch that takes too long. Return the seconds until the next call, None if none is needed."""
        with self._changed:
            batch = self._current
            if batch is None:
                return None
            left = self._since + _TIMEOUT - time.monotonic()
        if left <= 0:
            self.release(batch)
            return None
        return left

    def stop(self) -> None:
        """End the thread after all batches have run."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _start(self) -> None:
        with self._changed:
            if self._alive:
                return
            self._alive = True
            number = self._thread
        try:
            threading.Thread(target=self._serve, args=(number,), name=self._name, daemon=True).start()
        except RuntimeError:  # no thread can be started, for example during interpreter shutdown
            self._alive = False
            while self._batches:
                self._batches.popleft().run()

    def _serve(self, number: int) -> None:
        while True:
            with self._changed:
                while number == self._thread and not self._batches and not self._stopped:
                    self._changed.wait()
                if number != self._thread:
                    return
                if not self._batches:
                    self._alive = False
                    return
                batch = self._current = self._batches.popleft()
                self._since = time.monotonic()
            batch.run()
            with self._changed:
                if number != self._thread:
                    return
                self._current = None
                idle = not self._batches
                self._changed.notify_all()
            if idle:
                self._on_idle()
