"""Output tensors that cannot be written raise on all ranks before anything is sent."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch import _compat
from codec.torch.group import communicator
from support.ranks import RankPool

N = 6000


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, timeout=8) as ranks:
        yield ranks


class RaisingTensor(torch.Tensor):
    """Tensor subclass whose torch functions raise."""

    error = RuntimeError("hostile")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise cls.error


class Exits(RaisingTensor):
    error = SystemExit(3)


def _expanded(n=N):
    return torch.ones(1).expand(n)


def _overlapping():
    return torch.zeros(N // 2 + 1).as_strided((N // 2, 2), (1, 1))


def _emptied():
    t = torch.ones(N)
    t.untyped_storage().resize_(0)
    return t


def _reduce(t):
    codec.torch.all_reduce(t, op="sum")


def _reduce_into(out):
    codec.torch.all_reduce(torch.ones(N), out=out)


def _scatter(out):
    codec.torch.reduce_scatter(out, torch.ones(2 * N))


def _gather(out):
    codec.torch.all_gather(out, torch.ones(N // 2))


def _all_to_all(out):
    codec.torch.all_to_all(out, torch.ones(N))


BAD = {
    "expanded": (_reduce, _expanded, torch.ones),
    "overlapping": (_reduce, _overlapping, torch.ones),
    "without storage": (_reduce, _emptied, torch.ones),
    "hostile": (_reduce, lambda: torch.ones(N).as_subclass(RaisingTensor), torch.ones),
    "exits": (_reduce, lambda: torch.ones(N).as_subclass(Exits), torch.ones),
    "out= expanded": (_reduce_into, _expanded, torch.empty),
    "out= of another dtype": (_reduce_into, lambda: torch.empty(N, dtype=torch.float16), torch.empty),
    "out= not contiguous": (_reduce_into, lambda: torch.empty(N, 2)[:, 0], torch.empty),
    "scatter expanded": (_scatter, _expanded, torch.empty),
    "gather expanded": (_gather, _expanded, torch.empty),
    "all_to_all expanded": (_all_to_all, _expanded, torch.empty),
    "timeout": (
        lambda t: codec.torch.all_reduce(t, op="mean", options=codec.CallOptions(timeout="5" if t.dim() == 2 else 5)),
        lambda: torch.ones(1, N),
        None,
    ),
}
OTHERS = {"hostile": RuntimeError, "exits": SystemExit}


def _refused(rank, size):
    for name, (call, bad, good) in BAD.items():
        t = bad() if rank == 0 else (good or torch.ones)(N)
        with pytest.raises(OTHERS.get(name, codec.ArgumentError) if rank == 0 else codec.PeerError):
            call(t)
        x = torch.full((N,), rank + 1.0)
        codec.torch.all_reduce(x, op="sum")  # the group is still usable
        assert (x == 3).all(), name


def test_output_that_cannot_be_written_is_an_error_on_all_ranks(ranks):
    ranks.new_group()
    ranks.run(_refused)


def _refused_by_backend(rank, size):
    """If one tensor in a list of outputs cannot be written on one rank, all ranks raise."""
    n, bad = N, rank == 0

    def listed(make):
        return [torch.zeros(n), make() if bad else torch.zeros(n)]

    def coalesced(tensors):
        with dist._coalescing_manager():
            for t in tensors:
                dist.all_reduce(t)

    def gathered(outputs):
        with dist._coalescing_manager():
            for out in outputs:
                _compat.all_gather_single(out, torch.ones(n // 2))

    def scattered(outputs):
        with dist._coalescing_manager():
            for out in outputs:
                _compat.reduce_scatter_single(out, torch.ones(2 * n))

    for call, make in (
        (lambda outs: dist.all_gather(outs, torch.ones(n)), _expanded),
        (coalesced, _expanded),
        (gathered, _expanded),
        (scattered, _expanded),
        (scattered, lambda: torch.zeros(n - 1)),
    ):
        outputs = listed(make)
        before = [t.clone() for t in outputs]
        with pytest.raises(codec.ArgumentError if bad else codec.PeerError):
            call(outputs)
        assert all(map(torch.equal, outputs, before))
        x = torch.full((n,), rank + 1.0)
        dist.all_reduce(x)
        assert (x == 3).all()


def test_list_output_that_cannot_be_written_is_an_error_on_all_ranks(ranks):
    ranks.new_group("codec")
    ranks.run(_refused_by_backend)


def _in_inference_mode(rank, size):
    n = 1 << 14
    with torch.inference_mode():
        outputs = [torch.empty(n) for _ in range(size)]
        dist.all_gather(outputs, torch.full((n,), rank + 1.0))
        assert [t.unique().tolist() for t in outputs] == [[1.0], [2.0]]
        tensors = [torch.full((n,), rank + 1.0) for _ in range(3)]
        with dist._coalescing_manager():
            for t in tensors:
                dist.all_reduce(t)
        assert [t.unique().tolist() for t in tensors] == [[3.0]] * 3
        transposed = torch.full((128, 256), rank + 1.0).T
        dist.all_reduce(transposed)
        assert transposed.unique().tolist() == [3.0]
        codec.torch.all_reduce(transposed, op="sum")
        assert transposed.unique().tolist() == [6.0]
        gathered = torch.empty(n, size).T
        codec.torch.all_gather(gathered, torch.full((n,), rank + 1.0))
        assert [row.unique().tolist() for row in gathered] == [[1.0], [2.0]]
    outside = torch.full((128, 256), 1.0).T
    codec.torch.all_reduce(transposed, op="mean")  # accepted: an inference tensor outside of inference mode
    with torch.inference_mode():
        codec.torch.all_reduce(outside, op="sum")  # accepted: an ordinary tensor in inference mode
    assert outside.unique().tolist() == [2.0]
    leaf = torch.ones(100, 50, requires_grad=True)
    for t in (leaf, leaf.T, leaf[:, ::2]):
        codec.torch.all_reduce(t, op="mean")
    assert leaf.requires_grad
    assert leaf.is_leaf


def test_results_are_stored_in_inference_tensors_and_leaves(ranks):
    ranks.new_group("codec")
    ranks.run(_in_inference_mode)


def _failing_to_store(rank, size):
    from codec.torch.collectives import outputs

    x, publish = torch.full((N,), rank + 1.0), outputs.publish

    def failing(*args):
        raise RuntimeError("cannot store")

    if rank == 0:
        outputs.publish = failing
    try:
        if rank == 0:
            with pytest.raises(RuntimeError, match="cannot store"):
                codec.torch.all_reduce(x, op="sum")
        else:
            codec.torch.all_reduce(x, op="sum")
    finally:
        outputs.publish = publish
    with pytest.raises(codec.PeerError):
        codec.torch.all_reduce(x, op="mean")


def test_failure_to_store_closes_the_group_on_all_ranks(ranks):
    ranks.new_group()
    ranks.run(_failing_to_store)


TIMEOUTS = (0, -1, 1e-9, 1e12, float("nan"), float("inf"), "5", True, [1], timedelta.max, timedelta.min, timedelta(0))


def _timeouts(rank, size):
    """An invalid timeout on one rank, in the group's first call, raises on all ranks."""
    for bad in TIMEOUTS:
        group = dist.new_group(timeout=timedelta(seconds=5))
        # The constructor does not validate, unlike codec.options()
        options = codec.CallOptions(timeout=bad if rank == 0 else 4)
        with pytest.raises(codec.ArgumentError if rank == 0 else codec.PeerError):
            codec.torch.all_reduce(torch.ones(3), group=group, options=options)
        x = torch.ones(3)
        codec.torch.all_reduce(
            x, group=group, op="sum", options=codec.options(timeout=0.001 if rank == 0 else timedelta(days=3653))
        )
        assert (x == 2).all()
        dist.destroy_process_group(group)


def test_bad_timeout_on_one_rank_is_an_error_on_all(ranks):
    ranks.new_group()
    ranks.run(_timeouts)


@pytest.mark.parametrize("make", [codec.torch.ddp_hook, codec.torch.FsdpReduceScatter, codec.torch.FsdpAllGather])
def test_bad_timeout_is_rejected_where_it_is_given(make):
    for bad in TIMEOUTS:
        with pytest.raises(codec.ArgumentError, match="timeout must be seconds or a timedelta"):
            make(options=codec.options(timeout=bad))
    make(options=codec.options(timeout=timedelta(seconds=5)))


def _groups(rank, size):
    for bad in ("x", 5, [], object):
        for call in (
            lambda bad=bad: codec.torch.all_reduce(torch.ones(3), group=bad),
            lambda bad=bad: codec.torch.all_to_all_bytes([b""] * size, group=bad),
            lambda bad=bad: communicator.communicator_of(bad),
        ):
            with pytest.raises(codec.ArgumentError, match="group must be a ProcessGroup, a DeviceMesh"):
                call()


def test_group_of_another_type_is_rejected(ranks):
    ranks.new_group()
    ranks.run(_groups)
