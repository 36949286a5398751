"""All-reduces between processes: bit-identical results on all ranks, and unchanged tensors after any failure."""

import os
import signal
import time
import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.tensors.segments import pack, unpack
from codec.torch import arguments, communicator, connection, execution, messages
from support.ranks import run_ranks

SPECS = [
    codec.Lossless(),
    codec.Float8(),
    codec.Float8(group_size=128),
    codec.Float4(),
    codec.Quantize(8),
    codec.Quantize(4),
    codec.Sign(group_size=1024),
    codec.Ternary(),
    codec.Truncate(2),
]
LARGE = 2_200_000  # float32 values; results of large tensors are stored only when all ranks have succeeded
ALGORITHMS = ["two_shot", "all_gather", "ring", "raw"]


def values(rank, shape, dtype=torch.float32):
    g = torch.Generator().manual_seed(7 + rank)
    return (torch.randn(shape, generator=g) * 2.0 ** torch.randint(-9, 0, shape[-1:], generator=g)).to(dtype)


def sum_in_order(tensors, op):
    """Return the float32 sum of tensors in the order of ranks, rounded once to their dtype."""
    total = tensors[0].float()
    for t in tensors[1:]:
        total = torch.maximum(total, t.float()) if op == "max" else total + t.float()
    return ((total / len(tensors)) if op == "mean" else total).to(tensors[0].dtype)


def bits(t):
    return t.detach().contiguous().view(torch.uint8).numpy().tobytes() if t.dim() else t.numpy().tobytes()


def _exact(rank, size):
    """Lossless and raw: sums in the order of ranks for every shape, dtype and operation."""
    found = []
    for shape in [(), (1,), (5,), (0,), (1000,), (300, 100), (3, 5, 7, 11), (1100, 1000)]:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if dtype != torch.float32 and len(shape) > 2:
                continue
            every = [values(r, shape or (1,), dtype).view(shape) for r in range(size)]
            for op in ("mean", "sum", "max"):
                want = sum_in_order(every, op)
                for algorithm in ("two_shot", "all_gather", "raw"):
                    t = every[rank].clone()
                    codec.torch.all_reduce(t, op=op, algorithm=algorithm)
                    assert torch.equal(t, want), (shape, dtype, op, algorithm)
            found.append(want.sum().item())
    want = sum_in_order(large := [values(r, (300, 100)) for r in range(size)], "mean")
    for _ in range(8):  # frames first, then raw values if they are faster
        codec.torch.all_reduce(t := large[rank].clone(), op="mean")
        assert torch.equal(t, want)
    t = values(rank, (40, 30)).t()  # non-contiguous
    want = sum_in_order([values(r, (40, 30)).t() for r in range(size)], "sum")
    codec.torch.all_reduce(t, op=dist.ReduceOp.SUM, algorithm="two_shot")
    assert torch.equal(t, want)
    return found


def _op_names(rank, size):
    inputs = [values(r, (8, 10)) for r in range(size)]
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


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_lossless_all_reduce_is_the_sum_in_the_order_of_ranks(size):
    results = run_ranks(size, _exact)
    assert all(r == results[0] for r in results)


def _nans(rank, size):
    """Reduce NaNs with other bits on each rank."""
    found = []
    for dtype, quiet in ((torch.float32, 0x7FC00001), (torch.bfloat16, 0x7FC1), (torch.float16, 0x7E01)):
        for n in (1000, 100_000):
            for algorithm in ("two_shot", "all_gather", "ring", "raw"):
                x = values(rank, (n,), dtype)
                x.view(torch.int32 if dtype == torch.float32 else torch.int16)[rank :: rank + 2] = quiet + rank
                codec.torch.all_reduce(x, algorithm=algorithm, op="mean")
                found.append(bits(x))
    return found


