"""``codec.options(max_norm=)``: values of a larger norm, NaN or Inf are an error on all ranks that names the sender."""

import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import codec
import codec.torch
from codec.torch.collectives import uncompressed
from codec.torch.group.communicator import communicator_of
from codec.torch.transport.values import norm_of
from support import parameter_servers
from support.ranks import RankPool

N = 6000  # values of a tensor; each slice of two or four ranks is one frame
SPECS = {
    "two_shot": [codec.Lossless(), codec.Quantize(8), codec.Float8()],
    "all_gather": [codec.Lossless(), codec.Quantize(8), codec.TopK(density=0.5), codec.Sign()],
    "ring": [codec.Lossless(), codec.Quantize(8)],
    "raw": [codec.Lossless(), codec.Quantize(8)],
    "shared_scale": [codec.Ternary()],
}


@pytest.fixture(scope="module")
def pools():
    with RankPool(4) as four, RankPool(2) as two:
        yield {2: two, 4: four}


def caught(call):
    """Return the type and text of the error of a call; "" if it raises none."""
    try:
        call()
    except codec.CodecError as e:
        return type(e).__name__, str(e)
    return "", ""


def tensor(rank, factor=1.0):
    return torch.randn(N, generator=torch.Generator().manual_seed(rank)) * factor


def _reduce(rank, size, cases):
    """Return the error of each all-reduce; check that a failed one changes nothing, and that a repeat succeeds."""
    found = []
    for algorithm, spec, op, bad, factor, most, dtype in cases:
        x = tensor(rank).to(dtype)
        if rank == bad:
            x[100:] *= factor  # NaN: all values but the first ones
        before = x.clone()
        how = codec.options(algorithm=algorithm, max_norm=most)
        error = caught(
            lambda x=x, spec=spec, op=op, how=how: codec.torch.all_reduce(x, spec, op=op, feedback=False, options=how)
        )
        assert error == ("", "") or torch.equal(x.view(torch.uint8), before.view(torch.uint8))
        good = tensor(rank).to(dtype)
        codec.torch.all_reduce(good, spec, op=op, feedback=False, options=how)
        expected = tensor(rank).to(dtype)
        codec.torch.all_reduce(expected, spec, op=op, feedback=False, options=codec.options(algorithm=algorithm))
        assert torch.equal(good, expected)
        found.append(error)
    return found


def check(errors, bad):
    """Check that all ranks have failed, and that each error names rank `bad`, its norm and the bound."""
    assert {name for name, _ in errors} <= {"FrameError", "PeerError"}, errors
    assert "FrameError" in {name for name, _ in errors}, errors
    for _, text in errors:
        assert re.search(rf"rank {bad} has sent values whose L2 norm in one frame is [^ ]+, above max_norm=", text), (
            text
        )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", SPECS)
def test_norm_above_the_bound_is_an_error_on_all_ranks(pools, size, algorithm):
    ops = ["sum", "mean"] if algorithm == "shared_scale" else ["sum", "mean", "max"]
    most = 1000.0  # norms of tensors are about 80, of ternary values about 250
    cases = [
        (algorithm, spec, op, 1, factor, most, dtype)
        for spec in SPECS[algorithm]
        for op in ops
        for factor, dtype in ((1e6, torch.float32), (300.0, torch.bfloat16))
    ]
    pools[size].new_group()
    for errors in zip(*pools[size].run(_reduce, cases), strict=True):
        check(errors, 1)


