"""Mirror of a store: offers the files that this process downloads from the server of the store."""

import mmap
import os
import socket
import threading
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from codec.errors import ArgumentError, StateError
from codec.weight_sync.closing import Closing
from codec.weight_sync.http.client import Cafile, Connection
from codec.weight_sync.http.download import fetched
from codec.weight_sync.http.hints import Address, plain_ip
from codec.weight_sync.http.offered import MirroredFiles
from codec.weight_sync.updates.listing import Listed

if TYPE_CHECKING:
    from codec.weight_sync.http.credentials import BearerToken

_REACH_SECONDS = 10.0  # time in which a mirror must reach itself


class Mirror(Closing):
    """Downloads of a process that offers them to other receivers.

    Parameters
    ----------
    source : str
        URL of the server of the store.
    token : BearerToken, optional
        Token of this server, which the mirror demands, too.
    cafile : optional
        As in :func:`codec.weight_sync.pull`.

    Attributes
    ----------
    ip : str
        Address with which this machine reaches the server. Receivers connect to it.
    files : MirroredFiles
        Files that are offered.

    Raises
    ------
    ArgumentError
        `source` is not the URL of a store, or its host is unknown or cannot be reached from this machine.
    """

    def __init__(self, source: str, token: "BearerToken | None" = None, cafile: Cafile = None) -> None:
        self.source, self.files = source, MirroredFiles()
        self._token, self._cafile = token, cafile
        self.connection(_REACH_SECONDS).close()  # checks the arguments
        self.ip = _own_ip(source)
        self._address: Address | None = None
        self._pid, self._turn = os.getpid(), threading.Lock()

    def begin(self, port: int) -> str:
        """Begin to offer files at a port on which a server listens, and return the URL.

        Raises
        ------
        ArgumentError
            Receivers cannot reach the server at :attr:`ip`, or its certificate does not name this address.
        """
        address = Address(self.ip, port)
        url = f"{urlsplit(self.source).scheme}://{address}"
        try:
            with Connection(url, _REACH_SECONDS, self._token, self._cafile) as own:
                own.reach()
        except ArgumentError as e:
            raise ArgumentError(f"receivers cannot reach this mirror: {e}") from None
        self._address = address
        return url

    def connection(self, seconds: float) -> Connection:
        """Return a connection to the server of the store."""
        return Connection(self.source, seconds, self._token, self._cafile)

    def download(self, server: Connection, one: Listed) -> mmap.mmap | bytes:
        """Download the file of an update as :func:`download`, and offer it, also while it arrives.

        Raises
        ------
        StateError
            The mirror was closed, or belongs to the parent of this process.
        """
        with self._turn:
            if self._address is None or os.getpid() != self._pid:
                raise StateError("the mirror was closed, or belongs to the parent of this process: call serve() again")
            file = self.files.found(one) or fetched(server, one, self.files.begin, str(self._address))
            return file.mapped()

    def close(self) -> None:
        """Delete the files."""
        self._address = None
        self.files.close()


def _own_ip(source: str) -> str:
    """Return the address with which this machine reaches the host of a URL."""
    parts = urlsplit(source)
    try:
        port = parts.port or (443 if parts.scheme.lower() == "https" else 80)
        family, _, _, _, address = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect(address)  # sends nothing
            return plain_ip(str(s.getsockname()[0]))
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise ArgumentError(f"this machine cannot be a mirror of {source!r}: {why}") from None
