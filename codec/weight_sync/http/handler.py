"""Threads of an update server: one for each connection, with limits on their number, their size and their time."""

import fcntl
import os
import re
import select
import socket
import socketserver
import ssl
import sys
import termios
import threading
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from typing import Any, BinaryIO, NamedTuple, cast

from codec.weight_sync.http.credentials import BearerToken
from codec.weight_sync.http.fan_out import MIN_NBYTES, FanOut, TreeNode
from codec.weight_sync.http.hints import DEPTH, HEADER
from codec.weight_sync.http.offered import OfferedFile, OfferedFiles

_NAMES = re.compile(r"/(head|\d{20}\.(?:update|snapshot)(?:\.\d{1,5})?)", re.ASCII)
_RANGE = re.compile("bytes=([0-9]{1,18})-")
_SEND_SECONDS = 60.0  # time without progress after which the server closes a connection
_BLOCK_SECONDS = 120.0  # time in which a client must receive a block of a file: 9 KB/s
_REQUEST_SECONDS = 10.0  # time in which a client must send a complete request, on a new or on an idle connection
_BUSY_SECONDS = 1.0  # the same, while other clients wait for a connection to end
_POLL_SECONDS = 0.05
_UNSENT_MILLISECONDS = 5  # time between looks at the number of bytes that a client has not received
_BLOCK = 1 << 20  # bytes of a file that are sent within _BLOCK_SECONDS
_ENCRYPTED = 1 << 16  # bytes that are encrypted at once, each within _SEND_SECONDS
_REQUEST_NBYTES = 1 << 14  # maximum size of a request, with its headers
CONNECTIONS = 64  # maximum number of connections that are served at a time


class Server(ThreadingHTTPServer):
    """Server that serves up to 64 connections at a time. Further clients wait in the queue of the operating system.

    Parameters
    ----------
    files : OfferedFiles
        Files to serve.
    address : tuple
        Address to listen on, as ``socket.getaddrinfo`` returns it.
    family : AddressFamily
        Family of `address`.
    token : BearerToken, optional
        Token that each request must have.
    tls : SSLContext, optional
        Context of encrypted connections. Default: connections are not encrypted.
    fan_out : FanOut, optional
        Mirrors to which the server may send clients. Default: none.
    """

    daemon_threads = True
    request_queue_size = 1024  # clients that a trainer wakes at the same moment connect at once

    def __init__(
        self,
        files: OfferedFiles,
        address: Any,
        family: socket.AddressFamily,
        token: BearerToken | None = None,
        tls: ssl.SSLContext | None = None,
        fan_out: FanOut | None = None,
    ) -> None:
        self.files, self.family, self.address_family = files, family, family
        self.token, self.tls, self.fan_out = token, tls, fan_out
        self._pid = os.getpid()
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        self._lock = threading.Lock()
        self._open: dict[Any, _Limits] = {}
        self.closing = False
        super().__init__(address, Handler)
        _servers.add(self)

    def server_bind(self) -> None:
        """Bind without looking up the name of the host, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. The thread of the connection does the TLS handshake."""
        connection, address = super().get_request()
        if self.tls is None:
            return connection, address
        try:
            connection.getpeername()  # wrap_socket leaves sockets open that the client has reset
            return self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address
        except OSError:
            connection.close()
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a new thread, once there are less than 64."""
        while not self._free.acquire(timeout=_POLL_SECONDS):
            self._close_late(busy=True)
            if self.closing:
                self.shutdown_request(request)
                return
        self._limit(request, _Limits())
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, connection: Any) -> None:
        with self._lock:
            del self._open[connection]
        self._free.release()

    def _limit(self, connection: Any, limits: "_Limits") -> None:
        with self._lock:
            self._open[connection] = limits

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection: the client sees that the connection has ended."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    @contextmanager
    def awaiting_request(self, connection: Any) -> Generator[None]:
        """Context in which a request is read: if it takes too long, the connection is closed."""
        now = time.monotonic()
        self._limit(connection, _Limits(now + _REQUEST_SECONDS, now + _BUSY_SECONDS))
        try:
            yield
        finally:
            self._limit(connection, _Limits())

    def sending(self, connection: Any) -> None:
        """Note that a request is complete, and that the next block of the reply is sent."""
        end = time.monotonic() + _BLOCK_SECONDS
        self._limit(connection, _Limits(end, end))

    def service_actions(self) -> None:
        """Close connections that are slow or silent for too long, and expired files, every 50 ms."""
        self._close_late(busy=False)
        self.files.expire()

    def _close_late(self, busy: bool) -> None:
        now = time.monotonic()
        with self._lock:
            late = [one for one, limits in self._open.items() if now > (limits.busy if busy else limits.end)]
        for connection in late:
            _shut(connection)

    def stop(self) -> None:
        """Stop listening, and close all connections. In a forked process, only release the process's copies of them."""
        if os.getpid() == self._pid:
            self.closing = True
            self.shutdown()
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # also for children, which share the listening socket
            with self._lock:
                for connection in self._open:
                    _shut(connection)
        self.server_close()


class _Limits(NamedTuple):
    """Times at which the server closes a connection."""

    end: float = inf
    busy: float = inf  # if other clients wait for a connection to end


