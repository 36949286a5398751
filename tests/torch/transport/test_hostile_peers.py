"""A rank sends wrong messages: the other one raises in time, and its tensor is unchanged."""

import json
import os
import resource
import socket
import struct
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

import codec
import codec.torch
from codec.torch.group import communicator
from codec.torch.network import inbox
from codec.torch.network.version import protocol_hash
from support import flatcall
from support.faults import KILLED
from support.ranks import RankPool

N = 40_000
TIMEOUT = 3
LIMIT = TIMEOUT + 3  # seconds until the error, with margin for shared CPUs
OURS, THEIRS = 19_456, 20_544  # values of the slices of rank 0 and rank 1
HEADER = struct.Struct("<4sIQIIqQ")  # magic, kind, collective, part, index, signature, bytes of the body
HELLO = struct.Struct("<4s16sqqq")  # magic, token, hash of the version, rank, tag
ADDRESS = struct.Struct("<q16sH")  # hash of the version, token, port; the host follows
DATA, ABORT = range(2)
LOST, FAILED, NONFINITE, DIFFERS = range(1, 5)  # statuses of aborts
TAG = -2


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, timeout=TIMEOUT) as ranks:
        yield ranks


def values():
    return torch.linspace(-1, 1, N)


def header(body=b"", *, number=0, part=0, index=0, signature=0, kind=DATA, magic=b"CDCM", nbytes=None):
    return HEADER.pack(magic, kind, number, part, index, signature, len(body) if nbytes is None else nbytes)


class FakeRank:
    """Rank that writes and reads the messages of a group of two ranks by hand."""

    def __init__(self, rank):
        store = PrefixStore("codec/point-to-point", dist.group.WORLD.get_group_store().clone())
        self.signature, self._indices = 0, {}
        if rank:
            version, token, port = ADDRESS.unpack_from(store.get("0"))
            host = store.get("0")[ADDRESS.size :].decode()
            self.sock = socket.create_connection((host, port), timeout=2 * TIMEOUT)
            self.sock.sendall(HELLO.pack(b"CDPH", token, version, rank, TAG))
            return
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2 * TIMEOUT)
            token = os.urandom(16)
            mine = ADDRESS.pack(protocol_hash(), token, server.getsockname()[1]) + b"127.0.0.1"
            store.set("0", mine)
            self.sock = server.accept()[0]
            self.sock.settimeout(2 * TIMEOUT)
            assert self._take(HELLO.size) == HELLO.pack(b"CDPH", token, protocol_hash(), 1, TAG)

    def raw(self, data):
        """Send bytes."""
        self.sock.sendall(data)

    def send(self, body=b"", *, number=0, part=0, index=None, **how):
        """Send a message; its index follows those before it in this part, its signature is the one of the real rank."""
        expected = self._indices.get((number, part), 0)
        self._indices[number, part] = expected + 1
        how = {"signature": 0 if part else self.signature} | how
        index = expected if index is None else index
        self.raw(header(body, number=number, part=part, index=index, **how) + body)

    def abort(self, *body, number=0, text=b""):
        """Send an abort; `body` is status and rank."""
        self.send(struct.pack(f"<{len(body)}q", *body) + text, number=number, index=0, signature=0, kind=ABORT)

    def report(self, body=None, **how):
        """Send the report of an all-reduce."""
        self.send(struct.pack("<3q", 1, 1, 1) if body is None else body, part=1, **how)

    def read(self):
        """Return kind, collective, part and body of the next message."""
        _, kind, number, part, _, signature, nbytes = HEADER.unpack(self._take(HEADER.size))
        if kind == DATA and not part:
            self.signature = signature
        return kind, number, part, self._take(nbytes)

    def read_abort(self):
        """Return the status and the rank of the next abort."""
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
    codec.torch.exchange([b"abc", b"def"])


def _bytes(*data):
    """Send bytes in the place of a frame."""

    def fake(k):
        k.read()
        for each in data:
            k.raw(each)
        wait_for_end(k)

    return gathered(), fake


