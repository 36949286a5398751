"""A rank dies, freezes or is cut off: an error on all others in time, nothing changed, and then as if it had not been.

CODEC_FAULT_POINTS=20 tries so many moments of each; `pytest -s` prints what was tried.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import codec
import codec.torch
from support.faults import SEND_BUFFER, acked_nbytes, cut_after, die, freeze, new_connections
from support.rank_loss import (
    ALGORITHMS,
    FAULT_POINTS,
    SLACK,
    TIMEOUT,
    VICTIM,
    channel,
    digest,
    disturbed_all_reduce,
    disturbed_step,
    load_training,
    lose_rank,
    raised_in_time,
    spread,
    train,
    undisturbed_all_reduce,
    values,
)
from support.ranks import Team, ranks


def _sweep(algorithms, act, most):
    # A rank that dies breaks its connections, which ends the others' waits at once: except a wait for a message that
    # has arrived in part, which Gloo lets run into the timeout.
    timeout = TIMEOUT if act is freeze else 10
    rows, all_took = [], []
    with Team(3) as team:
        for algorithm in algorithms:
            spec = codec.Lossless() if algorithm == "raw" else codec.Quantize(4)
            team.regroup()
            want = team.all(undisturbed_all_reduce, algorithm, spec, timeout)
            assert len({result for result, *_ in want}) == 1
            moments, took = spread(want[VICTIM][1], FAULT_POINTS or most), []
            for moment in moments:
                voted = moment > want[VICTIM][2]
                within = timeout + 1 + SLACK
                found = lose_rank(team, act, disturbed_all_reduce, algorithm, spec, moment, within=within, voted=voted)
                took += [seconds for _, seconds, _ in found[:2]]
                assert all(error or result == want[0][0] for error, _, result in found), moment
                team.regroup()
                assert team.all(undisturbed_all_reduce, algorithm, spec, timeout) == want, moment
            all_took += took
            rows.append(f"{act.__name__} {algorithm}: {len(moments)} of {want[VICTIM][1]} moments, {max(took):.2f} s")
    assert act is freeze or sum(seconds < timeout / 2 for seconds in all_took) > 0.8 * len(all_took), all_took
    return rows


@pytest.mark.parametrize(("act", "most"), [(die, 6), (freeze, 4)])
def test_a_rank_is_lost_at_any_moment_of_an_all_reduce(act, most):
    # who is frozen takes time, but no processor's
    each = [[algorithm] for algorithm in ALGORITHMS] if act is freeze else [ALGORITHMS]
    with ThreadPoolExecutor() as pool:
        for rows in pool.map(lambda algorithms: _sweep(algorithms, act, most), each):
            print("", *rows, sep="\n")


def _unconnected(rank, size, act):
    """Lost before the group's first collective."""
    if rank == VICTIM:
        act()
    x = values(rank)
    begin = time.monotonic()
    with pytest.raises(codec.PeerError) as e:
        codec.torch.all_reduce(x, timeout=TIMEOUT)
    took = time.monotonic() - begin
    assert digest(x) == digest(values(rank))
    return type(e.value).__name__, took, digest(x)


@pytest.mark.parametrize("act", [die, freeze])
def test_a_rank_is_lost_before_all_are_connected(act):
    with Team(3) as team:
        team.regroup()
        print(act.__name__, lose_rank(team, act, _unconnected))
        team.regroup()
        assert len({result for result, *_ in team.all(undisturbed_all_reduce, "two_shot", codec.Quantize(4))}) == 1


def _acked(rank, size, algorithm, spec):
    """Undisturbed: how many bytes go over the busiest connection."""
    with new_connections() as found:
        channel()
    before = [acked_nbytes(s) for s in found]
    result = undisturbed_all_reduce(rank, size, algorithm, spec)
    return result, max(acked_nbytes(s) - begun for s, begun in zip(found, before, strict=True))


def _cut(rank, size, algorithm, spec, nbytes, rate):
    """Return the result of disturbed_all_reduce and the bytes that had arrived at the cut, if it came in time."""
    with new_connections() as found:
        channel()
    arrived = cut_after(found, nbytes, rate) if rank == VICTIM else []
    return disturbed_all_reduce(rank, size, algorithm, spec, -1, None), arrived[:1]


