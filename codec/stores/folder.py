"""Folder of files as a store of objects."""

import itertools
import os
from pathlib import Path

from codec.stores.sizes import checked_size


class LocalFolder:
    """Folder of files, which may be shared by machines if its file system has atomic hard links, as NFS.

    Parameters
    ----------
    path : Path
        The folder, which is created.
    writer : str
        Name of this writer, in the name of its temporary file. The next process of this name overwrites a file that a
        killed one has left.
    """

    def __init__(self, path: Path, writer: str) -> None:
        self._path, self._writer, self._written = path, writer, itertools.count()

    def _write(self, data: bytes) -> Path:
        """Write a temporary file, and return its path."""
        self._path.mkdir(parents=True, exist_ok=True)
        # Few names, so that files of killed processes do not add up; several, because a call may have been abandoned.
        path = self._path / f".{self._writer}.{next(self._written) % 8}.part"
        path.unlink(missing_ok=True)  # the file may be a link of an object, which must not change
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return path

    def put(self, name: str, data: bytes) -> None:
        """Write a temporary file, and rename it."""
        self._write(data).replace(self._path / name)

    def create(self, name: str, data: bytes) -> bool:
        """Write a temporary file, and link it to the name."""
        temporary = self._write(data)
        try:
            os.link(temporary, self._path / name)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def get(self, name: str, most: int) -> bytes | None:
        """Return the bytes of a file."""
        try:
            with open(self._path / name, "rb") as file:
                return checked_size(name, file.read(most + 1), most)
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """Return the names of all files."""
        try:
            return os.listdir(self._path)
        except FileNotFoundError:
            return []

    def delete(self, names: list[str]) -> None:
        """Delete files."""
        for name in names:
            (self._path / name).unlink(missing_ok=True)
