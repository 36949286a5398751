"""Rollout engines of verl and vLLM on stand-ins for the base classes of these packages, which `make rollouts` has."""

import asyncio
import contextlib
import importlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import codec
from codec.integrations.trl import CodecAdapterClient, CodecWeightTransfer
from codec.integrations.weights import synchronize, update_info
from codec.weight_sync import Publisher, UpdateStore, pull
from support.adapters import Engine, adapter, equal, stepped


def stand_in(monkeypatch, plugin, modules):
    """Import a module of codec.integrations while `modules` stand in for those of another package."""
    for name, attributes in modules.items():
        module = ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop(plugin, None)
    importlib.import_module(plugin)
    return sys.modules.pop(plugin)  # so that no later import finds the module with stand-ins


@pytest.fixture
def verl(monkeypatch, tmp_path):
    class Registry:
        @staticmethod
        def register(_):
            return lambda engine: engine

    base = {"CheckpointEngine": object, "CheckpointEngineRegistry": Registry}
    modules = {"verl": {}, "verl.checkpoint_engine": {}, "verl.checkpoint_engine.base": base}
    engine = stand_in(monkeypatch, "codec.integrations.verl", modules).CodecCheckpointEngine
    run = Run(engine(1, True, folder=str(tmp_path)), engine(1))
    run.engine = engine
    return run


class Run:
    """An actor and a rollout whose engine may fail while it loads tensors."""

    def __init__(self, actor, rollout):
        self.actor, self.rollout = actor, rollout
        self.weights, self.served = {name: torch.zeros(300) for name in "abcd"}, {}

    async def update(self, change="", takes=9):
        """Change tensors, and send the weights to an engine that fails after it has taken `takes` tensors."""
        for name in change:
            self.weights[name][3] += 1
        self.rollout.init_process_group(**self.actor.prepare())
        await self.actor.send_weights(iter(self.weights.items()))
        await self.receive(takes)

    async def receive(self, takes=9):
        tensors = self.rollout.receive_weights()
        async for name, tensor in tensors:
            if takes == 0:
                await tensors.aclose()
                return
            self.served[name] = tensor.clone()
            takes -= 1

    def is_served(self):
        return all(torch.equal(self.served[name], x) for name, x in self.weights.items())


@pytest.mark.parametrize("takes", [0, 1])
def test_verl_rollout_that_failed_several_times_gets_all_changes(verl, takes):
    asyncio.run(verl.update())
    for change in ("ab", "bc", "b"):
        asyncio.run(verl.update(change, takes))
    asyncio.run(verl.update("d"))
    assert verl.is_served()
    verl.served.clear()
    asyncio.run(verl.update("a"))
    assert verl.served.keys() == {"a"}


def test_verl_rollout_that_failed_gets_the_changes_without_a_new_version(verl):
    """The receiver may be at the last version although the rollout lacks tensors of it."""
    asyncio.run(verl.update())
    asyncio.run(verl.update("a", 0))
    asyncio.run(verl.receive())
    assert verl.is_served()
    verl.weights["b"][3] += 1
    verl.rollout.init_process_group(**verl.actor.prepare())
    asyncio.run(verl.actor.send_weights(iter(verl.weights.items())))
    pull(verl.rollout._receiver, verl.rollout._source)
    verl.served.clear()
    asyncio.run(verl.receive())
    assert verl.served.keys() == {"b"}


def test_verl_rollout_workers_share_their_weights(verl, tmp_path):
    """Workers that receive one after the other, after one update or after several, get the same weights."""
    folder = str(tmp_path / "workers")
    runs = [Run(verl.actor, verl.engine(1, worker_folder=folder)) for _ in range(2)]
    for run in runs:
        run.weights = verl.weights
    for change in ("", "ab", "c"):
        asyncio.run(runs[0].update(change))
        if change != "ab":
            runs[1].rollout.init_process_group(runs[0].rollout._source, -1)
            asyncio.run(runs[1].receive())
        assert all(run.is_served() for run in runs if change != "ab" or run is runs[0])
    assert len(list((tmp_path / "workers").glob("values-*"))) == 1


