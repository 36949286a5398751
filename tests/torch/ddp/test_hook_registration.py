"""register() validates the model and the optimizer, and warns about settings that lose accuracy."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from support.ddp_training import ENCODE_ALL, small_forward, small_net, take_step
from support.ranks import run_ranks


def _second_model(rank, size):
    first, other = DistributedDataParallel(small_net()), DistributedDataParallel(nn.Linear(8, 64))
    hook = codec.torch.ddp_hook(codec.Float8(group_size=128)).register(first)
    with pytest.raises(codec.ArgumentError, match="serves a single model"):
        hook.register(other)
    take_step(first, rank, small_forward)
    assert len(pickle.dumps(hook)) < 10_000  # the pickle does not contain the model
    again = DistributedDataParallel(copy.deepcopy(first.module))
    hook.register(again)  # the same model, wrapped again as after the loss of a rank
    take_step(again, rank, small_forward)
    with pytest.raises(codec.ArgumentError, match="not one of the hook's model"):
        take_step(first, rank, small_forward)
    both = codec.torch.ddp_hook()
    for model in (DistributedDataParallel(small_net()), DistributedDataParallel(small_net())):
        model.register_comm_hook(None, both)
        other = model, other
    with pytest.raises(codec.ArgumentError, match="registered with one model, but is with 2"):
        take_step(other[0], rank, small_forward)


def test_second_model_of_a_hook_is_rejected():
    run_ranks(2, _second_model)


def _second_hook(rank, size):
    model = DistributedDataParallel(small_net())
    hook = codec.torch.ddp_hook("small").register(model)
    for call in (
        lambda: hook.register(model),
        lambda: codec.torch.ddp_hook("balanced").register(model),
        lambda: codec.torch.OneBitAdam(model.parameters(), freeze_step=8).register(model),
    ):
        with pytest.raises(
            codec.ArgumentError, match=r"has a communication hook already, .*Hook Quantize.* set_spec\("
        ):
            call()
    take_step(model, rank, small_forward)
    hook.set_spec("balanced")
    take_step(model, rank, small_forward)
    assert hook.stats().steps == 2
    built_in = DistributedDataParallel(small_net())
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(codec.ArgumentError, match=r"only be called once.*: wrap the module in a new"):
        codec.torch.ddp_hook().register(built_in)


def test_second_hook_of_a_model_is_refused_with_the_way_to_change_the_codec():
    run_ranks(1, _second_hook)


def _nonfinite(rank, size):
    """Run a step with one NaN and one Inf in a gradient of rank 1; return the error."""

    def spoil(buffer, gradients):
        for p, gradient in gradients:
            if rank == 1 and p is model.module[2].weight:
                gradient[2, 5], gradient[3, 1] = torch.inf, torch.nan

    model = DistributedDataParallel(small_net())
    hook = codec.torch.ddp_hook("small", policy=ENCODE_ALL, transform=spoil).register(model)
    with pytest.raises(codec.CodecError) as e:
        take_step(model, rank, small_forward)
    assert hook.stats().steps == 0
    return type(e.value).__name__, str(e.value)


def test_nonfinite_gradient_is_named_with_the_parameter_and_the_place():
    (other, told), (own, text) = run_ranks(2, _nonfinite)
    assert other == "PeerError"
    assert told.startswith(
        "rank 1 has NaN or Inf: nothing was changed (ArgumentError: the tensor holds NaN or Inf in 2"
    )
    assert own == "ArgumentError"
    values = small_net()[2].weight.numel()
    assert text.startswith(
        f"the gradient of '2.weight' holds NaN or Inf in 2 of {values} values, the first, Inf, at (2, 5)"
    )
    assert "grad_scaler=" in text
    assert 'Float8(nonfinite="propagate")' in text


def _python_reducer(rank, size):
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        with pytest.raises(codec.ArgumentError, match="python_reducer"):
            codec.torch.ddp_hook().register(DistributedDataParallel(small_net()))
        with pytest.raises(codec.ArgumentError, match="python_reducer"):
            codec.torch.ddp_hook()(None, (torch.ones(3), None))
    finally:
        torch._dynamo.config.optimize_ddp = True
    with pytest.raises(codec.SpecError, match=r"pass ddp_hook\(optimizer=\)"):
        codec.torch.ddp_hook(policy=lambda n, p: codec.Truncate()).register(DistributedDataParallel(small_net()))


def test_unsupported_settings_are_rejected_at_registration():
    run_ranks(1, _python_reducer)


class OptimizerWrapper:
    """Optimizer wrapper like those of Accelerate and Lightning."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


