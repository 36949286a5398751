"""Collectives of GPU tensors fail on all ranks if one has a NaN, damaged frames or no memory, is lost or silent."""

import contextlib

import numpy as np
import pytest
import torch

import codec
import codec.torch
from codec.torch.group import communicator
from support.collective_values import rank_values, tensor_bytes
from support.cuda_tensors import gpu, host
from support.faults import KILLED, at_fault_point, damaged_frames, die
from support.gpu_collectives import SHAPE, compare, how, outcome
from support.ranks import RankPool


def _special_values(rank, size, kind):
    with gpu(kind) as put:
        found = []
        for spec in (codec.Float8(), codec.Sign(), codec.Lossless(), codec.Float8(nonfinite="propagate")):
            for algorithm in ("two_shot", "all_gather", "raw"):
                x = rank_values(rank, SHAPE)
                x[3, 5] = torch.nan if rank == 1 else 1
                found.append(compare(put, codec.torch.all_reduce, x, spec=spec, options=how(algorithm)))
                x[3, 5] = 3e38
                compare(put, codec.torch.all_reduce, x, spec=spec, options=how(algorithm))
        # The group still works after these errors
        codec.torch.all_reduce(x := put(torch.ones(SHAPE)), codec.Float8(), options=how())
        assert bool(host(x).eq(size).all())
        return found


@pytest.mark.nccl
def test_nan_on_one_rank_is_an_error_on_all_ranks(ranks, kind):
    for rank, found in enumerate(ranks.run(_special_values, kind)):
        want = "ArgumentError" if rank == 1 else "PeerError"
        assert [error[0] for error in found[:6]] == [want] * 6
        assert [error[2] for error in found[:6]] == [codec.Status.NONFINITE] * 6
        assert found[6:] == ["success"] * 6


def _nan_later(rank, size, kind):
    """All-reduce three times, with NaN on rank 1 in the third call, in which no rank waits for heads of frames."""
    found = []
    with gpu(kind) as put:
        for algorithm in ("two_shot", "all_gather"):
            for last in (False, False, True, False):
                values = rank_values(rank, SHAPE)
                values[3, 5] = torch.nan if last and rank == 1 else 1
                x = put(values)
                result = outcome(codec.torch.all_reduce, x, codec.Quantize(4), options=how(algorithm))
                found.append(result if result == "success" else (result[0], result[2]))
                assert result == "success" or tensor_bytes(host(x)) == tensor_bytes(values)
    return found


@pytest.mark.nccl
def test_nan_is_an_error_on_all_ranks_if_the_host_does_not_wait_for_frames(ranks, kind):
    for rank, found in enumerate(ranks.run(_nan_later, kind)):
        error = "ArgumentError" if rank == 1 else "PeerError", codec.Status.NONFINITE
        assert found == ["success", "success", error, "success"] * 2


def _damaged(rank, size, kind):
    """Let rank 1 send damaged frames; return the outcome, and True if the tensor is unchanged."""
    found = []

    def damage(frame, to):
        frame = np.array(frame)
        frame[-1] ^= 1
        return frame

    with gpu(kind) as put:
        for spec in (codec.Lossless(), codec.Quantize(4), codec.Ternary()):
            for algorithm in ("two_shot", "all_gather"):
                x = put(values := rank_values(rank, SHAPE))
                with damaged_frames(damage) if rank == 1 else contextlib.nullcontext():
                    found.append(outcome(codec.torch.all_reduce, x, spec, options=how(algorithm))[0])
                assert torch.equal(host(x), values)
    return found


def test_damaged_frame_is_an_error_on_all_ranks(pair, kind):
    assert pair.run(_damaged, kind) == [["ChecksumError"] * 6, ["PeerError"] * 6]


def _killed(rank, size, kind, spec, point):
    with gpu(kind) as put:
        codec.torch.all_reduce(put(torch.ones(10)), options=how())
        channel = communicator.communicator_of(None).channel
        x = put(values := rank_values(rank, SHAPE))
        with at_fault_point(channel, point if rank == 1 else -1, die):
            found = outcome(codec.torch.all_reduce, x, spec, options=how())
        assert torch.equal(host(x), values)
        return found[0]