@pytest.fixture
def vllm(monkeypatch):
    class Engine:
        def __class_getitem__(cls, _):
            return cls

        def __init__(self, config, vllm_config, device, model):
            self.device, self.model, self.parallel_config = device, model, vllm_config.parallel_config

        def parse_update_info(self, info):
            return info

    @dataclass
    class Info:
        pass

    package = "vllm.distributed.weight_transfer"
    factory = {"WeightTransferEngineFactory": object, "WeightTransferTrainerFactory": object}
    base = ModuleType(f"{package}.base")
    base.WeightTransferInitInfo = base.WeightTransferUpdateInfo = Info
    base.WeightTransferEngine, base.layerwise_groups = Engine, lambda names: [[name] for name in names]
    modules = {"vllm": {}, "vllm.distributed": {}, package: {"base": base}, base.__name__: vars(base)}
    return stand_in(monkeypatch, "codec.integrations.vllm", modules | {f"{package}.factory": factory})


def engine_of(vllm, index):
    parallel = SimpleNamespace(data_parallel_index=index, data_parallel_rank=0, rank=0)
    config = SimpleNamespace(parallel_config=parallel)
    return vllm.CodecWeightTransferEngine(None, config, torch.device("cpu"), torch.nn.Linear(2, 2))


def test_vllm_workers_of_a_machine_share_their_weights(vllm, tmp_path):
    """All workers check an update, then all load it; a worker that fails catches up with the next update."""
    workers = [engine_of(vllm, index) for index in range(3)]
    client, loaded = LoraClient(workers), [{} for _ in workers]
    client.info = vllm.CodecUpdateInfo
    with Publisher(tmp_path / "updates") as publisher:
        for worker, served in zip(workers, loaded, strict=True):
            worker.init_transfer_engine(vllm.CodecInitInfo(publisher.source, str(tmp_path / "workers")))
            worker._load = served.update
        for step, broken in enumerate((None, 1, None)):
            client.broken = broken
            with pytest.raises(OSError, match="no space left") if broken else contextlib.nullcontext():
                synchronize(publisher, client, {"w": torch.full((8,), float(step))}.items())
        assert len(list((tmp_path / "workers").glob("values-*"))) == 1
    assert [served["w"].tolist() for served in loaded] == [[2.0] * 8] * 3
    for worker in workers:
        worker.shutdown()


def test_vllm_engine_whose_rollback_failed_loads_everything(vllm, tmp_path):
    """If the old weights cannot be loaded after a failed update, the next update loads all tensors again."""
    weights = {name: np.zeros(8, np.float32) for name in "abc"}
    engine, loaded, faults = engine_of(vllm, 0), {}, []

    def load(tensors):
        for name, x in tensors:
            if faults:
                raise faults.pop()
            loaded[name] = x.numpy().copy()

    engine._load = load
    with Publisher(tmp_path) as publisher:
        engine.init_transfer_engine(vllm.CodecInitInfo(publisher.source))
        for step, fault in enumerate(([], [MemoryError(), MemoryError()], [])):
            weights["a"][step] = 1
            update = publisher.stage(weights)
            faults[:] = fault
            if fault:
                loaded.clear()  # what a failed load leaves in the engine is undefined
            engine.receive_weights(vllm.CodecUpdateInfo(**update_info(update, "stage")))
            publisher.commit()
            try:
                engine.receive_weights(vllm.CodecUpdateInfo(**update_info(update, "load")))
            except MemoryError:
                assert fault
    assert loaded.keys() == weights.keys()
    assert all(np.array_equal(loaded[name], x) for name, x in weights.items())
    assert isinstance(engine._receiver, codec.WeightReceiver)
    engine.shutdown()


@pytest.fixture
def signed(monkeypatch, tmp_path):
    """Set the variables that name the trainer's key."""
    key = tmp_path / "key"
    key.write_bytes(b"0123456789abcdef")
    key.chmod(0o600)
    for name in ("CODEC_SIGN_KEY_FILE", "CODEC_VERIFY_KEY_FILE"):
        monkeypatch.setenv(name, str(key))


