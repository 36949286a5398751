"""Read the updates in a store: a folder, or the URL of a server."""

import mmap
import os
import re
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from codec.arguments import check_timeout
from codec.errors import ArgumentError, CodecError, FrameError
from codec.files.signing import SigningKey
from codec.weight_sync.closing import Closing
from codec.weight_sync.download import download
from codec.weight_sync.http import Cafile, Connection
from codec.weight_sync.listing import MAX_NBYTES, Listed, Listing
from codec.weight_sync.mapping import mapped, regular
from codec.weight_sync.mirror import Mirror
from codec.weight_sync.server import UpdateServer, process_mirror
from codec.weight_sync.temporary import copied, not_listed
from codec.weight_sync.update import Update

if TYPE_CHECKING:
    from codec.weight_sync.credentials import BearerToken

Source = str | PathLike[str] | UpdateServer
TIMEOUT = 60.0  # default of the maximum time without data from a server, in seconds
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class StoreReader(Closing):
    """Reader of a store.

    Parameters
    ----------
    source : str, path or UpdateServer
        Folder of the store, URL of its server, or mirror in this process.
    timeout : float
        Maximum time without data from a server, in seconds.
    token, cafile : optional
        As in :func:`codec.weight_sync.pull`.
    key : SigningKey, optional
        Key of the list's signature. Files of a folder are then copied, so that nobody can change them after a check.

    Raises
    ------
    ArgumentError
        `source` is a URL of another scheme than http and https, or `timeout`, `token` or `cafile` is invalid.
    """

    def __init__(
        self,
        source: Source,
        timeout: float = TIMEOUT,
        *,
        token: "str | BearerToken | None" = None,
        cafile: Cafile = None,
        key: SigningKey | None = None,
    ) -> None:
        self._key = key
        limit = check_timeout(timeout)
        if limit is None:
            raise ArgumentError("timeout must be seconds or a timedelta, from 1 ms to 10 years, got None")
        if isinstance(source, UpdateServer):
            if source.mirror is None or token is not None or cafile is not None:
                raise ArgumentError("pass the URL of a server, or a mirror without token= and cafile=, which it has")
            self._mirror: Mirror | None = source.mirror
            self._name, self._connection = source.mirror.source, source.mirror.connection(limit.total_seconds())
            return
        self._name = os.fspath(source)
        scheme = _SCHEME.match(self._name) if isinstance(source, str) else None
        if scheme is not None and scheme[1].lower() not in ("http", "https"):
            raise ArgumentError(f"the source has the scheme {scheme[1]:.40}: pass a folder, or a URL of http or https")
        if scheme is None and (token is not None or cafile is not None):
            raise ArgumentError(f"token= and cafile= are for the URL of a server, but {self._name!r} is a folder")
        seconds = limit.total_seconds()
        self._connection = None if scheme is None else Connection(self._name, seconds, token, cafile)
        self._mirror = None if scheme is None else process_mirror(self._name, token, cafile)

    def listing(self) -> Listing:
        """Return the list of updates.

        Raises
        ------
        ArgumentError
            The store does not exist, or cannot be read.
        FrameError
            The file ``head`` is not a list of updates, or not signed with the key.
        """
        try:
            return Listing.parse(self._head(), self._key)
        except (CodecError, RecursionError, ValueError, LookupError, TypeError, AttributeError) as e:
            if isinstance(e, CodecError):
                if isinstance(e, FrameError):
                    e.of(f"{self._name}/head")
                raise
            raise FrameError(f"head of {self._name} is not a list of updates: {e}") from None

    def _head(self) -> bytes:
        if self._connection is not None:
            return bytes(self._connection.read("head", MAX_NBYTES))
        try:
            fd, _ = regular(Path(self._name) / "head")
            with os.fdopen(fd, "rb") as f:
                return f.read(MAX_NBYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise ArgumentError(
                f"{self._name} is not a store of updates, because it has no file 'head', which a Publisher or "
                "UpdateStore writes at its start: check the path, and whether its disk is mounted"
            ) from None
        except (OSError, ValueError) as e:
            why = getattr(e, "strerror", None) or e
            raise ArgumentError(f"head of {self._name} cannot be read: {why}") from None

    def update(self, one: Listed) -> Update:
        """Return the update that an entry of the list describes.

        Raises
        ------
        ArgumentError
            The store cannot be read.
        FrameError
            The file is not this update.
        """
        try:
            if self._connection is None:
                path = Path(self._name) / one.file
                update = Update(mapped(path) if self._key is None else _copy(path, one.nbytes))
            elif self._mirror is None:
                update = Update(download(self._connection, one))
            else:
                update = Update(self._mirror.download(self._connection, one))
        except FrameError as e:
            e.of(f"{self._name}/{one.file}")
            raise
        if not one.describes(update):
            raise not_listed(f"{self._name}/{one.file}")
        return update

    def close(self) -> None:
        """Close the connection to the server."""
        if self._connection is not None:
            self._connection.close()


def _copy(path: Path, most: int) -> mmap.mmap | bytes:
    try:
        fd, _ = regular(path)
        with os.fdopen(fd, "rb", 0) as f:
            return copied(f.readinto, str(path), most)
    except OSError as e:
        raise ArgumentError(f"{str(path)!r} cannot be read: {e.strerror}") from None


def read_head(source: Source, timeout: float = TIMEOUT, key: SigningKey | None = None) -> Listing:
    """Return the list of updates in a store, as :meth:`StoreReader.listing`."""
    with StoreReader(source, timeout, key=key) as opened:
        return opened.listing()


def read_update(source: Source, one: Listed, timeout: float = TIMEOUT, key: SigningKey | None = None) -> Update:
    """Return an update in a store, as :meth:`StoreReader.update`."""
    with StoreReader(source, timeout, key=key) as opened:
        return opened.update(one)