def wait_for_end(k):
    """Read until the real rank closes the connection, or its error has passed."""
    with suppress(OSError):
        while True:
            k.read()


def _acted(act, call=None):
    def fake(k):
        k.read()
        act(k)
        wait_for_end(k)

    return call or gathered(), fake


def _sent(frame=b"", spec=codec.Lossless()):  # noqa: B008
    """Send a frame that is wrong; the real rank reports its error."""

    def act(k):
        k.send(bytes(frame))
        assert k.read_abort() == (FAILED, 0)

    return _acted(act, reduce(spec, algorithm="all_gather"))


def _reported(body, **how):
    return _acted(lambda k: (k.send(good()), k.report(body, **how)))


def _aborted(*body, text=b""):
    return _acted(lambda k: k.abort(*body, text=text))


def _differing(then):
    return _acted(lambda k: (k.send(good(), signature=k.signature + 1), then(k)))


def _exchanged(announced, *messages):
    def act(k):
        k.send(struct.pack("<q", announced) if isinstance(announced, int) else announced)
        for message in messages:
            k.send(message)

    return _acted(act, exchange)


def _raw(terms, sums):
    """Send uncompressed values; a slice has one chunk."""

    def act(k):
        k.send(bytes(terms))
        k.send(bytes(sums))

    return _acted(act, reduce(algorithm="raw"))


def _in_pieces(data, pause):
    """Send a message one byte at a time."""

    def act(k):
        for byte in data(k):
            k.raw(bytes([byte]))
            time.sleep(pause)

    return _acted(act)


def _closed(data):
    return _acted(lambda k: (k.raw(data(k)), k.sock.close()))


def whole(k):
    return header(good(), signature=k.signature) + good()


def good():
    return bytes(codec.encode(values().numpy()))


def flipped():
    frame = bytearray(good())
    frame[200] ^= 1
    return bytes(frame)


def encoded(*args, **how):
    return bytes(flatcall.encode(*args, **how))


def ones(dtype="f4", n=N):
    return np.ones(n, dtype)


def shared_scale(scale):
    def act(k):
        k.send(encoded(np.array([scale], "f4")))
        k.send(encoded(np.full(OURS, 5.0, "f4")))

    return _acted(act, reduce(codec.Ternary(), algorithm="shared_scale"))


