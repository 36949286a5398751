"""verl's checkpoint engine registry: actors send compressed weight updates to rollouts. Run by make rollouts."""

import asyncio

import pytest
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

import codec


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