def forged(folder, run=None):
    """Publish weights to a folder as a mirror without the key does, optionally with the run of the trainer."""
    sender = codec.WeightSender({name: np.ones(300, np.float32) for name in "abcd"}, version=9)
    sender._key, sender._base.run = None, run or sender.run
    store = UpdateStore(folder)
    store.key = None
    store.clear()
    store.publish(sender.snapshot())
    return sender.snapshot()


def test_verl_rollout_refuses_unsigned_and_replayed_updates(signed, verl, tmp_path):
    asyncio.run(verl.update())
    shutil.copytree(tmp_path, tmp_path / "old", ignore=lambda *_: ["old"])
    asyncio.run(verl.update("a"))
    verl.rollout.init_process_group(str(tmp_path / "old"), -1)  # a mirror replays the first version
    with pytest.raises(codec.StateError, match="leads to version 0, but the weights had version 1"):
        asyncio.run(verl.receive())
    forged(tmp_path, verl.rollout._receiver.run)
    verl.rollout.init_process_group(str(tmp_path), 1)
    with pytest.raises(codec.FrameError, match="not signed"):
        asyncio.run(verl.receive())
    assert verl.rollout._receiver.version == 1
    assert verl.is_served()


def test_vllm_engine_refuses_unsigned_and_replayed_updates(signed, vllm, tmp_path):
    engine = engine_of(vllm, 0)
    engine._load = lambda tensors: [tensor for _, tensor in tensors]
    with Publisher(tmp_path / "store") as publisher:
        engine.init_transfer_engine(vllm.CodecInitInfo(publisher.source))
        updates = []
        for step in range(2):
            updates.append(publisher.stage({name: np.full(300, step, np.float32) for name in "abcd"}, full=True))
            engine.receive_weights(vllm.CodecUpdateInfo(**update_info(updates[step], "stage")))
            file = tmp_path / "store" / f"{step:020d}.snapshot"
            data = file.read_bytes()
            file.write_bytes(bytes(len(data)))  # the engine loads the copy that it has checked
            engine.receive_weights(vllm.CodecUpdateInfo(**update_info(updates[step], "load")))
            file.write_bytes(data)
            publisher.commit()
        with pytest.raises(codec.StateError, match="leads to version 0, but the weights had version 1"):
            engine.receive_weights(vllm.CodecUpdateInfo(**update_info(updates[0], "stage")))
        update = forged(tmp_path / "store", engine._receiver.run)
        with pytest.raises(codec.FrameError, match="not signed"):
            engine.receive_weights(vllm.CodecUpdateInfo(**update_info(update, "stage")))
    assert engine._receiver.version == 1
    engine.shutdown()


def test_transfer_of_trl_passes_token_and_key_and_shows_neither(tmp_path):
    sent, token = [], "token-of-the-store"
    client = SimpleNamespace(wait_for_server_ready=lambda: None, init_weight_transfer_engine=sent.append)
    transfer = CodecWeightTransfer(client, tmp_path, host="127.0.0.1", token=token, sign=b"0123456789abcdef")
    transfer.init_weight_transfer()
    transfer._publisher.publish({"w": np.ones(3, np.float32)})
    assert pull(codec.WeightReceiver(verify=b"0123456789abcdef"), sent[0]["source"], token=token) == 0
    with pytest.raises(codec.ArgumentError, match="requires a token"):
        pull(codec.WeightReceiver(), sent[0]["source"])
    assert token not in repr(sent) + repr(vars(transfer)) + repr(vars(transfer._publisher))
    transfer.destroy()


