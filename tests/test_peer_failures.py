"""A rank dies, freezes or is cut off: an error on all others in time, nothing changed, and then as if it had not been.

CODEC_MOMENTS=20 tries so many moments of each; `pytest -s` prints what was tried.
"""

import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest
import torch
from ranks import GONE, SEND_BUFFER, Team, acked_nbytes, at_event, cut_after, die, freeze, new_connections, ranks
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.torch import collectives, hook_state, partition, raw

ALGORITHMS = ["two_shot", "ring", "all_gather", "raw"]
TIMEOUT = 1.5
PROMISED = TIMEOUT + 1
SLACK = 10  # seconds that a busy machine may add; more than that is the timeout of the group, 20 s
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
    """Undisturbed: return the result's digest, the number of events, and the last message's, which is the vote."""
    partition.CHUNK_NBYTES = partition.MOST_NBYTES = raw._CHUNK_NBYTES = 1 << 16  # several chunks a slice
    codec.torch.all_reduce(torch.ones(3), timeout=timeout)
    x = values(rank)
    with at_event(channel(), -1, None) as events:
        codec.torch.all_reduce(x, spec, algorithm=algorithm)
    return digest(x), events(), events.last_send()


def _disturbed(rank, size, algorithm, spec, moment, act):
    """The error, after which nothing may have changed, or None; after how long; the values then."""
    x = values(rank)
    before, raised = digest(x), None
    begin = time.monotonic()
    try:
        with at_event(channel(), moment if rank == VICTIM else -1, act):
            codec.torch.all_reduce(x, spec, algorithm=algorithm)
    except codec.CodecError as e:
        raised = type(e).__name__
    took = time.monotonic() - begin
    if raised is not None:
        assert digest(x) == before
        with pytest.raises(codec.PeerError, match="new group"):
            codec.torch.all_reduce(x, spec, algorithm=algorithm)
    return raised, took, digest(x)


def lose(team, act, function, *args, within=PROMISED + SLACK, voted=False):
    """One rank is lost in the midst of something: what the others say, all the same thing.

    Once it has sent its vote, they may have succeeded.
    """
    team.begin(function, *args, act)
    left = [r for r in range(3) if r != VICTIM]
    found = team.answers(left)
    if act is freeze:  # and once it goes on it learns of it, too
        team[VICTIM].thaw()
        found += team.answers([VICTIM])
    else:
        assert team.answers([VICTIM]) == [GONE]
        team.replace(VICTIM)
    errors = {error for error, *_ in found}
    assert errors == {"PeerError"} or (voted and errors == {None}), found
    assert all(took < within for _, took, _ in found[:2]), found
    return found


def raised(found):
    """Whether all but the victim raised, in time; none has if not. Cut off from the last message, it cannot know."""
    errors = [found[r][0] for r in range(3) if r != VICTIM]
    assert errors in (["PeerError"] * 2, [None] * 2), found
    assert errors[0] is None or found[VICTIM][0] == "PeerError", found
    assert all(took < PROMISED + SLACK for _, took, _ in found), found
    return errors[0] is not None


def _sweep(algorithms, act, most):
    # A rank that dies breaks its connections, which ends the others' waits at once: except a wait for a message that
    # has arrived in part, which Gloo lets run into the timeout.
    timeout = TIMEOUT if act is freeze else 10
    rows, all_took = [], []
    with Team(3) as team:
        for algorithm in algorithms:
            spec = codec.Lossless() if algorithm == "raw" else codec.Quantize(4)
            team.regroup()
            want = team.all(_reduce, algorithm, spec, timeout)
            assert len({result for result, *_ in want}) == 1
            moments, took = spread(want[VICTIM][1], MOMENTS or most), []
            for moment in moments:
                voted = moment > want[VICTIM][2]
                within = timeout + 1 + SLACK
                found = lose(team, act, _disturbed, algorithm, spec, moment, within=within, voted=voted)
                took += [seconds for _, seconds, _ in found[:2]]
                assert all(error or result == want[0][0] for error, _, result in found), moment
                team.regroup()
                assert team.all(_reduce, algorithm, spec, timeout) == want, moment
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
        print(act.__name__, lose(team, act, _unconnected))
        team.regroup()
        assert len({result for result, *_ in team.all(_reduce, "two_shot", codec.Quantize(4))}) == 1


