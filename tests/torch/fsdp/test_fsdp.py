"""With Lossless, FSDP2 gathers exact parameters, and gradients are sums in rank order, bit for bit."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import codec
import codec.torch
from codec.torch.group import communicator
from support.fsdp_training import batch, gradients_of, mean, small_model
from support.ranks import run_ranks


def sharded(net, gradients, parameters, **how):
    """Apply FSDP2 to a model and its layers, with the given communications."""
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **how)
    fully_shard(net, **how)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(gradients)
            module.set_custom_all_gather(parameters)
    return net


def _exact(rank, size, dtype, reduced):
    warnings.simplefilter("error")
    plain, lossless = small_model(), codec.Lossless()
    # Without reduce_dtype, torch 2.15 and later reduce in the parameters' dtype, and earlier versions in param_dtype.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=True)
    net = sharded(
        small_model(), codec.torch.FsdpReduceScatter(lossless), codec.torch.FsdpAllGather(lossless), mp_policy=policy
    )
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    outer = torch.optim.SGD(plain.parameters(), lr=0.1)
    channel = communicator.communicator_of(dist.group.WORLD).channel
    for _ in range(3):
        net(batch(rank)).square().mean().backward()
        for p, theirs in zip(plain.parameters(), gradients_of(plain, size, dtype), strict=True):
            p.grad = mean(theirs).to(reduced).float()
        for p, want in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad.full_tensor(), want.grad)
        inner.step()
        outer.step()
        inner.zero_grad()
    for p, want in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), want)
    return channel.counters.frame_collectives


@pytest.mark.parametrize(
    ("size", "dtype", "reduced"),
    [
        (2, torch.float32, torch.float32),
        (3, torch.float32, torch.float32),
        (3, torch.bfloat16, torch.bfloat16),
        (3, torch.bfloat16, torch.float32),
    ],
)
def test_lossless_gradients_are_means_in_the_order_of_ranks(size, dtype, reduced):
    calls = run_ranks(size, _exact, dtype, reduced)
    assert calls == [calls[0]] * size
    assert calls[0] >= 3 * (3 + 5)  # gradients and parameters were sent as frames


def _lossy(rank, size):
    net = sharded(
        small_model(), codec.torch.FsdpReduceScatter(codec.Float8(group_size=128)), codec.torch.FsdpAllGather()
    )
    net(batch(rank)).square().mean().backward()
    errors = []
    for p, theirs in zip(net.parameters(), gradients_of(small_model(), size), strict=True):
        want, got = mean(theirs), p.grad.full_tensor()
        errors.append(float((got - want).norm() / want.norm()))
    net = sharded(
        small_model(), codec.torch.FsdpReduceScatter(), codec.torch.FsdpAllGather(codec.Float8(group_size=128))
    )
    exact, got = small_model()(batch(rank)), net(batch(rank))
    return errors, float((got - exact).norm() / exact.norm())


def test_lossy_error_is_within_the_codecs_bound():
    for errors, output in run_ranks(2, _lossy):
        assert all(1e-4 < e < 0.1 for e in errors), errors
        assert 1e-4 < output < 0.1


def _protocol(rank, size):
    """The collectives' return values, Work objects, memory and dtypes are those that FSDP2 expects."""
    scatter, gather = codec.torch.FsdpReduceScatter(), codec.torch.FsdpAllGather()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        every = [torch.randn(size * 3000, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]
        out = scatter.allocate((3000,), dtype=dtype, device=torch.device("cpu"))
        assert out.shape == (3000,)
        assert out.dtype == dtype
        mine = slice(3000 * rank, 3000 * (rank + 1))
        assert scatter(out, every[rank], dist.group.WORLD, dist.ReduceOp.AVG) is None
        if dtype != torch.float64:
            assert torch.equal(out, mean([x[mine] for x in every]).to(dtype))
        whole = gather.allocate((3000 * size,), dtype=dtype, device=torch.device("cpu"))
        whole[mine] = every[rank][mine]
        work = gather(whole, whole[mine], dist.group.WORLD, async_op=True)
        assert isinstance(work, dist.Work)
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert torch.equal(whole, torch.cat([x[3000 * r : 3000 * (r + 1)] for r, x in enumerate(every)]))
    x, out = torch.full((size * 3000,), 3.0), torch.empty(3000)
    premul = torch.distributed._make_nccl_premul_sum(0.5)
    scatter(out, x, dist.group.WORLD, premul)
    assert torch.equal(out, torch.full((3000,), 1.5 * size))


def test_communications_follow_the_interface_of_fsdp2():
    run_ranks(2, _protocol)


def _refused(rank, size):
    net = sharded(small_model(), codec.torch.FsdpReduceScatter(codec.Float8()), codec.torch.FsdpAllGather())
    x = batch(rank)
    if rank == 1:
        x[0, 0] = float("nan")
    with pytest.raises(codec.CodecError) as e:
        net(x).square().mean().backward()
    good = torch.ones(3000)
    dist.all_reduce(good)  # the group still works after the error
    codec.torch.all_reduce(good, op="mean")
    return type(e.value).__name__, float(good[0])


def test_nan_on_one_rank_raises_on_all():
    assert run_ranks(3, _refused) == [("PeerError", 3.0), ("ArgumentError", 3.0), ("PeerError", 3.0)]


def _lost(rank, size):
    net = sharded(small_model(), codec.torch.FsdpReduceScatter(), codec.torch.FsdpAllGather())
    net(batch(rank)).square().mean().backward()
    loss = net(batch(rank)).square().mean()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(codec.PeerError):
        loss.backward()
    return time.monotonic() - begin


def test_killed_rank_raises_on_all_others():
    took = run_ranks(3, _lost, timeout=5, killed=(1,))
    assert max(took[0], took[2]) < 5 + 1 + 2, took
