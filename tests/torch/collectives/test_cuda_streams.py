"""Collectives are ordered after the caller's CUDA streams, checked with a fake torch.cuda."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

import codec
import codec.torch
from codec.torch.group.tasks import Task
from codec.torch.group.work import Work
from codec.torch.transport import streams
from support.ddp_training import wrapped
from support.ranks import run_ranks


class _FakeCuda:
    """Fake of the parts of torch.cuda that codec.torch uses; records the order of calls."""

    def __init__(self):
        self.calls = []
        self.caller, self.side = self._stream("caller"), self._stream("side")

    def _stream(self, name):
        def note(what):
            return lambda *args: self.calls.append((name, what, *args)) or f"event of {name}"

        return SimpleNamespace(
            record_event=note("record"), wait_event=note("wait for"), synchronize=note("synchronize")
        )

    capturing = False

    def is_initialized(self):
        return True

    def is_current_stream_capturing(self):
        return self.capturing

    def current_device(self):
        return 1

    def current_stream(self, device):
        assert device == 1
        return self.caller

    def Stream(self, device):
        assert device == 1
        return self.side

    def device(self, _):
        return nullcontext()

    @contextmanager
    def stream(self, stream):
        assert stream is self.side
        self.calls.append("enter")
        yield
        self.calls.append("leave")

    def synchronize(self, device):
        self.calls.append(("synchronize", device))


def _install_fake(monkeypatch):
    """Replace functions of torch.cuda by those of a _FakeCuda, which is returned."""
    fake = _FakeCuda()
    for name in ("is_initialized", "current_device", "current_stream", "Stream", "device", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fake.is_current_stream_capturing)
    streams._side_stream.cache_clear()
    return fake


@pytest.fixture
def fake_cuda(monkeypatch):
    yield _install_fake(monkeypatch)
    streams._side_stream.cache_clear()


def test_collective_waits_for_work_of_the_caller_and_returns_after_its_own(fake_cuda):
    async def collective():
        fake_cuda.calls.append("collective")

    task = Task(Work(lambda: None), collective, streams.StreamOrder.of_this_thread(), alone=False, of_callback=False)
    # The event is recorded at submission, not when the collective starts
    assert fake_cuda.calls == [("caller", "record")]
    assert task.step()
    assert fake_cuda.calls[1:] == [
        "enter",
        ("side", "wait for", "event of caller"),
        "collective",
        ("side", "synchronize"),
        "leave",
    ]


def test_collective_is_refused_while_its_stream_is_captured(fake_cuda):
    fake_cuda.capturing = True
    with pytest.raises(codec.EngineError, match="cannot be captured in a CUDA graph"):
        streams.StreamOrder.of_this_thread()
    assert not fake_cuda.calls


def _streams(rank, size):
    """Compute gradients in the caller's stream, and reduce during a capture; return the hook's recorded calls."""
    with pytest.MonkeyPatch.context() as m:
        model = wrapped(torch.nn.Linear(64, 64))
        codec.torch.ddp_hook(codec.Quantize(4)).register(model)
        fake = _install_fake(m)
        fake.caller = fake._stream("producer")
        model(torch.ones(2, 64)).sum().backward()
        calls = [call for call in fake.calls if call not in ("enter", "leave")]
        fake.capturing = True
        x = torch.arange(4.0)
        with pytest.raises(codec.EngineError, match="cannot be captured in a CUDA graph"):
            codec.torch.all_reduce(x)
        assert x.tolist() == [0, 1, 2, 3]
        streams._side_stream.cache_clear()
    return calls


def test_hook_follows_the_stream_in_which_gradients_were_computed():
    for calls in run_ranks(2, _streams):
        assert calls[0] == ("producer", "record")  # the event is recorded when the first bucket is ready
        assert calls[1] == ("side", "wait for", "event of producer")
        assert calls[-1] == ("side", "synchronize")


def test_tensor_on_another_gpu_is_synchronized(fake_cuda):
    for index in (1, 0):
        streams.settle(SimpleNamespace(device=torch.device("cuda", index)))
    streams.settle(torch.ones(1))
    assert fake_cuda.calls == [("synchronize", torch.device("cuda", 0))]