def _overflows(rank, size):
    """Sums that overflow and Inf - Inf give Inf and NaN without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for algorithm in ("two_shot", "all_gather", "raw"):
            x = torch.full((100_000,), 3e38)
            x[0] = torch.inf if rank else -torch.inf
            codec.torch.all_reduce(x, op="sum", algorithm=algorithm)
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
    every = [torch.cat([values(10 * r + i, s).flatten() for i, s in enumerate(shapes)]) for r in range(size)]
    want = sum_in_order(every, "mean")
    for spec in SPECS:
        for algorithm in ALGORITHMS:
            t = every[rank].clone()
            codec.torch.all_reduce(t, spec, algorithm=algorithm, segments=codec.segments(shapes), op="mean")
            error = float((t - want).norm() / want.norm())
            results[repr(spec), algorithm] = bits(t), error
            if algorithm == "all_gather":  # exactly the decoded frames
                again = every[rank].clone()
                codec.torch.all_reduce(
                    again, spec, algorithm=algorithm, segments=codec.segments(shapes), stream=1 << 40, op="mean"
                )
                results[repr(spec), "again"] = bits(again), error
    return results


def test_lossy_results_are_identical_on_all_ranks():
    """Every codec with every algorithm; the error is what the codec allows."""
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
    x = values(rank, (9000,))
    frames = [codec.encode(values(r, (9000,)), codec.Float8()) for r in range(size)]
    want = codec.reduce(frames, "mean", like=x)
    codec.torch.all_reduce(x, codec.Float8(), algorithm="all_gather", op="mean")
    assert torch.equal(x, want)


def test_all_gather_algorithm_equals_reduce_of_all_frames():
    run_ranks(3, _one_phase)


def _background(rank, size):
    tensors = [values(10 * rank + i, (300, 100 + i)) for i in range(6)]
    pending = [codec.torch.all_reduce(t, async_op=True, op="mean") for t in tensors]
    futures = [p.get_future() for p in pending]
    for i, t in enumerate(tensors):
        assert futures[i].wait()[0] is t
        assert pending[i].result()[0] is t
        assert torch.equal(t, sum_in_order([values(10 * r + i, (300, 100 + i)) for r in range(size)], "mean"))
    assert all(p.is_completed() and p.is_success() for p in pending)


def test_async_collectives():
    run_ranks(3, _background)


def _refused(rank, size):
    """An error on one rank raises on all and changes nothing; the next collective works."""
    raised = []
    for case in range(8):
        x = values(rank, (400_000,))
        spec, kwargs = codec.Float8(), {}
        wrong = rank == 1
        if case == 0 and wrong:
            x[399_999] = float("nan")
        elif case == 6:  # raw values: the same error
            kwargs = {"algorithm": "raw"}
            x[7] = float("inf") if wrong else 0
        elif case == 1 and wrong:
            spec = codec.Quantize(4)
        elif case == 2 and wrong:
            x = x[:-1].clone()
        elif case == 3 and wrong:
            x = x.double()
        elif case == 4 and wrong:
            kwargs = {"op": "product"}
        elif case == 5 and wrong:
            kwargs = {"segments": [(0, (400_001,))]}
        elif case == 7 and wrong:  # equal results now, but perhaps not in a later call
            kwargs = {"algorithm": "auto"}
        before = bits(x)
        with pytest.raises(codec.CodecError) as e:
            codec.torch.all_reduce(x, spec, **({"algorithm": "two_shot", "op": "mean"} | kwargs))
        assert bits(x) == before
        raised.append(type(e.value).__name__)
        y = values(rank, (1000,))
        codec.torch.all_reduce(y, op="mean")
        assert torch.equal(y, sum_in_order([values(r, (1000,)) for r in range(size)], "mean"))
    return raised


def test_error_on_one_rank_raises_on_all():
    results = run_ranks(3, _refused)
    other = ["PeerError"] * 8
    bad, peer = "ArgumentError", "PeerError"
    mine = [bad, peer, peer, bad, bad, bad, bad, peer]
    assert results == [other, mine, other]


def _not_finite(rank, size):
    """Non-finite values are rejected by the same rank, as frames and uncompressed."""
    found = []
    for algorithm in ("two_shot", "raw", "all_gather"):
        for spec in (codec.Float8(), codec.Float8(nonfinite="propagate"), codec.Truncate(2), codec.Lossless()):
            for value, dtype in ((torch.inf, torch.float32), (6e4, torch.float16), (3e38, torch.float32)):
                x = torch.ones(30_000, dtype=dtype)
                if rank == 1 or value < torch.inf:
                    x[7] = value  # one value or the sum of all overflows
                try:
                    codec.torch.all_reduce(x, spec, op="sum", algorithm=algorithm)
                    found.append(x.isfinite().all().item())
                except codec.CodecError as e:
                    found.append(type(e).__name__)
    assert found[:12] == found[12:24]
    assert [f is False for f in found[:12]] == [
        f is False for f in found[24:]
    ]  # sums that overflow are rejected by all ranks
    return found[:3], set(found[3:12])


def test_raw_and_frames_reject_the_same_values():
    run_ranks(2, _not_finite)
    owner, wrong, other = (
        ("ArgumentError", "PeerError", "PeerError"),
        ("PeerError", "ArgumentError", "PeerError"),
        {False},
    )
    want = [([wrong[rank], owner[rank], owner[rank]], other) for rank in range(3)]
    assert run_ranks(3, _not_finite) == want


def _wrong(rank, size):
    """A wrong argument on one rank raises on all; the next call works."""
    x, wrong = values(rank, (3000,)), rank == 1
    reduce, scatter, exchange = codec.torch.all_reduce, codec.torch.reduce_scatter, codec.torch.exchange
    part = torch.zeros(3000 // size)
    truncate, sgd = codec.Truncate(), codec.optimizers.SGD(0.1)
    good = {"metric": sgd, "state": {"theta": x, "m": None}}
    reduce(x.clone(), truncate, **good)
    raised = []
    specs = [
        *((reduce, (x, spec)) for spec in ("float8", codec.Sign, None, [])),
        (reduce, (x, truncate)),
        *((scatter, (part, x, spec)) for spec in ("x", codec.Sign)),
    ]
    arguments = [
        *((reduce, (y,)) for y in (x.numpy(), None, distributed(x), x.to_sparse())),
        (reduce, (x, truncate, {"metric": sgd, "state": [x]})),
        (reduce, (x, truncate, {"metric": sgd, "state": {"theta": x[1:]}})),
        *((reduce, (x, codec.Lossless(), {"segments": s})) for s in (5, [5], "ab")),
        *((reduce, (x, codec.Lossless(), {"op": op})) for op in (["sum"], None)),
        *((reduce, (x, codec.Lossless(), {"stream": stream})) for stream in ("a", -1, 1.5)),
        (reduce, (x, codec.Lossless(), {"algorithm": "foo"})),
        (reduce, (x, codec.Lossless(), {"out": x.numpy()})),
        *((scatter, (y, x)) for y in (part.numpy(), None)),
        *((exchange, (frames,)) for frames in (["a"] * size, 5, [b""])),
    ]
    cases = [(codec.SpecError, *case) for case in specs] + [(codec.ArgumentError, *case) for case in arguments]
    for error, call, bad in cases:
        *args, how = bad if isinstance(bad[-1], dict) else (*bad, {})
        if not wrong:
            args, how = {reduce: (x,), scatter: (part, x), exchange: ([b"ab"] * size,)}[call], {}
        before = bits(x)
        with pytest.raises(error if wrong else codec.PeerError):
            call(*args, **how)
        assert bits(x) == before
        y = values(rank, (1000,))
        reduce(y, timeout=timedelta(seconds=20))
        raised.append(y)
    return len(raised)


def distributed(x):
    """Return a tensor as a DTensor, whose values lie in another tensor."""
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    return distribute_tensor(x, DeviceMesh("cpu", list(range(dist.get_world_size()))), [Replicate()])


def test_wrong_argument_on_one_rank_raises_on_all_before_anything_is_sent():
    assert len(set(run_ranks(3, _wrong))) == 1


def _timeouts(rank, size):
    for bad in ("a", [1], 1e300):
        with pytest.raises(codec.ArgumentError, match="timeout must be seconds or a timedelta"):
            codec.torch.all_reduce(torch.ones(3), timeout=bad)
    pending = codec.torch.all_reduce(torch.ones(3), timeout=timedelta(seconds=20), async_op=True)
    assert pending.wait(timedelta(seconds=20))
    assert torch.equal(pending.result()[0], torch.ones(3))


def test_timeout_takes_seconds_and_timedelta():
    run_ranks(1, _timeouts)


def _of_bfloat16(rank, size):
    metric = codec.optimizers.AdamW(lr=1e-3, step=10)
    state = {name: values(7, (5000,), torch.bfloat16).abs() for name in ("theta", "m", "v")}
    every = [values(r, (5000,)) for r in range(size)]
    frames = [codec.encode(x, codec.Truncate(), metric=metric, state=state) for x in every]
    x = every[rank].clone()
    codec.torch.all_reduce(x, codec.Truncate(), metric=metric, state=state, algorithm="all_gather", op="mean")
    assert torch.equal(x, codec.reduce(frames, "mean", like=x))


def test_optimizer_state_may_be_bfloat16():
    """numpy has no such dtype."""
    run_ranks(2, _of_bfloat16)


def _damaged(rank, size, n):
    x = values(rank, (n,))
    channel = communicator.communicator_of(None).channel
    raised = []
    for algorithm in ("two_shot", "all_gather", "ring"):
        before = bits(x)
        send = channel.send
        if rank == 2:

            def damage(message, to, send=send):
                if message is not None:
                    message = message.copy()  # the message also goes to other ranks
                    message[message.nbytes // 2] ^= 4
                send(message, to)

            channel.send = damage
        with pytest.raises((codec.FrameError, codec.PeerError)) as e:
            codec.torch.all_reduce(x, codec.Quantize(4), algorithm=algorithm, op="mean")
        channel.send = send
        assert bits(x) == before
        raised.append(type(e.value).__name__)
        codec.torch.all_reduce(x.clone(), codec.Quantize(4), algorithm=algorithm, op="mean")
    return raised


@pytest.mark.parametrize("n", [300_000, LARGE])
def test_damaged_frame_raises_on_all(n):
    results = run_ranks(3, _damaged, n)
    assert all("ChecksumError" in {r[i] for r in results} for i in range(3))


def _lost(rank, size, how, moment):
    codec.torch.partition.MOST_NBYTES = 1 << 20  # several chunks per slice
    x = values(rank, (LARGE,))
    codec.torch.all_reduce(x.clone(), op="mean")  # connects all ranks
    channel = communicator.communicator_of(None).channel
    if rank == 1:
        count, post = [0], channel.post

        def die(*args):
            count[0] += 1
            if count[0] > moment:
                os.kill(os.getpid(), how)
            return post(*args)

        channel.post = die
    before, begin = bits(x), time.monotonic()
    with pytest.raises(codec.PeerError):
        codec.torch.all_reduce(x, codec.Float8(), algorithm="two_shot", op="mean")
    took = time.monotonic() - begin
    assert bits(x) == before
    with pytest.raises(codec.PeerError, match="new group"):
        codec.torch.all_reduce(x, op="mean")
    dist.destroy_process_group()
    return took


@pytest.mark.parametrize(("how", "moment"), [(signal.SIGKILL, 0), (signal.SIGKILL, 17), (signal.SIGSTOP, 9)])
def test_lost_rank_raises_on_all_others(how, moment):
    took = run_ranks(3, _lost, how, moment, timeout=3, killed=(1,))
    assert all(t < 3 + 1 + 2 for t in (took[0], took[2])), took  # margin for shared CPUs


def _apart(rank, size):
    for dtype in (torch.float32, torch.bfloat16):
        every = [values(r, (300, 1000), dtype) for r in range(size)]
        for algorithm in ("two_shot", "all_gather", "ring", "raw"):
            for spec in (codec.Lossless(), codec.Float8()):
                x, y, out = every[rank].clone(), every[rank].clone(), torch.full((300_000,), 7, dtype=dtype)
                codec.torch.all_reduce(x, spec, algorithm=algorithm, op="mean")
                codec.torch.all_reduce(y, spec, algorithm=algorithm, out=out, op="mean")
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
    (3_000_000, torch.float32, codec.Sign(group_size=1024)),
    (70_000, torch.bfloat16, codec.Quantize(4)),
    (20_000, torch.float16, codec.Float8()),
    (300_000, torch.float32, codec.Lossless()),
]


def _together(rank, size):
    """Several reductions of one call give the bits of single ones; no message waits for another reduction."""
    line, events, found = communicator.communicator_of(None), [], []
    post, wait = line.channel.post, line.channel.wait
    line.channel.post = lambda what, message, to, tag=0: events.append((what, tag)) or post(what, message, to, tag)
    line.channel.wait = lambda work, other, *within: events.append(("wait", len(within))) or wait(work, other, *within)

    def reductions(which, spoiled=None):
        made = []
        for i in which:
            n, dtype, spec = SEVERAL[i]
            x = values(10 * rank + i, (n,), dtype)
            x[n // 2] = torch.nan if spoiled == (rank, i) else 1
            made.append(arguments.reduction_of(x, spec, "mean", None, None, None, i))
        return made

    def run(which, algorithm, spoiled=None):
        events.clear()
        ended = line.run(lambda: execution.all_reduce_several(line, lambda: reductions(which, spoiled), algorithm))
        return [result.tobytes() for result, _ in ended]

    def sent():
        """How many messages, before any of another rank's was waited for."""
        return events[: events.index(("wait", 0))].count(("send", messages.FRAMES_TAG))

    for algorithm in ("two_shot", "all_gather", "ring", "raw", "auto"):
        each, alone = [], []
        for i in range(len(SEVERAL)):
            each += run([i], algorithm)
            alone.append(sent())
        for which in ([0, 1], [1, 0], [4, 2, 0, 3, 1]):
            for _ in range(2):  # in new and in reused memory
                assert run(which, algorithm) == [each[i] for i in which], (algorithm, which)
            if algorithm in ("two_shot", "all_gather"):
                assert sent() == sum(alone[i] for i in which) >= len(which) * (size - 1)
        with pytest.raises(codec.CodecError):
            run([0, 1, 2], algorithm, spoiled=(1, 1 + (algorithm == "two_shot")))
        assert run([0, 2], algorithm) == [each[0], each[2]]
        found += each
    return found


