"""Store of published updates: a folder that receivers read, as files or over HTTP.

The folder has a file for each update, and a file ``head``, which lists the updates. The file of an update is written
first; renaming the new ``head`` publishes the update. The folder may be on a shared disk, be copied to an object store
(``head`` last), or be served by :func:`codec.weight_sync.serve`.
"""

import re
from collections.abc import Generator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from codec.arguments import whole
from codec.errors import ArgumentError, CodecError, StateError
from codec.files.replacing import replaced
from codec.files.signing import Key, SigningKey
from codec.weight_sync import environment
from codec.weight_sync.identity import MAX_VERSION, other_run
from codec.weight_sync.listing import Listed, Listing, file_name
from codec.weight_sync.source import read_head
from codec.weight_sync.update import Update
from codec.weight_sync.writing import remove_temporary

_UPDATE = re.compile(r"\d{20}\.(?:update|snapshot)")


class UpdateStore:
    """Folder of updates, written by one trainer and read by any number of receivers.

    The store deletes only files that have the name of an update, such as ``00000000000000000012.update``.

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
    sign : bytes, str, path or Ed25519PrivateKey; optional
        Key that signs the list, as in :class:`codec.WeightSender`, which must sign the updates with it.

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

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        keep: int = 2,
        base: int | None = None,
        sign: Key | SigningKey | None = None,
    ) -> None:
        self.key = environment.sign_key(sign)
        self.folder = Path(folder)
        self._base = None if base is None else whole("base", base, 0, MAX_VERSION)
        self._keep = whole("keep", keep, 1)
        with self._writing():
            self._create()
            remove_temporary(self.folder, lambda name: name == "head" or _UPDATE.fullmatch(name))

    @contextmanager
    def _writing(self) -> Generator[None]:
        """Context that converts errors of files to ArgumentError with the name of the folder."""
        try:
            yield
        except (OSError, ValueError) as e:  # ValueError: a null character in the path
            why = getattr(e, "strerror", None) or e
            raise ArgumentError(f"{str(self.folder)!r} cannot be used: {why}") from None

    def _create(self) -> None:
        """Create the folder and an empty list, unless they exist, so that receivers can tell the store from none."""
        if not (self.folder / "head").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_head(Listing())

    def path(self, version: int, base: int | None) -> Path:
        """Return the path for the file of an update, to pass to ``WeightSender.diff(file=...)``."""
        return self.folder / file_name(version, base)

    def rename(self, old: Path, new: Path) -> None:
        """Rename the file of an update that is not published yet.

        Raises
        ------
        ArgumentError
            The folder cannot be written.
        """
        with self._writing():
            old.replace(new)

    def listing(self) -> Listing:
        """Return the list of updates. If the folder was deleted, the store is created again, empty.

        Raises
        ------
        ArgumentError
            The folder cannot be read or written.
        FrameError
            The file ``head`` is damaged, or not signed with the key; :meth:`clear` empties the store.
        """
        with self._writing():
            self._create()
        return read_head(self.folder, key=self.key)

    def put(self, update: Update) -> None:
        """Write the file of an update, unless it exists. Receivers find the update only after :meth:`publish`.

        Raises
        ------
        ArgumentError
            The file cannot be written.
        """
        path = self.path(update.version, update.base)
        with suppress(CodecError):  # missing, or damaged
            if Update.open(path).data == update.data:
                return
        with self._writing(), replaced(path) as f:
            f.write(update.data)

    def publish(self, update: Update) -> None:
        """Write the file of an update, and add it to the list that receivers read.

        A snapshot of another run begins a new list. Publishing the last update again changes nothing.

        Raises
        ------
        StateError
            The base of the update is not the last version in the list; or a snapshot of the same run is older than that
            version, or has other weights for it.
        ArgumentError
            A file cannot be written, or the update belongs to no run, or lacks a signature.
        """
        if update.run is None:
            raise ArgumentError(
                "the update was made from files, and belongs to no run: publish updates of a WeightSender"
            )
        if self.key is not None and update.signature is None:
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
        with self._writing():
            self._write_head(Listing(update.run, tuple(updates)))
        self._delete_before(MAX_VERSION if begins else oldest, {one.file for one in updates})

    def _check(self, listing: Listing, update: Update, begins: bool) -> None:
        """Check that an update may follow the list."""
        last = listing.last
        if update.base is not None:
            found = self._base if last is None else last.version
            if update.base != found or (last is not None and update.head.before != last):
                other = " of other weights" if update.base == found else ""
                raise StateError(
                    f"the update needs version {update.base} as its base, but the last version in {self.folder} is "
                    f"{found}{other}"
                )
        elif last is not None and not begins and update.version <= last.version and update.head.after != last:
            raise StateError(
                f"the snapshot has version {update.version}, but the last version in {self.folder} is {last.version}"
            )

    def clear(self) -> None:
        """Delete all updates."""
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_head(Listing())
        self._delete_before(MAX_VERSION, set())

    def _write_head(self, listing: Listing) -> None:
        with replaced(self.folder / "head") as f:
            f.write(listing.to_bytes(self.key))

    def _delete_before(self, version: int, kept: set[str]) -> None:
        """Delete the files of versions up to `version`, except `kept`. What cannot be deleted now is deleted later."""
        for path in self.folder.glob("*.*"):
            if _UPDATE.fullmatch(path.name) and int(path.stem) <= version and path.name not in kept:
                with suppress(OSError):
                    path.unlink()
