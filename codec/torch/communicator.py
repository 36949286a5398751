"""The thread and the connections of a group, and how its ranks begin and end a collective together."""

import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

import codec
from codec import ArgumentError, PeerError
from codec.arguments import shown
from codec.torch.autotune import Choice
from codec.torch.channel import Channel, Timeout, check_timeout
from codec.torch.counters import Counters
from codec.torch.work import Work
from codec.torch.worker import Worker

T = TypeVar("T")


class Line:
    """A group's channel, with the thread that alone uses it."""

    def __init__(self, group: Any, timeout: Timeout | None) -> None:
        self.worker = Worker(f"codec, rank {group.rank()}")
        weakref.finalize(self, self.worker.stop)
        # a thread that waits for another one hears Ctrl-C, one that waits for peers does not
        self.channel: Channel = self.worker.submit(lambda: Channel(group, timeout)).result()
        self.choices: dict[int, Choice] = {}
        self.finish(lambda: self.channel.check_same("version of codec", [hashed(codec.__version__)]))

    def finish(self, work: Callable[[], T]) -> T:
        """Run `work` after what was submitted before, and return its result.

        Where Ctrl-C ends the wait, the collective is given up: the caller's tensors are not written any more.
        """
        self.worker.check_thread()
        submitted: Work | None = None
        try:
            submitted = self.worker.submit(work)
            return submitted.result()
        except BaseException:
            if submitted is None or not submitted.is_completed():
                self.give_up()
            raise

    def give_up(self) -> None:
        """Have the collective in flight and all later ones fail without writing a tensor; peers learn of it."""
        if self.worker.forked:  # the connections are the parent's
            return
        self.channel.abandon()
        self.worker.submit(self.channel.close)


class _Slot:
    """The line of a group, once it was made, and the lock under which it is."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.line: Line | None = None


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


def line_of(group: Any, timeout: Timeout | None = None) -> Line:
    """Return the line of a group; the first call makes it, which all ranks must do, one thread at a time.

    Raises
    ------
    ArgumentError
        The group or the timeout is none; torch.distributed is not initialized.
    PeerError
        The ranks cannot be connected.
    """
    check_timeout(timeout)
    key = _key_of(group)
    slot = _slot_of(key)
    with slot.lock:
        if slot.line is None:
            slot.line = Line(key, timeout)
        return slot.line


def _key_of(group: Any) -> Any:
    """Return the process group that is meant: that of all ranks for None."""
    _check_group(group)
    key = group or dist.group.WORLD
    if key is None:
        raise ArgumentError("torch.distributed is not initialized: call init_process_group first")
    return key


def _check_group(group: Any) -> None:
    """Raise ArgumentError unless it is a process group, None, or what new_group gives ranks that are not of a group."""
    if (
        group is not None
        and group is not dist.GroupMember.NON_GROUP_MEMBER
        and not isinstance(group, dist.ProcessGroup)
    ):
        raise ArgumentError(f"group must be a ProcessGroup or None, got {shown(group)}")


def start(what: str, group: Any, timeout: Timeout | None, async_op: bool, work: Callable[[Line], Any]) -> Any:
    """Run work(line) in the thread of a group's collectives.

    A bad timeout is an error on all ranks, like other arguments: this rank connects nevertheless, to tell the others.

    Parameters
    ----------
    what : str
        The name of the collective, for messages.
    group, timeout, async_op
        As for :func:`all_reduce`.
    work : callable
        The collective.

    Returns
    -------
    Work if `async_op`, None if this rank is not of the group, else what `work` returns
    """
    _check_group(group)
    if _is_apart(group, what):
        return None
    error: ArgumentError | None = None
    try:
        check_timeout(timeout)
    except ArgumentError as e:
        timeout, error = None, e
    line = line_of(group, timeout)

    def run() -> Any:
        if error is not None:
            _refuse(line.channel, error)
        return work(line)

    return line.worker.submit(run) if async_op else line.finish(run)


def _refuse(channel: Channel, error: ArgumentError) -> None:
    """Tell all ranks that this one cannot begin, and raise the error."""

    def prepare() -> NoReturn:
        raise error

    ask(channel, prepare)


def _is_apart(group: Any, what: str) -> bool:
    """Return True, with a warning as torch.distributed's, if this rank is not of a group."""
    apart = dist.distributed_c10d._rank_not_in_group(group)
    if apart:
        dist.distributed_c10d._warn_not_in_group(what)
    return apart


def group_stats(group: Any = None) -> Counters:
    """Return the totals of a group's collectives so far, on this rank: bytes, seconds, and how often frames were sent.

    Subtract an earlier result to get the totals of a period.

    Parameters
    ----------
    group : ProcessGroup, optional
        As for :func:`all_reduce`.

    Returns
    -------
    Counters
        A copy, which later collectives do not change; zeros before the first collective.

    Raises
    ------
    ArgumentError
        `group` is no process group, or torch.distributed is not initialized.
    """
    key = _key_of(group)
    line = None if key is dist.GroupMember.NON_GROUP_MEMBER else _slot_of(key).line
    return Counters() if line is None else line.channel.counters.copy()


def hang_up(group: Any, *, now: bool) -> None:
    """Close a group's connections, after what was begun; or `now`: what is in flight fails and writes nothing."""
    line = _slot_of(group).line
    if line is None or line.worker.forked:
        return
    if now:
        line.give_up()
    else:
        line.worker.submit(line.channel.close).wait()


def hashed(*what: Any) -> int:
    """64 bits that tell arguments apart on different ranks."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little", signed=True)


@contextmanager
def in_step(channel: Channel) -> Iterator[None]:
    """Close the channel if the body fails on this rank alone, such as for want of memory.

    No rank waits for what never comes, or takes for this collective what belongs to the next one.
    """
    try:
        yield
    except BaseException:
        if not channel.declined:
            channel.close()
        raise


@contextmanager
def storing(channel: Channel) -> Iterator[None]:
    """Store results in the caller's tensors within this, after all ranks have succeeded.

    An error closes the channel: the other ranks have gone on, and learn of it with the next collective.
    """
    with in_step(channel), channel.writing():
        yield


def ask(channel: Channel, prepare: Callable[[], tuple[T, list[int]]]) -> T:
    """Return what prepare() returns; send its numbers to all ranks, of which the first must be the same on all.

    An error on one rank is an error on all: on others when they hear of it, before anything else is sent.
    """
    try:
        prepared, numbers = prepare()
    except BaseException:
        with in_step(channel):
            channel.ask([0], able=False)
            with suppress(PeerError):  # this rank is the cause
                channel.agree()
        raise
    with in_step(channel):
        channel.ask(numbers, able=True)
    return prepared


def agree(channel: Channel, prepare: Callable[[], tuple[T, list[int]]]) -> tuple[T, list[list[int]]]:
    """The same, once all ranks are known to do the same; and all ranks' numbers."""
    prepared = ask(channel, prepare)
    with in_step(channel):
        return prepared, channel.agree()
