"""FSDP2, DDP with float64 parameters, the backend `codec` and algorithm="auto" accept GPU tensors."""

import logging

import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.collectives import uncompressed
from codec.torch.group import communicator
from support.collective_values import rank_values, tensor_bytes
from support.cuda_tensors import gpu, host
from support.fsdp_training import module_residuals
from support.gpu_collectives import how, outcome


def _float64(rank, size, kind):
    comm = communicator.communicator_of(None)
    every = [rank_values(r, (9000,)).double() for r in range(size)]
    with gpu(kind) as put:
        x = put(every[rank])
        mean = comm.run(lambda collective: uncompressed.mean(collective, x, None, codec.options()))
        assert mean.device == x.device
        assert torch.equal(host(x), every[rank])
    total = every[0]
    for other in every[1:]:
        total = total + other
    assert torch.equal(host(mean), total / size)


@pytest.mark.nccl
def test_float64_gradients_on_a_gpu_are_summed_uncompressed(ranks, kind):
    ranks.run(_float64, kind)


def _fsdp(rank, size, kind):
    """Call our FSDP2 collectives as FSDP2 does, on host and GPU tensors."""
    group, average = dist.group.WORLD, dist.ReduceOp.AVG
    x = rank_values(rank, (4000 * size,))
    with gpu(kind) as put:
        results = []
        for place in (torch.clone, put):
            reduce_scatter = codec.torch.FsdpReduceScatter(codec.Float8(group_size=100))
            all_gather = codec.torch.FsdpAllGather()
            shard, whole = place(torch.zeros(4000)), place(torch.zeros(4000 * size))
            reduce_scatter(shard, place(x), group, average)
            if (work := all_gather(whole, shard, group, async_op=True)) is not None:
                work.wait()
            replicas = codec.torch.FsdpAllReduce(codec.Quantize(4), group=group, feedback=True, options=how())
            for step in range(3):
                replicas.all_reduce("layer", gradients := place(rank_values(10 * step + rank, (9000,))))
            residual = module_residuals(replicas.state_dict(), rank)["layer"]
            norm = replicas.stats().residual_norm
            results.append((*(tensor_bytes(host(t)) for t in (shard, whole, gradients, residual)), norm))
        assert results[0][:4] == results[1][:4]
        assert results[0][4] == pytest.approx(results[1][4])


@pytest.mark.nccl
def test_fsdp_collectives_equal_those_of_host_memory(ranks, kind):
    ranks.run(_fsdp, kind)


def _backend(rank, size, kind):
    """Call torch.distributed over the backend `codec`, on host and GPU tensors."""
    how = codec.torch.BackendOptions(
        codec.Float8(group_size=100), algorithm="two_shot"
    )  # no random bits: rounds to nearest
    group = dist.new_group(backend="codec", pg_options=how)
    x = rank_values(rank, (5000 * size,))
    results = []
    with gpu(kind) as put:
        for place in (torch.clone, put):
            reduced, shard, whole = place(x), place(torch.zeros(5000)), place(torch.zeros(5000 * size))
            dist.all_reduce(reduced, group=group)
            dist.reduce_scatter_tensor(shard, place(x), group=group)
            dist.all_gather_into_tensor(whole, shard, group=group)
            tensors = [place(torch.zeros(5000)) for _ in range(size)]
            dist.all_gather(tensors, shard, group=group)
            small = place(torch.full((7,), float(rank)))
            dist.all_reduce(small, dist.ReduceOp.MAX, group=group)
            results.append([tensor_bytes(host(t)) for t in (reduced, shard, whole, small, *tensors)])
    assert results[0] == results[1]
    # Five collectives on host tensors and five on GPU tensors, less one that sends no frames: all_reduce of the small
    # host tensor uses Gloo
    assert group.stats().frame_collectives == 9
    dist.destroy_process_group(group)


def test_backend_takes_tensors_on_a_gpu(pair, kind):
    pair.run(_backend, kind)


def _auto(rank, size, kind):
    """Reduce by "auto"; return which calls sent uncompressed values, the messages of the log, and the last outcome."""
    ways, messages, feedback = [], [], codec.torch.Feedback(codec.Quantize(4))
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("codec.torch").addHandler(handler)
    logging.getLogger("codec.torch").setLevel(logging.INFO)
    try:
        with gpu(kind) as put:
            total = torch.zeros(100, 400)
            for call in range(7):
                before = codec.torch.group_stats()
                every = [rank_values(size * call + q, (100, 400)) for q in range(size)]
                x = put(every[rank])
                codec.torch.all_reduce(x, op="mean", feedback=feedback, options=how("auto"))
                total += host(x) - sum(every) / size
                ways.append((codec.torch.group_stats() - before).raw_collectives)
            residuals = feedback.state_dict()
            assert max(float(t.abs().max()) for t in residuals["worker"].values() if isinstance(t, torch.Tensor)) < 1e-6
            assert float(total.abs().max()) < 1e-5  # the raw all-reduce also sent the residuals that frames had left
            for _ in range(5):
                codec.torch.all_reduce(x := put(torch.ones(100, 400)), options=how("auto"))
                assert bool(host(x).eq(size).all())
                assert not communicator.communicator_of(None).channel.device._in_flight
            every[0][3, 5] = torch.nan
            found = outcome(codec.torch.all_reduce, put(every[rank]), op="mean", feedback=feedback, options=how("auto"))
    finally:
        logging.getLogger("codec.torch").removeHandler(handler)
    return ways, [m for m in messages if "Quantize" in m and "sent uncompressed from now on" in m], found


@pytest.mark.nccl
def test_auto_uses_all_reduce_of_nccl_where_it_is_faster(gpus, kind):
    (ways, messages, found), (others, _, other) = gpus.run(_auto, kind)
    assert ways == others
    assert ways[:5] == [0, 0, 0, 1, 1]  # trial: three frame collectives, two raw ones
    if kind == "emulated":  # kernels on the CPU are slower than any link
        assert ways[5:] == [1, 1]
        assert len(messages) == 1
    assert (found[0], found[2]) == ("ArgumentError", codec.Status.NONFINITE)
    assert (other[0], other[2]) == ("PeerError", codec.Status.NONFINITE)
