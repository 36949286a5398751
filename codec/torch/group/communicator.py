"""Communicator of a group: channel and worker thread; and functions that start collectives."""

import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from codec import ArgumentError, CallOptions, PeerError
from codec._options import settings_of
from codec._security import NONE, Security
from codec.arguments import Timeout, check_timeout
from codec.torch._compat import rank_not_in_group, warn_not_in_group
from codec.torch.group.autotune import RawFallback
from codec.torch.group.levels import NON_MEMBER, LeveledGroup, all_ranks, group_of
from codec.torch.group.work import Work
from codec.torch.group.worker import Worker
from codec.torch.network.endpoint import CLOSED, close_endpoint, use_security
from codec.torch.network.version import hash64
from codec.torch.transport.channel import Channel
from codec.torch.transport.collective import Collective
from codec.torch.transport.counters import Counters
from codec.torch.transport.levels import Levels, Members
from codec.torch.transport.nccl import rank_is_usable, uses_nccl

T = TypeVar("T")

# Communicators


class Communicator:
    """Channel of a group, and the worker thread, which is the only thread that uses the channel.

    Parameters
    ----------
    group : ProcessGroup or LeveledGroup
        Ranks of the communicator.
    timeout : float, timedelta or None
        As for :class:`codec.torch.transport.channel.Channel`.
    """

    def __init__(self, group: Any, timeout: Timeout | None) -> None:
        self.worker = worker = Worker(f"codec, rank {group.rank()}")
        worker.end_with(self)
        # Create the channel in the worker, so that Ctrl-C can interrupt this thread while it waits.
        levels = group.levels if isinstance(group, LeveledGroup) else None
        try:
            channel: Channel = worker.submit(lambda: Channel(all_ranks(group), timeout, levels)).result()
        except BaseException:
            worker.end()  # the error's traceback keeps this object alive
            raise
        self.channel = channel
        # Tuners of all-reduces, by signature; most recently used last.
        self.tuners: dict[int, RawFallback] = {}
        worker.timeout = channel.timeout.total_seconds()
        worker.on_timeout, worker.on_wait = channel.close, channel.counters.add_wait
        if levels is not None:
            self.run(lambda c: _check_levels(c, levels))
        near = group if levels is None else group.within
        exposed = levels is None and channel.encrypted  # NCCL does not encrypt what leaves a machine
        if channel.size > 1 and uses_nccl(near) and not exposed:
            usable = self.run(lambda c: c.part(hash64("GPUs")).gather([rank_is_usable()]))
            worker.submit(lambda: channel.device.connect(near, usable)).result()
            if channel.device.connected:
                worker.most_in_flight = 1  # NCCL needs the same order of messages on all ranks

    def submit(self, collective: Callable[[Collective], Awaitable[Any]], work: Work | None = None) -> Work:
        """Submit a collective, which begins after earlier ones. Return a handle for the result of its coroutine.

        If the coroutine raises an error, all ranks raise an error. `work`: the handle; None: create it.
        """
        return self.worker.submit_collective(lambda number: self._run(number, collective), work)

    def run(self, collective: Callable[[Collective], Awaitable[T]]) -> T:
        """Run a collective, and return its result.

        If Ctrl-C ends the wait, the collective is cancelled, and writes to no tensor of the caller afterwards. If the
        collective has just succeeded, later collectives fail on all ranks, since this rank does not know the result.
        """
        self.worker.check_thread()
        work: Work | None = None
        try:
            work = self.submit(collective)
            return work.result()
        except BaseException:
            if work is None or not work.is_completed() or work.is_success():
                self.cancel()
            raise

    async def _run(self, number: int, work: Callable[[Collective], Awaitable[T]]) -> T:
        channel = self.channel
        collective = channel.collective(number)
        waited = channel.counters.wire_s
        try:
            try:
                return await work(collective)
            except BaseException as e:
                collective.fail(e)
                raise
            finally:
                collective.end()
                collective.counters.wire_s = channel.counters.wire_s - waited
                channel.count(collective)
        except BaseException as e:
            if collective.agreed:  # an error behind the agreement, also in the lines above, is one of this rank alone
                collective.fail(e)
            raise

    def cancel(self) -> None:
        """Make collectives in flight and later ones fail, here and on peers, without writing to tensors."""
        if self.worker.forked:  # the connections belong to the parent process
            return
        self.channel.cancel()
        self.channel.close()

    def close(self) -> None:
        """Close the connections, as :meth:`cancel` does, and end the threads."""
        self.cancel()
        if not self.worker.forked:
            self.worker.close()


