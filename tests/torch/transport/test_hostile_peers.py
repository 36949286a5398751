"""A rank sends wrong messages: the other one raises in time, and its tensor is unchanged."""

import os
import struct
import time
from contextlib import suppress
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

import codec
import codec.torch
from codec.torch.group import communicator
from support import flatcall
from support.faults import KILLED
from support.ranks import RankPool

N = 40_000
TIMEOUT = 3
LIMIT = TIMEOUT + 3  # seconds until the error, with margin for shared CPUs
_FRAMES, _NUMBERS = range(2)  # tags
OURS, THEIRS = 19_456, 20_544  # values of the slices of rank 0 and rank 1
_ROOM = 4 * N + 4096  # bytes; more than any frame needs


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, timeout=TIMEOUT) as ranks:
        yield ranks


def values():
    return torch.linspace(-1, 1, N)


class FakeRank:
    """Rank that writes and reads the messages of a channel by hand."""

    def __init__(self, rank):
        store = PrefixStore("codec", dist.group.WORLD.get_group_store())
        self._timeout = timedelta(seconds=TIMEOUT)
        self._pg = dist.ProcessGroupGloo(store, rank, 2, self._timeout)
        self._other, self._sent = 1 - rank, []

    def send(self, message, tag=_FRAMES):
        tensor = (
            torch.tensor(list(message), dtype=torch.uint8)
            if len(message) < 100
            else torch.frombuffer(bytearray(message), dtype=torch.uint8)
        )
        self._sent.append((tensor, self._pg.send([tensor], self._other, tag)))

    def receive(self, nbytes=_ROOM, tag=_FRAMES):
        room = torch.zeros(nbytes, dtype=torch.uint8)
        self._pg.recv([room], self._other, tag).wait(self._timeout)
        return room.numpy().tobytes()

    def numbers(self, *numbers, count=None):
        """Send a message of numbers."""
        count = len(numbers) if count is None else count
        self.send(struct.pack("<8q", count, *numbers, *[0] * (7 - len(numbers))), _NUMBERS)

    def receive_numbers(self):
        """Receive a message of numbers, and return them."""
        count, *numbers = struct.unpack("<8q", self.receive(64, _NUMBERS))
        return numbers[:count]

    def agree(self, times=1):
        """Answer messages of numbers with the same ones: agree to every request."""
        for _ in range(times):
            self.numbers(*self.receive_numbers())

    def frame(self, frame=b"", length=None, message_nbytes=None):
        message = struct.pack("<Q", (len(frame) if length is None else length) % (1 << 64)) + frame
        self.send(message[:message_nbytes])

    def vote(self, *verdict):
        """Send the vote of a rank other than 0, and receive the verdict."""
        self.numbers(*(verdict or (0, 1, 1, 1, 1)))
        self.receive_numbers()


def reduce(spec=codec.Lossless(), **how):  # noqa: B008
    """Return a call that reduces values(), and the values before and after."""

    def call():
        x = values()
        try:
            flatcall.all_reduce(x, spec, **({"op": "mean"} | how))
        finally:
            assert torch.equal(x, values())

    return call


def exchange():
    codec.torch.exchange([b"abc", b"def"])


def _version(act):
    def fake(k):
        k.receive_numbers()
        act(k)

    return reduce(), fake


def _asked(act):
    def fake(k):
        k.agree()
        signature = k.receive_numbers()[0]
        act(k, signature)

    return reduce(), fake


def _sent(frame=b"", spec=codec.Lossless(), **how):  # noqa: B008
    def fake(k):
        k.agree(2)
        k.frame(frame, **how)
        k.receive()
        k.vote()

    return reduce(spec, algorithm="all_gather"), fake


def _cut_behind_a_good_one(message_nbytes):
    """Send a frame, and in the next collective only the begin of the same message."""

    def call():
        reduced = values()
        flatcall.all_reduce(reduced, op="mean", algorithm="all_gather")
        assert torch.equal(reduced, values())
        reduce(algorithm="all_gather")()

    def fake(k):
        k.agree()
        for nbytes in (None, message_nbytes):
            k.agree()
            k.frame(good(), message_nbytes=nbytes)
            k.receive()
            k.vote()

    return call, fake


def _verdict(*verdict, n=N):
    def fake(k):
        k.agree(2)
        k.frame(good())
        k.receive()
        k.vote(*verdict)

    return reduce(algorithm="all_gather"), fake


