"""Collectives of torch.distributed over the backend `codec` return sums in rank order, bit for bit."""

import copy
import os
import re
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import codec
import codec.torch
from codec.torch import _compat
from codec.torch.group import communicator
from support.collective_values import rank_values, sum_in_order
from support.ranks import run_ranks
from support.tiers import HANG_SECONDS, nightly

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def calls():
    """Return the number of collectives so far that sent frames."""
    counters = communicator.communicator_of(dist.group.WORLD).channel.counters
    return counters.frame_collectives + counters.raw_collectives


def _reduced(rank, size):
    """Every torch.distributed call of all-reduce and reduce-scatter returns the sum in rank order."""
    n = 9000
    ops = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}
    begun = calls()
    for dtype in DTYPES:
        every = [rank_values(r, (n,), dtype) for r in range(size)]
        for name, op in ops.items():
            t = every[rank].clone()
            dist.all_reduce(t, op)
            assert torch.equal(t, sum_in_order(every, name)), (dtype, name)
    shapes = [(30, 200), (77,), ()]
    every = [
        [rank_values(10 * r + i, (max(1, torch.Size(s).numel()),)).view(s) for i, s in enumerate(shapes)]
        for r in range(size)
    ]
    mine = [t.clone() for t in every[rank]]
    with dist._coalescing_manager():
        for t in mine:
            dist.all_reduce(t)
    for i, t in enumerate(mine):
        assert torch.equal(t, sum_in_order([x[i] for x in every]))
    x, y = ([rank_values(r + b, (size * n,)).view(size, n) for r in range(size)] for b in (0, 5))
    outs = [torch.empty(n) for _ in range(4)]
    _compat.reduce_scatter_single(outs[0], x[rank].view(-1))
    dist.reduce_scatter(outs[1], list(x[rank]))
    with dist._coalescing_manager():
        _compat.reduce_scatter_single(outs[2], x[rank].view(-1), dist.ReduceOp.AVG)
        _compat.reduce_scatter_single(outs[3], y[rank].view(-1), dist.ReduceOp.AVG)
    want, other = [t[rank] for t in x], [t[rank] for t in y]
    assert torch.equal(outs[0], sum_in_order(want))
    assert torch.equal(outs[1], sum_in_order(want))
    assert torch.equal(outs[2], sum_in_order(want, "mean"))
    assert torch.equal(outs[3], sum_in_order(other, "mean"))
    assert calls() - begun == 9 + 1 + 3


def _gathered(rank, size):
    n = 9000
    begun = calls()
    for dtype in DTYPES:
        every = [rank_values(r, (n,), dtype) for r in range(size)]
        out = torch.empty(size * n, dtype=dtype)
        _compat.all_gather_single(out, every[rank])
        assert torch.equal(out, torch.cat(every))
        outs = [torch.empty(n, dtype=dtype) for _ in range(size)]
        dist.all_gather(outs, every[rank])
        assert all(torch.equal(*pair) for pair in zip(outs, every, strict=True))
    x, y = ([rank_values(r + b, (n + b,)) for r in range(size)] for b in (0, 5))
    outs = [torch.empty(size * n), torch.empty(size * (n + 5))]
    with dist._coalescing_manager():
        _compat.all_gather_single(outs[0], x[rank])
        _compat.all_gather_single(outs[1], y[rank])
    assert torch.equal(outs[0], torch.cat(x))
    assert torch.equal(outs[1], torch.cat(y))
    assert calls() - begun == 6 + 1


def _passed_on(rank, size):
    """The backend leaves small tensors and unsupported dtypes to Gloo."""
    begun = calls()
    n = 9000
    for dtype in (torch.int64, torch.float64):
        t = torch.full((n,), rank + 1, dtype=dtype)
        dist.all_reduce(t)
        assert torch.equal(t, torch.full((n,), size * (size + 1) // 2, dtype=dtype))
    t = torch.full((n,), rank + 1.0)
    dist.all_reduce(t, dist.ReduceOp.MIN)
    assert torch.equal(t, torch.ones(n))
    few = torch.full((10,), rank + 1.0)
    dist.all_reduce(few, dist.ReduceOp.MAX)
    assert torch.equal(few, torch.full((10,), float(size)))
    t = rank_values(rank, (n,))
    dist.broadcast(t, 1)
    assert torch.equal(t, rank_values(1, (n,)))
    if rank == 0:
        dist.send(t, 1)
    elif rank == 1:
        dist.recv(t, 0)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "much": "x" * 50_000})
    assert [o["rank"] for o in objects] == list(range(size))
    parts = torch.empty(size * 3000)
    dist.all_to_all_single(parts, rank_values(rank, (size * 3000,)))
    assert torch.equal(parts[:3000], rank_values(0, (size * 3000,))[3000 * rank : 3000 * (rank + 1)])
    dist.barrier()
    assert calls() == begun


