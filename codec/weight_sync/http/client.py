"""Requests to the server of a store or to a mirror over HTTP, on one connection."""

import ipaddress
import re
import socket
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from codec.errors import ArgumentError, CodecError, FrameError
from codec.weight_sync.closing import Closing
from codec.weight_sync.http import environment
from codec.weight_sync.http.hints import HEADER, Hint
from codec.weight_sync.http.temporary import copied, not_listed, truncated

if TYPE_CHECKING:
    import mmap
    import ssl
    from http.client import HTTPConnection, HTTPResponse

    from codec.weight_sync.http.arriving import Arriving
    from codec.weight_sync.http.credentials import BearerToken

Cafile = str | PathLike[str] | bool | None

_BLOCK_SECONDS = 64.0  # time for 1 MiB of a file beyond the maximum time without data: 16 KiB/s
_CONNECT_SECONDS = 1.0  # maximum time to connect to a mirror
_BLOCK = 1 << 18  # bytes that are read from a connection at once, and that readers of a mirror wait for


class Connection(Closing):
    """Connection to the server of a store, which is kept open between files.

    Redirects are not followed. Environment variables such as ``http_proxy`` are ignored: they name proxies for the
    internet, which cannot reach a trainer, and whose answers would be taken for those of the trainer.

    Parameters
    ----------
    url : str
        URL of the store.
    seconds : float
        Maximum time without new data, and for the header of a reply. Files must arrive with at least 16 KiB/s.
    token, cafile : optional
        As in :func:`codec.weight_sync.pull`.
    rate : float, optional
        Minimum number of bytes per second after the first `seconds` of a file, instead of 16 KiB/s.

    Raises
    ------
    ArgumentError
        The URL, the token or `cafile` is invalid, or the token would be sent unencrypted.
    """

    def __init__(
        self,
        url: str,
        seconds: float,
        token: "str | BearerToken | None" = None,
        cafile: Cafile = None,
        rate: float | None = None,
    ) -> None:
        self._url, self._seconds, self._rate, self._cafile = url.rstrip("/"), seconds, rate, cafile
        self._open: HTTPConnection | None = None
        self._socket: socket.socket | None = None
        self._tls: ssl.SSLContext | None = None
        if "@" in url.partition("://")[2].partition("/")[0] or "?" in url or "#" in url:
            raise ArgumentError(
                "the URL of a store must not hold a user or password, nor ? or #, which errors would show: pass token="
            )
        with self._errors():
            parts = urlsplit(self._url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ArgumentError(f"{url!r} is not the URL of a store, such as http://10.0.0.1:8000")
            self._host, self._port, self._path = parts.hostname, parts.port, parts.path
        self._token = environment.bearer_token(token)
        with environment.chosen(cafile, environment.CA) as trusted:
            self._tls = self._context(trusted) if parts.scheme == "https" else self._unencrypted(trusted)

    def _context(self, cafile: Cafile) -> "ssl.SSLContext":
        from codec.weight_sync.http.credentials import client_context

        if isinstance(cafile, bool):
            raise ArgumentError(f"cafile must be a file of certificates for {self._url!r}, got {cafile}")
        return client_context(cafile)

    def _unencrypted(self, cafile: Cafile) -> None:
        """Raise ArgumentError if a certificate was given, or if the token would be sent to another machine."""
        if cafile not in (None, False):
            raise ArgumentError(f"cafile= is for https, but the URL is {self._url!r}")
        if self._token is not None and cafile is None and not _is_loopback(self._host):
            raise ArgumentError(
                f"the token would be readable on the way to {self._url!r}: use https, or pass cafile=False if only "
                "trusted machines are on the way"
            )

    def read(self, name: str, most: int) -> "mmap.mmap | bytes":
        """Download a file to a temporary file, and map the temporary file to memory.

        Parameters
        ----------
        name : str
            Name of the file.
        most : int
            Maximum size in bytes.

        Raises
        ------
        ArgumentError
            The server cannot be reached, does not have the file, or did not send data in time.
        FrameError
            The file is larger than `most`, or the connection ended before the end of the file.
        """
        url = f"{self._url}/{name}"
        with self._errors(), self._get(name) as reply:
            length = _length(reply, url)
            if length is not None and length > most:
                raise FrameError(f"{url} has {length} bytes, more than {most}")

            def read(block: memoryview) -> int:
                with self._within(self._seconds + _BLOCK_SECONDS, "a part of a file"):
                    return reply.readinto(block)

            return copied(read, url, most, length)

    def copy(self, name: str, file: "Arriving", mirror: str | None = None) -> Hint | None:
        """Append the part of an update that has not arrived yet to `file`.

        Parameters
        ----------
        name : str
            Name of the update's file.
        file : Arriving
            File that has the bytes before this part.
        mirror : str, optional
            Value of the header that allows the server to reply with a hint (``hints.py``).

        Returns
        -------
        Hint or None
            Mirror that has the file; nothing was appended. None: the file is complete.

        Raises
        ------
        ArgumentError
            As in :meth:`read`, or the temporary file cannot be written.
        FrameError
            The file has another size than `file` announces, or the connection ended before the end of the file.
        """
        if file.complete:
            return None
        url, begin = f"{self._url}/{name}", file.size
        headers = {"Range": f"bytes={begin}-"} if begin else {}
        headers |= {} if mirror is None else {HEADER: mirror}
        with self._errors(), self._get(name, headers) as reply:
            if reply.status == 307:
                return Hint.read(reply.headers, self._url.partition(":")[0], name)
            if begin and reply.headers.get("Content-Range") != f"bytes {begin}-{file.nbytes - 1}/{file.nbytes}":
                raise ArgumentError(f"{url} cannot be read from byte {begin} of {file.nbytes}")
            if _length(reply, url) not in (None, file.nbytes - begin):
                raise not_listed(url)
            self._append(reply, file, time.monotonic())
            if not file.complete:
                raise truncated(url, file.size, file.nbytes)
        return None

    def _append(self, reply: "HTTPResponse", file: "Arriving", start: float) -> None:
        buffer, begin = memoryview(bytearray(_BLOCK)), file.size
        while True:
            seconds = self._seconds + _BLOCK_SECONDS * _BLOCK / (1 << 20)
            if self._rate is not None:
                seconds = start + self._seconds + (file.size - begin) / self._rate - time.monotonic()
            with self._within(max(seconds, 0.0), "a part of a file"):
                n = reply.readinto(buffer)
            if not n:
                return
            file.append(buffer[:n])

    def beside(self, url: str) -> "Connection":
        """Return a connection to another server of the same store, with the same token and certificates.

        Raises
        ------
        FrameError
            `url` has another scheme than this server.
        """
        if url.partition("://")[0] != self._url.partition("://")[0].lower():
            raise FrameError(f"a part is at {url!r}, which is no server of the same kind as {self._url!r}")
        return Connection(url, self._seconds, self._token, self._cafile)

    def reach(self) -> None:
        """Connect to the server, and close the connection.

        Raises
        ------
        ArgumentError
            The server cannot be reached, or has another certificate than `cafile` demands.
        """
        with self._errors():
            self._connect(self._new())
        self.close()

    def at(self, hint: Hint) -> "Connection":
        """Return a connection to a mirror, with the same token and trusted certificates."""
        return Connection(hint.url, hint.seconds, self._token, self._cafile, hint.rate)

    def _get(self, name: str, headers: Mapping[str, str] = MappingProxyType({})) -> "HTTPResponse":
        """Request a file, and return the reply: 200, 206 if `headers` has a range, or 307 if it allows hints."""
        url = f"{self._url}/{name}"
        reply = self._request(f"{self._path}/{name}", headers)
        if reply.status == (206 if "Range" in headers else 200) or (reply.status == 307 and HEADER in headers):
            return reply
        reply.close()
        location = reply.headers.get("Location")
        if reply.status == 404:
            raise ArgumentError(
                f"{url} does not exist: {self._url} is not a store of updates, or has deleted this old update"
            )
        if reply.status == 401 and self._token is None:
            raise ArgumentError(
                f"{url} cannot be read: the server requires a token: pass token=, or set CODEC_STORE_TOKEN_FILE"
            )
        if reply.status == 401:
            raise ArgumentError(f"{url} cannot be read: the server does not accept this token")
        if 300 <= reply.status < 400 and location is not None:
            where = location.partition("?")[0]  # a query may hold a secret
            raise ArgumentError(
                f"{url} cannot be read: it redirects to {where!r:.120}, which is not followed: pass the URL of the "
                "server itself"
            )
        raise ArgumentError(f"{url} cannot be read: the server replied {reply.status} {reply.reason!r:.80}")

    def _request(self, target: str, headers: Mapping[str, str]) -> "HTTPResponse":
        from http.client import HTTPException  # slow to import

        if self._open is not None:
            try:
                return self._reply(self._open, target, headers)
            except TimeoutError:
                raise
            except (OSError, HTTPException):  # the server may close a connection on which nothing was sent for a while
                self.close()
        return self._reply(self._new(), target, headers)

    def _new(self) -> "HTTPConnection":
        """Return a new connection, which is not connected yet."""
        from http.client import HTTPConnection  # slow to import

        port = self._port or (80 if self._tls is None else 443)
        seconds = self._seconds if self._rate is None else min(self._seconds, _CONNECT_SECONDS)
        self._open = HTTPConnection(self._host, port, timeout=seconds)
        return self._open

    def _connect(self, connection: "HTTPConnection") -> None:
        """Connect, and do the TLS handshake within the timeout, also if the server sends it byte by byte."""
        connection.connect()  # not in request(), whose local variables hold the token
        connection.sock.settimeout(self._seconds)
        if self._tls is not None:
            tls = self._tls.wrap_socket(connection.sock, server_hostname=self._host, do_handshake_on_connect=False)
            connection.sock = self._socket = tls
            with self._within(self._seconds, "the TLS handshake"):
                tls.do_handshake()

    def _reply(self, connection: "HTTPConnection", target: str, headers: Mapping[str, str]) -> "HTTPResponse":
        """Send a request, and read the header of the reply within the timeout."""
        if connection.sock is None:
            self._connect(connection)
        connection.request("GET", target, headers={**headers, **({} if self._token is None else self._token.headers())})
        self._socket = connection.sock  # which the connection forgets if the server will close it
        with self._within(self._seconds, "the header of a reply"):
            return connection.getresponse()

    @contextmanager
    def _within(self, seconds: float, what: str) -> Generator[None]:
        """Context that ends the connection, and raises TimeoutError, if a server sends `what` byte by byte or stops."""
        late = threading.Event()
        used = self._socket

        def end() -> None:
            late.set()
            if used is not None:
                with suppress(OSError):  # closed meanwhile
                    socket.socket.shutdown(used, socket.SHUT_RDWR)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except TimeoutError:  # of the socket
            late.set()
        finally:
            timer.cancel()
            if late.is_set():
                raise TimeoutError(f"{what} was not complete in time") from None

    @contextmanager
    def _errors(self) -> Generator[None]:
        """Context that converts errors of a connection to ArgumentError, and closes the connection after an error."""
        from http.client import HTTPException, RemoteDisconnected

        try:
            yield
        except BaseException as e:
            self.close()
            if not isinstance(e, (OSError, ValueError, HTTPException)) or isinstance(e, CodecError):
                raise
            why = f"{str(e) or type(e).__name__:.200}"
            why = why if why.isprintable() else repr(why)  # a server may send escapes for the user's terminal
            if self._tls is not None:
                why = _tls_reason(e) or why
            elif isinstance(e, RemoteDisconnected):
                why += ": does the server use https?"
            raise ArgumentError(f"{self._url!r} cannot be read: {why}") from None

    def close(self) -> None:
        """Close the connection."""
        if self._open is not None:
            self._open.close()
            self._open = None


def _length(reply: "HTTPResponse", url: str) -> int | None:
    """Return the announced size of a reply in bytes; None if there is none."""
    length = reply.headers.get("Content-Length")
    if length is not None and not re.fullmatch(r"[0-9]{1,18}", length):
        raise ArgumentError(f"{url} cannot be read: its Content-Length is {length!r:.40}")
    return None if length is None else int(length)


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return host == "localhost"


def _tls_reason(error: BaseException) -> str | None:
    import ssl

    from codec.weight_sync.http.credentials import tls_error

    return tls_error(error) if isinstance(error, ssl.SSLError) else None
