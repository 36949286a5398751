"""The training loops of docs/guides/frameworks.md train and resume on real ranks over Gloo."""

import os

import pytest
import torch

from support.documentation import blocks
from support.launched import run

STEPS = 4  # number of steps before a checkpoint, and again after it


def _trained(rank, size, code, first, last, folder):
    """Run train() of the page's code; return the parameters and the hook's statistics."""
    namespace = {"__name__": "page"}
    exec(code, namespace)
    hook, model = namespace["train"](first, last, folder)
    return [p.detach().clone() for p in model.parameters()], hook.stats()


def _others_state(rank, size, code, folder):
    """Load rank 0's hook state on all ranks, as a framework without gather=True would; return the error."""
    import codec

    namespace = {"__name__": "page"}
    exec(code, namespace)
    hook, _ = namespace["train"](0, 1, folder)
    states = [None] * size
    torch.distributed.all_gather_object(states, hook.state_dict())
    try:
        hook.load_state_dict(states[0])
    except codec.StateError as e:
        return str(e)
    return None


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("framework", ["Accelerate", "Lightning", "Transformers"])
def test_framework_trains_and_resumes_with_compressed_gradients(framework, tmp_path):
    (code,) = blocks(framework)
    folders = [str(tmp_path / name) for name in ("straight", "interrupted")]
    straight = run(2, _trained, code, 0, 2 * STEPS, folders[0])
    run(2, _trained, code, 0, STEPS, folders[1])
    resumed = run(2, _trained, code, STEPS, 2 * STEPS, folders[1])
    for results, steps in ((straight, 2 * STEPS), (resumed, STEPS)):
        (first, stats), (second, _) = results
        assert equal(first, second)  # parameters are bit-identical on both ranks
        assert stats.steps == steps
        assert 0 < stats.sent_nbytes < stats.raw_nbytes / 4
        assert stats.raw_collectives == 0
    assert equal(resumed[0][0], straight[0][0])


def test_state_of_another_rank_is_rejected(tmp_path):
    (code,) = blocks("Accelerate")
    first, second = run(2, _others_state, code, str(tmp_path))
    assert first is None
    assert "rank 0 of 2" in second
    assert "gather=True" in second


def _sharded(rank, size, code, folder):
    os.chdir(folder)
    namespace = {"__name__": "__main__"}
    exec(code, namespace)
    comms = {name: namespace[name].stats() for name in ("gradients", "parameters", "between") if name in namespace}
    net = namespace["net"]
    return [p.full_tensor().detach() for p in net.parameters()], [p.grad.full_tensor() for p in net.parameters()], comms


@pytest.mark.parametrize(("heading", "block", "size"), [("FSDP2", 0, 2), ("HSDP", 0, 4)])
def test_sharded_training_compresses(heading, block, size, tmp_path):
    results = run(size, _sharded, blocks(heading)[block], str(tmp_path))
    for parameters, gradients, comms in results:
        assert equal(parameters, results[0][0])
        assert equal(gradients, results[0][1])
        for name, stats in comms.items():
            assert stats.frame_collectives >= 10, name
            assert 0 < stats.ratio < (0.95 if name == "parameters" else 0.2), name
    assert heading != "FSDP2" or len(results[0][2]) == 2


def _registered_by_lightning(rank, size):
    """Register a hook as Lightning's DDPStrategy(ddp_comm_hook=) does on CUDA."""
    from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook

    import codec.torch

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 128))
    hook = codec.torch.ddp_hook(codec.Quantize(4), options=codec.options(algorithm="two_shot"))
    _register_ddp_comm_hook(model, ddp_comm_state=None, ddp_comm_hook=hook)
    for _ in range(3):
        model(torch.randn(8, 64) + rank).square().mean().backward()
    return hook.stats(), [p.grad for p in model.parameters()]


def test_strategy_of_lightning_takes_the_hook():
    (stats, first), (_, second) = run(2, _registered_by_lightning)
    assert stats.steps == 3
    assert 0 < stats.sent_nbytes < stats.raw_nbytes / 4
    assert equal(first, second)
