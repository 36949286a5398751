"""Store of published updates: a folder or a bucket that receivers read.

A store has a file for each update, and a list of the updates, ``head``. The file of an update is written first; the new
list publishes the update. A folder may be on a shared disk, or be served by :func:`codec.weight_sync.serve`.
"""

from collections.abc import Collection
from os import PathLike
from pathlib import Path

from codec.arguments import whole
from codec.errors import ArgumentError, StateError
from codec.files.signing import Key, SigningKey
from codec.stores.locations import location
from codec.weight_sync.http import environment
from codec.weight_sync.store.files import BucketFiles, FolderFiles
from codec.weight_sync.store.source import listing_of
from codec.weight_sync.updates.identity import MAX_VERSION, other_run
from codec.weight_sync.updates.listing import Listed, Listing, file_name
from codec.weight_sync.updates.update import Update


class UpdateStore:
    """Folder of updates, written by one trainer and read by any number of receivers.

    The store deletes only files and objects whose names are those of an update or of a list in a bucket, such as
    ``00000000000000000012.update``.

    Parameters
    ----------
    folder : str or path
        Folder, which is created if it does not exist; or URL of a folder in a bucket, such as ``s3://bucket/run``.
    keep : int
        Number of snapshots to keep, together with the updates that follow them. Publishing a snapshot deletes older
        files.
    base : int, optional
        Version that all receivers already have, so that the first update of the store may refer to it. Default: an
        empty store must begin with a snapshot.
    sign : bytes, str, path or Ed25519PrivateKey; optional
        Key that signs the list, as in :class:`codec.WeightSender`, which must sign the updates with it.

    Attributes
    ----------
    source : str
        Path or URL of the store, to pass to :func:`pull`.

    Raises
    ------
    ArgumentError
        The folder or the bucket cannot be used.
    EngineError
        The package for the bucket is not installed.

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

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        keep: int = 2,
        base: int | None = None,
        sign: Key | SigningKey | None = None,
    ) -> None:
        self.key = environment.sign_key(sign)
        self._base = None if base is None else whole("base", base, 0, MAX_VERSION)
        self._keep = whole("keep", keep, 1)
        where = location("folder", folder)
        self._files = FolderFiles(where) if isinstance(where, Path) else BucketFiles(where)
        self.source = self._files.source
        self._head()

    @property
    def folder(self) -> Path:
        """Folder for files of updates that are not published yet: the store itself, unless it is in a bucket."""
        return self._files.folder

    def _head(self) -> bytes:
        return self._files.head(Listing().to_bytes(self.key))

    def path(self, version: int, base: int | None, rank: int | None = None) -> Path:
        """Return the path for the file of an update, or of a part, to pass to ``WeightSender.diff(file=...)``."""
        return self.folder / file_name(version, base, rank)

    def rename(self, old: Path, new: Path) -> None:
        """Rename the file of an update that is not published yet.

        Raises
        ------
        ArgumentError
            The folder cannot be written.
        """
        with self._files.writing():
            old.replace(new)

    def listing(self) -> Listing:
        """Return the list of updates. If the folder was deleted, the store is created again, empty.

        Raises
        ------
        ArgumentError
            The store cannot be read or written.
        FrameError
            The list is damaged, or not signed with the key; :meth:`clear` empties the store.
        """
        return listing_of(self.source, self._head(), self.key)

    def put(self, update: Update, rank: int | None = None) -> None:
        """Write the file of an update, unless it exists. Receivers find the update only after :meth:`publish`.

        Parameters
        ----------
        update : Update
            The update.
        rank : int, optional
            Number of the part that `update` is.

        Raises
        ------
        ArgumentError
            The file cannot be written.
        """
        self._files.put(update, rank)

    def publish(self, update: Update) -> None:
        """Write the file of an update, and add it to the list that receivers read.

        A snapshot of another run begins a new list. Publishing the last update again changes nothing.

        Raises
        ------
        StateError
            The base of the update is not the last version in the list; or a snapshot of the same run is older than that
            version, or has other weights for it; or another publisher publishes to the same bucket.
        ArgumentError
            A file cannot be written, or the update belongs to no run, or lacks a signature.
        """
        if update.run is None:
            raise ArgumentError(
                "the update was made from files, and belongs to no run: publish updates of a WeightSender"
            )
        if self.key is not None and update.signature is None and not update.nparts:
            raise ArgumentError("the update is not signed, but the store is: pass sign= to the WeightSender")
        listing, new = self.listing(), Listed.of(update)
        if new in listing.updates and listing.last == update.head.after:
            self.put(update)
            return
        begins = not listing.updates or other_run(listing.run, update.run)
        self._check(listing, update, begins)
        self.put(update)
        updates = [new] if begins else [*(one for one in listing.updates if one.file != new.file), new]
        snapshots = [one.head.version for one in updates if one.head.base is None]
        oldest = snapshots[-self._keep] if len(snapshots) > self._keep else -1
        updates = [
            one
            for one in updates
            if one.head.version > oldest or (one.head.version == oldest and one.head.base is None)
        ]
        self._files.publish(Listing(update.run, tuple(updates)).to_bytes(self.key))
        self._files.delete(MAX_VERSION if begins else oldest, updates)

    def has(self, one: Listed) -> bool:
        """Return True if the file of an update or part is in the store."""
        return self._files.has(one)

    def retain(self, kept: Collection[Listed]) -> None:
        """Delete all updates except `kept`, with their parts."""
        self._files.delete(MAX_VERSION, kept)

    def _check(self, listing: Listing, update: Update, begins: bool) -> None:
        """Check that an update may follow the list."""
        last = listing.last
        if update.base is not None:
            found = self._base if last is None else last.version
            if update.base != found or (last is not None and update.head.before != last):
                other = " of other weights" if update.base == found else ""
                raise StateError(
                    f"the update needs version {update.base} as its base, but the last version in {self.source} is "
                    f"{found}{other}"
                )
        elif last is not None and not begins and update.version <= last.version and update.head.after != last:
            raise StateError(
                f"the snapshot has version {update.version}, but the last version in {self.source} is {last.version}"
            )

    def clear(self) -> None:
        """Delete all updates."""
        self._head()
        self._files.publish(Listing().to_bytes(self.key))
        self._files.delete(MAX_VERSION, ())
