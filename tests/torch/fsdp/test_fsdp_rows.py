"""Scales of FSDP2's gradients and parameters follow the rows of each rank's shards."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import codec
import codec.torch
from codec.tensors.segments import pack, unpack
from codec.torch.fsdp.layout import gradient_segments, parameter_segments
from codec.torch.reduction.partition import cut_evenly
from support.ddp_training import wrapped
from support.ranks import run_ranks

SHAPES = ((64, 128), (37, 100), (100,), (5, 3, 90), (129, 64))  # FSDP2 pads some of these on two or four ranks
SPECS = (codec.Float8(), codec.Float8("e5m2", entropy=True), codec.Sign("two_mean", group_size="row"))


class Bag(nn.Module):
    """Model whose backward pass gives its parameters the given gradients."""

    def __init__(self, gradients, used=None):
        super().__init__()
        self.parameters_ = nn.ParameterList([nn.Parameter(g.clone()) for g in gradients])
        self.gradients, self.used = gradients, used or range(len(gradients))

    def forward(self):
        return sum((self.parameters_[i] * self.gradients[i]).sum() for i in self.used)


def uneven(shapes=SHAPES):
    """Return tensors whose rows have different magnitudes, in random order."""
    g = torch.Generator().manual_seed(3)
    found = []
    for shape in shapes:
        x = torch.randn(shape, generator=g)
        if len(shape) > 1:
            rows = 10.0 ** torch.empty(math.prod(shape[:-1])).uniform_(-4, 4, generator=g)
            x *= rows.view(*shape[:-1], 1)
        found.append(x)
    return found


def row_error(got, want):
    """Return the largest error of any row, relative to the row's norm."""
    got, want = (x.reshape(-1, x.shape[-1]) for x in (got, want))
    return float(((got - want).norm(dim=1) / want.norm(dim=1)).max())


def errors_of(net, gradients):
    """Return the row errors of a sharded model's gradients."""
    return [
        row_error(p.grad.full_tensor(), g)
        for p, g in zip(net.parameters(), gradients, strict=True)
        if p.grad is not None
    ]


def reduced(spec, gradients, **how):
    """Reduce gradients by ReduceScatter; return their row errors, and the bytes sent."""
    net = fully_shard(Bag(gradients), **how)
    scatter = codec.torch.FsdpReduceScatter(spec).register(net)
    net().backward()
    return errors_of(net, gradients), scatter.stats().sent_nbytes


def _like_ddp(rank, size):
    found = []
    for spec in SPECS:
        gradients = uneven()
        ddp = wrapped(Bag(gradients))
        hook = codec.torch.ddp_hook(spec, feedback=False, policy=lambda *_, spec=spec: spec)
        hook.register(ddp)
        ddp().backward()
        theirs = [row_error(p.grad, g) for p, g in zip(ddp.parameters(), gradients, strict=True)]
        found.append((reduced(spec, gradients)[0], theirs))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_row_errors_are_not_larger_than_those_of_the_ddp_hook(size):
    for found in run_ranks(size, _like_ddp):
        for spec, (errors, theirs) in zip(SPECS, found, strict=True):
            for error, their in zip(errors, theirs, strict=True):
                assert error <= 1.05 * their + 1e-6, (spec, errors, theirs)
        assert max(found[0][0]) < 0.04


def _placements(rank, size):
    return reduced(codec.Float8(), uneven([(64, 128), (37, 256)]), shard_placement_fn=lambda p: Shard(1))[0]


def test_rows_of_columns_are_followed():
    """Scales follow rows also under Shard(1), in which each rank has some columns of all rows."""
    assert max(max(errors) for errors in run_ranks(2, _placements)) < 0.04


def _unused(rank, size):
    gradients, found = uneven(), []
    for frozen, every in ((True, False), (False, False), (False, True)):
        net = Bag(gradients, used=(0, 2, 3, 4))
        net.parameters_[1].requires_grad_(not frozen)
        fully_shard(net)
        codec.torch.FsdpReduceScatter(codec.Float8()).register(net)
        net.set_reduce_scatter_unused_params(every)
        net().backward()
        found.append(max(row_error(net.parameters_[i].grad.full_tensor(), gradients[i]) for i in (0, 2, 3, 4)))
    return found


