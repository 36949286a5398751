"""Pipelines with random faults, and with ranks that die, freeze or raise exceptions."""

import random
import time
from collections import Counter

import pytest
import torch

import codec
from codec.torch.pipelining import attempts
from codec.torch.pipelining.attempt import Attempt
from codec.torch.pipelining.envelope import MessageKind
from support.faults import KILLED, die, freeze
from support.pipelines import (
    BATCH,
    CHUNKS,
    SAMPLES,
    SCHEDULES,
    SINGLE,
    V_SHAPED,
    Pipeline,
    altered_messages,
    check_equal_sides,
    damaged,
    recorded_messages,
)
from support.ranks import RankPool
from support.tiers import HANG_SECONDS, NIGHTLY, every

STEPS = 150 if NIGHTLY else 8  # number of training steps with random faults, per schedule
FIRST = torch.arange(BATCH)
KIND_AT = 5  # byte offset of the field `kind` in a message


class Faults:
    """Injects random faults on one rank: at most one per step, in the step's first attempt."""

    def __init__(self, rank, seed):
        self._random = random.Random(f"{rank} {seed}")
        self.counts = Counter()  # number of faults by kind of message, and of "state"
        self._left = 0
        self._old = []

    def begin_step(self, pipeline):
        """Choose the step's fault. If it is "lost" or "stale", damage stored activations at once."""
        kind = self._random.choice(["none", "bit", "cut", "replayed", "lost", "stale"])
        self._kind, self._left = kind, self._random.randrange(8)
        if kind in ("lost", "stale"):
            self.counts["state"] += 1
            end = self._random.choice(pipeline.ends())
            ids = self._random.sample(range(0, 7 * SAMPLES, 7), 5)
            if kind == "lost":
                end.forget(ids)
            else:  # stale: entries look as if restored from an older checkpoint
                for delta in end.deltas:
                    for i in ids:
                        if entry := delta._ledger.entries.get(i):
                            delta._ledger.entries[i] = entry._replace(check=entry.check ^ 1 << 40)

    def change(self, message):
        """Return `message`, or the damaged one that is sent instead."""
        self._left -= 1
        self._old.append(message)
        if self._left != 0 or self._kind in ("none", "lost", "stale"):
            return message
        self.counts[MessageKind(message[KIND_AT])] += 1
        if self._kind == "bit":
            return damaged(message, self._random.random())
        if self._kind == "cut":
            return message[: self._random.randrange(len(message))]
        return self._random.choice(self._old[:-1] or [b""])


def _train_with_faults(rank, size, schedule, seed):
    p = Pipeline(schedule, rank, size, dropout=0.1)
    faults = Faults(rank, seed)
    torch.manual_seed(seed)
    p.train(1)
    found = []
    with recorded_messages() as messages, altered_messages(faults.change):
        for step in range(STEPS):
            faults.begin_step(p)
            p.step((FIRST + BATCH * step) % SAMPLES)
            found.append((p.checks(), p.memories()))
    return found, faults.counts, p.stages[0].stats().refused_steps, messages


@pytest.mark.parametrize("schedule", every(2, SCHEDULES))
def test_random_faults_leave_equal_activations_on_both_sides(ranks, schedule):
    """Sender and receiver of an edge keep equal activations wherever their checks agree, in spite of faults.

    One of the two checks may be lost or stale, which the next delta detects. Every message that a rank decodes has
    exactly the bytes that its neighbour encoded.
    """
    results = ranks.run(_train_with_faults, schedule, len(schedule))
    states, counts, refused, messages = zip(*results, strict=True)
    faults = sum(counts, Counter())
    assert faults.total() >= STEPS
    assert faults.keys() >= ({MessageKind.ACTIVATIONS, MessageKind.GRADIENTS, "state"} if NIGHTLY else {"state"})
    assert 0 < refused[0] == refused[1] <= 2 * faults.total()  # each fault makes at most two attempts of a step fail
    for step in zip(*states, strict=True):
        checks, memories = ([x for rank in rows for x in rank] for rows in zip(*step, strict=True))
        _check_consistent(checks, memories)
    encoded, decoded = ({k: v for m in found for k, v in m.items()} for found in zip(*messages, strict=True))
    assert decoded
    assert decoded.items() <= encoded.items()


def _check_consistent(checks, memories):
    sides = {}
    for key, found in checks:
        sides.setdefault(key, []).append(found)
    contents = {}
    for key, rows in memories:
        contents.setdefault(key, []).append(dict(rows))
    for key, (one, other) in contents.items():
        for i, (a, b) in enumerate(zip(*sides[key], strict=True)):
            if a == b != 0:
                assert one[7 * i] == other[7 * i], (key, i)