def _many(rank, size):
    """All collectives work on two groups, with async_op=True and through torch's functional collectives."""
    assert dist.get_backend() == "codec"
    group = dist.new_group()
    assert isinstance(group, codec.torch.ProcessGroup)
    tensors = [rank_values(10 * rank + i, (20_000 + i,)) for i in range(6)]
    works = [dist.all_reduce(t, group=(None, group)[i % 2], async_op=True) for i, t in enumerate(tensors)]
    futures = [w.get_future() for w in works]
    for i, t in enumerate(tensors):
        assert works[i].wait()
        assert futures[i].wait()[0] is t
        assert torch.equal(t, sum_in_order([rank_values(10 * r + i, (20_000 + i,)) for r in range(size)]))
    import torch.distributed._functional_collectives as functional

    t = functional.all_reduce(rank_values(rank, (20_000,)), "sum", dist.group.WORLD)
    assert torch.equal(t + 0, sum_in_order([rank_values(r, (20_000,)) for r in range(size)]))


def _all_of_it(rank, size):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    for part in (_reduced, _gathered, _passed_on, _many):
        part(rank, size)
    dist.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(size):
    run_ranks(size, _all_of_it, backend="codec")


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(90, 120), nn.Tanh(), nn.Linear(120, 100), nn.Tanh(), nn.Linear(100, 50))


def gradients(net, rank, step):
    x = torch.randn(8, 90, generator=torch.Generator().manual_seed(10 * step + rank))
    net.zero_grad()
    net(x).square().mean().backward()
    return [p.grad.clone() for p in net.parameters()]


def _ddp(rank, size):
    plain = model()
    net = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.04)  # cap in MB that gives two buckets
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (plain, net)]
    begun = calls()
    for step in range(4):
        every = [gradients(copy.deepcopy(plain), r, step) for r in range(size)]
        for p, *theirs in zip(plain.parameters(), *every, strict=True):
            # DDP multiplies gradients by 1 / size before it sums them
            p.grad = sum_in_order([g * (1 / size) for g in theirs])
        gradients(net, rank, step)
        for p, want in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, want.grad)
        for o in optimizers:
            o.step()
    for p, want in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, want)
    return calls() - begun


@pytest.mark.parametrize("size", [2, 3])
def test_ddp_is_the_sum_in_the_order_of_ranks(size):
    assert all(n >= 4 + 3 for n in run_ranks(size, _ddp, backend="codec"))


