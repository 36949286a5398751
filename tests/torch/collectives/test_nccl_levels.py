"""Collectives over two levels whose machines reduce values on GPUs, by NCCL: results equal those of host memory."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import codec
import codec.torch
from codec.torch.group import communicator
from codec.torch.group.communicator import communicator_of
from support.collective_values import rank_values, tensor_bytes
from support.cuda_tensors import DeviceTensor, gpu, host, new_group_of_gpus
from support.ddp_training import ENCODE_ALL, check_failed_step, data, hook_state_bytes, parameter_bytes, train, wrapped
from support.faults import KILLED, die
from support.gpu_collectives import SHAPE, compare, how, outcome, register_on
from support.ranks import RankPool


@pytest.fixture
def four():
    """Return four ranks, whose machines have two GPUs each."""
    with RankPool(4, timeout=10) as ranks:
        new_group_of_gpus(ranks)
        yield ranks


def transfer_of(mesh):
    """Return the connections between the GPUs of this rank's machine."""
    return communicator_of(mesh).channel.device


def _reduced(rank, size, kind):
    mesh = init_device_mesh("cpu", (2, size // 2))
    with gpu(kind) as put:
        for spec, dtype, op in (
            (codec.Lossless(), torch.float32, "sum"),
            (codec.Quantize(4), torch.bfloat16, "mean"),
            (codec.Lossless(), torch.float16, "max"),
        ):
            for algorithm in ("two_shot", "all_gather", "raw", "auto"):
                for shape in (SHAPE, (1100,), (0,)):
                    x = rank_values(rank, shape, dtype)
                    found = compare(
                        put, codec.torch.all_reduce, x, spec=spec, op=op, group=mesh, options=how(algorithm)
                    )
                    assert found == "success", (spec, dtype, op, algorithm, found)
        assert transfer_of(mesh).connected_within
        before = codec.torch.group_stats(mesh)
        codec.torch.all_reduce(put(torch.ones(3 * 1024)), group=mesh, options=how())
        used = codec.torch.group_stats(mesh) - before
        assert used.local_nbytes == 4 * 1024 * 2 * 2  # in each phase, a window for each of the 2 other ranks


def _feeds_back(rank, size, kind):
    mesh = init_device_mesh("cpu", (2, 2))
    with gpu(kind) as put:
        found = []
        for place in (torch.clone, put):
            feedback, results = codec.torch.Feedback(codec.Quantize(4)), []
            for group in (mesh, mesh, None, mesh):  # residuals move between levels
                tensor = place(rank_values(rank, SHAPE))
                codec.torch.all_reduce(tensor, op="mean", feedback=feedback, group=group, options=how())
                results.append(tensor_bytes(host(tensor)))
            found.append(results)
        assert found[0] == found[1]
        tensors = [put(rank_values(rank, (1000 * i,))) for i in (9, 1, 5)]
        works = [codec.torch.all_reduce(x, group=mesh, options=how(), async_op=True) for x in tensors]
        for work, x in zip(works, tensors, strict=True):
            work.wait()
            codec.torch.all_reduce(here := rank_values(rank, tuple(x.shape)), group=mesh, options=how())
            assert tensor_bytes(host(x)) == tensor_bytes(here)
        x, before = put(rank_values(rank, (50_000,))), DeviceTensor.copied_nbytes
        codec.torch.all_reduce(x, codec.Quantize(4), group=mesh, options=how())
        assert DeviceTensor.copied_nbytes == before  # frames only are copied to the host


def test_all_reduce_on_gpus_of_machines_equals_that_of_host_memory(kind):
    with RankPool(6, timeout=10) as ranks:
        new_group_of_gpus(ranks)
        ranks.run(_reduced, kind)


def test_residuals_and_collectives_in_flight_equal_those_of_host_memory(four, kind):
    four.run(_feeds_back, kind)


def _unusable(rank, size, kind):
    communicator.rank_is_usable = lambda: int(rank != 3)
    mesh = init_device_mesh("cpu", (2, 2))
    with gpu(kind) as put:
        assert compare(put, codec.torch.all_reduce, rank_values(rank, SHAPE), group=mesh, options=how()) == "success"
    return transfer_of(mesh).connected_within


def test_all_machines_use_host_memory_if_a_rank_cannot_encode_on_its_gpu(four, kind):
    assert four.run(_unusable, kind) == [False] * 4


def _encrypted(rank, size, kind):
    mesh = init_device_mesh("cpu", (2, 2))
    with gpu(kind) as put, codec.options(secret="0123456789abcdef", tls="psk"):
        for group in (mesh, torch.distributed.new_group()):
            assert (
                compare(put, codec.torch.all_reduce, rank_values(rank, SHAPE), group=group, options=how()) == "success"
            )
            channel = communicator_of(group).channel
            assert channel.connections == "encrypted, authenticated"
            assert (channel.device.connected, channel.device.connected_within) == (False, group is mesh)


def test_frames_between_machines_are_encrypted_and_not_sent_by_nccl(four, kind):
    four.run(_encrypted, kind)


def _trained(rank, size, kind):
    mesh, calls = init_device_mesh("cpu", (2, 2)), []
    device = transfer_of(mesh)
    for name in ("scatter", "all_gather"):
        call = getattr(device, name)
        setattr(device, name, lambda *args, name=name, call=call: (calls.append(name), call(*args))[1])
    with gpu(kind) as put:
        for joins in (False, True):
            found = []
            for place in (torch.clone, put):
                model = wrapped(joins=joins)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                hook = codec.torch.ddp_hook(
                    codec.Quantize(4), feedback=True, policy=ENCODE_ALL, group=mesh, options=how()
                )
                register_on(model, hook, place)
                train(model, optimizer, rank, 2)
                check_failed_step(model, hook, optimizer, rank, 2)
                calls.clear()
                train(model, optimizer, rank, 1, first=3)
                found.append((parameter_bytes(model), hook_state_bytes(hook)))
            assert found[0] == found[1]
            n = len(calls) // 2
            assert calls == ["scatter"] * n + ["all_gather"] * n
            assert n > 7 or joins


def test_hook_on_gpus_of_machines_trains_as_with_gradients_in_host_memory(four, kind):
    """Values of all buckets are scattered before the first result is gathered: buckets are in flight together."""
    four.run(_trained, kind)


def _dies_in_a_step(rank, size, kind, call):
    mesh = init_device_mesh("cpu", (2, 2))
    with gpu(kind) as put:
        model = wrapped()
        hook = codec.torch.ddp_hook(codec.Quantize(4), feedback=True, policy=ENCODE_ALL, group=mesh, options=how())
        register_on(model, hook, put)
        train(model, torch.optim.SGD(model.parameters(), lr=0.05), rank, 1)
        before = hook_state_bytes(hook)
        if rank == 1:
            setattr(transfer_of(mesh), call, lambda *_: die())
        x, y = data(rank, 1)
        with pytest.raises(codec.PeerError):
            torch.nn.functional.cross_entropy(model(x), y).backward()
        return hook_state_bytes(hook) == before


@pytest.mark.parametrize("call", ["scatter", "all_gather"])
def test_step_fails_on_all_ranks_if_a_rank_dies_before_its_values_leave_the_gpu(kind, call):
    with RankPool(4, timeout=5) as ranks:
        new_group_of_gpus(ranks)
        ranks.start(_dies_in_a_step, kind, call)
        assert ranks.results() == [True, KILLED, True, True]


def _nan(rank, size, kind):
    mesh = init_device_mesh("cpu", (2, 2))
    found = []
    with gpu(kind) as put:
        for bad in (None, 0, 1, 3, None):
            values = rank_values(rank, SHAPE)
            values[3, 5] = torch.nan if rank == bad else 1
            found.append(
                outcome(codec.torch.all_reduce, x := put(values), codec.Quantize(4), group=mesh, options=how())
            )
            assert found[-1] == "success" or tensor_bytes(host(x)) == tensor_bytes(values)
    return [each if each == "success" else (each[0], each[2]) for each in found]


def test_nan_on_one_rank_is_an_error_on_all_ranks(four, kind):
    for rank, found in enumerate(four.run(_nan, kind)):
        errors = [("ArgumentError" if rank == bad else "PeerError", codec.Status.NONFINITE) for bad in (0, 1, 3)]
        assert found == ["success", *errors, "success"]


def _killed(rank, size, kind, call):
    mesh = init_device_mesh("cpu", (2, 2))
    with gpu(kind) as put:
        codec.torch.all_reduce(put(torch.ones(10)), group=mesh, options=how())
        if rank == 1:
            setattr(transfer_of(mesh), call, lambda *_: die())
        x = put(values := rank_values(rank, SHAPE))
        found = outcome(codec.torch.all_reduce, x, codec.Quantize(4), group=mesh, options=how())
        assert torch.equal(host(x), values)
        return found[0]


@pytest.mark.parametrize("call", ["scatter", "all_gather"])
def test_tensor_is_unchanged_if_a_rank_dies_before_its_values_leave_the_gpu(kind, call):
    with RankPool(4, timeout=5) as ranks:
        new_group_of_gpus(ranks)
        ranks.start(_killed, kind, call)
        assert ranks.results() == ["PeerError", KILLED, "PeerError", "PeerError"]
