"""Error feedback with a caller's residual: results and residuals add up to the inputs."""

import numpy as np
import pytest
import torch

import codec
import codec.torch
from codec.torch import communicator
from support import flatcall
from support.ranks import run_ranks

N = 40_000  # values: 160 KB, so that algorithm="auto" takes two-shot from three ranks on
SPECS = (codec.Quantize(4), codec.Float8(), codec.Sign(group_size=256), codec.Float4())


def gradient(rank, step, n=N):
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * step + rank))


def _imbalance(rank, size, spec, algorithm, op, steps):
    """Return |sum of inputs - sum of results - residuals| and |sum of inputs - sum of results|, at most.

    Both are relative to the largest value of an input or residual; the first one in units of its rounding to float32.
    """
    residual, largest = torch.zeros(N), 0.0
    put, got = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    for step in range(steps):
        x = gradient(rank, step)
        put += x
        codec.torch.all_reduce(
            x, spec, op=op, stream=step, residual=residual, options=codec.options(algorithm=algorithm)
        )
        got += x
        largest = max(largest, float(x.abs().max()), float(residual.abs().max()))
    total = torch.stack([put, residual.double()])
    torch.distributed.all_reduce(total)
    put, held = total / (size if op == "mean" else 1)
    return float((put - got - held).abs().max()) / largest * 2.0**23, float((put - got).abs().max()) / largest


CASES = [("two_shot", "mean"), ("two_shot", "sum"), ("all_gather", "mean"), ("raw", "mean"), ("auto", "sum")]


def _balances(rank, size, steps):
    return {
        (spec, algorithm, op): _imbalance(rank, size, spec, algorithm, op, steps)
        for spec in SPECS
        for algorithm, op in CASES
    }


@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_and_residuals_add_up_to_the_inputs(size):
    steps = 6
    for found in run_ranks(size, _balances, steps):
        for (spec, algorithm, op), (imbalance, lost) in found.items():
            assert imbalance < 2 * size * steps, (spec, algorithm, op)
            if algorithm != "auto" and (algorithm != "raw" or size == 1):  # "auto" may send values uncompressed
                assert lost > 0.01, (spec, algorithm, op)


