"""Endpoint of a rank: the port to which other ranks connect (docs/spec/protocol.md, section 2)."""

import fcntl
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from codec import PeerError
from codec.torch.network.store import own_store, within
from codec.torch.network.tcp import FORKED, PeerConnection
from codec.torch.network.timeouts import timeout_of
from codec.torch.network.version import protocol_hash

HELLO = struct.Struct("<4s16sqqq")  # magic, token of the listening rank, hash of the protocol's version, rank, tag
HELLO_MAGIC = b"CDPH"
ADDRESS = struct.Struct("<q16sH")  # hash of the protocol's version, token, port; the host follows
PREFIX = "codec/point-to-point"  # prefix of keys in the group's store
_TOKEN_NBYTES = 16
_SIOCGIFADDR = 0x8915  # Linux: IPv4 address of an interface
_LINK_LOCAL = 0x20  # Linux: scope of IPv6 addresses
_STORE_SECONDS = 1.0  # seconds after the deadline in which the store may still answer
_HELLO_SECONDS = 20.0  # seconds in which a new connection must send its hello
_MOST_STRANGERS = 256  # maximum number of connections without a complete hello
_MOST_WAITING = 16  # maximum number of connections of one rank and tag that are not accepted yet
_MOST_TAGS = 1024  # maximum number of tags of one rank with connections that are not accepted yet

_Key = tuple[int, int]  # rank and tag


def _host() -> str:
    """Return the IPv4 or IPv6 address at which other ranks can reach this rank, chosen as Gloo does."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        for address in _addresses(interface):
            if _can_bind(address):
                return address
        raise PeerError(
            f"GLOO_SOCKET_IFNAME={interface} is not a network interface with an IPv4 or IPv6 address: set it to one of "
            "this host"
        )
    with suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            if _can_bind(str(address[0])):
                return str(address[0])
    return "127.0.0.1"


def _addresses(interface: str) -> Generator[str]:
    """Yield the addresses of an interface, except link-local IPv6 addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s, suppress(OSError):
        request = struct.pack("256s", interface[:15].encode())
        yield socket.inet_ntoa(fcntl.ioctl(s.fileno(), _SIOCGIFADDR, request)[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, _, _, scope, _, name = line.split()
            if name == interface and int(scope, 16) != _LINK_LOCAL:
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))


def _can_bind(address: str) -> bool:
    """Return True if `address` belongs to this machine."""
    with suppress(OSError), socket.socket(_family(address), socket.SOCK_STREAM) as s:
        s.bind((address, 0))
        return True
    return False


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class _Listener:
    """Thread that accepts connections and sorts them by rank and tag.

    A connection whose first bytes are not a valid hello is closed.

    Parameters
    ----------
    rank, size : int
        Rank of this process, and number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.host = _host()
        self._sock = socket.create_server((self.host, 0), family=_family(self.host), backlog=1024)
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self.token = os.urandom(_TOKEN_NBYTES)
        self._rank, self._size = rank, size
        self.arrival = threading.Condition()
        self._waiting: dict[_Key, deque[PeerConnection]] = {}
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
                    if now - since > _HELLO_SECONDS or len(strangers) > _MOST_STRANGERS:
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
        except OSError:  # stopped, or out of file descriptors
            if not self._stopped:
                time.sleep(0.05)
            return
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
            limit = self.timeout.total_seconds() if seconds is None else seconds
            self._store: Any = own_store(group, PREFIX, limit)
            address = ADDRESS.pack(protocol_hash(), self._listener.token, self._listener.port)
            address += self._listener.host.encode()
            within(limit, lambda: self._store.set(str(self.rank), address))
        except (OSError, RuntimeError) as e:
            raise PeerError(f"rank {self.rank} cannot open a port for other ranks: {e}") from e

    def check_process(self) -> None:
        """Raise PeerError in a process that was forked from the process that created the endpoint."""
        if os.getpid() != self._pid:
            raise PeerError(FORKED)

    def connect(self, peer: int, tag: int, seconds: float) -> PeerConnection:
        """Connect to the port of a rank.

        Raises
        ------
        PeerError
            The rank has no endpoint within `seconds`, cannot be reached, or uses another version of the protocol.
        """
        deadline = time.monotonic() + seconds
        token, port, host = self._address_of(peer, deadline)
        try:
            sock = socket.create_connection((host, port), timeout=max(0.001, deadline - time.monotonic()))
        except OSError as e:
            raise PeerError(f"rank {peer} cannot be reached at {host}, port {port}: {e}") from e
        try:
            sock.sendall(HELLO.pack(HELLO_MAGIC, token, protocol_hash(), self.rank, tag))
            return PeerConnection(sock, peer)
        except BaseException as e:
            sock.close()
            if isinstance(e, OSError):
                raise PeerError(f"rank {peer} is gone: {e}") from e
            raise

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
                    raise PeerError(f"rank {peer} has not connected within the timeout")
                self._listener.arrival.wait(left)
        return None

    def wake(self) -> None:
        """Make all calls of :meth:`accept` in flight check again whether they are cancelled."""
        with self._listener.arrival:
            self._listener.arrival.notify_all()

    def _stored_address(self, peer: int, deadline: float) -> bytes:
        """Wait for the address that a rank stores when it has an endpoint, and return it."""
        pause = 0.001
        try:
            # Poll, since a wait in the store would block other threads that use the store.
            while not self._store.check([str(peer)]):
                if time.monotonic() > deadline:
                    raise PeerError(f"rank {peer} has not begun to communicate within the timeout")
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            return self._store.get(str(peer))
        except PeerError:
            raise
        except RuntimeError as e:
            raise PeerError(f"the key-value store of the process group does not answer: {e}") from e

    def _address_of(self, peer: int, deadline: float) -> tuple[bytes, int, str]:
        """Return token, port and host of a rank, once it has an endpoint."""
        left = max(0.0, deadline - time.monotonic())
        value = within(left + _STORE_SECONDS, lambda: self._stored_address(peer, deadline))
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
