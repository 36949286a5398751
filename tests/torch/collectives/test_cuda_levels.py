"""Collectives over two levels of tensors on GPUs: results and residuals equal those of tensors in host memory."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import codec
import codec.torch
from support.collective_values import rank_values, tensor_bytes
from support.cuda_tensors import gpu, host
from support.ddp_training import ENCODE_ALL, hook_state_bytes, parameter_bytes, train, wrapped
from support.gpu_collectives import SHAPE, compare, how, register_on
from support.ranks import RankPool


@pytest.fixture
def four():
    """Return four ranks, whose messages are in host memory."""
    with RankPool(4, timeout=10) as ranks:
        ranks.new_group()
        yield ranks


def _reduced(rank, size, kind):
    mesh = init_device_mesh("cpu", (2, 2))
    with gpu(kind) as put:
        for spec, dtype, op in (
            (codec.Lossless(), torch.float32, "sum"),
            (codec.Quantize(4), torch.bfloat16, "mean"),
            (codec.Lossless(), torch.float16, "max"),
        ):
            for algorithm in ("two_shot", "raw", "auto"):
                x = rank_values(rank, SHAPE, dtype)
                found = compare(put, codec.torch.all_reduce, x, spec=spec, op=op, group=mesh, options=how(algorithm))
                assert found == "success", (spec, dtype, op, algorithm, found)
        x, found = rank_values(rank, SHAPE), []
        for place in (torch.clone, put):
            feedback, results = codec.torch.Feedback(codec.Quantize(4)), []
            for group in (mesh, mesh, None, mesh):  # residuals move between levels
                tensor = place(x)
                codec.torch.all_reduce(tensor, op="mean", feedback=feedback, group=group, options=how())
                results.append(tensor_bytes(host(tensor)))
            found.append(results)
        assert found[0] == found[1]


def test_all_reduce_over_two_levels_equals_that_of_host_memory(four, kind):
    four.run(_reduced, kind)


def _trained(rank, size, kind):
    found = []
    mesh = init_device_mesh("cpu", (2, 2))
    with gpu(kind) as put:
        for place in (torch.clone, put):
            model = wrapped()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            hook = codec.torch.ddp_hook(codec.Quantize(4), feedback=True, policy=ENCODE_ALL, group=mesh, options=how())
            register_on(model, hook, place)
            train(model, optimizer, rank, 3)
            assert hook.stats().levels == "2 x 2 ranks"
            found.append((parameter_bytes(model), hook_state_bytes(hook)))
            model = wrapped(model.module)  # flat from now on: residuals are moved
            hook.serve(model, group=model.process_group)
            register_on(model, hook, place)
            train(model, optimizer, rank, 2, first=3)
            found.append((parameter_bytes(model), hook_state_bytes(hook)))
    return found[:2] == found[2:]


def test_hook_over_two_levels_trains_as_with_gradients_in_host_memory(four, kind):
    assert all(four.run(_trained, kind))