def _lose_a_rank(rank, size, schedule, lost, fault, point, seconds):
    """Train a step; in the next, rank `lost` fails before its message number `point` (-1: its final report)."""
    p = Pipeline(schedule, rank, size, options=codec.options(timeout=seconds))
    p.train(1)
    before = p.digest(), p.memories(), [x.grad for x in p.parameters]
    count = 0

    def change(message):
        nonlocal count
        if rank == lost and count == point:
            fault()
        count += 1
        return message

    exchange = Attempt._exchange

    def at_the_end(*args):
        if rank == lost and point == -1:
            fault()
        return exchange(*args)

    Attempt._exchange = at_the_end
    begun, error = time.monotonic(), None
    p.optimizer.zero_grad()
    try:
        with altered_messages(change):
            for attempt in attempts(*p.stages):
                with attempt:
                    p.run(FIRST, [])
    except (codec.PeerError, _Fail) as e:
        error = e
    finally:
        Attempt._exchange = exchange
    assert isinstance(error, _Fail if fault is fail and rank == lost else codec.PeerError)
    waited = time.monotonic() - begun
    assert (p.digest(), p.memories()) == before[:2]
    assert all(x.grad is None for x in p.parameters)
    with pytest.raises(codec.PeerError, match="make a new group"):
        next(attempts(*p.stages)).__enter__()
    return waited, [s.state_dict() for s in p.stages]


class _Fail(Exception):
    pass


def fail():
    raise _Fail


def _go_on(rank, size, schedule, states):
    q = Pipeline(schedule, rank, size)
    if states[rank] is not None:
        for stage, state in zip(q.stages, states[rank], strict=True):
            stage.load_state_dict(state)
    q.train(2)
    return q.checks(), q.memories()


def _points(schedule):
    """Return all fault points (schedule, rank, point): `point` numbers a rank's messages in a step; -1: report."""
    n = CHUNKS * (1 if schedule in SINGLE else 2 if schedule in V_SHAPED else 3)
    return [(schedule, rank, point) for point in (*range(n), -1) for rank in (0, 1)]


@pytest.mark.parametrize(("schedule", "lost", "point"), every(29, [p for s in SCHEDULES for p in _points(s)]))
def test_killed_rank_is_an_error_on_the_others(ranks, schedule, lost, point):
    ranks.start(_lose_a_rank, schedule, lost, die, point, HANG_SECONDS)
    left = 1 - lost
    (_, state), gone = ranks.results([left])[0], ranks.results([lost])[0]
    assert gone is KILLED
    ranks.replace(lost)
    ranks.new_group()
    states = [None, None]
    states[left] = state
    found = ranks.run(_go_on, schedule, states)
    check_equal_sides([r[0] for r in found])
    check_equal_sides([r[1] for r in found])


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_frozen_rank_is_an_error_on_the_others_after_the_timeout(ranks, schedule):
    ranks.start(_lose_a_rank, schedule, 1, freeze, 1, 3)
    ((waited, _),) = ranks.results([0])
    assert waited >= 2
    ranks[1].resume()
    ranks.results([1])
    ranks.new_group()


@pytest.mark.parametrize("point", [0, 3, -1])
def test_exception_on_one_rank_is_an_error_on_the_others(ranks, point):
    ranks.run(_lose_a_rank, "1F1B", 0, fail, point, HANG_SECONDS)
    ranks.new_group()


@pytest.mark.parametrize(("fault", "seconds"), [(die, HANG_SECONDS), (freeze, 3)])
@pytest.mark.parametrize("schedule", every(5, ["InterleavedZeroBubble", "1F1B", "GPipe", "LoopedBFS"]))
def test_all_ranks_of_a_longer_pipeline_learn_of_a_lost_rank(schedule, fault, seconds):
    """Ranks that are not neighbours of the lost rank raise as well, because their own neighbours close connections."""
    with RankPool(4, timeout=HANG_SECONDS) as four:
        four.new_group()
        four.start(_lose_a_rank, schedule, 2, fault, 1, seconds)
        assert len(four.results([0, 1, 3])) == 3


def _evaluate(rank, size):
    p = Pipeline("1F1B", rank, size)
    p.train(1)
    before = p.memories()
    with altered_messages(lambda message: damaged(message, 0.5) if rank == 0 else message):
        try:
            p.schedule.eval(*([p.x[:BATCH]] if p.is_first else []), target=p.y[:BATCH])
            p.train(1)
        except codec.CodecError as e:
            error = type(e).__name__
    assert p.memories() == before
    return error


def test_damaged_message_of_an_evaluation_is_an_error_on_all_ranks(ranks):
    first, last = ranks.run(_evaluate)
    assert first == "PeerError"
    assert last in ("ChecksumError", "FrameError")
    ranks.new_group()
