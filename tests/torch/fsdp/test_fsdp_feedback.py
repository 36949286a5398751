"""FSDP2 with error feedback and between replicas (HSDP): residuals, failures, checkpoints, statistics."""

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import codec
import codec.torch
from codec.torch import _compat
from support.fsdp_training import batch, gradients_of, mean, module_residuals, small_model
from support.ranks import run_ranks

COARSE = codec.Quantize(4)


def shard(net, mesh=None):
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train(net, rank, steps, x=None):
    """Train for the range `steps` of step numbers, and return the losses."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in steps:
        loss = net(batch(rank + 100 * step) if x is None else x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(net):
    """Gather all shards, and return the full parameters."""
    return [p.full_tensor().detach().clone() for p in net.parameters()]


def residuals(comm, rank):
    return module_residuals(comm.state_dict(), rank)


def _telescopes(rank, size):
    net = shard(small_model())
    comm = codec.torch.FsdpReduceScatter(COARSE, feedback=True).register(net)
    steps, n = 4, 90 * 150 + 90
    got, exact = torch.zeros(n // size), [torch.zeros(90, 150), torch.zeros(90)]
    for _ in range(steps):
        net(batch(rank)).square().mean().backward()
        layer = net[2]
        got += torch.cat([p.grad.to_local().flatten() for p in layer.parameters()])
        net.zero_grad()
    every = gradients_of(small_model(), size)
    exact = [steps * mean(every[i]).chunk(size)[rank].flatten() for i in (2, 3)]
    residual = residuals(comm, rank)["2"]
    held = torch.empty(n // size)
    _compat.reduce_scatter_single(held, residual, op=dist.ReduceOp.SUM)
    lost = torch.cat(exact) - got
    return float((lost - held / size).abs().max()), float(lost.abs().max())


def test_reduced_gradients_and_residuals_add_up_to_the_gradients():
    for imbalance, lost in run_ranks(3, _telescopes):
        assert lost > 1e-4
        assert imbalance < 1e-3 * lost


def _replicated(rank, size, how):
    """Train by HSDP on a 2 x 2 mesh; replicas average uncompressed, by the hook or over the backend `codec`."""
    names = ("replicate", "shard")
    net = small_model()
    if how == "plain":
        shard(net, init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
        train(net, rank, range(4))
        return whole(net), None
    if how == "backend":
        options = codec.torch.BackendOptions(codec.Lossless(), small=0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override={"replicate": ("codec", options)})
        shard(net, mesh)
        comm = codec.torch.FsdpReduceScatter().register(net)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        shard(net, mesh if how == "HSDP" else mesh["shard"])
        spec, feedback = (COARSE, True) if how == "lossy" else (codec.Lossless(), False)
        comm = codec.torch.FsdpAllReduce(spec, group=mesh["replicate"], feedback=feedback).register(net)
        comm.register(net)  # again, with no effect
    losses = train(net, rank, range(4))
    return whole(net), comm.stats(), losses


def test_replicas_reduce_gradients_as_frames():
    plain = run_ranks(4, _replicated, "plain")[0][0]
    for how in ("lossless", "HSDP", "backend", "lossy"):
        results = run_ranks(4, _replicated, how)
        for parameters, stats, _ in results:
            for p, first, want in zip(parameters, results[0][0], plain, strict=True):
                assert torch.equal(p, first)  # replicas are identical
                torch.testing.assert_close(p, want, rtol=0, atol=1e-6 if how != "lossy" else 0.01)
            assert stats.frame_collectives == 4 * 3
            assert stats.ratio < (1 / 6 if how == "lossy" else 0.95)
            assert (stats.residual_norm > 0) == (how == "lossy")


def _fails(rank, size, replicas):
    """A NaN gradient on one rank, in the module that is reduced last, raises and leaves residuals unchanged."""
    net = small_model()
    comms = []
    if replicas:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        shard(net, mesh["shard"])
        comms = [
            codec.torch.FsdpReduceScatter(COARSE, feedback=True).register(net),
            codec.torch.FsdpAllReduce(COARSE, group=mesh.get_group("replicate"), feedback=True).register(net),
        ]
    else:
        shard(net)
        comms = [codec.torch.FsdpReduceScatter(COARSE, feedback=True).register(net)]
    train(net, rank, range(1))
    before = [copy.deepcopy(residuals(comm, rank)) for comm in comms]
    x = batch(rank)
    if rank == 1:
        x[0, 0] = float("nan")
    handle = net[0].register_forward_hook(
        lambda module, args, out: out.nan_to_num()
    )  # removes NaN after the first layer, so that other layers' gradients are finite
    with pytest.raises(codec.CodecError) as e:
        train(net, rank, range(1), x)
    handle.remove()
    for comm, kept in zip(comms, before, strict=True):
        now = residuals(comm, rank)
        assert list(now) == list(kept) == ["0", "2", "4"]
        assert all(torch.equal(now[name], kept[name]) for name in kept)
    train(net, rank, range(1, 3))  # FSDP2 and the groups can still be used
    assert all(p.isfinite().all() for p in whole(net))
    assert all(not torch.equal(residuals(comms[0], rank)[name], before[0][name]) for name in before[0])
    return type(e.value).__name__, whole(net)


@pytest.mark.parametrize("replicas", [False, True], ids=["FSDP", "HSDP"])
def test_error_in_one_module_on_one_rank_undoes_the_pass_on_all(replicas):
    results = run_ranks(4, _fails, replicas)
    assert [name for name, _ in results] == ["PeerError", "ArgumentError", "PeerError", "PeerError"]
    for _, parameters in results:
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0][1], strict=True))


class Interrupt(Exception):
    pass


def _interrupted(rank, size):
    """If backward raises, the residuals of modules that were already reduced are restored."""
    net = shard(small_model())
    comm = codec.torch.FsdpReduceScatter(COARSE, feedback=True).register(net)
    train(net, rank, range(1))
    before = copy.deepcopy(residuals(comm, rank))

    def interrupt(*_):
        raise Interrupt

    out = net[0](batch(rank))
    out.register_hook(interrupt)
    calls = comm.stats().frame_collectives
    with pytest.raises(Interrupt):
        net[4](net[3](net[2](net[1](out)))).square().mean().backward()
    assert comm.stats().frame_collectives == calls + 2
    assert all(torch.equal(x, before[name]) for name, x in residuals(comm, rank).items())


def test_exception_in_backward_undoes_residuals():
    run_ranks(2, _interrupted)


def _resumed(rank, size, gather):
    """Training for 2 + 2 steps, with new objects from a checkpoint, equals training for 4 steps."""

    def begin():
        net = shard(small_model())
        spec = codec.Quantize(3, 32)  # stochastic rounding: random streams must resume, too
        return net, codec.torch.FsdpReduceScatter(spec, feedback=True).register(net)

    straight, _ = begin()
    train(straight, rank, range(4))
    net, comm = begin()
    train(net, rank, range(2))
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "comm": comm.state_dict(gather=gather)}, file)
    file.seek(0)
    saved = torch.load(file)
    assert len(saved["comm"]) == 3 + (size if gather else 1)
    net, comm = begin()
    net.load_state_dict(saved["model"])
    comm.load_state_dict(saved["comm"])
    train(net, rank, range(2, 4))
    return all(torch.equal(a, b) for a, b in zip(whole(net), whole(straight), strict=True)), saved["comm"]


@pytest.mark.parametrize("gather", [False, True])
def test_training_resumes_from_a_checkpoint_with_the_same_bits(gather):
    results = run_ranks(2, _resumed, gather)
    assert [same for same, _ in results] == [True, True]
    first, second = (state for _, state in results)
    assert (list(first) == list(second)) == gather


def _refused_states(rank, size):
    net = shard(small_model())
    comm = codec.torch.FsdpReduceScatter(COARSE, feedback=True).register(net)
    train(net, rank, range(1))
    good = comm.state_dict()
    (mine,) = good[f"rank {rank}"]

    def with_residual(name, values):
        worker = {key: x for key, x in mine["residuals"]["worker"].items() if not key.startswith(f"{name}[")}
        worker[f"{name}[0:{len(values)}]"] = values
        return good | {f"rank {rank}": (mine | {"residuals": mine["residuals"] | {"worker": worker}},)}

    before = residuals(comm, rank)
    wrong = [
        ({k: v for k, v in good.items() if k != f"rank {rank}"}, "load the state that this rank saved"),
        (good | {"world_size": 3}, "3 ranks"),
        (with_residual("nobody", torch.zeros(5)), "nobody"),
    ]
    for state, message in wrong:
        with pytest.raises(codec.StateError, match=message):
            comm.load_state_dict(state)
        assert all(torch.equal(x, before[name]) for name, x in residuals(comm, rank).items())
    with pytest.raises(codec.StateError, match="feedback=True"):
        codec.torch.FsdpReduceScatter(COARSE).register(net).load_state_dict(good)
    comm.register(net)
    comm.load_state_dict(with_residual("0", torch.zeros(8)) if rank == 0 else good)
    # A residual of another size: detected when the module's gradients are reduced
    with pytest.raises(codec.CodecError) as e:
        train(net, rank, range(1))
    comm.load_state_dict(good)
    train(net, rank, range(1))
    return type(e.value).__name__


def test_wrong_states_are_rejected():
    assert run_ranks(2, _refused_states) == ["ArgumentError", "PeerError"]


def _wrong_uses(rank, size):
    plain, net = small_model(), shard(small_model())
    for comm in (codec.torch.FsdpReduceScatter(), codec.torch.FsdpAllGather()):
        with pytest.raises(codec.ArgumentError, match="fully_shard"):
            comm.register(plain)
    with pytest.raises(codec.SpecError, match="Lossless"):
        codec.torch.FsdpReduceScatter(feedback=True)
    with pytest.raises(codec.ArgumentError, match="ring"):
        codec.torch.FsdpAllReduce(COARSE, group=None, feedback=True, options=codec.options(algorithm="ring"))
    with pytest.raises(codec.SpecError, match="Ternary"):
        codec.torch.FsdpAllReduce(COARSE, group=None, options=codec.options(algorithm="shared_scale"))
    with pytest.raises(codec.ArgumentError, match="op must be"):
        codec.torch.FsdpAllReduce(COARSE, group=None, op="max")
    with pytest.raises(codec.SpecError, match="not a spec"):
        codec.torch.FsdpAllReduce("float8", group=None)
    with pytest.raises(codec.ArgumentError, match=r'different shards.*mesh\["shard"\]'):
        codec.torch.FsdpAllReduce(COARSE, group=None).register(net)
    net.set_custom_reduce_scatter(codec.torch.FsdpReduceScatter(COARSE, feedback=True))
    for module in net:
        if isinstance(module, nn.Linear):
            module.set_custom_reduce_scatter(codec.torch.FsdpReduceScatter(COARSE, feedback=True))
    with pytest.raises(codec.ArgumentError, match="register"):
        train(net, rank, range(1))


def test_wrong_uses_are_rejected():
    run_ranks(4, _wrong_uses)


def _counted(rank, size):
    net = shard(small_model())
    gradients = codec.torch.FsdpReduceScatter(codec.Float8(group_size=128)).register(net)
    parameters = codec.torch.FsdpAllGather().register(net)
    assert math.isnan(gradients.stats().ratio)
    train(net, rank, range(3))
    return gradients.stats(), parameters.stats()


def test_stats_count_bytes_calls_and_seconds():
    results = run_ranks(2, _counted)
    n = sum(p.numel() for p in small_model().parameters())
    for gradients, parameters in results:
        assert gradients.frame_collectives == 9
        assert gradients.raw_collectives == 0
        assert 3 * n * 4 <= gradients.raw_nbytes <= 1.01 * 3 * n * 4
        assert gradients.uncompressed_nbytes == gradients.raw_nbytes // 2
        assert 1 / 4 < gradients.ratio < 1 / 3.5
        assert gradients.encode_s > 0 < gradients.wire_s
        assert gradients.decode_s > 0
        assert gradients.residual_norm == 0
        assert parameters.frame_collectives >= 9
        assert 0.5 < parameters.ratio < 1
    assert results[0][0].sent_nbytes == results[1][0].received_nbytes
