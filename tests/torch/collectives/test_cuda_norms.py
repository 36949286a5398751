"""Norms of values on GPUs are computed there, and fail collectives as those of host memory do."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import codec
import codec.torch
from codec.torch.group.communicator import communicator_of
from support.cuda_tensors import gpu, host, new_group_of_gpus
from support.gpu_collectives import how, outcome
from support.ranks import RankPool

N, MOST = 6000, 1000.0


def tensor(rank, factor):
    return torch.randn(N, generator=torch.Generator().manual_seed(rank)) * factor


def _reduced(rank, size, kind):
    """Return the outcomes of all-reduces with a large tensor on the last rank, and of those that follow them."""
    found = []
    with gpu(kind) as put:
        for algorithm in ("two_shot", "all_gather", "raw", "ring"):
            for spec in (codec.Lossless(), codec.Quantize(8)):
                for op in ("sum", "mean", "max"):
                    for factor in (1e6, 1.0):
                        x = tensor(rank, factor if rank == size - 1 else 1.0)
                        there = put(x)
                        options = how(algorithm, max_norm=MOST)
                        found.append(outcome(codec.torch.all_reduce, there, spec=spec, op=op, options=options))
                        assert (found[-1] == "success") == (factor == 1), (algorithm, spec, op, found[-1])
                        assert found[-1] == "success" or torch.equal(host(there), x)
    return found


def check(results, bad):
    """Check that outcomes are those of all ranks, and that errors name rank `bad`."""
    for outcomes in zip(*results, strict=True):
        failed = [each for each in outcomes if each != "success"]
        assert len(failed) in (0, len(outcomes)), outcomes
        assert all(f"rank {bad} has sent values whose L2 norm" in text for _, text, _ in failed), failed


def test_norm_above_the_bound_is_an_error_on_all_ranks(ranks, kind):
    results = ranks.run(_reduced, kind)
    check(results, len(results) - 1)


def _others(rank, size, kind):
    with gpu(kind) as put:
        x, found = put(tensor(rank, 1e6 if rank else 1.0)[: N - N % size]), []
        for call, n in (
            (codec.torch.reduce_scatter, x.numel() // size),
            (codec.torch.all_gather, x.numel() * size),
            (codec.torch.all_to_all, x.numel()),
        ):
            found.append(outcome(call, put(torch.empty(n)), x, codec.Quantize(8), options=codec.options(max_norm=MOST)))
        return found


def test_other_collectives_check_norms(gpus, kind):
    results = gpus.run(_others, kind)
    assert all(each != "success" for each in results[0])
    check(results, 1)


def _levels(rank, size, kind):
    mesh, found = init_device_mesh("cpu", (2, 2)), []
    with gpu(kind) as put:
        for op in ("sum", "mean"):
            for factor in (1e6, 1.0):
                x = tensor(rank, factor if rank == 3 else 1.0)
                options = how("two_shot", max_norm=MOST)
                found.append(outcome(codec.torch.all_reduce, put(x), op=op, group=mesh, options=options))
                assert (found[-1] == "success") == (factor == 1), found[-1]
    assert communicator_of(mesh).channel.device.connected_within
    return found


def test_norms_are_checked_within_machines_connected_by_nccl(kind):
    with RankPool(4, timeout=10) as ranks:
        new_group_of_gpus(ranks)
        check(ranks.run(_levels, kind), 3)


@pytest.mark.parametrize("value", [1e-30, 1e30])
def test_norms_do_not_overflow(pair, kind, value):
    assert pair.run(_extreme, kind, value) == ["success"] * 2


def _extreme(rank, size, kind, value):
    with gpu(kind) as put:
        x = put(torch.full((100,), value))
        return outcome(codec.torch.all_reduce, x, op="mean", options=how(max_norm=11 * value))
