"""Files of a store of updates, as :class:`UpdateStore` writes them: in a folder, or in a bucket."""

import re
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from codec.errors import ArgumentError, CodecError
from codec.files.replacing import replaced
from codec.weight_sync.store.bucket import UpdateBucket, object_name
from codec.weight_sync.store.source import TIMEOUT, head_in
from codec.weight_sync.store.staging import StagingFolder
from codec.weight_sync.updates.listing import Listed, file_name
from codec.weight_sync.updates.mapping import mapped
from codec.weight_sync.updates.update import Update
from codec.weight_sync.updates.writing import remove_temporary

_FILE = re.compile(r"((\d{20})\.(?:update|snapshot))(?:\.\d{1,5})?", re.ASCII)  # of an update, or of a part
_OBJECT = re.compile(r"(\d{20})(-[0-9a-f]{32}-)[0-9a-f]{32}(\.(?:update|snapshot))(\.\d{1,5})?", re.ASCII)


class FolderFiles:
    """Files of a store in a folder.

    Parameters
    ----------
    folder : Path
        The folder.

    Attributes
    ----------
    source : str
        The store, to pass to :func:`pull`.
    folder : Path
        Folder for files of updates that are not published yet.

    Raises
    ------
    ArgumentError
        The folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with self.writing():
            self.source = str(folder.resolve())
            remove_temporary(folder, lambda name: name == "head" or _FILE.fullmatch(name))

    @contextmanager
    def writing(self) -> Generator[None]:
        """Context that converts errors of files to ArgumentError with the name of the folder."""
        try:
            yield
        except (OSError, ValueError) as e:  # ValueError: a null character in the path
            why = getattr(e, "strerror", None) or e
            raise ArgumentError(f"{str(self.folder)!r} cannot be used: {why}") from None

    def head(self, empty: bytes) -> bytes:
        """Return the list; write the list `empty` if there is none, so that receivers can tell the store from none."""
        with self.writing():
            missing = not (self.folder / "head").exists()
        if missing:
            self.publish(empty)
        return head_in(self.folder)

    def publish(self, body: bytes) -> None:
        """Replace the list."""
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            with replaced(self.folder / "head") as f:
                f.write(body)

    def put(self, update: Update, rank: int | None = None) -> None:
        """Write the file of an update, unless it exists."""
        path = self.folder / file_name(update.version, update.base, rank)
        with suppress(CodecError):  # missing, or damaged
            if memoryview(mapped(path)) == update.data:
                return
        with self.writing(), replaced(path) as f:
            f.write(update.data)

    def has(self, one: Listed) -> bool:
        """Return True if the file of an update or part is there."""
        path = self.folder / one.file
        with self.writing():
            return path.exists() and path.stat().st_size == one.nbytes

    def delete(self, version: int, kept: Collection[Listed]) -> None:
        """Delete the files of versions up to `version`, except `kept`. What cannot be deleted now is deleted later."""
        names = {one.file for one in kept}
        for path in self.folder.glob("*.*"):
            if (m := _FILE.fullmatch(path.name)) and int(m[2]) <= version and m[1] not in names:
                with suppress(OSError):
                    path.unlink()


class BucketFiles:
    """Files of a store in a bucket, as :class:`FolderFiles`. Updates are written to a temporary folder first.

    Parameters
    ----------
    url : str
        URL of the folder in the bucket.

    Raises
    ------
    ArgumentError
        The bucket cannot be written, or replaces an object that must be created only if it does not exist.
    EngineError
        The package for the URL is not installed.
    """

    def __init__(self, url: str) -> None:
        self._bucket, self.source = UpdateBucket(url, TIMEOUT), url
        self._staging = StagingFolder()
        self.folder = self._staging.folder
        if not self._bucket.creates_once():
            raise ArgumentError(
                f"{url} cannot be used: its store ignores the condition to create an object only if it does not exist, "
                "so two publishers would replace each other's lists. Use another store, or a folder"
            )

    @contextmanager
    def writing(self) -> Generator[None]:
        """Context that converts errors of files to ArgumentError with the name of the temporary folder."""
        try:
            yield
        except OSError as e:
            raise ArgumentError(f"{str(self.folder)!r} cannot be used: {e.strerror or e}") from None

    def head(self, empty: bytes) -> bytes:
        """Return the list; write the list `empty` if there is none."""
        if (found := self._bucket.head()) is not None:
            return found
        self._bucket.publish(empty)
        return empty

    def publish(self, body: bytes) -> None:
        """Write the list that follows the one that :meth:`head` has returned.

        Raises
        ------
        StateError
            Another publisher has published meanwhile.
        """
        self._bucket.publish(body)

    def put(self, update: Update, rank: int | None = None) -> None:
        """Upload an update, and empty the temporary folder."""
        path, found = self.folder / file_name(update.version, update.base, rank), None
        one = Listed.of(update)._replace(rank=rank)
        with suppress(CodecError):  # missing: the update was made in memory, or uploaded before
            found = Listed.of(Update.open(path))._replace(rank=rank)
        with self.writing():
            if found != one:
                with replaced(path) as f:
                    f.write(update.data)
            self._bucket.upload(one, str(path))
            for staged in self.folder.iterdir():  # of this update, and of those that were never published
                staged.unlink()

    def has(self, one: Listed) -> bool:
        """Return True if the bucket has an update or part."""
        return self._bucket.has(one)

    def delete(self, version: int, kept: Collection[Listed]) -> None:
        """Delete the objects that :meth:`head` has found, as :meth:`FolderFiles.delete`."""
        names = {object_name(one) for one in kept}
        parted = {m.group(1, 2, 3) for one in kept if one.nparts and (m := _OBJECT.fullmatch(object_name(one)))}
        found = [
            (name, m)
            for name in self._bucket.names
            if (m := _OBJECT.fullmatch(name)) and name not in names and not (m[4] and m.group(1, 2, 3) in parted)
        ]
        with suppress(ArgumentError):
            self._bucket.delete([name for name, m in found if int(m[1]) <= version])
