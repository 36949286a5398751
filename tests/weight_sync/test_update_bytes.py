"""Weight updates follow their specification, and damaged or hostile ones are rejected."""

import hashlib
import struct

import ml_dtypes
import numpy as np
import pytest

import codec
from support.weight_updates import versions


@pytest.fixture(scope="module")
def chain():
    return versions(4)


def rebuilt(update, change):
    """Return an update with header and index changed, and the digest recomputed."""
    data = bytearray(update)
    size = struct.unpack_from("<Q", data, 16)[0]
    index = data[128 : 128 + size]
    change(data, index)
    struct.pack_into("<Q", data, 16, len(index))
    data[112:128] = hashlib.blake2b(bytes(data[:112]) + index, digest_size=16).digest()
    return bytes(data[:128] + index + data[128 + size :])


def test_update_is_as_its_specification_says(chain):
    """An update, read by docs/spec/weight-updates.md only, has the specified contents."""
    all_weights, updates = chain
    data = updates[0]
    magic, form, count, size, nbytes, version, base = struct.unpack_from("<8sIIQQQQ", data)
    old, new = all_weights[:2]
    changed = [name for name, x in old.items() if x.tobytes() != new[name].tobytes()]
    assert 0 < len(changed) < len(old)
    assert (magic, form, count, nbytes) == (b"\x89CWU\r\n\x1a\n", 4, len(changed), len(data))
    assert (version, base) == (1, 0)
    assert struct.unpack_from("<QQ", data, 48) == (len(old), sum(x.nbytes for x in old.values()))
    assert data[112:128] == hashlib.blake2b(data[:112] + data[128 : 128 + size], digest_size=16).digest()
    at, frames = 128, 128 + size
    for name in changed:
        x = old[name]
        (length,) = struct.unpack_from("<H", data, at)
        assert data[at + 2 : at + 2 + length] == name.encode()
        at += 2 + length
        _, rank = struct.unpack_from("<BB", data, at)
        assert struct.unpack_from(f"<{rank}Q", data, at + 2) == x.shape
        at += 2 + 8 * rank
        for _ in range(-(-x.nbytes // (1 << 25))):
            (length,) = struct.unpack_from("<I", data, at)
            if length:
                info = codec.inspect(data[frames : frames + length])
                assert info.tensor_nbytes == x.nbytes
            at, frames = at + 4, frames + length
    assert (at, frames) == (128 + size, len(data))


def test_every_damaged_byte_is_found(chain):
    """Each byte is covered by a check, so an update with any byte changed leaves the weights as they were."""
    all_weights, updates = chain
    receiver = codec.WeightReceiver(all_weights[0])
    digest = receiver.digest
    data = bytearray(updates[0])
    for at in {*range(128), *range(128, len(data), 41), len(data) - 1}:
        data[at] ^= 1 << at % 8
        with pytest.raises((codec.FrameError, codec.StateError)):
            receiver.apply(bytes(data))
        data[at] ^= 1 << at % 8
    assert (receiver.version, receiver.digest) == (0, digest)
    receiver.verify()
    receiver.apply(bytes(data))


def test_truncated_and_longer_updates_are_found(chain):
    _, updates = chain
    for size in (0, 1, 7, 8, 127, 128, 129, 500, len(updates[0]) - 1):
        with pytest.raises(codec.FrameError) as e:
            codec.Update(updates[0][:size])
        assert e.value.code == codec.Status.TRUNCATED
    with pytest.raises(codec.FrameError, match="were given"):
        codec.Update(updates[0] + b"\0")
    with pytest.raises(codec.FrameError, match="not an update"):
        codec.Update(b"PK" + updates[0][2:])
    with pytest.raises(codec.UnsupportedError, match="format 5"):
        codec.Update(updates[0][:8] + b"\5" + updates[0][9:])


def hostile():
    """Yield names and hostile changes of header and index."""

    def put(form, at, value):
        return lambda head, index: struct.pack_into(form, head, at, value)

    def put_index(form, at, value):
        return lambda head, index: struct.pack_into(form, index, at, value)

    yield "more tensors than entries", put("<I", 12, 2**32 - 1)
    yield "fewer tensors than entries", put("<I", 12, 2)
    yield "base after version", put("<Q", 40, 5)
    yield "base equal to version", put("<Q", 40, 1)
    yield "no base with a digest of one", put("<Q", 40, 2**64 - 1)
    yield "version too large", put("<Q", 32, 2**64 - 1)
    yield "weights of another number of tensors", put("<Q", 48, 13)
    yield "weights of fewer tensors than the index", put("<Q", 48, 1)
    yield "weights of another size", put("<Q", 56, 2**60)
    yield "weights smaller than their tensors", put("<Q", 56, 1)
    yield "tensor without a frame", put_index("<I", 45, 0)
    yield "name of no bytes", put_index("<H", 0, 0)
    yield "name longer than the index", put_index("<H", 0, 65535)
    yield "name that is not UTF-8", put_index("<B", 2, 255)
    yield "unknown dtype", put_index("<B", 27, 250)
    yield "rank too large", put_index("<B", 28, 9)
    yield "shape too large", put_index("<Q", 29, 2**63)
    yield "shape whose size overflows", put_index("<Q", 29, 2**64 - 1)
    yield "frame longer than the update", put_index("<I", 45, 2**32 - 1)
    yield "frame shorter than it is", put_index("<I", 45, 10)
    yield "index with more bytes", lambda head, index: index.extend(b"\0" * 9)


@pytest.mark.parametrize(("name", "change"), list(hostile()), ids=lambda x: x if isinstance(x, str) else "")
def test_hostile_headers_are_rejected(chain, name, change):
    all_weights, updates = chain
    receiver = codec.WeightReceiver(all_weights[0])
    with pytest.raises((codec.FrameError, codec.StateError)):
        receiver.apply(rebuilt(updates[0], change))
    receiver.verify()
    assert receiver.version == 0


def test_names_that_occur_twice_are_rejected():
    x = np.ones(3, np.float32)
    data = bytes(codec.WeightSender({"aa": x, "ab": x}).snapshot().data)
    with pytest.raises(codec.FrameError, match="twice"):
        codec.Update(rebuilt(data, lambda head, index: index.__setitem__(slice(2, 4), b"ab")))


@pytest.mark.parametrize("shape", [(0, 1 << 60), (1 << 63, 0), (0, (1 << 64) - 1), (1 << 40, 0, 1 << 20)])
def test_shapes_that_no_array_can_have_are_rejected(shape):
    """A tensor without values needs no bytes, whatever its other dimensions."""
    data = bytes(codec.WeightSender({"w": np.empty((0,) * len(shape), np.float32)}).snapshot().data)
    with pytest.raises(codec.FrameError, match="more values than a tensor can have"):
        codec.Update(rebuilt(data, lambda head, index: struct.pack_into(f"<{len(shape)}Q", index, 5, *shape)))


def test_frames_of_other_codecs_and_tensors_are_rejected():
    """Frames in an update are lossless, of the dtype and size that the index names."""
    x = np.linspace(0, 1, 3000, dtype=np.float32)
    data = bytes(codec.WeightSender({"x": x}).snapshot().data)
    for frame in (
        codec.encode(x, codec.Quantize(8)),
        codec.encode(x.view(np.int32)),
        codec.encode(x[:-1]),
        codec.encode(np.zeros(10)),
    ):
        size = struct.unpack_from("<Q", data, 16)[0]

        def change(head, index, frame=frame, size=size):
            struct.pack_into("<I", index, len(index) - 4, len(frame))
            struct.pack_into("<Q", head, 24, 128 + size + len(frame))

        crafted = rebuilt(data, change)[: 128 + size] + frame
        receiver = codec.WeightReceiver()
        with pytest.raises(codec.FrameError):
            receiver.apply(crafted)
        assert receiver.version is None


def test_snapshot_beyond_the_limit_is_rejected_before_it_is_decoded():
    data = bytes(codec.WeightSender({"x": np.zeros(1 << 20, np.float32)}).snapshot().data)
    assert len(data) < 50_000
    with pytest.raises(codec.LimitError, match="more than max_nbytes, 1000000"):
        codec.WeightReceiver(max_nbytes=10**6).apply(data)
    codec.WeightReceiver(max_nbytes=1 << 22).apply(data)


def test_names_that_an_index_cannot_hold_are_rejected():
    for name in ("", "x" * 65536, "\ud800", 5):
        with pytest.raises(codec.ArgumentError, match="name must be a str"):
            codec.WeightSender({name: np.ones(1)})


def test_views_give_the_dtype_of_packed_values():
    bits = np.arange(100, dtype=np.uint16)
    sender = codec.WeightSender({"x": codec.view(bits, "bfloat16")})
    assert sender.snapshot().tensors == {"x": ("bfloat16", (100,))}
    receiver = codec.WeightReceiver()
    receiver.apply(sender.snapshot())
    assert dict(receiver.tensors())["x"].dtype == ml_dtypes.bfloat16
