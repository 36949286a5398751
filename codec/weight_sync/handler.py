"""Threads of an update server: one for each connection, with limits on their number and on silent clients."""

import os
import re
import socket
import socketserver
import sys
import threading
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from codec.weight_sync.update import regular

_NAMES = re.compile(r"/(head|\d{20}\.(?:update|snapshot))")
_SEND_SECONDS = 60.0  # time without progress after which the server closes a connection
_REQUEST_SECONDS = 10.0  # time in which a client must send a complete request, on a new or on an idle connection
_BUSY_SECONDS = 1.0  # the same, while other clients wait for a connection to end
_POLL_SECONDS = 0.05
CONNECTIONS = 64  # maximum number of connections that are served at a time


class Server(ThreadingHTTPServer):
    """Server that serves up to 64 connections at a time. Further clients wait in the queue of the operating system.

    Parameters
    ----------
    root : path
        Folder of the store.
    address : tuple
        Address to listen on, as ``socket.getaddrinfo`` returns it.
    family : AddressFamily
        Family of `address`.
    """

    daemon_threads = True
    request_queue_size = 1024  # clients that a trainer wakes at the same moment connect at once

    def __init__(self, root: Path, address: Any, family: socket.AddressFamily) -> None:
        self.root, self.family, self.address_family = root, family, family
        self._pid = os.getpid()
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        self._lock = threading.Lock()
        self._open: dict[Any, float | None] = {}  # by connection: since when a request is awaited; None: it is served
        self._closing = False
        super().__init__(address, Handler)
        _servers.add(self)

    def server_bind(self) -> None:
        """Bind without looking up the name of the host, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a new thread, once there are less than 64."""
        while not self._free.acquire(timeout=_POLL_SECONDS):
            self._close_silent(_BUSY_SECONDS)
            if self._closing:
                self.shutdown_request(request)
                return
        with self._lock:
            self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                del self._open[request]
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection: the client sees that the connection has ended."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    @contextmanager
    def awaiting_request(self, connection: Any) -> Generator[None]:
        """Context in which a request is read: if it takes too long, the connection is closed."""
        with self._lock:
            self._open[connection] = time.monotonic()
        try:
            yield
        finally:
            self.received(connection)

    def received(self, connection: Any) -> None:
        """Note that the request of a connection is complete."""
        with self._lock:
            self._open[connection] = None

    def service_actions(self) -> None:
        """Close connections that are silent for too long. The server calls this every 50 ms."""
        self._close_silent(_REQUEST_SECONDS)

    def _close_silent(self, seconds: float) -> None:
        now = time.monotonic()
        with self._lock:
            late = [one for one, since in self._open.items() if since is not None and now - since > seconds]
        for connection in late:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """Stop listening, and close all connections. In a forked process, only release the process's copies of them."""
        if os.getpid() == self._pid:
            self._closing = True
            self.shutdown()
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # also for children, which share the listening socket
            with self._lock:
                for connection in self._open:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """Requests of one connection."""

    timeout = _SEND_SECONDS
    disable_nagle_algorithm = True  # the body of a small file must not wait for an acknowledgement of the header
    protocol_version = "HTTP/1.1"

    @property
    def _updates(self) -> Server:
        return cast(Server, self.server)

    def handle_one_request(self) -> None:
        """Read and answer a request."""
        with self._updates.awaiting_request(self.connection):
            super().handle_one_request()

    def do_GET(self) -> None:
        """Send ``head`` or the file of an update."""
        self._updates.received(self.connection)
        name = _NAMES.fullmatch(self.path)
        try:
            fd, nbytes = regular(self._updates.root / name[1]) if name else (-1, 0)
        except OSError:
            fd, nbytes = -1, 0
        if fd < 0:
            self.send_error(404)
            return
        with os.fdopen(fd, "rb") as file:
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(nbytes))
            self.send_header("Cache-Control", "no-store")  # a later run may use the name again
            self.end_headers()
            self.close_connection |= self.connection.sendfile(file, 0, nbytes or None) < nbytes

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


_servers: "weakref.WeakSet[Server]" = weakref.WeakSet()


def _after_fork() -> None:
    """Close listening sockets in a child, which would keep the port open, without serving it, after its parent ends."""
    for server in _servers:
        with suppress(OSError):
            server.socket.close()


os.register_at_fork(after_in_child=_after_fork)
