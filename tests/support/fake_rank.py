"""A fake rank, whose messages tests write by hand, and the calls that the real rank makes meanwhile."""

import os
import socket
import struct
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

import codec
import codec.torch
from codec.torch.network.version import protocol_hash
from support import expected_messages, flatcall
from support.expected_messages import ABORT, DATA, HEADER
from support.handshakes import ADDRESS, CLIENT, HELLO, Hand, group_of

N = 40_000
TIMEOUT = 3  # timeout of the group in seconds
OURS, THEIRS = 19_456, 20_544  # number of values in the slices of rank 0 and rank 1
LOST, FAILED, NONFINITE, DIFFERS = range(1, 5)  # status codes in abort messages
TAG = -2


def values():
    return torch.linspace(-1, 1, N)


def header(body=b"", *, number=0, part=0, index=0, signature=0, kind=DATA, magic=b"CDCM", nbytes=None):
    return expected_messages.header(kind, number, part, index, signature, body, magic=magic, nbytes=nbytes)


class FakeRank:
    """Fake rank of a group of two: a test sends and reads each of its messages.

    Parameters
    ----------
    rank : int
        Number of the rank.
    secret : bytes, optional
        Secret that rank 1 proves.
    """

    def __init__(self, rank, secret=None):
        store = PrefixStore("codec/point-to-point", dist.group.WORLD.get_group_store().clone())
        self.signature, self._indices = 0, {}
        if rank:
            version, token, port, _ = ADDRESS.unpack_from(store.get("0"))
            host = store.get("0")[ADDRESS.size :].decode()
            self.sock = socket.create_connection((host, port), timeout=2 * TIMEOUT)
            if secret is None:
                self.sock.sendall(HELLO.pack(b"CDPH", token, version, rank, TAG, 0))
            else:
                hand = Hand(token, group_of(dist.group.WORLD.group_name, [0, 1]), rank, 0, TAG)
                self.sock.sendall(hand.hello())
                hand = hand._replace(server_nonce=self._take(64)[:32])
                self.sock.sendall(hand.proof(secret, CLIENT))
            return
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2 * TIMEOUT)
            token = os.urandom(16)
            mine = ADDRESS.pack(protocol_hash(), token, server.getsockname()[1], 0) + b"127.0.0.1"
            store.set("0", mine)
            self.sock = server.accept()[0]
            self.sock.settimeout(2 * TIMEOUT)
            assert self._take(HELLO.size) == HELLO.pack(b"CDPH", token, protocol_hash(), 1, TAG, 0)

    def raw(self, data):
        """Send raw bytes, without the header of a message."""
        self.sock.sendall(data)

    def send(self, body=b"", *, number=0, part=0, index=None, **how):
        """Send a message. Defaults: the next index in this part, and the signature of the real rank."""
        expected = self._indices.get((number, part), 0)
        self._indices[number, part] = expected + 1
        how = {"signature": 0 if part else self.signature} | how
        index = expected if index is None else index
        self.raw(header(body, number=number, part=part, index=index, **how) + body)

    def abort(self, *body, number=0, text=b""):
        """Send an abort message; `body` is its status and rank."""
        self.send(struct.pack(f"<{len(body)}q", *body) + text, number=number, index=0, signature=0, kind=ABORT)

    def report(self, body=None, **how):
        """Send the report that ends an all-reduce."""
        self.send(struct.pack("<3q", 1, 1, 1) if body is None else body, part=1, **how)

    def read(self):
        """Read the next message, and return its kind, collective, part and body."""
        _, kind, number, part, _, signature, nbytes, *_ = HEADER.unpack(self._take(HEADER.size))
        if kind == DATA and not part:
            self.signature = signature
        return kind, number, part, self._take(nbytes)

    def read_abort(self):
        """Read messages up to the next abort, and return its status and rank."""
        while True:
            kind, _, _, body = self.read()
            if kind == ABORT:
                return struct.unpack_from("<qq", body)

    def _take(self, nbytes):
        data = b""
        while len(data) < nbytes:
            more = self.sock.recv(min(nbytes - len(data), 1 << 20))
            if not more:
                raise ConnectionError("the real rank has closed the connection")
            data += more
        return data


def reduce(spec=codec.Lossless(), **how):  # noqa: B008
    """Return a call that reduces values(), and checks that an error leaves them unchanged."""

    def call():
        x = values()
        try:
            flatcall.all_reduce(x, spec, **({"op": "mean"} | how))
        finally:
            assert torch.equal(x, values())

    return call


def gathered():
    return reduce(algorithm="all_gather")


def exchange():
    codec.torch.all_to_all_bytes([b"abc", b"def"])


def wait_for_end(k):
    """Read until the real rank closes the connection, or reading fails with an OSError."""
    with suppress(OSError):
        while True:
            k.read()


def good():
    return bytes(codec.encode(values().numpy()))
