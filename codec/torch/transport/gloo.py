"""Connections between the ranks of a group, and their timeouts."""

import os
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from codec import PeerError
from codec.arguments import LONGEST_TIMEOUT, SHORTEST_TIMEOUT

T = TypeVar("T")
Timeout = float | timedelta  # float: seconds

_UNUSED_TAG = 2  # of messages that no rank sends (docs/protocol.md, section 2)


def timeout_of(group: Any) -> timedelta:
    """Return the timeout of a group, limited to the range that Gloo can wait for."""
    timeout = dist.distributed_c10d.default_pg_timeout
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout = options._timeout
            break
    return min(max(timeout, SHORTEST_TIMEOUT), LONGEST_TIMEOUT)


@contextmanager
def batch_scheduling() -> Generator[None]:
    """Give threads that this thread starts the scheduling policy SCHED_BATCH, so that they do not preempt others.

    Gloo's thread spins while another thread holds the lock of a connection. If it preempts the holder, both lose
    milliseconds, until its time slice is over.
    """
    changed, parameters = False, os.sched_param(0)
    try:
        with suppress(OSError):  # where setting the policy is forbidden, threads keep the default one
            changed = os.sched_getscheduler(0) == os.SCHED_OTHER
            if changed:
                os.sched_setscheduler(0, os.SCHED_BATCH, parameters)
        yield
    finally:
        if changed:
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, parameters)


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of a call that uses a store, in a thread that is given up after `seconds`.

    Stores of torch wait for the answers of their host without a limit. A frozen host would keep this rank waiting for
    ever.

    Raises
    ------
    PeerError
        The call has not returned in time. Its thread ends when the host answers, or breaks the connection.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as e:
            done.set_exception(e)

    threading.Thread(target=run, name="codec, store", daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError:
        raise PeerError(f"the host of the group's store does not answer within {seconds:g} s") from None


def own_store(group: Any, prefix: str, seconds: float) -> PrefixStore:
    """Return the store of a group, with a connection of its own.

    Over a shared connection, a thread that waits for a key would block all others from the store, also a thread whose
    group a peer of this rank must make first.

    Raises
    ------
    PeerError
        The host of the store does not answer within `seconds`.
    """
    return within(seconds, lambda: PrefixStore(prefix, group.get_group_store().clone()))


def connect(group: Any, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Connect the ranks of a group for one channel.

    Raises
    ------
    PeerError
        A rank cannot be reached in time.
    """
    seconds = timeout.total_seconds()

    def make() -> dist.ProcessGroupGloo:
        with batch_scheduling():
            return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)

    try:
        store = own_store(group, "codec", seconds)
        return within(2 * seconds, make)  # Gloo waits for each rank in turn, and ends a wait after the timeout
    except RuntimeError as e:
        raise PeerError(f"the ranks of the group cannot be connected: {e}") from e


def close_connections(pg: Any, others: Iterable[int]) -> None:
    """Close the connections of a group to `others`, also while handles of messages refer to it.

    Gloo has no call for that: `abort` and `shutdown` leave connections open, and so does the end of the group until the
    last handle is gone, which may be in the traceback of an error. But Gloo closes all connections of a group when a
    wait for a message times out.
    """
    for o in others:
        with suppress(RuntimeError):
            pg.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], o, _UNUSED_TAG).wait(SHORTEST_TIMEOUT)
