"""Stores of objects through which sites exchange frames: folders, buckets, and torch's stores."""

import os
from typing import Any, Protocol, cast

from torch.distributed.distributed_c10d import PrefixStore

from codec import ArgumentError
from codec.arguments import shown
from codec.stores.bucket import ObjectStore
from codec.stores.folder import LocalFolder
from codec.stores.locations import location
from codec.stores.sizes import checked_size, too_large

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
        found = location("store", cast("str | os.PathLike[str]", store))
        return ObjectStore(found) if isinstance(found, str) else LocalFolder(found, site)
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
