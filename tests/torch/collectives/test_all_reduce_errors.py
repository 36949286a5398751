"""An error of an all-reduce on one rank raises on all ranks, changes no tensor, and the next collective works."""

import os
import signal
import time
from contextlib import nullcontext
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.group import communicator
from support import flatcall
from support.collective_values import LARGE, rank_values, sum_in_order, tensor_bytes
from support.faults import at_fault_point, damaged_frames
from support.ranks import run_ranks


def _refused(rank, size):
    """An error on one rank raises on all and changes nothing; the next collective works."""
    raised = []
    for case in range(8):
        x = rank_values(rank, (400_000,))
        spec, kwargs = codec.Float8(), {}
        wrong = rank == 1
        if case == 0 and wrong:
            x[399_999] = float("nan")
        elif case == 6:  # uncompressed values raise the same error
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
        elif case == 7 and wrong:  # "auto" on one rank only: its choice could differ in a later call
            kwargs = {"algorithm": "auto"}
        before = tensor_bytes(x)
        with pytest.raises(codec.CodecError) as e:
            flatcall.all_reduce(x, spec, **({"algorithm": "two_shot", "op": "mean"} | kwargs))
        assert tensor_bytes(x) == before
        raised.append(type(e.value).__name__)
        y = rank_values(rank, (1000,))
        codec.torch.all_reduce(y, op="mean")
        assert torch.equal(y, sum_in_order([rank_values(r, (1000,)) for r in range(size)], "mean"))
    return raised


def test_error_on_one_rank_raises_on_all():
    results = run_ranks(3, _refused)
    other = ["PeerError"] * 8
    bad, peer = "ArgumentError", "PeerError"
    mine = [bad, peer, peer, bad, bad, bad, bad, peer]
    assert results == [other, mine, other]


def _not_finite(rank, size):
    """NaN and Inf raise on the same rank, whether values are sent as frames or uncompressed."""
    found = []
    for algorithm in ("two_shot", "raw", "all_gather"):
        for spec in (codec.Float8(), codec.Float8(nonfinite="propagate"), codec.Truncate(2), codec.Lossless()):
            for value, dtype in ((torch.inf, torch.float32), (6e4, torch.float16), (3e38, torch.float32)):
                x = torch.ones(30_000, dtype=dtype)
                if rank == 1 or value < torch.inf:
                    x[7] = value  # rank 1's Inf, or a value whose sum over ranks overflows
                try:
                    codec.torch.all_reduce(x, spec, op="sum", options=codec.options(algorithm=algorithm))
                    found.append(x.isfinite().all().item())
                except codec.CodecError as e:
                    found.append(type(e).__name__)
    assert found[:12] == found[12:24]
    assert [f is False for f in found[:12]] == [
        f is False for f in found[24:]
    ]  # all ranks reject every sum that overflows
    _check_parts(rank, size)
    return found[:3], set(found[3:12])