class LoraClient:
    """TRL's client of a server whose workers are engines; one of them may be broken."""

    def __init__(self, workers):
        self.workers, self.engine, self.active, self.broken = workers, Engine(), set(), None

    def start_weight_update(self):
        assert not self.active
        self.active = set(range(len(self.workers)))

    def update_weights(self, info):
        for rank, worker in enumerate(self.workers):
            try:
                if rank == self.broken:
                    raise OSError("no space left")
                worker.receive_weights(self.info(**json.loads(json.dumps(info))))
            except BaseException:
                self.active.discard(rank)
                raise

    def finish_weight_update(self):
        ended, self.active = self.active, set()
        assert len(ended) == len(self.workers)

    def load_lora_adapter(self, lora_name, lora_path, timeout):
        self.engine.load_lora_adapter(lora_name, lora_path)

    def unload_lora_adapter(self, lora_name, timeout):
        self.engine.unload_lora_adapter(lora_name)


@pytest.fixture
def lora(vllm, tmp_path):
    client = LoraClient([engine_of(vllm, index) for index in range(2)])
    client.info = vllm.CodecUpdateInfo
    opened = CodecAdapterClient(client, tmp_path / "store", str(tmp_path / "workers"), host="127.0.0.1")
    yield opened
    opened.close()


def test_trl_sends_each_adapter_to_the_disks_of_all_workers(lora, tmp_path):
    given = adapter(1)
    for version in range(1, 7):
        lora.load_lora_adapter(f"trl-policy-v{version}", given)
        if version > 2:
            lora.unload_lora_adapter(f"trl-policy-v{version - 2}")
        last, given = given, stepped(given, version)
    assert lora.engine.served.keys() == {"trl-policy-v5", "trl-policy-v6"}
    assert equal(lora.engine.served["trl-policy-v6"], last)
    assert len(os.listdir(tmp_path / "workers")) <= 4
    assert [p.suffix for p in sorted((tmp_path / "store").glob("0*"))] == [".snapshot", *[".update"] * 5]


def test_trl_step_whose_worker_fails_leaves_the_server_as_it_is(lora):
    lora.load_lora_adapter("trl-policy-v1", adapter(1))
    lora._client.broken = 1
    with pytest.raises(OSError, match="no space left"):
        lora.load_lora_adapter("trl-policy-v2", stepped(adapter(1)))
    assert lora.engine.serves(trl_policy_v1=adapter(1))
    lora._client.broken = None
    lora.load_lora_adapter("trl-policy-v2", stepped(adapter(1)))
    assert equal(lora.engine.served["trl-policy-v2"], stepped(adapter(1)))


def test_server_whose_worker_has_refused_weights_takes_the_next_ones(lora, vllm, tmp_path):
    """The other worker waits for the end of the update, and refuses to begin another one before."""
    client, loaded = lora._client, {}
    with Publisher(tmp_path / "weights") as publisher:
        for rank, worker in enumerate(client.workers):
            worker.init_transfer_engine(vllm.CodecInitInfo(publisher.source))
            worker._load = lambda tensors, rank=rank: loaded.update({rank: dict(tensors)})
        for step, broken in enumerate((None, 1, None)):
            client.broken = broken
            with pytest.raises(OSError, match="no space left") if broken else contextlib.nullcontext():
                synchronize(publisher, client, {"w": torch.full((3,), float(step))}.items())
    assert [loaded[rank]["w"].tolist() for rank in range(2)] == [[2.0] * 3] * 2


def test_vllm_worker_that_does_not_get_the_announced_adapters_raises(lora, vllm, tmp_path):
    lora.load_lora_adapter("trl-policy-v1", adapter(1))
    update = codec.WeightSender({"w": np.zeros(1)}, version=9).snapshot()
    where = {"source": lora._publisher.source, "folder": str(tmp_path / "workers"), "keep": 1}
    with pytest.raises(RuntimeError, match="version 9 of the adapters is not the last one"):
        lora._client.workers[0].receive_weights(vllm.CodecUpdateInfo(**update_info(update, "adapters"), adapters=where))


def test_trl_client_needs_an_absolute_folder(tmp_path):
    with pytest.raises(codec.ArgumentError, match="absolute path, got 'adapters'"):
        CodecAdapterClient(None, tmp_path, "adapters")
