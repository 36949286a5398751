"""Stores of objects, through which sites exchange frames: a local folder, object stores of fsspec, and torch's stores.

Each store is one flat folder of named objects, which are written as a whole or not at all.
"""

import importlib
import itertools
import os
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol, cast

from torch.distributed.distributed_c10d import PrefixStore

from codec import ArgumentError, EngineError, LimitError
from codec.arguments import shown

# Packages of fsspec whose pipe_file(mode="create") is a conditional write of the store, by protocol
_CONDITIONAL = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
_VALUE_NBYTES = 1 << 22  # maximum size of a value in a store of torch, whose host refuses values of more than 8 MiB


class Medium(Protocol):
    """Store of objects. Methods raise the errors of the store, such as OSError; the caller repeats a failed call."""

    def put(self, name: str, data: bytes) -> None:
        """Write an object, or replace it."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one of this name; return True if it was written.

        If several sites create one object at a time, exactly one of them succeeds.
        """
        ...

    def get(self, name: str, most: int) -> bytes | None:
        """Return an object; None if there is none. Raise LimitError, and read no more, if it has over `most` bytes."""
        ...

    def names(self) -> list[str]:
        """Return the names of all objects. An object is listed as soon as it was written."""
        ...

    def delete(self, names: list[str]) -> None:
        """Delete objects; those that do not exist are ignored."""
        ...


def medium_of(store: Any, site: str) -> Medium:
    """Return the store that the argument ``store=`` of :class:`Rounds` names.

    Raises
    ------
    ArgumentError
        `store` is neither a path, URL nor store of torch, or cannot create objects conditionally.
    EngineError
        The package for the URL is not installed.
    """
    if isinstance(store, (str, os.PathLike)):
        url = str(cast(Any, store)) if isinstance(store, str) else os.fspath(cast("os.PathLike[str]", store))
        protocol, separator, path = url.partition("://")
        if not separator:
            return LocalFolder(Path(url), site)
        if protocol == "file":
            return LocalFolder(Path(path), site)
        return _fsspec(url, protocol)
    if hasattr(store, "compare_set"):
        if not hasattr(store, "list_keys"):
            raise ArgumentError("a store of torch.distributed as store= needs a later torch, with Store.list_keys")
        return TorchStore(store, site)
    if all(callable(getattr(store, name, None)) for name in ("put", "create", "get", "names", "delete")):
        return store
    raise ArgumentError(
        "store must be a path, a URL such as 's3://bucket/run', or a store of torch.distributed such as TCPStore, got "
        f"{shown(store)}"
    )


def _fsspec(url: str, protocol: str) -> "ObjectStore":
    if protocol not in (*_CONDITIONAL, "memory"):
        raise ArgumentError(
            f"store={url!r}: sites need a store that creates an object only if it does not exist, and {protocol!r} is "
            f"not known to do so: use file, memory, {', '.join(_CONDITIONAL)}, or a store of torch.distributed"
        )
    try:
        core: Any = importlib.import_module("fsspec.core")
        system, path = core.url_to_fs(url)
    except ImportError as e:
        package = _CONDITIONAL.get(protocol, "fsspec")
        raise EngineError(f"store={url!r} needs the package {package}: pip install {package}") from e
    return ObjectStore(system, path)


class LocalFolder:
    """Folder of files, which may be shared by machines if its file system has atomic hard links, as NFS.

    Parameters
    ----------
    path : Path
        The folder, which is created.
    site : str
        Name of this site, in the name of its temporary file. The next process of the site overwrites a file that a
        killed one has left.
    """

    def __init__(self, path: Path, site: str) -> None:
        self._path, self._site, self._written = path, site, itertools.count()

    def _write(self, data: bytes) -> Path:
        """Write a temporary file, and return its path."""
        self._path.mkdir(parents=True, exist_ok=True)
        # Few names, so that files of killed processes do not add up; several, because a call may have been abandoned.
        path = self._path / f".{self._site}.{next(self._written) % 8}.part"
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


