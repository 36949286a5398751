"""Transforms of gradients before encoding, and user hooks that call reduce(): values, errors on one rank, dtypes."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec import PeerError
from codec.torch.ddp.buckets import Bucket
from codec.torch.ddp.joined import BucketRun
from codec.torch.ddp.policy import ParameterPlan, default_policy
from codec.torch.ddp.step import StepState
from codec.torch.transport.messages import ERROR, Cause
from support.collective_values import sum_in_order, tensor_bytes
from support.ddp_training import data, hook_state_bytes, net, parameter_bytes, small_forward, small_net, wrapped
from support.ddp_training import take_step as step_of
from support.ranks import run_ranks

BETA = 0.75
TWO_SHOT = codec.options(algorithm="two_shot")


def _loss(model, rank, step):
    x, y = data(rank, step)
    return nn.functional.cross_entropy(model(x), y)


def _momenta(rank, size):
    """A transform can send momenta: all ranks receive the mean momentum, summed in rank order, bit for bit."""
    model = wrapped()
    names = {p: name for name, p in model.module.named_parameters()}
    momenta = {p: torch.zeros_like(p) for p in names}
    seen = []

    def momentum(buffer, gradients):
        assert not torch.is_grad_enabled()
        assert buffer.dim() == 1
        assert sum(g.numel() for _, g in gradients) == buffer.numel()
        for p, g in gradients:
            assert g.shape == p.shape
            g.mul_(1 - BETA).add_(momenta[p], alpha=BETA)
            seen.append(names[p])

    hook = codec.torch.ddp_hook(transform=momentum, options=TWO_SHOT).register(model)
    expected = {name: torch.zeros_like(p) for p, name in names.items()}
    for step in range(3):
        seen.clear()
        step_of(model, rank, lambda model, rank, step=step: _loss(model, rank, step))
        assert sorted(seen) == sorted(names.values())  # the transform saw each parameter once
        plain = net()
        terms = {name: [] for name in expected}
        for r in range(size):
            step_of(plain, r, lambda model, rank, step=step: _loss(model, rank, step))
            for name, p in plain.named_parameters():
                terms[name].append(p.grad.mul(1 - BETA).add(expected[name], alpha=BETA))
        for p, name in names.items():
            expected[name] = sum_in_order(terms[name], "mean")
            assert tensor_bytes(p.grad) == tensor_bytes(expected[name]), name
            momenta[p].copy_(p.grad)
    assert hook.stats().steps == 3
    return [p.grad.tolist() for p in model.parameters()]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_transform_replaces_gradients_before_they_are_encoded(size):
    results = run_ranks(size, _momenta)
    assert all(r == results[0] for r in results)


def _residuals(rank, size):
    """Halving gradients in a transform gives the same bits as halving the loss: residuals are not halved."""
    found = []
    for factor in (0.5, None):
        model = wrapped(process_group=dist.new_group())

        def halve(buffer, gradients):
            buffer.mul_(0.5)

        hook = codec.torch.ddp_hook(
            codec.Quantize(2, 64, "odd", "nearest"),
            feedback=True,
            transform=halve if factor is None else None,
            options=TWO_SHOT,
        ).register(model)
        for step in range(4):
            step_of(model, rank, lambda m, rank, step=step, factor=factor: _loss(m, rank, step) * (factor or 1))
        found.append((hook_state_bytes(hook), [p.grad.tolist() for p in model.parameters()]))
    assert found[0] == found[1]


def test_transform_precedes_residuals():
    run_ranks(2, _residuals)


def _failing(rank, size):
    """An error of the transform on one rank, in any bucket, raises on all ranks; the next step works."""
    model = wrapped()
    fail = None  # number of the transform call that raises
    calls = 0

    def transform(buffer, gradients):
        nonlocal calls
        calls += 1
        if rank == 1 and calls - 1 == fail:
            raise ZeroDivisionError("no gradient today")

    hook = codec.torch.ddp_hook(codec.Quantize(4), feedback=True, transform=transform, options=TWO_SHOT)
    hook.register(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(2):
        step_of(model, rank, lambda m, rank, step=step: _loss(m, rank, step), optimizer)
        buckets, calls = calls, 0
    for fail in (0, 3, buckets - 1):  # noqa: B007 - read by the transform
        before, calls = (parameter_bytes(model), hook_state_bytes(hook)), 0
        with pytest.raises(ZeroDivisionError if rank == 1 else codec.PeerError, match=r"today|rank 1"):
            step_of(model, rank, lambda m, rank: _loss(m, rank, 5), optimizer)
        assert (parameter_bytes(model), hook_state_bytes(hook)) == before
    fail = None
    step_of(model, rank, lambda m, rank: _loss(m, rank, 6), optimizer)
    assert hook.stats().failed_steps == 3
    return parameter_bytes(model)


def test_error_of_a_transform_on_one_rank_fails_the_step_on_all():
    assert len(set(run_ranks(3, _failing))) == 1


def test_peers_that_give_up_do_not_replace_the_error_of_this_rank():
    """This rank's error is reported, even if a peer, notified of it, aborts an earlier bucket."""
    own, echo = ZeroDivisionError("no gradient today"), PeerError("rank 1 could not do its part")
    causes = iter([Cause(ERROR, 1, "no gradient today")] * 2 + [Cause(ERROR, 2, "another")])
    collective = SimpleNamespace(rank=1, fail=lambda error: next(causes))
    state = StepState(ParameterPlan(codec.Quantize(4), None, default_policy), None)
    step = state.begin(1.0)
    state.fail(step, 3, own, collective)
    state.fail(step, 2, echo, collective)
    assert (step.outcome.failed, step.outcome.error) == (3, own)
    # This PeerError is due to rank 2's own error in an earlier bucket, so it replaces this rank's error
    state.fail(step, 1, echo, collective)
    assert (step.outcome.failed, step.outcome.error) == (1, echo)


