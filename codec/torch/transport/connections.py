"""Connections of a channel: messages posted to other ranks, waits for them, and the end of all connections."""

import gc
import weakref
from datetime import timedelta
from typing import Any, NoReturn, Protocol

from codec import PeerError
from codec.arguments import check_timeout
from codec.torch._compat import from_numpy
from codec.torch.transport.counters import Counters, Stopwatch
from codec.torch.transport.gloo import Timeout, close_connections, connect, timeout_of
from codec.torch.transport.messages import FRAMES_TAG, Array

CLOSED = "a peer was lost, or the group was shut down: make a new group"


class Part(Protocol):
    """Part of a channel that keeps messages in flight, memory for them, or connections of its own."""

    def release(self) -> None:
        """Give them up: the connections are closed."""


class Connections:
    """Connections of this rank with all other ranks of a group, for the messages of one channel.

    Gloo makes the connections, through the store by which the group's ranks have found each other. So they exist for
    groups of any backend, also for those that torch.distributed does not list.

    A lost connection, or a peer that does not answer in time, closes all connections and raises :class:`PeerError`: the
    ranks that wait for this rank fail at once. Closed connections stay closed, and later calls raise PeerError.

    Only the thread that runs the collectives calls methods; :meth:`cancel` is for any thread.

    Parameters
    ----------
    group : ProcessGroup
        Ranks to connect. Every rank must connect at the same point of the program.
    timeout : float, timedelta or None
        Longest time, in seconds, that a peer may keep this rank waiting; None: the timeout of `group`.
    """

    def __init__(self, group: Any, timeout: Timeout | None) -> None:
        self.timeout = check_timeout(timeout) or timeout_of(group)
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.others = [(self.rank + i) % self.size for i in range(1, self.size)]  # a different first one on each rank
        self.counters = Counters()
        self.clock = Stopwatch(self.counters)
        self._pg: Any = connect(group, self.timeout)  # None: closed
        self._parts: list[weakref.ref[Part]] = []
        self._cancelled = False

    @property
    def closed(self) -> bool:
        """True after a connection was lost, or after :meth:`close`."""
        return self._pg is None

    @property
    def cancelled(self) -> bool:
        """True after :meth:`cancel`."""
        return self._cancelled

    def attach(self, part: Part) -> None:
        """Have :meth:`close` release a part of the channel.

        The reference is weak: with a cycle, connections of a channel that nobody uses any more would stay open until
        the next garbage collection.
        """
        self._parts.append(weakref.ref(part))

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
            The connection is lost; all are closed.
        """
        if self._pg is None:
            raise PeerError(CLOSED)
        try:
            with self.clock.during("wire_s"):
                return self._post(kind, message, rank, tag)
        except RuntimeError as e:
            self._connection_lost(rank, e)

    def _post(self, kind: str, message: Array, rank: int, tag: int) -> Any:
        return (self._pg.send if kind == "send" else self._pg.recv)([from_numpy(message)], rank, tag)

    def wait(self, work: Any, rank: int, within: timedelta | None = None) -> None:
        """Wait for a message to or from `rank`, at most for the timeout of the connections or `within`.

        Gloo does not end a wait for a message of which a part has arrived when its sender dies: this rank learns of
        that after the timeout.

        Raises
        ------
        PeerError
            The connection is lost or the time is over; all connections are closed.
        """
        try:
            with self.clock.during("wire_s"):
                work.wait(within or self.timeout)
        except RuntimeError as e:
            self._connection_lost(rank, e)

    def broadcast(self, message: Array, tag: int) -> None:
        """Send a message to all ranks that can be reached, and wait until it is sent.

        A rank that cannot be reached is no error here. Its loss closes the connections, so that the next collective
        reports it.
        """
        works: list[Any] = []
        lost = False
        for o in self.others:
            try:
                works.append(self._post("send", message, o, tag))
            except RuntimeError:
                lost = True
        for work in works:
            try:
                work.wait(self.timeout)
            except RuntimeError:
                lost = True
        if lost:
            self.close()

    def _connection_lost(self, rank: int, error: RuntimeError) -> NoReturn:
        """Close all connections, so that no rank waits for this one, and raise PeerError."""
        self.close()
        raise PeerError(f"rank {rank} is gone or does not answer: {error}") from error

    def cancel(self) -> None:
        """Make this rank's next request or verdict fail, and end its wait for frames of other GPUs."""
        self._cancelled = True

    def check_open(self) -> None:
        """Raise PeerError if the connections are closed; close them first if they were cancelled."""
        if self._cancelled:
            self.close()
        if self._pg is None:
            raise PeerError(CLOSED)

    def close(self) -> None:
        """Close the connections, and release the parts of the channel; once closed, do nothing."""
        pg, self._pg = self._pg, None
        if pg is None:
            return
        close_connections(pg, self.others)
        for reference in self._parts:
            if (part := reference()) is not None:
                part.release()
        del pg
        gc.collect()  # frees the group
