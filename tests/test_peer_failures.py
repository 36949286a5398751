"""A rank dies, freezes or is cut off: an error on all others in time, nothing changed, and then as if it had not been.

CODEC_MOMENTS=20 tries so many moments of each; `pytest -s` prints what was tried.
"""

import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import numpy as np
import pytest
import torch
from ranks import GONE, Team, acked_nbytes, at_event, cut_after, die, freeze, new_connections
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.torch import collectives, slices

ALGORITHMS = ["two_shot", "ring", "all_gather", "raw"]
TIMEOUT = 1.5
PROMISED = TIMEOUT + 1
SLACK = 2  # CPUs are shared
VICTIM = 1
MOMENTS = int(os.environ.get("CODEC_MOMENTS", "0"))


def spread(n, most):
    """So many moments of an attempt that has n, the first and the last among them."""
    return [round(i * (n - 1) / (most - 1)) for i in range(most)]


def digest(*arrays):
    return sha256(b"".join(a.detach().contiguous().view(torch.uint8).numpy().tobytes() for a in arrays)).hexdigest()


def channel():
    return collectives.line_of(None, TIMEOUT).channel


def _connect(rank, size):
    channel()


def values(rank):
    g = torch.Generator().manual_seed(rank)
    return torch.randn(100_000, generator=g) * 2.0 ** torch.randint(-9, 0, (100_000,), generator=g)


def _reduce(rank, size, algorithm, spec, timeout=TIMEOUT):
    """Undisturbed: what comes out, and the events of it."""
    slices.CHUNK_NBYTES = 1 << 16  # several chunks a slice
    codec.torch.all_reduce(torch.ones(3), timeout=timeout)
    x = values(rank)
    with at_event(channel(), -1, None) as events:
        codec.torch.all_reduce(x, spec, algorithm=algorithm)
    return digest(x), events()


def _disturbed(rank, size, algorithm, spec, moment, act):
    """The error, and after how long; nothing may have changed."""
    x = values(rank)
    before = digest(x)
    begin = time.monotonic()
    with at_event(channel(), moment if rank == VICTIM else -1, act), pytest.raises(codec.CodecError) as e:
        codec.torch.all_reduce(x, spec, algorithm=algorithm)
    took = time.monotonic() - begin
    assert digest(x) == before
    with pytest.raises(codec.PeerError, match="new group"):
        codec.torch.all_reduce(x, spec, algorithm=algorithm)
    return type(e.value).__name__, took


def lose(team, act, function, *args, within=PROMISED + SLACK):
    """One rank is lost in the midst of something: how long it took the others to say so."""
    team.begin(function, *args, act)
    left = [r for r in range(3) if r != VICTIM]
    found = team.answers(left)
    if act is freeze:  # and once it goes on it learns of it, too
        team[VICTIM].signal(signal.SIGCONT)
        found += team.answers([VICTIM])
        assert found[-1][0] == "PeerError", found
    else:
        assert team.answers([VICTIM]) == [GONE]
        team.replace(VICTIM)
    assert all(error == "PeerError" and took < within for error, took in found[:2]), found
    return max(took for _, took in found[:2])


def _sweep(algorithms, act, most):
    # when one dies, connections break: nobody waits for a timeout, not even those that were not waiting for it
    timeout, within = (TIMEOUT, PROMISED + SLACK) if act is freeze else (30, 30)
    rows = []
    with Team(3) as team:
        for algorithm in algorithms:
            spec = codec.Lossless() if algorithm == "raw" else codec.Quantize(4)
            team.regroup()
            want = team.all(_reduce, algorithm, spec, timeout)
            assert len({result for result, _ in want}) == 1
            moments, took = spread(want[VICTIM][1], MOMENTS or most), []
            for moment in moments:
                took.append(lose(team, act, _disturbed, algorithm, spec, moment, within=within))
                team.regroup()
                assert team.all(_reduce, algorithm, spec, timeout) == want, moment
            rows.append(f"{act.__name__} {algorithm}: {len(moments)} of {want[VICTIM][1]} moments, {max(took):.2f} s")
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
    return type(e.value).__name__, took


@pytest.mark.parametrize("act", [die, freeze])
def test_a_rank_is_lost_before_all_are_connected(act):
    with Team(3) as team:
        team.regroup()
        print(act.__name__, lose(team, act, _unconnected))
        team.regroup()
        assert len({result for result, _ in team.all(_reduce, "two_shot", codec.Quantize(4))}) == 1


def _acked(rank, size, algorithm, spec):
    """Undisturbed: how many bytes go over the busiest connection."""
    with new_connections() as found:
        channel()
    before = [acked_nbytes(s) for s in found]
    result = _reduce(rank, size, algorithm, spec)
    return result, max(acked_nbytes(s) - begun for s, begun in zip(found, before, strict=True))


def _cut(rank, size, algorithm, spec, nbytes, rate):
    """What _disturbed returns; None for how long it took if all was there before the cut."""
    with new_connections() as found:
        channel()
    if rank == VICTIM:
        cut_after(found, nbytes, rate)
    try:
        return _disturbed(rank, size, algorithm, spec, -1, None)
    except pytest.fail.Exception:
        return "too late", None


