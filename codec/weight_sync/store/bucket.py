"""Store of updates in a bucket: lists with rising numbers, which are created on a condition, and files of updates.

No request of all object stores replaces an object only if nobody else has. So each list is a new object, ``head-N``,
and the list with the highest number counts. A publisher creates list N + 1 on the condition that there is none, after
it has read list N: of two publishers, one fails. Objects are never replaced by others: the name of an update contains
its run and its digest.
"""

import functools
import mmap
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from codec.errors import ArgumentError, PeerError, StateError
from codec.stores.bucket import ObjectStore
from codec.stores.calls import creates_once, pause, repeated, started
from codec.weight_sync.http.temporary import copied
from codec.weight_sync.updates.listing import MAX_NBYTES, Listed

T = TypeVar("T")

_HEAD = re.compile(r"head-(\d{20})", re.ASCII)
_LISTS = 4  # number of lists that are kept, for readers that have just found the name of one
_BLOCK = 1 << 23  # bytes that a request reads
_AHEAD = 4  # number of requests for blocks of an update at a time
_LOOKS = 6  # number of requests for an object that is not there yet
_BYTES_PER_SECOND = 1 << 14  # slowest accepted transfer of an object or block
_MOST_LISTS = 10**20  # numbers of lists have 20 digits


def object_name(one: Listed) -> str:
    """Return the name of an update's object: version, run and digest, and the kind of the update."""
    kind = "snapshot" if one.head.base is None else "update"
    run = "" if one.head.run is None else one.head.run.hex()
    part = "" if one.rank is None else f".{one.rank}"
    return f"{one.head.version:020d}-{run}-{one.head.digest.hex()}.{kind}{part}"


