"""Replicas of torchft die in every phase of a step and come back: all replicas commit the same weights."""

import pytest

import codec
from support.replicas import COMMIT, HEALED, HEALS, QUORUM, REDUCE, TWO_SHOT, train_replicas, trained_alone

STEPS = 24


def lossless():
    from codec.integrations.torchft import ProcessGroupCodec

    return ProcessGroupCodec(options=TWO_SHOT)


def quantized():
    from codec.integrations.torchft import ProcessGroupCodec

    return ProcessGroupCodec(codec.Quantize(4), feedback=True, options=TWO_SHOT)


def gloo():
    from torchft import ProcessGroupGloo

    return ProcessGroupGloo()


def checked(digests, steps, size=3):
    """Check that replicas had the same weights after each step, and all of them after the last one; return these."""
    assert sorted(digests) == list(range(1, steps + 1))
    assert {step: each for step, each in digests.items() if len(set(each.values())) > 1} == {}
    assert len(digests[steps]) == size
    return {step: next(iter(each.values())) for step, each in digests.items()}


def plan(events, steps):
    """Return the settings of a training in which replicas die.

    Parameters
    ----------
    events : sequence of (int, int, str)
        Replica, step and phase of each death.
    steps : int
        Number of steps.
    """
    fates, gates, lives, started = {}, [(0, 3)], [0, 0, 0], 3
    for number, step, phase in events:
        second = phase in (HEALED, HEALS)  # a second replica dies when the first one comes back
        fates[number, lives[number]] = (step, QUORUM) if second else (step, phase)
        lives[number] += 1
        started += 1
        gates.append((step + 2, started))
        if second:
            if phase == HEALED:
                fates[number, lives[number]] = (-1, HEALED)
                lives[number] += 1
            started += 1
            gates.append((step + 4, started))
    healer_dies = next((step for _, step, phase in events if phase == HEALS), steps)
    return {"steps": steps, "kind": "ddp", "fates": fates, "gates": gates, "healer_dies": healer_dies}, started - 3


EVENTS = [(2, 4, REDUCE), (0, 9, COMMIT), (1, 14, HEALED)]
MORE = [(2, 20, REDUCE), (1, 40, QUORUM), (0, 60, COMMIT), (2, 80, HEALED), (0, 100, REDUCE), (1, 130, HEALS)]
NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("group", "events", "steps"),
    [
        (quantized, EVENTS, STEPS),
        pytest.param(lossless, MORE, 200, marks=NIGHTLY),
        pytest.param(quantized, MORE, 200, marks=NIGHTLY),
    ],
)
def test_replicas_that_die_and_come_back_commit_the_same_weights(tmp_path, group, events, steps):
    how, deaths = plan(events, steps)
    results, died, digests = train_replicas(tmp_path, how | {"group": group, "same": True})
    assert died == deaths
    weights = checked(digests, steps)
    expected, loss = trained_alone(steps)
    if group is lossless:
        assert weights == expected
    for found, counters, _ in results:
        assert counters.frame_collectives > 0
        assert found < loss * 1.2


def test_replica_that_has_missed_a_step_is_healed_without_residuals(tmp_path):
    """A step fails on one replica, and is committed by the others; the replica receives their weights."""
    how, _ = plan([], 12)
    results, died, digests = train_replicas(tmp_path, how | {"group": quantized, "errors": [(1, 5)]})
    assert died == 0
    checked(digests, 12)
    assert [healings for *_, healings in results] == [0, 1, 0]
    assert sorted(digests[6]) == [0, 2]


@pytest.mark.parametrize(("kind", "size", "stock"), [("ddp", 3, False), ("ddp", 3, True), ("local_sgd", 2, False)])
def test_weights_equal_those_of_torchft_without_compression(tmp_path, kind, size, stock):
    """Lossless frames give the same sums as Gloo, if sums are exact; replicas train with different batches.

    Gradients are in fixed point. LocalSGD sums parameters, which are not; so it has two replicas.
    """
    found = []
    for group in (lossless, gloo):
        (tmp_path / group.__name__).mkdir()
        how = {"steps": STEPS, "kind": kind, "gates": [(0, size)], "group": group, "stock": stock}
        results, _, digests = train_replicas(tmp_path / group.__name__, how, size)
        found.append(checked(digests, STEPS, size))
        assert group is gloo or results[0][1].frame_collectives >= STEPS
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("events", "steps"), [([(1, 6, QUORUM)], 12), pytest.param([(1, 20, QUORUM), (0, 60, QUORUM)], 200, marks=NIGHTLY)]
)
def test_fragments_of_diloco_are_compressed_on_cpus(tmp_path, events, steps):
    """DiLoCo with should_quantize=True, which torchft ignores on CPUs, sends frames; replicas have equal fragments."""
    how, deaths = plan(events, steps)
    results, died, digests = train_replicas(tmp_path, how | {"group": quantized, "kind": "diloco"})
    assert died == deaths
    checked(digests, steps)
    for _, counters, _ in results:
        assert counters.frame_collectives > 0
        assert not counters.raw_collectives
        assert counters.sent_nbytes < counters.raw_nbytes / 4
