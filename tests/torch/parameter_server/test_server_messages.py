"""Parameter-server messages: hostile requests and replies raise errors; packed sums round-trip; damaged means raise."""

import contextlib
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.parameter_server import messages, sums
from support.parameter_servers import SOON, make_groups, workers_group
from support.tiers import NIGHTLY


def _hostile(rank, size):
    """Worker 1 sends hostile requests; the server must answer them with errors, and continue to serve worker 2."""
    from codec.torch.network.endpoint import endpoint_of

    if rank == 0:
        # Random bytes may register keys; the limits keep memory small
        limits = {"max_keys": 10, "max_key_nbytes": 1 << 16}
        server = codec.torch.ParameterServer([0], [1, 2], **limits, options=codec.options(timeout=SOON))
        server.serve()
        return server.stats()
    if rank == 2:
        with codec.torch.ParameterClient([0], options=codec.options(timeout=SOON)) as client:
            client.init({"a": (4,)})
            dist.barrier(workers_group())
            dist.barrier(workers_group())
            for step in itertools.count(1000):
                try:
                    return client.average(step, {"a": torch.ones(4)}, codec.Lossless())["a"].tolist()
                except codec.PeerError:  # until the server detects that worker 1 is gone
                    assert step < 1100
    dist.barrier(workers_group())
    link = endpoint_of(dist.group.WORLD).connect([0], messages.TAG, SOON)[0]

    def ask(*parts):
        link.send(parts, SOON)
        return link.receive(1 << 20, SOON).tobytes()

    rng = np.random.default_rng(0)
    good = {
        "init": messages.init_request([messages.Key("a", "float32", (4,))]).parts[0],
        "push": b"".join(messages.request(messages.PUSH, 7, [0], [codec.encode(torch.ones(4))]).parts),
        "abandon": messages.request(messages.ABANDON, 9).parts[0],
    }
    head = messages._REQUEST.pack
    wrong = [
        b"",
        b"x",
        head(99, 0, 0, 0, 0),
        head(messages.PULL, 99, 0, 1, 0) + bytes(4),
        head(messages.PULL, 0, 0, 1 << 31, 0),
        *(head(messages.PULL, 1, 0, 1, 7) + bytes(4) + spec for spec in (b"Sign(", b"Delta()", b"\xff", b"x" * 5000)),
        head(messages.PULL, 0, 0, 1, 7) + bytes(4) + b"Sign()",
        head(messages.PUSH, 0, 0, 1, 3) + bytes(4) + (1 << 63).to_bytes(8, "little"),
        head(messages.PUSH, 0, 0, 1, 3) + b"\xff\xff\xff\xff" + bytes(8),
        head(messages.PUSH, 0, 0, 2, 3) + bytes(8) + bytes(16),
        head(messages.INIT, 0, 0, 1, 0) + b"\x01\x00\x01\x09" + bytes(72) + b"a",
        head(messages.INIT, 0, 0, 1, 0) + b"\x01\x00\x01\x02" + (0).to_bytes(8, "little") + b"\xff" * 8 + b"a",
        head(messages.INIT, 0, 0, 1, 0) + b"\x01\x00\x01\x00\xff",
        head(messages.INIT, 0, 0, 1, 0) + b"\x00\x00\x01\x00",
        head(messages.INIT, 0, 0, (1 << 32) - 1, 0) + good["init"][16:] * 1000,
        head(messages.ABANDON, 0, 0, 0, -1),
        *(good[k][:n] for k in good for n in range(0, len(good[k]), 7)),
        *(good[k] + b"x" for k in good),
    ]
    for message in wrong:
        status = ask(message)[0]
        assert status in range(1, 7), (message, status)
    for _ in range(2000 if NIGHTLY else 200):  # random bytes: an error, or by chance a valid request
        message = bytearray(good[["init", "push"][rng.integers(2)]])
        for at in rng.integers(0, len(message), rng.integers(1, 4)):
            message[at] = rng.integers(256)
        if message[0] in (messages.PULL, messages.CLOSE):
            continue
        assert ask(message)[0] in range(7), bytes(message)
    with pytest.raises(codec.PeerError):
        ask(bytes(1 << 23))  # longer than any valid request
    dist.barrier(workers_group())
    return None


