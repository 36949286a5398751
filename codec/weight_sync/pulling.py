"""Update a receiver to the last version in a store."""

from collections.abc import Callable
from typing import Any

from codec.errors import ArgumentError, FrameError, LimitError
from codec.weight_sync.http.client import Cafile
from codec.weight_sync.http.environment import bearer_token
from codec.weight_sync.receiver import WeightReceiver
from codec.weight_sync.served import Load
from codec.weight_sync.store.source import TIMEOUT, Source, StoreReader
from codec.weight_sync.updates.listing import Listed, chain
from codec.weight_sync.updates.update import Update

_MOST_LISTS = 10  # lists that one call reads: a hostile store could name other missing updates each time
_INDEX_NBYTES = 1 << 26  # size that the index of an update may have, in bytes: that of a million tensors


def pull(
    receiver: WeightReceiver,
    source: Source,
    load: Load | None = None,
    *,
    like: Any = None,
    into: Any = None,
    timeout: float = TIMEOUT,
    progress: Callable[[Update], object] | None = None,
    token: str | None = None,
    cafile: Cafile = None,
) -> int | None:
    """Update a receiver to the last version in a store, with the updates that it lacks or from a snapshot.

    If the trainer has begun a new run, the receiver begins with the run's snapshot, whatever its version. If nothing is
    new, `load` or `into` get only the tensors in :attr:`WeightReceiver.unloaded`: all of them after a restart.

    Parameters
    ----------
    receiver : WeightReceiver
        Receiver with any version, or without weights.
    source : str, path or UpdateServer
        Folder or bucket of an :class:`UpdateStore`, or the URL of :func:`serve`, http or https. Proxies are not used,
        and redirects not followed, except to mirrors, whose files must have the SHA-256 that the list names. Or a
        mirror, which :func:`serve` has returned for a URL, and which has `token` and `cafile`.
    load : callable, optional
        As in :meth:`WeightReceiver.apply`; called for each update.
    like, into : optional
        As in :meth:`WeightReceiver.apply`.
    timeout : float
        Maximum time without data from a server or bucket, in seconds. Data must arrive with at least 16 KiB/s, from
        a bucket with 64 KiB/s.
    progress : callable, optional
        Called with each update after it was applied.
    token : str, optional
        Token of the server, as in :func:`serve`, with the same default. Over http, it is sent to this machine only,
        unless ``cafile=False``.
    cafile : path or False, optional
        PEM file with the certificate of the server, or of its issuer. Default: the file that the environment variable
        CODEC_STORE_CA_FILE names; if it is not set, the system's certificates. False: allow to send `token` over http,
        which encrypts nothing.

    Returns
    -------
    int or None
        Version of the receiver, which the program now serves if `load` or `into` was given; None if nothing was
        published.

    Raises
    ------
    ArgumentError
        `source` is not a store, or cannot be read.
    EngineError
        The package for the bucket is not installed.
    StateError
        No chain leads from the receiver's version or a snapshot to the last version, the store is older than the
        receiver (with ``verify=`` also if it is of another run), or the folder of the receiver cannot be written.
    FrameError, LimitError
        As in :meth:`WeightReceiver.stage`, or the list is not signed, or a file is not the one that it names, or has
        far more bytes than `max_nbytes`.
        The receiver keeps the last version that it has reached.
    """
    applied = False
    try:
        bearer = None if token is None else bearer_token(token)
    finally:
        del token  # tracebacks may show local variables
    with StoreReader(source, timeout, token=bearer, cafile=cafile, key=receiver.key) as store:
        listing = store.listing()
        newer, rest = receiver.key is not None, _MOST_LISTS - 1
        path = chain(listing, receiver.identity, newer=newer)

        def read(one: Listed) -> Update:
            _check_size(one, receiver.max_nbytes)
            return store.update(one, receiver.unneeded)

        while path:
            with receiver.turn:
                try:
                    count = receiver.stage_next(path, read)
                except (ArgumentError, FrameError):
                    # Meanwhile, the trainer may have deleted old updates, or begun a new run
                    if rest == 0 or (now := store.listing()) == listing:
                        raise
                    rest -= 1
                    listing, path = now, chain(now, receiver.identity, newer=newer)
                    continue
                update = receiver.staged
                receiver.load_staged(load, like=like, into=into)
            path = path[count:]
            applied = True
            if progress is not None and update is not None:
                progress(update)
    if not applied and receiver.unloaded and (load is not None or into is not None):
        receiver.reload(load, like=like, into=into, names=receiver.unloaded)
    return receiver.version


def _check_size(one: Listed, max_nbytes: int | None) -> None:
    """Raise LimitError for an update that would fill the disk, although its weights cannot have this size."""
    if max_nbytes is not None and one.nbytes > 2 * max_nbytes + _INDEX_NBYTES:
        raise LimitError(f"{one.file} has {one.nbytes} bytes, far more than the weights may have: {max_nbytes}")