class _Slot:
    """Communicator of a group, None until it is created, and the lock that guards it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.communicator: Communicator | None = None
        self.closed = False  # True after close_group()
        self.counters = Counters()  # totals of the closed communicator

    def close(self) -> None:
        """Close the communicator; the group gets no other one."""
        self.closed = True
        comm, self.communicator = self.communicator, None  # another thread may be creating one, and then closes it
        if comm is not None:
            comm.close()
            self.counters = comm.channel.counters


_slots: "weakref.WeakKeyDictionary[Any, _Slot]" = weakref.WeakKeyDictionary()
_slots_lock = threading.Lock()


def _after_fork() -> None:
    """Replace locks that threads of the parent may hold."""
    global _slots_lock
    _slots_lock = threading.Lock()
    for slot in list(_slots.values()):
        slot.lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _slot_of(group: Any) -> _Slot:
    with _slots_lock:
        return _slots.setdefault(group, _Slot())


def communicator_of(group: Any, timeout: Timeout | None = None, security: Security = NONE) -> Communicator:
    """Return the communicator of a group. The first call creates it, together with all other ranks.

    Parameters
    ----------
    group : ProcessGroup, DeviceMesh, pair of ProcessGroup, or None
        As for :func:`codec.torch.all_reduce`.
    timeout : float, timedelta or None
        Timeout of a new communicator.
    security : Security
        Secret and TLS setting, in the options of a call.

    Raises
    ------
    ArgumentError
        `group` or `timeout` has an invalid type or value, torch.distributed is not initialized, or the group has
        another secret or TLS setting.
    PeerError
        The ranks cannot be connected, or the group was closed.
    """
    check_timeout(timeout)
    key = group_of(group)
    use_security(all_ranks(key), security)
    slot = _slot_of(key)
    with slot.lock:
        comm = slot.communicator
        if comm is None and not slot.closed:
            comm = slot.communicator = Communicator(key, timeout)
        if comm is None or slot.closed:
            slot.close()
            raise PeerError(CLOSED)
        return comm


async def _check_levels(collective: Collective, levels: Levels) -> None:
    """Raise PeerError if the ranks of a machine, or those at one place of all machines, do not agree on their level."""
    mine = [levels.within.rank, hash64(levels.within.ranks), hash64(levels.between.ranks)]
    fields = {"collective": f"the first collective over {levels} (group=)"}
    connected = Members(sorted([levels.all.rank, *levels.connected]), levels.all.rank)
    gathered = await collective.part(hash64("levels"), fields, connected).gather(mine)
    found = dict(zip(connected.ranks, gathered, strict=True))
    for members, at in ((levels.within, 1), (levels.between, 2)):
        for rank in members.ranks:
            if found[rank][at] != mine[at] or (at == 2 and found[rank][0] != mine[0]):
                raise PeerError(
                    f"rank {rank} has other levels than this rank, whose machine has the ranks {levels.within.ranks} "
                    f"and which sends frames to the ranks {levels.between.ranks}: pass the same group= on all ranks"
                )


def close_communicator(group: Any, *, cancel: bool) -> None:
    """Close the connections of a group.

    Parameters
    ----------
    group : ProcessGroup
        Group. If it has no communicator, nothing happens.
    cancel : bool
        True: make collectives in flight fail, without writing to tensors. False: wait for them first.
    """
    comm = _slot_of(group).communicator
    if comm is None or comm.worker.forked:
        return
    if cancel:
        comm.cancel()
    else:
        comm.worker.submit(comm.channel.close).wait()


def close_group(group: Any = None) -> None:
    """Close all connections that codec has opened for a group, and end their threads.

    Call this after a failure, before a new group replaces the group, so that its sockets and threads are freed at once
    and not when Python frees the group. Other ranks need not call this. Collectives and messages in flight, and later
    ones, raise PeerError here; ranks that wait for this rank raise PeerError, too. No tensor is written to after the
    call. Torch's own connections of the group stay open: ``torch.distributed.destroy_process_group`` closes them. A
    second call does nothing.

    Parameters
    ----------
    group : ProcessGroup, DeviceMesh or pair of ProcessGroup, optional
        As for :func:`all_reduce`. Default: all ranks. The connections of all levels of the group are closed.

    Raises
    ------
    ArgumentError
        `group` is no group, or torch.distributed is not initialized.

    Examples
    --------
    >>> group = torch.distributed.new_group([0])
    >>> x = torch.ones(1000)
    >>> codec.torch.all_reduce(x, group=group)
    >>> codec.torch.close_group(group)
    >>> codec.torch.all_reduce(x, group=group)
    Traceback (most recent call last):
        ...
    codec.errors.PeerError: the group was closed by close_group(): make a new group
    """
    whole = all_ranks(group)
    if whole is NON_MEMBER:
        return
    own = _slot_of(whole)
    with _slots_lock:
        leveled = [slot for key, slot in _slots.items() if isinstance(key, LeveledGroup) and key.group is whole]
    for slot in (own, *leveled):
        slot.close()
    close_endpoint(whole)


def group_stats(group: Any = None) -> Counters:
    """Return the totals of a group's collectives so far, on this rank.

    Parameters
    ----------
    group : ProcessGroup, DeviceMesh or pair of ProcessGroup, optional
        As for :func:`all_reduce`. Default: all ranks.

    Returns
    -------
    Counters
        A copy, which later collectives do not change; zeros before the first collective. Subtract an earlier copy to
        get the totals of a period.

    Raises
    ------
    ArgumentError
        `group` is no group, or torch.distributed is not initialized.

    Examples
    --------
    >>> before = codec.torch.group_stats()
    >>> codec.torch.all_reduce(torch.ones(1000))
    >>> (codec.torch.group_stats() - before).raw_nbytes
    4000
    """
    key = group_of(group)
    if key is NON_MEMBER:
        return Counters()
    slot = _slot_of(key)
    return (slot.counters if slot.communicator is None else slot.communicator.channel.counters).copy()


def buffer_nbytes(group: Any) -> int:
    """Return the bytes of host memory that a group has allocated for messages, results and sums; 0 for None."""
    comm = None if group is None else _slot_of(group).communicator
    return 0 if comm is None else comm.channel.buffers.nbytes


def scratch_nbytes(group: Any) -> int:
    """Return the peak of GPU scratch memory that a group's collectives have used, in bytes; 0 for None."""
    comm = None if group is None else _slot_of(group).communicator
    return 0 if comm is None else comm.channel.device.scratch.most_nbytes


