"""Environment variables that replace arguments of stores, for programs whose users cannot pass them.

Each variable of `VARIABLES` names a file. An argument takes precedence over its variable. If the file of a variable
cannot be used, the call fails.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from codec.errors import ArgumentError
from codec.files.signing import Key, SigningKey, secret_in

if TYPE_CHECKING:
    import ssl

    from codec.weight_sync.http.credentials import BearerToken, Tls

TOKEN, CA, TLS = "CODEC_STORE_TOKEN_FILE", "CODEC_STORE_CA_FILE", "CODEC_STORE_TLS_FILE"
SIGN, VERIFY = "CODEC_SIGN_KEY_FILE", "CODEC_VERIFY_KEY_FILE"
VARIABLES = (TOKEN, CA, TLS, SIGN, VERIFY)
MIRROR = "CODEC_STORE_MIRROR"  # 1: this process is a mirror of each server that it reads from


@contextmanager
def chosen(given: Any, name: str) -> Generator[Any]:
    """Yield `given`, or the path in the variable `name` if `given` is None; errors of the block then name the variable.

    Raises
    ------
    ArgumentError
        The variable is empty, or the block has raised an ArgumentError.
    """
    path = os.environ.get(name) if given is None else None
    if path == "":
        raise ArgumentError(f"{name} is set, but empty: unset it, or name a file")
    try:
        yield given if path is None else path
    except ArgumentError as e:
        raise e if path is None else ArgumentError(f"{name}: {e}") from None


def mirrors() -> bool:
    """Return True if this process is to be a mirror of each server that it reads from.

    Raises
    ------
    ArgumentError
        The variable is neither 0 nor 1.
    """
    value = os.environ.get(MIRROR, "0")
    if value not in ("0", "1"):
        raise ArgumentError(f"{MIRROR} must be 1 or 0, got {value!r:.40}")
    return value == "1"


def sign_key(given: Key | SigningKey | None) -> SigningKey | None:
    """Return the key of an argument ``sign=``."""
    with chosen(given, SIGN) as key:
        return SigningKey.to_sign(key)


def verify_key(given: Key | SigningKey | None) -> SigningKey | None:
    """Return the key of an argument ``verify=``."""
    with chosen(given, VERIFY) as key:
        return SigningKey.to_verify(key)


def bearer_token(given: "str | BearerToken | None") -> "BearerToken | None":
    """Return the token of an argument ``token=``."""
    if given is not None:
        try:
            from codec.weight_sync.http.credentials import BearerToken  # slow to import

            return BearerToken.of(given)
        finally:
            del given  # tracebacks may show local variables
    with chosen(None, TOKEN) as found:
        if found is None:
            return None
        from codec.weight_sync.http.credentials import BearerToken  # slow to import

        return BearerToken(secret_in(found).decode("latin-1"))


def server_tls(given: "Tls | None") -> "ssl.SSLContext | None":
    """Return the context of an argument ``tls=``."""
    with chosen(given, TLS) as found:
        if found is None:
            return None
        from codec.weight_sync.http.credentials import server_context  # slow to import

        return server_context(found)
