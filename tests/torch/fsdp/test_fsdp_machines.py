"""FSDP2 whose shards are on several machines: plain values within a machine, frames between machines."""

import copy
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import codec
import codec.torch
from support.fsdp_training import batch, gradients_of, mean, module_residuals, small_model
from support.ranks import run_ranks

COARSE = codec.Quantize(4)


def machines_of(size):
    return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("machine", "rank"))


def shard(net, **how):
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **how)
    return fully_shard(net, **how)


def registered(group, spec=COARSE, **how):
    """Return a sharded model, and the objects that reduce its gradients and gather its parameters."""
    net = shard(small_model())
    gradients = codec.torch.FsdpReduceScatter(spec, group=group, **how).register(net)
    return net, gradients, codec.torch.FsdpAllGather(group=group).register(net)


def train(net, rank, steps, x=None):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        net(batch(rank + 100 * step) if x is None else x).square().mean().backward()
        optimizer.step()


def whole(net):
    return torch.cat([p.full_tensor().detach().flatten() for p in net.parameters()])


def _lossless(rank, size):
    """Train flat, in the levels of a mesh, and in those of a pair of groups; return the parameters and statistics."""
    mesh, found = machines_of(size), []
    pair = mesh.get_group("machine"), mesh.get_group("rank")
    for group in (None, mesh, pair):
        net, *comms = registered(group, codec.Lossless())
        train(net, rank, range(3))
        found.append((whole(net), [comm.stats() for comm in comms]))
    return found


@pytest.mark.parametrize("size", [4, 6])
def test_lossless_training_in_two_levels_equals_flat_training(size):
    for flat, mesh, pair in run_ranks(size, _lossless):
        torch.testing.assert_close(mesh[0], flat[0], rtol=0, atol=1e-6)
        assert torch.equal(mesh[0], pair[0])
        for one, two in zip(flat[1], mesh[1], strict=True):
            assert one.frame_collectives == two.frame_collectives >= 3 * 3
            assert one.raw_nbytes == two.raw_nbytes
            assert one.local_nbytes == 0 < two.local_nbytes
            assert all(
                stats.cpu_s > 0 and sum(stats.waited_s.values()) == pytest.approx(stats.wire_s) for stats in (one, two)
            )
            assert two.sent_nbytes < one.sent_nbytes / (size / 2)


def _resharded(rank, size):
    """Return the parameters after training, and the frames and plain all-gathers, with resharding to a machine."""
    found = []
    for reshard in (True, 2):
        net = shard(small_model(), reshard_after_forward=reshard)
        parameters = codec.torch.FsdpAllGather(group=machines_of(size)).register(net)
        train(net, rank, range(2))
        stats = parameters.stats()
        found.append((whole(net), stats.frame_collectives, stats.raw_collectives, stats.sent_nbytes))
    return found


def test_backward_gathers_within_machines_after_resharding_to_them():
    for (flat, frames, plain, nbytes), (resharded, fewer, within, less) in run_ranks(4, _resharded):
        assert torch.equal(resharded, flat)
        assert plain == 0 < within
        assert fewer + within == frames
        assert less < 0.7 * nbytes