def _shut(connection: socket.socket) -> None:
    """End a connection that another thread uses; that thread gets the end of the stream, or an OSError."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # SSLSocket.shutdown would drop the encryption


class RequestLines:
    """Lines of requests; a request of more than 16 KiB is an error.

    Parameters
    ----------
    file : binary file
        Bytes of a connection.

    Attributes
    ----------
    left : int
        Number of bytes that the current request may still have.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.left = file, _REQUEST_NBYTES

    def readline(self, limit: int) -> bytes:
        """Return the next line; raise RequestTooLongError if the request is too long."""
        line = self._file.readline(min(limit, self.left + 1))
        self.left -= len(line)
        if self.left < 0:
            raise RequestTooLongError
        return line

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RequestTooLongError(Exception):
    """A request has more than 16 KiB."""


class Handler(BaseHTTPRequestHandler):
    """Requests of one connection."""

    timeout = _SEND_SECONDS
    disable_nagle_algorithm = True  # the body of a small file must not wait for an acknowledgement of the header
    protocol_version = "HTTP/1.1"

    @property
    def _updates(self) -> Server:
        return cast(Server, self.server)

    def setup(self) -> None:
        """Limit the size of requests."""
        super().setup()
        self._lines = RequestLines(cast(BinaryIO, self.rfile))
        self.rfile = cast(Any, self._lines)

    def handle(self) -> None:
        """Do the TLS handshake, and answer requests."""
        if isinstance(self.connection, ssl.SSLSocket):
            with self._updates.awaiting_request(self.connection):
                self.connection.do_handshake()
        super().handle()

    def handle_one_request(self) -> None:
        """Read and answer a request."""
        self._lines.left = _REQUEST_NBYTES
        with self._updates.awaiting_request(self.connection):
            try:
                super().handle_one_request()
            except RequestTooLongError:
                self.command, self.requestline, self.request_version = "", "", self.protocol_version
                self.send_error(431)

    def do_GET(self) -> None:
        """Send ``head`` or the file of an update."""
        self._updates.sending(self.connection)
        if {"0", *self.headers.get_all("Content-Length", ())} != {"0"} or "Transfer-Encoding" in self.headers:
            self.send_error(400)  # and close the connection: the body must not be taken for a request
            return
        token = self._updates.token
        if token is not None and not token.matches(self.headers.get("Authorization")):
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Bearer")
            self.send_header("Content-Length", "0")
            self.send_header("Connection", "close")
            self.end_headers()
            return
        name = _NAMES.fullmatch(self.path)
        try:
            offered = self._updates.files.open(name[1]) if name else None
        except OSError:
            offered = None
        if offered is None:
            self.send_error(404)
            return
        with offered:
            fan_out = self._updates.fan_out
            if fan_out is None or offered.nbytes < MIN_NBYTES:
                self._reply(offered)
                return
            with fan_out.sending(offered.identity, self.client_address[0], self.headers.get(HEADER)) as mirror:
                if mirror is None:
                    self._reply(offered)
                    self._await_received()
                else:
                    self._refer(mirror)

    def _refer(self, mirror: TreeNode) -> None:
        """Send the URL of the requested file on a mirror."""
        scheme = "http" if self._updates.tls is None else "https"
        self.send_response(307)
        self.send_header("Location", f"{scheme}://{mirror.address}{self.path}")
        self.send_header(DEPTH, str(mirror.depth))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _await_received(self) -> None:
        """Wait until the client has received what was sent: until then, the server counts as busy."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)  # the next request, or the end
        unsent = bytearray(4)
        while not self._updates.closing and not poll.poll(_UNSENT_MILLISECONDS):
            fcntl.ioctl(self.connection, termios.TIOCOUTQ, unsent)
            if not any(unsent):
                return

    def _reply(self, offered: OfferedFile) -> None:
        """Send a file, or the part that begins at the byte which the client requests."""
        nbytes = offered.nbytes
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        begin = int(wanted[1]) if wanted and int(wanted[1]) < nbytes else 0
        self.send_response(206 if begin else 200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(nbytes - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{nbytes - 1}/{nbytes}")
        self.send_header("Cache-Control", "no-store")  # a later run may use the name again
        self.end_headers()
        self.close_connection |= self._send(offered, begin) < nbytes

    def _send(self, offered: OfferedFile, sent: int) -> int:
        """Send a file from byte `sent`; return the end of what was sent, less than its size if it ends early."""
        encrypted = isinstance(self.connection, ssl.SSLSocket)
        buffer = memoryview(bytearray(_ENCRYPTED if encrypted else 0))  # SSLSocket.sendfile sends blocks of 8 KiB
        block = -1
        while sent < offered.nbytes and not self._updates.closing:
            available = offered.available(sent)
            if available is None:
                break
            if available == sent:  # the client must not pay for the time in which a mirror waits
                self._updates.sending(self.connection)
                continue
            if sent // _BLOCK > block:
                block = sent // _BLOCK
                self._updates.sending(self.connection)
            if encrypted:
                n = os.preadv(offered.file.fileno(), [buffer[: available - sent]], sent)
                self.connection.sendall(buffer[:n])
            else:
                n = self.connection.sendfile(offered.file, sent, min(_BLOCK, available - sent))
            if not n:
                break
            sent += n
        return sent

    def version_string(self) -> str:
        """Return the name of the server, without versions."""
        return "codec"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


_servers: "weakref.WeakSet[Server]" = weakref.WeakSet()


def _after_fork() -> None:
    """Close listening sockets in a child, which would keep the port open, without serving it, after its parent ends."""
    for server in _servers:
        with suppress(OSError):
            server.socket.close()


os.register_at_fork(after_in_child=_after_fork)
