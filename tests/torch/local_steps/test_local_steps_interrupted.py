"""An exception on one rank, when the others have already synchronized, is made up for by the rank's next call."""

import pytest
import torch

from support.local_training import EXACT, parameter_bytes, raised, started, train


class Outer(torch.optim.SGD):
    """DiLoCo's outer optimizer, which raises an exception in the middle of its steps while `failures` are left."""

    failures = 0
    kind: type[BaseException] = RuntimeError

    def step(self, closure=None):
        super().step(closure)
        if self.failures:
            self.failures -= 1
            raise self.kind("out of memory")


def with_failing_outer(rank, failures, kind=RuntimeError, **how):
    """As :func:`started`, with an outer optimizer whose first steps fail on rank 1."""
    made = []

    def outer(parameters):
        made.append(Outer(parameters, lr=0.7, momentum=0.9, nesterov=True))
        return made[0]

    found = started(outer=outer, **how)
    made[0].failures, made[0].kind = failures * (rank == 1), kind
    return found


def shared_bytes(local):
    """Return the bytes of the tensors that must be equal on all ranks."""
    state = local.state_dict()
    tensors = [*state["anchors"].values(), *(x["momentum_buffer"] for x in state["outer"]["state"].values())]
    return b"".join(x.numpy().tobytes() for x in tensors)


def _interrupted(rank, size, how, kind, steps):
    """Rank 1's outer optimizer fails once, in the first synchronization. No rank's later steps are lost."""
    model, optimizer, local = with_failing_outer(rank, 1, kind, **how)
    found, before = [], None
    for step in range(steps):
        train(model, optimizer, rank, [step])
        own = parameter_bytes(model)
        error = raised(local.step)
        if error:
            before = parameter_bytes(model) == own
        found.append(error and error[0])
    local.finish(exact=True)
    return found, before, parameter_bytes(model), shared_bytes(local)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "how", [{"every": 3}, {"every": 4, "delay": 2}, {"every": 4, "fragments": 2, "spec": EXACT}], ids=str
)
def test_ranks_are_equal_after_the_outer_optimizer_failed_on_one(pool, how, kind):
    (first, _, a, shared), (second, unchanged, b, other) = pool.run(_interrupted, how, kind, 8)
    assert first == [None] * 8
    assert [x for x in second if x] == [kind.__name__]
    assert unchanged
    assert a == b
    assert shared == other


def _fails_twice(rank, size, every, steps):
    """Train with an outer optimizer whose first two steps fail on rank 1."""
    model, optimizer, local = with_failing_outer(rank, 2, every=every)
    found = []
    for step in range(steps):
        train(model, optimizer, rank, [step])
        found.append(raised(local.step))
    return found, parameter_bytes(model)


def test_outer_optimizer_that_fails_again_is_an_error_on_all_ranks(pool):
    """The first failure is that of one rank; if it persists, the next synchronization fails on both."""
    (first, a), (second, b) = pool.run(_fails_twice, 2, 6)
    assert first[1] is None
    assert second[1][0] == "RuntimeError"
    assert second[2][0] == "RuntimeError"  # no synchronization is due in this step
    assert [x for x in (*first, *second[3:]) if x] == []
    assert a == b


def test_synchronization_fails_while_a_rank_cannot_complete_the_former_one(pool):
    (first, a), (second, b) = pool.run(_fails_twice, 1, 4)
    assert [x and x[0] for x in first] == [None, "PeerError", None, None]
    assert [x and x[0] for x in second] == ["RuntimeError", "RuntimeError", None, None]
    assert first[1][1].startswith("rank 1 ")
    assert "the last synchronization could not be completed: out of memory" in first[1][1]
    assert a == b


def _in_finish(rank, size):
    model, optimizer, local = with_failing_outer(rank, 1, every=4)
    train(model, optimizer, rank, range(2), local.step)
    error = raised(local.finish)
    if error:
        state = local.state_dict()  # completes the synchronization
        assert state["rounds"] == 1
    return error and error[0], parameter_bytes(model)


def test_state_dict_completes_an_interrupted_synchronization(pool):
    (first, a), (second, b) = pool.run(_in_finish)
    assert (first, second) == (None, "RuntimeError")
    assert a == b


def _stopped_wait(rank, size):
    """Ctrl-C while rank 1 waits for the mean; the collective goes on, and the next call applies its mean."""
    from codec.torch.replicas.ranks import Ranks

    model, optimizer, local = started(every=2)
    train(model, optimizer, rank, range(1), local.step)
    wait = Ranks.wait

    def stopped(self, flight):
        raise KeyboardInterrupt

    train(model, optimizer, rank, range(1, 2))
    if rank == 1:
        Ranks.wait = stopped
    try:
        error = raised(local.step)
    finally:
        Ranks.wait = wait
    train(model, optimizer, rank, range(2, 6), local.step)
    return error and error[0], local.stats().synchronizations, parameter_bytes(model)


def test_interrupted_wait_for_the_mean_is_repeated(pool):
    (first, n, a), (second, m, b) = pool.run(_stopped_wait)
    assert (first, second) == (None, "KeyboardInterrupt")
    assert n == m == 3
    assert a == b


def _never_started(rank, size):
    """Ctrl-C on rank 1 before it begins the collective: the ranks meet again in synchronize()."""
    from codec.torch.replicas.ranks import Ranks

    def stopped(*_):
        raise KeyboardInterrupt

    model, optimizer, local = started(every=2)
    train(model, optimizer, rank, range(1), local.step)
    train(model, optimizer, rank, range(1, 2))
    begin = Ranks.begin
    if rank == 1:
        Ranks.begin = stopped
    try:
        errors = [raised(local.step)]
    finally:
        Ranks.begin = begin
    if rank == 1:
        errors.append(raised(local.synchronize))
    local.synchronize()
    return [error and error[0] for error in errors], parameter_bytes(model)


def test_collective_that_one_rank_has_not_begun_is_an_error_on_all(pool):
    (first, a), (second, b) = pool.run(_never_started)
    assert first == ["PeerError"]
    assert second == ["KeyboardInterrupt", "PeerError"]
    assert a == b
