"""All-reduces between processes give bit-identical results on all ranks, and any failure leaves tensors unchanged."""

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.tensors.segments import pack, unpack
from codec.torch.group import communicator
from codec.torch.network.mesh import Mesh
from codec.torch.network.waits import Wait
from codec.torch.reduction import arguments, execution, partition
from support.collective_values import LARGE, rank_values, sum_in_order, tensor_bytes
from support.ranks import run_ranks
from support.tiers import every, nightly

SPECS = [
    codec.Lossless(),
    codec.Float8(),
    codec.Float8(group_size=128),
    codec.Float8("mxfp8_e4m3"),
    codec.Float4(),
    codec.Quantize(8),
    codec.Quantize(4),
    codec.Quantize(4, zero_point=True),
    codec.Sign(group_size=1024),
    codec.Ternary(),
    codec.Truncate(2),
]
ALGORITHMS = ["two_shot", "all_gather", "ring", "raw"]


def _exact(rank, size):
    """Lossless and raw all-reduces are sums in rank order, for every shape, dtype and operation."""
    found = []
    for shape in [(), (1,), (5,), (0,), (1000,), (300, 100), (3, 5, 7, 11), (1100, 1000)]:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if dtype != torch.float32 and len(shape) > 2:
                continue
            every = [rank_values(r, shape or (1,), dtype).view(shape) for r in range(size)]
            for op in ("mean", "sum", "max"):
                want = sum_in_order(every, op)
                for algorithm in ("two_shot", "all_gather", "raw"):
                    t = every[rank].clone()
                    codec.torch.all_reduce(t, op=op, options=codec.options(algorithm=algorithm))
                    assert torch.equal(t, want), (shape, dtype, op, algorithm)
            found.append(want.sum().item())
    want = sum_in_order(large := [rank_values(r, (300, 100)) for r in range(size)], "mean")
    for _ in range(8):  # "auto" tries frames first, then switches to raw if that is faster
        codec.torch.all_reduce(t := large[rank].clone(), op="mean")
        assert torch.equal(t, want)
    t = rank_values(rank, (40, 30)).t()  # a non-contiguous tensor
    want = sum_in_order([rank_values(r, (40, 30)).t() for r in range(size)], "sum")
    codec.torch.all_reduce(t, op=dist.ReduceOp.SUM, options=codec.options(algorithm="two_shot"))
    assert torch.equal(t, want)
    return found


