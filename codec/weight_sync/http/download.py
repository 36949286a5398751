"""Download the file of an update from the server of a store, or from mirrors that the server names."""

import mmap
from collections.abc import Callable
from contextlib import suppress

from codec.errors import ArgumentError, FrameError
from codec.weight_sync.http.arriving import Arriving
from codec.weight_sync.http.client import Connection
from codec.weight_sync.http.hints import NO_MIRROR, Hint
from codec.weight_sync.http.temporary import not_listed
from codec.weight_sync.updates.listing import Listed

Begin = Callable[[Listed], Arriving]


def download(server: Connection, one: Listed) -> mmap.mmap | bytes:
    """Download the file of an update to a temporary file, and map the temporary file to memory.

    Parameters
    ----------
    server : Connection
        Connection to the server of the store.
    one : Listed
        Entry of the update in the list of the store.

    Raises
    ------
    ArgumentError
        The server cannot be reached, does not have the file, or did not send data in time.
    FrameError
        The file has another size or SHA-256 than the list names.
    """
    with fetched(server, one, _arriving, NO_MIRROR) as file:
        return file.mapped()


def _arriving(one: Listed) -> Arriving:
    return Arriving(one.file, one.nbytes)


def fetched(server: Connection, one: Listed, begin: Begin, mirror: str) -> Arriving:
    """Return the complete file of an update, which the caller must close.

    A mirror may be slow or gone: then the server sends the rest. A mirror may lie: then the server sends the file.

    Parameters
    ----------
    server, one
        As in :func:`download`.
    begin : callable
        Function that returns the object for a new download.
    mirror : str
        Value of the header that allows hints.
    """
    file = begin(one)
    try:
        hint = server.copy(one.file, file, None if one.sha256 is None else mirror)
        if hint is not None:
            _copy_from_mirror(server, hint, one, file)
            server.copy(one.file, file)
            if file.sha256() != one.sha256:
                file.close()
                file = begin(one)
                server.copy(one.file, file)
        if one.sha256 not in (None, file.sha256()):
            raise not_listed(one.file)
    except BaseException:
        file.close()
        raise
    return file


def _copy_from_mirror(server: Connection, hint: Hint, one: Listed, file: Arriving) -> None:
    """Append what a mirror sends, at most the file; the caller checks the bytes."""
    with suppress(ArgumentError, FrameError), server.at(hint) as mirror:
        mirror.copy(one.file, file)
