"""Handshake of a new connection, on both sides: hello, TLS and proofs (docs/spec/protocol.md, sections 2.2 to 2.4)."""

import hmac
import logging
import os
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Generator
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any, NamedTuple, TypeAlias

from codec import PeerError
from codec._secret import Secret
from codec._security import HAS_SECRET, HAS_TLS, Security, difference
from codec.torch.network.sockets import (
    descriptor_limit,
    family,
    host_address,
    reason,
    receive_all,
    send_all,
    shown_address,
)
from codec.torch.network.tcp import PeerConnection
from codec.torch.network.tls import AnySocket, TlsError, TlsSocket
from codec.torch.network.version import protocol_hash

HELLO = struct.Struct("<4s16sqqqB")  # magic, token of the listening rank, version's hash, rank, tag, flags
HELLO_MAGIC = b"CDPH"
NONCE_NBYTES = PROOF_NBYTES = 32
_PROVEN = struct.Struct("<18s16sqB32sqqq32s32s32s")  # fields of HandshakeTerms, after the label
_LABELS = b"codec.torch client", b"codec.torch server"
TOKEN_NBYTES = 16
_HELLO_SECONDS = 20.0  # seconds in which a new connection must complete its handshake
_SILENT_SECONDS = 1.0  # seconds in which a hello must arrive while this process is out of file descriptors
_MOST_STRANGERS = 256  # maximum number of connections in a handshake, besides one for each rank
_MOST_WAITING = 16  # maximum number of connections of one rank and tag that are not accepted yet
_MOST_TAGS = 1024  # maximum number of tags of one rank with connections that are not accepted yet
_MOST_WARNINGS = 100  # maximum number of logged refusals of one port

Key = tuple[int, int]  # rank and tag
Steps: TypeAlias = Generator[int, None, AnySocket]  # yields the event of the socket to wait for

logger = logging.getLogger("codec.torch")


class HandshakeTerms(NamedTuple):
    """Facts of a connection, on which both ranks must agree, and which the proofs of both ranks cover.

    The client is the rank that connects, the server the one that listens.
    """

    token: bytes  # of the server's port
    version: int  # hash of the protocol's version
    flags: int  # Security.flags of both ranks
    group: bytes  # SHA-256 that identifies the group
    client: int
    server: int
    tag: int
    binding: bytes = bytes(32)  # TlsSocket.binding(); zeros without TLS
    client_nonce: bytes = b""
    server_nonce: bytes = b""

    def hello(self) -> bytes:
        """Return the first bytes of the client."""
        return HELLO.pack(HELLO_MAGIC, self.token, self.version, self.client, self.tag, self.flags)

    def proof(self, secret: Secret | None, *, server: bool) -> bytes:
        """Return the proof of one side, which the other side cannot send back as its own.

        Without a secret, TLS protects the proof, which then shows that the hello was not changed or redirected.
        """
        text = _PROVEN.pack(_LABELS[server], *self)
        return hmac.digest(b"", text, "sha256") if secret is None else secret.prove(text)


class Unproven(Exception):
    """The other side has sent a wrong hello or proof; the message is the end of a sentence about it."""