def test_hostile_requests_are_refused_and_the_server_goes_on(pools):
    pool = pools(3)
    pool.run(make_groups, 1)
    stats, _, mean = pool.run(_hostile)
    assert mean == [1.0] * 4
    assert stats.keys <= 10
    assert list(stats.lost_workers) == [1]


def _replies():
    """Return invalid replies to a pull of one key with four float32 values."""
    head, frame = messages._REPLY.pack, codec.encode(torch.ones(4))

    def value(body, nbytes=None):
        return head(0, 0, 0, 1) + (len(body) if nbytes is None else nbytes).to_bytes(8, "little") + body

    return [
        b"",
        head(0, 0, 0, 1)[:7],
        head(0, 0, 0, 2) + bytes(16),
        head(0, 0, 0, 1),
        value(b"abcd"),
        value(frame, (1 << 64) - 1),
        value(frame, len(frame) + 1),
        value(frame) + b"x",
        value(frame[:-1] + bytes([frame[-1] ^ 1])),
        value(codec.encode(torch.ones(5))),
        value(codec.encode(torch.ones(2, 2))),
        value(codec.encode(torch.ones(4, dtype=torch.bfloat16))),
        head(200, 0, 0, 0) + b"unknown status",
        head(1, 0, 0, 0) + b"\xff",
    ]


def _hostile_server(rank, size):
    """Rank 0 acts as a hostile server; each of its invalid replies must raise on the client."""
    from codec.torch.network.endpoint import endpoint_of

    good = messages.reply(values=[(b"", bytes(codec.encode(torch.ones(4))))])
    if rank == 0:
        link = endpoint_of(dist.group.WORLD).accept(1, messages.TAG, SOON)
        for parts in [messages.reply(ids=[7]), *([r] for r in _replies()), good, [bytes(1 << 20)]]:
            link.receive(1 << 20, SOON)
            with contextlib.suppress(codec.PeerError):  # the client closes a connection whose reply is too long
                link.send(parts, SOON)
        return
    client = codec.torch.ParameterClient([0], options=codec.options(timeout=SOON))
    client.init({"a": (4,)})
    for reply in _replies():
        try:
            found = client.pull(0, ["a"])
        except codec.CodecError:
            continue
        raise AssertionError(f"{reply} was read as {found}")
    assert client.pull(0, ["a"])["a"].tolist() == [1.0] * 4  # the client is still usable
    for _ in range(2):  # a reply longer than any tensor closes the connection
        with pytest.raises(codec.PeerError, match="server 0"):
            client.pull(0, ["a"])
    client.close()


def test_hostile_replies_raise_on_the_worker(pools):
    pools(2).run(_hostile_server)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 8, 127, 128, 1000])
def test_packed_sums_have_the_fewest_bits_and_return_exactly(workers):
    bits = sums.bits_per_sum(workers)
    assert 2 ** (bits - 1) < 2 * workers + 1 <= 2**bits
    values = np.random.default_rng(0).integers(-workers, workers + 1, 1001).astype(np.int32)
    packed = sums._pack(values, workers)
    assert len(packed) == -(-1001 * bits // 8)
    assert np.array_equal(sums._unpack(np.frombuffer(packed, np.uint8), 1001, workers, 1), values)


def test_damaged_averages_are_refused():
    frames = [codec.encode(torch.ones(100), codec.Ternary(scale=1.0)) for _ in range(2)]
    head, body = sums.encode_average(frames)
    value = np.frombuffer(head + body, np.uint8)

    def decode(value, shape=(100,), scale=1.0):
        return sums.exact_mean(np.asarray(value), shape, torch.float32, scale)

    assert torch.equal(decode(value), torch.ones(100))
    for wrong in (value[:-1], value[:11], np.append(value, np.uint8(0))):
        with pytest.raises(codec.FrameError):
            decode(wrong)
    for how in (dict(shape=(99,)), dict(scale=0.5)):
        with pytest.raises(codec.FrameError):
            decode(value, **how)
    for at, byte in ((0, 0), (7, 0xFF), (8, 2), (6, 0xFF)):
        changed = value.copy()
        changed[at] = byte
        with pytest.raises(codec.FrameError):
            decode(changed)
    # 100 sums, all 5; two workers' sums are at most 2
    packed = np.frombuffer(sums._HEAD.pack(2, 1.0, 1) + b"\xff" * 37 + b"\x0f", np.uint8)
    with pytest.raises(codec.FrameError, match="must be from -2 to 2"):
        decode(packed)
