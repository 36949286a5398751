"""Updates are written into the served tensors piece by piece."""

import numpy as np
import pytest
import torch

import codec
from codec.weight_sync import Publisher, pull
from support.weight_updates import equal, set_piece_nbytes, stepped, versions, weights


@pytest.fixture
def chain():
    return versions(2)


def copies(tensors):
    return {name: x.copy() for name, x in tensors.items()}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Make pieces so small that tensors have several."""
    set_piece_nbytes(monkeypatch, 1 << 9)


def test_served_tensors_are_those_of_the_version(tmp_path):
    publisher = Publisher(tmp_path)
    old, new = weights(), stepped(weights(), 1)
    receiver, served = codec.WeightReceiver(), copies(stepped(old, 7))
    tensors = dict(served)
    for version in (old, new):
        publisher.publish(version)
        pull(receiver, tmp_path, into=served)
        assert equal(version, served)
        assert all(served[name] is x for name, x in tensors.items())
        receiver.verify()
    publisher.close()


def test_parameters_of_a_module_are_written():
    torch.manual_seed(0)
    model, served = (torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.BatchNorm1d(40)).bfloat16() for _ in "ab")
    sender, receiver = codec.WeightSender(model), codec.WeightReceiver()
    receiver.apply(sender.snapshot(), into=served)
    with torch.no_grad():
        model[0].weight[3] *= 2
    before = served[0].weight._version
    receiver.apply(sender.diff(model), into=served)
    assert served[0].weight._version > before  # autograd can detect the change
    assert all(torch.equal(x, served.state_dict()[name]) for name, x in model.state_dict().items())


def test_torch_tensors_on_a_device_are_written_by_copies(chain, monkeypatch):
    """Served tensors on a device, emulated by tensors in host memory, are updated by copies."""
    all_weights, updates = chain
    served = dict(codec.WeightReceiver(all_weights[0]).tensors(like=torch.empty(0)))
    expected = dict(codec.WeightReceiver(all_weights[1]).tensors(like=torch.empty(0)))
    original = codec.weight_sync.served.view_output
    on_device = lambda x, name: original(x, name=name)._replace(device="cuda:0")
    monkeypatch.setattr("codec.weight_sync.served.view_output", on_device)
    codec.WeightReceiver(all_weights[0]).apply(updates[0], into=served)
    bits = lambda x: x.reshape(-1).view(torch.uint8)
    assert all(torch.equal(bits(served[name]), bits(x)) for name, x in expected.items())
    with pytest.raises(codec.ArgumentError, match="on cuda:0, where only torch tensors can be written: use load="):
        codec.WeightReceiver(all_weights[0]).apply(updates[0], into=copies(all_weights[0]))


@pytest.mark.parametrize("folder", [False, True])
def test_failure_and_interruption_leave_a_committed_version(chain, folder, tmp_path, monkeypatch):
    """If any piece fails or is interrupted, the served tensors have the receiver's version."""
    all_weights, updates = chain
    reached = set()
    for stop in range(1, 60, 7):
        receiver = codec.WeightReceiver(all_weights[0], folder=tmp_path / str(stop) if folder else None)
        served, calls, original = copies(all_weights[0]), [], receiver._base.decode

        def decode(update, name, k, out, calls=calls, stop=stop, original=original):
            original(update, name, k, out)
            calls.append(None)
            if len(calls) == stop:
                raise KeyboardInterrupt

        receiver.stage(updates[0])
        # Skip the check, so that the interruption occurs while tensors are written
        monkeypatch.setattr(receiver._base, "check", lambda update: None)
        monkeypatch.setattr(receiver._base, "decode", decode)
        with pytest.raises(KeyboardInterrupt):
            receiver.apply(updates[0], into=served)
        assert receiver.staged is None
        assert equal(all_weights[receiver.version], served)
        assert equal(all_weights[receiver.version], receiver.tensors())
        reached.add(receiver.version)
        receiver.close()
    assert reached == {0, 1}


def test_tensors_that_do_not_fit_are_rejected_before_one_is_written(chain):
    all_weights, updates = chain
    receiver, name = codec.WeightReceiver(all_weights[0]), "model.layers.0.norm.weight"
    right = all_weights[0][name]
    read_only = right.copy()
    read_only.flags.writeable = False
    for wrong, message in (
        (None, "has no tensor"),
        (right[1:].copy(), r"float32 of shape \(23,\)"),
        (right.astype(np.float64), "float64"),
        (np.zeros((24, 2), np.float32)[:, 0], "C-contiguous"),
        (read_only, "read-only"),
        (torch.empty(24, device="meta"), "on meta"),
    ):
        served = copies(all_weights[0]) | {name: wrong}
        if wrong is None:
            del served[name]
        with pytest.raises(codec.ArgumentError, match=message):
            receiver.apply(updates[0], into=served)
        served.pop(name, None)
        assert equal({n: x for n, x in all_weights[0].items() if n != name}, served)
    with pytest.raises(codec.ArgumentError, match="got both"):
        receiver.apply(updates[0], dict, into=served)
    assert (receiver.version, receiver.staged) == (0, None)
