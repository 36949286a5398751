"""Store of published updates: a folder that receivers read, as files or over HTTP.

The folder has a file for each update, and a file ``head``, which lists the updates. The file of an update is written
first; renaming the new ``head`` publishes the update. The folder may be on a shared disk, be copied to an object store
(``head`` last), or be served by :func:`codec.weight_sync.serve`.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from codec.arguments import whole
from codec.errors import ArgumentError, FrameError, StateError
from codec.files.replacing import replaced
from codec.weight_sync.http import is_url, read_remote
from codec.weight_sync.receiver import Load, WeightReceiver
from codec.weight_sync.update import MAX_VERSION, Update
from codec.weight_sync.writing import remove_temporary

_FORMAT = 1
_MOST_HEAD = 1 << 24  # maximum size of the file ``head``, in bytes
_NAME = re.compile(r"head|\d{20}\.(?:update|snapshot)")  # files of a store
TIMEOUT = 60.0  # default of the maximum time without data from a server, in seconds


class Listed(NamedTuple):
    """Entry of an update in the list of a store."""

    version: int
    base: int | None
    nbytes: int

    @property
    def file(self) -> str:
        """Name of the update's file."""
        return file_name(self.version, self.base)


def file_name(version: int, base: int | None) -> str:
    """Return the file name of an update, or of a snapshot if `base` is None."""
    return f"{version:020d}.{'snapshot' if base is None else 'update'}"


class UpdateStore:
    """Folder of updates, written by one trainer and read by any number of receivers.

    Parameters
    ----------
    folder : str or path
        Folder, which is created if it does not exist.
    keep : int
        Number of snapshots to keep, together with the updates that follow them. Publishing a snapshot deletes older
        files.
    base : int, optional
        Version that all receivers already have, so that the first update of the store may refer to it. Default: an
        empty store must begin with a snapshot.

    Raises
    ------
    ArgumentError
        The folder cannot be used.

    Examples
    --------
    >>> from codec.weight_sync import UpdateStore, pull
    >>> folder = tempfile.mkdtemp()
    >>> store = UpdateStore(folder)
    >>> sender = codec.WeightSender({"w": np.zeros(3, np.float32)})
    >>> store.publish(sender.snapshot())
    >>> store.publish(sender.diff({"w": np.ones(3, np.float32)}))
    >>> sender.commit()
    >>> late = codec.WeightReceiver()
    >>> pull(late, folder)
    1
    """

    def __init__(self, folder: str | PathLike[str], *, keep: int = 2, base: int | None = None) -> None:
        self.folder = Path(folder)
        self._base = None if base is None else whole("base", base, 0, MAX_VERSION)
        self._keep = whole("keep", keep, 1)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_temporary(self.folder, _NAME.fullmatch)
        except OSError as e:
            raise ArgumentError(f"{self.folder} cannot be used: {e.strerror}") from None

    def path(self, version: int, base: int | None) -> Path:
        """Return the path for the file of an update, to pass to ``WeightSender.diff(file=...)``."""
        return self.folder / file_name(version, base)

    def put(self, update: Update) -> None:
        """Write the file of an update, unless it exists. Receivers find the update only after :meth:`publish`."""
        path = self.path(update.version, update.base)
        if not path.exists() or Update.open(path).data != update.data:
            with replaced(path) as f:
                f.write(update.data)

    def publish(self, update: Update) -> None:
        """Write the file of an update, and add it to the list that receivers read.

        Raises
        ------
        StateError
            The base of the update is not the last version in the list, or a snapshot is older than that version.
        """
        listed = read_head(self.folder)
        last = listed[-1].version if listed else self._base
        if update.base is not None and update.base != last:
            raise StateError(
                f"the update needs version {update.base} as its base, but the last version in {self.folder} is {last}"
            )
        if update.base is None and last is not None and update.version < last:
            raise StateError(
                f"the snapshot has version {update.version}, but the last version in {self.folder} is {last}"
            )
        self.put(update)
        new = Listed(update.version, update.base, update.nbytes)
        listed = [*(one for one in listed if one.file != new.file), new]
        snapshots = [one.version for one in listed if one.base is None]
        oldest = snapshots[-self._keep] if len(snapshots) > self._keep else -1
        listed = [one for one in listed if one.version > oldest or (one.version == oldest and one.base is None)]
        body = {"format": _FORMAT, "updates": [one._asdict() for one in listed]}
        with replaced(self.folder / "head") as f:
            f.write(json.dumps(body).encode())
        self._delete_before(oldest, {one.file for one in listed})

    def clear(self) -> None:
        """Delete all updates, at the start of a new run."""
        (self.folder / "head").unlink(missing_ok=True)
        self._delete_before(MAX_VERSION, set())

    def _delete_before(self, version: int, kept: set[str]) -> None:
        """Delete the files of versions up to `version`, except `kept`."""
        for path in self.folder.glob("*.*"):
            if _NAME.fullmatch(path.name) and int(path.stem) <= version and path.name not in kept:
                with suppress(OSError):  # deleted when the next snapshot is published
                    path.unlink()