def test_rows_are_followed_if_all_trained_parameters_get_gradients():
    """Scales follow rows with frozen parameters; with unused ones only if FSDP2 reduces zeros for them."""
    for frozen, unused, zeros in run_ranks(2, _unused):
        assert max(frozen, zeros) < 0.04
        assert unused > 0.5


def _replicas(rank, size):
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    gradients = uneven()
    net = fully_shard(Bag(gradients), mesh=mesh["shard"])
    between = codec.torch.FsdpAllReduce(codec.Float8(), group=mesh.get_group("replicate")).register(net)
    net().backward()
    assert between.stats().frame_collectives == 1
    return max(errors_of(net, gradients))


@pytest.mark.parametrize("size", [2, 4])
def test_rows_are_followed_between_replicas(size):
    assert max(run_ranks(size, _replicas)) < 0.04


def _parameters(rank, size):
    net = Bag(uneven())
    net.parameters_[1].requires_grad_(False)  # FSDP2 gathers frozen parameters, too
    fully_shard(net)
    codec.torch.FsdpAllGather(codec.Float8()).register(net)
    net.unshard()
    return max(row_error(p.detach(), g) for p, g in zip(net.parameters_, uneven(), strict=True))


def test_rows_of_gathered_parameters_are_followed():
    assert 0 < max(run_ranks(2, _parameters)) < 0.04


def _feedback(rank, size):
    """Return the largest row error of the mean of 20 passes with error feedback."""
    gradients = uneven()
    net = fully_shard(Bag(gradients))
    codec.torch.FsdpReduceScatter(codec.Float8(), feedback=True).register(net)
    for _ in range(20):
        net().backward()  # backward accumulates into p.grad
    return max(row_error(p.grad.full_tensor() / 20, g) for p, g in zip(net.parameters(), gradients, strict=True))


def test_error_feedback_goes_with_rows():
    assert max(run_ranks(2, _feedback)) < 0.01  # 0.03 without error feedback


def _large(rank, size):
    """Row errors are small for slices of several chunks whose boundaries lie within rows."""
    gradients = uneven([(900, 1000), (301, 700)])
    errors, nbytes = reduced(codec.Float8(), gradients)
    return max(errors), nbytes / sum(g.numel() for g in gradients)


def test_rows_that_a_chunk_divides_keep_their_scales():
    for error, nbytes in run_ranks(2, _large):
        assert error < 0.04
        assert nbytes < 0.52  # bytes per value: 1 for each value of the other rank's half


def test_even_slices_keep_the_whole_rows_of_segments():
    segments = pack([(part * 1000 + at, shape) for part in range(2) for at, shape in ((0, (6, 100)), (600, (40, 10)))])
    [first, second], [third, fourth] = cut_evenly(2000, 2, 1000, 480_000, segments)
    assert [(p.begin, p.end) for p in (first, second, third, fourth)] == [
        (0, 500),
        (500, 1000),
        (1000, 1500),
        (1500, 2000),
    ]
    assert unpack(first.segments) == unpack(third.segments) == [(0, (5, 100))]
    assert unpack(second.segments) == unpack(fourth.segments) == [(0, (1, 100)), (100, (40, 10))]
    [odd, _], _ = cut_evenly(2000, 2, 1000, 480_000, pack([(0, (3, 333))]))
    assert unpack(odd.segments) == [(0, (1, 333))]
    assert all(p.segments is None for p in cut_evenly(2000, 2, 4, 1 << 20)[0])


def _layout(rank, size):
    net = fully_shard(Bag(uneven()))
    shapes = [(-(-s[0] // size), *s[1:]) for s in SHAPES]
    part = sum(map(math.prod, shapes))
    expected = [(rank * part + offset, s) for rank in range(size) for offset, s in codec.segments(shapes)]
    assert unpack(gradient_segments(net, size * part, size)) == expected
    assert unpack(parameter_segments(net, part)) == expected[: len(shapes)]
    for module, n in ((None, size * part), (net, size * part - size)):
        assert gradient_segments(module, n, size) is None
    net.parameters_[0].requires_grad_(False)
    assert gradient_segments(net, size * part, size) is None
    assert unpack(parameter_segments(net, part)) == expected[: len(shapes)]
    dist.barrier()
    return np.sum([math.prod(s) for s in shapes])


def test_segments_are_the_shards_of_a_module():
    run_ranks(2, _layout)
    run_ranks(4, _layout)
