"""The backend `codec` when ranks are lost or a group is aborted."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.group import communicator
from codec.torch.transport.collective import Collective
from support.collective_values import rank_values, sum_in_order
from support.ranks import run_ranks


def _lost(rank, size, how, path):
    """After a loss, the remaining ranks form a new group through the store, without a default group, as in torchft."""
    dist.destroy_process_group()
    store = dist.FileStore(path, size)
    timeout = timedelta(seconds=4)
    group = codec.torch.ProcessGroup(dist.PrefixStore("first", store), rank, size, timeout)
    t = rank_values(rank, (400_000,))
    group.allreduce([t], dist.AllreduceOptions()).wait()
    assert torch.equal(t, sum_in_order([rank_values(r, (400_000,)) for r in range(size)]))
    if rank == 1:
        os.kill(os.getpid(), how)
    before, begin = t.clone(), time.monotonic()
    work = group.allreduce([t], dist.AllreduceOptions())
    if how == signal.SIGSTOP:
        threading.Timer(0.5, group.abort).start()
    with pytest.raises(codec.PeerError):
        work.wait()
    took = time.monotonic() - begin
    assert torch.equal(t, before)
    group.abort()
    with pytest.raises(codec.PeerError, match="make a new group"):
        group.allreduce([t], dist.AllreduceOptions())
    left = [r for r in range(size) if r != 1]
    again = codec.torch.ProcessGroup(dist.PrefixStore("again", store), left.index(rank), len(left), timeout)
    t = rank_values(rank, (400_000,))
    again.allreduce([t], dist.AllreduceOptions()).wait()
    assert torch.equal(t, sum_in_order([rank_values(r, (400_000,)) for r in left]))
    again.shutdown()
    return took


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_remaining_ranks_form_a_new_group_after_a_loss(how, tmp_path):
    took = run_ranks(3, _lost, how, str(tmp_path / "store"), killed=(1,))
    assert max(took[0], took[2]) < 4 + 1 + 2, took


def _aborted(rank, size):
    """If one rank aborts during a collective, all ranks raise, and no tensor is written."""
    t = rank_values(rank, (20_000,))
    before = t.clone()
    communicator.communicator_of(dist.group.WORLD)  # connects the ranks before the abort
    if rank == 0:
        work = dist.all_reduce(t, async_op=True)
        dist.group.WORLD.abort()
    else:
        time.sleep(0.5)
        work = dist.all_reduce(t, async_op=True)
    with pytest.raises(codec.PeerError):
        work.wait()
    assert torch.equal(t, before)


def test_abort_during_a_collective_raises_on_all():
    run_ranks(2, _aborted, backend="codec")


def _aborted_before_results_are_stored(rank, size):
    """An abort after all ranks have succeeded, but before results are stored, writes no tensor."""
    group, gate, there = dist.group.WORLD, threading.Event(), threading.Event()
    agree = Collective.agree

    async def and_wait(*args):
        largest = await agree(*args)
        there.set()
        gate.wait()
        return largest

    Collective.agree = and_wait
    lists = [torch.zeros(9000) for _ in range(size)]
    work = dist.all_gather(lists, rank_values(rank, (9000,)), async_op=True)
    there.wait()
    group.abort()
    gate.set()
    with pytest.raises(codec.PeerError):
        work.wait()
    assert not torch.cat(lists).any()


def test_abort_before_results_are_stored():
    run_ranks(2, _aborted_before_results_are_stored, backend="codec")