def _silent(rank, size, kind, cancel):
    """Let rank 1 send no frame until rank 0 times out or cancels the collective."""
    comm = communicator.communicator_of(None, timeout=60 if cancel else 0.5)
    device = comm.channel.device

    def gather():
        with device.phase():
            device.all_gather(rows, comm.channel.counters)
        device.settle()

    with gpu(kind) as put:
        codec.torch.all_reduce(put(torch.ones(10)), options=how())  # NCCL connects GPUs in its first collective
        if rank == 1:
            return None
        rows = put(torch.zeros(10, dtype=torch.uint8))
        work = comm.worker.submit(gather)
        if cancel:
            comm.cancel()
        with pytest.raises(codec.PeerError) as error:
            work.wait(30)
    return str(error.value), comm.channel.closed


@pytest.mark.nccl
@pytest.mark.parametrize("cancel", [False, True])
def test_wait_for_frames_of_other_gpus_ends(gpus, kind, cancel):
    message, closed = gpus.run(_silent, kind, cancel)[0]
    assert ("was cancelled" if cancel else "did not arrive within the timeout, 0:00:00.5") in message
    assert closed


@pytest.mark.nccl
@pytest.mark.parametrize("collective", ["all_to_all", "all_gather"])
def test_tensor_is_unchanged_if_a_rank_dies_before_its_frames_leave_the_gpu(gpus, kind, collective):
    gpus.start(_dies, kind, collective)
    assert gpus.results() == ["PeerError", KILLED]


def _dies(rank, size, kind, collective):
    with gpu(kind) as put:
        codec.torch.all_reduce(put(torch.ones(10)), options=how())
        if rank == 1:
            setattr(communicator.communicator_of(None).channel.device, collective, lambda *_: die())
        x = put(values := rank_values(rank, SHAPE))
        found = outcome(codec.torch.all_reduce, x, codec.Quantize(4), options=how())
        assert torch.equal(host(x), values)
        return found[0]


@pytest.mark.nccl
@pytest.mark.parametrize("collective", ["all_to_all", "all_gather"])
def test_error_while_frames_leave_the_gpu_fails_all_ranks_at_once(gpus, kind, collective):
    [message, unchanged], [_, also_unchanged] = gpus.run(_lacks_memory, kind, collective)
    assert "is gone" in message  # the rank reports its failure: no timeout
    assert unchanged
    assert also_unchanged


def _lacks_memory(rank, size, kind, collective):
    def fail(*_):
        raise MemoryError("no memory for received frames")

    with gpu(kind) as put:
        codec.torch.all_reduce(put(torch.ones(10)), options=how())
        if rank == 1:
            setattr(communicator.communicator_of(None).channel.device, collective, fail)
        x = put(values := rank_values(rank, SHAPE))
        with pytest.raises(MemoryError if rank == 1 else codec.PeerError) as error:
            codec.torch.all_reduce(x, codec.Quantize(4), options=how())
        return str(error.value), torch.equal(host(x), values)


@pytest.mark.parametrize("point", [1, 4])
def test_tensor_is_unchanged_if_a_rank_dies(kind, point):
    with RankPool(2, timeout=5) as ranks:
        ranks.new_group()
        ranks.start(_killed, kind, codec.Quantize(4), point)
        assert ranks.results() == ["PeerError", KILLED]


@pytest.mark.nccl
# Number of the event at which the rank dies. 0: before it sends heads; 2: before it waits for heads; 5: in phase 2.
@pytest.mark.parametrize("point", [0, 2, 5])
def test_tensor_is_unchanged_if_a_rank_dies_while_heads_are_sent(gpus, kind, point):
    gpus.start(_killed, kind, codec.Lossless(), point)
    assert gpus.results() == ["PeerError", KILLED]
