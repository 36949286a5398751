"""Download the files of a store over HTTP, on one connection."""

import mmap
import re
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urljoin, urlsplit

from codec.errors import ArgumentError, CodecError, FrameError, Status

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

_CHUNK = 1 << 20
_SCHEMES = {"http": ("http", "https"), "https": ("https",)}  # by scheme of a URL: schemes to which it may redirect
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5


class Connection:
    """Connection to the server of a store, which is kept open between files.

    Environment variables such as ``http_proxy`` are ignored: they name proxies for the internet, which cannot reach a
    trainer, and whose answers would be taken for those of the trainer.

    Parameters
    ----------
    url : str
        URL of the store.
    seconds : float
        Maximum time without new data.

    Raises
    ------
    ArgumentError
        The URL is invalid.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self._url, self._seconds = url.rstrip("/"), seconds
        self._open: dict[tuple[str, str], HTTPConnection] = {}
        with self._errors():
            parts = urlsplit(self._url)
            if parts.scheme not in _SCHEMES or not parts.hostname or parts.query or parts.fragment:
                raise ArgumentError(f"{url!r} is not the URL of a store, such as http://10.0.0.1:8000")

    def read(self, name: str, most: int) -> mmap.mmap | bytes:
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
        with self._errors():
            reply = self._get(f"{self._url}/{name}")
            with reply:
                return self._body(reply, f"{self._url}/{name}", most)

    def _body(self, reply: "HTTPResponse", url: str, most: int) -> mmap.mmap | bytes:
        length = reply.headers.get("Content-Length")
        if length is not None and not re.fullmatch(r"\d{1,18}", length):
            raise ArgumentError(f"{url} cannot be read: its Content-Length is {length:.40}")
        if length is not None and int(length) > most:
            raise FrameError(f"{url} has {length} bytes, more than {most}")
        size, buffer = 0, memoryview(bytearray(_CHUNK))
        with _disk():
            file = tempfile.TemporaryFile()  # noqa: SIM115 - closed below; only its errors belong to _disk()
        with file:
            while n := reply.readinto(buffer):
                size += n
                if size > most:
                    raise FrameError(f"{url} has more than {most} bytes")
                with _disk():
                    file.write(buffer[:n])
            if length is not None and size < int(length):
                message = f"{url} has {length} bytes, but the connection ended after {size}"
                raise FrameError(message, Status.TRUNCATED, size, size, int(length))
            with _disk():
                file.flush()
                return mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b""

    def _get(self, url: str) -> "HTTPResponse":
        """Request a file, follow redirects, and return the reply, whose status is 200."""
        for _ in range(_MOST_REDIRECTS + 1):
            parts = urlsplit(url)
            reply = self._request(parts)
            if reply.status == 200:
                return reply
            location = reply.headers.get("Location")
            self._drop(parts)  # the body of the reply was not read
            if reply.status == 404:
                raise ArgumentError(
                    f"{url} does not exist: {self._url} is not a store of updates, or has deleted this old update"
                )
            if reply.status not in _REDIRECTS or location is None:
                raise ArgumentError(f"{url} cannot be read: the server replied {reply.status} {reply.reason}")
            url = urljoin(url, location)
            if urlsplit(url).scheme not in _SCHEMES[parts.scheme]:
                raise ArgumentError(f"{self._url} cannot be read: it redirects to {url:.120}")
        raise ArgumentError(f"{self._url} cannot be read: it redirects more than {_MOST_REDIRECTS} times")

    def _request(self, parts: SplitResult) -> "HTTPResponse":
        from http.client import HTTPConnection, HTTPException, HTTPSConnection  # slow to import

        target = parts.path + (f"?{parts.query}" if parts.query else "")
        connection = self._open.get(parts[:2])
        if connection is not None:
            try:
                connection.request("GET", target)
                return connection.getresponse()
            except TimeoutError:
                raise
            except (OSError, HTTPException):  # the server may close a connection on which nothing was sent for a while
                self._drop(parts)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self._seconds)
        self._open[parts[:2]] = connection
        connection.request("GET", target)
        return connection.getresponse()

    def _drop(self, parts: SplitResult) -> None:
        if (connection := self._open.pop(parts[:2], None)) is not None:
            connection.close()

    @contextmanager
    def _errors(self) -> Generator[None]:
        """Context that converts errors of a connection to ArgumentError, and closes all connections after an error."""
        from http.client import HTTPException

        try:
            yield
        except BaseException as e:
            self.close()
            if not isinstance(e, (OSError, ValueError, HTTPException)) or isinstance(e, CodecError):
                raise
            raise ArgumentError(f"{self._url!r} cannot be read: {str(e) or type(e).__name__:.200}") from None

    def close(self) -> None:
        """Close the connection."""
        while self._open:
            self._open.popitem()[1].close()


@contextmanager
def _disk() -> Generator[None]:
    """Context that converts errors of the temporary file to ArgumentError with its folder."""
    try:
        yield
    except OSError as e:
        where = tempfile.gettempdir()
        raise ArgumentError(f"a download cannot be written to the folder {where!r}: {e.strerror}") from None
