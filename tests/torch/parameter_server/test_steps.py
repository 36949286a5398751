"""Bookkeeping of a server's steps: random requests leave few steps in flight, and other workers correct values."""

import random
from contextlib import suppress

import pytest

import codec
from codec.torch.parameter_server.steps import ServerSteps
from support.tiers import NIGHTLY

MOST = 4  # max_steps: largest number of steps in flight per worker
FRAME = bytes(100)


def push(steps, worker, number, keys=(0,)):
    steps.push(worker, number, dict.fromkeys(keys, FRAME), str)


def pull(steps, worker, number, keys=(0,), seconds=0.0):
    entries = steps.wait(worker, number, keys, str, seconds, lambda: None)
    steps.release(number, entries)
    return entries


def test_step_that_was_abandoned_in_advance_is_an_error_for_others_at_once():
    steps = ServerSteps([1, 2], MOST)
    for number in range(1000):
        steps.abandon(2, number, nonfinite=number % 2 == 1)
    assert steps.in_flight() == 0
    for number in range(1000):
        push(steps, 1, number)
        with pytest.raises(codec.PeerError, match=f"worker 2 has abandoned step {number}") as raised:
            pull(steps, 1, number, seconds=60)
        assert (raised.value.code == codec.Status.NONFINITE) == (number % 2 == 1)
        with pytest.raises(codec.StateError, match="abandoned"):
            push(steps, 2, number)
        steps.abandon(1, number, nonfinite=False)
    assert steps.in_flight() == 0
    assert steps.completed == 1000


def test_abandoned_step_cannot_be_pushed_before_it_begins():
    steps = ServerSteps([1, 2], MOST)
    steps.abandon(1, 7, nonfinite=False)
    with pytest.raises(codec.StateError, match="worker 1 has abandoned step 7"):
        push(steps, 1, 7)
    steps.abandon(1, 7, nonfinite=False)
    assert steps.in_flight() == 0


def test_requests_without_keys_begin_no_step():
    steps = ServerSteps([1, 2], MOST)
    for call in (push, pull):
        with pytest.raises(codec.StateError, match="must name at least one key"):
            call(steps, 1, 0, keys=())
    with pytest.raises(codec.StateError, match="but has not pushed"):
        pull(steps, 1, 0)
    assert steps.in_flight() == 0


def test_steps_of_a_worker_that_dies_again_and_again_are_freed():
    steps = ServerSteps([1, 2], MOST)
    push(steps, 2, 0)
    for number in range(100):
        push(steps, 1, number)
        steps.leave(1, "lost", "was lost")
        steps.join(1)
    assert steps.in_flight() == 1
    push(steps, 2, 0, keys=(1,))
    with pytest.raises(codec.PeerError, match="worker 1 was lost"):  # worker 1 had pushed key 0 only
        pull(steps, 2, 0, keys=(1,))
    push(steps, 2, 50)  # a new step, which expects worker 1 again
    push(steps, 1, 50)
    assert len(pull(steps, 2, 50)[0].pushed) == 2


def _misbehave(steps, worker, rng):
    """Make a random call, as requests of a faulty or hostile worker may."""
    number, keys = rng.randrange(30), rng.sample(range(3), rng.randrange(4))
    kind = rng.randrange(5)
    with suppress(codec.CodecError):
        if kind == 0:
            steps.abandon(worker, number, nonfinite=rng.random() < 0.5)
        elif kind == 1:
            steps.leave(worker, rng.choice(["lost", "closed", "absent"]), "is gone")
            steps.join(worker)
        elif kind == 2:
            pull(steps, worker, number, keys)
        else:
            push(steps, worker, number, keys)


@pytest.mark.parametrize("seed", range(40 if NIGHTLY else 3))
def test_random_requests_leave_few_steps_in_flight(seed):
    """The number of steps and the bytes of their frames stay bounded; all are freed once all workers have left."""
    rng, workers = random.Random(seed), [3, 5, 8]
    steps = ServerSteps(workers, MOST)
    for _ in range(3000):
        _misbehave(steps, rng.choice(workers), rng)
        assert steps.in_flight() <= MOST * len(workers)
        assert steps.nbytes() <= MOST * len(workers) ** 2 * 3 * len(FRAME)
        assert all(number in steps._steps for mine in steps._of.values() for number in mine)
        assert all(any(number in mine for mine in steps._of.values()) for number in steps._steps)
    assert sum(map(len, steps._abandoned.values())) <= 30 * len(workers)
    for w in workers:
        steps.leave(w, "closed", "has closed")
    assert steps.in_flight() == steps.nbytes() == 0
    for w in workers:  # workers that join again complete a step
        steps.join(w)
    for w in workers:
        push(steps, w, 1000)
    for w in workers:
        assert pull(steps, w, 1000)[0].pushed == set(workers)
