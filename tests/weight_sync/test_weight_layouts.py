"""Updates bring the values of tensors in any layout, and of tensors that exist only until the next one is read."""

import os
import tempfile
import weakref
from collections.abc import Mapping

import numpy as np
import pytest
import torch

import codec
from codec.weight_sync import Publisher, pull
from codec.weight_sync.updates import writing
from support.weight_updates import equal, stepped, weights

RNG = np.random.default_rng(0)
LAYOUTS = {
    "transposed": lambda k: torch.randn(60 + k, 50).T,
    "transposed bfloat16": lambda k: torch.randn(60 + k, 50).bfloat16().T,
    "transposed float8": lambda k: torch.randn(60 + k, 50).to(torch.float8_e4m3fn).T,
    "channels_last": lambda k: torch.randn(8 + k, 6, 3, 3).to(memory_format=torch.channels_last),
    "slice": lambda k: torch.randn(64, 96 + k)[:, 8:72],
    "expanded": lambda k: torch.randn(1, 70 + k).expand(40, 70 + k),
    "every other column": lambda k: torch.randn(40, 70 + k)[:, ::2],
    "negative bit": lambda k: torch._neg_view(torch.randn(50 + k, 40)),
    "imaginary part of a conjugate": lambda k: torch.randn(50 + k, 40, dtype=torch.complex64).conj().imag,
    "numpy, reversed": lambda k: RNG.standard_normal((50 + k, 40))[::-1],
    "numpy, big-endian": lambda k: RNG.standard_normal((50 + k, 40)).astype(">f4"),
    "numpy, Fortran order": lambda k: np.asfortranarray(RNG.standard_normal((50 + k, 40))),
    "memoryview": lambda k: memoryview(RNG.standard_normal(2000 + k))[::2],
    "DLPack, not contiguous": lambda k: Exported(torch.randn(60 + k, 50).T),
}


class Exported:
    """Tensor that has only DLPack."""

    def __init__(self, tensor):
        self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__
        self.tensor = tensor


def values(x):
    """Return a tensor of any layout as a contiguous numpy array of bytes."""
    x = x.tensor if isinstance(x, Exported) else x
    if isinstance(x, torch.Tensor):
        return x.resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy().copy()
    x = np.ascontiguousarray(x)
    return x.astype(x.dtype.newbyteorder("=")).view(np.uint8)


def zeros(x):
    """Return zeros with the dtype and the shape of a tensor."""
    x = x.tensor if isinstance(x, Exported) else x
    if isinstance(x, torch.Tensor):
        return torch.zeros(tuple(x.shape), dtype=x.dtype)
    return np.zeros_like(np.asarray(x), np.asarray(x).dtype.newbyteorder("="), order="C")