def _sweep_bytes(algorithm, most):
    spec = codec.Lossless() if algorithm == "raw" else codec.Quantize(4)
    with Team(3) as team:
        team.regroup()
        both = team.all(_acked, algorithm, spec)
        want, most_nbytes = [result for result, _ in both], both[VICTIM][1]
        moments, cut = spread(most_nbytes * 9 // 10, FAULT_POINTS or most), 0
        for nbytes in moments:
            for rate in (1 << 20, 1 << 18, 1 << 17):  # slower where a busy machine did not see the bytes in time
                team.regroup()
                both = team.all(_cut, algorithm, spec, nbytes, rate)
                found, arrived = [result for result, _ in both], both[VICTIM][1]
                if found[VICTIM][0] is not None:
                    break
            # all may go well only if what had not arrived was the kernel's to send: of a cut that never came, too
            gone = raised_in_time(found)
            assert gone or (arrived or [nbytes])[0] >= most_nbytes - 2 * SEND_BUFFER, (nbytes, arrived, found)
            cut += gone
            assert all(error or x == want[0][0] for error, _, x in found), (nbytes, found)
            team.regroup()
            assert team.all(undisturbed_all_reduce, algorithm, spec) == want, nbytes
        assert cut, algorithm
    return f"cut {algorithm}: {cut} of {len(moments)} moments of {most_nbytes} bytes"


def _late_at_the_end(rank, size):
    x = torch.full((1000,), float(rank))
    codec.torch.all_reduce(torch.ones(3), timeout=TIMEOUT)
    line = channel()
    conclude = line.conclude
    line.conclude = lambda *how: (time.sleep((0.4, 0, 1.2)[rank] * TIMEOUT), conclude(*how))[1]
    codec.torch.all_reduce(x, algorithm="two_shot")
    return x.tolist()


def test_who_waits_for_rank_0_waits_as_long_as_rank_0_may():
    """Else a rank would be left alone by others none of whom was late by a timeout."""
    assert ranks(3, _late_at_the_end) == [[1.0] * 1000] * 3


def test_a_connection_is_cut_at_any_byte_of_an_all_reduce():
    with ThreadPoolExecutor() as pool:
        for row in pool.map(lambda algorithm: _sweep_bytes(algorithm, 4), ALGORITHMS):
            print("", row, sep="\n")


@pytest.mark.parametrize(("act", "most"), [(die, 6), (freeze, 4)])
def test_a_rank_is_lost_at_any_moment_of_a_training_step(act, most):
    """In the first step of a group, when ranks hand over what they owe to sums, and in later ones."""
    with Team(3) as team:
        team.regroup()
        saved = [s for _, _, s in team.all(train, None, 3)]
        team.regroup()
        want, events, after = [], [], []
        for done in range(3):  # steps in a group before the one that is disturbed
            team.regroup()
            undisturbed = team.all(train, saved, done + 1)
            events.append(undisturbed[VICTIM][1])
            after.append([states[-1] for states, _, _ in undisturbed])
            team.regroup()  # what is drawn at random goes by a group's collectives
            first = team.all(train, saved, done)
            team.regroup()
            want.append(([states for states, _, _ in first], [s for s, _, _ in team.all(train, None, 2)]))
        for i in range(FAULT_POINTS or most):
            done = i % 3
            moment = spread(events[done], FAULT_POINTS or most)[i]
            team.regroup()
            both = team.all(train, saved, done)
            assert [states for states, _, _ in both] == want[done][0]
            found = lose_rank(team, act, disturbed_step, moment, voted=moment >= events[done] - 2)
            if found[0][0] is None:
                assert all(state in after[done] for _, _, state in found), moment
                continue
            team.regroup()
            if act is die:  # its successor goes on from a checkpoint
                team.one(VICTIM, load_training, both[VICTIM][2])
            assert [states for states, _, _ in team.all(train, None, 2)] == want[done][1], moment
        print(act.__name__, "DDP", events)