def _scattered(rank, size, steps):
    """Return the imbalance of a reduce-scatter, which encodes once."""
    n = 3 * size * 5000
    residual, mine = torch.zeros(n), slice(n // size * rank, n // size * (rank + 1))
    put, got = torch.zeros(n), torch.zeros(n // size)
    for step in range(steps):
        x, out = gradient(rank, step, n), torch.empty(n // size)
        put += x
        codec.torch.reduce_scatter(out, x, codec.Quantize(4), op="sum", stream=step, residual=residual)
        got += out
    lost = put.clone()
    torch.distributed.all_reduce(lost)
    lost = float((lost[mine] - got).abs().max())
    put -= residual
    torch.distributed.all_reduce(put)
    return float((put[mine] - got).abs().max()), lost


def test_reduce_scatter_takes_a_residual():
    for imbalance, lost in run_ranks(3, _scattered, 6):
        assert imbalance < 1e-4
        assert lost > 0.1


def _growth(rank, size, spec, steps):
    residual, norms = torch.zeros(N), []
    for step in range(steps):
        codec.torch.all_reduce(
            gradient(rank, step),
            spec,
            stream=step,
            residual=residual,
            op="mean",
            options=codec.options(algorithm="two_shot"),
        )
        norms.append(float(residual.norm()))
    return max(norms[: steps // 2]), max(norms[steps // 2 :])


@pytest.mark.parametrize(
    "spec", [codec.Quantize(2, levels="odd", rounding="nearest"), codec.Sign(group_size=256)], ids=["Quantize", "Sign"]
)
def test_residuals_of_two_shot_stay_bounded(spec):
    """The residual of a slice's owner holds N times the error of the mean, which must not accumulate."""
    for early, late in run_ranks(3, _growth, spec, 60):
        assert late < 1.2 * early


def _unchanged(rank, size):
    """Cause errors on one rank, before and after frames are sent; residuals and tensors must be unchanged."""
    found = []
    for algorithm in ("two_shot", "all_gather", "raw"):
        residual, x = gradient(rank, 7) / 10, gradient(rank, 8)
        if rank == 1:
            x[N // 2] = float("nan")
        before, copy = residual.clone(), x.clone()
        with pytest.raises(codec.CodecError) as e:
            codec.torch.all_reduce(
                x, codec.Quantize(4), residual=residual, op="mean", options=codec.options(algorithm=algorithm)
            )
        assert torch.equal(residual, before)
        assert torch.equal(x.nan_to_num(5), copy.nan_to_num(5))
        found.append(type(e.value).__name__)
    out = torch.empty(N // size)
    with pytest.raises(codec.CodecError):
        codec.torch.reduce_scatter(
            out, x[: N // size * size], codec.Quantize(4), residual=residual[: N // size * size], op="mean"
        )
    assert torch.equal(residual, before)
    return found


def test_error_on_one_rank_leaves_residuals_unchanged_on_all():
    assert run_ranks(3, _unchanged) == [["PeerError"] * 3, ["ArgumentError"] * 3, ["PeerError"] * 3]


def _damaged(rank, size):
    """Damage a frame of the second phase, when residuals of this step have been computed."""
    channel = communicator.communicator_of(None).channel
    residual, x = gradient(rank, 7) / 10, gradient(rank, 8)
    before = residual.clone()
    finish_message, calls = channel.finish_message, 0

    def damage(message, nbytes):
        nonlocal calls
        message, calls = finish_message(message, nbytes), calls + 1
        if rank == 0 and calls == size + 1:  # the frame of its sum, after frames of its terms
            message[-1] ^= 1
        return message

    channel.finish_message = damage
    with pytest.raises(codec.CodecError):
        codec.torch.all_reduce(
            x, codec.Quantize(4), residual=residual, op="mean", options=codec.options(algorithm="two_shot")
        )
    assert torch.equal(residual, before)
    assert torch.equal(x, gradient(rank, 8))
    return calls


def test_damaged_frame_leaves_residuals_unchanged():
    assert min(run_ranks(3, _damaged)) >= 4


def _refused(rank, size):
    x, residual = gradient(rank, 0), torch.zeros(N)
    wrong = [
        ({"spec": codec.Lossless()}, "Lossless"),
        ({"algorithm": "ring"}, "ring"),
        ({"op": "max"}, "maximum"),
        ({"residual": torch.zeros(N - 1)}, "has 39999"),
        ({"residual": torch.zeros(N, dtype=torch.bfloat16)}, "bfloat16"),
        ({"residual": torch.zeros(2 * N)[::2]}, "contiguous"),
        ({"residual": torch.zeros(1).expand(N)}, "share memory"),
        ({"residual": torch.zeros(N, device="meta")}, "dense"),
        ({"residual": np.zeros(N, np.float32)}, "ndarray"),
        ({"residual": x}, "shares memory"),
        ({"spec": codec.Ternary()}, "not a contraction"),
        ({"out": residual}, "shares memory|own memory"),
    ]
    usual = {"spec": codec.Quantize(4), "residual": residual, "op": "mean"}
    for how, message in wrong:
        if rank == 0:  # an error on one rank is an error on all
            with pytest.raises(codec.SpecError if "spec" in how else codec.ArgumentError, match=message):
                flatcall.all_reduce(x, **(usual | how))
        else:
            with pytest.raises(codec.PeerError, match="rank 0"):
                flatcall.all_reduce(x, **usual)
        assert torch.equal(x, gradient(rank, 0))
        assert not residual.any()
    pending = [
        codec.torch.all_reduce(x, codec.Quantize(4), residual=residual, async_op=True, stream=i, op="mean")
        for i in range(2)
    ]
    for each in pending:
        each.wait()
    return float(residual.abs().max())


def test_wrong_residual_on_one_rank_is_an_error_on_all():
    assert all(0 < largest < 1 for largest in run_ranks(2, _refused))


def _inference(rank, size):
    with torch.inference_mode():
        residual = torch.zeros(N)
    codec.torch.all_reduce(gradient(rank, 0), codec.Quantize(4), residual=residual, op="mean")
    return float(residual.abs().max())


def test_residual_may_be_an_inference_tensor():
    assert all(largest > 0 for largest in run_ranks(2, _inference))


def _dtypes(rank, size):
    for dtype in (torch.bfloat16, torch.float16):
        residual, x = torch.zeros(N), gradient(rank, 0).to(dtype).reshape(200, -1)
        out = torch.empty_like(x)
        codec.torch.all_reduce(x, codec.Float8(), residual=residual, out=out, op="mean")
        assert torch.equal(x.flatten(), gradient(rank, 0).to(dtype))
        assert residual.any()
        assert 0 < float((out.float() - x.float()).abs().max()) < 8


def test_residual_of_a_half_precision_tensor_is_float32():
    run_ranks(2, _dtypes)


def _stats(rank, size):
    before = codec.torch.group_stats()
    codec.torch.all_reduce(gradient(rank, 0), codec.Quantize(4), op="mean", options=codec.options(algorithm="two_shot"))
    delta = codec.torch.group_stats() - before
    assert delta.frame_collectives == 1
    return delta.sent_nbytes, delta.received_nbytes


def test_stats_of_a_group_count_bytes():
    (sent, received), other = run_ranks(2, _stats)
    assert N / 2 < sent < N  # 4.5 bits a value
    assert other == (received, sent)
