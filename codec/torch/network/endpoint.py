"""Endpoint of a rank: the port to which other ranks connect (docs/spec/protocol.md, section 2)."""

import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

from codec import PeerError
from codec.torch.network.sockets import family, host_address, reason
from codec.torch.network.store import AddressBook
from codec.torch.network.tcp import FORKED, PeerConnection
from codec.torch.network.timeouts import timeout_of
from codec.torch.network.version import protocol_hash

HELLO = struct.Struct("<4s16sqqq")  # magic, token of the listening rank, hash of the protocol's version, rank, tag
HELLO_MAGIC = b"CDPH"
ADDRESS = struct.Struct("<q16sH")  # hash of the protocol's version, token, port; the host follows
_TOKEN_NBYTES = 16
_HELLO_SECONDS = 20.0  # seconds in which a new connection must send its hello
_MOST_STRANGERS = 256  # maximum number of connections without a complete hello, besides one for each rank
_LONGEST_SELECT = 1000.0  # maximum seconds of one select; the limit of the system call is 2^31 ms
_MOST_WAITING = 16  # maximum number of connections of one rank and tag that are not accepted yet
_MOST_TAGS = 1024  # maximum number of tags of one rank with connections that are not accepted yet

_Key = tuple[int, int]  # rank and tag
_Address = tuple[bytes, int, str]  # token, port and host


