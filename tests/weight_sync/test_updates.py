"""Updates of weights: values, versions, failures, and bytes that are damaged or hostile."""

import hashlib
import struct

import ml_dtypes
import numpy as np
import pytest

import codec
from codec.weight_sync import update as format_of
from support.weight_updates import equal, stepped, versions, weights


@pytest.fixture(scope="module")
def chain():
    return versions(4)


def test_updates_reproduce_weights_of_all_dtypes_to_the_bit(chain):
    all_weights, updates = chain
    receiver = codec.WeightReceiver(all_weights[0])
    for expected, update in zip(all_weights[1:], updates, strict=True):
        receiver.apply(update)
        assert equal(expected, receiver.tensors())
    assert receiver.version == 3


def test_snapshot_starts_a_receiver_without_weights(chain):
    all_weights, _ = chain
    sender = codec.WeightSender(all_weights[2], version=7)
    receiver = codec.WeightReceiver()
    assert receiver.version is None
    receiver.apply(sender.snapshot().data)
    assert (receiver.version, receiver.digest) == (7, sender.digest)
    assert equal(all_weights[2], receiver.tensors())
    assert receiver.kinds["model.embed_tokens.weight"] == ("bfloat16", (50, 24))


def test_load_gets_full_tensors_of_changed_names_only():
    old = weights()
    new = {**old, "model.layers.0.mlp.experts.1.w1.weight": old["model.layers.0.mlp.experts.1.w1.weight"].copy()}
    new["model.layers.0.mlp.experts.1.w1.weight"][3, 4] = 9
    update = codec.WeightSender(old).diff(new)
    given = {}
    codec.WeightReceiver(old).apply(update, load=lambda tensors: given.update(tensors))
    assert update.changed == ("model.layers.0.mlp.experts.1.w1.weight",)
    assert equal({name: new[name] for name in update.changed}, given)


def test_loaded_tensors_do_not_alias_the_base(chain):
    all_weights, updates = chain
    receiver, given = codec.WeightReceiver(all_weights[0]), {}
    receiver.apply(updates[0], load=lambda tensors: given.update(tensors))
    for x in given.values():
        x.view(np.uint8)[...] = 0
    receiver.verify()
    receiver.apply(updates[1])
    assert equal(all_weights[2], receiver.tensors())


def test_base_advances_only_with_commit():
    """The changes of an update that was lost are in the next one."""
    first, second, third = (weights(), stepped(weights(), 1), stepped(stepped(weights(), 1), 2))
    sender, receiver = codec.WeightSender(first), codec.WeightReceiver(first)
    lost = sender.diff(second)
    assert (sender.version, sender.pending) == (0, lost)
    sender.abandon()
    update = sender.diff(third)
    assert (update.base, update.version) == (0, 2)  # the version of the lost update is not used again
    receiver.apply(update)
    sender.commit(2)
    assert equal(third, receiver.tensors())
    assert sender.digest == receiver.digest


def test_commit_rejects_another_version_and_a_missing_update():
    sender = codec.WeightSender(weights())
    with pytest.raises(codec.StateError, match="no update is pending"):
        sender.commit()
    sender.diff(stepped(weights(), 1))
    with pytest.raises(codec.StateError, match="update to version 1 is pending, not one to version 2"):
        sender.commit(2)
    assert sender.version == 0


def test_snapshot_after_a_gap_brings_a_receiver_of_other_weights_back():
    sender, receiver = codec.WeightSender(weights()), codec.WeightReceiver(weights())
    receiver.apply(sender.diff(stepped(weights(), 1)))  # the confirmation is lost
    sender.abandon()
    new = stepped(weights(), 2)
    update = sender.diff(new)
    with pytest.raises(codec.StateError, match="needs version 0 as its base, version 1 is here"):
        receiver.apply(update)
    full = sender.diff(new, full=True)
    receiver.apply(full)
    sender.commit(full.version)
    assert full.base is None
    assert equal(new, receiver.tensors())
    assert sender.digest == receiver.digest
    receiver.apply(sender.diff(stepped(new, 3)))


