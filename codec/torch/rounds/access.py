"""Access to the objects of a run: calls of its store with deadlines and repetitions, and checks of what it returns."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from codec import ArgumentError, FrameError
from codec._secret import Secret
from codec.stores.calls import creates_once, pause, repeated
from codec.torch.rounds.media import Medium
from codec.torch.rounds.names import StoreContents
from codec.torch.rounds.objects import digest, head_of, sealed, unsealed

T = TypeVar("T")


class Access:
    """Access of this site to the objects of a run.

    Parameters
    ----------
    medium : Medium
        The store.
    secret : Secret or None
        Secret by which objects are signed.
    seconds : float
        Seconds within which the store must answer each call.

    Attributes
    ----------
    sent_nbytes, received_nbytes : int
        Bytes of the objects that were written and read.
    """

    def __init__(self, medium: Medium, secret: Secret | None, seconds: float) -> None:
        self._medium, self._secret, self._seconds = medium, secret, seconds
        self.sent_nbytes = self.received_nbytes = 0

    def _repeated(self, what: str, call: Callable[[], T]) -> T:
        return repeated(what, call, self._seconds)

    def contents(self) -> StoreContents:
        """Return the names of all objects of the run."""
        return StoreContents.of(self._repeated("list its objects", self._medium.names))

    def check_conditional(self, site: str) -> None:
        """Raise ArgumentError if the store creates an object twice: sites would close a round with other contents."""
        if not self._repeated("create an object", lambda: creates_once(self._medium, f"probe-{site}")):
            raise ArgumentError(
                "the store ignores the condition to create an object only if it does not exist, which sites need: use "
                "another store="
            )

    def put(self, name: str, data: bytes) -> None:
        """Write an object. A repetition writes the same bytes."""
        self._repeated(f"write {name!r}", lambda: self._medium.put(name, data))
        self.sent_nbytes += len(data)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless another site has written it; return True if this site has written it."""
        created = self._repeated(f"create {name!r}", lambda: self._medium.create(name, data))
        if not created:  # perhaps by a call of this site whose answer was lost
            created = self.get(name, len(data) + 1) == data
        self.sent_nbytes += len(data) if created else 0
        return created

    def get(self, name: str, most: int) -> bytes | None:
        """Return the bytes of an object of at most `most` bytes; None if there is no such object, or a larger one."""
        try:
            found = self._repeated(f"read {name!r}", lambda: self._medium.get(name, most))
        except FrameError:  # LimitError
            return None
        self.received_nbytes += len(found or b"")
        return found

    def read(self, name: str, most: int, sha: str | None = None) -> tuple[bytes, dict[str, Any], memoryview]:
        """Return the bytes of an object, its head and its payload.

        Parameters
        ----------
        name : str
            Name of the object.
        most : int
            Maximum size in bytes.
        sha : str, optional
            Digest that the bytes must have.

        Raises
        ------
        FrameError
            The object is missing, too large, or damaged, also when it is read again.
        """
        error = FrameError(
            f"{name!r} is missing in the store, or has more than the {most} bytes that this model can need"
        )
        for attempt in range(3):
            if attempt:
                time.sleep(pause(attempt))
            if (data := self.get(name, most)) is None:
                continue
            try:
                if sha is not None and digest(data) != sha:
                    raise FrameError(f"{name!r} in the store is damaged: it has another digest than in its manifest")
                return data, *unsealed(name, data, self._secret)
            except FrameError as e:
                error = e
        raise error

    def delete(self, names: list[str]) -> None:
        """Delete objects."""
        if names:
            self._repeated("delete old objects", lambda: self._medium.delete(names))

    def sealed(self, name: str, head: Mapping[str, Any], payload: Iterable[Any] = ()) -> bytes:
        """Return the bytes of an object, signed by the secret."""
        return sealed(name, head, payload, self._secret)

    def opened(self, name: str, data: bytes) -> tuple[dict[str, Any], memoryview]:
        """Return head and payload of an object that was read before."""
        return unsealed(name, data, self._secret)

    def opened_any(self, data: bytes) -> dict[str, Any]:
        """Return the head of a change of this site in a checkpoint, whose tag is not checked."""
        return head_of("sent", memoryview(data))[0]


def check_arguments(mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raise ArgumentError if the arguments of this site are not those of the run."""
    for name in mine.keys() | theirs.keys():
        if mine.get(name) != theirs.get(name):
            raise ArgumentError(
                f"the run in the store has {name} {theirs.get(name)!r}, but this site has {mine.get(name)!r}: pass the "
                "same model and arguments on all sites, or another store= for another run"
            )
