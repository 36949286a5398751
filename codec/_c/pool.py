"""Threads for block ranges. The C calls hold no lock, so plain threads are enough."""

import _thread
import ctypes
import itertools
import os
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from codec._c.library import ffi, lib
from codec.arguments import whole

MIN_NBYTES = 1 << 20  # of tensor a thread: less is not worth waking it
MAX_THREADS = 1024  # more would only wait for each other
_OWN_NBYTES = 1 << 16  # more than cffi and others have for a thread

# CPython's own locks. Unlike those of `threading` they are waited for without running signal handlers, so that nothing
# can be raised; by CDLL, not PyDLL, so that other threads run meanwhile.
_c = ctypes.CDLL(None, handle=ctypes.pythonapi._handle)
_allocate, _acquire, _release = _c.PyThread_allocate_lock, _c.PyThread_acquire_lock, _c.PyThread_release_lock
_allocate.restype = ctypes.c_void_p
_release.restype = None
_free = ffi.cast("void (*)(void *)", ctypes.cast(_c.PyThread_free_lock, ctypes.c_void_p).value)


class _Helper:
    """A share in some work, taken by whatever thread of the pool is free.

    Its gate is shut while it works. Whoever shuts the gate before keeps it from ever beginning.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        handle = _allocate()
        if handle is None:
            raise MemoryError("cannot allocate a lock")
        self._lock = ffi.gc(ffi.cast("void *", handle), _free)  # no __del__: it could be interrupted
        self.gate = ctypes.c_void_p.from_param(handle)
        self._work = work
        self._opening = itertools.starmap(_release, [(self.gate,)])  # made beforehand: it must not fail for memory

    def __call__(self) -> None:
        if _acquire(self.gate, 0):
            try:
                self._work()
            finally:
                any(self._opening)


_queue: "SimpleQueue[_Helper]" = SimpleQueue()
_workers: dict[int, int] = {}  # identities of the pool's threads, which never end


def _forget() -> None:
    """In a forked child: its threads do not exist."""
    global _queue
    _queue = SimpleQueue()
    _workers.clear()


os.register_at_fork(after_in_child=_forget)


def _serve(number: int, queue: "SimpleQueue[_Helper]") -> None:
    """What a thread of the pool does."""
    # glibc ends the process where a thread's first call into a library finds no memory for what is the thread's own.
    # So memory is asked for in a way that can be refused, and the call takes what that has left.
    try:
        bytes(_OWN_NBYTES)
    except MemoryError:
        return  # as if it had not been started
    lib.codec_abi_version()
    me = _thread.get_ident()
    if _workers.setdefault(number, me) != me:
        return  # two calls have started it at once
    while True:
        try:
            queue.get()()
        except BaseException:
            continue  # it is for those who wait for the work to tell


def _start(most: int) -> int:
    """Start threads, if there are not enough; how many there are, `most` at most."""
    for number in range(most):
        if number not in _workers:
            try:
                _thread.start_new_thread(_serve, (number, _queue))
            except (RuntimeError, MemoryError):  # no more are to be had, or the interpreter is about to end
                return number
    return most


def default_threads() -> int:
    """CODEC_NUM_THREADS, else OMP_NUM_THREADS, else the CPUs that this process may use."""
    for name in ("CODEC_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isdecimal() and len(value) < 1000 and int(value) > 0:
            return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads(asked: Any) -> int:
    """What a caller asks for, as an int."""
    return whole("threads", asked, 1)


def choose_threads(asked: int | None, nbytes: int) -> int:
    """How many threads a tensor of nbytes gets: what was asked, or no more than pay."""
    if asked is not None:
        return min(asked, MAX_THREADS)
    if nbytes < 2 * MIN_NBYTES:
        return 1
    return min(default_threads(), nbytes // MIN_NBYTES, MAX_THREADS)


def ranges(nblocks: int, threads: int) -> list[tuple[int, int]]:
    """Cut blocks into (first, count), a few a thread so that a slow thread does not hold up the others."""
    pieces = min(nblocks, 4 * threads if threads > 1 else 1)
    cuts = [i * nblocks // pieces for i in range(pieces + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(cuts)]


def run(task: Callable[[int, int], Any], count: int, threads: int) -> list[Any]:
    """Results of task(0, w), ..., task(count - 1, w), on `threads` threads, this one among them, or fewer.

    w < min(threads, count) is the number of the thread, for buffers of its own: no two tasks with one w run at once.

    When this returns or raises, whatever it raises, no task is running any more and none will begin. Of several errors
    the first in order is raised; an interrupt of this thread comes before all of them, and what was not begun is left.
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
            except IndexError:  # another thread was faster
                return
            try:
                results[i] = task(i, w)
            except Exception as e:
                failed[i] = e
                del todo[:]  # tasks are begun in order: those before this one will end

    helpers = [_Helper(work) for _ in range(_start(len(numbers) - 1))]
    # CPython runs signal handlers where a function begins, where a call has ended and where it jumps back: so there is
    # no moment between the first `put` and `all` at which an exception would not lead to `all`. That is one call, and
    # when it ends all gates are shut: helpers that had begun have ended, and others will not begin. It can neither be
    # interrupted nor fail, for it allocates nothing.
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
        del failed[:], first  # or its traceback would hold itself, and all that the tasks hold
