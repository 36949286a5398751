"""Activation messages follow docs/spec/activation-messages.md, and hostile messages are errors without effect."""

import struct
import zlib

import numpy as np
import pytest

import codec
from support.activations import m_of
from support.tiers import N_DAMAGED

LOSSLESS = codec.Lossless()
KINDS = {"RAW": 0, "DELTA": 1, "MIXED": 2, "POISON": 3, "DIRECT": 4, "GRADIENT": 5}
FIELDS = ("magic", "version", "kind", "dtype", "entries", "edge", "session", "number", "count", "raw", "delta", "crc")
HEAD = "<4s4B6QII"
A = np.random.default_rng(1).standard_normal((3, 5, 20)).astype(np.float32)
MASK = (1 << 64) - 1


def parsed(message):
    """Parse a message by the specification; return its fields, samples, checksums and frames."""
    head = dict(zip(FIELDS, struct.unpack(HEAD, message[:64]), strict=False))
    n = head["count"]
    zeroed = message[:56] + bytes(8)
    assert head["crc"] == zlib.crc32(message[64 : 64 + 16 * n], zlib.crc32(zeroed))
    samples = struct.unpack_from(f"<{n}q", message, 64)
    checks = struct.unpack_from(f"<{n}Q", message, 64 + 8 * n)
    frames = message[64 + 16 * n :]
    assert len(frames) == head["raw"] + head["delta"]
    return head, samples, checks, frames[: head["raw"]], frames[head["raw"] :]


def built(samples=(), checks=(), raw=b"", delta=b"", sizes=(), **head):
    """Build a message by the specification. `head` and `sizes` (of frames) override fields."""
    fields = {
        "magic": b"CODA",
        "version": 1,
        "kind": 0,
        "dtype": 1,
        "entries": 0,
        "edge": 0,
        "session": 99,
        "number": 1,
        "count": len(samples),
        "raw": (sizes or (len(raw), 0))[0],
        "delta": (sizes or (0, len(delta)))[1],
        "crc": 0,
    } | head
    n = len(samples)
    start = struct.pack(HEAD, *fields.values(), 0)
    table = struct.pack(f"<{n}q{n}Q", *samples, *checks)
    start = start[:56] + struct.pack("<II", zlib.crc32(table, zlib.crc32(start)), 0)
    return start + table + raw + delta