class _Listener:
    """Thread that accepts connections and sorts them by rank and tag.

    A connection whose first bytes are not a valid hello is closed.

    Parameters
    ----------
    rank, size : int
        Rank of this process, and number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.host = host_address()
        self._sock = socket.create_server((self.host, 0), family=family(self.host), backlog=1024)
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self.token = os.urandom(_TOKEN_NBYTES)
        self._rank, self._size = rank, size
        self.arrival = threading.Condition()
        self._waiting: dict[_Key, deque[PeerConnection]] = {}
        self.failure = ""  # error of the last attempt to accept a connection
        self._stopped = False
        threading.Thread(target=self._serve, name=f"codec, rank {rank}, listener", daemon=True).start()

    def take(self, key: _Key) -> PeerConnection | None:
        """Return the oldest waiting connection of a rank and tag, or None. The caller must hold `arrival`."""
        waiting = self._waiting.get(key)
        if not waiting:
            return None
        found = waiting.popleft()
        if not waiting:
            del self._waiting[key]
        return found

    def stop(self) -> None:
        """End the thread, and close the port and all connections that were not accepted."""
        self._stopped = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes the socket

    def _serve(self) -> None:
        with self._sock, selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            strangers: dict[socket.socket, tuple[float, bytearray]] = {}  # by connection: start time, received bytes

            def drop(stranger: socket.socket, *, close: bool) -> None:
                del strangers[stranger]
                selector.unregister(stranger)
                if close:
                    stranger.close()

            while not self._stopped:
                for key, _ in selector.select(_HELLO_SECONDS if strangers else None):
                    if key.fileobj is self._sock:
                        self._accept(selector, strangers)
                    else:
                        self._read_hello(key.fileobj, strangers, drop)
                now = time.monotonic()
                for stranger, (since, _) in list(strangers.items()):
                    if now - since > _HELLO_SECONDS or len(strangers) > _MOST_STRANGERS + self._size:
                        drop(stranger, close=True)
            for stranger in list(strangers):
                drop(stranger, close=True)
        with self.arrival:
            for waiting in self._waiting.values():
                for connection in waiting:
                    connection.close()
            self._waiting.clear()

    def _accept(self, selector: selectors.BaseSelector, strangers: dict[Any, tuple[float, bytearray]]) -> None:
        try:
            stranger, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError as e:  # stopped, or out of file descriptors
            self.failure = reason(e)
            if not self._stopped:
                time.sleep(0.05)
            return
        self.failure = ""
        stranger.setblocking(False)
        strangers[stranger] = time.monotonic(), bytearray()
        selector.register(stranger, selectors.EVENT_READ)

    def _read_hello(
        self, stranger: Any, strangers: dict[Any, tuple[float, bytearray]], drop: Callable[..., None]
    ) -> None:
        """Read the received part of a hello; once the hello is complete, queue the connection for :meth:`take`."""
        hello = strangers[stranger][1]
        try:
            data = stranger.recv(HELLO.size - len(hello))  # leave the message after the hello unread
        except BlockingIOError:
            return
        except OSError:
            data = b""
        hello += data
        if data and len(hello) < HELLO.size:
            return
        key = self._key_of(bytes(hello))
        drop(stranger, close=key is None)
        if key is not None:
            self._file(key, PeerConnection(stranger, key[0]))

    def _key_of(self, hello: bytes) -> _Key | None:
        if len(hello) != HELLO.size:
            return None
        magic, token, version, rank, tag = HELLO.unpack(hello)
        known = magic == HELLO_MAGIC and token == self.token and version == protocol_hash()
        return (rank, tag) if known and 0 <= rank < self._size and rank != self._rank else None

    def _file(self, key: _Key, connection: PeerConnection) -> None:
        with self.arrival:
            tags = sum(rank == key[0] for rank, _ in self._waiting)
            waiting = self._waiting.setdefault(key, deque()) if key in self._waiting or tags < _MOST_TAGS else None
            if waiting is None or len(waiting) >= _MOST_WAITING:
                connection.close()
                return
            waiting.append(connection)
            self.arrival.notify_all()


class Endpoint:
    """Listening port of this rank, and methods that connect to the ports of the other ranks in a group.

    Parameters
    ----------
    group : ProcessGroup
        Group of ranks. Each rank with an endpoint writes its address to the store of the group.
    seconds : float or None
        Longest wait for the store; None: the timeout of the group.
    """

    def __init__(self, group: Any, seconds: float | None) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.timeout: timedelta = timeout_of(group)
        self.lock = threading.Lock()
        self.pairs: dict[_Key, Any] = {}  # connections of codec.torch.send and recv, by rank and tag; guarded by `lock`
        self._pid = os.getpid()
        try:
            self._listener = _Listener(self.rank, self.size)
            weakref.finalize(self, self._listener.stop)
            self._book = AddressBook(group.get_group_store())
            self._addresses: dict[int, _Address] = {}  # addresses that this rank has read, by rank
            address = ADDRESS.pack(protocol_hash(), self._listener.token, self._listener.port)
            limit = self.timeout.total_seconds() if seconds is None else seconds
            self._book.publish(self.rank, address + self._listener.host.encode(), limit)
        except (OSError, RuntimeError) as e:
            why = reason(e) if isinstance(e, OSError) else e
            raise PeerError(f"rank {self.rank} cannot open a port for other ranks: {why}") from e

    def check_process(self) -> None:
        """Raise PeerError in a process that was forked from the process that created the endpoint."""
        if os.getpid() != self._pid:
            raise PeerError(FORKED)

    def connect(self, peers: Sequence[int], tag: int, seconds: float) -> list[PeerConnection]:
        """Connect to the ports of some ranks, all at the same time, and return the connections in the same order.

        Raises
        ------
        PeerError
            A rank has no endpoint within `seconds`, cannot be reached, or uses another version of the protocol. No
            connection remains open.
        """
        deadline = time.monotonic() + seconds
        self._read_addresses(peers, deadline)
        connections: dict[int, PeerConnection] = {}
        with ExitStack() as undo, selectors.DefaultSelector() as selector:
            for peer in peers:
                try:
                    sock = self._begin(peer)
                except OSError as e:
                    raise self._unreachable(peer, e) from e
                undo.callback(sock.close)
                selector.register(sock, selectors.EVENT_WRITE, peer)
            while pending := selector.get_map():
                ready = selector.select(min(max(0.001, deadline - time.monotonic()), _LONGEST_SELECT))
                if not ready and time.monotonic() >= deadline:
                    raise self._unreachable(next(iter(pending.values())).data, TimeoutError("timed out"))
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    connections[key.data] = self._say_hello(key.fileobj, key.data, tag)
            undo.pop_all()
        return [connections[peer] for peer in peers]

    def _begin(self, peer: int) -> socket.socket:
        """Begin to connect to a rank."""
        _, port, host = self._addresses[peer]
        sock = socket.socket(family(host), socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            with suppress(BlockingIOError):
                sock.connect((host, port))
        except BaseException:
            sock.close()
            raise
        return sock

    def _say_hello(self, sock: Any, peer: int, tag: int) -> PeerConnection:
        """Send the hello of a new connection, or raise PeerError if the connection has failed."""
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise self._unreachable(peer, OSError(number, os.strerror(number)))
        try:
            # The buffer of a new socket has room for the hello.
            sock.sendall(HELLO.pack(HELLO_MAGIC, self._addresses[peer][0], protocol_hash(), self.rank, tag))
            return PeerConnection(sock, peer)
        except OSError as e:
            raise PeerError(f"rank {peer} is gone: {e}") from e

    def _unreachable(self, peer: int, error: OSError) -> PeerError:
        _, port, host = self._addresses[peer]
        return PeerError(f"rank {peer} cannot be reached at {host}, port {port}: {reason(error)}")

    def accept(
        self, peer: int, tag: int, seconds: float | None, cancelled: Callable[[], bool] = lambda: False
    ) -> PeerConnection | None:
        """Wait until a rank connects to this one.

        Parameters
        ----------
        peer, tag : int
            Rank and tag of the connection.
        seconds : float or None
            Longest wait; None: no limit.
        cancelled : callable
            Function that returns True if the wait should end. It is called at the start and after each :meth:`wake`.

        Returns
        -------
        PeerConnection or None
            None if the wait was cancelled.

        Raises
        ------
        PeerError
            The rank has not connected in time.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._listener.arrival:
            while not cancelled():
                found = self._listener.take((peer, tag))
                if found is not None:
                    return found
                left = None if deadline is None else min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
                if left is not None and left <= 0:
                    failure = self._listener.failure and f": {self._listener.failure}"
                    raise PeerError(f"rank {peer} has not connected within the timeout{failure}")
                self._listener.arrival.wait(left)
        return None

    def wake(self) -> None:
        """Make all calls of :meth:`accept` in flight check again whether they are cancelled."""
        with self._listener.arrival:
            self._listener.arrival.notify_all()

    def _read_addresses(self, peers: Sequence[int], deadline: float) -> None:
        """Read the addresses of ranks that this rank does not know yet, once all of these have endpoints."""
        unknown = [peer for peer in peers if peer not in self._addresses]
        if unknown:
            for peer, value in zip(unknown, self._book.read(unknown, deadline), strict=True):
                self._addresses[peer] = self._address_in(value, peer)

    def _address_in(self, value: bytes, peer: int) -> _Address:
        """Return the token, port and host of a rank from its value in the store."""
        try:
            version, token, port = ADDRESS.unpack_from(value)
            host = value[ADDRESS.size :].decode()
        except (struct.error, UnicodeDecodeError) as e:
            raise PeerError(f"the key-value store of the process group has no valid address of rank {peer}") from e
        if version != protocol_hash():
            raise PeerError(
                f"rank {peer} and rank {self.rank} have different versions of the protocol: install the same codec on "
                "all ranks"
            )
        return token, port, host


_endpoints: "weakref.WeakKeyDictionary[Any, Endpoint]" = weakref.WeakKeyDictionary()
_endpoints_lock = threading.Lock()


def _after_fork() -> None:
    """Replace the lock, which a thread of the parent may hold."""
    global _endpoints_lock
    _endpoints_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def endpoint_of(group: Any, seconds: float | None = None) -> Endpoint:
    """Return the endpoint of this rank in a group. The first call creates it; other ranks need not take part.

    Parameters
    ----------
    group : ProcessGroup
        Group of which this rank is a member.
    seconds : float, optional
        Longest wait for the store. Default: the timeout of the group.

    Raises
    ------
    PeerError
        No port can be opened, or the endpoint belongs to the process that forked this one.
    """
    with _endpoints_lock:
        endpoint = _endpoints.get(group)
        if endpoint is None:
            endpoint = _endpoints[group] = Endpoint(group, seconds)
    endpoint.check_process()
    return endpoint
