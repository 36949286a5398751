"""Connections between the ranks of a group, and their timeouts."""

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from codec import PeerError
from codec.arguments import LONGEST_TIMEOUT, SHORTEST_TIMEOUT

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


def connect(group: Any, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Connect the ranks of a group for one channel.

    The store gets a connection of its own. Over a shared one, a thread that waits for a key would block all others from
    the store, also a thread whose group a peer of this rank must make first.

    Raises
    ------
    PeerError
        A rank cannot be reached in time.
    """
    try:
        store = PrefixStore("codec", group.get_group_store().clone())
        with batch_scheduling():
            return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
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
            pg.recv([torch.empty(1, dtype=torch.uint8)], o, _UNUSED_TAG).wait(SHORTEST_TIMEOUT)