class UpdateBucket:
    """Folder of a bucket with lists and updates.

    Parameters
    ----------
    url : str
        URL that :func:`codec.stores.locations.location` has returned.
    seconds : float
        Time within which the bucket must answer a request, in seconds.

    Attributes
    ----------
    number : int
        Number of the list that :meth:`head` has returned, or :meth:`publish` has written; -1: neither was called.
    names : list of str
        Names of the objects when :meth:`head` was called.

    Raises
    ------
    EngineError
        The package for the URL is not installed.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self.url, self._seconds = url, seconds
        self.store = ObjectStore(url)
        self.number, self.names = -1, list[str]()
        self._body = b""  # list `number`

    def _call(self, what: str, call: Callable[[], T], seconds: float = 0) -> T:
        try:
            return repeated(what, call, self._seconds + seconds)
        except PeerError as e:
            failed = str(e)
        raise ArgumentError(f"{self.url} cannot be used: {failed}")

    def creates_once(self) -> bool:
        """Return False if the bucket creates an object a second time, although it must not.

        Raises
        ------
        ArgumentError
            The bucket cannot be written.
        """
        name = f"probe-{secrets.token_hex(8)}"
        return self._call("create an object", lambda: creates_once(self.store, name))

    def head(self) -> bytes | None:
        """Return the list with the highest number; None if there is none.

        Raises
        ------
        ArgumentError
            The bucket cannot be read, or names a list that it does not have.
        """
        name = ""
        for attempt in range(_LOOKS):
            self.names = self._look()
            newest = _newest(self.names)
            if newest < 0:
                return None
            if newest <= self.number:  # lists do not change; a bucket may show new objects late
                return self._body
            name = _head(newest)
            body = self._call(f"read {name}", lambda name=name: self.store.read(name, 0, MAX_NBYTES + 1))
            if body is not None and (len(body) > MAX_NBYTES or len(body) == self._size(name)):  # not cut on the way
                self.number, self._body = newest, body
                return body
            time.sleep(pause(attempt))
        raise ArgumentError(f"{self.url} names the object {name}, but does not have all of it: {_LATE}")

    def _size(self, name: str) -> int | None:
        return self._call(f"read {name}", lambda: self.store.size(name))

    def _look(self) -> list[str]:
        return self._call("list its objects", self.store.names)

    def publish(self, body: bytes) -> None:
        """Write a list, which follows the one that :meth:`head` has returned.

        Raises
        ------
        StateError
            Another publisher has written a list meanwhile.
        ArgumentError
            The bucket cannot be written, or has a list with the highest number.
        """
        number = self.number + 1
        if number >= _MOST_LISTS:
            raise ArgumentError(f"{self.url} has {_head(self.number)}, after which no list can follow: delete it")
        name = _head(number)
        if not self._call(f"create {name}", lambda: self.store.create(name, body)):
            # perhaps it was created by a call whose answer was lost
            found = self._call(f"read {name}", lambda: self.store.read(name, 0, len(body) + 1))
            if found != body:
                raise _other(self.url)
        if _newest(self._look()) > number:  # list `number` of another publisher was deleted meanwhile
            raise _other(self.url)
        self.number, self._body = number, body

    def upload(self, one: Listed, file: str) -> None:
        """Write the file of an update.

        Raises
        ------
        ArgumentError
            The bucket cannot be written, or has stored another number of bytes.
        """
        name, seconds = object_name(one), one.nbytes / _BYTES_PER_SECOND

        def upload() -> None:
            self.store.upload(name, file)
            if (found := self.store.size(name)) != one.nbytes:
                raise OSError(f"the object has {found} bytes after {one.nbytes} bytes were written")

        self._call(f"write {name}", upload, seconds)

    def has(self, one: Listed) -> bool:
        """Return True if the bucket has the file of an update or part, with its size."""
        name = object_name(one)
        return self._call(f"look for {name}", lambda: self.store.size(name)) == one.nbytes

    def delete(self, names: list[str]) -> None:
        """Delete objects, and all lists but the newest ones.

        Raises
        ------
        ArgumentError
            The bucket does not delete them.
        """
        lists = [name for name in self.names if (m := _HEAD.fullmatch(name)) and int(m[1]) <= self.number - _LISTS]
        if names or lists:
            self._call("delete old objects", lambda: self.store.delete([*names, *lists]), len(names) + len(lists))

    def update(self, one: Listed) -> mmap.mmap | bytes:
        """Copy the object of an update to a temporary file, and map the temporary file to memory.

        Raises
        ------
        ArgumentError
            The bucket cannot be read, or does not have the object.
        FrameError
            The object is larger or smaller than the list says.
        """
        name = object_name(one)
        blocks, rest = self._blocks(name, one.nbytes), memoryview(b"")

        def read(buffer: memoryview) -> int:
            nonlocal rest
            rest = rest or memoryview(next(blocks, b""))
            n = min(len(buffer), len(rest))
            buffer[:n], rest = rest[:n], rest[n:]
            return n

        return copied(read, f"{self.url}/{name}", one.nbytes, one.nbytes)

    def _blocks(self, name: str, nbytes: int) -> Iterator[bytes]:
        """Yield the blocks of an object, up to the first that is not complete; one byte more shows a larger object."""
        waiting = deque[Future[bytes]]()
        for begin in range(0, nbytes, _BLOCK):
            waiting.append(started(functools.partial(self._block, name, begin, nbytes)))
            if len(waiting) < (_AHEAD if begin else 1):  # the first block shows whether there is an object
                continue
            yield (block := waiting.popleft().result())
            if len(block) < _BLOCK:
                return
        for future in waiting:
            yield (block := future.result())
            if len(block) < _BLOCK:
                return

    def _block(self, name: str, begin: int, nbytes: int) -> bytes:
        """Return the block that begins at byte `begin` of an object of `nbytes` bytes, and one byte more at the end."""
        end = begin + _BLOCK if begin + _BLOCK < nbytes else nbytes + 1
        for attempt in range(_LOOKS):
            block = self._call(
                f"read {name}", lambda: self.store.read(name, begin, end), (end - begin) / _BYTES_PER_SECOND
            )
            if block is not None and (len(block) >= min(end, nbytes) - begin or attempt == _LOOKS - 1):
                return block
            if 0 <= self.number < _newest(self._look()):
                raise ArgumentError(f"{self.url}/{name} was deleted meanwhile: read the list again")
            time.sleep(pause(attempt))
        raise ArgumentError(f"{self.url} does not have the object {name}, which its list names: {_LATE}")


_LATE = "it was deleted, or the bucket shows new objects late: try again"


def _newest(names: list[str]) -> int:
    """Return the number of the newest list; -1 if there is none."""
    return max((int(found[1]) for name in names if (found := _HEAD.fullmatch(name))), default=-1)


def _head(number: int) -> str:
    return f"head-{number:020d}"


def _other(url: str) -> StateError:
    return StateError(
        f"another publisher has published to {url}: only one may write to a store. Make a new Publisher to take the "
        "store over"
    )