def _traffic(rank, size):
    """Return results and bytes of a reduce-scatter and an all-gather of shards of 3000 values."""
    mesh, n = machines_of(size), 3000
    every = [torch.randn(size * n, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    mine, found = slice(n * rank, n * (rank + 1)), {}
    for dtype, op in ((torch.float32, dist.ReduceOp.AVG), (torch.bfloat16, dist.ReduceOp.SUM)):
        scatter = codec.torch.FsdpReduceScatter(codec.Float8(group_size=100), group=mesh)
        gather = codec.torch.FsdpAllGather(codec.Float8(group_size=100), group=mesh)
        out, gathered = torch.empty(n, dtype=dtype), torch.empty(size * n, dtype=dtype)
        scatter(out, every[rank].to(dtype), dist.group.WORLD, op)
        exact = sum(x[mine] for x in every) / (size if op == dist.ReduceOp.AVG else 1)
        work = gather(gathered, every[rank][mine].to(dtype), dist.group.WORLD, async_op=True)
        work.wait()
        shards = torch.cat([x[n * r : n * (r + 1)] for r, x in enumerate(every)])
        errors = [((a.float() - b).norm() / b.norm()).item() for a, b in ((out, exact), (gathered, shards))]
        found[dtype] = errors, [gathered.double().sum().item()], scatter.stats(), gather.stats()
    return found


def test_each_machine_sends_frames_of_its_own_part_only():
    results = run_ranks(4, _traffic)
    for found in results:
        for dtype, (errors, gathered, scatter, gather) in found.items():
            assert all(1e-4 < e < 0.05 for e in errors), errors
            assert gathered == results[0][dtype][1]
            # One frame of 3000 values, for the rank at the same place of the other machine, instead of three
            assert 3000 < scatter.sent_nbytes < 3300
            assert 3000 < gather.sent_nbytes < 3300
            assert scatter.local_nbytes == gather.local_nbytes == 2 * 3000 * dtype.itemsize
            assert scatter.uncompressed_nbytes == gather.uncompressed_nbytes == 3000 * dtype.itemsize


def _feedback(rank, size):
    """Return the difference between the sums of exact and of reduced gradients, and what residuals explain of it."""
    torch.manual_seed(5)
    plain = nn.Linear(60, 128)
    net = fully_shard(copy.deepcopy(plain))
    gradients = codec.torch.FsdpReduceScatter(COARSE, group=machines_of(size), feedback=True).register(net)
    for _ in range(4):  # p.grad is the sum
        net(batch(rank)).square().mean().backward()
    got = torch.cat([p.grad.to_local().flatten() for p in net.parameters()])
    exact = torch.cat([4 * mean(g).chunk(size)[rank].flatten() for g in gradients_of(plain, size)])
    residual = module_residuals(gradients.state_dict(), rank)[""]
    every = [torch.empty_like(residual) for _ in range(size)]
    dist.all_gather(every, residual)
    machine, place = divmod(rank, 2)
    held = sum(each.chunk(2)[machine] for each in every[place::2]) / 2
    lost = exact - got
    return (lost - held).abs().max().item(), lost.abs().max().item(), residual.numel() / got.numel()


def test_residuals_are_those_of_the_machine_and_add_up():
    for imbalance, lost, chunks in run_ranks(4, _feedback):
        assert chunks == 2  # instead of 4: half of the memory
        assert lost > 1e-4
        assert imbalance < 1e-3 * lost


def _fails(rank, size):
    net, gradients, _ = registered(machines_of(size), feedback=True)
    train(net, rank, range(1))
    before = module_residuals(gradients.state_dict(), rank)
    x = batch(rank)
    x[0, 0] = float("nan") if rank == 1 else 0
    handle = net[0].register_forward_hook(lambda module, args, out: out.nan_to_num())
    with pytest.raises(codec.CodecError) as e:
        train(net, rank, range(1), x)
    handle.remove()
    now = module_residuals(gradients.state_dict(), rank)
    assert all(torch.equal(now[name], before[name]) for name in ("0", "2", "4"))
    train(net, rank, range(1, 3))
    return type(e.value).__name__, whole(net)


def test_error_on_one_rank_is_an_error_on_all_and_changes_nothing():
    results = run_ranks(4, _fails)
    assert [name for name, _ in results] == ["PeerError", "ArgumentError", "PeerError", "PeerError"]
    assert all(torch.equal(parameters, results[0][1]) for _, parameters in results)
    assert results[0][1].isfinite().all()


def _lost(rank, size):
    net, *_ = registered(machines_of(size))
    net(batch(rank)).square().mean().backward()
    loss = net(batch(rank)).square().mean()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(codec.PeerError):
        loss.backward()
    return time.monotonic() - begin


def test_killed_rank_raises_on_all_ranks_of_all_machines():
    assert max(run_ranks(4, _lost, killed=(3,), limit=60)[:3]) < 15  # seconds; the group's timeout is 30 minutes


def _resumed(rank, size):
    """Training for 2 + 2 steps, with new objects from a checkpoint, equals training for 4 steps."""
    mesh, spec = machines_of(size), codec.Quantize(3, 32)
    straight, gradients, _ = registered(mesh, spec, feedback=True)
    train(straight, rank, range(2))
    model, state = {k: v.clone() for k, v in straight.state_dict().items()}, gradients.state_dict()
    train(straight, rank, range(2, 4))
    net, gradients, _ = registered(mesh, spec, feedback=True)
    net.load_state_dict(model)
    gradients.load_state_dict(state)
    train(net, rank, range(2, 4))
    assert torch.equal(whole(net), whole(straight))
    flat, gradients, _ = registered(None, spec, feedback=True)
    gradients.load_state_dict(state)
    with pytest.raises(codec.ArgumentError, match="group= has changed"):
        train(flat, rank, range(1))


def test_training_resumes_with_the_same_bits_in_the_same_levels():
    run_ranks(4, _resumed)


def _refused(rank, size):
    interleaved = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("machine", "rank"))
    net, *_ = registered(interleaved)
    with pytest.raises(codec.ArgumentError, match="consecutive ranks"):
        net(batch(rank))
    half = dist.new_group([0, 2])
    gather = codec.torch.FsdpAllGather(group=machines_of(size))
    if rank in (0, 2):
        with pytest.raises(codec.ArgumentError, match=r"shards the parameters over the ranks \[0, 2\]"):
            gather(torch.empty(20), torch.empty(10), half)


def test_other_levels_than_those_of_the_shards_are_refused():
    run_ranks(4, _refused)


def _replicas(rank, size):
    """Train with replicas in two levels: lossless, with error feedback, and in one level without a codec."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("machine", "rank", "shard"))
    options, found = codec.options(algorithm="two_shot"), []
    for spec, feedback in ((codec.Lossless(), False), (COARSE, True)):
        net = small_model()
        for module in (net[0], net[2], net[4], net):
            fully_shard(module, mesh=mesh["shard"])
        comm = codec.torch.FsdpAllReduce(spec, group=mesh["machine", "rank"], feedback=feedback, options=options)
        comm.register(net)
        train(net, rank, range(4))
        found.append((whole(net), comm.stats(), module_residuals(comm.state_dict(), rank)))
    net = shard(small_model())
    train(net, rank, range(4))
    return whole(net), found


def test_replicas_in_two_levels_average_as_in_one():
    results = run_ranks(4, _replicas)
    for plain, (lossless, lossy) in results:
        torch.testing.assert_close(lossless[0], plain, rtol=0, atol=1e-6)
        torch.testing.assert_close(lossy[0], plain, rtol=0, atol=0.02)
        assert torch.equal(lossy[0], results[0][1][1][0])
        assert lossy[1].ratio < 1 / 6
        assert 0 < lossy[2]["2"].numel() < 0.6 * (150 * 90 + 90)  # the residual of this rank's window
