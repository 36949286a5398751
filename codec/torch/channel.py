"""Frames between the ranks of a group, and agreement on how a collective went."""

import gc
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from codec import ArgumentError, FrameError, PeerError, Status
from codec.arguments import shown
from codec.torch.counters import Counters, Stopwatch

Array = np.ndarray[Any, Any]
Timeout = float | timedelta  # float: seconds

_LENGTH = struct.Struct("<Q")  # before each frame, in a buffer that has room for the largest one
_ALIGN = 64
_WORDS = 8  # of a message of numbers: how many, and they. Gloo aborts where more comes than is expected
_FRAMES, _NUMBERS = range(2)  # tags: what is not expected under one of them is not taken for what is under the other
_AHEAD = 2  # messages of numbers that are expected of a rank before they are asked for: a collective has two
# what a rank tells of its part, the worst last; _LEFT: it has found others to be at fault
_OK, _LEFT, _REFUSED, _NONFINITE = range(4)
_SHORTEST, _LONGEST = timedelta(milliseconds=1), timedelta(days=3653)  # timeouts; Gloo's clock overflows beyond


def check_timeout(timeout: Any) -> timedelta | None:
    """Return a timeout as a timedelta, or None if there is none.

    Parameters
    ----------
    timeout : float, timedelta or None
        Seconds, or a timedelta: from 1 ms to 10 years.

    Raises
    ------
    ArgumentError
        `timeout` is something else.
    """
    if timeout is None:
        return None
    with suppress(TypeError, ValueError, OverflowError):
        given = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if not isinstance(timeout, bool) and _SHORTEST <= given <= _LONGEST:
            return given
    raise ArgumentError(f"timeout must be seconds or a timedelta, from 1 ms to 10 years, got {shown(timeout)}")


def _timeout_of(group: Any) -> timedelta:
    """Return the timeout of a group, within the limits that Gloo can wait for."""
    timeout = dist.distributed_c10d.default_pg_timeout
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout = options._timeout
            break
    return min(max(timeout, _SHORTEST), _LONGEST)


@contextmanager
def _patient() -> Iterator[None]:
    """Threads that this one starts interrupt nobody who computes: they get a core that is free, or their turn.

    Gloo's thread spins while another one holds the lock of a connection: where it interrupts the one that does, both
    lose milliseconds, until its slice of time is over.
    """
    plain, none = False, os.sched_param(0)
    try:
        with suppress(OSError):  # where it is forbidden, threads are as ever
            plain = os.sched_getscheduler(0) == os.SCHED_OTHER
            if plain:
                os.sched_setscheduler(0, os.SCHED_BATCH, none)
        yield
    finally:
        if plain:
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, none)


