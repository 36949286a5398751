"""Thread that runs the collectives of a group, several of which may be in flight."""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from codec import ArgumentError, PeerError
from codec.torch.group.callbacks import TIMEOUT, Batch, CallbackQueue, running
from codec.torch.group.tasks import Task
from codec.torch.group.work import Work
from codec.torch.network.endpoint import CLOSED
from codec.torch.transport.streams import StreamOrder

MOST_IN_FLIGHT = 64  # maximum number of collectives that wait for other ranks

_STOP_INTERVAL = 2.0  # seconds between two reads of the CPU time of a thread that should end
_WAKE, _END = "wake", "end"
_FORKED = (
    "the group was created by the parent process, before fork(): make a new group here, or start processes by spawn"
)

# Item of the queue: a new task or one whose wait has ended; callbacks that have run or wait for a collective; an event
# to set when no callbacks are left; _WAKE: a wait or callback may have timed out; _END: end the thread.
_Item = Task | Batch | threading.Event | str


class _Thread(threading.Thread):
    """Thread of a worker."""

    _clock = 0  # id of the CPU-time clock; 0: not started

    def run(self) -> None:
        """Run the target."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        super().run()

    def wait(self) -> None:
        """Wait for the end of the thread as long as it computes. It may wait for peers, which may never answer."""
        used = None
        while self.is_alive() and self is not threading.current_thread() and used != (now := self._cpu_seconds()):
            used = now
            self.join(_STOP_INTERVAL)

    def _cpu_seconds(self) -> float:
        """Return the CPU time that the thread has used, in seconds; 0 before its start and after its end."""
        try:
            return time.clock_gettime(self._clock) if self._clock else 0.0
        except OSError:
            return 0.0


class Worker:
    """Thread that starts submitted functions in the order of submission, and advances those that are coroutines.

    While a coroutine waits, others run, so that several collectives are in flight. They may end in any order. Their
    callbacks run in the order of submission, in other threads, and may start collectives and wait for them. Ranks
    number collectives in the order in which they begin, which must be the same on all ranks. So a collective begins
    after those that callbacks of earlier collectives start: it waits for earlier collectives whose future was
    requested, and for at most one second for their callbacks.

    Parameters
    ----------
    name : str
        Name of the thread.

    Attributes
    ----------
    most_in_flight : int
        Maximum number of coroutines that wait for other ranks.
    timeout : float
        Maximum time that a coroutine may wait for a rank, in seconds.
    on_timeout : callable
        Called when the wait of a coroutine has timed out.
    on_wait : callable
        Called as on_wait(seconds, source) when the thread has been idle while coroutines were in flight; `source` is
        the rank whose message ended the idle time.
    """

    def __init__(self, name: str) -> None:
        self.most_in_flight = MOST_IN_FLIGHT
        self.timeout = float("inf")
        self.on_timeout: Callable[[], Any] = lambda: None
        self.on_wait: Callable[[float, int | None], Any] = lambda seconds, source: None
        self.forked = False
        self._closed = False  # True after close(): no task is accepted
        self._submitting = threading.Lock()  # no task is queued after the _END of close()
        self._queue: SimpleQueue[_Item] = SimpleQueue()
        self._pending: deque[Task] = deque()  # tasks that have not begun
        self._of_callbacks: deque[Task] = deque()  # tasks submitted by callbacks that have not begun
        self._waiting: set[Task] = set()  # tasks whose coroutine waits
        self._in_order: deque[Work] = deque()  # handles whose callbacks have not run, in the order of submission
        self._next = 0  # number of the next collective
        self._callbacks = CallbackQueue(f"{name}, callbacks", self._queue.put)
        self._owner: weakref.ref[Any] | None = None
        self._thread = _Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        _workers.add(self)
        _threads.add(self._thread)

    def submit(self, function: Callable[[], Any]) -> Work:
        """Submit a function that is not a collective. It runs after all tasks submitted before, and before later ones.

        Exception: earlier coroutines that wait for collectives which this rank has not started may still be in flight.
        """
        return self._submit(function, alone=True)

    def submit_collective(self, function: Callable[[int], Any], work: Work | None = None) -> Work:
        """Submit function(number), which may return a coroutine; `number` is equal on all ranks.

        Return the handle of its result: `work`, or a new one.

        Collectives begin in the order of submission; those that callbacks submit begin before all others.

        On GPUs, the collective's work runs after the work that this thread has queued so far, and is complete when the
        collective has ended.

        Raises
        ------
        PeerError
            This process was forked from the process that created the worker; or the worker is closed.
        """
        return self._submit(lambda: function(self._new_number()), work, alone=False)

    def _submit(self, function: Callable[[], Any], work: Work | None = None, *, alone: bool) -> Work:
        if self.forked:
            raise PeerError(_FORKED)
        work, batch = work or Work(self.before_wait), running.batch
        of_callback = batch is not None and batch.owner is self and not alone
        task = Task(work, function, StreamOrder.of_this_thread(), alone=alone, of_callback=of_callback)
        with self._submitting:
            if self._closed:
                raise PeerError(CLOSED)
            self._queue.put(task)
        return work

    def _new_number(self) -> int:
        self._next += 1
        return self._next - 1

    def wait_for_callbacks(self) -> None:
        """Wait until the callbacks of all ended collectives have run, for at most one second."""
        if running.batch is None and not self.forked and not self._closed:
            over = threading.Event()
            self._queue.put(over)
            over.wait(TIMEOUT)

    def check_thread(self) -> None:
        """Check that this thread may wait for a collective.

        Raises
        ------
        PeerError
            This process was forked from the process that created the worker.
        ArgumentError
            The calling thread is the worker itself, which could not run the collective while it waits.
        """
        if self.forked:
            raise PeerError(_FORKED)
        if threading.current_thread() is self._thread:
            raise ArgumentError(
                "the thread that runs collectives, such as in a callback, cannot wait for a collective: pass "
                "async_op=True"
            )

    def before_wait(self) -> None:
        """Call this before waiting for a collective. If this thread runs callbacks, another thread runs later ones."""
        self.check_thread()
        batch = running.batch
        if batch is not None and batch.owner is self:
            self._queue.put(batch)

    def end_with(self, owner: object) -> None:
        """End the thread after `owner` is freed, and all tasks submitted before.

        The garbage collector may free the owner in any thread, also inside of a call that Ctrl-C should interrupt, and
        Python drops a KeyboardInterrupt in a finalizer. So the callback is one call of C code, which does not wait.
        """
        put: Callable[..., Any] = self._queue.put  # ignores the weak reference, which it receives as `block`
        self._owner = weakref.ref(owner, partial(put, _END))

    def end(self) -> None:
        """End the thread after all tasks submitted before, without waiting for its end."""
        self._queue.put(_END)

    def close(self) -> None:
        """Make tasks that have not ended, and later ones, fail with PeerError; end the thread, and wait for its end.

        Like :meth:`_Thread.wait`, this waits only while the thread computes.
        """
        with self._submitting:
            self._closed = True
            self._queue.put(_END)
        self._thread.wait()

    def after_fork(self) -> None:
        """In a forked child, mark this worker as unusable, since the child has no thread to run collectives."""
        self.forked = True

    # The thread

    def _serve(self) -> None:
        while self._turn(self._next_item()):
            pass
        if self._closed:
            for task in (*self._waiting, *self._pending, *self._of_callbacks):
                task.cancel(PeerError(CLOSED))
                self._queue_callbacks(task.work)
        self._callbacks.stop()
        self.on_timeout = lambda: None  # frees the channel in this thread, which Ctrl-C does not interrupt

    def _turn(self, item: _Item) -> bool:
        """Handle an item of the queue, and begin the tasks that may begin; return False for _END."""
        if item is _END:
            return False
        if isinstance(item, Task):
            if item.begun:
                self._waiting.discard(item)
                self._advance(item)
            elif item.of_callback:
                self._of_callbacks.append(item)
            else:
                self._pending.append(item)
                self._in_order.append(item.work)
        elif isinstance(item, Batch):  # collectives that its callbacks have submitted precede it in the queue
            self._callbacks.release(item)
        elif isinstance(item, threading.Event):
            self._callbacks.watch(item)
        while (task := self._next_to_begin()) is not None:
            self._advance(task)
        return True

    def _next_to_begin(self) -> Task | None:
        in_flight = sum(t.waits_for_a_rank for t in self._waiting)
        if in_flight >= self.most_in_flight:
            return None
        if self._of_callbacks:
            return self._of_callbacks.popleft()
        if not self._pending or not self._callbacks.idle:
            return None
        if self._pending[0].alone and not all(t.waits_for_the_program for t in self._waiting):
            return None
        first = self._pending[0].work
        for work in self._in_order:
            if work is first:
                return self._pending.popleft()
            if work.delays_others and not work.is_completed():
                return None
        return self._pending.popleft()

    def _advance(self, task: Task) -> None:
        if task.step():
            self._queue_callbacks(task.work)
            return
        self._waiting.add(task)
        wait = task.wait
        if wait is None or not wait.call_when_done(lambda: self._queue.put(task)):
            self._queue.put(task)

    def _next_item(self) -> _Item:
        """Wait for the next item of the queue; expire waits that have timed out."""
        try:
            return self._queue.get_nowait()
        except Empty:
            pass
        begin = time.perf_counter()
        try:
            found = self._queue.get(timeout=self._until_timeout())
        except Empty:
            self._expire()
            return _WAKE
        if self._waiting:
            wait = found.wait if isinstance(found, Task) else None
            self.on_wait(time.perf_counter() - begin, None if wait is None else wait.source)
        return found

    def _until_timeout(self) -> float | None:
        deadline = min((t.deadline(self.timeout) for t in self._waiting), default=float("inf"))
        left = min(min(deadline, self._callbacks.deadline) - time.monotonic(), threading.TIMEOUT_MAX)
        return None if left == threading.TIMEOUT_MAX else max(0.0, left)

    def _expire(self) -> None:
        now = time.monotonic()
        late = [t for t in self._waiting if t.deadline(self.timeout) <= now]
        if late:
            for task in late:
                task.expire()
            self.on_timeout()
        self._callbacks.expire()

    def _queue_callbacks(self, ended: Work) -> None:
        """Queue the callbacks of ended collectives, in the order of submission."""
        works = [] if ended in self._in_order else [ended]
        while self._in_order and self._in_order[0].is_completed():
            works.append(self._in_order.popleft())
        for work in works:
            if (callbacks := work.take_callbacks()) is not None:
                self._callbacks.add(Batch(self, callbacks))


_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()
_threads: "weakref.WeakSet[_Thread]" = weakref.WeakSet()  # threads of all workers, even after the worker was freed


def _stop_all() -> None:
    """End all threads, since a process that exits while a thread returns from C++ code is aborted."""
    for worker in list(_workers):
        worker.end()
    for thread in list(_threads):
        thread.wait()


weakref.finalize(Worker, _stop_all)  # not by atexit: runs after all later finalizers, such as those that abort NCCL


def _after_fork() -> None:
    for worker in list(_workers):
        worker.after_fork()


os.register_at_fork(after_in_child=_after_fork)
