"""TCP connection between two ranks for messages (docs/spec/protocol/point-to-point.md, section 1)."""

import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from codec import PeerError
from codec.torch.network.sockets import ConnectionInfo, connection_info, prepare
from codec.torch.network.tls import AnySocket
from codec.torch.network.version import checksum, with_crc, without_crc

Array = np.ndarray[Any, Any]

# header of a message: magic, number of the message, bytes and checksum of its body; their CRC-32 follows
FIELDS = struct.Struct("<4sIQI")
HEADER_NBYTES = FIELDS.size + 4
MAGIC = b"CDPM"
_PROGRESS_NBYTES = 1 << 22  # bytes after which the timeout starts anew
_MOST_BUFFERS = 512  # maximum buffers in one call of sendmsg; the limit of Linux is 1,024
_LONGEST_POLL = 1000.0  # maximum seconds of one poll; the limit of the system call is 2^31 ms
_CLOSED = "the connection with rank {} is closed: make a new group"
FORKED = (
    "the connection was opened by the parent process, before fork(): make a new group here, or start processes by spawn"
)


class PeerConnection:
    """TCP connection to one rank. One thread may send while another thread receives.

    If a message is sent or received only partly, because of a timeout, an error or an exception such as
    KeyboardInterrupt, the connection is closed, since the rest of the message would be read as the next message.
    After other errors the connection remains usable.

    Parameters
    ----------
    sock : socket.socket or TlsSocket
        Connected socket, which this object owns from now on.
    peer : int
        Rank at the other end, for error messages.
    """

    def __init__(self, sock: AnySocket, peer: int) -> None:
        prepare(sock)
        self.peer = peer
        self.sent_nbytes = self.received_nbytes = 0  # total bytes, including message headers
        self._sock, self._pid = sock, os.getpid()
        self._finalizer = weakref.finalize(self, sock.close)
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._nsent = self._nreceived = 0  # number of complete messages
        self._header = bytearray(HEADER_NBYTES)  # header of the next message
        self._header_nbytes = 0  # bytes of the header that have arrived
        self._closed = False

    @property
    def closed(self) -> bool:
        """True after an error that closed the connection, or after :meth:`close`."""
        return self._closed

    def send(self, buffers: Sequence[Any], seconds: float) -> None:
        """Send one message.

        Parameters
        ----------
        buffers : sequence of buffers
            Parts of the message.
        seconds : float
            Longest time in which the peer must receive 4 MiB.

        Raises
        ------
        PeerError
            The connection is lost or closed, or the peer did not receive data in time.
        """
        parts = [memoryview(b).cast("B") for b in buffers]
        nbytes = sum(p.nbytes for p in parts)
        with self._exclusive(self._sending, seconds):
            header = with_crc(FIELDS.pack(MAGIC, self._nsent % (1 << 32), nbytes, checksum(parts)))
            with self._closing_on_error():
                self._write([memoryview(header), *(p for p in parts if p.nbytes)], seconds)
            self._nsent += 1
            self.sent_nbytes += HEADER_NBYTES + nbytes

    def receive(self, max_nbytes: int, seconds: float, *, idle: bool = False) -> Array:
        """Receive one message.

        Memory is allocated only as bytes arrive, so a peer that announces a large size cannot exhaust it.

        Parameters
        ----------
        max_nbytes : int
            Maximum size of the message in bytes.
        seconds : float
            Longest time until the message starts, and again for each 4 MiB of it.
        idle : bool
            True: wait without limit for the start of the message.

        Returns
        -------
        ndarray of uint8
            The message.

        Raises
        ------
        PeerError
            The connection is lost or closed; no data arrived in time; the received bytes are not a message, or were
            damaged; or the message is too long, in which case it can still be received with a larger `max_nbytes`.
        """
        with self._exclusive(self._receiving, None if idle else seconds):
            nbytes, expected = self._await_header(None if idle else seconds)
            if nbytes > max_nbytes:
                raise PeerError(
                    f"rank {self.peer} sends a message of {nbytes} bytes, more than max_nbytes, {max_nbytes}: pass a "
                    "larger max_nbytes"
                )
            with self._closing_on_error():
                message = self._read(nbytes, seconds)
                self._header_nbytes = 0
                self._nreceived += 1
                self.received_nbytes += HEADER_NBYTES + nbytes
                self._acknowledge()
                if checksum([message]) != expected:
                    raise PeerError(f"a message of rank {self.peer} was damaged: its checksum does not match its bytes")
                return message

    def info(self) -> ConnectionInfo:
        """Return the kernel's statistics of the connection."""
        return ConnectionInfo() if self._closed else connection_info(self._sock)

    def check(self) -> None:
        """Raise PeerError if the peer has closed the connection. This does not block."""
        gone = self._closed
        if not gone:
            poller = select.poll()
            try:
                poller.register(self._sock, select.POLLRDHUP)
                gone = bool(poller.poll(0))
            except ValueError:  # another thread has closed the socket
                gone = True
        if gone:
            raise self._lost()

    def detach(self) -> AnySocket:
        """Return the socket, which the caller then owns; this object must not be used afterwards."""
        self._closed = True
        self._finalizer.detach()
        return self._sock

    def close(self) -> None:
        """Close the connection; calls in flight in other threads raise PeerError."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self._pid:  # a shutdown by a forked child would end the parent's connection
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes threads that wait
        self._release()

    def _release(self) -> None:
        """Close the socket unless a thread uses it, since the kernel may reuse the file descriptor at once."""
        if self._sending.acquire(blocking=False):
            try:
                if self._receiving.acquire(blocking=False):
                    try:
                        self._finalizer()
                    finally:
                        self._receiving.release()
            finally:
                self._sending.release()

    @contextmanager
    def _exclusive(self, lock: threading.Lock, seconds: float | None) -> Generator[None]:
        """Return a context manager that holds `lock`, so that only one thread at a time sends, or receives."""
        if os.getpid() != self._pid:
            raise PeerError(FORKED)
        if not lock.acquire(timeout=-1 if seconds is None else min(seconds, threading.TIMEOUT_MAX)):
            raise PeerError(f"another thread has used the connection with rank {self.peer} for longer than the timeout")
        try:
            if self._closed:
                raise PeerError(_CLOSED.format(self.peer))
            yield
        finally:
            lock.release()
            if self._closed:
                self._release()

    @contextmanager
    def _closing_on_error(self) -> Generator[None]:
        """Return a context manager that closes the connection if its body fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _lost(self, error: OSError | None = None) -> PeerError:
        was_closed = self._closed
        self.close()
        if was_closed:
            return PeerError(_CLOSED.format(self.peer))
        return PeerError(f"rank {self.peer} is gone: {error or 'it has closed the connection'}")

    def _await(self, event: int, deadline: float | None) -> None:
        """Wait until the socket is ready, or raise PeerError at `deadline` on the monotonic clock."""
        poller = select.poll()
        poller.register(self._sock, event)
        while True:
            left = _LONGEST_POLL if deadline is None else min(_LONGEST_POLL, deadline - time.monotonic())
            if poller.poll(max(0, round(left * 1000 + 0.5))):
                return
            if self._closed:
                raise PeerError(_CLOSED.format(self.peer))
            if deadline is not None and time.monotonic() >= deadline:
                raise PeerError(f"rank {self.peer} does not answer within the timeout")

    def _write(self, parts: list[memoryview], seconds: float) -> None:
        deadline, left = time.monotonic() + seconds, _PROGRESS_NBYTES
        first = 0
        while first < len(parts):
            try:
                n = self._sock.sendmsg(parts[first : first + _MOST_BUFFERS])
            except BlockingIOError:
                self._await(select.POLLOUT, deadline)
                continue
            except OSError as e:
                raise self._lost(e) from e
            left -= n
            if left <= 0:
                deadline, left = time.monotonic() + seconds, _PROGRESS_NBYTES
            while first < len(parts) and n >= parts[first].nbytes:
                n -= parts[first].nbytes
                first += 1
            if n:
                parts[first] = parts[first][n:]

    def _acknowledge(self) -> None:
        """Send a delayed TCP acknowledgement now, because the peer measures its time of sending until then."""
        if hasattr(socket, "TCP_QUICKACK"):
            with suppress(OSError):  # the connection was closed meanwhile
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def _await_header(self, seconds: float | None) -> tuple[int, int]:
        """Wait for the header of the next message, unless it has arrived; return size and checksum of the body."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._header_nbytes < HEADER_NBYTES:
            self._header_nbytes += self._read_some(memoryview(self._header)[self._header_nbytes :], deadline)
        fields = without_crc(self._header)
        magic, number, nbytes, expected = FIELDS.unpack(fields or bytes(FIELDS.size))
        if magic != MAGIC or number != self._nreceived % (1 << 32):
            self.close()
            raise PeerError(f"rank {self.peer} has sent bytes that are not a message: make a new group")
        return nbytes, expected

    def _read(self, nbytes: int, seconds: float) -> Array:
        try:
            found = np.empty(min(nbytes, _PROGRESS_NBYTES), np.uint8)
            filled = 0
            while filled < nbytes:
                if filled == found.nbytes:
                    larger = np.empty(min(nbytes, 2 * filled), np.uint8)
                    larger[:filled] = found
                    found = larger
                deadline = time.monotonic() + seconds
                end = min(found.nbytes, filled + _PROGRESS_NBYTES)
                while filled < end:
                    filled += self._read_some(found.data[filled:end], deadline)
        except MemoryError as e:
            raise PeerError(
                f"this rank has too little memory for the message of {nbytes} bytes from rank {self.peer}"
            ) from e
        return found

    def _read_some(self, into: memoryview, deadline: float | None) -> int:
        """Read at least one byte; return the number of bytes."""
        while True:
            try:
                n = self._sock.recv_into(into)
            except BlockingIOError:
                self._await(select.POLLIN, deadline)
                continue
            except OSError as e:
                raise self._lost(e) from e
            if not n:
                raise self._lost()
            return n
