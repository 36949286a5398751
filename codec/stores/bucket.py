"""Folder of a bucket as a store of objects, by fsspec."""

import functools
import importlib
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from errno import EINVAL
from typing import Any

from codec.errors import EngineError
from codec.stores.calls import redacted, started
from codec.stores.locations import PACKAGES
from codec.stores.sizes import checked_size

_PARALLEL = 8  # number of objects that are deleted at a time
_PARTS = {"chunksize": 1 << 24, "max_concurrency": 4}  # bytes of a part, and parts in memory at a time


class ObjectStore:
    """Folder of a bucket.

    Objects are written by one request, or by several parts that one request completes: no reader sees a part of an
    object.

    Parameters
    ----------
    url : str
        URL that :func:`codec.stores.locations.location` has returned.

    Raises
    ------
    EngineError
        The package for the URL is not installed, or cannot use its settings.
    """

    _in_memory = threading.Lock()  # the file system in memory tests and writes in two steps

    def __init__(self, url: str) -> None:
        scheme = url.partition("://")[0]
        package, failed, path = PACKAGES[scheme], None, ""
        try:
            core: Any = importlib.import_module("fsspec.core")
            self._system, path = core.url_to_fs(url)
        except ImportError:
            failed = f"{url} needs the package {package}: pip install {package}"
        except Exception as e:
            failed = f"{url} cannot be opened by {package}: {redacted(e)}"
        if failed is not None:
            raise EngineError(failed)  # outside of the except block: the cause may hold credentials
        self._path = str(path).rstrip("/")
        self._writing: Any = self._in_memory if scheme == "memory" else nullcontext()
        self._parts = _PARTS if package == "s3fs" else {}

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def put(self, name: str, data: bytes) -> None:
        """Write an object."""
        with self._writing:
            self._system.pipe_file(self._at(name), data)

    def upload(self, name: str, file: str) -> None:
        """Write the contents of a local file to an object; a large file in parts."""
        self._system.put_file(file, self._at(name), **self._parts)

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
        found = self.read(name, 0, most + 1)
        return None if found is None else checked_size(name, found, most)

    def read(self, name: str, begin: int, end: int) -> bytes | None:
        """Read a range of bytes, which is shorter if the object is; return None if there is no such object."""
        try:
            return self._system.cat_file(self._at(name), start=begin, end=end)
        except FileNotFoundError:
            return None
        except OSError as e:
            if e.errno == EINVAL:  # the object ends before the range
                return b""
            raise

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes; None if there is no such object."""
        self._system.invalidate_cache(self._at(name))
        try:
            return int(self._system.info(self._at(name))["size"])
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """List the folder, without the cache of the file system."""
        self._system.invalidate_cache()
        try:
            found: list[str] = self._system.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return [path.rsplit("/", 1)[-1] for path in found]

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects."""
        waiting = deque[Future[None]]()
        for name in names:
            waiting.append(started(functools.partial(self._delete, name)))
            if len(waiting) == _PARALLEL:
                waiting.popleft().result()
        for answer in waiting:
            answer.result()

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._system.rm_file(self._at(name))