def test_nan_and_inf_count_as_above_the_bound(pools):
    """Codecs that refuse NaN raise their own error; uncompressed values and Lossless do not."""
    cases = [
        (algorithm, codec.Lossless(), "sum", 1, factor, 1000.0, torch.float32)
        for algorithm in ("two_shot", "all_gather", "ring", "raw")
        for factor in (math.nan, math.inf, 1e30)
    ]
    pools[2].new_group()
    for errors in zip(*pools[2].run(_reduce, cases), strict=True):
        check(errors, 1)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_norms_just_below_the_bound_pass_and_those_above_fail(pools, data):
    """The norm is that of the part of the tensor in one frame: of one slice, or of all values with all_gather."""
    size = data.draw(st.sampled_from([2, 4]))
    algorithm = data.draw(st.sampled_from(["two_shot", "all_gather", "raw"]))
    op = data.draw(st.sampled_from(["sum", "mean", "max"]))
    bad, factor = data.draw(st.integers(0, size - 1)), data.draw(st.floats(1e-20, 1e20))
    xs = [tensor(rank).double() for rank in range(size)]
    xs = [x.mul(factor).float() for x in xs]
    cuts = [*(j * N // size // 1024 * 1024 for j in range(size)), N]
    parts = [(0, N)] if algorithm == "all_gather" else [*itertools.pairwise(cuts)]
    norms = [max(float(x[a:b].double().norm()) for a, b in parts) for x in xs]
    largest = max(norms[:bad] + norms[bad + 1 :])
    most = 2 * max(largest, norms[bad])
    pools[size].new_group()
    results = pools[size].run(_scaled, algorithm, op, factor, bad, most / norms[bad], most)
    for below, above in results:
        assert below == ("", "")
        assert above[0] in ("FrameError", "PeerError")
        assert f"rank {bad} has sent values" in above[1]


def _scaled(rank, size, algorithm, op, factor, bad, times, most):
    """Return the errors of reductions in which the norm of rank `bad` is just below, and just above the bound."""
    found = []
    for by in (0.999, 1.001):
        x = tensor(rank).double().mul(factor).mul(times * by if rank == bad else 1.0).float()
        how = codec.options(algorithm=algorithm, max_norm=most)
        found.append(caught(lambda x=x, how=how: codec.torch.all_reduce(x, op=op, options=how)))
    return found


def _one_bound(rank, size):
    """Only rank 0 has a bound, and rank 1 exceeds it."""
    x = tensor(rank, 1e6 if rank else 1.0)
    how = codec.options(algorithm="two_shot", max_norm=1000.0 if rank == 0 else None)
    return caught(lambda: codec.torch.all_reduce(x, options=how))


def test_bound_of_one_rank_fails_the_collective_on_all(pools):
    pools[2].new_group()
    check(pools[2].run(_one_bound), 1)


def _others(rank, size):
    """Return the errors of the other collectives, in which rank 1 has large values."""
    x, how = tensor(rank, 1e6 if rank else 1.0), codec.options(max_norm=1000.0)
    rows, half = x.view(-1, 4), [N // 8] * 2
    calls = [
        lambda: codec.torch.reduce_scatter(torch.empty(N // 2), x, options=how),
        lambda: codec.torch.reduce_scatter(torch.empty(N // 2), x, codec.Quantize(8), options=how),
        lambda: codec.torch.all_gather(torch.empty(2 * N), x, options=how),
        lambda: codec.torch.all_to_all(torch.empty(N), x, options=how),
        lambda: codec.torch.all_to_all_rows(rows, half, half, options=how),
    ]
    return [caught(call) for call in calls]


def test_other_collectives_check_norms(pools):
    pools[2].new_group()
    for errors in zip(*pools[2].run(_others), strict=True):
        check(errors, 1)


def _uncompressed(rank, size):
    """Return the errors of means of gradients that frames cannot carry: float64, and sparse ones."""
    x = tensor(rank, 1e6 if rank else 1.0)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), x[: 2 * 50].view(2, 50), (4, 50))
    bounded, comm = codec.options(max_norm=1000.0), communicator_of(None)
    return [
        caught(lambda x=x: comm.run(lambda collective: uncompressed.mean(collective, x, None, bounded)))
        for x in (x.double(), sparse)
    ]


def test_gradients_that_frames_cannot_carry_are_checked(pools):
    pools[2].new_group()
    for errors in zip(*pools[2].run(_uncompressed), strict=True):
        check(errors, 1)


def _levels(rank, size, within, op):
    """Return the errors of all-reduces over two machines, in which rank 3, then no rank, has large values."""
    group, found = init_device_mesh("cpu", (2, 2)), []
    for factor in (1e6, 1.0):
        x = torch.cat([tensor(rank), tensor(rank + 10)] * 5)  # more than 64 KiB, with two windows
        x *= factor if rank == 3 else 1.0
        before, how = x.clone(), codec.options(algorithm="two_shot", within=within, max_norm=1000.0)
        found.append(caught(lambda x=x, how=how: codec.torch.all_reduce(x, op=op, group=group, options=how)))
        assert found[-1] == ("", "") or torch.equal(x, before)
    return found


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("within", [None, "bfloat16", codec.Float8()])
def test_norms_are_checked_within_machines(pools, within, op):
    pools[4].new_group()
    above, below = zip(*pools[4].run(_levels, within, op), strict=True)
    check(above, 3)
    assert set(below) == {("", "")}


def _average(client, worker, workers, spec):
    """Return the errors of three steps of a parameter server, in the second of which worker 1 has a large gradient."""
    found = []
    for step in range(3):
        gradient = {"a": tensor(worker, 1e6 if (worker, step) == (1, 1) else 1.0)}
        client.init(gradient)
        found.append(caught(lambda step=step, gradient=gradient: client.average(step, gradient, spec)))
    return found


@pytest.mark.parametrize("spec", [codec.Quantize(8), codec.Ternary("base3")])
def test_parameter_server_checks_frames_of_workers(pools, spec):
    pools[4].new_group()
    found = pools[4].run(_serve, spec)[1:]
    for good, bad, after in found:
        assert good == after == ("", "")
        assert bad[0] == "FrameError"
        assert "rank 2 has sent values whose L2 norm in one frame is" in bad[1]


def _serve(rank, size, spec):
    with codec.options(max_norm=1000.0):
        return parameter_servers.serve_or_call(rank, size, 1, _average, spec)


def test_norm_is_that_of_float64_arithmetic():
    for scale in (1e-40, 1e-30, 1e-10, 1.0, 1e15, 1e30):
        x = (tensor(0).repeat(30) * scale).numpy()
        assert norm_of(x) == pytest.approx(float(torch.from_numpy(x).double().norm()), rel=1e-5)
    assert norm_of(torch.zeros(5).numpy()) == 0
    assert math.isnan(norm_of(torch.tensor([1.0, math.nan]).numpy()))
    assert norm_of(torch.tensor([1.0, -math.inf]).numpy()) == math.inf
