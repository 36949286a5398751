"""Argument group= of DDP hooks: every form of two levels, levels that differ, and the line that proposes them."""

import os
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.torch.ddp import lifetime
from support.ddp_training import small_forward, small_net, take_step
from support.ranks import run_ranks


def mesh_of():
    return init_device_mesh("cpu", (2, 2))


def _groups(rank, size):
    """Meshes of all shapes, pairs of groups, and torch's own way to register a hook."""
    want = None
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
    groups = {
        "flat": None,
        "mesh": mesh,
        "pair": (mesh.get_group(0), mesh.get_group(1)),
        "one machine": init_device_mesh("cpu", (1, 4)),
        "one rank a machine": init_device_mesh("cpu", (4, 1)),
        "one dimension": init_device_mesh("cpu", (4,)),
    }
    levels = dict.fromkeys(groups, "4 ranks") | dict.fromkeys(("mesh", "pair"), "2 x 2 ranks")
    for name, group in groups.items():
        model = DistributedDataParallel(small_net())
        hook = codec.torch.ddp_hook(codec.Lossless(), group=group)
        model.register_comm_hook(None, hook)  # as frameworks do
        grads = torch.cat([g.flatten() for g in take_step(model, rank, small_forward)])
        want = grads if want is None else want
        torch.testing.assert_close(grads, want)
        assert hook.stats().levels == levels[name], name
        if levels[name] == "2 x 2 ranks":
            assert hook.reducer.group.levels.within.ranks == (rank // 2 * 2, rank // 2 * 2 + 1), name
    # register() replaces the group of ddp_hook()
    model = DistributedDataParallel(small_net())
    hook = codec.torch.ddp_hook(group=mesh).register(model, group=groups["one dimension"])
    assert hook.stats().levels == "4 ranks"
    for wrong, match in (
        ("mesh", "group must be"),
        ((mesh.get_group(0), 3), "two process groups"),
        ((mesh.get_group(0), groups["one machine"].get_group(1)), "groups of 2 and 4 ranks, but there are 4"),
        (init_device_mesh("cpu", (2, 2, 1)), "3 dimensions"),
    ):
        with pytest.raises(codec.ArgumentError, match=match):
            codec.torch.ddp_hook(group=wrong).register(DistributedDataParallel(small_net()))


def test_every_form_of_group():
    run_ranks(4, _groups)


def _some_ranks(rank, size):
    """Rank 4 is in no machine."""
    unnamed = DeviceMesh("cpu", [[0, 1], [2, 3]])
    named = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("between", "within"))
    found = torch.full((9,), float(rank))
    if rank == 4:
        return None
    with pytest.raises(codec.ArgumentError, match="needs names of its dimensions"):
        codec.torch.all_reduce(found, codec.Lossless(), group=unnamed)
    assert found.tolist() == [rank] * 9
    codec.torch.all_reduce(found, codec.Lossless(), group=named)
    return found.tolist()


def test_mesh_of_some_ranks_has_names():
    assert run_ranks(5, _some_ranks, fresh=True) == [[6.0] * 9] * 4 + [None]


def _again(rank, size, how):
    """After an error that closes the connections, a new mesh of the same ranks, or a pair of its groups, goes on."""
    former, net, hook = mesh_of(), small_net(), codec.torch.ddp_hook(codec.Quantize(4), feedback=True)
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    hook.register(model, group=former)
    for _ in range(2):  # from the second step on, there are several buckets
        take_step(model, rank, small_forward)

    def fail(gradient):
        raise OSError("this rank fails")

    handle = net[0].weight.register_hook(fail) if rank == 1 else None
    with pytest.raises(OSError if rank == 1 else codec.PeerError):
        take_step(model, rank, small_forward)
    if handle is not None:
        handle.remove()
    dist.barrier()
    again, new = small_net(), mesh_of()
    again.load_state_dict(net.state_dict())
    model = DistributedDataParallel(again, bucket_cap_mb=0.01)
    hook.register(model, group=new if how == "mesh" else (new.get_group(0), new.get_group(1)))
    grads = take_step(model, rank, small_forward)
    assert hook.stats().levels == "2 x 2 ranks"
    assert hook.stats().steps == 3
    with pytest.raises(codec.PeerError):
        codec.torch.all_reduce(torch.ones(9), group=former)
    return torch.cat([g.flatten() for g in grads]).tolist()