PEER, FRAME = codec.PeerError, codec.FrameError
SHORT = {  # run by make test: each kind of message
    "magic of another protocol": (PEER, lambda: _bytes(header(magic=b"CDPM"))),
    "kind that is unknown": (PEER, lambda: _bytes(header(kind=2))),
    "body of 2^60 bytes": (PEER, lambda: _bytes(header(nbytes=1 << 60))),
    "body of 2^36 bytes that nobody has asked for": (PEER, lambda: _bytes(header(nbytes=1 << 36, number=7))),
    "abort that is too long": (PEER, lambda: _bytes(header(nbytes=1 << 20, kind=ABORT))),
    "garbage": (PEER, lambda: _bytes(os.urandom(4096))),
    "abort of this rank": (PEER, lambda: _aborted(FAILED, 1, text=b"reason")),
    "abort with garbage as text": (PEER, lambda: _aborted(FAILED, 1, text=os.urandom(4096))),
    "abort with an unknown status": (PEER, lambda: _aborted(99, 1)),
    "abort of status 0": (PEER, lambda: _aborted(0, 1)),
    "abort of a rank that is not there": (PEER, lambda: _aborted(FAILED, 1 << 40)),
    "abort that is empty": (PEER, lambda: _aborted()),
    "signature that differs, and arguments": (
        PEER,
        lambda: _differing(lambda k: k.abort(DIFFERS, 0, text=json.dumps({"collective": "other"}).encode())),
    ),
    "signature that differs, and nested text": (
        PEER,
        lambda: _differing(lambda k: k.abort(DIFFERS, 0, text=b"[" * 8000)),
    ),
    "signature that differs, and silence": (PEER, lambda: _differing(lambda k: None)),
    "signature that differs, and a closed connection": (PEER, lambda: _differing(lambda k: k.sock.close())),
    "message of another index": (PEER, lambda: _acted(lambda k: k.send(good(), index=1))),
    "header that ends": (PEER, lambda: _closed(lambda k: whole(k)[:17])),
    "body that ends": (PEER, lambda: _closed(lambda k: whole(k)[:-1])),
    "frame that is garbage": (FRAME, lambda: _sent(os.urandom(5000))),
    "frame that is empty": (FRAME, lambda: _sent(b"")),
    "frame that is cut": (FRAME, lambda: _sent(good()[:-9])),
    "frame that is too long": (FRAME, lambda: _sent(good() + bytes(4 * N))),
    "frame of another shape": (FRAME, lambda: _sent(encoded(ones(n=N - 1)))),
    "frame of another codec": (FRAME, lambda: _sent(encoded(ones(), codec.Sign()))),
    "frame with other parameters": (FRAME, lambda: _sent(encoded(ones(), codec.Quantize(2)), codec.Quantize(4))),
    "report that is short": (FRAME, lambda: _reported(bytes(16))),
    "report that is long": (FRAME, lambda: _reported(bytes(32))),
    "raw terms that lack a value": (FRAME, lambda: _raw(4 * OURS - 4, 4 * THEIRS)),
    "raw terms that have one too many": (FRAME, lambda: _raw(4 * OURS + 4, 4 * THEIRS)),
    "raw sums that lack a value": (FRAME, lambda: _raw(4 * OURS, 4 * THEIRS - 4)),
    "exchange of an impossible size": (FRAME, lambda: _exchanged(1 << 62)),
    "exchange of half a size": (FRAME, lambda: _exchanged(bytes(4))),
    "exchange of a message that is short": (FRAME, lambda: _exchanged(1000, b"x" * 300)),
    "exchange of a message that is long": (FRAME, lambda: _exchanged(1000, b"x" * 1001)),
}
LONG = {  # run by make nightly: more of each kind, and cases that last until the timeout
    "silence from the start": (PEER, lambda: (gathered(), None)),
    "silence instead of a frame": (PEER, lambda: _acted(lambda k: None)),
    "silence instead of a report": (PEER, lambda: _acted(lambda k: k.send(good()))),
    "header that drips": (PEER, lambda: _in_pieces(lambda k: whole(k)[:20], TIMEOUT / 8)),
    "body that drips": (PEER, lambda: _in_pieces(lambda k: whole(k)[:60], TIMEOUT / 40)),
    "end of the process instead of a frame": (PEER, lambda: _acted(lambda k: os._exit(0))),
    "message of another part": (PEER, lambda: _acted(lambda k: k.send(good(), part=3))),
    "message of another collective": (PEER, lambda: _acted(lambda k: k.send(good(), number=9))),
    "numbers of millions of collectives": (
        PEER,
        lambda: _acted(lambda k: flood(k, lambda i: header(number=1 + i))),
    ),
    "abort of a negative status": (PEER, lambda: _aborted(-1, 1)),
    "abort of half a status": (PEER, lambda: _acted(lambda k: k.send(b"1234", index=0, kind=ABORT))),
    "abort, and no explanation of a difference": (PEER, lambda: _aborted(DIFFERS, 0)),
    "difference from a rank that is not there": (PEER, lambda: _aborted(DIFFERS, 77, text=b"{}")),
    "signature that differs, and another reason": (PEER, lambda: _differing(lambda k: k.abort(FAILED, 1, text=b"x"))),
    "report of another signature": (PEER, lambda: _reported(None, signature=5)),
    "frame of another dtype": (FRAME, lambda: _sent(encoded(ones("f8")))),
    "frame of bfloat16": (FRAME, lambda: _sent(encoded(ones("u2"), dtype="bfloat16"))),
    "frame of two dimensions": (FRAME, lambda: _sent(encoded(ones().reshape(2, -1)))),
    "frame of Float8": (FRAME, lambda: _sent(encoded(ones(), codec.Float8()))),
    "frame of another packing": (FRAME, lambda: _sent(encoded(ones(), codec.Ternary("base3")), codec.Ternary())),
    "frame that needs a state": (
        FRAME,
        lambda: _sent(
            encoded(
                ones(),
                codec.Truncate(level_coding="shared"),
                optimizer=codec.optimizers.SGD(1.0),
                state={"theta": ones()},
            )
        ),
    ),
    "frame that needs a codebook": (
        codec.CodecError,
        lambda: _sent(encoded(values().numpy(), codebook=codec.Codebook.from_tensors(values().numpy()))),
    ),
    "flipped bit": (FRAME, lambda: _sent(flipped())),
    "raw terms that lack all values": (FRAME, lambda: _raw(0, 4 * THEIRS)),
    "raw sums that lack all values": (FRAME, lambda: _raw(4 * OURS, 0)),
    "raw sums that have one too many": (FRAME, lambda: _raw(4 * OURS, 4 * THEIRS + 4)),
    "exchange of a negative size": (FRAME, lambda: _exchanged(-1)),
    "exchange of a message that is empty": (FRAME, lambda: _exchanged(1000, b"")),
    "exchange that announces 64 GiB and sends 100 bytes": (FRAME, lambda: _exchanged(1 << 36, b"x" * 100)),
    "exchange that announces 64 GiB and sends nothing": (PEER, lambda: _exchanged(1 << 36)),
    "scale that is NaN": (codec.CodecError, lambda: shared_scale(np.nan)),
    "scale that is negative": (codec.CodecError, lambda: shared_scale(-1e30)),
}


