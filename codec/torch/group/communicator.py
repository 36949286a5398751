"""Communicator of a group: its channel, the thread that uses it, and the begin and end of collectives."""

import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from codec import ArgumentError, PeerError
from codec.arguments import check_timeout, shown
from codec.torch._compat import rank_not_in_group, warn_not_in_group
from codec.torch.group.autotune import Choice
from codec.torch.group.work import Work
from codec.torch.group.worker import Worker
from codec.torch.transport.channel import Channel
from codec.torch.transport.counters import Counters
from codec.torch.transport.gloo import Timeout

T = TypeVar("T")

PROTOCOL_VERSION = 1  # of docs/protocol.md; raise it whenever ranks before and after a change misunderstand each other

# Communicators


class Communicator:
    """Channel of a group, with the thread that alone uses it.

    Parameters
    ----------
    group : ProcessGroup
        Ranks of the communicator.
    timeout : float, timedelta or None
        As for :class:`codec.torch.transport.channel.Channel`.
    """

    def __init__(self, group: Any, timeout: Timeout | None) -> None:
        self.worker = Worker(f"codec, rank {group.rank()}")
        weakref.finalize(self, self.worker.stop)
        # Ctrl-C interrupts a thread that waits for another thread, but not one that waits for peers.
        self.channel: Channel = self.worker.submit(lambda: Channel(group, timeout)).result()
        self.choices: dict[int, Choice] = {}  # frames or uncompressed, by signature; the last used is last
        self.run(lambda: self.channel.numbers.check_same("version of codec.torch's protocol", [protocol_hash()]))
        self.run(lambda: self.channel.device.connect(group))

    def run(self, collective: Callable[[], T]) -> T:
        """Run a collective after those submitted before, and return its result.

        If Ctrl-C ends the wait, the collective is cancelled: no tensor of the caller is written any more.
        """
        self.worker.check_thread()
        work: Work | None = None
        try:
            work = self.worker.submit(collective)
            return work.result()
        except BaseException:
            if work is None or not work.is_completed():
                self.cancel()
            raise

    def cancel(self) -> None:
        """Make the collective in flight and all later ones fail without writing a tensor, here and on peers."""
        if self.worker.forked:  # the connections are the parent's
            return
        self.channel.cancel()
        self.worker.submit(self.channel.close)