def test_snapshot_may_change_names_dtypes_and_shapes():
    sender, receiver = codec.WeightSender(weights()), codec.WeightReceiver(weights())
    new = {"a": np.arange(10, dtype=np.int16), "model.step": np.zeros((2, 2), np.float32)}
    with pytest.raises(codec.ArgumentError, match=r"'a' is int16 of shape \(10,\), the base has no such tensor"):
        sender.diff(new)
    update = sender.diff(new, full=True)
    for x in (receiver, sender):
        x.apply(update) if x is receiver else x.commit()
    assert equal(new, receiver.tensors())
    receiver.apply(sender.diff({"a": np.arange(1, 11, dtype=np.int16), "model.step": np.ones((2, 2), np.float32)}))


@pytest.mark.parametrize("stream", [False, True])
def test_missing_and_repeated_tensors_are_rejected(stream):
    old = weights()
    sender = codec.WeightSender(old)
    most = dict(list(old.items())[1:])
    with pytest.raises(codec.ArgumentError, match="1 tensors of the base were not given: 'model"):
        sender.diff(iter(most.items()) if stream else most)
    with pytest.raises(codec.ArgumentError, match="given twice"):
        sender.diff([*old.items(), ("model.step", old["model.step"])])
    for wrong in (5, "weights", np.ones(3), [3]):
        with pytest.raises((codec.ArgumentError, TypeError)):
            sender.diff(wrong)
    assert (sender.version, sender.pending) == (0, None)


def test_generator_may_reuse_its_memory_and_any_order():
    old, new = weights(), stepped(weights(), 5)
    buffer = np.empty(1 << 14, np.uint8)

    def tensors():
        for name, x in reversed(new.items()):
            part = buffer[: x.nbytes]
            part[:] = np.frombuffer(x.tobytes(), np.uint8)
            yield name, part.view(x.dtype).reshape(x.shape)

    receiver = codec.WeightReceiver(old)
    receiver.apply(codec.WeightSender(old).diff(tensors()))
    assert equal(new, receiver.tensors())


def test_doubled_and_reordered_updates_change_nothing(chain):
    all_weights, updates = chain
    receiver = codec.WeightReceiver(all_weights[0])
    calls = []
    for update, error in (
        (updates[1], "needs version 1 as its base, version 0 is here"),
        (updates[0], None),
        (updates[0], "applied already"),
        (updates[2], "needs version 2 as its base, version 1 is here"),
        (updates[1], None),
        (updates[0], "older than version 2"),
    ):
        before = receiver.version, receiver.digest
        if error is None:
            receiver.apply(update)
            continue
        with pytest.raises(codec.StateError, match=error):
            receiver.apply(update, load=lambda tensors: calls.append(dict(tensors)))
        assert (receiver.version, receiver.digest) == before
    assert not calls
    assert equal(all_weights[2], receiver.tensors())


def test_update_for_the_same_version_of_other_weights_is_rejected(chain):
    all_weights, updates = chain
    receiver = codec.WeightReceiver(stepped(all_weights[0], 99))
    with pytest.raises(codec.StateError, match="version 0 is here with other values"):
        receiver.apply(updates[0])
    receiver.verify()


def test_failure_of_load_restores_the_version_before(chain):
    """A server that fails while it loads gets the tensors of the version that it served."""
    all_weights, updates = chain
    receiver = codec.WeightReceiver(all_weights[0])
    served = dict(all_weights[0])
    calls = []

    def load(tensors):
        calls.append(None)
        for k, (name, x) in enumerate(tensors):
            if len(calls) == 1 and k == 5:
                raise RuntimeError("out of memory")
            served[name] = x

    with pytest.raises(RuntimeError, match="out of memory"):
        receiver.apply(updates[0], load=load)
    assert len(calls) == 2
    assert equal(all_weights[0], served)
    assert (receiver.version, receiver.staged) == (0, None)
    receiver.apply(updates[0], load=load)
    assert equal(all_weights[1], served)


