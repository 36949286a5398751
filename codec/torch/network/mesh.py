"""Messages among all ranks of a group, for collectives (docs/spec/protocol.md, sections 2 and 3)."""

import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from codec import PeerError
from codec.torch.network.inbox import Arrival, Inbox, Inboxes, Receive
from codec.torch.network.sockets import ConnectionInfo
from codec.torch.network.stripe import FIELDS, HEADER_NBYTES, Send, Stripe
from codec.torch.network.tls import AnySocket
from codec.torch.network.version import without_crc
from codec.torch.network.waits import Wait

CLOSED = "a peer was lost, or the group was shut down: make a new group"

_MAGIC = b"CDCM"
_DATA, _ABORT = range(2)  # kinds of messages
_MOST_NBYTES = {_DATA: 1 << 36, _ABORT: 1 << 13}  # maximum bytes of a body, by kind of the message
_DIRECT_NBYTES = 1 << 18  # maximum bytes of a message that the calling thread writes itself
_TURN_NBYTES = 1 << 22  # maximum bytes read from one connection before the next one is served
_MOST_SAMPLES = 16  # maximum number of connections whose round-trip time is read


class Mesh:
    """Connections to all other ranks, and the network thread, which reads from and writes to them.

    A message contains three numbers: of its collective, of the part of the collective, and of the message among the
    messages of this part to the same rank. So messages of a part may use different connections. A message that arrives
    before this rank has requested it is stored in the inbox of its collective. Messages of collectives that have ended
    on this rank are dropped. While the early messages of a rank fill its share of memory, and this rank requests none
    that is missing, reading from that rank pauses. If a rank sends more early messages than the limit, it is treated as
    lost.

    If a rank is lost, all waits for it end with :class:`PeerError`.

    Parameters
    ----------
    rank : int
        This rank.
    sockets : mapping
        Connected sockets of each other rank, which the mesh owns from now on.
    """

    def __init__(self, rank: int, sockets: Mapping[int, Sequence[AnySocket]]) -> None:
        self.rank = rank
        self.progress = dict.fromkeys(sockets, time.monotonic())  # arrival time of each rank's last message
        self._lock = threading.Lock()  # guards inboxes, lost ranks, and paused connections
        self._pid = os.getpid()
        self._poll = select.epoll()
        self._stripes = {o: [Stripe(s, o, self._poll) for s in each] for o, each in sockets.items()}
        self._by_fd = {s.fd: s for each in self._stripes.values() for s in each}
        self._paused = set[Stripe]()  # connections whose next message is early, and is not read yet
        self._resumed = set[Stripe]()  # connections that the network thread tries to read, whatever poll reports
        self._inboxes = Inboxes(sockets)
        self._lost: dict[int, str] = {}  # reason of the loss, by lost rank
        self._closed = False
        self._clock = 0  # id of the network thread's CPU-time clock; 0: not started
        self._wakes, self._waker = socket.socketpair()
        # The garbage collector may find the socket of a reference cycle before it calls __del__, and would warn.
        weakref.finalize(self, self._waker.close).atexit = False
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._poll.register(self._wakes, select.EPOLLIN)
        self._resume(s for s in self._by_fd.values() if s.buffered)
        if sockets:
            mine = weakref.ref(self), self._poll, self._wakes
            threading.Thread(target=_serve, args=mine, name=f"codec, rank {rank}, network", daemon=True).start()
        else:
            self._poll.close()
            self._wakes.close()

    # Collectives

    def begin(self, number: int) -> Inbox:
        """Begin a collective, and return its inbox, which stores its messages until :meth:`end`."""
        with self._lock:
            return self._inboxes.begin(number)

    def end(self, number: int) -> None:
        """End a collective, and drop its messages, including those that arrive later.

        After this returns, no buffer that was passed to :meth:`post` is written to.
        """
        with self._lock:
            self._inboxes.end(number)
            self._resume(self._paused)

    def post(self, number: int, receive: Receive) -> None:
        """Request a message of a collective that has begun; `receive` completes when the message has arrived."""
        with self._lock:
            inbox = self._inboxes[number]
            arrival = self._inboxes.take(inbox, receive)
            here = arrival is not None and arrival.complete  # if incomplete, the network thread completes `receive`
            error: Exception | None = None
            if arrival is None:
                error = inbox.refusal(receive.source) or self._loss(receive.source)
                if error is None:
                    inbox.request(receive)
                    self._resume(s for s in self._stripes[receive.place[0]] if s.paused)
            elif not here:
                arrival.receive = receive
        if error is not None:
            receive.complete(error)
        elif arrival is not None and here:
            receive.take(arrival)

    def send(self, to: int, number: int, part: int, index: int, signature: int, body: Sequence[Any]) -> Send:
        """Start to send a message.

        Parameters
        ----------
        to : int
            Receiving rank.
        number, part, index : int
            Numbers of the collective, of its part, and of the message among the messages of the part to rank `to`.
        signature : int
            Signature of the part.
        body : sequence of buffers
            Bytes of the message, which must not change before the returned wait ends.

        Raises
        ------
        PeerError
            The rank is lost, or the connections are closed.
        """
        return self._send(to, _DATA, number, part, index, signature, body)

    def abort(self, number: int, body: bytes) -> None:
        """Send an abort message for a collective to all ranks that can be reached, after the messages in its queues."""
        for stripe in self._by_fd.values():
            stripe.keep(number)
        for o in self._stripes:
            with suppress(PeerError):
                self._send(o, _ABORT, number, 0, 0, 0, [body])

    def explanation(self, number: int, source: int) -> Wait:
        """Return a wait for the abort message from a rank, whose body is then in :attr:`Inbox.aborts`.

        All parts of a collective that wait for the same rank share one wait.
        """
        with self._lock:
            inbox, error = self._inboxes[number], self._loss(source)
            wait = inbox.explained.setdefault(source, Wait())
            wait.source = source
            known = source in inbox.aborts
        if known or error is not None:
            wait.complete(None if known else error)
        return wait

    def _send(
        self, to: int, kind: int, number: int, part: int, index: int, signature: int, body: Sequence[Any]
    ) -> Send:
        if (error := self._loss(to)) is not None:
            raise error
        parts = [memoryview(b).cast("B") for b in body]
        nbytes = sum(p.nbytes for p in parts)
        send = Send((_MAGIC, kind, number, part, index, signature, nbytes), parts, to)
        stripes, direct = self._stripes[to], nbytes <= _DIRECT_NBYTES
        stripe = stripes[0 if direct else index % len(stripes)]
        try:
            stripe.put(send, direct=direct)
        except (OSError, ValueError) as e:  # ValueError: closed by another thread
            self._lose(stripe, e if isinstance(e, OSError) else OSError(CLOSED))
        # Check again: the rank may have been lost, or the mesh closed, meanwhile.
        if (error := self._loss(to)) is not None:
            send.complete(error)
        return send

    def _loss(self, rank: int | None) -> PeerError | None:
        """Return an error if a rank is lost or the connections are closed, otherwise None."""
        if self._closed:
            return PeerError(CLOSED)
        return PeerError(self._lost[rank]) if rank in self._lost else None

    # Life

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._closed

    @property
    def has_lost(self) -> bool:
        """True if a rank is lost, or after :meth:`close`."""
        return self._closed or bool(self._lost)

    def check_open(self) -> None:
        """Raise PeerError if the connections are closed or a rank is lost; in the latter case close the connections."""
        if self._lost:
            self.close()
            raise PeerError(next(iter(self._lost.values())))
        if self._closed:
            raise PeerError(CLOSED)

    def close(self) -> None:
        """Close all connections, so that no rank waits for this rank. All waits end with PeerError."""
        waiting: list[Wait] = []
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for inbox in self._inboxes.values():
                waiting += [*inbox.take_waiting(), *inbox.take_explained()]
                for arrival in inbox.arriving:
                    arrival.drop()
        mine = os.getpid() == self._pid  # a shutdown by a forked child would end the parent's connections
        for stripe in self._by_fd.values():
            if mine:
                stripe.shut_down()
            waiting += stripe.take_queue()
        if mine:
            self._wake()
        for wait in waiting:
            wait.complete(PeerError(CLOSED))

    def __del__(self) -> None:
        if hasattr(self, "_waker"):  # otherwise __init__ has failed, and finalizers close what it has opened
            self.close()
            for stripe in self._by_fd.values():
                stripe.close()
            self._waker.close()  # at the exit of Python, finalizers no longer run

    def cpu_seconds(self) -> float:
        """Return the CPU time that the network thread has used, in seconds."""
        try:
            return time.clock_gettime(self._clock) if self._clock else 0.0
        except OSError:
            return 0.0

    def rtt(self, ranks: Sequence[int]) -> float:
        """Return the longest round-trip time to some ranks in seconds, measured by the kernel; 0 if it is unknown.

        If there are more than 16 ranks, only 16 of them count, at equal distances in `ranks`.
        """
        sample = ranks[:: -(-len(ranks) // _MOST_SAMPLES) or 1]
        return max((self._stripes[o][0].info().rtt for o in sample), default=0.0)

    def connections(self, ranks: Sequence[int]) -> list[ConnectionInfo]:
        """Return the kernel's statistics of all connections to some ranks, in the order of `ranks`."""
        return [stripe.info() for o in ranks for stripe in self._stripes[o]]

    def _wake(self) -> None:
        with suppress(OSError):  # the buffer is full, so that the thread wakes in any case, or the thread has ended
            self._waker.send(b"\0")

    def _lose(self, stripe: Stripe, error: OSError | str) -> None:
        """Record the end of a connection. Its rank is lost after its last connection, or immediately on an error."""
        waiting: list[Wait] = []
        with self._lock:
            stripe.ended = True
            rank, stripes = stripe.peer, self._stripes[stripe.peer]
            if not isinstance(error, str) or all(s.ended for s in stripes):
                self._lost.setdefault(rank, f"rank {rank} is gone or does not answer: {error}; make a new group")
            if rank in self._lost:
                for inbox in self._inboxes.open.values():
                    waiting += [*inbox.take_waiting(rank), *inbox.take_explained(rank)]
                for s in stripes:
                    waiting += s.take_queue()
        for wait in waiting:
            wait.complete(PeerError(self._lost[rank]))

    # The thread of the network

    def start(self) -> None:
        """Store the CPU-time clock of the calling thread, which will call :meth:`handle`."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def handle(self, events: Sequence[tuple[int, int]]) -> bool:
        """Read and write without blocking, as epoll events allow; return False after the connections were closed."""
        for fd, event in events:
            stripe = self._by_fd.get(fd)
            if stripe is None:
                self._read_paused()
            else:
                self._handle(stripe, event)
        if self._closed:
            for stripe in self._by_fd.values():
                stripe.close()
        return not self._closed

    def _handle(self, stripe: Stripe, event: int) -> None:
        try:
            if stripe.paused and event & (select.EPOLLERR | select.EPOLLHUP):  # epoll would report these events forever
                raise OSError("the connection is broken")
            if event & select.EPOLLOUT:
                stripe.flush()
            if event & ~select.EPOLLOUT:
                self._read(stripe)
        except (OSError, MemoryError) as e:
            self._lose(
                stripe, e if isinstance(e, OSError) else OSError("this rank has too little memory for its message")
            )
        if stripe.ended:
            stripe.forget()
        else:
            stripe.arm()

    def _read(self, stripe: Stripe) -> None:
        left = _TURN_NBYTES
        while left > 0 and not stripe.ended:
            if stripe.arrival is None and not (stripe.read_header() and self._begin_body(stripe)):
                break
            if not stripe.read_body():
                break
            left -= HEADER_NBYTES + self._complete(stripe)
        if left <= 0 and stripe.buffered:
            with self._lock:
                self._resume([stripe])
        if stripe.ended:
            self._lose(stripe, "it has closed the connection")

    def _begin_body(self, stripe: Stripe) -> bool:
        """Choose a buffer for the message whose header has arrived; return False if it must not be read yet."""
        fields = without_crc(stripe.header)
        if fields is None:
            raise OSError("it has sent bytes that are not a message, or a header was damaged")
        magic, kind, number, part, index, signature, nbytes, digest = FIELDS.unpack(fields)
        if magic != _MAGIC or nbytes > _MOST_NBYTES.get(kind, -1):
            raise OSError("it has sent bytes that are not a message")
        arrival = Arrival(stripe.peer, number, part, index, signature, nbytes, digest, abort=kind == _ABORT)
        with self._lock:
            admitted, unmatched = self._inboxes.admit(arrival)
            if not admitted:
                stripe.paused = True
                self._paused.add(stripe)
                return False
        stripe.arrival = arrival
        if unmatched is not None:
            unmatched.complete(unmatched.mismatch(arrival))
        return True

    def _complete(self, stripe: Stripe) -> int:
        """Complete the request for a message that has arrived completely; return the size of its body in bytes."""
        arrival, stripe.arrival = stripe.arrival, None
        assert arrival is not None
        self.progress[stripe.peer] = time.monotonic()
        with self._lock:  # post() has set `receive`, or will find the message complete
            receive = arrival.receive
        if receive is not None:
            arrival.hand_over(receive)
        waiting: list[Wait] = []
        refusal: Exception | None = None
        explained: Wait | None = None
        with self._lock:
            inbox = self._inboxes.get(arrival.number)
            if inbox is not None:
                inbox.arriving.discard(arrival)
                if arrival.abort and not arrival.dropped and arrival.source not in inbox.aborts:
                    if arrival.damaged:
                        raise OSError("an abort was damaged")
                    self._inboxes.keep(inbox, arrival)
                    waiting, refusal = inbox.take_waiting(arrival.source), inbox.refusal(arrival.source)
                    explained = inbox.explained.pop(arrival.source, None)
        for wait in waiting:
            wait.complete(refusal)
        if explained is not None:
            explained.complete()
        return arrival.nbytes

    def _read_paused(self) -> None:
        """Try again to read from the connections that :meth:`_resume` was called for."""
        with suppress(BlockingIOError):
            self._wakes.recv(4096)
        if self._closed:
            return
        with self._lock:
            resumed, self._resumed = self._resumed, set[Stripe]()
            self._paused -= resumed
        for stripe in resumed:
            stripe.paused = False
            self._handle(stripe, select.EPOLLIN)

    def _resume(self, stripes: Iterable[Stripe]) -> None:
        """Make the network thread read from connections that poll does not report. The caller must hold the lock."""
        before = len(self._resumed)
        self._resumed.update(stripes)
        if len(self._resumed) > before:
            self._wake()


def _serve(reference: "weakref.ref[Mesh]", poll: Any, wakes: socket.socket) -> None:
    """Serve the connections of a mesh until it is closed. While idle, hold no reference, so it can be freed."""
    mesh = reference()
    if mesh is not None:
        mesh.start()
    del mesh
    with poll, wakes:
        while True:
            events = poll.poll()
            mesh = reference()
            if mesh is None or not mesh.handle(events):
                return
            del mesh