class ObjectStore:
    """Folder of an object store, by fsspec.

    Parameters
    ----------
    system : AbstractFileSystem
        File system of fsspec. Its ``pipe_file(mode="create")`` must be a conditional write.
    path : str
        Folder.
    """

    _in_memory = threading.Lock()  # the file system in memory tests and writes in two steps

    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path.rstrip("/")
        self._writing: Any = self._in_memory if system.protocol == "memory" else nullcontext()

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def put(self, name: str, data: bytes) -> None:
        """Write an object."""
        with self._writing:
            self._system.pipe_file(self._at(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object on the condition that there is none."""
        try:
            with self._writing:
                self._system.pipe_file(self._at(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def get(self, name: str, most: int) -> bytes | None:
        """Read a range of at most `most` + 1 bytes."""
        try:
            return checked_size(name, self._system.cat_file(self._at(name), start=0, end=most + 1), most)
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """List the folder, without the cache of the file system."""
        self._system.invalidate_cache()
        try:
            found = self._system.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return [path.rsplit("/", 1)[-1] for path in found]

    def delete(self, names: list[str]) -> None:
        """Delete objects."""
        for name in names:
            with suppress(FileNotFoundError):
                self._system.rm_file(self._at(name))


class TorchStore:
    """Store of torch.distributed, such as a TCPStore. A value is cut into pieces; the entry of its name is set last.

    Parameters
    ----------
    store : Store
        The store.
    site : str
        Name of this site, in the keys of its pieces.
    """

    def __init__(self, store: Any, site: str) -> None:
        self._store: Any = PrefixStore("codec/rounds", store)
        self._site = site

    def _pieces(self, name: str, data: bytes) -> str:
        """Write the pieces of a value; return the entry that names them."""
        entry = f"{len(data)} {self._site}"
        for key, begin in _keys(name, entry):
            self._store.set(key, data[begin : begin + _VALUE_NBYTES])
        return entry

    def put(self, name: str, data: bytes) -> None:
        """Set the pieces of a value, and then its entry."""
        self._store.set(f"name/{name}", self._pieces(name, data))

    def create(self, name: str, data: bytes) -> bool:
        """Set the pieces of a value, and its entry if there is none."""
        if self._store.check([f"name/{name}"]):
            return False
        entry = self._pieces(name, data)
        return self._store.compare_set(f"name/{name}", "", entry) == entry.encode()

    def get(self, name: str, most: int) -> bytes | None:
        """Return a value, whose entry names its size."""
        if not self._store.check([f"name/{name}"]):
            return None
        entry = self._store.get(f"name/{name}").decode()
        size = int(entry.partition(" ")[0])
        if size > most:
            raise too_large(name, most)
        keys = [key for key, _ in _keys(name, entry)]
        if keys and not self._store.check(keys):
            return None  # deleted meanwhile
        return checked_size(name, b"".join(map(self._store.get, keys)), most)

    def names(self) -> list[str]:
        """Return the names of all entries."""
        keys = [key.rpartition("name/") for key in self._store.list_keys()]
        return [name for _, prefix, name in keys if prefix and "/" not in name]

    def delete(self, names: list[str]) -> None:
        """Delete entries, and then their pieces."""
        for name in names:
            key = f"name/{name}"
            if self._store.check([key]):
                entry = self._store.get(key).decode()
                self._store.delete_key(key)
                for piece, _ in _keys(name, entry):
                    self._store.delete_key(piece)


def _keys(name: str, entry: str) -> list[tuple[str, int]]:
    """Return the keys of the pieces of a value, and the place of each of them in the value."""
    nbytes, _, site = entry.partition(" ")
    return [(f"piece/{name}/{site}/{begin}", begin) for begin in range(0, int(nbytes), _VALUE_NBYTES)]


def checked_size(name: str, data: bytes, most: int) -> bytes:
    """Return the bytes of an object; raise LimitError if there are more than `most`."""
    if len(data) > most:
        raise too_large(name, most)
    return data


def too_large(name: str, most: int) -> LimitError:
    """Return the error of an object with more than `most` bytes."""
    return LimitError(f"the object {name!r} in the store has more than the {most} bytes that this model can need")
