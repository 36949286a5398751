"""Messages of one group in flight: requests, frames, uncompressed values and verdicts (docs/protocol.md)."""

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from codec import PeerError, Status
from codec.torch.transport.counters import Counters, Stopwatch
from codec.torch.transport.gloo import Timeout, check_timeout, close_connections, connect, timeout_of
from codec.torch.transport.messages import (
    FRAME_BEGIN,
    FRAME_LENGTH,
    FRAMES_TAG,
    NUMBERS_TAG,
    NUMBERS_WORDS,
    Array,
    IncomingFrame,
    IncomingValues,
    new_mark,
    numbers_message,
)
from codec.torch.transport.nccl import DeviceExchange, connect_nccl, uses_nccl
from codec.torch.transport.streams import engine_is_usable, host_memory, logger

_ALIGN = 64  # bytes: messages begin at multiples of this in the arena
_PREFETCHED = 2  # receives of numbers posted for each rank before they are needed: a request and a verdict
# Status that a rank reports, in ascending order of severity; _OTHER_RANK: an error or a missing frame of another rank.
_SUCCESS, _OTHER_RANK, _ERROR, _NONFINITE = range(4)
# last number of a request: a rank can take part, has found an error, or has found NaN or Inf
_ABLE, _UNABLE, _UNABLE_NONFINITE = range(3)

_CLOSED = "a peer was lost, or the group was shut down: make a new group"


def _unable(rank: int, reason: int) -> PeerError:
    """Return the error for a rank whose request ends with `reason`, so that it cannot take part in a collective."""
    if reason == _UNABLE_NONFINITE:
        return PeerError(f"rank {rank} has NaN or Inf: nothing was changed", Status.NONFINITE)
    return PeerError(f"rank {rank} could not begin: nothing was changed")


def _status_of(error: Exception | None) -> int:
    if error is None:
        return _SUCCESS
    if isinstance(error, PeerError):
        return _OTHER_RANK
    return _NONFINITE if getattr(error, "code", None) == Status.NONFINITE else _ERROR