def _check_parts(rank, size):
    """Check that a reduce_scatter whose sum overflows raises on the rank that adds, and therefore on all ranks."""
    for value, dtype in ((6e4, torch.float16), (3e38, torch.float32), (3e38, torch.bfloat16)):
        x, part = torch.ones(3000 * size, dtype=dtype), torch.zeros(3000, dtype=dtype)
        x[3007] = value  # rank 1 adds the values 3000 to 5999
        for spec in (codec.Float8(), codec.Quantize(4)):
            with pytest.raises(codec.ArgumentError if rank == 1 else codec.PeerError) as e:
                codec.torch.reduce_scatter(part, x, spec)
            assert e.value.code == codec.Status.NONFINITE
            assert not part.any()
        for spec in (codec.Float8(nonfinite="propagate"), codec.Lossless()):
            codec.torch.reduce_scatter(part, x, spec)
            assert part.isfinite().all().item() == (rank != 1)


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
    """A wrong argument on one rank raises on all ranks; the next call works."""
    x, wrong = rank_values(rank, (3000,)), rank == 1
    reduce, scatter, exchange = codec.torch.all_reduce, codec.torch.reduce_scatter, codec.torch.all_to_all_bytes
    part = torch.zeros(3000 // size)
    truncate, sgd = codec.Truncate(), codec.optimizers.SGD(0.1)
    reduce(x.clone(), truncate.bind(sgd, theta=x))
    raised = []
    specs = [
        *((reduce, (x, spec)) for spec in ("float8", codec.Sign, [])),
        (reduce, (x, truncate)),
        *((scatter, (part, x, spec)) for spec in ("x", codec.Sign)),
    ]
    arguments = [
        *((reduce, (y,)) for y in (x.numpy(), None, distributed(x), x.to_sparse())),
        (reduce, (x, truncate.bind("sgd", theta=x))),
        (reduce, (x, truncate.bind(sgd, theta=x[1:]))),
        (reduce, (codec.view(x, segments=[(0, (3001,))]),)),
        (reduce, (codec.view(x, "float16"),)),
        *((reduce, (x, codec.Lossless(), {"op": op})) for op in (["sum"], None)),
        *((reduce, (x, codec.Lossless(), {"stream": stream})) for stream in ("a", -1, 1.5)),
        (reduce, (x, codec.Lossless(), {"options": codec.CallOptions(algorithm="foo")})),
        (reduce, (x, codec.Lossless(), {"out": x.numpy()})),
        *((scatter, (y, x)) for y in (part.numpy(), None)),
        *((exchange, (frames,)) for frames in (["a"] * size, 5, [b""])),
    ]
    cases = [(codec.SpecError, *case) for case in specs] + [(codec.ArgumentError, *case) for case in arguments]
    for error, call, bad in cases:
        *args, how = bad if isinstance(bad[-1], dict) else (*bad, {})
        if not wrong:
            args, how = {reduce: (x,), scatter: (part, x), exchange: ([b"ab"] * size,)}[call], {}
        before = tensor_bytes(x)
        with pytest.raises(error if wrong else codec.PeerError):
            call(*args, **how)
        assert tensor_bytes(x) == before
        y = rank_values(rank, (1000,))
        reduce(y, options=codec.options(timeout=20))
        raised.append(y)
    return len(raised)


def distributed(x):
    """Return a tensor wrapped as a DTensor, whose values are in an inner tensor."""
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    return distribute_tensor(x, DeviceMesh("cpu", list(range(dist.get_world_size()))), [Replicate()])


def test_wrong_argument_on_one_rank_raises_on_all_before_anything_is_sent():
    assert len(set(run_ranks(3, _wrong))) == 1


def _timeouts(rank, size):
    for bad in ("a", [1], 1e300):
        with pytest.raises(codec.ArgumentError, match="timeout must be seconds or a timedelta"):
            codec.torch.all_reduce(torch.ones(3), options=codec.options(timeout=bad))
    pending = codec.torch.all_reduce(torch.ones(3), async_op=True, options=codec.options(timeout=timedelta(seconds=20)))
    assert pending.wait(timedelta(seconds=20))
    assert torch.equal(pending.result()[0], torch.ones(3))


def test_timeout_takes_seconds_and_timedelta():
    run_ranks(1, _timeouts)


def _damaged(rank, size, n):
    x = rank_values(rank, (n,))
    raised = []

    def damage(frame, to):
        frame = frame.copy()
        frame[frame.nbytes // 2] ^= 4
        return frame

    for algorithm in ("two_shot", "all_gather", "ring"):
        before = tensor_bytes(x)
        with damaged_frames(damage) if rank == 2 else nullcontext():  # noqa: SIM117
            with pytest.raises((codec.FrameError, codec.PeerError)) as e:
                codec.torch.all_reduce(x, codec.Quantize(4), op="mean", options=codec.options(algorithm=algorithm))
        assert tensor_bytes(x) == before
        raised.append(type(e.value).__name__)
        codec.torch.all_reduce(x.clone(), codec.Quantize(4), op="mean", options=codec.options(algorithm=algorithm))
    return raised


@pytest.mark.parametrize("n", [300_000, LARGE])
def test_damaged_frame_raises_on_all(n):
    results = run_ranks(3, _damaged, n)
    assert all("ChecksumError" in {r[i] for r in results} for i in range(3))


def _lost(rank, size, how, moment):
    codec.torch.reduction.partition.MOST_NBYTES = 1 << 20  # chunks of at most 1 MiB, so that a slice has several
    x = rank_values(rank, (LARGE,))
    codec.torch.all_reduce(x.clone(), op="mean")  # connects the ranks before the fault
    before, begin = tensor_bytes(x), time.monotonic()
    channel = communicator.communicator_of(None).channel
    with (
        at_fault_point(channel, moment if rank == 1 else -1, lambda: os.kill(os.getpid(), how)),
        pytest.raises(codec.PeerError),
    ):
        codec.torch.all_reduce(x, codec.Float8(), op="mean", options=codec.options(algorithm="two_shot"))
    took = time.monotonic() - begin
    assert tensor_bytes(x) == before
    with pytest.raises(codec.PeerError, match="new group"):
        codec.torch.all_reduce(x, op="mean")
    dist.destroy_process_group()
    return took


@pytest.mark.parametrize(("how", "moment"), [(signal.SIGKILL, 0), (signal.SIGKILL, 17), (signal.SIGSTOP, 9)])
def test_lost_rank_raises_on_all_others(how, moment):
    took = run_ranks(3, _lost, how, moment, timeout=3, killed=(1,))
    # Timeout, promised delay, margin for shared CPUs (seconds)
    assert all(t < 3 + 1 + 2 for t in (took[0], took[2])), took


def _odd(rank, size):
    """Unsupported tensors raise an error, and so does a rank outside of the group."""
    x, metric, state = torch.ones(600, 500), codec.optimizers.SGD(lr=0.1), {"theta": np.ones(300_001, np.float32)}
    wide = torch.zeros(600, 1000)
    for tensor, kwargs in (
        (x.to_sparse(), {}),
        (x.to("meta"), {}),
        (torch._neg_view(x), {}),
        (wide[:, ::2], {"out": wide.view(-1)[300_000:]}),
        (x, {"spec": codec.Truncate(), "optimizer": metric, "state": state}),
    ):
        with pytest.raises(codec.ArgumentError, match=r"must be dense|shares|300001"):
            flatcall.all_reduce(tensor, **kwargs)
    with pytest.raises(codec.ArgumentError, match="must be dense"):
        codec.torch.all_gather(torch.empty(size * 300_000, device="meta"), x)
    state["theta"] = state["theta"][:0:-1]  # numpy state with negative strides, which torch does not support
    codec.torch.all_reduce(x, codec.Truncate().bind(metric, **state), op="mean")
    group = dist.new_group([0, 1])
    if rank < 2:
        codec.torch.all_reduce(x, group=group, op="mean")
        return codec.torch.all_to_all_bytes([b"a", b"b"], group=group)
    with pytest.warns(UserWarning, match="does not belong"):
        codec.torch.all_reduce(x, group=group, op="mean")
    with pytest.warns(UserWarning, match="does not belong"):
        codec.torch.all_gather(torch.empty(1), x, group=group)
    with pytest.warns(UserWarning, match="does not belong"):
        return codec.torch.all_to_all_bytes([], group=group)


def test_unusable_tensors_and_foreign_groups_are_rejected():
    assert run_ranks(3, _odd) == [[b"a", b"a"], [b"b", b"b"], []]


def test_collective_without_a_group_is_an_error():
    with pytest.raises(codec.ArgumentError, match="init_process_group"):
        codec.torch.all_reduce(torch.ones(3))
