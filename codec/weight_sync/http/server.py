"""Serve the files of a store, or those that this process downloads from a store, over HTTP in threads."""

import ipaddress
import os
import socket
import threading
from contextlib import suppress
from os import PathLike
from typing import TYPE_CHECKING, Any

from codec.arguments import whole
from codec.errors import ArgumentError
from codec.stores.locations import folder_at, scheme_of
from codec.weight_sync.closing import Closing
from codec.weight_sync.http import environment
from codec.weight_sync.http.client import Cafile
from codec.weight_sync.http.fan_out import FanOut
from codec.weight_sync.http.mirror import Mirror
from codec.weight_sync.http.offered import OfferedFiles, ServedFolder

if TYPE_CHECKING:
    import ssl

    from codec.weight_sync.http.credentials import BearerToken, Tls
    from codec.weight_sync.http.handler import Server

# Addresses of documentation: connecting a UDP socket to one sends nothing, but shows the address of the default route.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


class UpdateServer(Closing):
    """HTTP server for the files of a store, in threads of this process; created by :func:`serve`.

    Attributes
    ----------
    url : str
        URL of the server, to pass to :func:`pull`. If the server listens on all addresses, the URL has one at which
        other machines can reach this one.
    mirror : Mirror or None
        Downloads that the server offers; None: the server is not a mirror.
    """

    def __init__(self, server: "Server", name: str | None = None, mirror: Mirror | None = None) -> None:
        host, port = name or _reachable(str(server.server_address[0]), server.family), server.server_address[1]
        scheme = "http" if server.tls is None else "https"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self._server, self.mirror = server, mirror
        self._thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="codec-updates", daemon=True)
        self._thread.start()
        if mirror is not None:
            try:
                self.url = mirror.begin(port)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Stop the server, and close its connections. A forked process cannot stop the server of its parent."""
        self._server.stop()
        self._thread.join()
        if self.mirror is not None:
            self.mirror.close()


def serve(
    source: str | PathLike[str],
    host: str | None = None,
    port: int = 0,
    *,
    token: "str | BearerToken | None" = None,
    tls: "Tls | None" = None,
    cafile: Cafile = None,
) -> UpdateServer:
    """Serve the files of an :class:`UpdateStore` over HTTP. Clients can read only ``head`` and the update files.

    If `source` is the URL of another server, this process becomes a *mirror*: pass the result to :func:`pull` as its
    source. The mirror serves the update files that it has begun to download in the last two minutes, from temporary
    files. A server that is sending a file to two receivers names further ones a mirror.

    Without `token`, any client that reaches the address can read the weights; without `tls`, also anyone on the way.
    Up to 64 connections are served at a time; further clients wait. A client has 10 s for a request of at most 16 KiB,
    and 2 minutes for each MiB of the reply.

    Parameters
    ----------
    source : str or path
        Folder of the store; or URL of its server, http or https.
    host : str, optional
        Address to listen on, IPv4 or IPv6. ``"0.0.0.0"`` and ``"::"``: all addresses of this machine. Default:
        127.0.0.1; for a mirror, the address with which this machine reaches the store.
    port : int
        Port to listen on; 0: any free port.
    token : str, optional
        Secret that receivers must pass to :func:`pull`, such as ``secrets.token_urlsafe()`` returns; for a mirror, that
        of the store's server. Default: the one in the file that the environment variable CODEC_STORE_TOKEN_FILE names,
        if it is set.
    tls : path, or pair of paths; optional
        PEM file with the server's certificate and private key; or a file of the certificate, and one of the key. The
        server then accepts only TLS 1.2 and 1.3, and its URL begins with https, and has `host` if that is a name.
        Receivers must connect to a host name or address that the certificate names; the certificate of a mirror must
        name its address. Default: the file that the environment variable CODEC_STORE_TLS_FILE names, if it is set.
    cafile : path or False, optional
        For a mirror: as in :func:`pull`.

    Returns
    -------
    UpdateServer
        Running server; ``close()`` stops it.

    Raises
    ------
    ArgumentError
        The server cannot listen on this address and port, or cannot use `token`, `tls` or `cafile`; or only one of
        mirror and store uses TLS.

    Examples
    --------
    >>> from codec.weight_sync import Publisher, pull, serve
    >>> publisher = Publisher(tempfile.mkdtemp(), host="127.0.0.1")
    >>> publisher.publish({"w": np.zeros(3, np.float32)})
    0
    >>> with serve(publisher.source) as mirror:
    ...     pull(codec.WeightReceiver(), mirror)
    0
    >>> publisher.close()
    """
    from codec.weight_sync.http.handler import Server  # slow to import

    number = whole("port", port, 0, 65535)
    try:
        secret, context = environment.bearer_token(token), environment.server_tls(tls)
    finally:
        del token  # tracebacks may show local variables
    mirror = _mirror(source, secret, context, cafile)
    files: OfferedFiles = ServedFolder(folder_at("source", source)) if mirror is None else mirror.files
    fan_out = FanOut() if mirror is None else None
    host = host if host is not None else "127.0.0.1" if mirror is None else mirror.ip
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        server = Server(files, address, family, secret, context, fan_out)
    except (OSError, ValueError) as e:
        raise ArgumentError(f"the server cannot listen on {host}:{port}: {getattr(e, 'strerror', None) or e}") from None
    return UpdateServer(server, None if context is None or _is_address(host) else host, mirror)


def _mirror(
    source: str | PathLike[str], token: "BearerToken | None", tls: "ssl.SSLContext | None", cafile: Cafile
) -> Mirror | None:
    """Return the mirror of a URL; None for a folder."""
    if scheme_of(source) not in ("http", "https"):
        if cafile is not None:
            raise ArgumentError(f"cafile= is for a mirror of a server, but {os.fspath(source)!r} is a folder")
        return None
    if (scheme_of(source) == "https") != (tls is not None):
        raise ArgumentError(
            "a mirror of a store with https needs tls=, with a certificate that names the mirror's address"
            if tls is None
            else "tls= is for a mirror of a store with https, but the URL of the store begins with http"
        )
    return Mirror(os.fspath(source), token, cafile)


_mirrors: dict[tuple[str, int], UpdateServer] = {}  # of this process, by URL of the store and process
_turn = threading.Lock()


def process_mirror(source: str, token: "str | BearerToken | None" = None, cafile: Cafile = None) -> Mirror | None:
    """Return the mirror of a URL that CODEC_STORE_MIRROR demands, which lives as long as the process; None if unset.

    Raises
    ------
    ArgumentError
        As in :func:`serve`, or the variable is invalid.
    """
    if not environment.mirrors():
        return None
    with _turn:
        key = source, os.getpid()
        if key not in _mirrors:
            try:
                _mirrors[key] = serve(source, token=token, cafile=cafile)
            except ArgumentError as e:
                raise ArgumentError(f"{environment.MIRROR}: {e}") from None
        return _mirrors[key].mirror


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host.partition("%")[0]))
    return False


def _reachable(host: str, family: socket.AddressFamily) -> str:
    """Return `host`, or an address of this machine if `host` means all addresses: one of its name, or of a route."""
    if not ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        return host
    families = [family] if family == socket.AF_INET else [family, socket.AF_INET]  # IPv6 sockets serve IPv4, too
    candidates: list[tuple[str, socket.AddressFamily]] = []
    for each in families:
        with suppress(OSError):
            named: list[Any] = socket.getaddrinfo(socket.gethostname(), None, each, socket.SOCK_STREAM)
            candidates += [(str(address[0]), each) for *_, address in named]
        with suppress(OSError), socket.socket(each, socket.SOCK_DGRAM) as s:
            s.connect((_ELSEWHERE[each], 9))
            candidates.append((str(s.getsockname()[0]), each))
    for candidate, each in candidates:
        address = ipaddress.ip_address(candidate.partition("%")[0])
        if not address.is_loopback and not address.is_link_local and _can_bind(candidate, each):
            return candidate
    return "127.0.0.1" if family == socket.AF_INET else "::1"  # without other addresses, no other machine reaches it


def _can_bind(address: str, family: socket.AddressFamily) -> bool:
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as s:
        s.bind((address, 0))
        return True
    return False
