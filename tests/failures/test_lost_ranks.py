"""If a rank dies, freezes or is cut off, the others raise in time, nothing changes, and a new group works.

CODEC_FAULT_POINTS=20 sets the number of fault points per test; `pytest -s` prints the points.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import codec
import codec.torch
from codec.torch.transport.collective import Collective
from support.faults import SEND_BUFFER, acked_nbytes, cut_after, die, freeze, new_connections
from support.rank_loss import (
    ALGORITHMS,
    FAULT_POINTS,
    FAULTY,
    SLACK_SECONDS,
    TIMEOUT,
    channel,
    digest,
    disturbed_all_reduce,
    disturbed_step,
    fault_points,
    load_training,
    raised_in_time,
    run_with_fault,
    train,
    undisturbed_all_reduce,
    values,
)
from support.ranks import RankPool, run_ranks


def _sweep(algorithms, fault, most):
    """Lose a rank at several fault points of each algorithm; return a line of text per algorithm."""
    timeout = TIMEOUT if fault is freeze else 10
    # Seconds; a death is detected at once, a freeze after the timeout
    within = timeout + 1 + SLACK_SECONDS if fault is freeze else timeout / 2
    rows = []
    with RankPool(3) as ranks:
        for algorithm in algorithms:
            spec = codec.Lossless() if algorithm == "raw" else codec.Quantize(4)
            ranks.new_group()
            want = ranks.run(undisturbed_all_reduce, algorithm, spec, timeout)
            assert len({result for result, *_ in want}) == 1
            points, took = fault_points(want[FAULTY][1], FAULT_POINTS or most), []
            for point in points:
                voted = point > want[FAULTY][2]
                found = run_with_fault(
                    ranks, fault, disturbed_all_reduce, algorithm, spec, point, within=within, voted=voted
                )
                took += [seconds for _, seconds, _ in found[:2]]
                assert all(error or result == want[0][0] for error, _, result in found), point
                ranks.new_group()
                assert ranks.run(undisturbed_all_reduce, algorithm, spec, timeout) == want, point
            tried = f"{len(points)} of {want[FAULTY][1]} points"
            rows.append(f"{fault.__name__} {algorithm}: {tried}, {max(took):.2f} s")
    return rows


@pytest.mark.parametrize(("fault", "most"), [(die, 3), (freeze, 2)])
def test_rank_lost_during_an_all_reduce_is_an_error_on_all_others(fault, most):
    # A frozen rank is detected only after a timeout, so these runs mostly wait: all algorithms are tested in parallel.
    each = [[algorithm] for algorithm in ALGORITHMS] if fault is freeze else [ALGORITHMS]
    with ThreadPoolExecutor() as pool:
        for rows in pool.map(lambda algorithms: _sweep(algorithms, fault, most), each):
            print("", *rows, sep="\n")


def _unconnected(rank, size, fault):
    """Lose a rank before the group's first collective; return the other ranks' outcomes."""
    if rank == FAULTY:
        fault()
    x = values(rank)
    begin = time.monotonic()
    with pytest.raises(codec.PeerError) as e:
        codec.torch.all_reduce(x, op="mean", options=codec.options(timeout=TIMEOUT))
    took = time.monotonic() - begin
    assert digest(x) == digest(values(rank))
    return type(e.value).__name__, took, digest(x)


@pytest.mark.parametrize("fault", [die, freeze])
def test_rank_lost_before_all_are_connected_is_an_error_on_all_others(fault):
    with RankPool(3) as ranks:
        ranks.new_group()
        print(fault.__name__, run_with_fault(ranks, fault, _unconnected))
        ranks.new_group()
        assert len({result for result, *_ in ranks.run(undisturbed_all_reduce, "two_shot", codec.Quantize(4))}) == 1


def _acked(rank, size, algorithm, spec):
    """Return the result of an undisturbed all-reduce, and the number of bytes sent over the busiest connection."""
    with new_connections() as found:
        channel()
    before = [acked_nbytes(s) for s in found]
    result = undisturbed_all_reduce(rank, size, algorithm, spec)
    return result, max(acked_nbytes(s) - begun for s, begun in zip(found, before, strict=True))


def _cut(rank, size, algorithm, spec, nbytes, rate):
    """Return the result of disturbed_all_reduce, and the bytes acknowledged at the cut, if the cut came in time."""
    with new_connections() as found:
        channel()
    arrived = cut_after(found, nbytes, rate) if rank == FAULTY else []
    return disturbed_all_reduce(rank, size, algorithm, spec, -1, None), arrived[:1]


def _sweep_bytes(algorithm, most):
    """Cut a connection after various numbers of bytes; return a line of text."""
    spec = codec.Lossless() if algorithm == "raw" else codec.Quantize(4)
    with RankPool(3) as ranks:
        ranks.new_group()
        both = ranks.run(_acked, algorithm, spec)
        want, most_nbytes = [result for result, _ in both], both[FAULTY][1]
        points, cut = fault_points(most_nbytes * 9 // 10, FAULT_POINTS or most), 0
        for nbytes in points:
            # Bytes per second; if a cut comes too late, repeat it at a lower rate
            for rate in (1 << 20, 1 << 18, 1 << 17):
                ranks.new_group()
                both = ranks.run(_cut, algorithm, spec, nbytes, rate)
                found, arrived = [result for result, _ in both], both[FAULTY][1]
                if found[FAULTY][0] is not None:
                    break
            # all ranks may succeed only if the kernel had buffered the remaining bytes, or the cut never came
            gone = raised_in_time(found)
            assert gone or (arrived or [nbytes])[0] >= most_nbytes - 2 * SEND_BUFFER, (nbytes, arrived, found)
            cut += gone
            assert all(error or x == want[0][0] for error, _, x in found), (nbytes, found)
            ranks.new_group()
            assert ranks.run(undisturbed_all_reduce, algorithm, spec) == want, nbytes
        assert cut, algorithm
    return f"cut {algorithm}: {cut} of {len(points)} points of {most_nbytes} bytes"


def _late_votes(rank, size):
    """All-reduce while ranks vote one after another, each by less than a timeout later than the last one."""
    x = torch.full((1000,), float(rank))
    codec.torch.all_reduce(torch.ones(3), options=codec.options(timeout=TIMEOUT))
    agree = Collective.agree
    Collective.agree = lambda *how: (time.sleep((0.4, 0, 1.2)[rank] * TIMEOUT), agree(*how))[1]
    try:
        codec.torch.all_reduce(x, op="mean", options=codec.options(algorithm="two_shot"))
    finally:
        Collective.agree = agree
    return x.tolist()


def test_ranks_wait_for_the_verdict_as_long_as_rank_0_waits_for_votes():
    """Ranks wait for the verdict as long as rank 0 may wait for votes, so none times out unless a rank is late."""
    assert run_ranks(3, _late_votes) == [[1.0] * 1000] * 3


def test_connection_cut_at_any_byte_of_an_all_reduce_is_an_error_on_all():
    with ThreadPoolExecutor() as pool:
        for row in pool.map(lambda algorithm: _sweep_bytes(algorithm, 4), ALGORITHMS):
            print("", row, sep="\n")


@pytest.mark.parametrize(("fault", "most"), [(die, 3), (freeze, 2)])
def test_rank_lost_during_a_training_step_leaves_the_others_unchanged(fault, most):
    """A rank lost in a training step leaves the others unchanged, in a group's first step, in which workers send
    residuals to slice owners, and in later steps.
    """
    with RankPool(3) as ranks:
        ranks.new_group()
        saved = [s for _, _, s in ranks.run(train, None, 3)]
        ranks.new_group()
        want, events, after = [], [], []
        for done in range(3):  # number of steps in the group before the faulty step
            ranks.new_group()
            undisturbed = ranks.run(train, saved, done + 1)
            events.append(undisturbed[FAULTY][1])
            after.append([states[-1] for states, _, _ in undisturbed])
            ranks.new_group()  # a new group, whose random streams are numbered from 0 again
            first = ranks.run(train, saved, done)
            ranks.new_group()
            want.append(([states for states, _, _ in first], [s for s, _, _ in ranks.run(train, None, 2)]))
        for i in range(FAULT_POINTS or most):
            done = i % 3
            point = fault_points(events[done], FAULT_POINTS or most)[i]
            ranks.new_group()
            both = ranks.run(train, saved, done)
            assert [states for states, _, _ in both] == want[done][0]
            found = run_with_fault(ranks, fault, disturbed_step, point, voted=point >= events[done] - 2)
            if found[0][0] is None:
                assert all(state in after[done] for _, _, state, _ in found), point
                continue
            ranks.new_group()
            if fault is die:  # the new process continues from a checkpoint
                ranks.run_on(FAULTY, load_training, both[FAULTY][2])
            assert [states for states, _, _ in ranks.run(train, None, 2)] == want[done][1], point
        print(fault.__name__, "DDP", events)
