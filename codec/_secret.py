"""Secret that the ranks of a group share, with which they authenticate their connections."""

import hmac
import logging
import os
import stat
from typing import Any, NoReturn

from codec.errors import ArgumentError

FILE_VARIABLE, VARIABLE = "CODEC_SECRET_FILE", "CODEC_SECRET"
_LEAST_NBYTES = 16
_MOST_NBYTES = 4096

_logger = logging.getLogger("codec.torch")


class Secret:
    """Key of HMAC-SHA256. Its bytes appear neither in its repr() nor in errors, and it cannot be pickled.

    Parameters
    ----------
    value : bytes
        The key, of 16 to 4,096 bytes.
    name : str
        Name of the argument or variable, for error messages.

    Raises
    ------
    ArgumentError
        `value` is too short or too long.
    """

    __slots__ = ("_key",)

    def __init__(self, value: bytes, name: str = "secret") -> None:
        nbytes = len(value)
        if not _LEAST_NBYTES <= nbytes <= _MOST_NBYTES:
            del value  # tracebacks may show local variables
            raise ArgumentError(
                f"{name} must have {_LEAST_NBYTES} to {_MOST_NBYTES} bytes, got {nbytes}: use random ones, such as "
                "those of `openssl rand -hex 32`"
            )
        self._key = value

    def prove(self, text: bytes) -> bytes:
        """Return the HMAC-SHA256 of a text, 32 bytes."""
        return hmac.digest(self._key, text, "sha256")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._key, other._key)

    def __hash__(self) -> int:
        return hash(Secret)  # equal for all secrets, since a hash of the key would tell something of it

    def __repr__(self) -> str:
        return "Secret(...)"

    def __copy__(self) -> "Secret":
        return self

    def __deepcopy__(self, memo: Any) -> "Secret":
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a secret cannot be pickled: leave out options(secret=), and set {FILE_VARIABLE} in each process"
        )


def secret_of(value: Any) -> Secret:
    """Return the secret of an argument ``secret=``: bytes, or a str, which is encoded in UTF-8.

    Raises
    ------
    ArgumentError
        `value` has another type or size. The message does not contain `value`.
    """
    try:
        if isinstance(value, Secret):
            return value
        if isinstance(value, str):
            return Secret(value.encode())
        if isinstance(value, bytes | bytearray):
            return Secret(bytes(value))
        raise ArgumentError(f"secret must be bytes or a str, got an object of type {type(value).__name__}")
    except UnicodeEncodeError:
        raise ArgumentError("secret must be bytes, or a str that can be encoded in UTF-8") from None
    finally:
        del value  # tracebacks may show local variables


def secret_of_environment() -> Secret | None:
    """Return the secret that CODEC_SECRET_FILE or CODEC_SECRET sets; None if neither variable is set.

    Ends of line at the end of a file are not part of the secret. A warning is logged if other users can read the file.

    Raises
    ------
    ArgumentError
        Both variables are set, the file cannot be read, or the secret has a wrong size, as that of an empty variable.
    """
    path, given = os.environ.get(FILE_VARIABLE), VARIABLE in os.environ
    if path is not None and given:
        raise ArgumentError(f"both {FILE_VARIABLE} and {VARIABLE} are set: unset one of them")
    if path is not None:
        return Secret(_contents(path).rstrip(b"\r\n"), f"the secret in {FILE_VARIABLE}={path}")
    return Secret(os.fsencode(os.environ[VARIABLE]), VARIABLE) if given else None


def _contents(path: str) -> bytes:
    """Return the first bytes of a regular file, one more than a secret may have."""
    try:
        # O_NONBLOCK: a named pipe must not block this process.
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK | os.O_NOCTTY)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ArgumentError(f"{FILE_VARIABLE}={path} is not a regular file")
            warn_if_readable(f"the secret in {FILE_VARIABLE}", path, mode)
            return file.read(_MOST_NBYTES + 3)
    except (OSError, ValueError) as e:  # ValueError: a null character in the path
        raise ArgumentError(f"{FILE_VARIABLE}={path} cannot be read: {e}") from e


def warn_if_readable(name: str, path: str, mode: int) -> None:
    """Log a warning if other users can read a file with this mode."""
    if mode & stat.S_IROTH:
        _logger.warning("other users can read %s=%s: run `chmod o= %s`", name, path, path)
