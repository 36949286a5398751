"""Shards of tensors in updates: their bytes, their assembly in other layouts, and receivers that keep some of them."""

import hashlib
import itertools
import math
import struct
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest
import torch

import codec
from codec.weight_sync.updates.shards import Box, Shard, blocks, check_layouts, layouts
from support.weight_updates import equal, set_piece_nbytes, stepped


def split(tensors, parts):
    """Return the shards of tensors; `parts` has the number of shards in each dimension."""
    shards = {}
    for name, x in tensors.items():
        cuts = [
            [0, *(k * n // parts[d] for k in range(1, parts[d])), n] if d < len(parts) else [0, n]
            for d, n in enumerate(x.shape)
        ]
        for box in itertools.product(*(itertools.pairwise(c) for c in cuts)):
            shard = np.ascontiguousarray(x[tuple(slice(*ab) for ab in box)]).reshape([b - a for a, b in box])
            if shard.size or not x.size:
                shards[Shard(name, x.shape, tuple(a for a, _ in box))] = shard
    return shards


def model(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "qkv": rng.standard_normal((24, 10)).astype(ml_dtypes.bfloat16),
        "experts": rng.standard_normal((4, 6, 5)).astype(np.float32),
        "vocabulary": rng.integers(0, 256, (50, 7), dtype=np.uint8),
        "norm": rng.standard_normal(13).astype(np.float16),
        "step": np.array(3, np.int64),
        "empty": np.empty((0, 5), np.float32),
    }


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Make pieces so small that shards have several, whose ends are inside of rows."""
    set_piece_nbytes(monkeypatch, 56)


def test_blocks_are_the_values_in_order():
    for shape in ((), (5,), (3, 4), (2, 1, 3), (2, 3, 2, 2)):
        n = math.prod(shape)
        x = np.arange(n).reshape(shape)
        for begin, end in itertools.combinations_with_replacement(range(n + 1), 2):
            found = [x[box.slices].reshape(-1) for box in blocks(shape, begin, end)]
            assert [*itertools.chain(*found)] == [*range(begin, end)]


@pytest.mark.parametrize("parts", [(), (3,), (2, 2), (1, 3, 2)])
def test_receivers_assemble_tensors_from_shards(parts, tmp_path):
    """A receiver passes whole tensors, bit for bit, from a snapshot, from updates, and after a restart."""
    old = model()
    sender, loaded = codec.WeightSender(split(old, parts)), {}
    receiver = codec.WeightReceiver(folder=tmp_path)
    served = {name: np.zeros_like(x) for name, x in old.items()}
    receiver.apply(sender.snapshot(), loaded.update)
    receiver.reload(into=served)
    assert equal(old, loaded)
    assert equal(old, served)
    new = stepped(old, 1)
    update = sender.diff(split(new, parts))
    sender.commit()
    receiver.apply(bytes(update.data), into=served)
    assert equal(new, served)
    assert receiver.digest == sender.digest
    assert receiver.kinds == {name: (str(x.dtype), x.shape) for name, x in new.items()}
    receiver.close()
    with codec.WeightReceiver(folder=tmp_path) as again:
        assert again.unloaded == new.keys()
        assert equal(new, again.tensors())


def test_targets_are_boxes_of_tensors_in_any_layout():
    """Fused tensors, slices of tensor parallelism, experts and padded vocabularies are views with offsets."""
    old, new = model(), stepped(model(), 1)
    sender = codec.WeightSender(split(old, (4,)))
    fused = np.zeros((12, 10), ml_dtypes.bfloat16)  # rows 4 to 8 and 20 to 24 of qkv, then 4 rows of something else
    expert = torch.zeros(1, 6, 5)
    columns = torch.zeros(50, 4, dtype=torch.uint8)
    padded = np.full((64, 7), 255, np.uint8)
    into = {
        "qkv": [(fused[:4], (4, 0)), (fused[4:8], (20, 0))],
        "experts": (expert, (2, 0, 0)),
        "vocabulary": [(columns, (0, 3)), (padded[:50], (0, 0))],
    }
    only = codec.WeightReceiver(only=into)
    receiver = codec.WeightReceiver()
    for one, weights in ((sender.snapshot(), old), (sender.diff(split(new, (4,))), new)):
        for each in (receiver, only):
            each.apply(
                one, into=into if each is only else into | {name: old[name].copy() for name in old.keys() - into}
            )
            assert fused[:4].tobytes() == weights["qkv"][4:8].tobytes()
            assert fused[4:8].tobytes() == weights["qkv"][20:].tobytes()
            assert not fused[8:].view(np.uint16).any()
            assert (expert.numpy()[0] == weights["experts"][2]).all()
            assert (columns.numpy() == weights["vocabulary"][:, 3:]).all()
            assert (padded[:50] == weights["vocabulary"]).all()
            assert (padded[50:] == 255).all()
            for target in (fused, padded[:50]):
                target[...] = 0
            each.reload(into=into, names=into)
        sender.commit() if one is sender.pending else None
    assert receiver.digest == only.digest == sender.digest


def test_receiver_keeps_only_what_it_was_asked_for(tmp_path):
    old, new = model(), stepped(model(), 1)
    sender = codec.WeightSender(split(old, (4, 2)))
    box = {"qkv": (np.zeros((6, 5), ml_dtypes.bfloat16), (0, 0)), "norm": np.zeros(13, np.float16)}
    receiver = codec.WeightReceiver(folder=tmp_path, only=box, max_nbytes=200)
    receiver.apply(sender.snapshot(), into=box)
    assert receiver.kinds.keys() == box.keys()
    update = sender.diff(split(new, (4, 2)))
    receiver.apply(bytes(update.data), into=box)
    sender.commit()
    assert receiver.digest == sender.digest
    receiver.close()
    with pytest.raises(codec.StateError, match="another only="):
        codec.WeightReceiver(folder=tmp_path)
    receiver = codec.WeightReceiver(folder=tmp_path, only=box)
    assert receiver.digest == sender.digest
    box["qkv"][0][...] = 0
    receiver.reload(into=box)
    assert box["qkv"][0].tobytes() == np.ascontiguousarray(new["qkv"][:6, :5]).tobytes()
    with pytest.raises(codec.StateError, match="keeps 'qkv' in part"):
        receiver.reload(dict)
    with pytest.raises(codec.ArgumentError, match="excludes"):
        receiver.reload(into=box | {"qkv": np.zeros((24, 10), ml_dtypes.bfloat16)})
    with pytest.raises(codec.ArgumentError, match="not for a receiver with weights"):
        codec.WeightReceiver(old, only=box)
    receiver.close()


def test_names_select_whole_tensors_of_plain_updates():
    old, new = model(), stepped(model(), 1)
    sender, receiver = codec.WeightSender(old), codec.WeightReceiver(only=["norm", "step"])
    receiver.apply(sender.snapshot())
    receiver.apply(sender.diff(new))
    assert equal({name: new[name] for name in ("norm", "step")}, receiver.tensors())
    damaged = codec.WeightReceiver(only=["norm"])
    damaged.apply(codec.WeightSender(new).snapshot())
    with pytest.raises(codec.StateError):
        damaged.apply(sender.diff(new))


def test_update_without_a_change_that_its_digest_covers_is_refused():
    """A receiver with only= compares the digests of an update with those in all its frames."""
    old, new = model(), stepped(model(), 1)
    sender = codec.WeightSender(old)
    data = bytes(sender.diff(new).data)
    other = bytes(codec.WeightSender(old).diff(stepped(model(), 2)).data)
    head, size = bytearray(data[:128]), struct.unpack_from("<Q", data, 16)[0]
    head[80:96] = other[80:96]
    head[112:128] = hashlib.blake2b(bytes(head[:112]) + data[128 : 128 + size], digest_size=16).digest()
    receiver = codec.WeightReceiver(only=["norm"])
    receiver.apply(sender.snapshot())
    head[96:112] = data[96:112]
    with pytest.raises(codec.ChecksumError, match="do not have the digest"):
        receiver.apply(bytes(head) + data[128:])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((np.zeros((2, 5), np.float32), (23, 0)), "must be a box"),
        ((np.zeros((2, 5), np.float64), (0, 0)), "float64"),
        ((np.zeros(5, np.float32), (0,)), "must be a box"),
        ((np.zeros((2, 5), np.float32), (0, 0), 1), "a pair of a tensor and its offsets"),
        ((np.zeros((2, 5), np.float32), "ab"), "a pair of a tensor and its offsets"),
        ((np.zeros((2, 5), np.float32), (-1, 0)), "must be a box"),
    ],
)
def test_targets_that_are_no_boxes_are_rejected(wrong, message):
    x = np.ones((24, 10), np.float32)
    receiver = codec.WeightReceiver({"w": x})
    with pytest.raises(codec.ArgumentError, match=message):
        receiver.reload(into={"w": wrong})


def index_of(data):
    return bytearray(data[128 : 128 + struct.unpack_from("<Q", data, 16)[0]])


def with_index(data, index):
    """Return an update with another index of the same size."""
    head = bytearray(data[:112])
    digest = hashlib.blake2b(bytes(head) + index, digest_size=16).digest()
    return bytes(head) + digest + bytes(index) + data[128 + len(index) :]


def test_shards_are_as_the_specification_says():
    x = np.ones((4, 6), np.float32)
    data = bytes(codec.WeightSender(split({"w": x}, (2,))).snapshot().data)
    index = index_of(data)
    for begin, at in ((0, 0), (len(index) // 2, 2)):
        assert struct.unpack_from("<H1sBB6Q", index, begin) == (1, b"w", index[3], 0x82, 2, 6, 4, 6, at, 0)
    pieces = [(key, k, x[key.offsets[0] :][:2].tobytes()[56 * k :][:56]) for key in split({"w": x}, (2,)) for k in (0,)]
    total = 0
    for key, k, values in pieces:
        entry = struct.pack("<H1sBB6Q", 1, b"w", index[3], 0x82, 2, 6, 4, 6, *key.offsets)
        piece = codec.inspection.digest(np.frombuffer(values, np.uint8)).to_bytes(8, "little")
        piece = hashlib.blake2b(entry + struct.pack("<I", k) + piece, digest_size=16).digest()
        total += int.from_bytes(piece, "little")
    assert codec.Update(data).digest == (total % 2**128).to_bytes(16, "little")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (21, 5, "name the shapes"),
        (37, 1, "in common"),  # the first shard begins at row 1
        (37, 3, "is not a box"),
        (37, 2**64 - 1, "is not a box"),
        (21, 2**57, "name the shapes"),
        (21, 2**58, "more values than a tensor can have"),  # 6 * 2^58
        (45, 1, "is not a box"),
    ],
)
def test_hostile_shards_are_rejected(at, value, message):
    x = np.ones((4, 6), np.float32)
    data = bytes(codec.WeightSender(split({"w": x}, (2,))).snapshot().data)
    index = index_of(data)
    struct.pack_into("<Q", index, at, value)
    receiver = codec.WeightReceiver()
    with pytest.raises(codec.FrameError, match=message):
        receiver.apply(with_index(data, index))
    assert receiver.version is None


def test_shards_must_tile_their_tensor():
    """Counts of the shards that hold each value of a small tensor say the same, also if one shard is moved."""
    rng, whole = np.random.default_rng(0), Box((0, 0, 0), (2, 3, 4))
    found = set()
    for _ in range(60):
        shards = split({"w": np.empty(whole.shape)}, rng.integers(1, 3, 3))
        boxes = {key: x.shape for key, x in shards.items()}
        key, shape = list(boxes.items())[rng.integers(len(boxes))]
        if rng.integers(3):
            del boxes[key]
            at = tuple(int(rng.integers(n - m + 1)) for n, m in zip(whole.shape, shape, strict=True))
            boxes[Shard("w", whole.shape, at)] = shape
        counts = np.zeros(whole.shape, int)
        for key, shape in boxes.items():
            counts[Box(key.offsets, shape).slices] += 1
        missing = counts.size > sum(map(math.prod, boxes.values()))
        message = None if (counts == 1).all() else "do not cover 'w'" if missing else "in common"
        found.add(message)
        with nullcontext() if message is None else pytest.raises(ValueError, match=message):
            check_layouts(layouts(boxes))
    assert found == {None, "do not cover 'w'", "in common"}


def test_layouts_know_which_boxes_they_cover():
    boxes = {Shard("w", (4, 4), at): (2, 2) for at in ((0, 0), (2, 0), (0, 2), (2, 2))}
    assert layouts(boxes)["w"].covers(Box((0, 0), (4, 4)))
    assert not layouts(dict([*boxes.items()][:3]))["w"].covers(Box((0, 0), (4, 4)))
    assert layouts(boxes | {Shard("w", (4, 4), (1, 1)): (0, 1)})["w"].covers(Box((0, 0), (4, 4)))
    with pytest.raises(ValueError, match="name the shapes"):
        layouts(boxes | {"w": (4, 5)})


def test_many_shards_are_checked_in_linear_time():
    """A small hostile update can name so many shards that comparing each pair would take minutes."""
    n = 30_000
    boxes = {Shard("w", (n,), (k,)): (1,) for k in range(n)}
    check_layouts(layouts(boxes))
    with pytest.raises(ValueError, match="in common"):
        check_layouts(layouts(boxes | {Shard("w", (n,), (5,)): (2,)}))
