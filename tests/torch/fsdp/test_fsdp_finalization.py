"""FSDP2 models whose caller ends backward passes by finalize_backward(), in torch 2.15 and later."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard

import codec
import codec.torch
from support.fsdp_training import batch, module_residuals, small_model
from support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "finalize_backward"), reason="torch before 2.15 has no finalize_backward()"
)


def _model(feedback):
    net = small_model()
    for layer in net[::2]:
        fully_shard(layer)
    fully_shard(net)
    gradients = codec.torch.FsdpReduceScatter(codec.Quantize(4), feedback=feedback).register(net)
    codec.torch.FsdpAllGather().register(net)
    return net, gradients


def _residuals(gradients, rank):
    return {name: r.tolist() for name, r in module_residuals(gradients.state_dict(), rank).items()}


def _trained(rank, feedback, manual, passes):
    """Train; each step has `passes` backward passes. FSDP2 reduces the first layer only when it ends a pass."""
    net, gradients = _model(feedback)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        net.set_manual_backward_finalization(manual)
        for k in range(passes):
            net.set_requires_gradient_sync(k == passes - 1)
            net(batch(rank + 10 * k) + step).square().mean().backward()
        if manual:
            net.finalize_backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.to_local().tolist() for p in net.parameters()], _residuals(gradients, rank)


def _as_automatic(rank, size):
    for feedback in (False, True):
        for passes in (1, 2):
            automatic, manual = (_trained(rank, feedback, m, passes) for m in (False, True))
            assert manual == automatic
            assert bool(manual[1]) == feedback


@pytest.mark.parametrize("size", [2, 3])
def test_manual_finalization_trains_as_automatic(size):
    run_ranks(size, _as_automatic)


def _refused(rank, size):
    """An error of a collective is raised by backward() on all ranks, and residuals stay as they were."""
    net, gradients = _model(True)
    net.set_manual_backward_finalization(True)
    net(batch(rank)).square().mean().backward()
    net.finalize_backward()
    before = _residuals(gradients, rank)
    x = batch(rank)
    if rank == 1:
        x[0, 0] = float("nan")
    with pytest.raises(codec.CodecError) as e:
        net(x).square().mean().backward()
    after = _residuals(gradients, rank)
    assert after == before
    assert before
    with pytest.raises(codec.CodecError):  # the first layer, which FSDP2 reduces now
        net.finalize_backward()
    net.zero_grad()
    net(batch(rank)).square().mean().backward()
    net.finalize_backward()
    return type(e.value).__name__


def test_error_with_manual_finalization_is_raised_by_backward_on_all_ranks():
    assert run_ranks(2, _refused) == ["PeerError", "ArgumentError"]
