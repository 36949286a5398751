"""Read the updates in a store: a folder, a bucket, or the URL of a server."""

import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from codec.arguments import check_timeout
from codec.errors import ArgumentError, CodecError, FrameError
from codec.files.signing import SigningKey
from codec.stores.locations import location, scheme_of
from codec.weight_sync.closing import Closing
from codec.weight_sync.http.client import Cafile, Connection
from codec.weight_sync.http.download import download
from codec.weight_sync.http.mirror import Mirror
from codec.weight_sync.http.server import UpdateServer, process_mirror
from codec.weight_sync.http.temporary import copied, not_listed
from codec.weight_sync.store.bucket import UpdateBucket, object_name
from codec.weight_sync.updates.listing import MAX_NBYTES, Listed, Listing
from codec.weight_sync.updates.mapping import mapped, regular
from codec.weight_sync.updates.parts import PartedUpdate, Parts
from codec.weight_sync.updates.update import Update

if TYPE_CHECKING:
    from codec.weight_sync.http.credentials import BearerToken

Source = str | PathLike[str] | UpdateServer
TIMEOUT = 60.0  # default of the maximum time without data from a server, in seconds
_SERVERS = 8  # maximum number of servers from which parts are read at a time


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

    def update(self, one: Listed, unneeded: Mapping[int, bytes] | None = None) -> Update:
        """Return the update that an entry of the list describes.

        Parameters
        ----------
        one : Listed
            Entry of the list.
        unneeded : mapping of int to bytes, optional
            Digests of parts of the base, by rank. Parts of the update with these bases are not read.

        Raises
        ------
        ArgumentError
            The store cannot be read.
        FrameError
            The file is not this update.
        """
        return self._parted(one, unneeded or {}) if one.nparts else self.part(one)

    def parts(self, one: Listed) -> Parts:
        """Return the list of the parts of an update.

        Raises
        ------
        ArgumentError, FrameError
            As :meth:`update`.
        """
        return self._list_of_parts(one)[1]

    def _list_of_parts(self, one: Listed) -> tuple[bytes, Parts]:
        if one.nbytes > MAX_NBYTES:
            raise FrameError(f"{self._where(one)} has {one.nbytes} bytes, more than a list of parts may have")
        contents = bytes(self._read(one))
        try:
            parts = Parts.parse(contents, self._key)
        except FrameError as e:
            e.of(self._where(one))
            raise
        if (parts.head, len(parts.parts)) != (one.head, one.nparts):
            raise not_listed(self._where(one))
        return contents, parts

    def _parted(self, one: Listed, unneeded: Mapping[int, bytes]) -> Update:
        """Return an update in parts; the parts are read from several servers at a time."""
        contents, parts = self._list_of_parts(one)
        ranks_at: dict[str | None, list[int]] = {}
        for rank, part in enumerate(parts.parts):
            if one.head.base is None or unneeded.get(rank) != part.base_digest:
                ranks_at.setdefault(part.url, []).append(rank)

        def read(url: str | None) -> dict[int, Update]:
            if url is None:
                return {rank: self.part(parts.listed(rank)) for rank in ranks_at[url]}
            if self._connection is None:
                raise FrameError(f"a part is at {url!r}, although the list of parts is on no server")
            with self._connection.beside(url) as server:
                return {rank: Update(download(server, parts.listed(rank))) for rank in ranks_at[url]}

        found: dict[int, Update] = {}
        if len(ranks_at) == 1:
            found = read(*ranks_at)
        else:
            pool = ThreadPoolExecutor(_SERVERS, thread_name_prefix="codec-parts")
            try:
                for some in pool.map(read, ranks_at):
                    found.update(some)
            finally:
                pool.shutdown(cancel_futures=True)
        return PartedUpdate(contents, parts, dict(sorted(found.items())))

    def _where(self, one: Listed) -> str:
        return f"{self._name}/{one.file if self._bucket is None else object_name(one)}"

    def part(self, one: Listed) -> Update:
        """Return an update that is not in parts, or a part.

        Raises
        ------
        ArgumentError, FrameError
            As :meth:`update`.
        """
        try:
            update = Update(self._read(one))
        except FrameError as e:
            e.of(self._where(one))
            raise
        if not one.describes(update):
            raise not_listed(self._where(one))
        return update

    def _read(self, one: Listed) -> mmap.mmap | bytes:
        """Return the contents of a file, mapped to memory."""
        if self._connection is not None:
            return (download if self._mirror is None else self._mirror.download)(self._connection, one)
        if self._bucket is not None:
            return self._bucket.update(one)
        path = Path(self._name) / one.file
        return mapped(path) if self._key is None else _copy(path, one.nbytes)

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
