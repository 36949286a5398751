"""Keys that sign updates, lists of updates and files: a secret key (HMAC-SHA256), or an Ed25519 key pair.

A signature is a byte with the number of its algorithm, then the value. The signed text is the purpose of the signature,
followed by the SHA-256 digest of the data.
"""

import hashlib
import hmac
import importlib
import os
import re
import stat
import sys
import warnings
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol, Self

from codec.errors import ArgumentError, FrameError
from codec.files.opening import open_regular, opened
from codec.files.replacing import replaced

HMAC, ED25519 = 1, 2  # algorithms
SHORTEST_KEY = 16  # bytes of a secret key
SUFFIX = ".sig"  # of the file beside a signed file that has its signature
_NBYTES = {HMAC: 32, ED25519: 64}  # sizes of values
_KINDS = {HMAC: "a secret key (HMAC)", ED25519: "an Ed25519 key"}
_MODULE = "cryptography.hazmat.primitives.asymmetric.ed25519"
_LONGEST_FILE = 1 << 16  # bytes
_PEM, _PRIVATE, _PUBLIC = b"-----BEGIN ", b"PRIVATE KEY-----", b"-----BEGIN PUBLIC KEY-----"
# Ed25519 keys in other formats, which must not be taken for secret keys: OpenSSH, DER of public and of private keys
_OTHER = (b"ssh-", b"\x30\x2a\x30\x05\x06\x03\x2b\x65\x70", b"\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70")
_FILE = b"codec file"  # purpose of the signatures of files
_LINE = re.compile(rb"codec signature ((?:[0-9a-f]{2}){1,80})\n")  # contents of the file with a signature
_CHUNK = 1 << 20


class Private(Protocol):
    """Ed25519PrivateKey of the package cryptography."""

    def sign(self, data: bytes, /) -> bytes:
        """Return the signature of data."""
        ...


class Public(Protocol):
    """Ed25519PublicKey of the package cryptography."""

    def verify(self, signature: bytes, data: bytes, /) -> None:
        """Raise InvalidSignature unless a signature is that of data."""
        ...


Key = bytes | str | PathLike[str] | Private | Public  # a secret key, the path of a file with a key, or an Ed25519 key


class SigningKey:
    """Key that makes or checks signatures. Its value is in no repr, error or pickle.

    Parameters
    ----------
    given : bytes, str, path, Ed25519PrivateKey or Ed25519PublicKey
        Secret key of at least 16 bytes, path of a file that holds it, or an Ed25519 key. Bytes and files that contain a
        PEM key are Ed25519 keys. A line end at the end of a file is not part of a secret key.

    Raises
    ------
    ArgumentError
        The file cannot be read, the key is too short, or of another kind.
    """

    __slots__ = ("_key",)
    _key: Any  # bytes, Ed25519PrivateKey or Ed25519PublicKey

    def __init__(self, given: Key) -> None:
        ed25519 = sys.modules.get(_MODULE)
        if isinstance(given, (str, PathLike)):
            self._key = _parsed(secret_in(os.fspath(given)), f"the key in {os.fspath(given)!r}")
        elif isinstance(given, bytes):
            self._key = _parsed(given, "the key")
        elif ed25519 is not None and isinstance(given, (ed25519.Ed25519PrivateKey, ed25519.Ed25519PublicKey)):
            self._key = given
        else:
            raise ArgumentError(
                f"a key must be bytes, the path of a file, or an Ed25519 key, got an object of {type(given).__name__}"
            )

    @classmethod
    def to_sign(cls, given: "Key | SigningKey | None") -> Self | None:
        """Return the key of an argument ``sign=``; None is returned unchanged. Public keys are an ArgumentError."""
        key = cls._of(given)
        if key is not None and not isinstance(key._key, bytes) and not hasattr(key._key, "sign"):
            raise ArgumentError("a public key cannot sign: pass the private key")
        return key

    @classmethod
    def to_verify(cls, given: "Key | SigningKey | None") -> Self | None:
        """Return the key of an argument ``verify=``; None is returned unchanged. Private keys are an ArgumentError."""
        key = cls._of(given)
        if key is not None and hasattr(key._key, "sign"):
            raise ArgumentError(
                "a private key must stay with the trainer: pass its public key, made by openssl pkey -pubout"
            )
        return key

    @classmethod
    def _of(cls, given: Any) -> Self | None:
        return given if given is None or isinstance(given, cls) else cls(given)

    @property
    def _algorithm(self) -> int:
        return HMAC if isinstance(self._key, bytes) else ED25519

    @property
    def fingerprint(self) -> bytes:
        """Digest that differs between keys, and that reveals nothing about a secret key; 32 bytes."""
        if isinstance(self._key, bytes):
            return hmac.digest(self._key, b"codec fingerprint", "sha256")
        public = self._key.public_key() if hasattr(self._key, "sign") else self._key
        return hashlib.sha256(public.public_bytes_raw()).digest()

    def sign(self, purpose: bytes, parts: Iterable[Any]) -> bytes:
        """Return the signature of concatenated bytes or buffers. Signatures for other purposes differ."""
        text = _text(purpose, parts)
        if isinstance(self._key, bytes):
            return bytes([HMAC]) + hmac.digest(self._key, text, "sha256")
        return bytes([ED25519]) + self._key.sign(text)

    def check(self, signature: bytes, purpose: bytes, parts: Iterable[Any], what: str) -> None:
        """Check a signature, in a time that does not depend on its first wrong byte.

        Parameters
        ----------
        signature : bytes
            Signature for which :func:`is_signature` is true.
        purpose, parts : bytes, iterable of bytes or buffers
            Signed data.
        what : str
            Name of the data for errors.

        Raises
        ------
        FrameError
            The signature is of other data, another purpose, another key or another algorithm.
        """
        if signature[0] != self._algorithm:
            raise FrameError(
                f"{what} is signed with {_KINDS[signature[0]]}, but is to be verified with {_KINDS[self._algorithm]}"
            )
        text = _text(purpose, parts)
        if isinstance(self._key, bytes):
            matches = hmac.compare_digest(signature[1:], hmac.digest(self._key, text, "sha256"))
        else:
            matches = _verified(self._key, signature[1:], text)
        if not matches:
            raise FrameError(f"the signature of {what} does not match: it was changed, or signed with another key")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a signing key is not pickled: pass the path of its file")

    def __repr__(self) -> str:
        return "<codec signing key>"