def _connect(group: Any, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Connect the ranks of a group for the use of one channel.

    The store gets a connection of its own: over a shared one, a thread that waits for a key keeps all others from the
    store, also one whose group this rank's peer must make first.
    """
    try:
        store = PrefixStore("codec", group.get_group_store().clone())
        with _patient():
            return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
    except RuntimeError as e:
        raise PeerError(f"the ranks of the group cannot be connected: {e}") from e


def _status_of(error: Exception | None) -> int:
    """What a rank tells of its part."""
    if error is None:
        return _OK
    if isinstance(error, PeerError):
        return _LEFT
    return _NONFINITE if getattr(error, "code", None) == Status.NONFINITE else _REFUSED


def _new_mark() -> int:
    """Return 64 random bits that are a NaN in float64, and their lower 32 or 16 in the other dtypes.

    It is a signaling NaN, which no arithmetic gives, but in float16.
    """
    return 0x7FF00001_7F807F81 | int.from_bytes(os.urandom(8), "little") & 0x8007FFFE_803F803E


def _message_of(numbers: Sequence[int]) -> Array:
    """Some integers of 64 bits, as ranks tell each other."""
    message = np.zeros(_WORDS, np.int64)
    message[: 1 + len(numbers)] = len(numbers), *numbers
    return message.view(np.uint8)


class Incoming:
    """A message on its way."""

    def __init__(self, channel: "Channel", room: Array, source: int) -> None:
        self._channel, self._room, self._source = channel, room, source
        self._work = channel.post("recv", room, source)

    def frame(self) -> Array:
        """Its frame, once it is there.

        Raises
        ------
        PeerError
            The connection broke, nothing came in time, or the sender had no frame to send.
        FrameError
            The length cannot be.
        """
        self._channel.wait(self._work, self._source)
        (nbytes,) = _LENGTH.unpack(self._room[: _LENGTH.size].tobytes())
        if not nbytes:
            raise PeerError(f"rank {self._source} has given up")
        if nbytes > self._room.nbytes - _LENGTH.size:
            raise FrameError(f"rank {self._source} sends a frame of {nbytes} bytes, which cannot be")
        self._channel.counters.received_nbytes += _LENGTH.size + nbytes
        return self._room[_LENGTH.size : _LENGTH.size + nbytes]


class IncomingValues:
    """Uncompressed values on their way, whose number both ranks know.

    Gloo does not say how long a message was. The last place therefore holds a mark, a NaN with random bits, until the
    message has overwritten it: a message that lacks a value is an error, and no value that was in memory before is
    taken for one of the sender's.

    Parameters
    ----------
    channel : Channel
        Whose messages these are.
    place : ndarray
        Gets the values: floats, or uint16 for bfloat16.
    source : int
        The rank that sends them.
    """

    def __init__(self, channel: "Channel", place: Array, source: int) -> None:
        self._channel, self._source = channel, source
        self._last = place.view(f"u{place.itemsize}")[-1:]
        self._last[:] = channel.mark & (1 << 8 * place.itemsize) - 1
        self._mark = int(self._last[0]) if place.nbytes else 0
        channel.counters.received_nbytes += place.nbytes
        self._work = channel.post("recv", place.view(np.uint8), source)

    def wait(self) -> FrameError | None:
        """Wait for the values; return an error if some are missing."""
        self._channel.wait(self._work, self._source)
        if self._last.size and int(self._last[0]) == self._mark:
            return FrameError(f"rank {self._source} has sent fewer values than agreed")
        return None


class Channel:
    """A group of ranks with connections of its own, so that what others send on theirs does not come between.

    They are made over Gloo, through the store by which the group's ranks have found each other; so this works for
    groups of any backend, also for those that torch.distributed has no list of.

    One collective at a time, on all ranks in the same order. After a :class:`PeerError` that broke a connection the
    channel is closed, and the ranks that wait for this one learn of it.

    Parameters
    ----------
    group : ProcessGroup or None
        Whose ranks; None for all. Every rank must make its channel at the same point of the program.
    timeout : float, timedelta or None
        Seconds that a peer may keep this one waiting; None: as long as in `group`.
    """

    def __init__(self, group: Any, timeout: Timeout | None) -> None:
        group = group or dist.group.WORLD
        self._timeout = check_timeout(timeout) or _timeout_of(group)
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.others = [(self.rank + i) % self.size for i in range(1, self.size)]  # each rank's begin with another one
        self._pg: Any = _connect(group, self._timeout)
        self.calls = 0  # collectives that all ranks have begun
        self.began = 0.0, 0.0  # the last one: seconds that a clock has shown, and those this thread had computed
        self._asked: list[int] | None = None
        self.mark = 0  # 64 bits for IncomingValues, new with each collective
        self.counters = Counters()
        self.clock = Stopwatch(self.counters)
        self._arena = np.empty(0, np.uint8)
        self._result = np.empty(0, np.uint8)
        self._total = np.empty(0, np.float32)
        self._promised = 0  # of the arena, to algorithms that have begun
        self._taken = self._last = 0  # of it, and where what was taken last begins
        self._sending: list[tuple[Any, int]] = []
        self._given: list[tuple[Any, int, Array]] = []  # numbers, until they are sent
        self._expected: dict[int, deque[tuple[Array, Any]]] = {o: deque() for o in self.others}
        self._abandoned = False
        self._writing = threading.Lock()

    @property
    def sent_nbytes(self) -> int:
        """Bytes of frames and of uncompressed values that were sent to all other ranks together."""
        return self.counters.sent_nbytes

    @property
    def closed(self) -> bool:
        """Whether a connection was lost, or :meth:`close` was called."""
        return self._pg is None

    def begin(self, room: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Begin an algorithm of what was asked for, which will :meth:`take` so many bytes.

        Until other ranks have told that they begin, too, meanwhile() is done.
        """
        self._promised += room
        if self._arena.nbytes < self._promised:  # what was taken before lies in the old one
            self._arena = np.empty(self._promised, np.uint8)
        meanwhile()
        self.agree()

    def take(self, nbytes: int) -> Array:
        """Room for a message whose frame has so many bytes at most."""
        begin = self._last = self._taken
        end = begin + _LENGTH.size + nbytes
        if end > self._arena.nbytes:
            raise AssertionError("a collective takes more room than it has asked for")
        self._taken = -(-end // _ALIGN) * _ALIGN
        return self._arena[begin:end]

    def result(self, n: int, dtype: Any) -> Array:
        """An array of n values, whose memory is that of the result before."""
        nbytes = n * np.dtype(dtype).itemsize
        if self._result.nbytes < nbytes:
            self._result = np.empty(nbytes, np.uint8)
        return self._result[:nbytes].view(dtype)

    def total(self, n: int) -> Array:
        """The same for n values of float32 that are needed for a moment."""
        if self._total.size < n:
            self._total = np.empty(n, np.float32)
        return self._total[:n]

    @staticmethod
    def room_for(frames: Sequence[int]) -> int:
        """What to ask :meth:`begin` for: frames of so many bytes at most."""
        return sum(-(-(n + _LENGTH.size) // _ALIGN) * _ALIGN for n in frames)

    def give_back(self, message: Array, nbytes: int) -> Array:
        """The message with a frame of so many bytes, which was put behind its first 8; the rest is free again.

        For the room that was taken last.
        """
        _LENGTH.pack_into(message.data, 0, nbytes)
        message = message[: _LENGTH.size + nbytes]
        self._taken = -(-(self._last + message.nbytes) // _ALIGN) * _ALIGN
        return message

    @staticmethod
    def frame_room(message: Array) -> Array:
        """Where the frame of a message goes."""
        return message[_LENGTH.size :]

    def receive(self, nbytes: int, source: int) -> Incoming:
        """Expect a frame of so many bytes at most. All that will come should be expected before anything is sent."""
        return Incoming(self, self.take(nbytes), source)

    def send(self, message: Array | None, to: int) -> None:
        """Send what :meth:`give_back` made, which stays as it is until :meth:`finish`; None: there is no frame."""
        if message is None:
            message = np.zeros(_LENGTH.size, np.uint8)
        self.counters.sent_nbytes += message.nbytes
        self._sending.append((self.post("send", message, to), to))

    def send_values(self, values: Array, to: int) -> None:
        """Send values as they are, which must stay so until :meth:`finish`."""
        self.counters.sent_nbytes += values.nbytes
        self._sending.append((self.post("send", values.view(np.uint8), to), to))

    def receive_values(self, place: Array, source: int) -> "IncomingValues":
        """Expect as many values as `place` has. All that will come should be expected before anything is sent."""
        return IncomingValues(self, place, source)

    def post(self, what: str, message: Array, rank: int, tag: int = _FRAMES) -> Any:
        """Begin to send or to receive."""
        try:
            with self.clock.during("wire_s"):
                return self._begin(what, message, rank, tag)
        except RuntimeError as e:
            self._lose(rank, e)

    def _begin(self, what: str, message: Array, rank: int, tag: int) -> Any:
        return (self._pg.send if what == "send" else self._pg.recv)([torch.from_numpy(message)], rank, tag)

    def wait(self, work: Any, rank: int, within: timedelta | None = None) -> None:
        """Until it is done; in as long as a peer may keep this one waiting, if not said otherwise."""
        try:
            with self.clock.during("wire_s"):
                work.wait(within or self._timeout)
        except RuntimeError as e:
            self._lose(rank, e)

    def finish(self) -> None:
        """Wait until all is sent."""
        for work, to in self._sending:
            self.wait(work, to)
        self._sending.clear()

    def ask(self, numbers: Sequence[int], *, able: bool) -> None:
        """Tell all ranks what this one is about to do, or that it cannot; :meth:`agree` hears what they tell.

        Up to 3 numbers, of which the first one must be the same on all.
        """
        self.declined = False
        self._promised = self._taken = 0
        self._asked = [*numbers, *[0] * (3 - len(numbers)), not able]
        self._give(dict.fromkeys(self.others, self._asked))

    def agree(self) -> list[list[int]]:
        """All ranks' numbers, once all have told that they do the same; none if nothing was asked.

        Raises
        ------
        PeerError
            A rank cannot do its part, is about to do something else, or is lost.
        """
        mine, self._asked = self._asked, None
        if mine is None:
            return []
        everyones = self._everyones(mine)
        self.declined = any(theirs[-1] or theirs[0] != mine[0] for theirs in everyones)
        for rank, theirs in enumerate(everyones):
            if theirs[-1]:
                raise PeerError(f"rank {rank} could not begin: nothing was changed")
            if theirs[0] != mine[0]:
                raise PeerError(f"rank {rank} asks for something else than rank {self.rank}: nothing was changed")
        self.calls += 1
        self.mark = _new_mark()
        self.began = time.perf_counter(), time.thread_time()
        return [theirs[:-1] for theirs in everyones]

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each rank has: as many integers of 64 bits on all of them, 7 at most.

        A message to each: Gloo's own all-gather hands on from rank to rank, and so all wait for the sum of all delays.
        """
        self._give(dict.fromkeys(self.others, numbers))
        return self._everyones(numbers)

    def _everyones(self, numbers: Sequence[int]) -> list[list[int]]:
        found = {self.rank: list(numbers)} | self._hear(self.others, len(numbers))
        return [found[rank] for rank in range(self.size)]

    def scatter(self, numbers: Sequence[int]) -> list[int]:
        """What each rank has for this one, which has as many integers as there are ranks, for each rank one."""
        self._give({o: [numbers[o]] for o in self.others})
        found = {self.rank: [numbers[self.rank]]} | self._hear(self.others, 1)
        return [found[rank][0] for rank in range(self.size)]

    def _give(self, given: Mapping[int, Sequence[int]]) -> None:
        """Send numbers to some ranks."""
        if self._abandoned:
            self.close()
        if self._pg is None:
            raise PeerError("a peer was lost, or the group was shut down: make a new group")
        messages = {o: _message_of(numbers) for o, numbers in given.items()}
        self._given = [(self.post("send", message, o, _NUMBERS), o, message) for o, message in messages.items()]

    def _hear(self, sources: Sequence[int], n: int, patience: int = 1) -> dict[int, list[int]]:
        """So many numbers of each of some ranks, and what was given is sent: in so many timeouts, not one by one."""
        found: dict[int, list[int]] = {}
        end = time.monotonic() + patience * self._timeout.total_seconds()
        for o in sources:
            self._expect(o, 1)
            room, work = self._expected[o].popleft()
            self._wait_until(end, work, o)
            found[o] = room.tolist()
        for work, o, _ in self._given:
            self._wait_until(end, work, o)
        self._given.clear()
        for o, theirs in found.items():
            if theirs[0] != n:
                self.close()
                raise PeerError(f"rank {o} is at another point of the program than rank {self.rank}")
        return {o: theirs[1 : 1 + n] for o, theirs in found.items()}

    def _wait_until(self, end: float, work: Any, rank: int) -> None:
        left = max(0.001, end - time.monotonic())  # torch takes 0 for its own timeout
        self.wait(work, rank, timedelta(seconds=left))

    def _expect(self, source: int, messages: int) -> None:
        """Have so many messages of numbers expected of a rank.

        One that nobody expects is only announced, and comes when it has been asked for: a way there and back more, and
        it ends when Gloo's thread of the sender finds a core.
        """
        expected = self._expected[source]
        while len(expected) < messages:
            room = np.zeros(_WORDS, np.int64)
            expected.append((room, self.post("recv", room.view(np.uint8), source, _NUMBERS)))

    def _look_ahead(self) -> None:
        """Expect what the next collective begins and ends with. That a rank is lost is for that one to find."""
        with suppress(PeerError):
            for o in self.others:
                if not self.closed:
                    self._expect(o, _AHEAD)

    def check_same(self, what: str, numbers: Sequence[int]) -> None:
        """Raise PeerError unless all ranks have the same."""
        for rank, theirs in enumerate(self.gather(numbers)):
            if theirs != list(numbers):
                raise PeerError(f"rank {rank} asks for another {what} than rank {self.rank}")

    def conclude(self, error: Exception | None, report: Sequence[int] = ()) -> list[int]:
        """All ranks learn whether all have succeeded; only if they have does this return: the largest of their reports.

        A report has as many numbers on all ranks, 5 at most; of each the largest one.

        Raises
        ------
        CodecError
            `error`, if this rank is the cause; else PeerError, which names the rank that is.
        """
        status = _status_of(error)
        self.agree()
        worst, rank, *largest = self._verdict([status, self.rank, *report])
        self._look_ahead()
        if error is not None and status != _LEFT:
            raise error
        if worst == _NONFINITE:
            raise PeerError(f"rank {rank} has NaN or Inf: nothing was changed", Status.NONFINITE) from error
        if worst == _REFUSED:
            raise PeerError(f"rank {rank} could not do its part: nothing was changed") from error
        if error is not None:
            raise error
        if worst:
            raise PeerError("a rank has lost another one: nothing was changed")
        return largest

    def _verdict(self, mine: list[int]) -> list[int]:
        """The worst that any rank has to tell, which one has, and the largest of what else they tell.

        Rank 0 asks all, and then tells all: whichever other one is lost meanwhile, either all succeed or none does. It
        may have begun to wait a timeout after this one, and then waits for one itself.
        """
        if self.rank:
            self._give({0: mine})
            verdict = self._hear([0], len(mine), patience=2)[0]
            self._check_verdict(verdict)
            return verdict
        self._give({})
        told = [mine, *self._hear(self.others, len(mine)).values()]
        worst = max(told, key=lambda theirs: theirs[0])
        for theirs in told:
            self._check_verdict(theirs)
        verdict = worst[:2] + [max(column) for column in list(zip(*told, strict=True))[2:]]
        self._tell(_message_of(verdict))
        return verdict

    def _check_verdict(self, told: Sequence[int]) -> None:
        """Raise PeerError, and close the channel, unless a status and the rank that it is of are possible."""
        status, rank = told[:2]
        if not (_OK <= status <= _NONFINITE and 0 <= rank < self.size):
            self.close()
            raise PeerError(f"a rank reports the status {status} of rank {rank}, which cannot be: make a new group")

    def _tell(self, message: Array) -> None:
        """Send this to all who are there. That one is not any more is for the next collective to find."""
        under_way: list[Any] = []
        lost = False
        for o in self.others:
            try:
                under_way.append(self._begin("send", message, o, _NUMBERS))
            except RuntimeError:
                lost = True
        for work in under_way:
            try:
                work.wait(self._timeout)
            except RuntimeError:
                lost = True
        if lost:
            self.close()

    def _lose(self, rank: int, error: RuntimeError) -> NoReturn:
        """A connection is gone. Close the others, so that no rank waits for this one."""
        self.close()
        raise PeerError(f"rank {rank} is gone or does not answer: {error}") from error

    def abandon(self) -> None:
        """Let the collective under way fail before it ends, and all that come; the one call for other threads.

        What is the caller's is not written from then on.
        """
        with self._writing:
            self._abandoned = True

    @contextmanager
    def writing(self) -> Iterator[None]:
        """While what is the caller's is written: :meth:`abandon` waits for the end, and after it this is an error."""
        with self._writing:
            if self._abandoned:
                raise PeerError("the collective was given up: make a new group")
            with self.clock.during("decode_s"):
                yield

    def close(self) -> None:
        """Give the connections up."""
        pg, self._pg = self._pg, None
        self._sending.clear()
        self._given.clear()
        self._asked = None
        for expected in self._expected.values():
            expected.clear()
        if pg is not None:
            del pg
            gc.collect()  # Gloo closes them when the last one forgets the group
        self._arena = self._result = np.empty(0, np.uint8)  # something may still be written to the old ones