class Channel:
    """Connections among the ranks of a group that carry nothing but the messages of codec's collectives.

    Gloo makes the connections, through the store by which the group's ranks have found each other. So a channel works
    for groups of any backend, also for those that torch.distributed does not list.

    One collective runs at a time, in the same order on all ranks. A :class:`PeerError` that breaks a connection closes
    the channel, and the ranks that wait for this rank fail at once.

    Parameters
    ----------
    group : ProcessGroup or None
        Ranks of the channel; None: all. Every rank must make its channel at the same point of the program.
    timeout : float, timedelta or None
        Longest time, in seconds, that a peer may keep this rank waiting; None: the timeout of `group`.
    """

    def __init__(self, group: Any, timeout: Timeout | None) -> None:
        group = group or dist.group.WORLD
        self._timeout = check_timeout(timeout) or timeout_of(group)
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.others = [(self.rank + i) % self.size for i in range(1, self.size)]  # a different first one on each rank
        self._pg: Any = connect(group, self._timeout)  # None: closed
        self._gpus: DeviceExchange | None = None  # carries frames between GPUs
        self.calls = 0  # collectives that all ranks have begun
        self.started = 0.0, 0.0  # wall-clock and CPU time, in seconds, at the begin of the last collective
        self._request: list[int] | None = None  # numbers sent, while those of the other ranks are not received
        self.refused = False  # a rank has reported that it cannot take part, or has other arguments
        self._mark = 0  # of IncomingValues; new with each collective
        self.counters = Counters()
        self.clock = Stopwatch(self.counters)
        self._arena = np.empty(0, np.uint8)  # messages of a collective
        self._pinned = False  # the arena is page-locked
        self._reserved = 0  # bytes of the arena that algorithms have reserved
        self._used = self._last = 0  # bytes of the arena in use; offset of the message allocated last
        self._result = np.empty(0, np.uint8)
        self._sum = np.empty(0, np.float32)
        self._sends: list[tuple[Any, int]] = []
        self._number_sends: list[tuple[Any, int, Array]] = []  # with the message, which must live until it is sent
        self._number_receives: dict[int, deque[tuple[Array, Any]]] = {o: deque() for o in self.others}
        self._cancelled = False
        self._writing = threading.Lock()

    @property
    def sent_nbytes(self) -> int:
        """Bytes of frames and of uncompressed values sent to all other ranks together."""
        return self.counters.sent_nbytes

    @property
    def closed(self) -> bool:
        """True after a connection was lost, or after :meth:`close`."""
        return self._pg is None

    @property
    def cancelled(self) -> bool:
        """True after :meth:`cancel`."""
        return self._cancelled

    # Memory of a collective

    @staticmethod
    def arena_nbytes(bounds: Sequence[int]) -> int:
        """Return the bytes of the arena that messages take whose frames have at most `bounds` bytes."""
        return sum(-(-(n + FRAME_LENGTH.size) // _ALIGN) * _ALIGN for n in bounds)

    def begin(self, nbytes: int, meanwhile: Callable[[], None] = lambda: None, *, pinned: bool = False) -> None:
        """Reserve memory for the messages of an algorithm, and wait for the requests of all ranks.

        Parameters
        ----------
        nbytes : int
            Bytes of the arena, by :meth:`arena_nbytes`.
        meanwhile : callable
            Called before this rank waits.
        pinned : bool
            Frames are copied from and to a GPU.
        """
        self._reserved += nbytes
        if self._arena.nbytes < self._reserved or pinned > self._pinned:  # messages allocated before keep the old arena
            self._pinned = self._pinned or pinned
            self._arena = host_memory(self._reserved, pinned=self._pinned)
        meanwhile()
        self.await_requests()

    def allocate(self, nbytes: int) -> Array:
        """Return memory in the arena for a message whose frame has at most `nbytes` bytes."""
        begin = self._last = self._used
        end = begin + FRAME_LENGTH.size + nbytes
        if end > self._arena.nbytes:
            raise AssertionError(
                f"a collective allocates {end} bytes of messages; it has reserved {self._arena.nbytes}"
            )
        self._used = -(-end // _ALIGN) * _ALIGN
        return self._arena[begin:end]

    @staticmethod
    def frame_buffer(message: Array) -> Array:
        """Return the bytes of a message that hold the frame."""
        return message[FRAME_LENGTH.size :]

    def finish_message(self, message: Array, nbytes: int) -> Array:
        """Write the length of the frame into the message allocated last, and free the memory behind the frame.

        Parameters
        ----------
        message : ndarray of uint8
            Memory that :meth:`allocate` returned last.
        nbytes : int
            Bytes of the frame in it.

        Returns
        -------
        ndarray of uint8
            Message to send.
        """
        FRAME_LENGTH.pack_into(message.data, 0, nbytes)
        message = message[: FRAME_LENGTH.size + nbytes]
        self._used = -(-(self._last + message.nbytes) // _ALIGN) * _ALIGN
        return message

    def result_buffer(self, n: int, dtype: Any) -> Array:
        """Return an array of `n` values; it shares memory with the one returned before."""
        nbytes = n * np.dtype(dtype).itemsize
        if self._result.nbytes < nbytes:
            self._result = np.empty(nbytes, np.uint8)
        return self._result[:nbytes].view(dtype)

    def sum_buffer(self, n: int) -> Array:
        """Return an array of `n` float32 values; it shares memory with the one returned before."""
        if self._sum.size < n:
            self._sum = np.empty(n, np.float32)
        return self._sum[:n]

    # Data. All receives of a phase should be posted before anything is sent.

    def receive(self, nbytes: int, source: int) -> IncomingFrame:
        """Post the receive of a frame of at most `nbytes` bytes."""
        buffer = self.allocate(nbytes)
        buffer[:FRAME_BEGIN] = 0  # else a message that is too short would end in a frame of an earlier collective
        wait = partial(self.wait, self.post("recv", buffer, source), source)
        return IncomingFrame(buffer, source, wait, self.counters)

    def receive_values(self, buffer: Array, source: int) -> IncomingValues:
        """Post the receive of as many uncompressed values as `buffer` has."""
        incoming = IncomingValues(buffer, source, self._mark)
        self.counters.received_nbytes += buffer.nbytes
        return incoming.posted(partial(self.wait, self.post("recv", buffer.view(np.uint8), source), source))

    def send(self, message: Array | None, to: int) -> None:
        """Send a message of :meth:`finish_message`, which must not change until :meth:`wait_for_sends`.

        Parameters
        ----------
        message : ndarray of uint8 or None
            None tells the receiver that there is no frame.
        to : int
            Receiving rank.
        """
        if message is None:
            message = np.zeros(FRAME_LENGTH.size, np.uint8)
        self.send_values(message, to)

    def send_values(self, values: Array, to: int) -> None:
        """Send uncompressed values, which must not change until :meth:`wait_for_sends`."""
        self.counters.sent_nbytes += values.nbytes
        self._sends.append((self.post("send", values.view(np.uint8), to), to))

    def wait_for_sends(self) -> None:
        """Wait until all data is sent."""
        for work, to in self._sends:
            self.wait(work, to)
        self._sends.clear()

    def post(self, kind: str, message: Array, rank: int, tag: int = FRAMES_TAG) -> Any:
        """Begin to send or to receive a message.

        Parameters
        ----------
        kind : {"send", "recv"}
            Direction.
        message : ndarray of uint8
            Bytes to send, or memory for those to receive.
        rank : int
            Other rank.
        tag : int
            FRAMES_TAG or NUMBERS_TAG.

        Returns
        -------
        Work
            Handle for :meth:`wait`.

        Raises
        ------
        PeerError
            The connection is lost; the channel is closed.
        """
        try:
            with self.clock.during("wire_s"):
                return self._post(kind, message, rank, tag)
        except RuntimeError as e:
            self._connection_lost(rank, e)

    def _post(self, kind: str, message: Array, rank: int, tag: int) -> Any:
        return (self._pg.send if kind == "send" else self._pg.recv)([torch.from_numpy(message)], rank, tag)

    def wait(self, work: Any, rank: int, within: timedelta | None = None) -> None:
        """Wait for a message to or from `rank`, at most for the channel's timeout or `within`.

        Gloo does not end a wait for a message of which a part has arrived when its sender dies: this rank learns of
        that after the timeout.

        Raises
        ------
        PeerError
            The connection is lost or the time is over; the channel is closed.
        """
        try:
            with self.clock.during("wire_s"):
                work.wait(within or self._timeout)
        except RuntimeError as e:
            self._connection_lost(rank, e)

    # Frames that stay on GPUs

    def connect_gpus(self, group: Any) -> None:
        """Connect the GPUs of all ranks if NCCL carries the tensors of `group` there and all ranks can encode there."""
        if self.size == 1 or not uses_nccl(group):
            return
        usable = self.gather_numbers([int(engine_is_usable())])
        if [0] in usable:
            logger.info("rank %d cannot encode on its GPU: frames cross to host memory", usable.index([0]))
        else:
            self._gpus = DeviceExchange(connect_nccl(group), self.size, self._timeout)

    @property
    def connects_gpus(self) -> bool:
        """True if frames need not cross to host memory."""
        return self._gpus is not None

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Send row i of bytes on the GPU to rank i; return the rows from all ranks, by rank."""
        return self._between_gpus("all_to_all", rows, rows.nbytes // self.size)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the rows of bytes on the GPUs of all ranks, by rank, from this rank's row."""
        return self._between_gpus("all_gather", row, row.nbytes)

    def _between_gpus(self, kind: str, sent: torch.Tensor, nbytes: int) -> torch.Tensor:
        """Run a collective that sends `nbytes` bytes to each other rank.

        Raises
        ------
        PeerError
            A rank is lost or does not answer in time, or the channel is closed.
        """
        if self._gpus is None:
            raise PeerError(_CLOSED)
        try:
            with self.clock.during("wire_s"):
                received = getattr(self._gpus, kind)(sent, lambda: self._cancelled)
        except PeerError:
            self.close()
            raise
        self.counters.sent_nbytes += nbytes * len(self.others)
        self.counters.received_nbytes += nbytes * len(self.others)
        return received

    # Requests: the begin of a collective

    def send_request(self, numbers: Sequence[int], error: BaseException | None = None) -> None:
        """Send all ranks the request of a collective; :meth:`await_requests` receives theirs.

        Parameters
        ----------
        numbers : sequence of int
            At most 3 numbers. The first one, the signature, must be the same on all ranks.
        error : BaseException, optional
            Error in this rank's arguments: this rank cannot take part.
        """
        self.refused = False
        self._reserved = self._used = 0
        last = _ABLE
        if error is not None:
            last = _UNABLE_NONFINITE if getattr(error, "code", None) == Status.NONFINITE else _UNABLE
        self._request = [*numbers, *[0] * (3 - len(numbers)), last]
        self._send_numbers(dict.fromkeys(self.others, self._request))

    def await_requests(self) -> list[list[int]]:
        """Wait for the requests of all ranks; do nothing if they have been received.

        Returns
        -------
        list of list of int
            The numbers of each rank; empty if the requests had been received before.

        Raises
        ------
        PeerError
            A rank cannot take part, has another signature, or is lost.
        """
        mine, self._request = self._request, None
        if mine is None:
            return []
        requests = self._gather_numbers(mine)
        self.refused = any(theirs[-1] or theirs[0] != mine[0] for theirs in requests)
        for rank, theirs in enumerate(requests):
            if theirs[-1]:
                raise _unable(rank, theirs[-1])
            if theirs[0] != mine[0]:
                raise PeerError(
                    f"rank {rank} has begun another collective than rank {self.rank}, or has passed other arguments: "
                    "nothing was changed"
                )
        self.calls += 1
        self._mark = new_mark()
        self.started = time.perf_counter(), time.thread_time()
        return [theirs[:-1] for theirs in requests]

    def check_same(self, what: str, numbers: Sequence[int]) -> None:
        """Raise PeerError unless all ranks pass the same numbers; `what` describes them."""
        for rank, theirs in enumerate(self.gather_numbers(numbers)):
            if theirs != list(numbers):
                raise PeerError(f"rank {rank} has another {what} than rank {self.rank}")

    # Numbers

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank.

        Each rank sends a message to each other one. Gloo's own all-gather passes messages on from rank to rank, so that
        all ranks wait for the sum of all delays.

        Parameters
        ----------
        numbers : sequence of int
            At most 7 integers of 64 bits, as many on all ranks.
        """
        self._send_numbers(dict.fromkeys(self.others, numbers))
        return self._gather_numbers(numbers)

    def scatter_numbers(self, numbers: Sequence[int]) -> list[int]:
        """Send number i of this rank to rank i; return the number that each rank has sent to this one."""
        self._send_numbers({o: [numbers[o]] for o in self.others})
        found = {self.rank: [numbers[self.rank]]} | self._receive_numbers(self.others, 1)
        return [found[rank][0] for rank in range(self.size)]

    def _gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        found = {self.rank: list(numbers)} | self._receive_numbers(self.others, len(numbers))
        return [found[rank] for rank in range(self.size)]

    def _send_numbers(self, numbers: Mapping[int, Sequence[int]]) -> None:
        """Begin to send numbers to some ranks; :meth:`_receive_numbers` waits until they are sent."""
        if self._cancelled:
            self.close()
        if self._pg is None:
            raise PeerError(_CLOSED)
        messages = {o: numbers_message(each) for o, each in numbers.items()}
        self._number_sends = [
            (self.post("send", message, o, NUMBERS_TAG), o, message) for o, message in messages.items()
        ]

    def _receive_numbers(self, sources: Sequence[int], n: int, timeouts: int = 1) -> dict[int, list[int]]:
        """Receive `n` numbers of each of some ranks, and wait until this rank's own are sent.

        Parameters
        ----------
        sources : sequence of int
            Ranks that send.
        n : int
            Numbers in each message.
        timeouts : int
            Longest wait for all messages together, in timeouts of the channel.
        """
        found: dict[int, list[int]] = {}
        end = time.monotonic() + timeouts * self._timeout.total_seconds()
        for o in sources:
            self._post_number_receives(o, 1)
            buffer, work = self._number_receives[o].popleft()
            self._wait_until(end, work, o)
            found[o] = buffer.tolist()
        for work, o, _ in self._number_sends:
            self._wait_until(end, work, o)
        self._number_sends.clear()
        for o, theirs in found.items():
            if theirs[0] != n:
                self.close()
                raise PeerError(
                    f"rank {o} is at another point of the program than rank {self.rank}: all ranks must begin the same "
                    "collectives in the same order; make a new group"
                )
        return {o: theirs[1 : 1 + n] for o, theirs in found.items()}

    def _wait_until(self, end: float, work: Any, rank: int) -> None:
        left = max(0.001, end - time.monotonic())  # torch takes 0 for its own timeout
        self.wait(work, rank, timedelta(seconds=left))

    def _post_number_receives(self, source: int, count: int) -> None:
        """Post receives of numbers of a rank, until `count` of them are in flight.

        A message whose receive is not posted is only announced, and sent when the receiver has asked for it: one more
        round trip, which ends when Gloo's thread of the sender gets a core.
        """
        receives = self._number_receives[source]
        while len(receives) < count:
            buffer = np.zeros(NUMBERS_WORDS, np.int64)
            receives.append((buffer, self.post("recv", buffer.view(np.uint8), source, NUMBERS_TAG)))

    def _post_next_receives(self) -> None:
        """Post receives of numbers for the next collective, which reports a lost rank."""
        with suppress(PeerError):
            for o in self.others:
                if not self.closed:
                    self._post_number_receives(o, _PREFETCHED)

    # Verdicts: the end of a collective

    def exchange_verdict(self, error: Exception | None, report: Sequence[int] = ()) -> list[int]:
        """Tell all ranks how this rank's part went, and return only if all ranks have succeeded.

        Parameters
        ----------
        error : Exception or None
            Error of this rank.
        report : sequence of int
            At most 5 numbers, as many on all ranks.

        Returns
        -------
        list of int
            Maximum over all ranks of each number of `report`.

        Raises
        ------
        CodecError
            `error`, if it is this rank's own; else PeerError, which names the rank that caused it.
        """
        status = _status_of(error)
        self.await_requests()
        worst, rank, *largest = self._verdict([status, self.rank, *report])
        self._post_next_receives()
        if error is not None and status != _OTHER_RANK:
            raise error
        if worst == _NONFINITE:
            raise PeerError(f"rank {rank} has NaN or Inf: nothing was changed", Status.NONFINITE) from error
        if worst == _ERROR:
            raise PeerError(f"rank {rank} could not do its part: nothing was changed") from error
        if error is not None:
            raise error
        if worst:
            raise PeerError("a rank has lost another one: nothing was changed")
        return largest

    def _verdict(self, mine: list[int]) -> list[int]:
        """Return the worst status, the lowest rank that reported it, and the maximum of each number of the reports.

        Rank 0 receives all reports, and then sends the verdict to all. So, whichever other rank is lost meanwhile,
        either all ranks succeed or none does. Rank 0 may begin to wait one timeout after this rank, and wait for one
        timeout itself.
        """
        if self.rank:
            self._send_numbers({0: mine})
            verdict = self._receive_numbers([0], len(mine), timeouts=2)[0]
            self._check_status(verdict)
            return verdict
        self._send_numbers({})
        reports = [mine, *self._receive_numbers(self.others, len(mine)).values()]
        worst = max(reports, key=lambda report: report[0])
        for report in reports:
            self._check_status(report)
        verdict = worst[:2] + [max(column) for column in list(zip(*reports, strict=True))[2:]]
        self._broadcast_verdict(numbers_message(verdict))
        return verdict

    def _check_status(self, report: Sequence[int]) -> None:
        """Raise PeerError, and close the channel, unless status and rank are possible."""
        status, rank = report[:2]
        if not (_SUCCESS <= status <= _NONFINITE and 0 <= rank < self.size):
            self.close()
            raise PeerError(f"a rank reports the status {status} of rank {rank}, which cannot be: make a new group")

    def _broadcast_verdict(self, message: Array) -> None:
        """Send the verdict to all ranks that can be reached; the next collective reports a lost rank."""
        works: list[Any] = []
        lost = False
        for o in self.others:
            try:
                works.append(self._post("send", message, o, NUMBERS_TAG))
            except RuntimeError:
                lost = True
        for work in works:
            try:
                work.wait(self._timeout)
            except RuntimeError:
                lost = True
        if lost:
            self.close()

    # The end of a channel

    def _connection_lost(self, rank: int, error: RuntimeError) -> NoReturn:
        """Close all connections, so that no rank waits for this one, and raise PeerError."""
        self.close()
        raise PeerError(f"rank {rank} is gone or does not answer: {error}") from error

    def cancel(self) -> None:
        """Make the collective in flight and all later ones fail; from then on no tensor of the caller is written.

        This is the only method for threads other than the one that runs the collectives.
        """
        with self._writing:
            self._cancelled = True

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Return a context manager for writing to tensors of the caller.

        :meth:`cancel` waits until the body has ended; after it, entering the context raises PeerError.
        """
        with self._writing:
            if self._cancelled:
                raise PeerError("the collective was cancelled: make a new group")
            with self.clock.during("decode_s"):
                yield

    def close(self) -> None:
        """Close the connections."""
        pg, self._pg = self._pg, None
        gpus, self._gpus = self._gpus, None
        self._sends.clear()
        self._number_sends.clear()
        self._request = None
        for receives in self._number_receives.values():
            receives.clear()
        if pg is not None:
            close_connections(pg, self.others)
            del pg
            gc.collect()  # frees the group
        if gpus is not None:
            gpus.close()
        self._arena = self._result = np.empty(0, np.uint8)  # messages in flight may still be written to the old ones
