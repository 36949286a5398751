"""Read the updates in a store: a folder, a bucket, or the URL of a server."""

import mmap
import os
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from codec.arguments import check_timeout
from codec.errors import ArgumentError, CodecError, FrameError
from codec.files.signing import SigningKey
from codec.stores.locations import location, scheme_of
from codec.weight_sync.bucket import UpdateBucket, object_name
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


class StoreReader(Closing):
    """Reader of a store.

    Parameters
    ----------
    source : str, path or UpdateServer
        Folder of the store, URL of its server, URL of a folder in a bucket, such as ``s3://bucket/run``, or mirror in
        this process.
    timeout : float
        Maximum time without data from a server or bucket, in seconds.
    token, cafile : optional
        As in :func:`codec.weight_sync.pull`.
    key : SigningKey, optional
        Key of the list's signature. Files of a folder are then copied, so that nobody can change them after a check.

    Raises
    ------
    ArgumentError
        `source` is a URL of another scheme, or `timeout`, `token` or `cafile` is invalid.
    EngineError
        The package for the bucket is not installed.
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
        seconds = limit.total_seconds()
        self._connection: Connection | None = None
        self._mirror: Mirror | None = None
        self._bucket: UpdateBucket | None = None
        if isinstance(source, UpdateServer):
            if source.mirror is None or token is not None or cafile is not None:
                raise ArgumentError("pass the URL of a server, or a mirror without token= and cafile=, which it has")
            self._mirror = source.mirror
            self._name, self._connection = source.mirror.source, source.mirror.connection(seconds)
            return
        if scheme_of(source) in ("http", "https"):
            self._name = os.fspath(source)
            self._connection = Connection(self._name, seconds, token, cafile)
            self._mirror = process_mirror(self._name, token, cafile)
            return
        where = location("source", source)
        self._name = str(where)
        if token is not None or cafile is not None:
            raise ArgumentError(f"token= and cafile= are for the URL of a server, but {self._name!r} is none")
        if isinstance(where, str):
            self._bucket = UpdateBucket(where, seconds)

    def listing(self) -> Listing:
        """Return the list of updates.

        Raises
        ------
        ArgumentError
            The store does not exist, or cannot be read.
        FrameError
            The file ``head`` is not a list of updates, or not signed with the key.
        """
        return listing_of(self._name, self._head(), self._key)

    def _head(self) -> bytes:
        if self._connection is not None:
            return bytes(self._connection.read("head", MAX_NBYTES))
        if self._bucket is None:
            return head_in(Path(self._name))
        if (found := self._bucket.head()) is None:
            raise ArgumentError(
                f"{self._name} is not a store of updates, because it has no list 'head-...', which a Publisher or "
                "UpdateStore writes at its start: check the URL"
            )
        return found

    def update(self, one: Listed) -> Update:
        """Return the update that an entry of the list describes.

        Raises
        ------
        ArgumentError
            The store cannot be read.
        FrameError
            The file is not this update.
        """
        where = f"{self._name}/{one.file if self._bucket is None else object_name(one)}"
        try:
            if self._connection is not None:
                download_by = download if self._mirror is None else self._mirror.download
                update = Update(download_by(self._connection, one))
            elif self._bucket is not None:
                update = Update(self._bucket.update(one))
            else:
                path = Path(self._name) / one.file
                update = Update(mapped(path) if self._key is None else _copy(path, one.nbytes))
        except FrameError as e:
            e.of(where)
            raise
        if not one.describes(update):
            raise not_listed(where)
        return update

    def close(self) -> None:
        """Close the connection to the server."""
        if self._connection is not None:
            self._connection.close()


def head_in(folder: Path) -> bytes:
    """Return the list in a folder.

    Raises
    ------
    ArgumentError
        The folder is not a store, or cannot be read.
    """
    try:
        fd, _ = regular(folder / "head")
        with os.fdopen(fd, "rb") as f:
            return f.read(MAX_NBYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise ArgumentError(
            f"{folder} is not a store of updates, because it has no file 'head', which a Publisher or UpdateStore "
            "writes at its start: check the path, and whether its disk is mounted"
        ) from None
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise ArgumentError(f"head of {folder} cannot be read: {why}") from None


def listing_of(name: str, body: bytes, key: SigningKey | None) -> Listing:
    """Return the list of the store `name` with the bytes `body`.

    Raises
    ------
    FrameError
        The bytes are not a list of updates, or not signed with the key.
    """
    try:
        return Listing.parse(body, key)
    except FrameError as e:
        e.of(f"{name}/head")
        raise
    except (RecursionError, ValueError, LookupError, TypeError, AttributeError) as e:
        if isinstance(e, CodecError):
            raise
        raise FrameError(f"head of {name} is not a list of updates: {e}") from None


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