@pytest.mark.parametrize("way", ["mapping", "pairs", "full", "full pairs"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_update_has_the_values_of_tensors_in_any_layout(layout, way):
    # Many tensors, so that the memory of a contiguous copy that was freed too early is used again
    new = {f"{k}.weight": LAYOUTS[layout](k) for k in range(8)}
    old = {name: zeros(x) for name, x in new.items()}
    sender, receiver = codec.WeightSender(old), codec.WeightReceiver(old)
    receiver.apply(sender.diff(iter(new.items()) if "pairs" in way else new, full="full" in way))
    for name, x in receiver.tensors(like=torch.empty(0)):
        assert np.array_equal(values(x), values(new[name])), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_base_has_the_values_of_tensors_in_any_layout(layout):
    new = {f"{k}.weight": LAYOUTS[layout](k) for k in range(4)}
    for name, x in codec.WeightReceiver(new).tensors(like=torch.empty(0)):
        assert np.array_equal(values(x), values(new[name])), name


class OneBuffer(Mapping):
    """Mapping that gathers each tensor into the same buffer when the tensor is read."""

    def __init__(self, tensors):
        self.tensors, self.buffer = tensors, np.empty(1 << 16, np.uint8)

    def __getitem__(self, name):
        x = self.tensors[name]
        self.buffer[: x.nbytes] = np.frombuffer(x.tobytes(), np.uint8)
        return self.buffer[: x.nbytes].view(x.dtype).reshape(x.shape)

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)


GATHERS = {"generator": lambda x: iter(OneBuffer(x).items()), "mapping": OneBuffer}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("gather", GATHERS)
def test_tensors_that_share_one_buffer_arrive(gather, full):
    """A generator or mapping may gather each tensor into the memory of the one before it."""
    old, new = weights(), stepped(weights(), 1)
    sender, receiver = codec.WeightSender(GATHERS[gather](old)), codec.WeightReceiver(old)
    receiver.apply(sender.diff(GATHERS[gather](new), full=full))
    assert equal(new, receiver.tensors())


def test_publisher_takes_one_buffer_for_snapshots_after_the_first():
    """A snapshot is staged again after the first one was abandoned, and on request."""
    new, one = weights(), stepped(weights(), 1)
    for again, expected in (({}, new), ({"full": True}, one)):
        with Publisher(tempfile.mkdtemp()) as publisher:
            publisher.stage(GATHERS["generator"](new))
            publisher.commit() if again else publisher.abandon()
            assert publisher.stage(GATHERS["generator"](expected), **again).base is None
            publisher.commit()
            receiver = codec.WeightReceiver()
            pull(receiver, publisher.source)
            assert equal(expected, receiver.tensors())


def test_snapshot_of_an_iterable_has_the_bytes_of_one_of_a_dict(tmp_path, monkeypatch):
    """Frames that were written before the size of the index was known are moved, in blocks, behind the index."""
    monkeypatch.setattr(writing, "BATCH_NBYTES", 1000)
    monkeypatch.setattr(os, "urandom", lambda n: bytes(n))  # both senders have the same run
    new = stepped(weights(), 1)
    sender = codec.WeightSender(weights())
    expected = bytes(sender.diff(new, version=5, full=True).data)
    sender.abandon()
    sender = codec.WeightSender(weights())
    assert bytes(sender.diff(iter(new.items()), version=5, full=True).data) == expected
    sender.diff(iter(new.items()), version=6, full=True, file=tmp_path / "snapshot")
    assert codec.Update.open(tmp_path / "snapshot").digest == codec.Update(expected).digest


def test_snapshot_of_an_exhausted_iterator_is_refused():
    sender = codec.WeightSender(weights())
    with pytest.raises(codec.ArgumentError, match="no tensors were given"):
        sender.diff(iter(()), full=True)
    with pytest.raises(codec.ArgumentError, match="no tensors were given"):
        codec.WeightSender(iter(()))


class WithExtraState(torch.nn.Linear):
    """Layer whose state dict has an entry that is not a parameter or buffer, as the layers of FP8 libraries have."""

    extra = None

    def get_extra_state(self):
        return self.extra


@pytest.mark.parametrize("kind", ["module", "state dict", "pairs"])
def test_module_whose_extra_state_is_none_is_sent(kind):
    model = torch.nn.Sequential(WithExtraState(3, 2))
    given = {"module": model, "state dict": model.state_dict(), "pairs": list(model.state_dict().items())}[kind]
    sender, receiver = codec.WeightSender(given), codec.WeightReceiver(given)
    with torch.no_grad():
        model[0].weight[0, 0] = 9
    receiver.apply(sender.diff(given))
    assert receiver.kinds.keys() == {"0.weight", "0.bias"}
    assert np.array_equal(dict(receiver.tensors())["0.weight"], model[0].weight.detach())


@pytest.mark.parametrize("call", ["sender", "folder", "diff", "full"])
@pytest.mark.parametrize("bad", ["extra state", "leaf"])
def test_error_names_the_entry_that_is_not_a_tensor(call, bad, monkeypatch, tmp_path):
    monkeypatch.setattr(WithExtraState, "extra", {"scale": torch.ones(3)})
    model = torch.nn.Sequential(WithExtraState(3, 2))
    given = model if bad == "extra state" else {**dict(model.named_parameters()), "a.b": object()}
    sender = codec.WeightSender(dict(model.named_parameters()))
    calls = {
        "sender": lambda: codec.WeightSender(given),
        "folder": lambda: codec.WeightSender(given, folder=tmp_path),
        "diff": lambda: sender.diff(given),
        "full": lambda: sender.diff(given, full=True),
    }
    expected = {"extra state": "'0._extra_state': the extra state of a module must", "leaf": "'a.b': not a tensor"}
    with pytest.raises(codec.ArgumentError, match=expected[bad]):
        calls[call]()


@pytest.mark.parametrize("given", [[torch.ones(3)], [("a",)], [3], "ab", torch.ones(2, 2)], ids=str)
def test_weights_of_another_type_are_refused(given):
    with pytest.raises(codec.ArgumentError, match="weights must be a mapping from names to tensors, or an iterable"):
        codec.WeightSender(given)


@pytest.mark.parametrize("folder", ["", "base"])
@pytest.mark.parametrize("full", [False, True])
def test_tensor_of_a_generator_is_freed_before_the_next_one_is_gathered(full, folder, tmp_path):
    alive = []

    def gathered():
        last = lambda: None
        for name, x in weights().items():
            alive.append(last() is not None)
            new = torch.from_numpy(np.frombuffer(x.tobytes() + b"x", np.uint8)[:-1].copy())
            last = weakref.ref(new)
            yield name, new
            del new

    sender = codec.WeightSender(gathered(), folder=tmp_path / folder if folder else None)
    sender.diff(gathered(), full=full)
    sender.close()
    assert len(alive) == 2 * len(weights())
    assert not any(alive)
