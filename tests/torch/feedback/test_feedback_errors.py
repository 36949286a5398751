"""A failed all-reduce with error feedback leaves residuals unchanged on all ranks; concurrent ones run in order."""

import os
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.group import communicator
from codec.torch.transport.arena import Arena
from support import flatcall
from support.collective_values import tensor_bytes
from support.faults import KILLED
from support.feedback import N, Oracle, gathered, gradient, reduce, state_bytes
from support.ranks import run_ranks


def _unchanged(rank, size):
    """Cause errors on one rank, before and after frames are sent; residuals and tensors must be unchanged."""
    found = []
    feedback = codec.torch.Feedback(codec.Quantize(4))
    for algorithm in ("two_shot", "all_gather", "raw"):
        reduce(gradient(rank, 7), feedback, algorithm)
        x = gradient(rank, 8)
        if rank == 1:
            x[N // 2] = float("nan")
        before, bits = state_bytes(feedback), tensor_bytes(x)
        with pytest.raises(codec.CodecError) as e:
            reduce(x, feedback, algorithm)
        assert state_bytes(feedback) == before
        assert tensor_bytes(x) == bits
        found.append(type(e.value).__name__)
    out, x = torch.empty(N // size), gradient(rank, 8)[: N // size * size]
    if rank == 1:
        x[0] = float("inf")
    with pytest.raises(codec.CodecError):
        codec.torch.reduce_scatter(out, codec.view(x, segments={"x": x.shape}), op="mean", feedback=feedback)
    assert state_bytes(feedback) == before
    reduce(gradient(rank, 9), feedback)
    return found, len({str(s["worker"]["role"]) for s in gathered(feedback)})


def test_error_on_one_rank_leaves_residuals_unchanged_on_all():
    results = run_ranks(3, _unchanged)
    assert results == [(["PeerError"] * 3, 1), (["ArgumentError"] * 3, 1), (["PeerError"] * 3, 1)]


def _damaged(rank, size):
    """Damage a frame sent after this step's residuals were computed; check that these residuals are discarded."""
    feedback, x = codec.torch.Feedback(codec.Quantize(4)), gradient(rank, 8)
    reduce(gradient(rank, 7), feedback)
    before = state_bytes(feedback)
    shrink, calls = Arena.shrink, 0

    def damage(arena, message, nbytes):
        nonlocal calls
        message, calls = shrink(arena, message, nbytes), calls + 1
        if rank == 0 and calls == size + 1:  # rank 0's frame of a sum, which follows its frames of terms
            message[-1] ^= 1
        return message

    Arena.shrink = damage
    with pytest.raises(codec.CodecError):
        reduce(x, feedback)
    Arena.shrink = shrink
    assert state_bytes(feedback) == before
    assert torch.equal(x, gradient(rank, 8))
    return calls


def test_damaged_frame_leaves_residuals_unchanged():
    assert min(run_ranks(3, _damaged)) >= 4


def _killed(rank, size, at):
    """Kill rank 1 as it sends message number `at`; the other ranks must have unchanged residuals and tensors."""
    communicator.communicator_of(None, 5)
    feedback, x = codec.torch.Feedback(codec.Sign(group_size=256)), gradient(rank, 8)
    reduce(gradient(rank, 7), feedback)
    before = state_bytes(feedback)
    shrink, calls = Arena.shrink, 0

    def die(arena, message, nbytes):
        nonlocal calls
        calls += 1
        if calls == at:
            os._exit(1)
        return shrink(arena, message, nbytes)

    if rank == 1:
        Arena.shrink = die
    with pytest.raises(codec.PeerError):
        reduce(x, feedback)
    assert state_bytes(feedback) == before
    assert torch.equal(x, gradient(rank, 8))
    return True


@pytest.mark.parametrize("at", [1, 4], ids=["term", "sum"])
def test_killed_rank_leaves_residuals_of_the_others_unchanged(at):
    assert run_ranks(3, _killed, at, killed=[1]) == [True, KILLED, True]


def _refused(rank, size):
    x, feedback = gradient(rank, 0), codec.torch.Feedback(codec.Quantize(4))
    of_sums, shorter = codec.torch.Feedback("balanced"), codec.torch.Feedback("balanced")
    reduce(x.clone(), of_sums, op="sum")
    reduce(x[:100].clone(), shorter)
    wrong = [
        ({"spec": codec.Lossless()}, codec.SpecError, "Lossless"),
        ({"spec": codec.Ternary()}, codec.SpecError, "not a contraction"),
        ({"algorithm": "ring"}, codec.ArgumentError, "ring"),
        ({"op": "max"}, codec.ArgumentError, "maximum"),
        ({"feedback": torch.zeros(N)}, codec.ArgumentError, r"must be a codec\.torch\.Feedback, None or False, got"),
        ({"feedback": True}, codec.ArgumentError, "got True"),
        ({"feedback": of_sums}, codec.ArgumentError, "residuals for op 'sum', but the op is 'mean'"),
        ({"feedback": shorter}, codec.ArgumentError, "the tensor has 40000 values, but its residual has 100"),
        ({"segments": {"a": (5,)}}, codec.ArgumentError, "40000 values, but its segments have 5"),
        ({"segments": {"a": (N + 5,)}}, codec.ArgumentError, "segment"),
    ]
    usual = {"feedback": feedback, "op": "mean", "spec": codec.Quantize(4)}
    for how, error, message in wrong:
        if rank == 0:  # all other ranks raise PeerError
            with pytest.raises(error, match=message):
                flatcall.all_reduce(x, **(usual | how))
        else:
            with pytest.raises(codec.PeerError, match="rank 0"):
                flatcall.all_reduce(x, **usual)
        assert torch.equal(x, gradient(rank, 0))
        assert not feedback.norms()
    reduce(x, feedback)
    assert feedback.norms()[""] > 0


def test_wrong_arguments_on_one_rank_are_errors_on_all():
    run_ranks(2, _refused)


def test_feedback_rejects_specs_without_effect():
    for spec in (codec.Lossless(), codec.Ternary(), codec.Sign(scale="l2")):
        if not spec.contraction or isinstance(spec, codec.Lossless):
            with pytest.raises(codec.SpecError):
                codec.torch.Feedback(spec)
    with pytest.raises(codec.ArgumentError, match="bound"):
        codec.torch.Feedback(codec.Truncate().bind(codec.optimizers.SGD(0.1), theta=np.zeros(3, np.float32)))


# Tests of asynchronous collectives


def _in_flight(rank, size):
    """Check that collectives in flight give the same results and residuals as the same collectives run one by one."""
    found = []
    for async_op in (True, False):
        feedback = codec.torch.Feedback(codec.Sign(group_size=128))
        tensors = [gradient(rank, i) for i in range(8)]
        works = []
        for i, t in enumerate(tensors):
            named = codec.view(t, segments={f"t{i % 3}": t.shape})
            works.append(reduce(named, feedback, async_op=async_op))
        for work in works if async_op else ():
            assert work.wait()
        found.append((state_bytes(feedback), [tensor_bytes(t) for t in tensors]))
    assert found[0] == found[1]
    return found[0][1]


def test_collectives_in_flight_take_turns():
    results = run_ranks(2, _in_flight)
    assert results[0] == results[1]


def _cancelled(rank, size):
    """Cancel a collective that another rank never joins, and use its residuals with another group at once."""
    first, second = (dist.new_group(timeout=timedelta(seconds=60)) for _ in range(2))
    feedback = codec.torch.Feedback(codec.Sign(group_size=128))
    reduce(gradient(rank, 0), feedback, group=first)
    before = state_bytes(feedback)
    if rank == 0:
        x = gradient(rank, 1)
        work = codec.torch.all_reduce(x, op="mean", feedback=feedback, group=first, async_op=True)
        while feedback._change is None:
            time.sleep(0.001)
        with pytest.raises(codec.StateError, match="another collective in flight"):
            codec.torch.all_reduce(gradient(rank, 1), op="mean", feedback=feedback, group=second)
        with pytest.raises(codec.StateError, match="in flight"):
            feedback.load_state_dict(feedback.state_dict())
        communicator.close_communicator(first, cancel=True)
    else:
        with pytest.raises(codec.PeerError):
            codec.torch.all_reduce(gradient(rank, 1), op="mean", feedback=feedback, group=second)
    assert state_bytes(feedback) == before
    got = reduce(gradient(rank, 2), feedback, group=second)
    if rank == 1:
        communicator.close_communicator(first, cancel=True)  # ends rank 0's wait for rank 1
    else:
        with pytest.raises(codec.PeerError):
            work.wait()
        assert torch.equal(x, gradient(rank, 1))
    oracle = Oracle(feedback.spec, size, "mean", "two_shot")
    oracle.step([gradient(r, 0).numpy() for r in range(size)])
    want = oracle.step([gradient(r, 2).numpy() for r in range(size)])
    assert got.numpy().tobytes() == want.tobytes()
    worker = feedback.state_dict()["worker"][f"[0:{N}]"]
    assert worker.numpy().tobytes() == oracle.workers[rank].tobytes()


def test_cancelled_collective_releases_the_residuals():
    run_ranks(2, _cancelled)
