"""Secret keys, with which updates, lists of updates and files are signed by HMAC-SHA256."""

import hashlib
import hmac
import os
import stat
import warnings
from os import PathLike
from typing import Any, NoReturn, Self

from codec.errors import ArgumentError
from codec.files.opening import open_regular

NBYTES = 32  # size of a signature in bytes
SHORTEST_KEY = 16  # bytes
_LONGEST_FILE = 1 << 16  # bytes

Key = bytes | str | PathLike[str]  # key, or path of a file that holds it


class SigningKey:
    """Secret key of signatures. No repr, error or pickle shows the key.

    Parameters
    ----------
    given : bytes, str or path
        Key of at least 16 bytes, or path of a file that holds it. A line end at the end of the file is not part of the
        key.

    Raises
    ------
    ArgumentError
        The file cannot be read, or the key is too short.
    """

    __slots__ = ("_key",)

    def __init__(self, given: Key) -> None:
        if isinstance(given, (str, PathLike)):
            source, key = f"the key in {os.fspath(given)!r}", _in_file(os.fspath(given))
        elif isinstance(given, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            source, key = "the key", given
        else:
            raise ArgumentError(f"a key must be bytes, or the path of a file, got an object of {type(given).__name__}")
        if len(key) < SHORTEST_KEY:
            raise ArgumentError(
                f"{source} has {len(key)} bytes, but needs at least {SHORTEST_KEY}: make one by openssl rand -hex 32"
            )
        self._key = key

    @classmethod
    def of(cls, given: "Key | SigningKey | None") -> Self | None:
        """Return `given` as a SigningKey; None is returned unchanged."""
        return given if given is None or isinstance(given, cls) else cls(given)  # pyright: ignore[reportArgumentType]

    def sign(self, purpose: bytes, *parts: Any) -> bytes:
        """Return the signature of `parts`, bytes or buffers; signatures for other purposes differ."""
        h = hmac.new(self._key, purpose, hashlib.sha256)
        for part in parts:
            h.update(part)
        return h.digest()

    def matches(self, signature: bytes, purpose: bytes, *parts: Any) -> bool:
        """Return True if `signature` is that of `parts`; the time does not depend on the first wrong byte."""
        return hmac.compare_digest(signature, self.sign(purpose, *parts))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a signing key is not pickled: pass the path of its file")

    def __repr__(self) -> str:
        return "<codec signing key>"


def _in_file(path: str) -> bytes:
    with os.fdopen(open_regular(path), "rb") as f:
        warn_if_public(path, f.fileno())
        key = f.read(_LONGEST_FILE + 1)
    if len(key) > _LONGEST_FILE:
        raise ArgumentError(f"{path!r} has more than {_LONGEST_FILE} bytes, and is not a key")
    return key.removesuffix(b"\n").removesuffix(b"\r")


def warn_if_public(path: str, fd: int | None = None) -> None:
    """Warn if other users may read a file with a secret; `fd` is its descriptor, if it is open."""
    if os.stat(path if fd is None else fd).st_mode & (stat.S_IRGRP | stat.S_IROTH):
        warnings.warn(f"other users may read the secret in {path!r}: chmod 600 it", stacklevel=2)