def mix(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def next_check(row, frame, check):
    """Return the checksum of m after row number `row` of a frame, counted from 1."""
    return mix(mix(row * 0x9E3779B97F4A7C15 + codec.inspect(frame).checksum & MASK) ^ check) or 1


def exchange(sender, receiver, a, samples):
    message = sender.encode(a, samples)
    received = receiver.decode(message, samples)
    sender.commit()
    receiver.commit()
    return message, received


def test_messages_are_those_of_the_page():
    sender, receiver = (codec.ActivationDelta(first=LOSSLESS, edge=7, dtype="bfloat16") for _ in range(2))
    first = parsed(exchange(sender, receiver, A[:2], [5, -6])[0])
    head, samples, checks, raw, _ = first
    assert (head["magic"], head["version"], head["kind"], head["edge"]) == (b"CODA", 1, KINDS["RAW"], 7)
    assert (head["dtype"], head["entries"], head["number"], samples, checks) == (1, 1, 1, (5, -6), (0, 0))
    assert (codec.decode(raw) == A[:2]).all()
    known = [next_check(row, raw, 0) for row in (1, 2)]
    assert sender.checks([5, -6]).tolist() == known

    m = np.stack([m_of(sender)[s] for s in (5, -6)]).reshape(A[:2].shape)
    message, received = exchange(sender, receiver, A + 0.25, [5, 8, -6])
    head, samples, checks, raw, delta = parsed(message)
    assert (head["kind"], head["number"], head["session"]) == (KINDS["MIXED"], 2, first[0]["session"])
    assert (samples, checks) == ((5, 8, -6), (known[0], 0, known[1]))
    np.testing.assert_equal(received[1], codec.decode(raw)[0])
    np.testing.assert_equal(received[[0, 2]], m + codec.decode(delta))
    expected = [next_check(1, delta, known[0]), next_check(1, raw, 0), next_check(2, delta, known[1])]
    assert receiver.checks([5, 8, -6]).tolist() == expected

    kinds = [
        parsed(sender.encode(A[:1], [5]))[0]["kind"],
        parsed(sender.encode(A, None))[0]["kind"],
        parsed(sender.encode_gradient(A))[0]["kind"],
        parsed(sender.encode_gradient(A * np.nan))[0]["kind"],
    ]
    assert kinds == [KINDS[name] for name in ("DELTA", "DIRECT", "GRADIENT", "POISON")]


def test_a_second_implementation_can_send():
    receiver = codec.ActivationDelta()
    raw = codec.encode(A)
    np.testing.assert_equal(receiver.decode(built((1, 2, 3), (0, 0, 0), raw)), A)
    receiver.commit()
    delta = codec.encode(np.full_like(A[1:], 0.5), codec.Quantize(8))
    checks = next_check(2, raw, 0), next_check(3, raw, 0)
    received = receiver.decode(built((2, 3), checks, b"", delta, kind=1, number=2))
    np.testing.assert_equal(received, A[1:] + codec.decode(delta))


def state_of(side):
    return side.state_dict(), side.known(range(20)).tolist()


def refuse(receiver, message, samples=None, out=None):
    """Check that a message is refused, with state and output unchanged."""
    before = state_of(receiver)
    out = np.full_like(A, 7) if out is None else out
    with pytest.raises((codec.FrameError, codec.StateError, codec.ArgumentError)) as caught:
        receiver.decode(message, samples, out=out)
    assert (out == 7).all()
    receiver.commit()
    np.testing.assert_equal(state_of(receiver), before)
    return caught.value


@pytest.fixture
def sides():
    pair = codec.ActivationDelta(), codec.ActivationDelta()
    exchange(*pair, A, [1, 2, 3])
    return pair


@pytest.mark.parametrize("kind", ["RAW", "DELTA", "MIXED"])
def test_damaged_messages_change_nothing(sides, kind):
    """A message with flipped, missing or additional bytes is refused; then the intact message is accepted."""
    sender, receiver = sides
    samples = {"RAW": [4, 5, 6], "DELTA": [1, 2, 3], "MIXED": [1, 9, 3]}[kind]
    message = sender.encode(A + 0.1, samples)
    assert parsed(message)[0]["kind"] == KINDS[kind]
    rng = np.random.default_rng(0)
    for _ in range(N_DAMAGED):
        bad = bytearray(message)
        for at in rng.integers(0, len(bad), rng.integers(1, 4)):
            bad[at] ^= 1 << rng.integers(8)
        if bad != message:
            refuse(receiver, bytes(bad))
        refuse(receiver, message[: rng.integers(len(message))])
    refuse(receiver, message + b"\0")
    assert receiver.decode(message, samples).shape == A.shape


RAW = codec.encode(A)
DELTA = codec.encode(A, codec.Quantize(4))
HOSTILE = {
    "another magic": built((1, 2, 3), (0, 0, 0), RAW, magic=b"CODB"),
    "version 2": built((1, 2, 3), (0, 0, 0), RAW, version=2),
    "unknown kind": built((1, 2, 3), (0, 0, 0), RAW, kind=6),
    "another edge": built((1, 2, 3), (0, 0, 0), RAW, edge=1),
    "unknown dtype": built((1, 2, 3), (0, 0, 0), RAW, dtype=2),
    "dtype that is not the frame's": built((1, 2, 3), (0, 0, 0), RAW, dtype=3),
    "another dtype of entries": built((1, 2, 3), (0, 0, 0), RAW, entries=1),
    "unknown dtype of entries": built((1, 2, 3), (0, 0, 0), RAW, entries=3),
    "samples by the billion": built((1, 2, 3), (0, 0, 0), RAW, count=1 << 40),
    "count that overflows": built((1, 2, 3), (0, 0, 0), RAW, count=(1 << 60) + 3),
    "frame that overflows": built((1, 2, 3), (0, 0, 0), RAW, sizes=(MASK, 0)),
    "frames that overflow together": built((1, 2, 3), (0, 0, 0), RAW, sizes=(MASK, len(RAW) + 1)),
    "delta of unknown m": built((1, 2, 3), (5, 5, 5), b"", DELTA, kind=1),
    "fewer samples than rows": built((1, 2), (0, 0), RAW),
    "more samples than rows": built((1, 2, 3, 4), (0, 0, 0, 0), RAW),
    "no frame": built((1, 2, 3), (0, 0, 0)),
    "frames in the wrong order": built((1, 2, 3), (0, 0, 0), b"", RAW),
    "frame followed by bytes": built((1, 2, 3), (0, 0, 0), RAW + b"\0"),
    "no samples": built((), (), RAW),
    "scalar": built((1,), (0,), codec.encode(A[0, 0, 0])),
    "samples without values": built((1, 2, 3), (0, 0, 0), codec.encode(A[:, :0])),
    "gradient": built((), (), RAW, kind=5),
    "poison": built(kind=3),
    "poison with a frame": built((), (), RAW, kind=3),
    "direct with samples": built((1, 2, 3), (0, 0, 0), RAW, kind=4),
    "raw of kind delta": built((1, 2, 3), (0, 0, 0), RAW, kind=1),
    "nothing": b"",
    "a frame": RAW,
}


@pytest.mark.parametrize("message", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_messages_are_errors(sides, message):
    refuse(sides[1], message)


def test_small_message_with_a_huge_tensor_is_refused(sides):
    """A frame of 0.3 MB that declares 1 GiB of zeros is refused without out=, and not allocated."""
    message = built((1,), (0,), codec.encode(np.zeros((1, (1 << 28) + 1), np.float32)))
    before = state_of(sides[1])
    with pytest.raises(codec.LimitError, match="pass out="):
        sides[1].decode(message)
    np.testing.assert_equal(state_of(sides[1]), before)


@pytest.mark.parametrize("samples", [[1, 2], [1, 2, 4], [1, 2, 3, 4], [3, 2, 1]])
def test_other_samples_than_expected_are_refused(sides, samples):
    error = refuse(sides[1], sides[0].encode(A, [1, 2, 3]), samples)
    assert isinstance(error, codec.StateError)


def test_repeated_and_late_messages_are_refused(sides):
    sender, receiver = sides
    first, second = sender.encode(A, [1, 2, 3]), sender.encode(A, [4, 5, 6])
    receiver.decode(second)
    receiver.rollback()
    for message in (first, second):
        assert "repeated or out of order" in str(refuse(receiver, message))
    restarted = codec.ActivationDelta()
    receiver.decode(restarted.encode(A, [4, 5, 6]))
    receiver.rollback()
    assert "restarted" in str(refuse(receiver, sender.encode(A, [7, 8, 9])))


def test_wrong_output_is_refused(sides):
    message = sides[0].encode(A, [1, 2, 3])
    for out in (np.full(A.shape, 7, np.float64), np.full((3, 100), 7, np.float32)):
        refuse(sides[1], message, out=out)
    assert sides[1].decode(message, out=np.empty_like(A)).shape == A.shape


@pytest.mark.parametrize("samples", [[1, 2], [1, 2, 3, 4], [1, 2, 1 << 63], [1, 2, 3.5], [1, 2, "3"], 5, "abc"])
def test_sample_ids_that_do_not_fit_are_argument_errors(sides, samples):
    with pytest.raises(codec.ArgumentError):
        sides[0].encode(A, samples)


def test_bound_is_enough_for_any_message(sides):
    for samples in ([1, 2, 3], [1, 9, 3], [7, 8, 9], None):
        out = bytearray(sides[0].bound(A.shape))
        message = sides[0].encode(A, samples, out=out)
        assert sides[1].decode(message).shape == A.shape
    small = bytearray(70)
    before = state_of(sides[0])
    with pytest.raises(codec.ArgumentError, match="bound"):
        sides[0].encode(A, [1, 2, 3], out=small)
    np.testing.assert_equal(state_of(sides[0]), before)
