"""Authorities, certificates and TLS contexts of ranks; endpoints that use them; a man in the middle."""

import contextlib
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import pytest
import torch.distributed as dist
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import codec
from codec._secret import Secret
from codec._security import Security
from codec._tls import Tls
from codec.torch.network.endpoint import Endpoint
from codec.torch.network.tls import TlsSocket
from support.handshakes import KEY, address_of, publish
from support.meshes import SECONDS, Group, tcp_pair

PSK = Security(Secret(KEY), Tls())
NOW = datetime.now(UTC)


class Authority:
    """Issuer of certificates, whose files are in a folder."""

    def __init__(self, folder, name="ca"):
        self.folder, self.name = folder, x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = folder / f"{name}.pem"
        root = self._certificate(self.name, self._key.public_key(), NOW + timedelta(days=1), ca=True)
        self.file.write_bytes(root.public_bytes(serialization.Encoding.PEM))

    def _certificate(self, name, key, until, *, ca=False, usages=(), host="127.0.0.1"):
        builder = x509.CertificateBuilder(
            self.name, name, key, x509.random_serial_number(), NOW - timedelta(days=9), until
        )
        builder = builder.add_extension(x509.BasicConstraints(ca, None), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(host))]), critical=False)
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def issue(self, name="rank", *, expired=False, **how):
        """Write a certificate and its key; return both paths."""
        key = ec.generate_private_key(ec.SECP256R1())
        until = NOW + timedelta(days=-1 if expired else 1)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._certificate(subject, key.public_key(), until, **how)
        paths = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].touch(0o600)
        encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        paths[1].write_bytes(key.private_bytes(*encoding))
        return paths

    def variables(self, name="rank", **how):
        """Return the environment variables of a rank with a new certificate of this authority."""
        certificate, key = self.issue(name, **how)
        return {"CODEC_TLS_CERT": str(certificate), "CODEC_TLS_KEY": str(key), "CODEC_TLS_CA": str(self.file)}


def context(*, server, chain=None, ca=None, verify=True, host=False):
    """Return a context of TLS as a user makes one."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    if not server:
        made.check_hostname = host
    made.verify_mode = ssl.CERT_REQUIRED if verify else ssl.CERT_NONE
    if chain:
        made.load_cert_chain(*chain)
    if ca:
        made.load_verify_locations(ca)
    return made


def contexts(authority, chain, **how):
    """Return both contexts of a rank with a certificate."""
    return tuple(context(server=server, chain=chain, ca=authority.file, **how) for server in (True, False))


def secured(*each, store=None):
    """Return the store, and an endpoint for each rank with its settings."""
    store = store or dist.HashStore()
    return store, [Endpoint(Group(rank, len(each), store), SECONDS, security) for rank, security in enumerate(each)]


def encrypted(pair):
    return all(isinstance(connection._sock, TlsSocket) for connection in pair)


def refusals(zero, one, seconds=1.0):
    """Connect rank 1 to rank 0; return the errors of both."""
    with pytest.raises(codec.PeerError) as client:
        one.connect([0], 1, SECONDS)
    with pytest.raises(codec.PeerError) as server:
        zero.accept(1, 1, seconds)
    return str(client.value), str(server.value)


def finish(*steps):
    """Advance handshakes, each with its own socket, until all are complete."""
    left = list(steps)
    while left:
        for step in list(left):
            try:
                next(step)
            except StopIteration:
                left.remove(step)


def tls_pair(tls=None):
    """Return two sockets of TLS that are connected: of the server, and of the client."""
    a, b = tcp_pair()
    for sock in (a, b):
        sock.setblocking(False)
    server, client = (tls or Tls()).contexts()
    pair = TlsSocket(a, server, server=True), TlsSocket(b, client, server=False)
    finish(*(sock.handshake() for sock in pair))
    return pair


class Middle:
    """Man in the middle, whose address is in the store instead of that of rank 0, and who passes on all bytes.

    Parameters
    ----------
    store : Store
        Store of a group, whose rank 0 has an endpoint.
    server, client : ssl.SSLContext, optional
        Contexts with which he ends TLS on both sides; without them he passes on encrypted bytes.
    change : callable
        Function of the bytes that the client sends, after the hello; it returns the bytes to pass on.
    """

    def __init__(self, store, server=None, client=None, change=lambda data: data):
        self.seen = [b"", b""]  # bytes of the client, and of the server, after the hello
        self._server, self._client, self._change = server, client, change
        token, flags, self._address = address_of(store, 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        publish(store, 0, self._listener.getsockname()[1], token=token, flags=flags)
        self._open, self._threads = [], []
        self._start(self._serve)

    def _start(self, function, *args):
        self._threads.append(threading.Thread(target=function, args=args, daemon=True))
        self._threads[-1].start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._open.append(sock)
                self._start(self._pass_on, sock)

    def _pass_on(self, sock):
        there = socket.create_connection(self._address)
        self._open.append(there)
        hello = b""
        while len(hello) < 45:
            hello += sock.recv(45 - len(hello))
        there.sendall(hello)
        with contextlib.suppress(OSError, ValueError):
            if self._server is not None:
                sock = self._server.wrap_socket(sock, server_side=True)
                self._open.append(sock)
                there = self._client.wrap_socket(there)
                self._open.append(there)
            self._start(self._copy, there, sock, 1)
            self._copy(sock, there, 0)
        self.close_connections()

    def _copy(self, source, to, side):
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(1 << 16):
                self.seen[side] += data
                to.sendall(data if side else self._change(data))
        self.close_connections()

    def close_connections(self):
        """End all connections."""
        for sock in self._open:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.close_connections()
        for thread in self._threads:
            thread.join()
        for sock in [self._listener, *self._open]:
            sock.close()
