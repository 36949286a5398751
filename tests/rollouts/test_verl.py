"""verl's checkpoint engine registry: actors send compressed weight updates to rollouts. Run by make rollouts."""

import asyncio
import runpy
from pathlib import Path

import pytest
import torch
import verl
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

import codec
from support.ranks import run_ranks


def engines(tmp_path, **kwargs):
    """Return checkpoint engines of two actor ranks and of two rollouts, created as verl's workers create them."""
    import_external_libs("codec.integrations.verl")
    folder = str(tmp_path / "updates")
    new = CheckpointEngineRegistry.new
    actor = [new("codec", is_master=k == 0, bucket_size=1 << 20, folder=folder, **kwargs) for k in range(2)]
    return actor, [new("codec", bucket_size=1 << 20, folder=folder, **kwargs) for _ in range(2)]


async def update(actor, rollouts, weights, steps, take=lambda engine: None):
    """Update all rollouts as verl's CheckpointEngineManager.update_weights does; return what each received."""
    everyone = actor + rollouts
    metadata = [engine.prepare() for engine in everyone]
    cls = CheckpointEngineRegistry.get("codec")
    for engines, kwargs in zip((actor, rollouts), cls.build_topology(len(actor), len(rollouts), metadata), strict=True):
        assert all(len(v) == len(engines) for v in kwargs.values())
        for k, engine in enumerate(engines):
            engine.init_process_group(**{name: v[k] for name, v in kwargs.items()})

    async def receive(engine):
        assert engine.wire_format == "named_tensors"
        received = {}
        async for name, tensor in engine.receive_weights(global_steps=steps):
            received[name] = tensor
            take(engine)
        return received

    sent = (engine.send_weights(iter(weights.items()), global_steps=steps) for engine in actor)
    results = await asyncio.gather(*(receive(engine) for engine in rollouts), *sent, return_exceptions=True)
    for engine in everyone:
        engine.finalize()
    return results[: len(rollouts)]


@pytest.mark.parametrize("workers", [None, "workers"])
@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_rollouts_get_the_weights_of_the_actor(tmp_path, host, workers):
    torch.manual_seed(0)
    weights = {f"layers.{k}.weight": torch.randn(40, 30).to(torch.bfloat16) for k in range(3)}
    folder = None if workers is None else str(tmp_path / workers)
    actor, rollouts = engines(tmp_path, host=host, worker_folder=folder)
    served = [{}, {}]
    for step in range(3):
        results = asyncio.run(update(actor, rollouts, weights, step))
        for k, received in enumerate(results):
            served[k].update(received)
            assert received.keys() == (weights.keys() if step == 0 else {"layers.1.weight"})
            assert all(torch.equal(served[k][name], weights[name]) for name in weights)
        weights["layers.1.weight"][step, 3:9] *= 2
    actor[0]._publisher.close()


def test_rollout_that_fails_gets_the_changes_again(tmp_path):
    weights = {"a": torch.zeros(100), "b": torch.zeros(100)}
    actor, rollouts = engines(tmp_path)
    asyncio.run(update(actor, rollouts, weights, 0))
    weights["a"][3] = 1

    def fail(engine):
        if engine is rollouts[1]:
            raise RuntimeError("lost")

    results = asyncio.run(update(actor, rollouts, weights, 1, fail))
    assert isinstance(results[1], RuntimeError)
    weights["b"][4] = 1
    results = asyncio.run(update(actor, rollouts, weights, 2))
    assert [sorted(received) for received in results] == [["b"], ["a", "b"]]
    assert torch.equal(results[1]["a"], weights["a"])


def test_rollout_does_not_wait_for_ever(tmp_path):
    actor, rollouts = engines(tmp_path, timeout=0.2)
    asyncio.run(update(actor, rollouts, {"a": torch.zeros(3)}, 0))
    rollouts[0].init_process_group(actor[0]._publisher.source, 0)

    async def receive():
        return [pair async for pair in rollouts[0].receive_weights()]

    with pytest.raises(codec.StateError, match="no version after 0 was published"):
        asyncio.run(receive())


