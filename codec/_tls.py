"""TLS between the ranks of a group: the setting, and the contexts made from it (docs/guides/multi-node.md)."""

import os
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

from codec._secret import warn_if_readable
from codec.arguments import shown
from codec.errors import ArgumentError

if TYPE_CHECKING:
    import ssl  # at run time inside of functions, since `import codec` should be fast

    Contexts: TypeAlias = tuple[ssl.SSLContext, ssl.SSLContext]

VARIABLE = "CODEC_TLS"
FILE_VARIABLES = "CODEC_TLS_CERT", "CODEC_TLS_KEY", "CODEC_TLS_CA"
_ANOTHER_HOST, _OUT_OF_DATE, _PURPOSE = (62, 64), (9, 10), 26  # verification codes of OpenSSL


class Tls:
    """TLS setting of ranks. It cannot be pickled, and its repr() shows no key.

    Parameters
    ----------
    contexts : pair of ssl.SSLContext or None
        Contexts of the side that listens and of the side that connects. None: the ranks prove their secret, and
        :meth:`contexts` makes a certificate and its key.
    """

    __slots__ = ("_contexts",)

    def __init__(self, contexts: "Contexts | None" = None) -> None:
        self._contexts = contexts

    @property
    def requires_certificates(self) -> bool:
        """True if both sides of each connection refuse a rank without a certificate of an issuer that they trust."""
        return self._contexts is not None and all(c.verify_mode == _ssl().CERT_REQUIRED for c in self._contexts)

    def contexts(self) -> "Contexts":
        """Return the contexts of the side that listens and of the side that connects.

        Raises
        ------
        ArgumentError
            The package cryptography is missing, which makes certificates.
        """
        return self._contexts or _ephemeral_contexts()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tls) and self._contexts == other._contexts

    def __hash__(self) -> int:
        return hash(self._contexts)

    def __repr__(self) -> str:
        return "Tls('psk')" if self._contexts is None else "Tls(...)"

    def __copy__(self) -> "Tls":
        return self

    def __deepcopy__(self, memo: Any) -> "Tls":
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"TLS settings cannot be pickled: leave out options(tls=), and set {VARIABLE} in each process")


def tls_of(value: Any) -> Tls:
    """Return the setting of an argument ``tls=``: ``"psk"``, or a pair of contexts.

    Raises
    ------
    ArgumentError
        `value` is neither, or a context is for the other side, or excludes TLS 1.3.
    """
    if isinstance(value, Tls):
        return value
    if isinstance(value, str) and value == "psk":
        return Tls()
    contexts = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else ()
    if len(contexts) != 2 or not all(isinstance(c, _ssl().SSLContext) for c in contexts):
        raise ArgumentError(
            f'tls must be "psk" or a pair of ssl.SSLContext, of server and client, got {shown(cast(object, value))}'
        )
    ssl = _ssl()
    for context, other, name in zip(contexts, (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER), _SIDES, strict=True):
        if context.protocol == other:
            raise ArgumentError(f"tls: the context of the {name} is one of the other side; pass (server, client)")
        if context.maximum_version not in (ssl.TLSVersion.MAXIMUM_SUPPORTED, ssl.TLSVersion.TLSv1_3):
            raise ArgumentError(f"tls: the context of the {name} excludes TLS 1.3: raise its maximum_version")
    return Tls(cast("Contexts", contexts))


_SIDES = "server", "client"


def tls_of_environment() -> Tls | None:
    """Return the setting of CODEC_TLS, or of CODEC_TLS_CERT, CODEC_TLS_KEY and CODEC_TLS_CA; None if none is set.

    Raises
    ------
    ArgumentError
        A variable has another value or is missing, or a file cannot be used.
    """
    mode, files = os.environ.get(VARIABLE), {name: os.environ.get(name) for name in FILE_VARIABLES}
    given = [name for name, path in files.items() if path is not None]
    if mode is not None and given:
        raise ArgumentError(f"both {VARIABLE} and {given[0]} are set: unset one of them")
    if mode is not None:
        if mode != "psk":
            raise ArgumentError(f"{VARIABLE} must be psk, got {shown(mode)}; certificates are in {given_in(files)}")
        return Tls()
    if not given:
        return None
    if missing := [name for name in files if name not in given]:
        raise ArgumentError(f"{given[0]} is set, but {missing[0]} is not: set {given_in(files)}")
    return Tls(_file_contexts(*cast("dict[str, str]", files).values()))


def given_in(names: Any) -> str:
    """Return the names of three variables for messages."""
    first, second, third = names
    return f"{first}, {second} and {third}"


def distrust(error: "ssl.SSLCertVerificationError") -> str:
    """Return why a certificate was refused, as the end of a sentence whose subject is the certificate."""
    why = error.verify_message.rstrip(".")
    if error.verify_code in _ANOTHER_HOST:
        return f"is of another host ({why})"
    if error.verify_code in _OUT_OF_DATE:
        return f"is out of date ({why})"
    if error.verify_code == _PURPOSE:
        return f"must allow both clientAuth and serverAuth in its extended key usage ({why})"
    return f"is not trusted ({why})"


def _ssl() -> Any:
    import ssl

    return ssl


def _new_contexts() -> "Contexts":
    """Return contexts for TLS 1.3, in which no ticket resumes a connection."""
    ssl = _ssl()
    server, client = (ssl.SSLContext(p) for p in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    server.num_tickets = 0
    client.check_hostname = False
    server.minimum_version = client.minimum_version = ssl.TLSVersion.TLSv1_3
    return server, client


def _file_contexts(certificate: str, key: str, ca: str) -> "Contexts":
    """Return contexts in which both sides show a certificate, and require one of the same issuer from the other."""
    contexts = _new_contexts()
    try:
        with open(key, "rb") as file:
            warn_if_readable("the key in CODEC_TLS_KEY", key, os.fstat(file.fileno()).st_mode)
        for context in contexts:
            context.verify_mode = _ssl().CERT_REQUIRED
            context.load_cert_chain(certificate, key, password=_no_password)
            context.load_verify_locations(ca)
    except (OSError, ValueError) as e:  # an SSLError is an OSError
        why = getattr(e, "strerror", None) or e
        paths = ", ".join(f"{name}={path}" for name, path in zip(FILE_VARIABLES, (certificate, key, ca), strict=True))
        raise ArgumentError(f"a file of {paths} cannot be used: {why}") from None
    return contexts


def _no_password() -> str:
    raise ValueError("the key is encrypted: decrypt it by openssl pkey -in KEY -out NEW")


def _ephemeral_contexts() -> "Contexts":
    """Return contexts with a new certificate, which no side checks: ranks prove their secret inside of the connection.

    The key is in memory only.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ArgumentError(
            "tls='psk' needs the package cryptography: pip install 'tensor-codec[tls]', on all ranks"
        ) from None
    from datetime import datetime, timedelta

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "codec")])
    begin = datetime(2000, 1, 1)  # nobody checks the dates
    certificate = (x509.CertificateBuilder(name, name, key.public_key(), 1, begin, begin + timedelta(days=36500))).sign(
        key, hashes.SHA256()
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    server, client = _new_contexts()
    client.verify_mode = _ssl().CERT_NONE
    with open(os.memfd_create("codec"), "wb", buffering=0) as file:  # OpenSSL reads files only
        file.write(pem)
        try:
            server.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        except FileNotFoundError:
            raise ArgumentError("tls='psk' needs the file system /proc: mount it, or use certificates") from None
    return server, client
