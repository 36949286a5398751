"""Handshake of a new connection, on both sides: hello and proofs (docs/spec/protocol.md, sections 2.2 and 2.3)."""

import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from hmac import compare_digest
from typing import Any, NamedTuple

from codec import PeerError
from codec._secret import Secret
from codec.torch.network.sockets import family, host_address, reason
from codec.torch.network.tcp import PeerConnection
from codec.torch.network.version import protocol_hash

HELLO = struct.Struct("<4s16sqqq")  # magic, token of the listening rank, hash of the protocol's version, rank, tag
HELLO_MAGIC, SECRET_MAGIC = b"CDPH", b"CDPS"  # without and with a secret
NONCE_NBYTES = PROOF_NBYTES = 32
_PROVEN = struct.Struct("<18s16sq32sqqq32s32s")  # fields of HandshakeTerms, after the label
_LABELS = b"codec.torch client", b"codec.torch server"
TOKEN_NBYTES = 16
_HELLO_SECONDS = 20.0  # seconds in which a new connection must complete its handshake
_MOST_STRANGERS = 256  # maximum number of connections in a handshake, besides one for each rank
_MOST_WAITING = 16  # maximum number of connections of one rank and tag that are not accepted yet
_MOST_TAGS = 1024  # maximum number of tags of one rank with connections that are not accepted yet
_MOST_WARNINGS = 100  # maximum number of logged refusals of one port

Key = tuple[int, int]  # rank and tag

logger = logging.getLogger("codec.torch")


class HandshakeTerms(NamedTuple):
    """Facts on which both ranks must agree; each rank proves that it knows the secret, and these.

    The client is the rank that connects, the server the one that listens.
    """

    token: bytes  # of the server's port
    version: int  # hash of the protocol's version
    group: bytes  # SHA-256 that identifies the group
    client: int
    server: int
    tag: int
    client_nonce: bytes
    server_nonce: bytes

    def proof(self, secret: Secret, *, server: bool) -> bytes:
        """Return the proof of one side, which the other side cannot send back as its own."""
        return secret.prove(_PROVEN.pack(_LABELS[server], *self))


class ClientHandshake:
    """Handshake of the connecting side, on a non-blocking socket.

    Parameters
    ----------
    sock : socket.socket
        Socket that is being connected.
    peer : int
        Rank that listens.
    terms : HandshakeTerms
        Facts, without the server's nonce.
    secret : Secret or None
        Secret of this rank.
    """

    def __init__(self, sock: socket.socket, peer: int, terms: HandshakeTerms, secret: Secret | None) -> None:
        self.sock, self.peer = sock, peer
        self._terms, self._secret = terms, secret
        self._said = False
        self._received = bytearray()

    def advance(self) -> bool:
        """Go on, once the socket is ready; return True if the handshake is complete.

        Raises
        ------
        OSError
            The connection has failed.
        PeerError
            The server has not proven the secret.
        """
        if not self._said:
            self._say_hello()
            return self._secret is None
        try:
            data = self.sock.recv(NONCE_NBYTES + PROOF_NBYTES - len(self._received))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._received += data
        if not data:
            raise self._refusal("has closed the connection before it has proven the secret")
        if len(self._received) < NONCE_NBYTES + PROOF_NBYTES:
            return False
        assert self._secret is not None
        nonce, proof = bytes(self._received[:NONCE_NBYTES]), bytes(self._received[NONCE_NBYTES:])
        terms = self._terms._replace(server_nonce=nonce)
        if not compare_digest(proof, terms.proof(self._secret, server=True)):
            raise self._refusal("has not proven the secret of this rank")
        self.sock.sendall(terms.proof(self._secret, server=False))  # the buffer has room, as for the hello
        return True

    def _say_hello(self) -> None:
        number = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, os.strerror(number))
        t = self._terms
        magic, nonce = (HELLO_MAGIC, b"") if self._secret is None else (SECRET_MAGIC, t.client_nonce)
        # The buffer of a new socket has room for the hello.
        self.sock.sendall(HELLO.pack(magic, t.token, t.version, t.client, t.tag) + nonce)
        self._said = True

    def _refusal(self, why: str) -> PeerError:
        address = "an unknown address"
        with suppress(OSError):
            address = shown_address(self.sock.getpeername())
        text = f"rank {self.peer} at {address} {why}"
        logger.warning("rank %d has closed a connection: %s", self._terms.client, text)
        return PeerError(f"{text}: set the same secret (CODEC_SECRET_FILE) on all ranks")


def shown_address(address: tuple[Any, ...]) -> str:
    """Return host and port of a socket's address for messages."""
    return f"{address[0]}, port {address[1]}"


class _Stranger:
    """Connection whose handshake is not complete, on the listening side."""

    def __init__(self, address: tuple[Any, ...]) -> None:
        self.since = time.monotonic()
        self.address = shown_address(address)
        self.received = bytearray()
        self.wanted = HELLO.size  # bytes of the next step
        self.key: Key | None = None  # once the hello has arrived
        self.terms: HandshakeTerms | None = None  # once this rank has sent its proof


