"""Updates over HTTP: serve the files of a store, and download them."""

import mmap
import re
import shutil
import tempfile
import threading
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codec.arguments import whole
from codec.errors import ArgumentError, FrameError, Status

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

_NAMES = re.compile(r"/(head|\d{20}\.(?:update|snapshot))")
_CHUNK = 1 << 20
_TIMEOUT = 60.0  # seconds without data after which the server closes a connection


class UpdateServer:
    """HTTP server for the files of a store, in threads of this process; created by :func:`serve`.

    Attributes
    ----------
    url : str
        URL of the server, to pass to :func:`pull`.
    """

    def __init__(self, server: "ThreadingHTTPServer") -> None:
        host, port = server.server_address[:2]
        name = host if isinstance(host, str) else bytes(host).decode()
        self.url = f"http://{f'[{name}]' if ':' in name else name}:{port}"
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="codec-updates", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> "UpdateServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve(folder: str | PathLike[str], host: str = "127.0.0.1", port: int = 0) -> UpdateServer:
    """Serve the files of an :class:`UpdateStore` over HTTP. Clients can read only ``head`` and the update files.

    Connections are neither encrypted nor authenticated. So listen on an address that only receivers can reach.

    Parameters
    ----------
    folder : str or path
        Folder of the store.
    host : str
        Address to listen on.
    port : int
        Port to listen on; 0: any free port.

    Returns
    -------
    UpdateServer
        Running server; ``close()`` stops it.

    Raises
    ------
    ArgumentError
        The server cannot listen on this address and port.
    """
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # slow to import

    root = Path(folder)

    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            name = _NAMES.fullmatch(self.path)
            try:
                file = (root / name[1]).open("rb") if name else None
            except OSError:
                file = None
            if file is None:
                self.send_error(404)
                return
            with file:
                self.send_response(200)
                self.send_header("Content-Type", "application/octet-stream")
                self.send_header("Content-Length", str(file.seek(0, 2)))
                self.end_headers()
                file.seek(0)
                shutil.copyfileobj(file, self.wfile, _CHUNK)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    try:
        server = ThreadingHTTPServer((host, whole("port", port, 0, 65535)), Handler)
    except OSError as e:
        raise ArgumentError(f"the server cannot listen on {host}:{port}: {e.strerror or e}") from None
    server.daemon_threads = True
    return UpdateServer(server)


def is_url(source: object) -> bool:
    """Return True if `source` is the URL of a server, False if it is a folder."""
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def read_remote(url: str, name: str, most: int, timeout: float) -> mmap.mmap | bytes | None:
    """Download a file from a server to a temporary file, and map the temporary file to memory.

    Parameters
    ----------
    url, name : str
        URL of the server, and name of the file.
    most : int
        Maximum size in bytes.
    timeout : float
        Maximum time without new data, in seconds.

    Returns
    -------
    mmap, bytes or None
        Contents of the file; None if the server does not have it.

    Raises
    ------
    ArgumentError
        The server cannot be reached, or did not send data within `timeout`.
    FrameError
        The file is larger than `most`, or the connection ended before the end of the file.
    """
    import urllib.error
    import urllib.request
    from http.client import HTTPException

    try:
        with (
            urllib.request.urlopen(f"{url.rstrip('/')}/{name}", timeout=timeout) as reply,
            tempfile.TemporaryFile() as f,
        ):
            while chunk := reply.read(min(_CHUNK, most + 1 - f.tell())):
                f.write(chunk)
            size, expected = f.tell(), int(reply.headers.get("Content-Length") or f.tell())
            if size > most:
                raise FrameError(f"{url}/{name} has more than {most} bytes")
            if size < expected:
                message = f"{url}/{name} has {expected} bytes, but the connection ended after {size}"
                raise FrameError(message, Status.TRUNCATED, size, size, expected)
            f.flush()
            return mmap.mmap(f.fileno(), size, prot=mmap.PROT_READ) if size else b""
    except urllib.error.HTTPError as e:
        if e.code == 404:
            return None
        raise ArgumentError(f"{url} cannot be read: {e}") from None
    except (OSError, HTTPException) as e:
        raise ArgumentError(f"{url} cannot be read: {getattr(e, 'reason', None) or e}") from None