def test_list_of_tensors_is_reduced_with_overlapping_messages():
    for size in (2, 3):
        results = run_ranks(size, _together)
        assert all(r == results[0] for r in results)


def _large(rank, size):
    """Large tensors in place: results are stored when all ranks have succeeded; errors change nothing."""
    found = []
    for algorithm in ("two_shot", "all_gather", "ring"):
        for spec, dtype, high in (
            (codec.Sign(group_size=1024), torch.float32, 3e38),
            (codec.Float8(), torch.float16, 6e4),
        ):
            x = values(rank, (LARGE * 4 // dtype.itemsize // 1000, 1000), dtype)
            given, out = x.clone(), torch.empty_like(x).view(-1)
            codec.torch.all_reduce(x, spec, algorithm=algorithm, op="mean")
            codec.torch.all_reduce(given, spec, algorithm=algorithm, out=out, op="mean")
            assert torch.equal(x.view(-1), out)
            turned, straight = given.T, given.T.contiguous()  # transposed memory
            codec.torch.all_reduce(turned, spec, algorithm=algorithm, op="mean")
            codec.torch.all_reduce(straight, spec, algorithm=algorithm, op="mean")
            assert torch.equal(turned, straight)
            found.append(bits(x)[:1000])
            above = torch.full_like(x, high)
            with pytest.raises(codec.ArgumentError) as caught:
                codec.torch.all_reduce(above, spec, op="sum", algorithm=algorithm)
            assert caught.value.code == codec.Status.NONFINITE
            assert (above == above[0, 0]).all()
    return found


def test_large_tensors_in_place():
    results = run_ranks(3, _large)
    assert results[1:] == results[:1] * 2


def _odd(rank, size):
    """Tensors that cannot be used, and a rank outside the group."""
    x, metric, state = torch.ones(600, 500), codec.optimizers.SGD(lr=0.1), {"theta": np.ones(300_001, np.float32)}
    wide = torch.zeros(600, 1000)
    for tensor, kwargs in (
        (x.to_sparse(), {}),
        (x.to("meta"), {}),
        (torch._neg_view(x), {}),
        (wide[:, ::2], {"out": wide.view(-1)[300_000:]}),
        (x, {"spec": codec.Truncate(), "metric": metric, "state": state}),
    ):
        with pytest.raises(codec.ArgumentError, match=r"sparse|shares|300001"):
            codec.torch.all_reduce(tensor, **kwargs)
    with pytest.raises(codec.ArgumentError, match="sparse"):
        codec.torch.all_gather(torch.empty(size * 300_000, device="meta"), x)
    state["theta"] = state["theta"][:0:-1]  # negative strides, which torch does not support
    codec.torch.all_reduce(x, codec.Truncate(), metric=metric, state=state, op="mean")
    group = dist.new_group([0, 1])
    if rank < 2:
        codec.torch.all_reduce(x, group=group, op="mean")
        return codec.torch.exchange([b"a", b"b"], group=group)
    with pytest.warns(UserWarning, match="does not belong"):
        codec.torch.all_reduce(x, group=group, op="mean")
    with pytest.warns(UserWarning, match="does not belong"):
        codec.torch.all_gather(torch.empty(1), x, group=group)
    with pytest.warns(UserWarning, match="does not belong"):
        return codec.torch.exchange([], group=group)


def test_unusable_tensors_and_foreign_groups_are_rejected():
    assert run_ranks(3, _odd) == [[b"a", b"a"], [b"b", b"b"], []]


def _exchanged(rank, size):
    frames = [bytes([rank, to]) * (1000 * (rank + 3 * to) % 70_001) for to in range(size)]
    got = codec.torch.exchange(frames)
    assert got == [bytes([r, rank]) * (1000 * (r + 3 * rank) % 70_001) for r in range(size)]
    with pytest.raises(codec.CodecError):
        codec.torch.exchange(frames[: size - (rank == 0)])
    assert codec.torch.exchange([b""] * size) == [b""] * size


def test_exchange():
    run_ranks(4, _exchanged)


def _announced(rank, size):
    """Impossible sizes and missing memory on one rank raise on all."""
    raised = []
    for lie in (1 << 60, -1, None):
        group = dist.new_group()
        codec.torch.exchange([b"x"] * size, group=group)
        line = communicator.communicator_of(group).channel
        scatter, begin = line.scatter_numbers, line.begin

        def lying(numbers, scatter=scatter, lie=lie):
            return scatter([lie] * len(numbers))

        def failing(room):
            raise MemoryError

        if rank == 1:
            line.scatter_numbers, line.begin = (scatter, failing) if lie is None else (lying, begin)
        for _ in range(2):
            with pytest.raises((codec.CodecError, MemoryError)) as e:
                codec.torch.exchange([b"y" * 5000] * size, group=group)
            raised.append(type(e.value).__name__)
    return raised


def test_exchange_of_impossible_sizes_raises_on_all():
    results = run_ranks(3, _announced)
    wrong = ["FrameError", "PeerError"] * 2
    assert results == [[*wrong, "PeerError", "PeerError"], [*wrong, "MemoryError", "PeerError"], results[0]]


def _policies(rank, size):
    """Threads for messages have no signal handlers; the scheduling policy of the caller is unchanged."""

    def batch():
        return {t for t in os.listdir("/proc/self/task") if os.sched_getscheduler(int(t)) == os.SCHED_BATCH}

    before = batch()
    codec.torch.all_reduce(values(rank, (1000,)), op="mean")
    assert not before
    assert batch()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    group = dist.new_group()
    codec.torch.all_reduce(values(rank, (1000,)), group=group, op="mean")
    assert os.sched_getscheduler(0) == os.SCHED_BATCH


def test_message_threads_do_not_change_the_callers_scheduling():
    run_ranks(2, _policies)


def test_scheduling_policy_is_restored_or_left_alone(monkeypatch):
    def forbidden(*args):
        raise PermissionError

    def failing():
        with connection.batch_scheduling():
            assert os.sched_getscheduler(0) == os.SCHED_BATCH
            raise codec.PeerError("no connection")

    with pytest.raises(codec.PeerError, match="no connection"):
        failing()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    for name in ("sched_setscheduler", "sched_getscheduler"):
        monkeypatch.setattr(os, name, forbidden)
        with connection.batch_scheduling():
            pass


def test_collective_without_a_group_is_an_error():
    with pytest.raises(codec.ArgumentError, match="init_process_group"):
        codec.torch.all_reduce(torch.ones(3))


def test_partition_covers_all_values_and_keeps_rows():
    """It depends on sizes only; each value is in one piece, and segments of pieces have whole rows."""
    shapes = [(64, 100), (64,), (128, 64, 3, 3), (1000,), (3000, 1100), (2, 500_000), ()]
    inside = codec.segments(shapes)
    n = inside[-1][0] + 1
    shape_of = np.zeros(n, int)
    for i, (offset, shape) in enumerate(inside):
        shape_of[offset : offset + int(np.prod(shape, dtype=int))] = i
    for size in (1, 2, 3, 4, 7):
        few, many = (codec.torch.partition.cut(n, size, 4, pack(inside), nbytes) for nbytes in (1 << 22, 1 << 20))
        assert [(s[0].begin, s[-1].end) for s in few] == [(s[0].begin, s[-1].end) for s in many]
        assert all(len(s) >= 2 for s in few if 4 * (s[-1].end - s[0].begin) > 1 << 21)  # otherwise nothing overlaps
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


def _others(rank, size):
    for dtype in (torch.float32, torch.bfloat16):
        for n in (0, 3, 1000, 400_000):
            every = [values(r, (size, n), dtype) for r in range(size)]
            out = torch.full((n,), 7, dtype=dtype)
            codec.torch.reduce_scatter(out, every[rank], op="sum")
            assert torch.equal(out, sum_in_order([x[rank] for x in every], "sum"))
            out = torch.full((size, n), 7, dtype=dtype)
            codec.torch.all_gather(out, every[rank][0])
            assert torch.equal(out, torch.stack([x[0] for x in every]))
            codec.torch.all_to_all(out, every[rank])
            assert torch.equal(out, torch.stack([x[rank] for x in every]))
    x = values(rank, (size, 1000))
    out = torch.zeros(size, 1000)
    codec.torch.all_gather(out, x[0], codec.Float8())
    want = [
        torch.from_numpy(codec.decode(codec.encode(values(r, (size, 1000))[0], codec.Float8()))) for r in range(size)
    ]
    assert torch.equal(out, torch.stack(want))
    before = bits(x)
    with pytest.raises(codec.CodecError):
        codec.torch.reduce_scatter(torch.zeros(1000 + (rank == 1)), x, op="mean")
    with pytest.raises(codec.CodecError):
        codec.torch.all_to_all(x, torch.zeros(size, 1000) if rank else x.double())
    assert bits(x) == before


def test_reduce_scatter_all_gather_and_all_to_all_equal_torch():
    """Lossless: sums in the order of ranks."""
    run_ranks(3, _others)


def choices_of(frames, values, load, n, smaller=1):
    """Return the choices of two ranks for n collectives, of which frames and values take the given seconds."""
    choices = [codec.torch.autotune.Choice() for _ in range(2)]
    kinds = []
    for i in range(n):
        kind, other = (c.kind for c in choices)
        assert kind == other  # ranks agree although their clocks differ
        kinds.append(kind)
        reports = []
        for rank in range(2):
            wall = {"frames": frames, "values": values}[kind] * (5 if i % 200 == 0 else 1 + rank / 10)
            larger = smaller if kind == "frames" else 1
            reports.append([round(wall * 1e6), round(load * 1e3), round((1 - load) * wall * larger * 1e6)])
        for c in choices:
            c.learn(list(map(max, zip(*reports, strict=True))))
    return kinds


def test_autotune_sends_what_is_faster():
    """Frames first; values where ranks are busy and values were faster; values are never tried on a slow link."""
    assert set(choices_of(1.0, 25.0, 0.05, 500)) == {"frames"}
    fast = choices_of(1.0, 0.5, 0.8, 450)
    assert fast[:5] == ["frames"] * 5
    assert set(fast[10:200]) == {"values"}
    assert fast[200] == "frames"  # measured again
    assert set(fast[210:400]) == {"values"}
    near = choices_of(1.0, 1.5, 0.8, 100)
    assert near[5:10] == ["values"] * 5
    assert set(near[10:]) == {"frames"}
    # a trial stops when values take twice as long as frames
    far = choices_of(1.0, 3.0, 0.5, 300, 4)
    assert [i for i, kind in enumerate(far) if kind == "values"] == [5, 6, 205, 206]
    # busy, but raw values would take longer by as much as they are larger
    assert set(choices_of(1.0, 25.0, 0.5, 500, 50)) == {"frames"}
    assert set(choices_of(1.0, 0.9, 0.5, 100, 3)[5:]) == {"values"}


def test_autotune_uses_the_median_of_recent_times():
    """The fastest time may be luck; a way that becomes slower is left."""

    def sent(frames, values, n=200):
        choice, kinds = codec.torch.autotune.Choice(), []
        for i in range(n):
            kinds.append(choice.kind)
            choice.learn([frames(i) if kinds[-1] == "frames" else values(i), 800, 0])
        return kinds

    def scattered(i):
        return 1100 if i % 4 else 500

    assert "values" not in sent(lambda i: 1000, scattered)[10:]
    assert "frames" not in sent(scattered, lambda i: 1000)[10:]
    # a single slow collective, still faster than frames, does not end the trial
    assert "frames" not in sent(lambda i: 3000, lambda i: 2900 if i % 3 else 1000)[10:]
    assert "frames" not in sent(lambda i: 3000, lambda i: 1000 if i % 3 else 2900)[10:]
    slower = sent(lambda i: 1000, lambda i: 500 if i < 50 else 2000)
    assert "frames" not in slower[10:50]
    assert "values" not in slower[60:]


def _chosen(rank, size):
    every = [values(r, (500, 1000)) for r in range(size)]
    want = sum_in_order(every, "mean")
    for _ in range(15):
        t = every[rank].clone()
        codec.torch.all_reduce(t, op="mean")
        assert torch.equal(t, want)
    kinds = [c.kind for c in communicator.communicator_of(None).choices.values()]
    execution._CHOICES = 3
    with pytest.raises(codec.PeerError):
        codec.torch.all_reduce(torch.ones(5 + rank))  # small tensors leave no entry
    for n in (1, 2, 3, 1, 4):
        codec.torch.all_reduce(torch.ones(n))
    choices = communicator.communicator_of(None).choices
    assert [c._count for c in choices.values()] == [1, 2, 1]
    return [*kinds, *choices]


def test_all_ranks_choose_frames_or_raw_alike():
    """Results are bit-identical in both ways."""
    results = run_ranks(3, _chosen)
    assert len(results[0]) == 1 + 3
    assert all(r == results[0] for r in results)