def is_signature(data: bytes) -> bool:
    """Return True if `data` has the size of a signature by its algorithm."""
    return len(data) > 0 and _NBYTES.get(data[0]) == len(data) - 1


def _text(purpose: bytes, parts: Iterable[Any]) -> bytes:
    h = hashlib.sha256()
    for part in parts:
        h.update(part)
    return purpose + b"\n" + h.digest()


def _verified(key: Any, value: bytes, text: bytes) -> bool:
    try:
        (key.public_key() if hasattr(key, "sign") else key).verify(value, text)
    except importlib.import_module("cryptography.exceptions").InvalidSignature:
        return False
    return True


def secret_in(path: str) -> bytes:
    """Return the secret in a regular file, without the line end at its end; warn if other users may read the file.

    Raises
    ------
    ArgumentError
        The file cannot be read, is not regular, or has more than 64 KiB.
    """
    with os.fdopen(open_regular(path), "rb") as f:
        key = f.read(_LONGEST_FILE + 1)
        if _PUBLIC not in key or _PRIVATE in key:
            warn_if_public(path, f.fileno())
    if len(key) > _LONGEST_FILE:
        raise ArgumentError(f"{path!r} has more than {_LONGEST_FILE} bytes, and is neither a key nor a token")
    return key.removesuffix(b"\n").removesuffix(b"\r")


def warn_if_public(path: str, fd: int | None = None) -> None:
    """Warn if other users may read a file with a secret; `fd` is its descriptor, if it is open."""
    if os.stat(path if fd is None else fd).st_mode & (stat.S_IRGRP | stat.S_IROTH):
        warnings.warn(f"other users may read the secret in {path!r}: chmod 600 it", stacklevel=2)


def _parsed(content: bytes, source: str) -> Any:
    """Return a secret key, bytes, or the Ed25519 key that a PEM file contains."""
    if _PEM in content:
        return _ed25519(content, source)
    if content.startswith(_OTHER):
        raise ArgumentError(f"{source} is neither a secret key nor a PEM key: convert it by openssl pkey")
    if len(content) < SHORTEST_KEY:
        raise ArgumentError(
            f"{source} has {len(content)} bytes, but needs at least {SHORTEST_KEY}: make one by openssl rand -hex 32"
        )
    return content


def _ed25519(content: bytes, source: str) -> Any:
    try:
        ed25519: Any = importlib.import_module(_MODULE)
        serialization: Any = importlib.import_module("cryptography.hazmat.primitives.serialization")
    except ImportError:
        raise ArgumentError(
            f"{source} is a PEM key, which needs the package cryptography: pip install 'tensor-codec[tls]'"
        ) from None
    if b"ENCRYPTED" in content:
        raise ArgumentError(f"{source} is encrypted: decrypt it by openssl pkey -in KEY -out NEW")
    found: Any = None
    try:
        if _PRIVATE in content:
            found = serialization.load_pem_private_key(content, None)
        elif _PUBLIC in content:
            found = serialization.load_pem_public_key(content)
    except Exception:  # errors of many classes, which may differ between releases of the package
        found = None
    if not isinstance(found, (ed25519.Ed25519PrivateKey, ed25519.Ed25519PublicKey)):
        raise ArgumentError(f"{source} is not an Ed25519 key in PEM: make one by openssl genpkey -algorithm ed25519")
    return found


def file_signature(file: BinaryIO, key: SigningKey, context: str | None = None) -> bytes:
    """Return the signature of all bytes of a seekable file, and of `context`, such as a name and a version."""
    file.seek(0)
    return key.sign(_purpose(context), _chunks(file))


def _purpose(context: str | None) -> bytes:
    return _FILE if context is None else _FILE + b" " + os.fsencode(context)


def _chunks(file: BinaryIO) -> Iterable[bytes]:
    return iter(lambda: file.read(_CHUNK), b"")


def write_signature(path: str, signature: bytes) -> None:
    """Write the signature of a file beside it.

    Raises
    ------
    ArgumentError
        The signature cannot be written.
    """
    with replaced(Path(path + SUFFIX)) as f:
        f.write(b"codec signature %s\n" % signature.hex().encode())


def check_file(path: str, key: SigningKey, context: str | None = None) -> None:
    """Check the signature of a file.

    Raises
    ------
    ArgumentError
        The file, or the file of its signature, cannot be read.
    FrameError
        The signature is that of other bytes, of another key or of another context.
    """
    with opened(path + SUFFIX) as fd:
        line = _LINE.fullmatch(os.read(fd, 200))
    signature = b"" if line is None else bytes.fromhex(line[1].decode())
    if not is_signature(signature):
        raise FrameError(f"{path + SUFFIX!r} is not a signature that codec pack --sign has written")
    with opened(path) as fd, os.fdopen(fd, "rb", 0, closefd=False) as file:
        key.check(
            signature, _purpose(context), _chunks(file), "the file" + " with this context" * (context is not None)
        )
