"""The trainer's engine for vLLM works with the weight sources of vLLM 0.32 and 0.33.

With CODEC_VLLM_BASE, the path of vllm/distributed/weight_transfer/base.py, the tests also run with this file.
"""

import importlib
import os
import sys
import types
from functools import cached_property

import pytest
import torch

import codec
from codec.weight_sync import pull
from support import vllm_interface

BASE = os.environ.get("CODEC_VLLM_BASE")
INTERFACES = {
    "iterable": vllm_interface.iterable_interface,
    "owned": vllm_interface.owned_interface,
    "file": lambda: vllm_interface.file_interface(BASE),
}
GIVEN = pytest.mark.skipif(not BASE, reason="needs CODEC_VLLM_BASE")


@pytest.fixture
def interface(request, monkeypatch):
    """Make the interface's module importable; return it, and codec.integrations.vllm_trainer."""
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.config"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name in ("vllm.config.parallel", "vllm.config.weight_transfer", "vllm.distributed.weight_transfer.base"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    base = INTERFACES[request.param]()
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
    monkeypatch.delitem(sys.modules, "codec.integrations.vllm_trainer", raising=False)
    yield base, importlib.import_module("codec.integrations.vllm_trainer")
    for name in [name for name in sys.modules if name.startswith("vllm") or name.endswith("vllm_trainer")]:
        del sys.modules[name]


class Client:
    """Server that records its calls."""

    def init_weight_transfer_engine(self, init_info):
        assert init_info["source"]

    def start_weight_update(self):
        self.loaded = []

    def update_weights(self, update_info):
        self.loaded.append((update_info["phase"], update_info["update"]["version"]))

    def finish_weight_update(self, weight_version=None):
        self.loaded.append("finished")


def _engine(trainer, base, client, source, folder, rank=0):
    info = trainer.CodecTrainerInitInfo(str(folder), rank=rank)
    return trainer.CodecTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)


ALL = ["iterable", "owned", pytest.param("file", marks=GIVEN)]
OWNED = ["owned", pytest.param("file", marks=GIVEN)]


@pytest.mark.parametrize("interface", ALL, indirect=True)
def test_weights_of_a_module_are_published(interface, tmp_path):
    base, trainer = interface
    torch.manual_seed(0)
    model, client = torch.nn.Linear(30, 20), Client()
    engine = _engine(trainer, base, client, base.ModuleSource(model), tmp_path)
    receiver = codec.WeightReceiver()
    for version in (0, 1):
        engine.send_weights()
        assert client.loaded == [("stage", version), ("load", version), "finished"]
        pull(receiver, tmp_path)
        received = dict(receiver.tensors(like=torch.empty(0)))
        assert all(torch.equal(received[name], p) for name, p in model.named_parameters())
        with torch.no_grad():
            model.weight.add_(1e-3)
    engine.shutdown()


@pytest.mark.parametrize("interface", ["owned"], indirect=True)
def test_token_and_key_are_passed_to_the_publisher_and_not_shown(interface, tmp_path):
    base, trainer = interface
    token, key, client = "token-of-the-store", b"0123456789abcdef", Client()
    info = trainer.CodecTrainerInitInfo(str(tmp_path), host="127.0.0.1", rank=0, token=token, sign=key)
    source = base.ModuleSource(torch.nn.Linear(3, 2))
    engine = trainer.CodecTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)
    engine.send_weights()
    receiver = codec.WeightReceiver(verify=key)
    assert pull(receiver, engine._publisher.source, token=token) == 0
    assert token not in repr(info)
    assert key.decode() not in repr(info)
    engine.shutdown()


@pytest.mark.parametrize("interface", ALL, indirect=True)
def test_other_ranks_iterate_their_source(interface, tmp_path):
    base, trainer = interface
    iterated = []

    def each(source):
        for name, p in source._module.named_parameters():
            iterated.append(name)
            yield name, p

    name = "iter_full" if hasattr(base.WeightSource, "iter_full") else "__iter__"
    kind = type("Source", (base.ModuleSource,), {name: each})
    _engine(trainer, base, None, kind(torch.nn.Linear(3, 2)), tmp_path, rank=1).send_weights()
    assert iterated == ["weight", "bias"]


@pytest.mark.parametrize("interface", OWNED, indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
def test_sources_whose_tensors_do_not_reach_rank_0_are_refused_on_all_ranks(interface, rank, tmp_path):
    base, trainer = interface

    class Staged(base.WeightSource):
        @cached_property
        def metadata(self):
            return [
                base.ParamMeta("first", torch.float32, (3,), owners=(0, 1)),
                base.ParamMeta("last", torch.float32, (3,), owners=(1,)),
            ]

        def iter_full(self):
            yield "first", torch.zeros(3)

    class Local(Staged):
        iter_full = base.WeightSource.iter_full

    with pytest.raises(codec.ArgumentError, match=r"1 parameters that rank 0 does not own, the first 'last'"):
        _engine(trainer, base, None, Staged(), tmp_path, rank)
    with pytest.raises(codec.ArgumentError, match=r"must implement iter_full"):
        _engine(trainer, base, None, Local(), tmp_path, rank)
