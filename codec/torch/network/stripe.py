"""One TCP connection of a mesh, with the message that is being read and a queue of messages to write."""

import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from codec.torch.network.inbox import Arrival
from codec.torch.network.sockets import ConnectionInfo, connection_info, is_local, prepare
from codec.torch.network.tls import AnySocket, TlsSocket
from codec.torch.network.version import checksum, with_crc
from codec.torch.network.waits import Wait

# magic, kind, collective, part, index, signature, bytes of the body, checksum of the body; their CRC-32 follows
FIELDS = struct.Struct("<4sIQIIqQI")
HEADER_NBYTES = FIELDS.size + 4
_WRITTEN_NBYTES = 1 << 18  # bytes of several messages that are written together
_MOST_BUFFERS = 512  # maximum buffers in one call of sendmsg; the limit of Linux is 1,024


class Send(Wait):
    """Message to be sent to a rank; the wait completes when the whole message is written.

    Parameters
    ----------
    fields : tuple
        Fields of the header, without checksums; item 2 is the number of the collective.
    body : sequence of memoryview
        Bytes of the body.
    to : int
        Receiving rank.
    """

    def __init__(self, fields: tuple[Any, ...], body: Sequence[memoryview], to: int) -> None:
        super().__init__()
        self.source, self._fields = to, fields
        self.number = fields[2]  # number of the collective
        self.parts = [part for part in body if part.nbytes]  # bytes that are not written yet
        self._begun = False  # True: `parts` has the header
        self._progress = time.monotonic()

    @property
    def written(self) -> bool:
        """True if the whole message is written."""
        return self._begun and not self.parts

    @property
    def nbytes(self) -> int:
        """Bytes that are not written yet, without a header that is not computed yet."""
        return sum(part.nbytes for part in self.parts)

    def begin(self) -> list[memoryview]:
        """Return the bytes that are not written yet. The first call computes the checksum of the body.

        Call this just before the bytes are written: computing the checksum brings them into the CPU's cache.
        """
        if not self._begun:
            header = with_crc(FIELDS.pack(*self._fields, checksum(self.parts)))
            self.parts, self._begun = [memoryview(header), *self.parts], True
        return self.parts

    @property
    def progress(self) -> float:
        """Time at which bytes of the message were last written."""
        return self._progress

    def keep(self) -> None:
        """Copy the bytes that are not written yet, whose memory the caller is about to reuse."""
        self.parts = [memoryview(bytes(part)) for part in self.parts]

    def advance(self, nbytes: int) -> int:
        """Record that `nbytes` bytes were written; return the number of these that belong to later messages."""
        self._progress = time.monotonic()
        while self.parts and nbytes >= self.parts[0].nbytes:
            nbytes -= self.parts.pop(0).nbytes
        if self.parts and nbytes:
            self.parts[0], nbytes = self.parts[0][nbytes:], 0
        return nbytes


class Stripe:
    """Connection to one rank. Only the network thread reads; any thread may write.

    Parameters
    ----------
    sock : socket.socket or TlsSocket
        Connected socket, which this object owns from now on.
    peer : int
        Rank at the other end.
    poll : select.epoll
        Poll object of the network thread.
    """

    def __init__(self, sock: AnySocket, peer: int, poll: Any) -> None:
        prepare(sock)
        self.peer, self.fd = peer, sock.fileno()
        self.ended = False  # True: the connection is closed by the other rank, or broken
        self.paused = False  # True: the next message is early, and is not read yet
        self.header = bytearray(HEADER_NBYTES)  # header of the next message
        self.arrival: Arrival | None = None  # message whose body is being read
        self._header_nbytes = 0  # bytes of the header that have arrived
        self._sock, self._poll, self._local = sock, poll, is_local(sock)
        weakref.finalize(self, sock.close).atexit = False
        self._lock = threading.Lock()  # guards _queue and _armed
        self._queue: deque[Send] = deque()
        self._armed = select.EPOLLIN
        poll.register(self.fd, self._armed)

    # Reading

    @property
    def buffered(self) -> bool:
        """True if a TlsSocket holds bytes that were not returned yet, which poll does not report."""
        return isinstance(self._sock, TlsSocket) and self._sock.buffered

    def read_header(self) -> bool:
        """Read the received part of a header; return True if the header is complete."""
        while self._header_nbytes < HEADER_NBYTES:
            n = self._receive(memoryview(self.header)[self._header_nbytes :])
            if not n:
                return False
            self._header_nbytes += n
        return True

    def read_body(self) -> bool:
        """Read the received part of a body; return True if the body is complete."""
        assert self.arrival is not None
        while not self.arrival.complete:
            if not self.arrival.fill(self._receive):
                return False
        self._header_nbytes = 0
        return True

    def _receive(self, into: memoryview) -> int:
        """Read bytes; return their number, 0 if none has arrived."""
        try:
            n = self._sock.recv_into(into)
        except BlockingIOError:
            return 0
        self.ended = self.ended or not n
        return n

    # Writing

    def put(self, send: Send, *, direct: bool) -> None:
        """Queue a message. With `direct`, first write in this thread as many bytes as the socket buffer accepts."""
        with self._lock:
            self._queue.append(send)
            if direct and len(self._queue) == 1:
                self._write()
            self._arm()

    def keep(self, number: int) -> None:
        """Copy the bytes of messages of a collective that are queued, since its memory is about to be reused."""
        with self._lock:
            for send in self._queue:
                if send.number == number:
                    send.keep()

    def flush(self) -> None:
        """Write as many queued bytes as the socket buffer accepts."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        while self._queue:
            try:
                n = self._sock.sendmsg(self._next_buffers())
            except BlockingIOError:
                return
            while self._queue:
                n = self._queue[0].advance(n)
                if not self._queue[0].written:
                    break
                self._queue.popleft().complete()

    def _next_buffers(self) -> list[memoryview]:
        """Return the buffers of the first messages in the queue that are written next."""
        buffers: list[memoryview] = []
        left = _WRITTEN_NBYTES
        for send in self._queue:
            if buffers and send.nbytes > left:
                break
            left -= send.nbytes
            buffers += send.begin()
            if len(buffers) >= _MOST_BUFFERS:
                break
        return buffers[:_MOST_BUFFERS]

    def arm(self) -> None:
        """Set the events for which the network thread polls: input unless paused, and output if bytes are queued."""
        with self._lock:
            self._arm()

    def _arm(self) -> None:
        events = (0 if self.paused else select.EPOLLIN) | (select.EPOLLOUT if self._queue else 0)
        if events != self._armed and not self.ended:
            self._armed = events
            self._poll.modify(self.fd, events)

    # End

    def forget(self) -> None:
        """Unregister the connection from the network thread."""
        with self._lock, suppress(OSError, ValueError):
            self._poll.unregister(self.fd)

    def take_queue(self) -> list[Send]:
        """Remove and return the messages that are not completely written."""
        with self._lock:
            taken = list(self._queue)
            self._queue.clear()
            return taken

    def shut_down(self) -> None:
        """Close the connection in both directions."""
        with self._lock, suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket."""
        self._sock.close()

    def info(self) -> ConnectionInfo:
        """Return the kernel's statistics of the connection."""
        return connection_info(self._sock)._replace(local=self._local)