def test_staging_writes_nothing_until_commit(chain):
    all_weights, updates = chain
    receiver = codec.WeightReceiver(all_weights[0])
    receiver.stage(updates[0])
    assert receiver.version == 0
    assert equal(all_weights[0], receiver.tensors())
    assert equal(
        {n: all_weights[1][n] for n in ("model.step", "model.nan")}, receiver.updated(["model.step", "model.nan"])
    )
    receiver.discard()
    with pytest.raises(codec.StateError, match="no update is staged"):
        receiver.commit()
    with pytest.raises(codec.ArgumentError, match="no tensor 'x'"):
        list(receiver.tensors(["x"]))
    receiver.verify()


@pytest.mark.parametrize("folder", [False, True])
def test_interrupted_commit_is_completed(chain, folder, tmp_path, monkeypatch):
    """Ctrl-C inside a commit leaves a receiver that completes the update at its next use."""
    all_weights, updates = chain
    for stop in range(1, 8, 3):
        path = tmp_path / str(stop) if folder else None
        receiver = codec.WeightReceiver(all_weights[0], folder=path)
        receiver.stage(updates[0])
        calls = []
        original = receiver._base.write

        def write(out, decode, calls=calls, stop=stop, original=original):
            calls.append(None)
            if len(calls) == stop:
                raise KeyboardInterrupt
            original(out, decode)

        monkeypatch.setattr(receiver._base, "write", write)
        with pytest.raises(KeyboardInterrupt):
            receiver.commit()
        assert receiver.version == 1
        assert equal(all_weights[1], receiver.tensors())
        receiver.verify()
        receiver.close()


def test_memory_that_something_else_has_changed_is_found(chain):
    all_weights, updates = chain
    receiver = codec.WeightReceiver(all_weights[0])
    receiver._base.weights["model.layers.0.fp8.weight"].memory[5] ^= 1
    with pytest.raises(codec.StateError, match=r"1 tensors are damaged in memory: 'model.layers.0.fp8.weight'"):
        receiver.verify()
    with pytest.raises(codec.CodecError):
        receiver.apply(updates[0])
    assert receiver.version == 0


def test_tensors_of_several_pieces(monkeypatch):
    monkeypatch.setattr(format_of, "PIECE_NBYTES", 1 << 12)
    monkeypatch.setattr("codec.weight_sync.weights.PIECE_NBYTES", 1 << 12)
    rng = np.random.default_rng(0)
    old = {"x": rng.standard_normal(5000).astype(np.float32), "y": np.zeros(1024, np.float32)}
    new = {"x": old["x"].copy(), "y": old["y"]}
    new["x"][4096] = 1
    sender, receiver = codec.WeightSender(old), codec.WeightReceiver()
    receiver.apply(sender.snapshot())
    update = sender.diff(new)
    assert [a < b for a, b in update.entries["x"].frames] == [False] * 4 + [True]
    receiver.apply(update)
    assert equal(new, receiver.tensors())


def test_torch_tensors_on_both_sides():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16)).to(torch.bfloat16)
    served = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16)).to(torch.bfloat16)
    sender, receiver = codec.WeightSender(model), codec.WeightReceiver()

    def load(tensors):
        served.load_state_dict(dict(tensors), strict=False)

    receiver.apply(sender.snapshot(), load=load, like=torch.empty(0))
    with torch.no_grad():
        model[0].weight[3] *= 2
        model[1].num_batches_tracked += 1
    receiver.apply(sender.diff(model), load=load, like=torch.empty(0))
    for name, x in model.state_dict().items():
        assert x.dtype == served.state_dict()[name].dtype
        assert torch.equal(x, served.state_dict()[name]), name


class Exported:
    """Array that other libraries can read by DLPack only, as those of JAX."""

    def __init__(self, x):
        self._x = x

    def __dlpack__(self, **kwargs):
        return self._x.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()


def test_arrays_of_other_libraries_are_read_by_dlpack():
    old = {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}
    new = {"w": old["w"] * 2}
    exported = {name: Exported(x) for name, x in new.items()}
    receiver = codec.WeightReceiver({name: Exported(x) for name, x in old.items()})
    receiver.apply(codec.WeightSender(old).diff(exported))
    assert equal(new, receiver.tensors())


