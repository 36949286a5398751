"""WeightSender and WeightReceiver: received values are exact, versions advance, failures change nothing."""

import numpy as np
import pytest

import codec
from support.weight_updates import equal, set_piece_nbytes, stepped, versions, weights


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
    assert list(update.tensors) == ["model.layers.0.mlp.experts.1.w1.weight"]
    assert equal({name: new[name] for name in update.tensors}, given)


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
    """The sender's base advances only with commit(), so the next update includes the changes of a lost one."""
    first, second, third = (weights(), stepped(weights(), 1), stepped(stepped(weights(), 1), 2))
    sender, receiver = codec.WeightSender(first), codec.WeightReceiver(first)
    lost = sender.diff(second)
    assert (sender.version, sender.pending) == (0, lost)
    sender.abandon()
    update = sender.diff(third)
    # The new update has a new version number, 2, since number 1 was lost
    assert (update.base, update.version) == (0, 2)
    receiver.apply(update)
    sender.commit(2)
    assert equal(third, receiver.tensors())
    assert sender.digest == receiver.digest


def test_commit_rejects_another_version_and_a_missing_update():
    sender = codec.WeightSender(weights())
    with pytest.raises(codec.StateError, match="no update is pending"):
        sender.commit()
    sender.diff(stepped(weights(), 1))
    with pytest.raises(codec.StateError, match="update to version 1 is pending, but version=2 was passed"):
        sender.commit(2)
    assert sender.version == 0


def test_snapshot_after_a_gap_brings_a_receiver_of_other_weights_back():
    sender, receiver = codec.WeightSender(weights()), codec.WeightReceiver(weights())
    # Applied, but the sender never commits, as if the confirmation was lost
    receiver.apply(sender.diff(stepped(weights(), 1)))
    sender.abandon()
    new = stepped(weights(), 2)
    update = sender.diff(new)
    with pytest.raises(codec.StateError, match="needs version 0 as its base, but the current version is 1"):
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
    with pytest.raises(codec.ArgumentError, match=r"'a' is int16 of shape \(10,\), but the base has no such tensor"):
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
    with pytest.raises(codec.ArgumentError, match="1 tensors of the base are missing: 'model"):
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
        (updates[1], "needs version 1 as its base, but the current version is 0"),
        (updates[0], None),
        (updates[0], "applied already"),
        (updates[2], "needs version 2 as its base, but the current version is 1"),
        (updates[1], None),
        (updates[0], "not newer than the current version, 2"),
    ):
        before = receiver.version, receiver.digest
        if error is None:
            receiver.apply(update, load=dict)
            continue
        with pytest.raises(codec.StateError, match=error):
            receiver.apply(update, load=lambda tensors: calls.append(dict(tensors)))
        assert (receiver.version, receiver.digest) == before
    assert not calls
    assert equal(all_weights[2], receiver.tensors())


def test_update_for_the_same_version_of_other_weights_is_rejected(chain):
    all_weights, updates = chain
    receiver = codec.WeightReceiver(stepped(all_weights[0], 99))
    with pytest.raises(codec.StateError, match="weights of version 0 have other values: apply a snapshot, or begin"):
        receiver.apply(updates[0])
    receiver.verify()


def test_failure_of_load_restores_the_version_before(chain):
    """If load= fails, it is called again with the tensors of the version served before."""
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
    """After Ctrl-C within a commit, the receiver completes the update at its next use."""
    all_weights, updates = chain
    for stop in range(1, 8, 3):
        path = tmp_path / str(stop) if folder else None
        receiver = codec.WeightReceiver(all_weights[0], folder=path)
        receiver.stage(updates[0])
        calls = []
        original = receiver._base.write

        def write(out, decode, changes, calls=calls, stop=stop, original=original):
            calls.append(None)
            if len(calls) == stop:
                raise KeyboardInterrupt
            original(out, decode, changes)

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
    set_piece_nbytes(monkeypatch, 1 << 12)
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
    """Array that other libraries can read only by DLPack, like JAX arrays."""

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