# Collectives


def start(
    name: str,
    group: Any,
    settings: CallOptions | None,
    async_op: bool,
    work: Callable[[Communicator, Collective], Awaitable[Any]],
) -> Any:
    """Run work(communicator, collective) in the worker thread of a group.

    An invalid timeout, secret or TLS setting is reported to all ranks, like other invalid arguments. So this rank
    connects to the others before it raises the error.

    Parameters
    ----------
    name : str
        Name of the collective, for error messages.
    group, async_op
        As for :func:`codec.torch.all_reduce`.
    settings : CallOptions or None
        Timeout, secret and TLS setting of the call. None: the timeout of the group, and the rest of the context.
    work : callable
        Coroutine function that runs the collective and returns its result.

    Returns
    -------
    Work, None or the result of `work`
        Work if `async_op`; None if this rank is not in the group.
    """
    group = group_of(group)
    if warn_non_member(group, name):
        return None
    error: ArgumentError | None = None
    timeout = None if settings is None else settings.timeout
    try:
        check_timeout(timeout)
        use_security(all_ranks(group), (settings or settings_of(None)).security)
    except ArgumentError as e:
        timeout, error = None, e
    comm = communicator_of(group, timeout)

    async def run(collective: Collective) -> Any:
        if error is not None:
            raise error
        return await work(comm, collective)

    return comm.submit(run) if async_op else comm.run(run)


def warn_non_member(group: Any, name: str) -> bool:
    """Return True if this rank is not in a group, and then log the same warning as torch.distributed."""
    outside = rank_not_in_group(group)
    if outside:
        warn_not_in_group(name)
    return outside
