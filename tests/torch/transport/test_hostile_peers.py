"""If a rank sends wrong messages, the other rank raises in time, and its tensor is unchanged."""

import json
import os
import resource
import struct
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore

import codec
import codec.torch
from codec.torch.group import communicator
from codec.torch.network import inbox
from codec.torch.network.version import protocol_hash
from support import flatcall
from support.fake_rank import (
    ABORT,
    ADDRESS,
    DIFFERS,
    FAILED,
    OURS,
    THEIRS,
    TIMEOUT,
    FakeRank,
    N,
    exchange,
    gathered,
    good,
    header,
    reduce,
    values,
    wait_for_end,
)
from support.faults import KILLED
from support.ranks import RankPool

LIMIT = TIMEOUT + 3  # seconds until the error, with margin for shared CPUs


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, timeout=TIMEOUT) as ranks:
        yield ranks


def _bytes(*data):
    """Return a case whose fake rank sends raw bytes instead of a message with a frame."""

    def fake(k):
        k.read()
        for each in data:
            k.raw(each)
        wait_for_end(k)

    return gathered(), fake


def _acted(act, call=None):
    def fake(k):
        k.read()
        act(k)
        wait_for_end(k)

    return call or gathered(), fake


def _sent(frame=b"", spec=codec.Lossless()):  # noqa: B008
    """Return a case whose fake rank sends an invalid frame, and expects the real rank's abort."""

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
    """Return a case whose fake rank sends uncompressed terms and sums; a slice has one chunk."""

    def act(k):
        k.send(bytes(terms))
        k.send(bytes(sums))

    return _acted(act, reduce(algorithm="raw"))


def _in_pieces(data, pause):
    """Return a case whose fake rank sends a message byte by byte, with pauses."""

    def act(k):
        for byte in data(k):
            k.raw(bytes([byte]))
            time.sleep(pause)

    return _acted(act)


def _closed(data):
    return _acted(lambda k: (k.raw(data(k)), k.sock.close()))


def whole(k):
    return header(good(), signature=k.signature) + good()


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
SHORT = {  # cases for make test: one or more of each kind of message
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
LONG = {  # cases for make nightly: more of each kind, and those that last until the timeout
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
    """Send n copies of a message."""
    for begin in range(0, n, 1000):
        k.raw(b"".join(message(i) for i in range(begin, begin + 1000)))


def _case(rank, size, table, name, real=0):
    """Run a case; return the seconds until the tested rank raised."""
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
    # Ends the case: the fake rank reads until the connection closes
    communicator.close_communicator(dist.group.WORLD, cancel=True)
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


# Cases in which rank 0 is the fake one: the real rank connects to it


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
    "another version": ADDRESS.pack(12345, bytes(16), 1, 0) + b"127.0.0.1",
    "too short": b"1234",
    "host that is no text": ADDRESS.pack(protocol_hash(), bytes(16), 1, 0) + b"\xff",
    "port that is closed": ADDRESS.pack(protocol_hash(), bytes(16), 1, 0) + b"127.0.0.1",
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


# Tests of memory use


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
    with pytest.raises(codec.PeerError, match="not requested"):
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
