"""The backend `codec` supports the names of collectives in older torch releases, and their futures."""

import torch
import torch.distributed as dist

import codec.torch
from support.ranks import run_ranks


def _older_names(rank, size):
    group = dist.group.WORLD
    n = 8000
    mine, every = torch.full((n,), rank + 1.0), torch.empty(size * n)
    whole, part = torch.arange(size * n, dtype=torch.float32), torch.empty(n)
    calls = [
        lambda: group._allgather_base(every, mine),
        lambda: group.allgather_into_tensor_coalesced([every], [mine]),
        lambda: group._reduce_scatter_base(part, whole, dist.ReduceScatterOptions()),
        lambda: group.reduce_scatter_tensor_coalesced([part], [whole], dist.ReduceScatterOptions()),
    ]
    for call in calls:
        before = codec.torch.group_stats(group)
        every.zero_()
        part.zero_()
        work = call()
        work.wait()
        work.get_future().wait()
        assert (codec.torch.group_stats(group) - before).frame_collectives == 1
        gathered = torch.cat([torch.full((n,), r + 1.0) for r in range(size)])
        assert torch.equal(every, gathered) or torch.equal(part, size * whole[rank * n : (rank + 1) * n])


def test_collectives_by_older_names_travel_as_frames():
    run_ranks(3, _older_names, backend="codec")


def _small(rank, size):
    group, options = dist.group.WORLD, dist.ReduceScatterOptions()
    for dtype in (torch.float32, torch.int64):
        part, whole = torch.zeros(4, dtype=dtype), torch.arange(4 * size, dtype=dtype)
        for call in (
            lambda part=part, whole=whole: group.reduce_scatter_single(part, whole, options),
            lambda part=part, whole=whole: group.reduce_scatter([part], [list(whole.chunk(size))], options),
            lambda part=part, whole=whole: group.reduce_scatter_single_coalesced([part], [whole], options),
        ):
            part.zero_()
            (found,) = call().get_future().wait()
            assert found is part
            assert torch.equal(part, size * whole[4 * rank : 4 * rank + 4])


def test_reduce_scatter_of_a_small_tensor_has_a_future():
    run_ranks(2, _small, backend="codec")