def _acked(rank, size, algorithm, spec):
    """Undisturbed: how many bytes go over the busiest connection."""
    with new_connections() as found:
        channel()
    before = [acked_nbytes(s) for s in found]
    result = _reduce(rank, size, algorithm, spec)
    return result, max(acked_nbytes(s) - begun for s, begun in zip(found, before, strict=True))


def _cut(rank, size, algorithm, spec, nbytes, rate):
    """What _disturbed returns, and how many bytes had arrived at the cut: none where it did not come in time."""
    with new_connections() as found:
        channel()
    arrived = cut_after(found, nbytes, rate) if rank == VICTIM else []
    return _disturbed(rank, size, algorithm, spec, -1, None), arrived[:1]


def _sweep_bytes(algorithm, most):
    spec = codec.Lossless() if algorithm == "raw" else codec.Quantize(4)
    with Team(3) as team:
        team.regroup()
        both = team.all(_acked, algorithm, spec)
        want, most_nbytes = [result for result, _ in both], both[VICTIM][1]
        moments, cut = spread(most_nbytes * 9 // 10, MOMENTS or most), 0
        for nbytes in moments:
            for rate in (1 << 20, 1 << 18, 1 << 17):  # slower where a busy machine did not see the bytes in time
                team.regroup()
                both = team.all(_cut, algorithm, spec, nbytes, rate)
                found, arrived = [result for result, _ in both], both[VICTIM][1]
                if found[VICTIM][0] is not None:
                    break
            # all may go well only if what had not arrived was the kernel's to send: of a cut that never came, too
            gone = raised(found)
            assert gone or (arrived or [nbytes])[0] >= most_nbytes - 2 * SEND_BUFFER, (nbytes, arrived, found)
            cut += gone
            assert all(error or x == want[0][0] for error, _, x in found), (nbytes, found)
            team.regroup()
            assert team.all(_reduce, algorithm, spec) == want, nbytes
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


class Training:
    """A model in training on this rank, which outlives groups."""

    def __init__(self):
        torch.manual_seed(5)
        layers = [m for _ in range(4) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]
        self.net = torch.nn.Sequential(torch.nn.Linear(20, 64), *layers, torch.nn.Linear(64, 5))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)
        # two values a bit: residuals are large, and decide what comes next
        self.hook = codec.torch.ddp_hook(
            codec.Quantize(2, 64, "odd", "nearest"), feedback=True, algorithm="two_shot", timeout=TIMEOUT
        )
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
        momenta = [s["momentum_buffer"] for s in self.optimizer.state.values() if "momentum_buffer" in s]
        return (
            self.steps,
            digest(*self.net.parameters(), *momenta),
            sha256(hook_state.packed(self.hook.state_dict())).hexdigest(),
        )


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
    before, raised = _training.state(), None
    line = collectives.line_of(_training.model.process_group, TIMEOUT)
    begin = time.monotonic()
    try:
        with at_event(line.channel, moment if rank == VICTIM else -1, act):
            _training.step(rank)
    except codec.CodecError as e:
        raised = type(e).__name__
        assert _training.state() == before
    return raised, time.monotonic() - begin, _training.state()


@pytest.mark.parametrize(("act", "most"), [(die, 6), (freeze, 4)])
def test_a_rank_is_lost_at_any_moment_of_a_training_step(act, most):
    """In the first step of a group, when ranks hand over what they owe to sums, and in later ones."""
    with Team(3) as team:
        team.regroup()
        saved = [s for _, _, s in team.all(_train, None, 3)]
        team.regroup()
        want, events, after = [], [], []
        for done in range(3):  # steps in a group before the one that is disturbed
            team.regroup()
            undisturbed = team.all(_train, saved, done + 1)
            events.append(undisturbed[VICTIM][1])
            after.append([states[-1] for states, _, _ in undisturbed])
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
            found = lose(team, act, _train_disturbed, moment, voted=moment >= events[done] - 2)
            if found[0][0] is None:
                assert all(state in after[done] for _, _, state in found), moment
                continue
            team.regroup()
            if act is die:  # its successor goes on from a checkpoint
                team.one(VICTIM, _load, both[VICTIM][2])
            assert [states for states, _, _ in team.all(_train, None, 2)] == want[done][1], moment
        print(act.__name__, "DDP", events)


def _load(saved):
    global _training
    _training = Training()
    _training.load(saved)
