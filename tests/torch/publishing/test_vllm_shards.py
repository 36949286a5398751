"""Each rank of a trainer sends its shards to vLLM: with vLLM 0.33, the engine gathers no weights on rank 0.

With CODEC_VLLM_BASE, the path of vllm/distributed/weight_transfer/base.py, the ranks use this file.
"""

import importlib
import os
import sys
import types

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import codec
from codec.integrations.weights import Client
from codec.weight_sync import pull
from codec.weight_sync.store.source import read_update
from codec.weight_sync.updates.listing import Listed
from support import vllm_interface
from support.ranks import run_ranks

BASE = os.environ.get("CODEC_VLLM_BASE")


def trainer_module():
    """Return vLLM's interface, and codec.integrations.vllm_trainer, imported with it."""
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.config"):
        sys.modules.setdefault(name, types.ModuleType(name))
    base = vllm_interface.file_interface(BASE) if BASE else vllm_interface.owned_interface()
    sys.modules["vllm.distributed.weight_transfer.base"] = base
    return base, importlib.import_module("codec.integrations.vllm_trainer")


class Worker(Client):
    """Server with one worker, which checks and loads updates as codec.integrations.vllm does."""

    def __init__(self, fault=None):
        self.fault, self.calls, self.receiver = fault, [], codec.WeightReceiver()

    def init_weight_transfer_engine(self, init_info):
        self.source = init_info["source"]

    def start_weight_update(self):
        self.call("start")

    def update_weights(self, update_info):
        one = Listed.read(update_info["update"])
        self.call(update_info["phase"])
        if update_info["phase"] == "stage":
            if one.head.before is not None and not one.head.before.matches(self.receiver.identity):
                pull(self.receiver, self.source)
            self.receiver.stage(read_update(self.source, one, key=None), restart=True)
        else:
            assert self.receiver.staged.head == one.head
            self.receiver.commit()

    def finish_weight_update(self, weight_version=None):
        self.call("finish")

    def call(self, name):
        self.calls.append(name)
        if name == self.fault:
            self.fault = None
            raise RuntimeError(f"the server has failed at {name}")