def _exchanged(announced, *messages):
    def fake(k):
        k.agree(2)
        k.numbers(announced)
        k.receive_numbers()
        for message in messages:
            k.send(message)
        k.receive(3 + 8)
        k.vote(0, 1)

    return exchange, fake


def _raw(terms, sums):
    """Send uncompressed values; a slice has 20,480 or 19,520 of them in one chunk."""

    def fake(k):
        k.agree(2)
        k.send(bytes(terms))
        k.receive()
        k.send(bytes(sums))
        k.receive()
        k.vote()

    return reduce(algorithm="raw"), fake


def good():
    return codec.encode(values().numpy())


def flipped():
    frame = bytearray(good())
    frame[200] ^= 1
    return bytes(frame)


def encoded(*args, **how):
    return flatcall.encode(*args, **how)


def ones(dtype="f4", n=N):
    return np.ones(n, dtype)


PEER, FRAME = codec.PeerError, codec.FrameError
SHORT = {  # run by make test: each kind of message
    "version that differs": (PEER, lambda: _version(lambda k: k.numbers(12345))),
    "count of numbers that is negative": (PEER, lambda: _version(lambda k: k.numbers(1, count=-1))),
    "numbers that are short": (PEER, lambda: _version(lambda k: k.send(struct.pack("<q", 1), _NUMBERS))),
    "signature that differs": (PEER, lambda: _asked(lambda k, s: k.numbers(5, 0, 0, 0))),
    "frame that is garbage": (FRAME, lambda: _sent(os.urandom(5000))),
    "frame of another shape": (FRAME, lambda: _sent(encoded(ones(n=N - 1)))),
    "frame of another codec": (FRAME, lambda: _sent(encoded(ones(), codec.Sign()))),
    "frame with other parameters": (FRAME, lambda: _sent(encoded(ones(), codec.Quantize(2)), codec.Quantize(4))),
    "length beyond the message": (FRAME, lambda: _sent(good()[:-9], length=len(good()))),
    "length without a frame, behind a collective with one": (FRAME, lambda: _cut_behind_a_good_one(8)),
    "length beyond the room": (FRAME, lambda: _sent(good(), length=1 << 62)),
    "verdict that is negative": (PEER, lambda: _verdict(-5, 1, 1, 1, 1)),
    "verdict that is unknown": (PEER, lambda: _verdict(99, 1, 1, 1, 1)),
    "verdict of a rank that is not there": (PEER, lambda: _verdict(1, 1 << 40, 1, 1, 1)),
    "raw terms that lack a value": (FRAME, lambda: _raw(4 * OURS - 4, 4 * THEIRS)),
    "raw terms that lack all values": (FRAME, lambda: _raw(0, 4 * THEIRS)),
    "raw sums that lack a value": (FRAME, lambda: _raw(4 * OURS, 4 * THEIRS - 4)),
    "exchange of an impossible size": (FRAME, lambda: _exchanged(1 << 62)),
    "exchange of a message that is short": (FRAME, lambda: _exchanged(1000, b"x" * 300)),
    "exchange of a message that is empty": (FRAME, lambda: _exchanged(1000, b"")),
}
LONG = {  # run by make nightly: more of each kind, and cases that last until the timeout
    "count of numbers that is another": (PEER, lambda: _version(lambda k: k.numbers(1, 2))),
    "count of numbers that is huge": (PEER, lambda: _version(lambda k: k.numbers(1, count=1 << 62))),
    "count of numbers that is 0": (PEER, lambda: _version(lambda k: k.numbers())),
    "numbers that are empty": (PEER, lambda: _version(lambda k: k.send(b"", _NUMBERS))),
    "silence from the start": (PEER, lambda: (reduce(), lambda k: time.sleep(TIMEOUT + 1))),
    "answers that drip": (PEER, lambda: _version(drip)),
    "inability": (PEER, lambda: _asked(lambda k, s: k.numbers(s, 0, 0, 1))),
    "too few numbers": (PEER, lambda: _asked(lambda k, s: k.numbers(s))),
    "too many numbers": (PEER, lambda: _asked(lambda k, s: k.numbers(s, 2, 3, 4, 5, 6, 7))),
    "agreement twice": (PEER, lambda: _asked(lambda k, s: (k.numbers(s, 0, 0, 0), k.numbers(s, 0, 0, 0), k.vote(0)))),
    "silence instead of a frame": (PEER, lambda: (reduce(), lambda k: (k.agree(2), time.sleep(TIMEOUT + 1)))),
    "end of the process instead of a frame": (PEER, lambda: (reduce(), lambda k: (k.agree(2), os._exit(0)))),
    "no frame": (PEER, lambda: _sent(length=0)),
    "negative length": (FRAME, lambda: _sent(good(), length=-1)),
    "length of an empty frame": (FRAME, lambda: _sent(length=1000)),
    "length that is 5 too much": (FRAME, lambda: _sent(good(), length=len(good()) + 5)),
    "empty message, behind a collective with a frame": (PEER, lambda: _cut_behind_a_good_one(0)),
    "part of a header, behind a collective with a frame": (FRAME, lambda: _cut_behind_a_good_one(30)),
    "frame that is cut": (FRAME, lambda: _sent(good(), message_nbytes=500)),
    "length that is cut": (codec.CodecError, lambda: _sent(good(), message_nbytes=4)),
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
    "verdict with too few numbers": (PEER, lambda: _verdict(0)),
    "verdict of a negative rank": (PEER, lambda: _verdict(0, -1, 1, 1, 1)),
    "raw terms that lack half": (FRAME, lambda: _raw(2 * OURS, 4 * THEIRS)),
    "raw sums that lack all values": (FRAME, lambda: _raw(4 * OURS, 0)),
    "exchange of a negative size": (FRAME, lambda: _exchanged(-1)),
    "exchange that announces 64 GiB and sends 100 bytes": (codec.CodecError, lambda: _exchanged(1 << 36, b"x" * 100)),
    "exchange that announces 64 GiB and sends nothing": (PEER, lambda: _exchanged(1 << 36)),
    "scale that is NaN": (codec.CodecError, lambda: shared_scale(np.nan)),
    "scale that is negative": (codec.CodecError, lambda: shared_scale(-1e30)),
}