def read_head(source: str | PathLike[str], timeout: float = TIMEOUT) -> list[Listed]:
    """Return the list of updates in a store, oldest first; empty if nothing was published.

    Parameters
    ----------
    source : str or path
        Folder of the store, or the URL of its server.
    timeout : float
        Maximum time without data from a server, in seconds.

    Raises
    ------
    ArgumentError
        The store cannot be read.
    FrameError
        The file ``head`` is not a list of updates.
    """
    if is_url(source):
        body = read_remote(str(source), "head", _MOST_HEAD, timeout)
    else:
        try:
            with (Path(source) / "head").open("rb") as f:
                body = f.read(_MOST_HEAD + 1)
        except FileNotFoundError:
            return []
        except OSError as e:
            raise ArgumentError(f"{source} cannot be read: {e.strerror}") from None
    if body is None:
        return []
    try:
        return list(_parsed(body))
    except (ValueError, LookupError, TypeError) as e:
        raise FrameError(f"head of {source} is not a list of updates: {e}") from None


def _parsed(body: Any) -> Iterator[Listed]:
    head: Any = json.loads(bytes(body))
    if len(body) > _MOST_HEAD or head["format"] != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT}, or it is too long")
    for one in head["updates"]:
        new = Listed(one["version"], one["base"], one["nbytes"])
        numbers = (new.version, new.version if new.base is None else new.base, new.nbytes)
        if not all(type(n) is int and 0 <= n <= MAX_VERSION for n in numbers):
            raise ValueError("an entry has no version, base or size")
        yield new


def chain(listed: Sequence[Listed], version: int | None) -> list[Listed]:
    """Return the updates that lead from `version` to the last version.

    If no chain begins at `version`, return the latest snapshot from which a chain leads to the last version, and that
    chain.

    Raises
    ------
    StateError
        Neither chain exists.
    """
    after = {one.base: one for one in listed if one.base is not None}
    last = listed[-1].version if listed else version
    for start in (None, *(one for one in reversed(listed) if one.base is None)):
        found = [] if start is None else [start]
        at = version if start is None else start.version
        while at != last and at is not None and at in after:
            found.append(after[at])
            at = after[at].version
            if len(found) > len(listed):
                break
        if at == last:
            return found
    raise StateError(f"no chain of updates leads from version {version} to version {last}: publish a snapshot")


def read_update(source: str | PathLike[str], one: Listed, timeout: float = TIMEOUT) -> Update:
    """Read an update from a store, given its entry `one` in the store's list."""
    if not is_url(source):
        return Update.open(Path(source) / one.file)
    data = read_remote(str(source), one.file, one.nbytes, timeout)
    if data is None:
        raise ArgumentError(f"{source} has no file {one.file}: read the list of updates again")
    return Update(data)


def pull(
    receiver: WeightReceiver,
    source: str | PathLike[str],
    load: Load | None = None,
    *,
    like: Any = None,
    into: Any = None,
    timeout: float = TIMEOUT,
    progress: Callable[[Update], object] | None = None,
) -> int | None:
    """Update a receiver to the last version in a store, with the updates that it lacks or from a snapshot.

    Parameters
    ----------
    receiver : WeightReceiver
        Receiver with any version, or without weights.
    source : str or path
        Folder of an :class:`UpdateStore`, or the URL of :func:`serve`.
    load : callable, optional
        As in :meth:`WeightReceiver.apply`; called for each update.
    like, into : optional
        As in :meth:`WeightReceiver.apply`.
    timeout : float
        Maximum time without data from a server, in seconds.
    progress : callable, optional
        Called with each update after it was applied.

    Returns
    -------
    int or None
        Version of the receiver; None if nothing was published.

    Raises
    ------
    ArgumentError
        The store cannot be read.
    StateError
        No chain leads from the receiver's version or a snapshot to the last version, or the receiver's weights differ
        from the base of an update.
    FrameError, LimitError
        As in :meth:`WeightReceiver.stage`. The receiver keeps the last version that it has reached.
    """
    path = chain(read_head(source, timeout), receiver.version)
    for one in path:
        update = read_update(source, one, timeout)
        receiver.apply(update, load, like=like, into=into)
        if progress is not None:
            progress(update)
    if not path and receiver.unloaded and (load is not None or into is not None):
        receiver.reload(load, like=like, into=into, names=receiver.unloaded)
    return receiver.version