class ClientHandshake:
    """Handshake of the connecting side, on a non-blocking socket that is being connected.

    Parameters
    ----------
    sock : socket.socket
        The socket.
    address : tuple of str and int
        Host and port of the server.
    terms : HandshakeTerms
        Facts, without the binding and the nonces.
    secret : Secret or None
        Secret of this rank.
    context : ssl.SSLContext or None
        TLS context of this rank.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: tuple[str, int],
        terms: HandshakeTerms,
        secret: Secret | None,
        context: ssl.SSLContext | None,
    ) -> None:
        self.sock, self.peer = sock, terms.server
        self.channel: AnySocket | None = None  # once the handshake is complete
        self._address, self._terms, self._secret, self._context = address, terms, secret, context
        self._steps = self._advance()

    def advance(self) -> int:
        """Go on, once the socket is ready; return the event to wait for, 0 if the handshake is complete.

        Raises
        ------
        OSError
            The connection has failed.
        PeerError
            The ranks do not agree on TLS, or the server has not proven the secret.
        """
        try:
            return next(self._steps)
        except StopIteration as end:
            self.channel = end.value
            return 0

    def _advance(self) -> Steps:
        number = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, os.strerror(number))
        yield from send_all(self.sock, self._terms.hello())
        if self._terms.flags:
            yield EVENT_WRITE  # the caller ends the handshake here if the server has other flags
        channel, terms, step = self.sock, self._terms, ""
        try:
            if self._context is not None:
                step = "completed TLS: set the same tls= or variables CODEC_TLS*"
                channel = TlsSocket(self.sock, self._context, server=False, host=self._address[0])
                yield from channel.handshake()
                terms = terms._replace(binding=channel.binding())
            if self._secret is not None:
                step = "proven the secret: set the same secret (CODEC_SECRET_FILE)"
            if terms.flags:
                yield from self._prove(channel, terms)
        except TlsError as e:
            raise self._refusal(f"cannot be connected by TLS: {e}") from e
        except Unproven as e:
            raise self._refusal(str(e)) from None
        except OSError:
            raise self._refusal(f"has closed the connection before it has {step} on all ranks") from None
        return channel

    def _prove(self, channel: AnySocket, terms: HandshakeTerms) -> Generator[int]:
        terms = terms._replace(client_nonce=os.urandom(NONCE_NBYTES))
        yield from send_all(channel, terms.client_nonce)
        answer = yield from receive_all(channel, NONCE_NBYTES + PROOF_NBYTES)
        terms = terms._replace(server_nonce=answer[:NONCE_NBYTES])
        if not hmac.compare_digest(answer[NONCE_NBYTES:], terms.proof(self._secret, server=True)):
            raise Unproven(
                "is another rank: the connection was redirected, or its hello changed"
                if self._secret is None
                else "has not proven the secret of this rank: set the same secret (CODEC_SECRET_FILE) on all ranks"
            )
        yield from send_all(channel, terms.proof(self._secret, server=False))

    def _refusal(self, why: str) -> PeerError:
        text = f"rank {self.peer} at {shown_address(self._address)} {why}"
        logger.warning("rank %d has closed a connection: %s", self._terms.client, text)
        return PeerError(text)


class _Stranger:
    """Connection whose handshake is not complete, on the listening side."""

    def __init__(self, address: tuple[Any, ...]) -> None:
        self.since = time.monotonic()
        self.host, self.address = address[0], shown_address(address)
        self.key: Key | None = None  # once the hello has arrived
        self.step = ""  # step of the handshake that is not complete
        self.steps: Steps | None = None
        self.channel: AnySocket | None = None  # once the handshake is complete


class Listener:
    """Thread that accepts connections and sorts them by rank and tag.

    A connection is closed if its first bytes are not a valid hello, if TLS fails or, where this rank has a secret, if
    it does not prove the secret.

    Parameters
    ----------
    rank, size : int
        Rank of this process, and number of ranks.
    group : bytes
        SHA-256 that identifies the group.
    security : Security
        Secret and TLS setting of the ranks.
    context : ssl.SSLContext or None
        TLS context of this rank.
    """

    def __init__(self, rank: int, size: int, group: bytes, security: Security, context: ssl.SSLContext | None) -> None:
        self.host = host_address()
        self._sock = socket.create_server((self.host, 0), family=family(self.host), backlog=1024)
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self.token = os.urandom(TOKEN_NBYTES)
        self._rank, self._size, self._group, self._security, self._context = rank, size, group, security, context
        self.arrival = threading.Condition()
        self._waiting: dict[Key, deque[PeerConnection]] = {}
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest one first
        self._selector = selectors.DefaultSelector()
        self.differing = set[int]()  # ranks whose hello has other flags than this rank
        self.failure = ""  # error of the last attempt to accept a connection
        self.refusal = ""  # reason why a connection with a valid hello was refused
        self._warnings = 0
        self._stopped = False
        threading.Thread(target=self._serve, name=f"codec, rank {rank}, listener", daemon=True).start()

    def take(self, key: Key) -> PeerConnection | None:
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
        strangers = self._strangers
        with self._sock, self._selector:
            self._selector.register(self._sock, EVENT_READ)
            while not self._stopped:
                first = next(iter(strangers.values()), None)  # the oldest one
                limit = first and max(0.0, first.since + _HELLO_SECONDS - time.monotonic())
                for key, _ in self._selector.select(limit):
                    sock: Any = key.fileobj
                    if sock is self._sock:
                        self._accept()
                    elif (stranger := strangers.get(sock)) is None:
                        continue  # closed in this turn
                    elif wanted := self._advance(sock, stranger):
                        self._selector.modify(sock, wanted)
                    else:
                        self._forget(sock)
                        if not self._file(stranger):
                            sock.close()
                now = time.monotonic()
                for sock in [sock for sock, stranger in strangers.items() if now - stranger.since >= _HELLO_SECONDS]:
                    self._close(sock)
                while len(strangers) > min(_MOST_STRANGERS, descriptor_limit() // 4) + self._size:
                    self._close(self._victim())
            for sock in list(strangers):
                self._forget(sock)
                sock.close()
        with self.arrival:
            for waiting in self._waiting.values():
                for connection in waiting:
                    connection.close()
            self._waiting.clear()

    def _forget(self, sock: socket.socket) -> None:
        del self._strangers[sock]
        self._selector.unregister(sock)

    def _close(self, sock: socket.socket) -> None:
        """Close a connection whose handshake takes too long."""
        stranger = self._strangers[sock]
        self._refuse(stranger, f"it has not {stranger.step} in time")
        self._forget(sock)
        sock.close()

    def _victim(self) -> socket.socket:
        """Return the connection to close if there are too many: the oldest one of the host that has most of them.

        So a host that opens many connections keeps no other host out.
        """
        (host, _), *_ = Counter(stranger.host for stranger in self._strangers.values()).most_common(1)
        return next(sock for sock, stranger in self._strangers.items() if stranger.host == host)

    def _accept(self) -> None:
        try:
            sock, address = self._sock.accept()
        except BlockingIOError:
            return
        except OSError as e:  # stopped, or out of file descriptors
            self.failure = reason(e)
            if not self._stopped:
                time.sleep(0.05)
                old = time.monotonic() - _SILENT_SECONDS
                for each in [sock for sock, s in self._strangers.items() if s.key is None and s.since < old]:
                    self._close(each)
            return
        self.failure = ""
        try:
            sock.setblocking(False)
            with suppress(OSError):  # the peer has already broken the connection
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(sock, EVENT_READ)
        except OSError as e:  # out of memory
            self.failure = reason(e)
            sock.close()
            return
        self._strangers[sock] = _Stranger(address)

    def _advance(self, sock: socket.socket, stranger: _Stranger) -> int:
        """Go on with a handshake; return the event to wait for, or 0 if it has succeeded or failed."""
        if stranger.steps is None:
            stranger.steps = self._steps(sock, stranger)
        try:
            return next(stranger.steps)
        except StopIteration as end:
            stranger.channel = end.value
        except (TlsError, Unproven) as e:
            self._refuse(stranger, str(e))
        except OSError:
            self._refuse(stranger, f"it has ended before it has {stranger.step}")
        except MemoryError:
            self._refuse(stranger, "this rank has too little memory")
        return 0

    def _steps(self, sock: socket.socket, stranger: _Stranger) -> Steps:
        if (hello := (yield from receive_all(sock, len(HELLO_MAGIC)))) != HELLO_MAGIC:
            raise ConnectionError("it is no rank")
        hello += yield from receive_all(sock, HELLO.size - len(hello))
        _, token, version, rank, tag, flags = HELLO.unpack(hello)
        known = hmac.compare_digest(token, self.token) and not flags & ~(HAS_SECRET | HAS_TLS)
        if not known or version != protocol_hash() or not 0 <= rank < self._size or rank == self._rank:
            raise ConnectionError("it is no rank")
        stranger.key = rank, tag
        if (why := difference(self._rank, self._security.flags, rank, flags)) is not None:
            with self.arrival:
                self.differing.add(rank)
                self.arrival.notify_all()
            raise Unproven(f"its hello says that {why}")
        channel, secret = sock, self._security.secret
        terms = HandshakeTerms(self.token, version, flags, self._group, rank, self._rank, tag)
        if self._context is not None:
            stranger.step = "completed TLS"
            channel = TlsSocket(sock, self._context, server=True)
            yield from channel.handshake()
            terms = terms._replace(binding=channel.binding())
        if secret is not None:
            stranger.step = "proven the secret"
        if flags:
            theirs = yield from receive_all(channel, NONCE_NBYTES)
            terms = terms._replace(client_nonce=theirs, server_nonce=os.urandom(NONCE_NBYTES))
            yield from send_all(channel, terms.server_nonce + terms.proof(secret, server=True))
            proof = yield from receive_all(channel, PROOF_NBYTES)
            if not hmac.compare_digest(proof, terms.proof(secret, server=False)):
                raise Unproven(
                    "it has connected to another rank, or its hello was changed"
                    if secret is None
                    else "its proof of the secret is wrong"
                )
        return channel

    def _refuse(self, stranger: _Stranger, why: str) -> None:
        """Log that a connection is closed, if it has sent a valid hello."""
        if stranger.key is None:
            return
        rank, tag = stranger.key
        self.refusal = f"a connection from {stranger.address}, as rank {rank} with tag {tag}: {why}"
        self._warnings += 1
        if self._warnings <= _MOST_WARNINGS:
            last = "" if self._warnings < _MOST_WARNINGS else "; further ones are not logged"
            logger.warning("rank %d has refused %s%s", self._rank, self.refusal, last)

    def _file(self, stranger: _Stranger) -> bool:
        """Queue a connection for :meth:`take`; return False if it must be closed."""
        key, channel = stranger.key, stranger.channel
        if key is None or channel is None:
            return False
        try:
            connection = PeerConnection(channel, key[0])
        except OSError:  # the peer has just broken it, which must not end this thread
            return False
        with self.arrival:
            tags = sum(rank == key[0] for rank, _ in self._waiting)
            waiting = self._waiting.setdefault(key, deque()) if key in self._waiting or tags < _MOST_TAGS else None
            if waiting is None or len(waiting) >= _MOST_WAITING:
                return False
            waiting.append(connection)
            self.arrival.notify_all()
        return True
