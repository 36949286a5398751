"""Endpoint of a rank: the port to which other ranks connect (docs/spec/protocol.md, section 2)."""

import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from hashlib import sha256
from ipaddress import ip_address
from typing import Any, NamedTuple

from codec import ArgumentError, PeerError
from codec._secret import FILE_VARIABLE as SECRET_VARIABLE
from codec._security import NONE, Security, difference, security_of_environment
from codec._tls import VARIABLE as TLS_VARIABLE
from codec.torch._compat import group_identity, timeout_of
from codec.torch.network.handshake import ClientHandshake, HandshakeTerms, Key, Listener
from codec.torch.network.sockets import family, reason
from codec.torch.network.store import AddressBook
from codec.torch.network.tcp import FORKED, PeerConnection
from codec.torch.network.tls import AnySocket
from codec.torch.network.version import protocol_hash

CLOSED = "the group was closed by close_group(): make a new group"
ADDRESS = struct.Struct("<q16sHB")  # hash of the protocol's version, token, port, flags; the host follows
_STORE_SECONDS = 1.0  # seconds in which the store must have the address of a rank whose hello has arrived
_LONGEST_SELECT = 1000.0  # maximum seconds of one select; the limit of the system call is 2^31 ms


class PeerAddress(NamedTuple):
    """Address of a rank in the store of the group."""

    token: bytes
    port: int
    host: str
    flags: int = 0  # Security.flags


class Endpoint:
    """Listening port of this rank, and methods that connect to the ports of the other ranks in a group.

    Parameters
    ----------
    group : ProcessGroup
        Group of ranks. Each rank with an endpoint writes its address to the store of the group.
    seconds : float or None
        Longest wait for the store; None: the timeout of the group.
    security : Security
        Secret and TLS setting of the ranks.

    Raises
    ------
    ArgumentError
        `security` is less than what this rank has requested.
    """

    def __init__(self, group: Any, seconds: float | None, security: Security = NONE) -> None:
        security.check()
        self.security = security
        self._server_context, self._client_context = (None, None) if security.tls is None else security.tls.contexts()
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.timeout: timedelta = timeout_of(group)
        self.lock = threading.Lock()
        self.pairs: dict[Key, Any] = {}  # connections of codec.torch.send and recv, by rank and tag; guarded by `lock`
        self._pid, self._closed = os.getpid(), False
        self._group = sha256(group_identity(group).encode()).digest()
        try:
            self._listener = Listener(self.rank, self.size, self._group, security, self._server_context)
            weakref.finalize(self, self._listener.stop)
            self._book = AddressBook(group.get_group_store())
            self._addresses: dict[int, PeerAddress] = {}  # addresses that this rank has read, by rank
            address = ADDRESS.pack(protocol_hash(), self._listener.token, self._listener.port, security.flags)
            limit = self.timeout.total_seconds() if seconds is None else seconds
            self._book.publish(self.rank, address + self._listener.host.encode(), limit)
        except (OSError, RuntimeError) as e:
            why = reason(e) if isinstance(e, OSError) else e
            raise PeerError(f"rank {self.rank} cannot open a port for other ranks: {why}") from e

    def check_security(self, security: Security) -> None:
        """Raise ArgumentError if the endpoint has other settings than those that are given."""
        for name, variable, mine, given in zip(
            ("secret", "TLS setting"), (SECRET_VARIABLE, TLS_VARIABLE), self.security, security, strict=True
        ):
            if given is not None and given != mine:
                which = "no" if mine is None else "another"
                raise ArgumentError(
                    f"options(): this rank already communicates in the group with {which} {name}: pass the {name} "
                    f"to the first call that uses the group, or set {variable}"
                )

    def check_process(self) -> None:
        """Raise PeerError in a process that was forked from the process that created the endpoint."""
        if os.getpid() != self._pid:
            raise PeerError(FORKED)

    def close(self) -> None:
        """Close the port, and the connections of codec.torch.send and recv with their threads."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        self._listener.stop()
        with self.lock:
            pairs = [*self.pairs.values()]
            self.pairs.clear()
        for pair in pairs:
            pair.end()
        self.wake()

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
        differing: PeerError | None = None
        with ExitStack() as undo, selectors.DefaultSelector() as selector:
            for peer in peers:
                try:
                    client = self._begin(peer, tag)
                except OSError as e:
                    raise self._unreachable(peer, e) from e
                undo.callback(client.sock.close)
                selector.register(client.sock, selectors.EVENT_WRITE, client)
            while selector.get_map():
                ready = selector.select(min(max(0.001, deadline - time.monotonic()), _LONGEST_SELECT))
                for key, _ in ready:
                    client = key.data
                    try:
                        wanted = client.advance()
                    except OSError as e:
                        raise self._unreachable(client.peer, e) from e
                    error = self._difference(client.peer)
                    differing = differing or error
                    if error is not None:
                        selector.unregister(client.sock)  # the hello has told the peer that settings differ
                    elif wanted:
                        selector.modify(client.sock, wanted, client)
                    else:
                        selector.unregister(client.sock)
                        connections[client.peer] = self._connection(client.channel, client.peer)
                if (pending := selector.get_map()) and time.monotonic() >= deadline:
                    silent = next(iter(pending.values())).data.peer
                    raise differing or self._unreachable(silent, TimeoutError("timed out"))
            if differing is not None:
                raise differing
            undo.pop_all()
        return [connections[peer] for peer in peers]

    def _begin(self, peer: int, tag: int) -> ClientHandshake:
        """Begin to connect to a rank."""
        address = self._addresses[peer]
        sock = socket.socket(family(address.host), socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(BlockingIOError):
                sock.connect((address.host, address.port))
        except BaseException:
            sock.close()
            raise
        flags, secret = self.security.flags, self.security.secret
        terms = HandshakeTerms(address.token, protocol_hash(), flags, self._group, self.rank, peer, tag)
        return ClientHandshake(sock, (address.host, address.port), terms, secret, self._client_context)

    def _connection(self, channel: AnySocket | None, peer: int) -> PeerConnection:
        assert channel is not None
        try:
            return PeerConnection(channel, peer)
        except OSError as e:
            raise PeerError(f"rank {peer} is gone: {e}") from e

    def _difference(self, peer: int) -> PeerError | None:
        """Return an error if, by the address of a rank, only one of this rank and that rank has a secret, or TLS."""
        why = difference(self.rank, self.security.flags, peer, self._addresses[peer].flags)
        return None if why is None else PeerError(why)

    def _unreachable(self, peer: int, error: OSError) -> PeerError:
        at = self._addresses[peer]
        return PeerError(f"rank {peer} cannot be reached at {at.host}, port {at.port}: {reason(error)}")

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
            The rank has not connected in time; only one of this rank and that rank has a secret, or TLS; or the
            endpoint was closed.
        """
        listener, deadline = self._listener, None if seconds is None else time.monotonic() + seconds
        while True:
            with listener.arrival:
                while True:
                    if cancelled():
                        return None
                    if self._closed:
                        raise PeerError(CLOSED)
                    if (found := listener.take((peer, tag))) is not None:
                        return found
                    if peer in listener.differing:
                        break
                    left = None if deadline is None else min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
                    if left is not None and left <= 0:
                        why = listener.failure or (listener.refusal and f"refused {listener.refusal}")
                        raise PeerError(f"rank {peer} has not connected within the timeout{why and f': {why}'}")
                    listener.arrival.wait(left)
                listener.differing.discard(peer)
            # Anyone can send such a hello, so the address in the store decides. A rank stores it before it connects.
            with suppress(PeerError):
                self._read_addresses([peer], time.monotonic() + _STORE_SECONDS)
            if peer in self._addresses and (error := self._difference(peer)) is not None:
                raise error

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

    def _address_in(self, value: bytes, peer: int) -> PeerAddress:
        """Return the address of a rank from its value in the store."""
        try:
            version, token, port, flags = ADDRESS.unpack_from(value)
            host = value[ADDRESS.size :].decode()
            ip_address(host)  # a name would be looked up without a timeout
        except (struct.error, ValueError) as e:
            raise PeerError(f"the key-value store of the process group has no valid address of rank {peer}") from e
        if version != protocol_hash():
            raise PeerError(
                f"rank {peer} and rank {self.rank} have different versions of the protocol: install the same codec on "
                "all ranks"
            )
        return PeerAddress(token, port, host, flags)