def test_optimizers_are_unwrapped_or_rejected_by_name():
    model = small_net()
    adam = torch.optim.AdamW(model.parameters())
    assert codec.torch.ddp_hook(codec.Truncate(), optimizer=OptimizerWrapper(OptimizerWrapper(adam))).optimizers == (
        adam,
    )
    assert codec.optimizers.from_optimizer(OptimizerWrapper(adam)) == codec.optimizers.from_optimizer(adam)
    weight = model[0].weight
    assert codec.optimizers.state_of(OptimizerWrapper(adam), weight)["theta"] is weight
    with pytest.raises(codec.ArgumentError, match=r"the step of ASGD is not known.*may be wrapped"):
        codec.torch.ddp_hook(codec.Truncate(), optimizer=torch.optim.ASGD(model.parameters()))


def _warned(rank, size):
    model = DistributedDataParallel(small_net())
    adam, sgd = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(UserWarning, match=r"Sign.*distorts.*AdamW.*use Quantize\(4\) with Adam.*1-bit Adam"):
        codec.torch.ddp_hook(codec.Sign(), optimizer=adam).register(model)
    for spec in (codec.Sign(), codec.Ternary()):
        model = DistributedDataParallel(small_net())
        adam, sgd = torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), 0.1)
        codec.torch.ddp_hook(spec).register(model)
        take_step(model, rank, small_forward)
        torch.optim.Adam(small_net().parameters()).step()  # another model's optimizer must not cause the warning
        with pytest.warns(UserWarning, match=r"distorts.*Adam"):
            adam.step()
        take_step(model, rank, small_forward, adam)  # a second step does not warn again
    model = DistributedDataParallel(small_net())
    codec.torch.ddp_hook(codec.Sign()).register(model)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    take_step(model, rank, small_forward, sgd)
    models = [DistributedDataParallel(small_net()) for _ in range(3)]
    for model in models:
        codec.torch.ddp_hook(codec.Sign()).register(model)
        take_step(model, rank, small_forward)
    torch.optim.SGD([p for model in models for p in model.parameters()], 0.1).step()


def test_adam_with_sign_or_ternary_warns_once():
    run_ranks(1, _warned)


UNUSED = """
import logging
import codec, codec.torch
logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
hook = codec.torch.ddp_hook(codec.Float8())
"""


def test_hook_that_was_never_called_is_reported_at_exit():
    done = subprocess.run([sys.executable, "-P", "-c", UNUSED], capture_output=True, text=True, check=True)
    assert "WARNING codec.torch" in done.stderr
    assert "was never called" in done.stderr


def _growing(rank, size):
    """Train so that the norm of a residual grows beyond its gradient's."""
    from codec.torch.ddp import residuals

    logged = []
    residuals.logger.warning = lambda text, *args: logged.append(text % args)
    for bound, expected in ((1.0, 0), (1e-3, 1)):
        residuals._BOUND = bound
        model = DistributedDataParallel(small_net())
        hook = codec.torch.ddp_hook(
            codec.Quantize(4), feedback=True, options=codec.options(algorithm="two_shot")
        ).register(model)
        for _ in range(17):
            take_step(model, rank, small_forward)
        assert len(logged) == expected
        stats = hook.stats(by_parameter=True)
        assert 0.05 < stats.residual_ratio < 1
        weight = stats.parameters["2.weight"]
        assert weight.residual_norm > 0
        assert weight.residual_ratio <= stats.residual_ratio
        assert stats.parameters["4.bias"].residual_norm == 0
    assert "weight" in logged[0]
    assert "policy=" in logged[0]
    dist.barrier()


def test_residual_that_outgrows_its_gradient_is_logged_once():
    run_ranks(2, _growing)
