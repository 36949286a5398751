"""Handshakes written by hand from docs/spec/protocol.md, section 2: a rank, or an attacker, without codec's code.

The endpoints of :func:`endpoints` run codec's code.
"""

import hashlib
import hmac
import socket
import struct
from typing import NamedTuple

import torch.distributed as dist

from codec._secret import Secret
from codec._security import Security
from codec.torch.network.endpoint import Endpoint
from codec.torch.network.handshake import HandshakeTerms
from codec.torch.network.version import protocol_hash
from support.meshes import SECONDS, Group

HELLO = struct.Struct("<4s16sqqqB")  # magic, token, hash of the version, rank, tag, flags
ADDRESS = struct.Struct("<q16sHB")  # hash of the version, token, port, flags; followed by the host
CLIENT, SERVER = b"codec.torch client", b"codec.torch server"


KEY, OTHER = b"0123456789abcdef-the-secret", b"fedcba9876543210-another-one"


def without_secret(monkeypatch):
    """Let codec listen on the loopback interface, and find no secret in the environment."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("CODEC_SECRET", raising=False)
    monkeypatch.delenv("CODEC_SECRET_FILE", raising=False)


def version():
    digest = hashlib.blake2b(b"('codec.torch', 5)", digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def group_of(name, ranks):
    return hashlib.sha256(repr((name, ranks)).encode()).digest()


PAIR = group_of("", [0, 1])  # two ranks of a group without a name


class Hand(NamedTuple):
    """Fields of a handshake, which a test may set wrongly."""

    token: bytes
    group: bytes
    client: int
    server: int
    tag: int
    client_nonce: bytes = b"n" * 32
    server_nonce: bytes = b"m" * 32
    flags: int = 1
    binding: bytes = bytes(32)

    def hello(self):
        """Return the first bytes of the client, with its nonce if it has a secret and no TLS."""
        nonce = self.client_nonce if self.flags == 1 else b""
        return HELLO.pack(b"CDPH", self.token, version(), self.client, self.tag, self.flags) + nonce

    def proof(self, secret, label):
        numbers = struct.pack("<qqq", self.client, self.server, self.tag)
        text = label + self.token + struct.pack("<qB", version(), self.flags) + self.group + numbers + self.binding
        return hmac.new(secret, text + self.client_nonce + self.server_nonce, hashlib.sha256).digest()


def address_of(store, rank):
    """Return token, flags, and (host, port) of a rank, as anyone can read them."""
    value = store.get(f"codec/point-to-point/{rank}")
    _, token, port, flags = ADDRESS.unpack_from(value)
    return token, flags, (value[ADDRESS.size :].decode(), port)


def publish(store, rank, port, *, token=bytes(16), flags=1):
    """Set the address of a rank, as anyone can who reaches the store."""
    store.set(f"codec/point-to-point/{rank}", ADDRESS.pack(version(), token, port, flags) + b"127.0.0.1")


def hand(store, **how):
    """Return the fields of a correct handshake of rank 1 with rank 0, and the address of rank 0."""
    token, _, address = address_of(store, 0)
    return Hand(**{"token": token, "group": PAIR, "client": 1, "server": 0, "tag": 5} | how), address


def read(sock, nbytes):
    """Read bytes; fewer than `nbytes` if the other side closes the connection."""
    data = b""
    while len(data) < nbytes:
        try:
            more = sock.recv(nbytes - len(data))
        except ConnectionResetError:
            break
        if not more:
            break
        data += more
    return data


def call(address, first, seconds=20):
    """Return a socket that has connected to an address and sent bytes."""
    sock = socket.create_connection(address, timeout=seconds)
    sock.sendall(first)
    return sock


def refused(sock):
    """Return True if the other side closes a connection without sending anything more."""
    with sock:
        return read(sock, 1) == b""


def endpoints(*keys, store=None):
    """Return the store, and an endpoint for each rank, whose secret is a key or None."""
    store = store or dist.HashStore()
    return store, [
        Endpoint(Group(rank, len(keys), store), SECONDS, Security(key and Secret(key))) for rank, key in enumerate(keys)
    ]


def met(zero, one, tag=5):
    """Connect rank 1 to rank 0, exchange a message, and return both connections."""
    (there,) = one.connect([0], tag, SECONDS)
    here = zero.accept(1, tag, SECONDS)
    there.send([b"hello"], SECONDS)
    assert here.receive(10, SECONDS).tobytes() == b"hello"
    return here, there


def waiting(endpoint):
    return dict(endpoint._listener._waiting)


def handshake_block():
    """Return a handshake of two ranks with the secret `0123456789abcdef`, as written by hand and by codec."""
    key = b"0123456789abcdef"
    hand = Hand(bytes(range(16)), group_of("0", [0, 1]), 1, 0, -2, b"\1" * 32, b"\2" * 32)
    mine = HandshakeTerms(hand.token, protocol_hash(), 1, hand.group, 1, 0, -2, bytes(32), *hand[5:7])
    proofs = [hand.proof(key, label) for label in (CLIENT, SERVER)]
    assert proofs == [mine.proof(Secret(key), server=server) for server in (False, True)]
    steps = {
        "SHA-256 of ('0', [0, 1])": hand.group,
        "hello and nonce of rank 1": hand.hello(),
        "answer of rank 0": hand.server_nonce + proofs[1],
        "proof of rank 1": proofs[0],
    }
    lines = []
    for name, data in steps.items():
        lines += [name, *(f"    {data[i : i + 32].hex()}" for i in range(0, len(data), 32))]
    return "\n".join(lines)