class Model(torch.nn.Module):
    """Weights whose rows four ranks cannot share equally, and a scalar."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows = torch.nn.Linear(16, 7, dtype=torch.bfloat16)
        self.one = torch.nn.Linear(6, 1, dtype=torch.bfloat16)
        self.scale = torch.nn.Parameter(torch.tensor([2.5]))


def sharded(layout):
    """Return a model whose parameters are DTensors."""
    model = Model()
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    placements = {
        "columns": [Replicate(), Shard(1)],
        "both axes split rows": [Shard(0), Shard(0)],
        "rows and columns": [Shard(0), Shard(1)],
    }
    if layout in placements:
        weight = distribute_tensor(model.rows.weight.detach(), mesh, placements[layout])
        model.rows.weight = torch.nn.Parameter(weight)
        return model
    return fully_shard(model, mesh=mesh)


def change(model, step):
    """Change some values, equally on all ranks that hold them."""
    with torch.no_grad():
        for p in model.parameters():
            local = p.to_local() if hasattr(p, "to_local") else p
            local[..., :: 3 + step] *= 1.5


def whole(model):
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}


def new_engine(trainer, source, folder, rank, client=None, **kwargs):
    info = trainer.CodecTrainerInitInfo(folder, rank=rank, **kwargs)
    return trainer.CodecTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)


def publish(rank, size, folder, layout):
    """Send three versions; return the calls of the server, and the number of bytes of each part of the last version."""
    base, trainer = trainer_module()
    model, worker = sharded(layout), Worker()

    class Source(base.ModuleSource):
        def iter_full(self):
            raise AssertionError("rank 0 gathers the weights")

    engine = new_engine(trainer, Source(model), folder, rank, worker, host="127.0.0.1")
    for step in range(3):
        engine.send_weights()
        expected = whole(model)
        if rank == 0:
            received = dict(worker.receiver.tensors(like=torch.empty(0)))
            assert received.keys() == expected.keys()
            assert all(torch.equal(received[name], x) for name, x in expected.items())
        change(model, step)
    torch.distributed.barrier()
    engine.shutdown()
    return worker.calls


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, "fsdp"),
        (4, "hsdp"),
        pytest.param(4, "fsdp", marks=pytest.mark.nightly),
        (4, "columns"),
        pytest.param(4, "rows and columns", marks=pytest.mark.nightly),
        pytest.param(4, "both axes split rows", marks=pytest.mark.nightly),
    ],
)
def test_worker_has_the_weights_of_all_ranks(size, layout, tmp_path):
    calls = run_ranks(size, publish, str(tmp_path), layout, fresh=True)
    assert calls[0] == ["start", "stage", "load", "finish"] * 3
    assert not any(calls[1:])


def fail(rank, size, folder, fault):
    """Send a version at which the server fails, and another one; return the error, and whether the worker has both."""
    base, trainer = trainer_module()
    model, worker = sharded("fsdp"), Worker()
    broken = []

    class Source(base.ModuleSource):
        def iter_local(self):
            for name, p in super().iter_local():
                what = broken.pop() if broken and rank == 1 else None
                if what == "source":
                    raise RuntimeError("the source has failed")
                yield name, p if what is None else p[None]

    engine = new_engine(trainer, Source(model), folder, rank, worker)
    engine.send_weights()
    change(model, 0)
    (broken.append if fault in ("source", "shape") else lambda fault: setattr(worker, "fault", fault))(fault)
    error = ""
    try:
        engine.send_weights()
    except (RuntimeError, codec.CodecError) as e:
        error = f"{type(e).__name__}: {e}"
    before = worker.receiver.version
    change(model, 1)
    engine.send_weights()
    expected = whole(model)
    received = dict(worker.receiver.tensors(like=torch.empty(0)))
    same = all(torch.equal(received[name], x) for name, x in expected.items()) if rank == 0 else True
    engine.shutdown()
    return error, before, same


@pytest.mark.parametrize(
    ("fault", "first", "second"),
    [
        ("start", "RuntimeError: the server", "PeerError"),
        ("stage", "RuntimeError: the server", "PeerError"),
        ("load", "RuntimeError: the server", ""),
        ("source", "PeerError", "RuntimeError: the source"),
        ("shape", "PeerError", "ArgumentError: source= has a shard of 'scale'"),
    ],
)
def test_next_update_works_after_an_error_on_all_ranks_or_a_failed_load(fault, first, second, tmp_path):
    found = run_ranks(2, fail, str(tmp_path), fault)
    (error, version, same), (other, _, _) = found
    assert error.startswith(first)
    assert other.startswith(second)
    assert version == 0
    assert same


def gathers(rank, size, folder):
    """Return which engines publish on this rank."""
    base, trainer = trainer_module()
    found = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = Model()
    for layer in (model.rows, model.one, model):
        for name, p in list(layer.named_parameters(recurse=False)):
            placement = Shard(0) if p is model.rows.weight else Replicate()
            layer.register_parameter(
                name, torch.nn.Parameter(distribute_tensor(p.detach(), mesh["inner"], [placement]))
            )
    fully_shard(model, mesh=mesh["outer"])
    kind = base.ModuleSource
    for k, (source, kwargs) in enumerate([(kind(model), {}), (kind(sharded("hsdp")), {"shards": False})]):
        worker = Worker()
        engine = new_engine(trainer, source, f"{folder}/{k}", rank, worker, **kwargs)
        engine.send_weights()
        found.append(engine._publisher is not None)
        expected = whole(source._module)
        if rank == 0:
            received = dict(worker.receiver.tensors(like=torch.empty(0)))
            assert all(torch.equal(received[name], x) for name, x in expected.items())
    return found


@pytest.mark.nightly
def test_rank_0_gathers_if_told_so_or_if_the_source_would_gather_on_all_ranks(tmp_path):
    """FSDP over tensor parallelism has shards that ParamMeta cannot state."""
    assert run_ranks(4, gathers, str(tmp_path), fresh=True) == [[True, True], *[[False, False]] * 3]