def flood(k, message, n=200_000):
    """Send many messages."""
    for begin in range(0, n, 1000):
        k.raw(b"".join(message(i) for i in range(begin, begin + 1000)))


def _case(rank, size, table, name, real=0):
    """Return the seconds until the error on the rank that is tested."""
    wanted, make = TABLES[table][name]
    call, fake = make()
    if rank != real:
        with suppress(OSError):
            if fake is not None:
                fake(FakeRank(rank))
        return None
    begin = time.monotonic()
    with pytest.raises(wanted):
        call()
    took = time.monotonic() - begin
    communicator.close_communicator(dist.group.WORLD, cancel=True)  # the fake rank reads until then
    return took


def _try(ranks, table, names, real=0):
    for name in names:
        ranks.new_group()
        ranks.start(_case, table, name, real)
        took = ranks.results([real])[0]
        assert took is not KILLED, name
        assert took < LIMIT, name
        if ranks.results([1 - real]) == [KILLED]:
            ranks.replace(1 - real)


def test_wrong_message_is_an_error_and_changes_no_tensor(ranks):
    _try(ranks, "SHORT", SHORT)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LONG)
def test_more_wrong_messages_are_errors(ranks, name):
    _try(ranks, "LONG", [name])


# Rank 0 is hostile: the real rank connects to it


OF_RANK_0 = {
    "abort": (PEER, lambda: _aborted(FAILED, 0, text=b"reason")),
    "body of 2^60 bytes": (PEER, lambda: _bytes(header(nbytes=1 << 60))),
    "connection that ends": (PEER, lambda: _acted(lambda k: k.sock.close())),
    "report that is short": (FRAME, lambda: _reported(bytes(8))),
}
TABLES = {"SHORT": SHORT, "LONG": LONG, "OF_RANK_0": OF_RANK_0}


def test_wrong_message_of_rank_0_is_an_error(ranks):
    _try(ranks, "OF_RANK_0", OF_RANK_0, real=1)


ADDRESSES = {
    "another version": ADDRESS.pack(12345, bytes(16), 1) + b"127.0.0.1",
    "too short": b"1234",
    "host that is no text": ADDRESS.pack(protocol_hash(), bytes(16), 1) + b"\xff",
    "port that is closed": ADDRESS.pack(protocol_hash(), bytes(16), 1) + b"127.0.0.1",
}