class Listener:
    """Thread that accepts connections and sorts them by rank and tag.

    A connection is closed if its first bytes are not a valid hello or, where this rank has a secret, if it does not
    prove the secret.

    Parameters
    ----------
    rank, size : int
        Rank of this process, and number of ranks.
    group : bytes
        SHA-256 that identifies the group.
    secret : Secret or None
        Secret of the ranks.
    """

    def __init__(self, rank: int, size: int, group: bytes, secret: Secret | None) -> None:
        self.host = host_address()
        self._sock = socket.create_server((self.host, 0), family=family(self.host), backlog=1024)
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self.token = os.urandom(TOKEN_NBYTES)
        self._rank, self._size, self._group, self._secret = rank, size, group, secret
        self.arrival = threading.Condition()
        self._waiting: dict[Key, deque[PeerConnection]] = {}
        self._strangers: dict[socket.socket, _Stranger] = {}
        self.differing = set[int]()  # ranks whose hello says that they have a secret and this rank has none, or reverse
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
        with self._sock, selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)

            def forget(sock: Any) -> None:
                del strangers[sock]
                selector.unregister(sock)

            while not self._stopped:
                for key, _ in selector.select(_HELLO_SECONDS if strangers else None):
                    sock: Any = key.fileobj
                    if sock is self._sock:
                        self._accept(selector)
                    elif (complete := self._read(sock, strangers[sock])) is not None:
                        stranger = strangers[sock]
                        forget(sock)
                        if not complete or stranger.key is None or not self._file(stranger.key, sock):
                            sock.close()
                now = time.monotonic()
                for sock, stranger in list(strangers.items()):
                    if now - stranger.since > _HELLO_SECONDS or len(strangers) > _MOST_STRANGERS + self._size:
                        if stranger.key is not None:
                            self._refuse(stranger, "it has not proven the secret in time")
                        forget(sock)
                        sock.close()
            for sock in list(strangers):
                forget(sock)
                sock.close()
        with self.arrival:
            for waiting in self._waiting.values():
                for connection in waiting:
                    connection.close()
            self._waiting.clear()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, address = self._sock.accept()
        except BlockingIOError:
            return
        except OSError as e:  # stopped, or out of file descriptors
            self.failure = reason(e)
            if not self._stopped:
                time.sleep(0.05)
            return
        self.failure = ""
        sock.setblocking(False)
        self._strangers[sock] = _Stranger(address)
        selector.register(sock, selectors.EVENT_READ)

    def _read(self, sock: Any, stranger: _Stranger) -> bool | None:
        """Read received bytes; return True if the handshake is complete, False if it has failed, otherwise None."""
        try:
            data = sock.recv(stranger.wanted - len(stranger.received))  # leave the message after the handshake unread
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        stranger.received += data
        if data and len(stranger.received) < stranger.wanted:
            return None
        if not data:
            if stranger.key is not None:
                self._refuse(stranger, "it has ended before it has proven the secret")
            return False
        if stranger.key is None:
            return self._read_hello(bytes(stranger.received), stranger)
        if stranger.terms is None:
            return self._prove(sock, stranger)
        assert self._secret is not None
        proof = bytes(stranger.received[-PROOF_NBYTES:])
        if compare_digest(proof, stranger.terms.proof(self._secret, server=False)):
            return True
        self._refuse(stranger, "its proof of the secret is wrong")
        return False

    def _read_hello(self, hello: bytes, stranger: _Stranger) -> bool | None:
        magic, token, version, rank, tag = HELLO.unpack(hello)
        known = magic in (HELLO_MAGIC, SECRET_MAGIC) and compare_digest(token, self.token)
        if not known or version != protocol_hash() or not 0 <= rank < self._size or rank == self._rank:
            return False
        stranger.key = rank, tag
        if (magic == SECRET_MAGIC) != (self._secret is not None):
            self._refuse(
                stranger,
                "it does not prove the secret of this rank"
                if self._secret is not None
                else "it has a secret, and this rank has none",
            )
            with self.arrival:
                self.differing.add(rank)
                self.arrival.notify_all()
            return False
        if self._secret is None:
            return True
        stranger.wanted += NONCE_NBYTES
        return None

    def _prove(self, sock: Any, stranger: _Stranger) -> bool | None:
        """Send the nonce and the proof of this rank."""
        assert stranger.key is not None
        assert self._secret is not None
        rank, tag = stranger.key
        theirs, mine = bytes(stranger.received[HELLO.size :]), os.urandom(NONCE_NBYTES)
        stranger.terms = HandshakeTerms(self.token, protocol_hash(), self._group, rank, self._rank, tag, theirs, mine)
        try:
            sock.sendall(mine + stranger.terms.proof(self._secret, server=True))  # the buffer has room
        except OSError:
            self._refuse(stranger, "it has ended before it has proven the secret")
            return False
        stranger.wanted += PROOF_NBYTES
        return None

    def _refuse(self, stranger: _Stranger, why: str) -> None:
        """Log that a connection with a valid hello is closed."""
        assert stranger.key is not None
        rank, tag = stranger.key
        self.refusal = f"a connection from {stranger.address}, as rank {rank} with tag {tag}: {why}"
        self._warnings += 1
        if self._warnings <= _MOST_WARNINGS:
            last = "" if self._warnings < _MOST_WARNINGS else "; further ones are not logged"
            logger.warning("rank %d has refused %s%s", self._rank, self.refusal, last)

    def _file(self, key: Key, sock: socket.socket) -> bool:
        """Queue a connection for :meth:`take`; return False if it must be closed."""
        try:
            connection = PeerConnection(sock, key[0])
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