class _Slot:
    """Communicator of a group, None until it is made, and the lock that guards it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.communicator: Communicator | None = None


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


def communicator_of(group: Any, timeout: Timeout | None = None) -> Communicator:
    """Return the communicator of a group. The first call makes it; all ranks must take part in that.

    Parameters
    ----------
    group : ProcessGroup or None
        None: all ranks.
    timeout : float, timedelta or None
        Timeout of a new communicator.

    Raises
    ------
    ArgumentError
        `group` or `timeout` has a wrong type or value, or torch.distributed is not initialized.
    PeerError
        The ranks cannot be connected.
    """
    check_timeout(timeout)
    key = key_of(group)
    slot = _slot_of(key)
    with slot.lock:
        if slot.communicator is None:
            slot.communicator = Communicator(key, timeout)
        return slot.communicator


def key_of(group: Any) -> Any:
    """Return the process group itself: that of all ranks for None."""
    _check_group(group)
    key = group or dist.group.WORLD
    if key is None:
        raise ArgumentError("torch.distributed is not initialized: call init_process_group first")
    return key


def _check_group(group: Any) -> None:
    """Raise ArgumentError unless `group` is a process group, None, or the value that new_group gives non-members."""
    if (
        group is not None
        and group is not dist.GroupMember.NON_GROUP_MEMBER
        and not isinstance(group, dist.ProcessGroup)
    ):
        raise ArgumentError(f"group must be a ProcessGroup or None, got {shown(group)}")


def close_communicator(group: Any, *, cancel: bool) -> None:
    """Close the connections of a group.

    Parameters
    ----------
    group : ProcessGroup
        A group; nothing happens if it has no communicator.
    cancel : bool
        True: make collectives in flight fail without writing a tensor. False: wait for them first.
    """
    comm = _slot_of(group).communicator
    if comm is None or comm.worker.forked:
        return
    if cancel:
        comm.cancel()
    else:
        comm.worker.submit(comm.channel.close).wait()


def group_stats(group: Any = None) -> Counters:
    """Return the totals of a group's collectives so far, on this rank.

    Parameters
    ----------
    group : ProcessGroup, optional
        None: all ranks.

    Returns
    -------
    Counters
        A copy, which later collectives do not change; zeros before the first collective. Subtract an earlier copy to
        get the totals of a period.

    Raises
    ------
    ArgumentError
        `group` is no process group, or torch.distributed is not initialized.

    Examples
    --------
    >>> before = codec.torch.group_stats()
    >>> codec.torch.all_reduce(torch.ones(1000))
    >>> (codec.torch.group_stats() - before).raw_nbytes
    4000
    """
    key = key_of(group)
    comm = None if key is dist.GroupMember.NON_GROUP_MEMBER else _slot_of(key).communicator
    return Counters() if comm is None else comm.channel.counters.copy()


# Collectives


def start(name: str, group: Any, timeout: Timeout | None, async_op: bool, work: Callable[[Communicator], Any]) -> Any:
    """Run work(comm) in the thread of a group's collectives.

    A wrong timeout is an error on all ranks, as other arguments are: this rank connects in spite of it, to report the
    error.

    Parameters
    ----------
    name : str
        Name of the collective, for messages.
    group, timeout, async_op
        As for :func:`codec.torch.all_reduce`.
    work : callable
        Runs the collective; returns its result.

    Returns
    -------
    Work, None or the result of `work`
        Work if `async_op`; None if this rank is not of the group.
    """
    _check_group(group)
    if warn_non_member(group, name):
        return None
    error: ArgumentError | None = None
    try:
        check_timeout(timeout)
    except ArgumentError as e:
        timeout, error = None, e
    comm = communicator_of(group, timeout)

    def run() -> Any:
        if error is not None:
            _refuse(comm.channel, error)
        return work(comm)

    return comm.worker.submit(run) if async_op else comm.run(run)


def _refuse(channel: Channel, error: ArgumentError) -> None:
    """Tell all ranks that this one cannot take part, and raise the error."""

    def prepare() -> NoReturn:
        raise error

    request(channel, prepare)


def warn_non_member(group: Any, name: str) -> bool:
    """Return True if this rank is not of a group, with the warning that torch.distributed gives."""
    outside = rank_not_in_group(group)
    if outside:
        warn_not_in_group(name)
    return outside


def hash64(*values: Any) -> int:
    """Return a signed 64-bit hash of the representation of some values, equal on all ranks and in all processes."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little", signed=True)


def protocol_hash() -> int:
    """Return the hash of the protocol's version, which ranks compare when they connect."""
    return hash64("codec.torch", PROTOCOL_VERSION)


@contextmanager
def close_on_error(channel: Channel) -> Generator[None]:
    """Return a context manager that closes the channel if its body fails on this rank alone, such as out of memory.

    Without it, ranks would wait for messages that never come, or take messages of one collective for those of the next.
    """
    try:
        yield
    except BaseException:
        if not channel.requests.refused:
            channel.close()
        raise


@contextmanager
def storing_results(channel: Channel) -> Generator[None]:
    """Return a context manager for storing results in the caller's tensors, after all ranks have succeeded.

    An error closes the channel: the other ranks have gone on, and fail at the next collective.
    """
    with close_on_error(channel), channel.writing():
        yield


def request(channel: Channel, prepare: Callable[[], tuple[T, list[int]]]) -> T:
    """Begin a collective: check this rank's arguments and send the request.

    An error on one rank is an error on all: the other ranks raise PeerError before they send any data.

    Parameters
    ----------
    channel : Channel
        Channel of the group.
    prepare : callable
        Returns a value and at most 3 numbers. The first number, the signature, must be the same on all ranks. Raises an
        error if the arguments are wrong.

    Returns
    -------
    object
        The value.
    """
    try:
        prepared, numbers = prepare()
    except BaseException as e:
        with close_on_error(channel):
            channel.request([0], e)
            with suppress(PeerError):  # this rank is the cause
                channel.requests.await_all()
        raise
    with close_on_error(channel):
        channel.request(numbers)
    return prepared


def exchange_requests(channel: Channel, prepare: Callable[[], tuple[T, list[int]]]) -> tuple[T, list[list[int]]]:
    """Begin a collective as :func:`request` does, and wait for the requests of all ranks.

    Returns
    -------
    object, list of list of int
        The value that prepare() returned; the numbers of each rank.
    """
    prepared = request(channel, prepare)
    with close_on_error(channel):
        return prepared, channel.requests.await_all()