def test_updates_do_not_depend_on_threads_or_place(chain, tmp_path, monkeypatch):
    all_weights, _ = chain
    monkeypatch.setattr("os.urandom", lambda n: bytes(range(n)))  # the run of both senders
    update = codec.WeightSender(all_weights[0]).diff(all_weights[1])
    sender = codec.WeightSender(all_weights[0], options=codec.options(threads=1))
    assert sender.diff(all_weights[1], file=tmp_path / "u").data == update.data
    assert (tmp_path / "u").read_bytes() == update.data
    assert [p.name for p in tmp_path.iterdir()] == ["u"]


def test_failed_diff_leaves_no_file(tmp_path):
    sender = codec.WeightSender(weights())

    def tensors():
        yield from list(weights().items())[:3]
        raise ConnectionResetError("lost rank")

    for full in (False, True):
        with pytest.raises(ConnectionResetError, match="lost rank"):
            sender.diff(tensors(), full=full, file=tmp_path / "u")
    with pytest.raises(codec.ArgumentError, match="cannot be written"):
        sender.diff(weights(), file=tmp_path / "no" / "u")
    assert list(tmp_path.iterdir()) == []


def test_unchanged_tensors_take_no_bytes_of_an_update():
    old = {f"layers.{k}.weight": np.full(300, k, np.float32) for k in range(2000)}
    new = {**old, "layers.7.weight": old["layers.7.weight"] + 1}
    receiver = codec.WeightReceiver(old)
    update = codec.WeightSender(old).diff({name: x.copy() for name, x in new.items()})
    assert update.nbytes < 1500
    assert list(update.tensors) == ["layers.7.weight"]
    assert update.total == (2000, 2000 * 1200)
    receiver.apply(update)
    assert equal(dict(receiver.tensors()), new)


@pytest.mark.parametrize("in_file", [False, True])
def test_frames_that_are_larger_than_the_block_in_which_they_move(monkeypatch, tmp_path, in_file):
    monkeypatch.setattr("codec.weight_sync.updates.writing.BATCH_NBYTES", 1000)
    rng = np.random.default_rng(1)
    old = {f"x{k}": rng.standard_normal(3000).astype(np.float32) for k in range(40)}
    new = {name: x * 1.01 if k % 3 == 0 else x.copy() for k, (name, x) in enumerate(old.items())}
    how = {"file": tmp_path / "update"} if in_file else {}
    receiver, sender = codec.WeightReceiver(old), codec.WeightSender(old)
    receiver.apply(bytes(sender.diff(new, **how).data))
    assert equal(dict(receiver.tensors()), new)
    receiver = codec.WeightReceiver()
    receiver.apply(sender.diff(iter(new.items()), full=True, **how))  # the size of the index is not known before
    assert equal(dict(receiver.tensors()), new)


@pytest.mark.parametrize("in_file", [False, True])
def test_sender_chooses_a_snapshot_that_is_smaller_or_needed(tmp_path, in_file):
    rng = np.random.default_rng(0)
    old = {"w": rng.standard_normal(4096).astype(np.float32)}
    sender = codec.WeightSender(old)
    file = tmp_path / "update" if in_file else None
    step = {"w": old["w"] + np.float32(1e-6)}
    for new, base in ((step, 0), ({"w": np.zeros(4096, np.float32)}, None), ({"v": old["w"]}, None)):
        update = sender.diff(new, full=None, file=file)
        assert update.base == base
        receiver = codec.WeightReceiver(old)
        receiver.apply(update if file is None else codec.Update(file.read_bytes()))
        assert {n: x.tobytes() for n, x in receiver.tensors()} == {n: x.tobytes() for n, x in new.items()}
        assert sender.version == 0
    assert [p.name for p in tmp_path.iterdir()] == (["update"] if in_file else [])
    with pytest.raises(codec.ArgumentError, match="pass a dict or module, not generator"):
        sender.diff((pair for pair in step.items()), full=None)
