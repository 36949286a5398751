"""Secret keys, with which updates, lists of updates and files are signed by HMAC-SHA256; signatures of files."""

import hashlib
import hmac
import os
import re
import stat
import warnings
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Self

from codec.errors import ArgumentError, FrameError
from codec.files.opening import open_regular, opened
from codec.files.replacing import replaced

NBYTES = 32  # size of a signature in bytes
SHORTEST_KEY = 16  # bytes
SUFFIX = ".sig"  # of the file beside a signed file that has its signature
_LONGEST_FILE = 1 << 16  # bytes
_FILE = b"codec file\n"  # purpose of the signatures of files
_LINE = re.compile(rb"codec hmac-sha256 ([0-9a-f]{64})\n")  # contents of the file with a signature
_CHUNK = 1 << 20

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

    def sign(self, purpose: bytes, parts: Iterable[Any]) -> bytes:
        """Return the signature of `parts`, bytes or buffers one after the other; those for other purposes differ."""
        h = hmac.new(self._key, purpose, hashlib.sha256)
        for part in parts:
            h.update(part)
        return h.digest()

    def matches(self, signature: bytes, purpose: bytes, parts: Iterable[Any]) -> bool:
        """Return True if `signature` is that of `parts`; the time does not depend on the first wrong byte."""
        return hmac.compare_digest(signature, self.sign(purpose, parts))

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


def file_signature(file: BinaryIO, key: SigningKey) -> bytes:
    """Return the signature of all bytes of a seekable file."""
    file.seek(0)
    return key.sign(_FILE, iter(lambda: file.read(_CHUNK), b""))


def write_signature(path: str, signature: bytes) -> None:
    """Write the signature of a file beside it.

    Raises
    ------
    ArgumentError
        The signature cannot be written.
    """
    with replaced(Path(path + SUFFIX)) as f:
        f.write(b"codec hmac-sha256 %s\n" % signature.hex().encode())


def check_file(path: str, key: SigningKey) -> None:
    """Check the signature of a file.

    Raises
    ------
    ArgumentError
        The file, or the file of its signature, cannot be read.
    FrameError
        The signature is that of other bytes or of another key.
    """
    with opened(path + SUFFIX) as fd:
        line = _LINE.fullmatch(os.read(fd, 200))
    if line is None:
        raise FrameError(f"{path + SUFFIX!r} is not a signature that codec pack --sign has written")
    with opened(path) as fd, os.fdopen(fd, "rb", 0, closefd=False) as file:
        if not hmac.compare_digest(bytes.fromhex(line[1].decode()), file_signature(file, key)):
            raise FrameError("the signature does not match: the file was changed, or signed with another key")