class _TwoDtypes(nn.Module):
    """Model with parameters of two dtypes, whose gradients are the inputs; frames carry only one dtype."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(20, 20)), nn.Parameter(torch.ones(9, dtype=torch.float64))

    def forward(self, x):
        return (self.a * x).sum() + (self.b * x).sum()


def _agreeing(rank, size):
    """Steps fail on all ranks if their transforms return different sets of items, and succeed if these are equal."""
    model = DistributedDataParallel(_TwoDtypes(), process_group=dist.new_group())
    item = None
    hook = codec.torch.ddp_hook(transform=lambda *_: item, options=TWO_SHOT).register(model)
    for given in (5, "step 5", None):
        item = given
        model(rank + 1.0).backward()
        for p in model.parameters():
            assert (p.grad == 1.5).all()
            p.grad = None
    for ours, error in (((1, 2), codec.PeerError), (("1", None), codec.PeerError), ((1, 1.5), codec.CodecError)):
        item, before = ours[rank], hook_state_bytes(hook)
        with pytest.raises(error):
            model(1.0).backward()
        assert hook_state_bytes(hook) == before
    item = 7
    model(1.0).backward()
    assert hook.stats().steps == 4


def test_ranks_whose_transforms_return_other_items_fail_the_step():
    run_ranks(2, _agreeing)


def _nonfinite(rank, size):
    """If a transform raises on one rank, the PeerErrors of the other ranks have the status of its error."""
    model = wrapped()

    def transform(buffer, gradients):
        if rank == 1 and not buffer.isfinite().all():
            raise codec.ArgumentError("a gradient is NaN", codec.Status.NONFINITE)

    codec.torch.ddp_hook(codec.Quantize(4), transform=transform, options=TWO_SHOT).register(model)
    with pytest.raises(codec.ArgumentError if rank == 1 else codec.PeerError) as raised:
        (_loss(model, rank, 0) * (math.nan if rank == 1 else 1)).backward()
    assert raised.value.code == codec.Status.NONFINITE


def test_ranks_agree_on_the_status_of_nan():
    run_ranks(2, _nonfinite)


def _returning(rank, size):
    model = wrapped()
    codec.torch.ddp_hook(transform=lambda buffer, gradients: buffer * 2).register(model)
    with pytest.raises(codec.ArgumentError, match="it returned"):
        step_of(model, rank, lambda m, rank: _loss(m, rank, 0))


def test_transform_that_returns_a_tensor_is_rejected():
    run_ranks(1, _returning)
    with pytest.raises(codec.ArgumentError, match="transform must be a function"):
        codec.torch.ddp_hook(transform=0.9)


class Unusual(nn.Module):
    """Model with sparse, float64, complex and channels-last parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(20, 8, sparse=True)
        self.precise = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.complex = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64))
        self.images = nn.Parameter(torch.randn(4, 8, 3, 3).to(memory_format=torch.channels_last))

    def forward(self, i):
        x = (self.table(i) * self.precise.float()).sum(0)
        return ((x + 0j) @ self.complex).abs().sum() + (self.images * x.view(1, -1, 1, 1)).square().sum()


