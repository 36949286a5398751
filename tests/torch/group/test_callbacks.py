"""Callbacks of collectives may start other collectives and wait for them, in the same order on all ranks."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import codec
import codec.torch
from codec.torch.group import communicator
from support.ranks import RankPool

N = 6000  # number of values, enough for the backend "codec" to send frames


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, timeout=10) as ranks:
        yield ranks


def ones():
    return torch.ones(N)


def _reduced(rank, factor=1.0):
    """Return the sum over ranks of tensors that hold factor * (rank + 1)."""
    x = torch.full((N,), factor * (rank + 1))
    codec.torch.all_reduce(x, op="sum")
    return x[0].item()


def _in_future(rank, size):
    pending = codec.torch.all_reduce(ones(), async_op=True)
    return pending.get_future().then(lambda _: _reduced(rank)).wait()


def _in_done_callback(rank, size):
    found, over = [], threading.Event()
    pending = codec.torch.all_reduce(ones(), async_op=True)
    pending.get_future().add_done_callback(lambda _: (found.append(_reduced(rank)), over.set()))
    pending.wait()
    found.append(_reduced(rank))
    assert over.wait(20)
    return sum(found) / 2


def _of_collected_futures(rank, size):
    futures = [codec.torch.all_reduce(ones(), async_op=True).get_future() for _ in range(3)]
    return torch.futures.collect_all(futures).then(lambda _: _reduced(rank)).wait()


def _nested(rank, size, depth=8):
    """Each callback starts the next collective; all complete."""
    found = torch.futures.Future()

    def go_on(left):
        if left == 0:
            found.set_result(_reduced(rank))
            return
        codec.torch.all_reduce(ones(), async_op=True).get_future().add_done_callback(lambda _: go_on(left - 1))

    go_on(depth)
    return found.wait()


def _waiting_for_a_later_one(rank, size):
    """A callback can wait, through the Work or its future, for a collective that was submitted later."""
    gate = threading.Event()
    communicator.communicator_of(None).worker.submit(gate.wait)
    first, second, third = (codec.torch.all_reduce(ones(), async_op=True) for _ in range(3))
    later = third.get_future()
    done = first.get_future().then(lambda _: (second.wait(), later.wait(), _reduced(rank))[-1])
    gate.set()
    return done.wait()


def _behind_a_lock(rank, size):
    """No deadlock if a callback needs a lock whose owner waits for a later collective."""
    lock, gate = threading.Lock(), threading.Event()
    communicator.communicator_of(None).worker.submit(gate.wait)
    pending = codec.torch.all_reduce(ones(), async_op=True)

    def callback(_):
        with lock:
            return _reduced(rank)

    done = pending.get_future().then(callback)
    with lock:
        gate.set()
        codec.torch.all_reduce(ones())
    return done.wait()


@pytest.mark.parametrize(
    "case", [_in_future, _in_done_callback, _of_collected_futures, _nested, _waiting_for_a_later_one, _behind_a_lock]
)
def test_collective_in_a_callback_completes(ranks, case):
    ranks.new_group()
    assert ranks.run(case) == [3.0, 3.0]


def _order(rank, size):
    """Collectives of callbacks start in the same order on ranks that submit later ones at different times."""
    pending = [codec.torch.all_reduce(torch.ones(N + 10), async_op=True)]
    futures = [pending[0].get_future().then(lambda _: _reduced(rank))]
    for i in range(10):
        time.sleep(0.005 * ((i + rank) % 2))
        pending.append(codec.torch.all_reduce(torch.ones(N + 20 + i), async_op=True))
        futures.append(pending[-1].get_future().then(lambda _: _reduced(rank)))
    return {f.wait() for f in futures}


def test_collectives_of_callbacks_have_the_same_order_on_all_ranks(ranks):
    ranks.new_group()
    assert ranks.run(_order) == [{3.0}, {3.0}]


def _of_backend(rank, size):
    x = torch.full((N,), rank + 1.0)
    work = dist.all_reduce(torch.ones(N), async_op=True)
    work.get_future().then(lambda _: dist.all_reduce(x)).wait()
    y = torch.full((N,), rank + 1.0)
    gathered = [torch.empty(N) for _ in range(size)]
    dist.all_gather(gathered, ones(), async_op=True).get_future().then(lambda _: dist.all_reduce(y)).wait()
    return x[0].item(), y[0].item()


def test_backend_collective_in_a_callback_completes(ranks):
    ranks.new_group("codec")
    assert ranks.run(_of_backend) == [(3.0, 3.0)] * 2


def _of_ddp_hook(rank, size):
    torch.manual_seed(3)
    net = nn.Sequential(*[nn.Linear(200, 200) for _ in range(4)])
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.2)
    hook, sums = codec.torch.ddp_hook(codec.Lossless()), []
    register = model.register_comm_hook

    def register_wrapped(state, theirs):
        def wrapped(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            def then(future):
                sums.append(_reduced(rank))
                return future.value()

            return theirs(state, bucket).then(then)

        register(state, wrapped)

    model.register_comm_hook = register_wrapped
    hook.register(model)
    for step in range(3):
        model(torch.randn(4, 200, generator=torch.Generator().manual_seed(2 * step + rank))).square().sum().backward()
    assert set(sums) == {3.0}
    return len(sums), [p.grad.sum().item() for p in net.parameters()]


def test_ddp_hook_can_be_wrapped_by_one_that_reduces(ranks):
    ranks.new_group()
    first, second = ranks.run(_of_ddp_hook)
    assert first == second
    assert first[0] >= 3 + 2  # three steps, with two buckets in the second and third


def _of_power_sgd(rank, size):
    """Train one bucket with PowerSGD, whose callbacks wait for collectives; return the weights.

    With several buckets, callbacks of small tensors, which Gloo sends, could occupy both threads of Gloo.
    """
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2000, 2000, bias=False))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # both factors have enough values for frames
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 2000, generator=torch.Generator().manual_seed(2 * step + rank))).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_power_sgd_of_torch_runs_over_the_backend(ranks):
    ranks.new_group("codec")
    first, second = ranks.run(_of_power_sgd)
    assert all(map(torch.equal, first, second))
    assert all(p.isfinite().all() for p in first)


def _with_errors(rank, size):
    def fail(error):
        raise error

    gate = threading.Event()
    for inside in (True, False):  # add callbacks before the end (run in a separate thread) or after it (run at once)
        communicator.communicator_of(None).worker.submit(gate.wait)
        future = codec.torch.all_reduce(ones(), async_op=True).get_future()
        if not inside:
            future.wait()
        for error in (ValueError("x"), SystemExit(3), KeyboardInterrupt()):
            future.add_done_callback(lambda _, error=error: fail(error))
        futures = [future.then(lambda _, e=e: fail(e)) for e in (ValueError("in then"), SystemExit("in then"))]
        gate.set()
        for each in futures:
            with pytest.raises(RuntimeError, match="in then"):
                each.wait()
        assert _reduced(rank) == 3.0
    return True


def test_group_survives_errors_of_callbacks(ranks):
    ranks.new_group()
    assert ranks.run(_with_errors) == [True] * 2


def _in_worker_thread(rank, size):
    """A synchronous collective in the worker thread, which runs no callbacks, raises at once."""
    line = communicator.communicator_of(None)
    with pytest.raises(codec.ArgumentError, match="async_op=True"):
        line.worker.submit(lambda: codec.torch.all_reduce(ones())).wait()
    return _reduced(rank)


def test_wait_in_the_worker_thread_raises(ranks):
    ranks.new_group()
    assert ranks.run(_in_worker_thread) == [3.0, 3.0]
