"""codec.torch.pack_state: packed state dicts survive torch.save and torch.load(weights_only=True)."""

import io

import pytest
import torch

import codec
import codec.torch


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True), len(file.getvalue())


def check_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout)
        a, b = (x.to_dense().detach().reshape(-1).view(torch.uint8) for x in (a, b))
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            check_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            check_same(x, y)
    else:
        assert a == b


def test_training_state_is_restored_to_the_bit():
    net = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(20, 300)).square().mean().backward()
    optimizer.step()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    loaded, size = saved_and_loaded(codec.torch.pack_state(state))
    unpacked = codec.torch.unpack_state(loaded)
    check_same(unpacked, state)
    assert unpacked["model"]._metadata == state["model"]._metadata
    net.load_state_dict(unpacked["model"])
    optimizer.load_state_dict(unpacked["optimizer"])
    assert size < 0.95 * saved_and_loaded(state)[1]


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch.load of torch 2.15
def test_kinds_of_tensors():
    state = [
        (torch.randn(100, 90).t(), None, "text", 1.5),
        torch.randn(3000).to(torch.float8_e4m3fn),
        torch.rand(3000) > 0.5,
        torch.arange(3000),
        torch.randn(1000, dtype=torch.complex64),  # this tensor and the ones below are not encoded
        torch.nn.Parameter(torch.randn(1000)),
        torch.eye(100).to_sparse(),
        torch.randn(10),
    ]
    packed = codec.torch.pack_state(state)
    assert [isinstance(x, dict) for x in packed[1:]] == [True] * 3 + [False] * 4
    check_same(codec.torch.unpack_state(saved_and_loaded(packed)[0]), state)


def test_tied_weights_stay_tied():
    w = torch.randn(64, 64)
    unpacked = codec.torch.unpack_state(saved_and_loaded(codec.torch.pack_state({"a": w, "b": [w.detach()]}))[0])
    assert unpacked["a"].data_ptr() == unpacked["b"][0].data_ptr()


def test_lossy_spec_is_for_floats():
    state = {"w": torch.randn(5000), "index": torch.arange(5000), "f8": torch.randn(5000).to(torch.float8_e5m2)}
    unpacked = codec.torch.unpack_state(codec.torch.pack_state(state, "balanced"))
    assert 0 < float((unpacked["w"] - state["w"]).norm() / state["w"].norm()) < 0.03
    check_same(unpacked["index"], state["index"])
    check_same(unpacked["f8"], state["f8"])


def test_errors_name_the_tensor():
    packed = codec.torch.pack_state({"layer": {"weight": torch.randn(1000)}})
    with pytest.raises(codec.ArgumentError, match=r"layer.weight has the key 'codec.frame'.*is packed only once"):
        codec.torch.pack_state(packed)
    with pytest.raises(codec.ArgumentError, match=r"layer.0.*NaN or Inf"):
        codec.torch.pack_state({"layer": [torch.full((999,), torch.nan)]}, "small")
    frame = packed["layer"]["weight"]["codec.frame"]
    for wrong in (frame[:-3], torch.cat([frame[:-1], frame[-1:] ^ 1])):
        with pytest.raises(codec.FrameError, match=r"'layer.0'"):
            codec.torch.unpack_state({"layer": [{"codec.frame": wrong}]})
    for wrong in (3, frame.float(), frame.view(2, -1)):
        with pytest.raises(
            codec.FrameError, match=r"'codec.frame' of layer must be a tensor with the bytes of a frame"
        ):
            codec.torch.unpack_state({"layer": {"codec.frame": wrong}})
    zeros = codec.torch.pack_state({"zeros": torch.zeros(1 << 20)})
    with pytest.raises(codec.LimitError, match="'zeros'"):
        codec.torch.unpack_state(zeros, max_nbytes=1000)
