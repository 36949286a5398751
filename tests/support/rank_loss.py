"""Collectives and training steps of three ranks, one of which is lost at a chosen fault point."""

import os
import pickle
import time
from hashlib import sha256

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.torch import collectives, hook_state, partition, raw
from support.faults import GONE, at_event, freeze

ALGORITHMS = ["two_shot", "ring", "all_gather", "raw"]
TIMEOUT = 1.5
PROMISED = TIMEOUT + 1
SLACK = 10  # seconds that a busy machine may add; more than that is the timeout of the group, 20 s
VICTIM = 1
FAULT_POINTS = int(os.environ.get("CODEC_FAULT_POINTS", "0"))


def spread(n, most):
    """So many moments of an attempt that has n, the first and the last among them."""
    return [round(i * (n - 1) / (most - 1)) for i in range(most)]


def digest(*arrays):
    return sha256(b"".join(a.detach().contiguous().view(torch.uint8).numpy().tobytes() for a in arrays)).hexdigest()


def channel():
    return collectives.line_of(None, TIMEOUT).channel


def connect(rank, size):
    channel()


def values(rank):
    g = torch.Generator().manual_seed(rank)
    return torch.randn(100_000, generator=g) * 2.0 ** torch.randint(-9, 0, (100_000,), generator=g)


def undisturbed_all_reduce(rank, size, algorithm, spec, timeout=TIMEOUT):
    """Undisturbed: return the result's digest, the number of events, and the last message's, which is the vote."""
    partition.CHUNK_NBYTES = partition.MOST_NBYTES = raw._CHUNK_NBYTES = 1 << 16  # several chunks a slice
    codec.torch.all_reduce(torch.ones(3), timeout=timeout)
    x = values(rank)
    with at_event(channel(), -1, None) as events:
        codec.torch.all_reduce(x, spec, algorithm=algorithm)
    return digest(x), events(), events.last_send()


def disturbed_all_reduce(rank, size, algorithm, spec, moment, act):
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


def lose_rank(team, act, function, *args, within=PROMISED + SLACK, voted=False):
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


def raised_in_time(found):
    """Whether all but the victim raised, in time; none has if not. Cut off from the last message, it cannot know."""
    errors = [found[r][0] for r in range(3) if r != VICTIM]
    assert errors in (["PeerError"] * 2, [None] * 2), found
    assert errors[0] is None or found[VICTIM][0] == "PeerError", found
    assert all(took < PROMISED + SLACK for _, took, _ in found), found
    return errors[0] is not None


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


def current_training():
    """Return this rank's training, which train() began."""
    return _training


def train(rank, size, saved, steps):
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


def disturbed_step(rank, size, moment, act):
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


def load_training(saved):
    global _training
    _training = Training()
    _training.load(saved)
