"""send and recv with peers that are stuck, hostile, without the token, or of another protocol version."""

import os
import socket
import time

import pytest
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.network import endpoint, handshake
from codec.torch.network.version import protocol_hash
from support.handshakes import refused
from support.point_to_point import SOON, connection, raw, within


def _stuck_sender(rank, size):
    """send() of a message larger than the operating system's buffers times out if no rank receives it."""
    if rank == 0:
        with pytest.raises(codec.PeerError, match="within the timeout"):
            codec.torch.send(bytes(1 << 26), 1, tag=9, options=within(0.3))
        with pytest.raises(codec.PeerError, match="closed: make a new group"):
            codec.torch.send(b"", 1, tag=9)
        with pytest.raises(codec.PeerError, match="closed: make a new group"):
            codec.torch.recv(1, tag=9)
        dist.barrier()
        return
    connection(0, 9)
    dist.barrier()
    with pytest.raises(codec.PeerError, match="is gone"):
        codec.torch.recv(0, tag=9)
    codec.torch.send(b"other tags are usable", 0, tag=10)


def test_send_without_receiver_closes_its_connection_only(ranks):
    ranks.run(_stuck_sender)


def hello(peer, tag, *, token=None, version=None, rank=None, magic=handshake.HELLO_MAGIC):
    """Return a socket connected to a rank's port, and the bytes of a connection's first message (hello)."""
    mine = endpoint.endpoint_of(dist.group.WORLD)
    mine._read_addresses([peer], time.monotonic() + SOON)
    true_token, port, host, _ = mine._addresses[peer]
    sock = socket.create_connection((host, port))
    version = protocol_hash() if version is None else version
    rank = mine.rank if rank is None else rank
    return sock, handshake.HELLO.pack(magic, token or true_token, version, rank, tag, 0)


HOSTILE = {
    "garbage": raw()[:4] + os.urandom(100) + b"x",
    "wrong magic": raw(b"HTTP", body=b"abc"),
    "wrong number": raw(number=1, nbytes=3, body=b"abc"),
    "too large": raw(nbytes=(1 << 64) - 1, body=b"abc"),
    "above max_nbytes": raw(nbytes=1 << 30, body=b"abc"),
    "cut in the header": raw(nbytes=3)[:7],
    "cut in the body": raw(nbytes=300, body=b"abc"),
    "nothing": b"",
}


def _hostile(rank, size, name, tag):
    """Rank 1 writes hostile bytes and closes the connection; recv on rank 0 must raise."""
    if rank == 1:
        sock, first = hello(0, tag)
        for byte in first:  # byte by byte, because a hello may arrive in pieces
            sock.sendall(bytes([byte]))
        sock.sendall(HOSTILE[name])
        sock.close()
        codec.torch.send(b"still here", 0, tag=99)
        return None
    begin = time.monotonic()
    with pytest.raises(codec.PeerError) as raised:
        codec.torch.recv(1, tag=tag, max_nbytes=1 << 20, options=within(SOON))
    assert codec.torch.recv(1, tag=99) == b"still here"
    return str(raised.value), time.monotonic() - begin < SOON


def test_hostile_messages_raise_and_leave_other_connections(ranks):
    for tag, name in enumerate(HOSTILE, 200):
        (text, soon), _ = ranks.run(_hostile, name, tag)
        assert soon, name
        assert "max_nbytes, 1048576" in text or "not a message" in text or "is gone" in text, (name, text)


def _hostile_size(rank, size):
    """A message that announces many bytes, which never arrive, must not make the receiver allocate memory for them."""
    if rank == 1:
        sock, first = hello(0, 300)
        sock.sendall(first + raw(nbytes=1 << 36, body=bytes(100_000)))
        assert codec.torch.recv(0, tag=301) == b"done"
        sock.close()
        return None
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(codec.PeerError, match="within the timeout"):
        codec.torch.recv(1, tag=300, max_nbytes=1 << 36, options=within(0.3))
    with pytest.raises(codec.PeerError, match="closed"):
        codec.torch.recv(1, tag=300, max_nbytes=1 << 36, options=within(0.3))
    codec.torch.send(b"done", 1, tag=301)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024


def test_announced_size_takes_no_memory(ranks):
    assert ranks.run(_hostile_size)[0] < 64  # MiB of memory


def _strangers(rank, size):
    """Connections with a wrong hello are closed, and do not affect other connections."""
    if rank == 1:
        wrong = [
            dict(token=bytes(16)),
            dict(version=5),
            dict(rank=0),
            dict(rank=2),
            dict(rank=-1),
            dict(magic=b"HTTP"),
        ]
        for how in wrong:
            sock, first = hello(0, 400, **how)
            sock.settimeout(SOON)
            sock.sendall(first)
            assert refused(sock)
        silent = [hello(0, 400)[0] for _ in range(20)]  # sockets that connect and send nothing
        codec.torch.send(b"honest", 0, tag=400)
        for sock in silent:
            sock.close()
        return None
    return codec.torch.recv(1, tag=400)


def test_strangers_are_turned_away(ranks):
    assert ranks.run(_strangers)[0] == b"honest"


def _version(rank, size):
    if rank == 1:
        mine = endpoint.endpoint_of(dist.group.WORLD)
        codec.torch.send(b"", 0, tag=500)  # returns once rank 0 has an endpoint
        store = mine._book._store
        address = store.get("0")
        store.set("0", (5).to_bytes(8, "little") + address[8:])
        mine._addresses.clear()  # otherwise this rank does not read the address again
        with pytest.raises(codec.PeerError, match="different versions of the protocol"):
            codec.torch.send(b"", 0, tag=501)
        store.set("0", b"short")
        with pytest.raises(codec.PeerError, match="no valid address"):
            codec.torch.send(b"", 0, tag=502)
        store.set("0", address)
        codec.torch.send(b"", 0, tag=503)
    else:
        codec.torch.recv(1, tag=500)
        codec.torch.recv(1, tag=503)


def test_rank_of_another_version_is_refused(ranks):
    ranks.run(_version)