def drip(k):
    for _ in range(10):
        time.sleep(TIMEOUT / 8)
        k.send(bytes(8), _NUMBERS)


def shared_scale(scale):
    def fake(k):
        k.agree(2)
        k.frame(encoded(np.array([scale], "f4")))
        k.receive()
        k.frame(encoded(np.full(OURS, 5.0, "f4")))
        k.vote()

    return reduce(codec.Ternary(), algorithm="shared_scale"), fake


def _case(rank, size, table, name, real=0):
    """Return the error's name and the seconds on the rank that is tested."""
    wanted, make = table[name]
    call, fake = make()
    if rank != real:
        with suppress(RuntimeError):
            fake(FakeRank(rank))
        return None
    begin = time.monotonic()
    with pytest.raises(wanted):
        call()
    return time.monotonic() - begin


def _try(ranks, table, names, real=0):
    for name in names:
        ranks.new_group()
        ranks.start(_case, table, name, real)
        took = ranks.results([real])[0]
        assert took is not KILLED, name
        assert took < LIMIT, name
        if ranks.results([1 - real]) == [KILLED]:
            ranks.replace(1 - real)


class _Names:
    """Mapping that resolves names on the rank, since functions in tables cannot be pickled."""

    def __init__(self, name):
        self.name = name

    def __getitem__(self, key):
        return {"SHORT": SHORT, "LONG": LONG, "OF_RANK_0": OF_RANK_0}[self.name][key]


def test_wrong_message_is_an_error_and_changes_no_tensor(ranks):
    _try(ranks, _Names("SHORT"), SHORT)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LONG)
def test_more_wrong_messages_are_errors(ranks, name):
    _try(ranks, _Names("LONG"), [name])


def _verdict_of_rank_0(*verdict):
    def fake(k):
        k.agree(2)
        k.frame(good())
        k.receive()
        k.receive_numbers()
        k.numbers(*verdict)
        time.sleep(0.3)

    return reduce(algorithm="all_gather"), fake


OF_RANK_0 = {
    "negative": (PEER, lambda: _verdict_of_rank_0(-7, 0, 1, 1, 1)),
    "of a rank that is not there": (PEER, lambda: _verdict_of_rank_0(1, -(1 << 60), 1, 1, 1)),
}


def test_wrong_verdict_of_rank_0_is_an_error(ranks):
    _try(ranks, _Names("OF_RANK_0"), OF_RANK_0, real=1)


def _memory(rank, size):
    """Return the peak memory in KiB that an announcement of 64 GiB costs."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if rank:
        with suppress(RuntimeError):
            _exchanged(1 << 36, b"x" * 100)[1](FakeRank(rank))
        return 0
    with pytest.raises(codec.CodecError):
        exchange()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak


@pytest.mark.nightly
def test_announcement_of_a_large_frame_allocates_little(ranks):
    ranks.new_group()
    assert ranks.run(_memory)[0] < 64 << 10


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
