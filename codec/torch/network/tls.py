"""TLS 1.3 on one TCP connection, with the methods of a non-blocking socket that connections between ranks use."""

import socket
import ssl
import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from hashlib import sha256
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any, TypeAlias, cast

from codec._tls import distrust

_CHUNK_NBYTES = 1 << 16  # maximum bytes that one call encrypts; a record of TLS has 2^14
_FETCH_NBYTES = 1 << 16  # maximum bytes that one system call reads
_MOST_HANDSHAKE_NBYTES = 1 << 16  # maximum bytes that the other side may send in its handshake


class TlsError(OSError):
    """TLS has failed; the message is a sentence about the other rank, which begins with "it"."""


class TlsSocket:
    """Encrypted connection. At a time, one thread may send and another one receive.

    OpenSSL encrypts into memory, not to the socket, so that no call depends on the arguments of an earlier one, and
    reading never waits for writing. Bytes that this object has read, but not returned, are not seen by poll:
    :attr:`buffered` is True then.

    Parameters
    ----------
    sock : socket.socket
        Connected non-blocking socket, which this object owns from now on.
    context : ssl.SSLContext
        Context of this side.
    server : bool
        True: the other side has connected to this one.
    host : str, optional
        Host that the certificate of a server must name, if the context checks it.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool, host: str | None = None) -> None:
        self._sock = sock
        self._lock = threading.Lock()  # guards the objects of OpenSSL; no call under it waits
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = host if context.check_hostname else None
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server, server_hostname=name)
        self._encrypted = memoryview(b"")  # bytes that sendmsg() has still to pass to the socket
        self._nbytes = 0  # bytes of the caller that are in `_encrypted`
        self._more = False  # True: OpenSSL may hold bytes that were not returned

    # Handshake

    def handshake(self) -> Generator[int]:
        """Perform the handshake; yield the event of the socket to wait for.

        Raises
        ------
        TlsError
            The other side refuses this one, or is refused.
        OSError
            The connection has failed.
        """
        received = 0
        while True:
            try:
                complete = self._step()
            except ssl.SSLError as e:
                with suppress(OSError):
                    self._sock.send(self._outgoing.read())  # tells the other side why
                raise TlsError(explain(e)) from e
            answer = memoryview(self._outgoing.read())
            while answer:
                try:
                    answer = answer[self._sock.send(answer) :]
                except BlockingIOError:
                    yield EVENT_WRITE
            if complete:
                break
            while not (n := self._try_fetch()):
                yield EVENT_READ
            received += n
            if received > _MOST_HANDSHAKE_NBYTES:
                raise TlsError("it has sent a handshake of TLS that is too long")
        if self._tls.version() != "TLSv1.3":
            raise TlsError(f"it uses {self._tls.version()}: allow TLS 1.3 in the contexts of all ranks")
        self._more = True

    def _step(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def _try_fetch(self) -> int:
        """Read encrypted bytes from the socket; return their number, 0 if none has arrived."""
        try:
            n = self._fetch()
        except BlockingIOError:
            return 0
        if not n:
            raise ConnectionError("it has closed the connection")
        return n

    def binding(self) -> bytes:
        """Return 32 bytes that are equal on both sides of this connection, and differ from those of all others.

        The bytes are the SHA-256 of the client's message Finished (RFC 8446, 4.4.4), a MAC of the whole handshake with
        a key of this connection. So the two connections of a man in the middle have different bytes, even if the
        attacker has the certificate and the key of the server.
        """
        finished = self._tls.get_channel_binding("tls-unique")  # with TLS 1.3, Python returns the message Finished
        if not finished:
            raise TlsError("it has no channel binding")
        return sha256(finished).digest()

    # Bytes

    @property
    def buffered(self) -> bool:
        """True if :meth:`recv_into` may return bytes although the socket has none."""
        return self._more

    def recv_into(self, into: Any) -> int:
        """Receive bytes; return their number, 0 at the end of the connection.

        Raises
        ------
        BlockingIOError
            No bytes have arrived.
        OSError
            The connection has failed, or the bytes were changed.
        """
        view = memoryview(into)
        filled = 0
        while filled < view.nbytes:
            with self._lock:
                try:
                    n = cast(int, self._tls.read(view.nbytes - filled, view[filled:]))  # at most one record
                except ssl.SSLWantReadError:
                    n = -1
                except ssl.SSLError as e:
                    raise TlsError(explain(e)) from e
            if n > 0:
                filled += n
                continue
            self._more = False  # OpenSSL holds no complete record
            if filled or not n or not self._fetch():
                return filled
        self._more = True
        return filled

    def _fetch(self) -> int:
        """Read encrypted bytes from the socket; return their number, 0 at the end."""
        data = self._sock.recv(_FETCH_NBYTES)
        with self._lock:
            self._incoming.write(data)
        return len(data)

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        """Send bytes; return their number, once the kernel has accepted all of them.

        Raises
        ------
        BlockingIOError
            The kernel has no room. The next call must pass the same bytes again; it may pass more after them.
        """
        if not self._encrypted:
            chunk = _first_bytes(buffers)
            with self._lock:
                self._nbytes = self._tls.write(chunk)
                self._encrypted = memoryview(self._outgoing.read())
        while self._encrypted:
            self._encrypted = self._encrypted[self._sock.send(self._encrypted) :]
        return self._nbytes

    # The socket

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._sock.fileno()

    def setblocking(self, blocking: bool) -> None:
        """Check that `blocking` is False, the only supported mode."""
        assert not blocking

    def getsockname(self) -> Any:
        """Return the address of this end."""
        return self._sock.getsockname()

    def getpeername(self) -> Any:
        """Return the address of the other end."""
        return self._sock.getpeername()

    def getsockopt(self, level: int, name: int, nbytes: int) -> bytes:
        """Return an option of the socket."""
        return self._sock.getsockopt(level, name, nbytes)

    def setsockopt(self, level: int, name: int, value: int | bytes) -> None:
        """Set an option of the socket."""
        self._sock.setsockopt(level, name, value)

    def shutdown(self, how: int) -> None:
        """Close the connection in both directions, without a message of TLS: all messages state their size."""
        self._sock.shutdown(how)

    def close(self) -> None:
        """Close the file descriptor."""
        self._sock.close()


AnySocket: TypeAlias = socket.socket | TlsSocket


def _first_bytes(buffers: Sequence[Any]) -> Any:
    """Return the first bytes of some buffers, copied only if the first buffer is small."""
    first = memoryview(buffers[0]).cast("B")
    if first.nbytes >= _CHUNK_NBYTES or len(buffers) == 1:
        return first[:_CHUNK_NBYTES]
    chunk = bytearray()
    for part in buffers:
        chunk += memoryview(part).cast("B")[: _CHUNK_NBYTES - len(chunk)]
        if len(chunk) == _CHUNK_NBYTES:
            break
    return chunk


_ALERTS = {  # refusals by the other side, by the name of OpenSSL's alert
    "UNKNOWN_CA": "does not trust the issuer of this rank's certificate: use one CODEC_TLS_CA on all ranks",
    "CERTIFICATE_EXPIRED": "refuses this rank's certificate, which is out of date: renew it, and check the clocks",
    "BAD_CERTIFICATE": "refuses this rank's certificate",
    "UNSUPPORTED_CERTIFICATE": "refuses this rank's certificate, which must allow clientAuth and serverAuth",
    "CERTIFICATE_UNKNOWN": "refuses this rank's certificate",
    "CERTIFICATE_REQUIRED": "requires a certificate, and this rank has none: use the same tls= on all ranks",
    "PROTOCOL_VERSION": "does not allow TLS 1.3",
}
_REASONS = {  # refusals by this side, by the name of OpenSSL's error
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "has sent no certificate, which this rank requires",
    "UNSUPPORTED_PROTOCOL": "does not allow TLS 1.3",
    "WRONG_VERSION_NUMBER": "has sent bytes that are not TLS",
    "DECRYPTION_FAILED_OR_BAD_RECORD_MAC": "has sent bytes that were changed on the way",
}


def explain(error: ssl.SSLError) -> str:
    """Return why TLS has failed: a sentence about the other rank, which begins with "it"."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"it has a certificate that {distrust(error)}: use the same tls= or CODEC_TLS_CA on all ranks"
    reason = error.reason or ""
    if "_ALERT_" in reason:
        name = reason.partition("_ALERT_")[2]
        return "it " + _ALERTS.get(name, f"has refused TLS ({name.replace('_', ' ').lower()})")
    return "it " + _REASONS.get(reason, f"breaks TLS ({reason.replace('_', ' ').lower() or error})")