def _unusual(rank, size):
    shapes = {}

    def double(buffer, gradients):
        for p, g in gradients:
            shapes[names[p]] = tuple(g.shape), g.dtype, g.is_sparse
            if names[p] == "images":  # wrong if the gradient had another memory order
                g[1:] *= 2
            else:
                g.mul_(2)

    def forward(model, rank):
        return model(torch.tensor([1, 3, rank + 4]))

    plain, model = DistributedDataParallel(Unusual()), DistributedDataParallel(Unusual())
    names = {p: name for name, p in model.module.named_parameters()}
    codec.torch.ddp_hook(transform=double).register(model)
    for _ in range(2):
        want, got = step_of(plain, rank, forward), step_of(model, rank, forward)
        for p, g, w in zip(names, got, want, strict=True):
            expected = 2 * w.to_dense()
            if names[p] == "images":
                expected[0] /= 2
            assert torch.allclose(g.to_dense(), expected, rtol=1e-5), names[p]
    return shapes


def test_gradients_of_every_layout_can_be_transformed():
    shapes = {
        "table.weight": ((20, 8), torch.float32, True),
        "precise": ((8,), torch.float64, False),
        "complex": ((8, 3), torch.complex64, False),
        "images": ((4, 8, 3, 3), torch.float32, False),
    }
    assert run_ranks(2, _unusual) == [shapes] * 2


def _called(rank, size):
    """A user's hook that calls reduce() gives the same bits as an equivalent transform."""
    found = []

    def clamp(buffer, gradients):
        buffer.clamp_(-0.001, 0.001)

    for form in ("transform", "state", "closure", "served"):
        model = DistributedDataParallel(small_net(), process_group=dist.new_group())
        hook = codec.torch.ddp_hook(
            codec.Quantize(4), feedback=True, transform=clamp if form == "transform" else None, options=TWO_SHOT
        )

        def outer(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            bucket.buffer().clamp_(-0.001, 0.001)
            return hook.reduce(bucket)  # noqa: B023 - of this form

        if form == "transform":
            hook.register(model)
        else:
            if form == "served":
                hook.serve(model)
            model.register_comm_hook(hook if form == "state" else None, outer)
        for _ in range(3):
            grads = step_of(model, rank, small_forward)
        found.append([g.tolist() for g in grads] + [hook_state_bytes(hook)])
    assert all(f == found[0] for f in found)


def test_hook_of_the_caller_can_call_a_hook():
    run_ranks(2, _called)


def _group(rank, size):
    """With register(group=), gradients are means over that group only."""
    groups = [dist.new_group([r]) for r in range(size)]
    model = DistributedDataParallel(small_net())
    codec.torch.ddp_hook().register(model, group=groups[rank])
    got = step_of(model, rank, small_forward)
    alone = small_net()
    want = step_of(alone, rank, small_forward)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_register_takes_another_group():
    run_ranks(2, _group)


def test_buckets_are_saved_by_number_whichever_is_reduced_first():
    state = codec.torch.ddp_hook(codec.Quantize(4)).reducer.state
    step = state.begin(1.0)
    buckets = [Bucket(torch.ones(1), [], number, number == 2) for number in range(3)]
    step.runs += [BucketRun([bucket], bucket.number) for bucket in buckets]
    for number in (1, 2, 0):
        step.runs[number].names = [f"parameter of bucket {number}"]
    state.commit(step)
    assert state.buckets == [[f"parameter of bucket {number}"] for number in range(3)]