def _sweep_bytes(algorithm, most):
    spec = codec.Lossless() if algorithm == "raw" else codec.Quantize(4)
    with Team(3) as team:
        team.regroup()
        both = team.all(_acked, algorithm, spec)
        want, most_nbytes = [result for result, _ in both], both[VICTIM][1]
        for nbytes in spread(most_nbytes * 9 // 10, MOMENTS or most):
            for rate in (1 << 20, 1 << 18, 1 << 17):  # slower where a busy machine did not see the bytes in time
                team.regroup()
                found = team.all(_cut, algorithm, spec, nbytes, rate)
                if found[VICTIM][1] is not None:
                    break
            assert all(error == "PeerError" and took < PROMISED + SLACK for error, took in found), (nbytes, found)
            team.regroup()
            assert team.all(_reduce, algorithm, spec) == want, nbytes
    return f"cut {algorithm}: {MOMENTS or most} of {most_nbytes} bytes"


def test_a_connection_is_cut_at_any_byte_of_an_all_reduce():
    with ThreadPoolExecutor() as pool:
        for row in pool.map(lambda algorithm: _sweep_bytes(algorithm, 4), ALGORITHMS):
            print("", row, sep="\n")


class Training:
    """A model in training on this rank, which outlives groups."""

    def __init__(self):
        torch.manual_seed(5)
        layers = [m for _ in range(4) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]
        self.net = torch.nn.Sequential(torch.nn.Linear(20, 64), *layers, torch.nn.Linear(64, 5))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)
        # two values a bit: residuals are large, and decide what comes next
        self.hook = codec.torch.ddp_hook(codec.Quantize(2, 64), feedback=True, algorithm="two_shot", timeout=TIMEOUT)
        self.model = None
        self.steps = 0

    def wrap(self):
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=0.015)  # several buckets
        self.hook.register(self.model)

    def step(self, rank):
        g = torch.Generator().manual_seed(1000 * self.steps + rank)
        x = torch.randn(16, 20, generator=g)
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(x), (x[:, :5] * x[:, 5:10]).argmax(1)).backward()
        self.optimizer.step()
        self.steps += 1

    def saved(self):
        states = [self.net.state_dict(), self.optimizer.state_dict(), self.hook.state_dict(), self.steps]
        return pickle.dumps(states)

    def load(self, saved):
        net, optimizer, hook, self.steps = pickle.loads(saved)
        self.net.load_state_dict(net)
        self.optimizer.load_state_dict(optimizer)
        self.hook.load_state_dict(hook)

    def state(self):
        """All that a step may change: parameters, momentum, what is owed to each."""
        owed = [
            (role, key, np.asarray(values).tobytes())
            for role, state in self.hook.state_dict().items()
            for key, values in state.items()
        ]
        momenta = [s["momentum_buffer"] for s in self.optimizer.state.values() if "momentum_buffer" in s]
        return self.steps, digest(*self.net.parameters(), *momenta), sha256(repr(owed).encode()).hexdigest()


_training = None


def _train(rank, size, saved, steps):
    """On from what was saved, or None: the state after each step, events of the last one, what is saved then."""
    global _training
    _training = _training or Training()
    if saved is not None:
        _training.load(saved[rank])
    _training.wrap()
    states, events = [], 0
    for _ in range(steps):
        line = collectives.line_of(_training.model.process_group, TIMEOUT)
        with at_event(line.channel, -1, None) as count:
            _training.step(rank)
        states.append(_training.state())
        events = count()
    return states, events, _training.saved()


def _train_disturbed(rank, size, moment, act):
    before = _training.state()
    line = collectives.line_of(_training.model.process_group, TIMEOUT)
    begin = time.monotonic()
    with at_event(line.channel, moment if rank == VICTIM else -1, act), pytest.raises(codec.CodecError) as e:
        _training.step(rank)
    took = time.monotonic() - begin
    assert _training.state() == before
    return type(e.value).__name__, took


@pytest.mark.parametrize(("act", "most"), [(die, 6), (freeze, 4)])
def test_a_rank_is_lost_at_any_moment_of_a_training_step(act, most):
    """In the first step of a group, when ranks hand over what they owe to sums, and in later ones."""
    with Team(3) as team:
        team.regroup()
        saved = [s for _, _, s in team.all(_train, None, 3)]
        team.regroup()
        want, events = [], []
        for done in range(3):  # steps in a group before the one that is disturbed
            team.regroup()
            events.append(team.all(_train, saved, done + 1)[VICTIM][1])
            team.regroup()  # what is drawn at random goes by a group's collectives
            first = team.all(_train, saved, done)
            team.regroup()
            want.append(([states for states, _, _ in first], [s for s, _, _ in team.all(_train, None, 2)]))
        for i in range(MOMENTS or most):
            done = i % 3
            moment = spread(events[done], MOMENTS or most)[i]
            team.regroup()
            both = team.all(_train, saved, done)
            assert [states for states, _, _ in both] == want[done][0]
            lose(team, act, _train_disturbed, moment)
            team.regroup()
            if act is die:  # its successor goes on from a checkpoint
                team.one(VICTIM, _load, both[VICTIM][2])
            assert [states for states, _, _ in team.all(_train, None, 2)] == want[done][1], moment
        print(act.__name__, "DDP", events)


def _load(saved):
    global _training
    _training = Training()
    _training.load(saved)