def test_master_needs_a_folder():
    import_external_libs("codec.integrations.verl")
    with pytest.raises(codec.StateError, match=r"engine_kwargs\.codec\.folder"):
        CheckpointEngineRegistry.new("codec", is_master=True, bucket_size=1)


class TrainingEngine:
    """Export of a model's shards as by verl's FSDP engine: flat local values in bfloat16, with their ShardSpec."""

    def __init__(self, weights, specs=None):
        self.weights, self.specs = weights, specs or {}

    def get_per_tensor_param_shard(self):
        shard_spec = runpy.run_path(str(Path(verl.__file__).parent / "workers/engine/spec.py"))["ShardSpec"]

        def shards():
            for name, x in self.weights.items():
                local = x.to(torch.bfloat16)
                local = local.to_local() if hasattr(local, "to_local") else local
                yield name, local.reshape(-1), shard_spec.from_param(x)

        return shards(), None

    def get_per_tensor_param(self):
        raise AssertionError("rank 0 gathers the weights")


def update_from_ranks(rank, size, folder):
    """Send three versions from all ranks; return names and whether the rollout of rank 0 has the weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import_external_libs("codec.integrations.verl_shards")
    cls = CheckpointEngineRegistry.get("delta_sharded")
    arguments = {"bucket_size": 1 << 20, "folder": f"{folder}/{rank}", "host": "127.0.0.1"}
    actor = CheckpointEngineRegistry.new("delta_sharded", is_master=rank == 0, **arguments)
    rollout = CheckpointEngineRegistry.new("delta_sharded", **arguments)
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    weights = {"rows": torch.randn(7, 30), "columns": torch.randn(4, 9)}
    weights = {name: distribute_tensor(x, mesh, [Shard(k)]) for k, (name, x) in enumerate(weights.items())}
    weights["whole"] = torch.randn(5)
    found, served = [], {}
    for step in range(3):
        kwargs, _ = cls.build_topology(1, 1, [actor.prepare()])
        rollout.init_process_group(**{name: v[0] for name, v in kwargs.items()})
        asyncio.run(actor.send_weights(TrainingEngine(weights), global_steps=step))

        async def receive():
            return {name: x async for name, x in rollout.receive_weights()}

        full = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in weights.items()}
        if rank == 0:
            received = asyncio.run(receive())
            served.update(received)
            same = all(torch.equal(served[name], x.bfloat16()) for name, x in full.items())
            found.append((sorted(received), same))
        weights["rows"].to_local()[:, step] *= 2
    torch.distributed.barrier()
    actor._publisher.close()
    return found


def test_ranks_send_their_shards(tmp_path):
    found, _ = run_ranks(2, update_from_ranks, str(tmp_path))
    assert found == [(["columns", "rows", "whole"], True), (["rows"], True), (["rows"], True)]


def send_other_layout(rank, size, folder):
    """Return the error of an actor whose training engine has a layout of its own."""
    import_external_libs("codec.integrations.verl_shards")
    actor = CheckpointEngineRegistry.new("delta_sharded", bucket_size=1, is_master=rank == 0, folder=folder)

    class Experts(TrainingEngine):
        def get_per_tensor_param_shard(self):
            shards, config = super().get_per_tensor_param_shard()
            pairs = list(shards)
            for _, _, spec in pairs:
                spec.to_hf_chunk = lambda first, rows: [("experts.0", rows)]
            return iter(pairs), config

    with pytest.raises(codec.CodecError) as e:
        asyncio.run(actor.send_weights(Experts({"experts": torch.zeros(3)}) if rank else TrainingEngine({})))
    return f"{type(e.value).__name__}: {e.value}"


def test_layouts_that_are_not_of_dtensors_are_refused_on_all_ranks(tmp_path):
    first, second = run_ranks(2, send_other_layout, str(tmp_path))
    assert first.startswith("PeerError")
    assert second.startswith("ArgumentError: the training engine exports 'experts' in a layout of its own")