def _op_names(rank, size):
    inputs = [rank_values(r, (8, 10)) for r in range(size)]
    scattered = torch.empty(80 // size)
    for how, op in (
        ({}, "sum"),
        ({"op": dist.ReduceOp.SUM}, "sum"),
        ({"op": dist.ReduceOp.AVG}, "mean"),
        ({"op": "avg"}, "mean"),
        ({"op": dist.ReduceOp.MAX}, "max"),
    ):
        codec.torch.all_reduce(t := inputs[rank].clone(), **how)
        assert torch.equal(t, sum_in_order(inputs, op)), how
        codec.torch.reduce_scatter(scattered, inputs[rank], **how)
        assert torch.equal(scattered, sum_in_order(inputs, op).view(size, -1)[rank]), how
    for wrong in ("product", dist.ReduceOp.MIN, None, []):
        with pytest.raises(codec.ArgumentError, match=r"ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, .*\"max\", got "):
            codec.torch.all_reduce(inputs[rank], op=wrong)


def test_op_defaults_to_sum_and_takes_torch_names():
    run_ranks(2, _op_names)


@pytest.mark.parametrize("size", [1, nightly(2), 3, nightly(4)])
def test_lossless_all_reduce_is_the_sum_in_the_order_of_ranks(size):
    results = run_ranks(size, _exact)
    assert all(r == results[0] for r in results)


def _nans(rank, size):
    """NaNs whose bits differ by rank give identical results on all ranks."""
    found = []
    for dtype, quiet in ((torch.float32, 0x7FC00001), (torch.bfloat16, 0x7FC1), (torch.float16, 0x7E01)):
        for n in (1000, 100_000):
            for algorithm in ("two_shot", "all_gather", "ring", "raw"):
                x = rank_values(rank, (n,), dtype)
                x.view(torch.int32 if dtype == torch.float32 else torch.int16)[rank :: rank + 2] = quiet + rank
                codec.torch.all_reduce(x, op="mean", options=codec.options(algorithm=algorithm))
                found.append(tensor_bytes(x))
    return found


def _overflows(rank, size):
    """Sums that overflow and Inf - Inf give Inf and NaN without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for algorithm in ("two_shot", "all_gather", "raw"):
            x = torch.full((100_000,), 3e38)
            x[0] = torch.inf if rank else -torch.inf
            codec.torch.all_reduce(x, op="sum", options=codec.options(algorithm=algorithm))
            assert x[0].isnan(), algorithm
            assert (x[1:] == torch.inf).all(), algorithm


def test_overflowing_sums_give_inf_and_nan_without_a_warning():
    run_ranks(3, _overflows)


def test_nans_are_the_same_on_all_ranks():
    results = run_ranks(3, _nans)
    assert all(r == results[0] for r in results)


def _lossy(rank, size):
    results = {}
    shapes = [(64, 100), (40, 30, 3, 3), (77,), (200_000,)]
    every = [torch.cat([rank_values(10 * r + i, s).flatten() for i, s in enumerate(shapes)]) for r in range(size)]
    want = sum_in_order(every, "mean")
    for spec in SPECS:
        for algorithm in ALGORITHMS:
            t = every[rank].clone()
            codec.torch.all_reduce(
                codec.view(t, segments=codec.segments(shapes)),
                spec,
                op="mean",
                options=codec.options(algorithm=algorithm),
            )
            error = float((t - want).norm() / want.norm())
            results[repr(spec), algorithm] = tensor_bytes(t), error
            if algorithm == "all_gather":  # all_gather adds the decoded frames without further rounding
                again = every[rank].clone()
                codec.torch.all_reduce(
                    codec.view(again, segments=codec.segments(shapes)),
                    spec,
                    stream=1 << 40,
                    op="mean",
                    options=codec.options(algorithm=algorithm),
                )
                results[repr(spec), "again"] = tensor_bytes(again), error
    return results


def test_lossy_results_are_identical_on_all_ranks():
    """For every codec and algorithm, results are identical on all ranks, with an error that the codec allows."""
    results = run_ranks(4, _lossy)
    limits = {
        "Lossless": 1e-6,
        "Truncate": 0.2,
        "Float8": 0.08,
        "Float4": 0.4,
        "Quantize": 0.5,
        "Sign": 1.2,
        "Ternary": 9,
    }
    for key, (first, error) in results[0].items():
        assert all(r[key][0] == first for r in results), key
        assert error <= (1e-6 if key[1] == "raw" else limits[key[0].partition("(")[0]]), (key, error)


def _one_phase(rank, size):
    x = rank_values(rank, (9000,))
    frames = [codec.encode(rank_values(r, (9000,)), codec.Float8()) for r in range(size)]
    want = codec.reduce(frames, like=x, op="mean")
    codec.torch.all_reduce(x, codec.Float8(), op="mean", options=codec.options(algorithm="all_gather"))
    assert torch.equal(x, want)


def test_all_gather_algorithm_equals_reduce_of_all_frames():
    run_ranks(3, _one_phase)


def _background(rank, size):
    tensors = [rank_values(10 * rank + i, (300, 100 + i)) for i in range(6)]
    pending = [codec.torch.all_reduce(t, async_op=True, op="mean") for t in tensors]
    futures = [p.get_future() for p in pending]
    for i, t in enumerate(tensors):
        assert futures[i].wait()[0] is t
        assert pending[i].result()[0] is t
        assert torch.equal(t, sum_in_order([rank_values(10 * r + i, (300, 100 + i)) for r in range(size)], "mean"))
    assert all(p.is_completed() and p.is_success() for p in pending)


def test_async_collectives():
    run_ranks(3, _background)


def _of_bfloat16(rank, size):
    metric = codec.optimizers.AdamW(lr=1e-3, step=10)
    state = {name: rank_values(7, (5000,), torch.bfloat16).abs() for name in ("theta", "m", "v")}
    every = [rank_values(r, (5000,)) for r in range(size)]
    frames = [codec.encode(x, codec.Truncate().bind(metric, **state)) for x in every]
    x = every[rank].clone()
    codec.torch.all_reduce(
        x, codec.Truncate().bind(metric, **state), op="mean", options=codec.options(algorithm="all_gather")
    )
    assert torch.equal(x, codec.reduce(frames, like=x, op="mean"))


def test_optimizer_state_may_be_bfloat16():
    """The optimizer state for Truncate may be bfloat16, which numpy lacks."""
    run_ranks(2, _of_bfloat16)


def _apart(rank, size):
    for dtype in (torch.float32, torch.bfloat16):
        every = [rank_values(r, (300, 1000), dtype) for r in range(size)]
        for algorithm in ("two_shot", "all_gather", "ring", "raw"):
            for spec in (codec.Lossless(), codec.Float8()):
                x, y, out = every[rank].clone(), every[rank].clone(), torch.full((300_000,), 7, dtype=dtype)
                codec.torch.all_reduce(x, spec, op="mean", options=codec.options(algorithm=algorithm))
                codec.torch.all_reduce(y, spec, out=out, op="mean", options=codec.options(algorithm=algorithm))
                assert torch.equal(x.view(-1), out)
                assert torch.equal(y, every[rank])
    x = every[rank].clone()
    for out in (x, x.view(-1), torch.empty(300_000), torch.empty(299_999, dtype=dtype), torch.empty(1000, 600)[:, ::2]):
        with pytest.raises(codec.CodecError):
            codec.torch.all_reduce(x, out=out, op="mean")
    assert torch.equal(x, every[rank])


def test_all_reduce_into_out():
    run_ranks(3, _apart)


SEVERAL = [
    (1_000, torch.float32, codec.Lossless()),
    (1_000_000, torch.float32, codec.Sign(group_size=1024)),
    (70_000, torch.bfloat16, codec.Quantize(4)),
    (20_000, torch.float16, codec.Float8()),
    (300_000, torch.float32, codec.Lossless()),
]


def _together(rank, size):
    """Several tensors reduced in one collective give the same results as one by one, and their messages overlap."""
    line, events, terms, found = communicator.communicator_of(None), [], [], []
    send, call_when_done = Mesh.send, Wait.call_when_done
    Mesh.send = lambda *args: events.append("send") or send(*args)
    Wait.call_when_done = lambda wait, wake: call_when_done(wait, wake) and (wait.done or not events.append("wait"))

    def planned(which, algorithm, spoiled):
        made = []
        for i in which:
            n, dtype, spec = SEVERAL[i]
            x = rank_values(10 * rank + i, (n,), dtype)
            x[n // 2] = torch.nan if spoiled == (rank, i) else 1
            r = arguments.reduction_of(x, spec, "mean", i)
            made.append((r, execution.choose(algorithm, r, line.channel)))
        return made

    def run(which, algorithm, spoiled=None):
        events.clear()

        async def reduced(collective):
            several = planned(which, algorithm, spoiled)
            terms[:] = [
                sum(len(pieces) for i, pieces in enumerate(partition.sent(r.slices(size))) if i != rank)
                if a.name == "two_shot"
                else len(r.slices(1)[0]) * (size - 1)
                for r, a in several
            ]
            results = await execution.run_several(collective, algorithm, several)
            await collective.agree()
            return [result.tobytes() for result in results]

        return line.run(reduced)

    def sent():
        """Return the number of messages that this rank sent before it first had to wait."""
        return [*events, "wait"].index("wait")

    for algorithm in ("two_shot", "all_gather", "ring", "raw", "auto"):
        each = [run([i], algorithm)[0] for i in range(len(SEVERAL))]
        for which in ([0, 1], [1, 0], [4, 2, 0, 3, 1]):
            for _ in range(2):  # twice: in newly allocated and in reused memory
                assert run(which, algorithm) == [each[i] for i in which], (algorithm, which)
            if algorithm in ("two_shot", "all_gather"):
                assert sent() >= sum(terms)
        with pytest.raises(codec.CodecError):
            run([0, 1, 2], algorithm, spoiled=(1, 1 + (algorithm == "two_shot")))
        assert run([0, 2], algorithm) == [each[0], each[2]]
        found += each
    return found


def test_list_of_tensors_is_reduced_with_overlapping_messages():
    for size in every(2, (3, 2)):
        results = run_ranks(size, _together)
        assert all(r == results[0] for r in results)


def _large(rank, size):
    """Results of large tensors are stored only after all ranks have succeeded, so that errors change nothing."""
    found = []
    for algorithm in ("two_shot", "all_gather", "ring"):
        for spec, dtype, high in (
            (codec.Sign(group_size=1024), torch.float32, 3e38),
            (codec.Float8(), torch.float16, 6e4),
        ):
            x = rank_values(rank, (LARGE * 4 // dtype.itemsize // 1000, 1000), dtype)
            given, out = x.clone(), torch.empty_like(x).view(-1)
            codec.torch.all_reduce(x, spec, op="mean", options=codec.options(algorithm=algorithm))
            codec.torch.all_reduce(given, spec, out=out, op="mean", options=codec.options(algorithm=algorithm))
            assert torch.equal(x.view(-1), out)
            turned, straight = given.T, given.T.contiguous()  # column-major and row-major memory
            codec.torch.all_reduce(turned, spec, op="mean", options=codec.options(algorithm=algorithm))
            codec.torch.all_reduce(straight, spec, op="mean", options=codec.options(algorithm=algorithm))
            assert torch.equal(turned, straight)
            found.append(tensor_bytes(x)[:1000])
            above = torch.full_like(x, high)
            with pytest.raises(codec.ArgumentError) as caught:
                codec.torch.all_reduce(above, spec, op="sum", options=codec.options(algorithm=algorithm))
            assert caught.value.code == codec.Status.NONFINITE
            assert (above == above[0, 0]).all()
    return found


def test_large_tensors_in_place():
    results = run_ranks(3, _large)
    assert results[1:] == results[:1] * 2


def test_partition_covers_all_values_and_keeps_rows():
    """The partition assigns each value to one piece, and the segments of pieces have whole rows."""
    shapes = [(64, 100), (64,), (128, 64, 3, 3), (1000,), (3000, 1100), (2, 500_000), ()]
    inside = codec.segments(shapes)
    n = inside[-1][0] + 1
    shape_of = np.zeros(n, int)
    for i, (offset, shape) in enumerate(inside):
        shape_of[offset : offset + int(np.prod(shape, dtype=int))] = i
    for size in (1, 2, 3, 4, 7):
        few, many = (partition.cut(n, size, 4, pack(inside), nbytes) for nbytes in (1 << 22, 1 << 20))
        assert [(s[0].begin, s[-1].end) for s in few] == [(s[0].begin, s[-1].end) for s in many]
        # Slices above 2 MiB have at least two pieces, so that coding and sending overlap
        assert all(len(s) >= 2 for s in few if 4 * (s[-1].end - s[0].begin) > 1 << 21)
        pieces = [p for each in many for p in each]
        assert [p.begin for p in pieces] == [0, *[p.end for p in pieces[:-1]]]
        assert pieces[-1].end == n
        for p in pieces:
            end = 0
            for offset, shape in unpack(p.segments):
                count = int(np.prod(shape, dtype=int))
                assert end <= offset
                end = offset + count
                assert end <= p.n
                i = shape_of[p.begin + offset]
                first, whole = inside[i]
                assert shape == whole or shape[1:] == whole[1:]
                row = int(np.prod(whole[1:], dtype=int)) if whole else 1
                assert (p.begin + offset - first) % row == 0