@pytest.mark.parametrize("how", ["mesh", "pair"])
def test_new_groups_of_the_same_ranks_are_connected_anew(how):
    found = run_ranks(4, _again, how, fresh=True)
    assert found[1:] == found[:1] * 3


def _differ(rank, size, call):
    """Rank 3 has other levels than the others."""
    mesh = mesh_of()
    pair = mesh.get_group(0), mesh.get_group(1)
    group = mesh if rank < 3 else pair[::-1] if call == "swapped" else None
    model = DistributedDataParallel(small_net())
    codec.torch.ddp_hook(codec.Lossless(), group=group).register(model)
    begin = {
        "hook": lambda: take_step(model, rank, small_forward),
        "swapped": lambda: take_step(model, rank, small_forward),
        "all_reduce": lambda: codec.torch.all_reduce(torch.ones(1000), group=group),
    }[call]
    with pytest.raises(codec.PeerError) as e:
        begin()
    return str(e.value)


@pytest.mark.parametrize("call", ["hook", "swapped", "all_reduce"])
def test_levels_that_differ_are_an_error_on_all_ranks(call):
    texts = run_ranks(4, _differ, call, timeout=5)
    if call == "swapped":
        assert all(re.search(r"rank \d has other levels|is gone", text) for text in texts), texts
        assert any("other levels" in text for text in texts), texts
    else:  # rank 3 waits for rank 0, which connects only to the ranks of its levels
        assert all("is gone" in text for text in texts), texts


def _slice(rank, size):
    """Four of eight ranks, a slice of a mesh of three dimensions, average the gradients of their replica."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "tp"))["a", "b"]
    flat = mesh._flatten().get_group()
    found = []
    for group in (None, mesh):
        model = DistributedDataParallel(small_net(), process_group=flat)
        hook = codec.torch.ddp_hook(codec.Lossless(), group=group).register(model)
        found.append(torch.cat([g.flatten() for g in take_step(model, rank, small_forward)]))
    assert hook.stats().levels == "2 x 2 ranks"
    torch.testing.assert_close(*found)
    x = torch.full((10,), float(rank))
    before = codec.torch.group_stats(mesh).raw_nbytes
    codec.torch.all_reduce(x, op="sum", group=mesh)
    assert codec.torch.group_stats(mesh).raw_nbytes - before == x.nbytes
    model = DistributedDataParallel(small_net(), process_group=flat)
    outside = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(codec.ArgumentError, match="not in the group"):
            codec.torch.ddp_hook(group=outside).register(model)
    return x[0].item()


def test_slice_of_a_mesh_reduces_over_its_ranks_only():
    assert run_ranks(8, _slice) == [12.0, 16.0] * 4


def _advised(rank, size, environment):
    """Register a flat hook and one in two levels under variables of torchrun; return the log and the statistics."""
    logged, before = [], {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    lifetime._log_once.cache_clear()
    lifetime.logger.setLevel("INFO")
    lifetime.logger.info = lambda text, *args: logged.append(text % args)
    try:
        advice = []
        for group in (None, None, mesh_of()):
            hook = codec.torch.ddp_hook(group=group).register(DistributedDataParallel(small_net()))
            advice.append(hook.stats().advice)
    finally:
        del lifetime.logger.info
        lifetime.logger.setLevel("NOTSET")
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return logged, advice


def test_flat_hook_of_several_machines_proposes_two_levels_once():
    results = run_ranks(4, _advised, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    for rank, (logged, (first, second, leveled)) in enumerate(results):
        assert 'pass group=torch.distributed.init_device_mesh("cpu", (2, 2))' in first
        assert (second, leveled) == (first, "")
        assert logged == ([first] if rank == 0 else [])
    for world, local in (("4", "4"), ("4", "1"), ("4", "3"), ("8", "2"), ("4", ""), ("x", "2"), ("4", "0")):
        for logged, advice in run_ranks(4, _advised, {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local}):
            assert logged == []
            assert advice == [""] * 3
