"""Threads for block ranges. The C calls hold no lock, so plain threads are enough."""

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from codec.errors import SpecError

MIN_NBYTES = 1 << 20  # of tensor a thread: less is not worth waking it

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _forget() -> None:
    """In a forked child: its threads do not exist."""
    global _pool, _pool_size, _lock
    _lock = threading.Lock()
    _pool, _pool_size = None, 0


os.register_at_fork(after_in_child=_forget)


def default_threads() -> int:
    """CODEC_NUM_THREADS, else OMP_NUM_THREADS, else the CPUs that this process may use."""
    for name in ("CODEC_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_threads(asked: int | None, nbytes: int) -> int:
    """How many threads a tensor of nbytes gets: what was asked, or no more than pay."""
    if asked is not None:
        if asked < 1:
            raise SpecError(f"threads must be at least 1, got {asked}")
        return asked
    if nbytes < 2 * MIN_NBYTES:
        return 1
    return min(default_threads(), nbytes // MIN_NBYTES)


def _executor(size: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < size:
            # an earlier, smaller pool finishes what it has and is collected
            _pool, _pool_size = ThreadPoolExecutor(size, thread_name_prefix="codec"), size
        return _pool


def ranges(nblocks: int, threads: int) -> list[tuple[int, int]]:
    """Cut blocks into (first, count), a few a thread so that a slow thread does not hold up the others."""
    pieces = min(nblocks, 4 * threads)
    cuts = [i * nblocks // pieces for i in range(pieces + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(cuts)]


def run(task: Callable[[int], Any], count: int, threads: int) -> list[Any]:
    """Results of task(0), ..., task(count - 1), on `threads` threads, this one among them.

    All tasks have ended when this returns or raises; of several errors the first in order is raised.
    """
    results: list[Any] = [None] * count
    failed: list[BaseException | None] = [None] * count
    todo = iter(range(count))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                i = next(todo, None)
            if i is None:
                return
            try:
                results[i] = task(i)
            except BaseException as e:
                failed[i] = e

    others = [_executor(threads - 1).submit(work) for _ in range(threads - 1)]
    work()
    for f in others:
        f.result()
    for e in failed:
        if e is not None:
            raise e
    return results