def _diloco(rank, size):
    """Train by DiLoCo over the backend: ranks take local steps, and average their parameter changes every few steps."""
    net, start = model(), model()
    inner = torch.optim.AdamW(net.parameters(), lr=1e-3)
    outer = torch.optim.SGD(start.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(4):
        gradients(net, rank, step)
        inner.step()
        if step % 2:
            deltas = [(old - new).detach() for old, new in zip(start.parameters(), net.parameters(), strict=True)]
            flat = torch.cat([d.view(-1) for d in deltas])
            every = torch.empty(size, flat.numel())
            _compat.all_gather_single(every, flat)
            dist.all_reduce(flat, dist.ReduceOp.AVG)
            assert torch.equal(flat, sum_in_order(list(every), "mean"))
            for p, delta in zip(start.parameters(), flat.split([d.numel() for d in deltas]), strict=True):
                p.grad = delta.view(p.shape)
            outer.step()
            net.load_state_dict(start.state_dict())
    return [p.sum().item() for p in net.parameters()], calls()


def test_diloco_outer_steps():
    results = run_ranks(2, _diloco, backend="codec")
    assert results[0] == results[1]
    assert results[0][1] == 4


def _lossy(rank, size):
    """Specs can be set for sums or for gathers; operations other than sums stay exact."""
    every = [rank_values(r, (30_000,)) for r in range(size)]
    want, errors = sum_in_order(every), []
    usual = dist.new_group()
    options = codec.torch.BackendOptions(codec.Float8(group_size=100), gather=codec.Quantize(8))
    given = dist.new_group(pg_options=options)
    later = dist.new_group(
        pg_options=codec.torch.BackendOptions(codec.Float8(group_size=100), algorithm="two_shot", small=120_000)
    )
    for group in (usual, given, later):
        t = every[rank].clone()
        dist.all_reduce(t, group=group)
        errors.append(float((t - want).norm() / want.norm()))
    t = rank_values(rank, (29_999,))  # fewer bytes than the threshold `small`
    dist.all_reduce(t, group=later)
    assert torch.allclose(t, sum_in_order([rank_values(r, (29_999,)) for r in range(size)]), rtol=0, atol=1e-5)
    for group in (usual, given, later):
        t = every[rank].clone()
        dist.all_reduce(t, dist.ReduceOp.MAX, group=group)
        assert torch.equal(t, sum_in_order(every, "max"))
        out = torch.empty(size, 30_000)
        _compat.all_gather_single(out, every[rank], group=group)
        errors.append(float((out - torch.stack(every)).norm() / out.norm()))
    return errors


def test_specs_apply_to_sums_only():
    for usual, given, later, *gathers in run_ranks(3, _lossy, backend="codec"):
        assert usual == 0
        assert 1e-4 < given < 0.1
        assert 1e-4 < later < 0.1
        assert gathers[0] == gathers[2] == 0
        assert 1e-4 < gathers[1] < 0.1


def _refused(rank, size):
    """NaN under a lossy codec on one rank raises on all, in Python and in DDP's C++; tensors are unchanged."""
    group = dist.new_group(pg_options=codec.torch.BackendOptions(codec.Float8()))
    x = rank_values(rank, (20_000,))
    if rank == 1:
        x[19_999] = float("nan")
    before = x.clone()
    with pytest.raises(codec.CodecError) as e:
        dist.all_reduce(x, group=group)
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))
    work = dist.all_reduce(x, group=group, async_op=True)
    with pytest.raises(codec.CodecError):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), codec.CodecError)
    with pytest.raises(RuntimeError, match="Error"):
        work.get_future().wait()
    net = nn.parallel.DistributedDataParallel(model(), process_group=group)
    if rank == 1:
        net.module[0].weight.data[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="Error"):
        gradients(net, rank, 0)
    y = rank_values(rank, (20_000,))
    dist.all_reduce(y, group=group)
    return type(e.value).__name__, y.sum().item()


def test_error_on_one_rank_raises_on_all():
    results = run_ranks(3, _refused, backend="codec")
    assert [name for name, _ in results] == ["PeerError", "ArgumentError", "PeerError"]
    assert len({total for _, total in results}) == 1


SCRIPT = """
import sys, torch, torch.distributed as dist, codec.torch
way, path, rank = sys.argv[1:]
dist.init_process_group("codec", init_method=f"file://{path}", rank=int(rank), world_size=2)
tensor = torch.ones(100_000)
dist.all_reduce(tensor)
print(tensor[0].item())
if way == "destroy":
    dist.all_reduce(tensor, async_op=True)
    dist.destroy_process_group()
elif way == "abort":
    dist.group.WORLD.abort()
elif way == "callbacks":
    for _ in range(3):
        dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: dist.all_reduce(torch.ones(100_000)))
"""


GLOO_LOG = re.compile(r"^\[Gloo\] .*\n", re.MULTILINE)  # torch 2.9 prints Gloo's log to stdout


@pytest.mark.parametrize("way", [nightly("leave"), nightly("destroy"), nightly("abort"), "callbacks"])
def test_processes_exit_cleanly(way, tmp_path):
    """A process exits cleanly however its script leaves the group: no collective is cut off."""
    command = [sys.executable, "-P", "-W", "error", "-c", SCRIPT, way, str(tmp_path / "store")]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(rank)], env=environment, **pipes) for rank in range(2)]
    ends = [p.communicate(timeout=HANG_SECONDS) for p in processes]
    results = [
        (p.returncode, re.sub(GLOO_LOG, "", out), error) for p, (out, error) in zip(processes, ends, strict=True)
    ]
    assert results == [(0, "2.0\n", "")] * 2


def test_wrong_options_are_rejected_when_the_group_is_made():
    for how in ({"spec": "x"}, {"spec": codec.Sign}, {"gather": None}):
        with pytest.raises(codec.SpecError, match="not a spec"):
            codec.torch.BackendOptions(**how)
    for algorithm in ("foo", None, ["auto"]):
        with pytest.raises(codec.ArgumentError, match="algorithm must be"):
            codec.torch.BackendOptions(algorithm=algorithm)
    with pytest.raises(codec.ArgumentError, match="small must be"):
        codec.torch.BackendOptions(small="1")
    for make in (codec.torch.FsdpReduceScatter, codec.torch.FsdpAllGather):
        with pytest.raises(codec.SpecError, match="not a spec"):
            make("x")
