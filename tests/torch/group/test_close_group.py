"""close_group() frees the sockets and threads of a group, and everything that uses the group afterwards raises."""

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
from support.ddp_training import data, wrapped
from support.meshes import until
from support.ranks import run_ranks

N = 6000


def reduced(rank, group=None):
    x = torch.full((N,), rank + 1.0)
    codec.torch.all_reduce(x, group=group)
    return x.unique().tolist()


def held():
    """Return the names of codec's threads, and the number of open files of this process."""
    return sorted(t.name for t in threading.enumerate() if "codec" in t.name), len(os.listdir("/proc/self/fd"))


def _lost(rank, size, path):
    """Lose a rank in each of three groups of the remaining ranks; close each group, and make the next one."""
    dist.destroy_process_group()
    store, left, found = dist.FileStore(path, -1), list(range(size)), []
    for turn in range(3):
        group = codec.torch.ProcessGroup(
            dist.PrefixStore(str(turn), store), left.index(rank), len(left), timedelta(seconds=10)
        )
        before = held()
        assert reduced(rank, group) == [sum(r + 1.0 for r in left)]
        if turn == 2:
            return found
        if rank == left[-1]:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.full((N,), rank + 1.0)
        work = codec.torch.all_reduce(x, group=group, async_op=True)
        later = codec.torch.all_reduce(x, group=group, async_op=True)
        counted = codec.torch.group_stats(group)
        codec.torch.close_group(group)
        codec.torch.close_group(group)
        for each in (work, later):
            assert each.is_completed()
            with pytest.raises(codec.PeerError):
                each.wait()
        assert x.unique().tolist() == [rank + 1.0]
        assert codec.torch.group_stats(group).sent_nbytes >= counted.sent_nbytes > 0
        until(lambda: held() == before)  # noqa: B023 - called at once
        for call in (
            lambda: reduced(rank, group),  # noqa: B023
            lambda: codec.torch.all_reduce(x, group=group, async_op=True),  # noqa: B023
            lambda: codec.torch.send(b"x", 1 - min(rank, 1), group=group),  # noqa: B023
        ):
            with pytest.raises(codec.PeerError, match=r"closed by close_group\(\): make a new group"):
                call()
        assert held() == before
        left.pop()
        found.append(before)


def test_closed_groups_leave_no_sockets_and_threads_after_lost_ranks(tmp_path):
    found = run_ranks(4, _lost, str(tmp_path / "store"), killed=(2, 3))
    assert len(found[0]) == 2


def _untouched(rank, size):
    """Close groups without a collective, of another rank, and in a forked child."""
    idle, other = dist.new_group(), dist.new_group([1])
    codec.torch.close_group(idle)
    with pytest.raises(codec.PeerError, match="close_group"):
        reduced(rank, idle)
    codec.torch.close_group(other)
    assert reduced(rank) == [3.0]
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        codec.torch.close_group()
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert reduced(rank) == [3.0]
    with pytest.raises(codec.ArgumentError, match="group must be"):
        codec.torch.close_group(5)


def test_groups_without_connections_are_closed_too_and_other_groups_stay_open():
    run_ranks(2, _untouched)


def _messages(rank, size):
    """Close a group while this rank waits for a message of send and recv, and for a collective in another thread."""
    errors = []

    def wait(call):
        with pytest.raises(codec.PeerError) as e:
            call()
        errors.append(e.value)

    codec.torch.send(b"x", 1) if rank == 0 else codec.torch.recv(0)
    assert reduced(rank) == [3.0]
    if rank == 1:
        calls = [lambda: codec.torch.recv(0), lambda: reduced(rank), lambda: codec.torch.all_to_all_bytes([b""] * 2)]
        threads = [threading.Thread(target=wait, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        received = [codec.torch.recv(0, tag=1, async_op=True) for _ in range(2)]
        time.sleep(0.1)
        begin = time.monotonic()
        codec.torch.close_group()
        for work in received:
            wait(work.result)
        for thread in threads:
            thread.join()
        assert time.monotonic() - begin < 5
        assert len(errors) == 5
        until(lambda: not [name for name in held()[0] if " from " in name])
        dist.barrier()
        return
    dist.barrier()
    wait(lambda: reduced(rank))  # the other rank has closed the group
    codec.torch.close_group()


def test_threads_that_wait_raise_when_the_group_is_closed():
    run_ranks(2, _messages)


def _levels(rank, size):
    """Close a group of two levels by its mesh; the flat group over the same ranks is closed, too."""
    mesh = dist.init_device_mesh("cpu", (2, 2))
    x = torch.full((N,), rank + 1.0)
    codec.torch.all_reduce(x, group=mesh)
    assert x.unique().tolist() == [10.0]
    assert reduced(rank) == [10.0]
    codec.torch.close_group(mesh)
    for group in (mesh, None):
        with pytest.raises(codec.PeerError, match="close_group"):
            reduced(rank, group)
    until(lambda: not [t for t in held()[0] if "main" not in t])


def test_all_levels_of_a_group_are_closed():
    run_ranks(4, _levels, fresh=True)


def _in_backward(rank, size):
    """Close the group between two buckets of a backward pass; the pass raises."""
    model = wrapped()
    hook = codec.torch.ddp_hook(codec.Quantize(4))
    closed = []

    def between(state, bucket):
        if hook.stats().steps == 1 and bucket.index() == 1:  # the first step has a single bucket
            codec.torch.close_group()
            closed.append(bucket.index())
        return hook.reduce(bucket)

    model.register_comm_hook(None, between)
    model(data(rank, 0)[0]).sum().backward()
    with pytest.raises(codec.PeerError):
        model(data(rank, 0)[0]).sum().backward()
    return hook.stats().steps, closed


def test_backward_pass_raises_when_the_group_is_closed_between_buckets():
    assert run_ranks(2, _in_backward) == [(1, [1])] * 2


def _while_connecting(rank, size):
    """Close the group while a thread of this rank waits for the other rank's first collective."""
    if rank == 1:
        time.sleep(1.0)
        with pytest.raises(codec.PeerError):
            codec.torch.all_reduce(torch.ones(N), options=codec.options(timeout=3))
        return
    errors = []

    def first():
        try:
            codec.torch.all_reduce(torch.ones(N), options=codec.options(timeout=3))
        except codec.PeerError as e:
            errors.append(str(e))

    thread = threading.Thread(target=first)
    thread.start()
    time.sleep(0.3)
    codec.torch.close_group()
    thread.join()
    assert errors == ["the group was closed by close_group(): make a new group"]
    assert communicator._slot_of(dist.group.WORLD).communicator is None
    until(lambda: not held()[0])


def test_group_closed_while_a_thread_connects_is_not_connected():
    run_ranks(2, _while_connecting, fresh=True)
