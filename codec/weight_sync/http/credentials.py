"""Bearer tokens and TLS contexts of the server of a store and of its clients."""

import hmac
import os
import re
import ssl
from os import PathLike
from typing import Any, NoReturn, cast

from codec.errors import ArgumentError
from codec.files.signing import warn_if_public

Tls = str | PathLike[str] | tuple[str | PathLike[str], str | PathLike[str]]

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,4096}=*")


class BearerToken:
    """Secret with which receivers prove to a server that they may read. No repr, error or pickle shows the token.

    Parameters
    ----------
    text : str
        The token.

    Raises
    ------
    ArgumentError
        The token is shorter than 16 characters, or cannot be sent in a header.
    """

    __slots__ = ("_header",)

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not _TOKEN.fullmatch(text):  # pyright: ignore[reportUnnecessaryIsInstance]
            del text
            raise ArgumentError(
                "a token must be a str of at least 16 letters, digits and - . _ ~ + /, such as secrets.token_urlsafe() "
                "returns"
            )
        self._header = f"Bearer {text}"

    @classmethod
    def of(cls, given: "str | BearerToken") -> "BearerToken":
        """Return `given` as a BearerToken."""
        try:
            return given if isinstance(given, cls) else cls(cast(str, given))
        finally:
            del given  # tracebacks may show local variables

    def matches(self, header: str | None) -> bool:
        """Return True if the header Authorization of a request has the token, in a time that does not depend on it."""
        return hmac.compare_digest(self._header.encode(), (header or "").encode(errors="replace"))

    def headers(self) -> dict[str, str]:
        """Return the headers of a request that shows the token."""
        return {"Authorization": self._header}

    def __reduce__(self) -> NoReturn:
        raise TypeError("a token is not pickled")

    def __repr__(self) -> str:
        return "<codec bearer token>"


def server_context(tls: Tls) -> ssl.SSLContext:
    """Return the TLS context of a server.

    Parameters
    ----------
    tls : path or pair of paths
        PEM file with the certificate, the certificates of its issuers, and the private key; or a file of certificates,
        and one of the key.

    Raises
    ------
    ArgumentError
        A file cannot be read, has no certificate or key, or the key is encrypted or is another certificate's.
    """
    given: Any = (tls, tls) if isinstance(tls, (str, PathLike)) else tls
    if not _are_paths(given):
        raise ArgumentError(
            f"tls must be a PEM file of certificate and key, or a pair of such files, got {type(tls).__name__}"
        )
    certificate, key = map(os.fspath, given)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
        warn_if_public(key)
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise ArgumentError(f"the certificate {certificate!r} and key {key!r} cannot be used: {why}") from None
    return context


def _are_paths(given: Any) -> bool:
    return (
        isinstance(given, (tuple, list))
        and len(cast(Any, given)) == 2
        and all(isinstance(path, (str, PathLike)) for path in cast(Any, given))
    )


def _no_password() -> str:
    raise ValueError("the key is encrypted: decrypt it by openssl pkey -in KEY -out NEW")


def client_context(cafile: str | PathLike[str] | None) -> ssl.SSLContext:
    """Return the TLS context of a client, which checks certificate and host of a server.

    Parameters
    ----------
    cafile : path or None
        PEM file of the certificates that are trusted; None: those of the system.

    Raises
    ------
    ArgumentError
        The file cannot be read, or has no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=None if cafile is None else os.fspath(cafile))
    except (OSError, ValueError, TypeError) as e:
        raise ArgumentError(f"cafile={cafile!r:.120} cannot be used: {getattr(e, 'strerror', None) or e}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def tls_error(error: ssl.SSLError) -> str:
    """Return why a TLS connection to a server has failed, and what to do."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        hint = ": does the server use https?" if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST") else ""
        return f"TLS failed: {error.reason or error}{hint}"
    why = error.verify_message
    if error.verify_code in _HOSTS:
        return f"the certificate of the server is of another host ({why.rstrip('.')}): use a host that it names"
    if error.verify_code in _TIMES:
        return f"the certificate of the server is out of date ({why}): renew it, and check the clocks"
    return (
        f"the certificate of the server is not trusted ({why}): pass it, or its issuer's, as cafile= or by "
        "CODEC_STORE_CA_FILE"
    )


_HOSTS, _TIMES = (62, 64), (9, 10)  # verification codes of OpenSSL: other host or address; not yet valid, expired