def _wrong_address(rank, size, name):
    if not rank:
        store = PrefixStore("codec/point-to-point", dist.group.WORLD.get_group_store().clone())
        store.set("0", ADDRESSES[name])
        return 0
    begin = time.monotonic()
    with pytest.raises(codec.PeerError):
        gathered()()
    return time.monotonic() - begin


@pytest.mark.parametrize("name", ADDRESSES)
def test_wrong_address_of_rank_0_is_an_error(ranks, name):
    ranks.new_group()
    assert ranks.run(_wrong_address, name)[1] < LIMIT


# Ranks that behave oddly, but not wrongly


def _odd(k):
    """Send what a receiver must accept: early and late messages, messages twice, other collectives, any report."""
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
    """Connections without the token, or with another rank or tag, do not disturb."""
    if not rank:
        reduced = values()
        flatcall.all_reduce(reduced, op="mean", algorithm="all_gather")
        assert torch.equal(reduced, values())
        return
    store = PrefixStore("codec/point-to-point", dist.group.WORLD.get_group_store().clone())
    version, token, port = ADDRESS.unpack_from(store.get("0"))
    host = store.get("0")[ADDRESS.size :].decode()
    hellos = [
        HELLO.pack(b"CDPH", bytes(16), version, 1, TAG),
        HELLO.pack(b"CDPH", token, version + 1, 1, TAG),
        HELLO.pack(b"CDPH", token, version, 0, TAG),
        HELLO.pack(b"CDCM", token, version, 1, TAG),
        os.urandom(44),
        b"CDPH",
    ]
    strangers = []
    for hello in hellos:
        strangers.append(socket.create_connection((host, port)))
        strangers[-1].sendall(hello)
    for stranger in strangers[:-1]:
        stranger.settimeout(LIMIT)
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


# Memory


def _flooded(rank, size):
    """Return the peak memory in KiB that a flood of early messages costs, with a limit of 8 MiB instead of 4 GiB."""
    if rank:
        k = FakeRank(rank)
        k.read()
        threading.Thread(target=wait_for_end, args=(k,), daemon=True).start()
        with suppress(OSError):
            flood(k, lambda i: header(number=1, index=i), n=1_000_000)
        return 0
    limit, inbox.MOST_AHEAD_NBYTES = inbox.MOST_AHEAD_NBYTES, 8 << 20
    early, inbox.MOST_EARLY_NBYTES = inbox.MOST_EARLY_NBYTES, 4 << 20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(codec.PeerError, match="not asked for"):
        gathered()()
    inbox.MOST_AHEAD_NBYTES, inbox.MOST_EARLY_NBYTES = limit, early
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak


def test_flood_of_early_messages_ends_the_connection_and_takes_little_memory(ranks):
    ranks.new_group()
    assert ranks.run(_flooded)[0] < 64 << 10


def _announced(rank, size):
    """Return the peak memory in KiB that announcements of 64 GiB cost."""
    if rank:
        k = FakeRank(rank)
        with suppress(OSError):
            k.read()
            k.send(struct.pack("<q", 1 << 36))
            k.send(b"x" * 100)
            wait_for_end(k)
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(codec.FrameError):
        exchange()
    communicator.communicator_of(None).channel.close()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak


def test_announcement_of_a_large_frame_allocates_little(ranks):
    ranks.new_group()
    assert ranks.run(_announced)[0] < 64 << 10


def _behave(rank, size):
    """Make the same calls with a rank that follows the protocol."""
    reduce_checked = values()
    for how in ({}, {"algorithm": "raw"}, {"spec": codec.Quantize(4)}):
        x = values()
        flatcall.all_reduce(x, op="mean", **how)
        assert (x - reduce_checked).abs().max() < 0.2
    assert codec.torch.exchange([b"abc", b"def"]) == [[b"abc"] * 2, [b"def"] * 2][rank]
    assert communicator.communicator_of(None).channel.counters.raw_collectives == 1


def test_rank_that_follows_the_protocol_succeeds(ranks):
    ranks.new_group()
    ranks.run(_behave)
