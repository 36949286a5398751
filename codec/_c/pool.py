"""Thread pool that processes ranges of blocks. C calls release the GIL, so Python threads run in parallel.

This module relies on details of CPython: its private locks, and the points at which the interpreter runs signal
handlers.
"""

import _thread
import ctypes
import itertools
import os
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from codec._c.library import ffi, lib
from codec.arguments import whole

MIN_NBYTES = 1 << 20  # minimum bytes of a tensor per thread; with fewer, waking a thread takes longer than it saves
RANGE_NBYTES = 1 << 20  # bytes of a tensor per range, if its results are to be read again from the second-level cache
MAX_THREADS = 1024  # maximum number of threads of a call
_OWN_NBYTES = 1 << 16  # bytes; more than cffi and other libraries allocate per thread

# CPython's private locks. While a thread waits for one of them, no signal handler runs; while it waits for a lock of
# `threading`, signal handlers run and may raise. CDLL, unlike PyDLL, releases the GIL during a call.
_c = ctypes.CDLL(None, handle=ctypes.pythonapi._handle)
_allocate, _acquire, _release = _c.PyThread_allocate_lock, _c.PyThread_acquire_lock, _c.PyThread_release_lock
_allocate.restype = ctypes.c_void_p
_release.restype = None
_free = ffi.cast("void (*)(void *)", ctypes.cast(_c.PyThread_free_lock, ctypes.c_void_p).value)


class _Helper:
    """One thread's share of a task list; any free thread of the pool runs it.

    `gate` is a lock that is held while the share runs. If the caller of :func:`run` acquires the gate first, the share
    never starts.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        handle = _allocate()
        if handle is None:
            raise MemoryError("cannot allocate a lock")
        self._lock = ffi.gc(ffi.cast("void *", handle), _free)  # not __del__, which a signal handler could interrupt
        self.gate = ctypes.c_void_p.from_param(handle)
        self._work = work
        self._opening = itertools.starmap(_release, [(self.gate,)])  # allocated here, so that releasing cannot fail

    def __call__(self) -> None:
        if _acquire(self.gate, 0):
            try:
                self._work()
            finally:
                any(self._opening)


_queue: "SimpleQueue[_Helper]" = SimpleQueue()
_workers: dict[int, int] = {}  # by number: identity of each pool thread; pool threads run until the process ends


def _reset() -> None:
    """Reset the pool in a forked child process, where the parent's threads do not exist."""
    global _queue
    _queue = SimpleQueue()
    _workers.clear()


os.register_at_fork(after_in_child=_reset)


def _serve(number: int, queue: "SimpleQueue[_Helper]") -> None:
    """Run helpers from the queue, forever, as the main function of a thread of the pool."""
    # glibc aborts the process if a thread's first call into a library cannot allocate thread-local memory. So first
    # allocate and free as much memory from Python, which raises MemoryError on failure. Then make the first call, which
    # reuses that memory.
    try:
        bytes(_OWN_NBYTES)
    except MemoryError:
        return  # this thread ends, and the pool has one thread fewer
    lib.codec_abi_version()
    me = _thread.get_ident()
    if _workers.setdefault(number, me) != me:
        return  # two concurrent calls of run() have started a thread with this number; only the other thread stays
    while True:
        try:
            queue.get()()
        except BaseException:
            continue  # ignored here, because run() raises the task's error in the calling thread


def _start(most: int) -> int:
    """Start threads until the pool has ``most``. Return the pool's number of threads, which is lower on failure."""
    for number in range(most):
        if number not in _workers:
            try:
                _thread.start_new_thread(_serve, (number, _queue))
            except (RuntimeError, MemoryError):  # a limit is reached, or the interpreter is shutting down
                return number
    return most


def default_threads() -> int:
    """Return CODEC_NUM_THREADS, else OMP_NUM_THREADS, else the number of CPUs that this process may use."""
    for name in ("CODEC_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isdecimal() and len(value) < 1000 and int(value) > 0:
            return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads(requested: Any) -> int:
    """Return the argument ``threads`` as an int; raise ArgumentError unless it is an integer of at least 1."""
    return whole("threads", requested, 1)


def choose_threads(requested: int | None, nbytes: int) -> int:
    """Return the number of threads for a tensor of ``nbytes``: `requested`, or the fastest number for the size."""
    if requested is not None:
        return min(requested, MAX_THREADS)
    if nbytes < 2 * MIN_NBYTES:
        return 1
    return min(default_threads(), nbytes // MIN_NBYTES, MAX_THREADS)


def ranges(nblocks: int, threads: int, nbytes: int = 0) -> list[tuple[int, int]]:
    """Divide blocks into (first, count) ranges, so that a slow thread does not delay the others.

    There are four ranges per thread, or more, so that none exceeds RANGE_NBYTES by much, if `nbytes`, the size of all
    blocks, is given.
    """
    pieces = min(nblocks, max(4 * threads, nbytes // RANGE_NBYTES) if threads > 1 else 1)
    cuts = [i * nblocks // pieces for i in range(pieces + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(cuts)]


def run(task: Callable[[int, int], Any], count: int, threads: int) -> list[Any]:
    """Return the results of task(0, w), ..., task(count - 1, w), run by this thread and up to ``threads - 1`` others.

    Parameters
    ----------
    task : callable
        Called with the task's number i and a thread number w < min(threads, count). Tasks with the same w never run at
        the same time, so w can select a buffer.
    count : int
        Number of tasks.
    threads : int
        Maximum number of threads.

    Returns
    -------
    list

    Raises
    ------
    Exception
        Error of the failed task with the lowest number, or an exception that a signal handler has raised in this
        thread. Tasks that have not started are dropped. When this function raises or returns, no task runs or will run.
    """
    if not count:
        return []
    results: list[Any] = [None] * count
    failed: list[Exception | None] = [None] * count
    todo = list(reversed(range(count)))
    numbers = list(reversed(range(min(threads, count))))

    def work() -> None:
        w = numbers.pop()
        while todo:
            try:
                i = todo.pop()
            except IndexError:  # another thread took the last task
                return
            try:
                results[i] = task(i, w)
            except Exception as e:
                failed[i] = e
                del todo[:]  # tasks start in order, so all tasks before this one have started and will end

    helpers = [_Helper(work) for _ in range(_start(len(numbers) - 1))]
    # A signal handler may raise an exception, such as KeyboardInterrupt. CPython runs handlers only at the start of a
    # function, after a call, and at backward jumps, so the earliest point after the first `put` is inside the `try`.
    # Therefore the `finally` clause always evaluates `all(waiting)`, which acquires the gates of all helpers: a single
    # call that allocates nothing, so that it can neither be interrupted nor fail. After it, every helper that has
    # started has ended, and no other helper can start.
    waiting = itertools.starmap(_acquire, [(helper.gate, 1) for helper in helpers])
    try:
        for helper in helpers:
            _queue.put(helper)
        work()
    except BaseException:
        del todo[:]
        raise
    finally:
        all(waiting)
    first = next((e for e in failed if e is not None), None)
    if first is None:
        return results
    try:
        raise first
    finally:
        del failed[:], first  # the traceback refers to this frame: break the cycle, which would keep buffers alive