_endpoints: "weakref.WeakKeyDictionary[Any, Endpoint]" = weakref.WeakKeyDictionary()
_closed: "weakref.WeakSet[Any]" = weakref.WeakSet()  # groups that close_endpoint() was called for
_given: "weakref.WeakKeyDictionary[Any, Security]" = weakref.WeakKeyDictionary()  # from options() of groups' calls
_endpoints_lock = threading.Lock()


def _after_fork() -> None:
    """Replace the lock, which a thread of the parent may hold."""
    global _endpoints_lock
    _endpoints_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def use_security(group: Any, security: Security) -> None:
    """Use the settings of a call's options for the endpoint of a group.

    Raises
    ------
    ArgumentError
        The group already has an endpoint with other settings.
    """
    if security == NONE:
        return
    with _endpoints_lock:
        endpoint = _endpoints.get(group)
        if endpoint is None:
            _given[group] = security.over(_given.get(group, NONE))
    if endpoint is not None:
        endpoint.check_security(security)


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
        No port can be opened, the endpoint was closed, or it belongs to the process that forked this one.
    ArgumentError
        The secret or the TLS setting is invalid.
    """
    with _endpoints_lock:
        if group in _closed:
            raise PeerError(CLOSED)
        endpoint = _endpoints.get(group)
        if endpoint is None:
            security = _given.get(group, NONE).over(security_of_environment())
            endpoint = _endpoints[group] = Endpoint(group, seconds, security)
    endpoint.check_process()
    return endpoint


def close_endpoint(group: Any) -> None:
    """Close the endpoint of this rank in a group, if there is one; the group gets no other one."""
    with _endpoints_lock:
        _closed.add(group)
        endpoint = _endpoints.pop(group, None)
    if endpoint is not None:
        endpoint.close()