def test_updates_do_not_depend_on_threads_or_place(chain, tmp_path):
    all_weights, updates = chain
    sender = codec.WeightSender(all_weights[0], options=codec.options(threads=1))
    assert sender.diff(all_weights[1], file=tmp_path / "u").data == updates[0]
    assert (tmp_path / "u").read_bytes() == updates[0]
    assert [p.name for p in tmp_path.iterdir()] == ["u"]


def test_failed_diff_leaves_no_file(tmp_path):
    sender = codec.WeightSender(weights())

    def tensors():
        yield from list(weights().items())[:3]
        raise RuntimeError("lost rank")

    with pytest.raises(RuntimeError, match="lost rank"):
        sender.diff(tensors(), file=tmp_path / "u")
    with pytest.raises(codec.ArgumentError, match="cannot be written"):
        sender.diff(weights(), file=tmp_path / "no" / "u")
    assert list(tmp_path.iterdir()) == []


# Bytes


def rebuilt(update, change):
    """Return an update whose header and index were changed, with a right digest."""
    data = bytearray(update)
    size = struct.unpack_from("<Q", data, 16)[0]
    index = data[96 : 96 + size]
    change(data, index)
    struct.pack_into("<Q", data, 16, len(index))
    data[80:96] = hashlib.blake2b(bytes(data[:80]) + index, digest_size=16).digest()
    return bytes(data[:96] + index + data[96 + size :])


def test_update_is_as_its_specification_says(chain):
    """Read an update by docs/spec/weight-updates.md alone."""
    all_weights, updates = chain
    data = updates[0]
    magic, form, count, size, nbytes, version, base = struct.unpack_from("<8sIIQQQQ", data)
    assert (magic, form, count, nbytes) == (b"\x89CWU\r\n\x1a\n", 1, len(all_weights[0]), len(data))
    assert (version, base) == (1, 0)
    assert data[80:96] == hashlib.blake2b(data[:80] + data[96 : 96 + size], digest_size=16).digest()
    at, frames = 96, 96 + size
    for name, x in all_weights[0].items():
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
    assert (at, frames) == (96 + size, len(data))


def test_every_damaged_byte_is_found(chain):
    """Each byte is covered by a check, so an update with any byte changed leaves the weights as they were."""
    all_weights, updates = chain
    receiver = codec.WeightReceiver(all_weights[0])
    digest = receiver.digest
    data = bytearray(updates[0])
    for at in {*range(96), *range(96, len(data), 41), len(data) - 1}:
        data[at] ^= 1 << at % 8
        with pytest.raises((codec.FrameError, codec.StateError)):
            receiver.apply(bytes(data))
        data[at] ^= 1 << at % 8
    assert (receiver.version, receiver.digest) == (0, digest)
    receiver.verify()
    receiver.apply(bytes(data))


def test_truncated_and_longer_updates_are_found(chain):
    _, updates = chain
    for size in (0, 1, 7, 8, 95, 96, 97, 500, len(updates[0]) - 1):
        with pytest.raises(codec.FrameError) as e:
            codec.Update(updates[0][:size])
        assert e.value.code == codec.Status.TRUNCATED
    with pytest.raises(codec.FrameError, match="were given"):
        codec.Update(updates[0] + b"\0")
    with pytest.raises(codec.FrameError, match="not an update"):
        codec.Update(b"PK" + updates[0][2:])
    with pytest.raises(codec.UnsupportedError, match="format 2"):
        codec.Update(updates[0][:8] + b"\2" + updates[0][9:])


def hostile():
    """Yield names and changes of header and index that no sender makes."""

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
            struct.pack_into("<Q", head, 24, 96 + size + len(frame))

        crafted = rebuilt(data, change)[: 96 + size] + frame
        receiver = codec.WeightReceiver()
        with pytest.raises(codec.FrameError):
            receiver.apply(crafted)
        assert receiver.version is None


def test_snapshot_beyond_the_limit_is_rejected_before_it_is_decoded():
    data = bytes(codec.WeightSender({"x": np.zeros(1 << 20, np.float32)}).snapshot().data)
    assert len(data) < 50_000
    with pytest.raises(codec.LimitError, match="max_nbytes is 1000000"):
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
