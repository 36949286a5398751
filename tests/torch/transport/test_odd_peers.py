"""If a rank behaves unusually but within the protocol, the other rank succeeds."""

import os
import socket
import struct
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

import codec
import codec.torch
from codec.torch.group import communicator
from support import flatcall
from support.fake_rank import ADDRESS, DATA, FAILED, HELLO, TAG, TIMEOUT, FakeRank, good, values, wait_for_end
from support.ranks import RankPool


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, timeout=TIMEOUT) as ranks:
        yield ranks


def _odd(k):
    """Send unusual messages that a receiver must accept: early, late, repeated or foreign ones, and any report."""
    k.read()
    k.send(b"early", number=3)
    k.send(b"early", number=(1 << 64) - 1)
    k.abort(FAILED, 1, number=2)
    k.send(good())
    k.send(good()[:100], index=0)
    k.send(b"behind", index=77)
    k.report(struct.pack("<3q", -(1 << 63), (1 << 63) - 1, 0))
    k.report(b"again", index=0)
    while k.read()[:3] != (DATA, 0, 1):
        pass
    k.send(b"late", number=0, index=5)
    while k.read()[:2] != (DATA, 1):
        pass
    k.send(good(), number=1)
    k.send(struct.pack("<3q", 1, 1, 1), number=1, part=1, signature=0)
    wait_for_end(k)


def _accepted(rank, size):
    if rank:
        _odd(FakeRank(rank))
        return
    for _ in range(2):
        x = values()
        flatcall.all_reduce(x, op="mean", algorithm="all_gather")
        assert torch.equal(x, values())
    with pytest.raises(codec.PeerError, match="rank 1"):
        flatcall.all_reduce(x, op="mean", algorithm="all_gather")
    communicator.communicator_of(None).channel.close()


def test_messages_out_of_order_twice_and_late_are_accepted(ranks):
    ranks.new_group()
    ranks.run(_accepted)


def _with_strangers(rank, size):
    """Connections without the token, or with another rank or tag, have no effect."""
    if not rank:
        reduced = values()
        flatcall.all_reduce(reduced, op="mean", algorithm="all_gather")
        assert torch.equal(reduced, values())
        return
    store = PrefixStore("codec/point-to-point", dist.group.WORLD.get_group_store().clone())
    version, token, port, _ = ADDRESS.unpack_from(store.get("0"))
    host = store.get("0")[ADDRESS.size :].decode()
    hellos = [
        HELLO.pack(b"CDPH", bytes(16), version, 1, TAG, 0),
        HELLO.pack(b"CDPH", token, version + 1, 1, TAG, 0),
        HELLO.pack(b"CDPH", token, version, 0, TAG, 0),
        HELLO.pack(b"CDCM", token, version, 1, TAG, 0),
        os.urandom(45),
        b"CDPH",
    ]
    strangers = []
    for hello in hellos:
        strangers.append(socket.create_connection((host, port)))
        strangers[-1].sendall(hello)
    for stranger in strangers[:-1]:
        stranger.settimeout(TIMEOUT + 3)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    k = FakeRank(1)
    k.read()
    k.send(good())
    k.report()
    k.read()
    for stranger in [*strangers, k.sock]:
        stranger.close()


def test_connections_of_strangers_do_not_disturb(ranks):
    ranks.new_group()
    ranks.run(_with_strangers)


def _behave(rank, size):
    """Make the same calls with a normal rank."""
    reduce_checked = values()
    for how in ({}, {"algorithm": "raw"}, {"spec": codec.Quantize(4)}):
        x = values()
        flatcall.all_reduce(x, op="mean", **how)
        assert (x - reduce_checked).abs().max() < 0.2
    assert codec.torch.all_to_all_bytes([b"abc", b"def"]) == [[b"abc"] * 2, [b"def"] * 2][rank]
    assert communicator.communicator_of(None).channel.counters.raw_collectives == 1


def test_rank_that_follows_the_protocol_succeeds(ranks):
    ranks.new_group()
    ranks.run(_behave)
