"""Run all-reduces and training steps on three ranks, one of which fails at a chosen fault point."""

import os
import pickle
import time
from hashlib import sha256

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.torch.feedback.checkpoint import packed
from codec.torch.group import communicator
from codec.torch.reduction import partition, raw
from support.ddp_training import separate_buckets
from support.faults import KILLED, at_fault_point, freeze

ALGORITHMS = ["two_shot", "ring", "all_gather", "raw"]
TIMEOUT = 1.5  # timeout of a collective in seconds
PROMISED_SECONDS = TIMEOUT + 1  # documented limit, in seconds, within which all ranks raise
SLACK_SECONDS = 10  # allowance for busy machines; well below the group's timeout of 20 s
FAULTY = 1  # the rank that fails in these tests
FAULT_POINTS = int(os.environ.get("CODEC_FAULT_POINTS", "0"))  # fault points per test; 0: each test's default


def fault_points(n, count):
    """Return `count` of n fault points, evenly spaced, the first and the last included."""
    return [round(i * (n - 1) / (count - 1)) for i in range(count)]


def digest(*arrays):
    """Return a digest of the tensors' bytes."""
    return sha256(b"".join(a.detach().contiguous().view(torch.uint8).numpy().tobytes() for a in arrays)).hexdigest()


def channel():
    """Return the channel of the default group."""
    return communicator.communicator_of(None, TIMEOUT).channel


def connect(rank, size):
    """Connect the ranks of the default group."""
    channel()


def values(rank):
    """Return the input tensor of a rank."""
    g = torch.Generator().manual_seed(rank)
    return torch.randn(100_000, generator=g) * 2.0 ** torch.randint(-9, 0, (100_000,), generator=g)


def undisturbed_all_reduce(rank, size, algorithm, spec, timeout=TIMEOUT):
    """Return the result's digest, the number of events, and the event number of the last send, which is the vote."""
    # Chunks of 64 KiB, so that a slice has several
    partition.CHUNK_NBYTES = partition.MOST_NBYTES = raw._CHUNK_NBYTES = 1 << 16
    codec.torch.all_reduce(torch.ones(3), options=codec.options(timeout=timeout))
    x = values(rank)
    with at_fault_point(channel(), -1, None) as events:
        codec.torch.all_reduce(x, spec, op="mean", options=codec.options(algorithm=algorithm))
    return digest(x), events.count, events.last_send


def disturbed_all_reduce(rank, size, algorithm, spec, point, fault):
    """Run an all-reduce with a fault on one rank; check that an error leaves the tensor unchanged and closes the group.

    Return the name of the error or None, the duration in seconds, and the result's digest.
    """
    x = values(rank)
    before, raised = digest(x), None
    begin = time.monotonic()
    try:
        with at_fault_point(channel(), point if rank == FAULTY else -1, fault):
            codec.torch.all_reduce(x, spec, op="mean", options=codec.options(algorithm=algorithm))
    except codec.CodecError as e:
        raised = type(e).__name__
    took = time.monotonic() - begin
    if raised is not None:
        assert digest(x) == before
        with pytest.raises(codec.PeerError, match="new group"):
            codec.torch.all_reduce(x, spec, op="mean", options=codec.options(algorithm=algorithm))
    return raised, took, digest(x)


def run_with_fault(ranks, fault, function, *args, within=PROMISED_SECONDS + SLACK_SECONDS, voted=False):
    """Run a function with a fault that kills or freezes one rank; return the results of the other ranks.

    Check that all raise PeerError within `within` seconds. If the faulty rank had sent its vote (`voted`), all other
    ranks may succeed instead.
    """
    ranks.start(function, *args, fault)
    left = [r for r in range(3) if r != FAULTY]
    found = ranks.results(left)
    if fault is freeze:  # the frozen rank must raise, too, once it continues
        ranks[FAULTY].resume()
        found += ranks.results([FAULTY])
    else:
        assert ranks.results([FAULTY]) == [KILLED]
        ranks.replace(FAULTY)
    errors = {error for error, *_ in found}
    assert errors == {"PeerError"} or (voted and errors == {None}), found
    assert all(took < within for _, took, *_ in found[:2]), found
    return found


def raised_in_time(found):
    """Return True if all ranks raised in time, False if all ranks but the faulty one succeeded.

    A rank that is cut off before it receives the last message cannot know whether the others succeeded.
    """
    errors = [found[r][0] for r in range(3) if r != FAULTY]
    assert errors in (["PeerError"] * 2, [None] * 2), found
    assert errors[0] is None or found[FAULTY][0] == "PeerError", found
    assert all(took < PROMISED_SECONDS + SLACK_SECONDS for _, took, *_ in found), found
    return errors[0] is not None


class Training:
    """A model, its optimizer and its hook on this rank. Training can continue after the group is replaced."""

    def __init__(self):
        torch.manual_seed(5)
        layers = [m for _ in range(4) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]
        self.net = torch.nn.Sequential(torch.nn.Linear(20, 64), *layers, torch.nn.Linear(64, 5))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)
        # 2 bits per value: residuals are large enough to change later steps
        self.hook = codec.torch.ddp_hook(
            codec.Quantize(2, 64, "odd", "nearest"),
            feedback=True,
            options=codec.options(algorithm="two_shot", timeout=TIMEOUT),
        )
        self.model = None
        self.steps = 0

    def wrap(self):
        """Wrap the model for the current group, and register the hook."""
        separate_buckets()
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=0.015)  # MB: small enough for several buckets
        self.hook.register(self.model)

    @property
    def channel(self):
        """Channel of the hook's group."""
        return communicator.communicator_of(self.hook.reducer.group, TIMEOUT).channel

    def step(self, rank):
        """Run one training step."""
        g = torch.Generator().manual_seed(1000 * self.steps + rank)
        x = torch.randn(16, 20, generator=g)
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(x), (x[:, :5] * x[:, 5:10]).argmax(1)).backward()
        self.optimizer.step()
        self.steps += 1

    def saved(self):
        """Return a checkpoint of this training."""
        states = [self.net.state_dict(), self.optimizer.state_dict(), self.hook.state_dict(), self.steps]
        return pickle.dumps(states)

    def load(self, saved):
        """Load the state of a checkpoint that saved() returned."""
        net, optimizer, hook, self.steps = pickle.loads(saved)
        self.net.load_state_dict(net)
        self.optimizer.load_state_dict(optimizer)
        self.hook.load_state_dict(hook)

    def run(self, rank, saved, steps):
        """Train over the current group, from a checkpoint if `saved` is not None.

        Returns the state after each step, the number of events in the last step, and a checkpoint.
        """
        if saved is not None:
            self.load(saved)
        self.wrap()
        states, count = [], 0
        for _ in range(steps):
            with at_fault_point(self.channel, -1, None) as events:
                self.step(rank)
            states.append(self.state())
            count = events.count
        return states, count, self.saved()

    def state(self):
        """Return digests of all state that a step changes: parameters, momentum and residuals."""
        momenta = [s["momentum_buffer"] for s in self.optimizer.state.values() if "momentum_buffer" in s]
        return (
            self.steps,
            digest(*self.net.parameters(), *momenta),
            sha256(packed(self.hook.state_dict())).hexdigest(),
        )


_training = None


def current_training():
    """Return this rank's Training, which train() created."""
    return _training


def train(rank, size, saved, steps):
    """Train from the checkpoints `saved`, one per rank, or from the current state if `saved` is None.

    Returns the results of :meth:`Training.run`.
    """
    global _training
    _training = _training or Training()
    return _training.run(rank, saved and saved[rank], steps)


def disturbed_step(rank, size, point, fault):
    """Run a training step with a fault on one rank.

    Return the name of the error or None, the duration in seconds, the state, and the event number of the last send,
    which is the vote.
    """
    before, raised = _training.state(), None
    begin = time.monotonic()
    try:
        with at_fault_point(_training.channel, point if rank == FAULTY else -1, fault) as events:
            _training.step(rank)
    except codec.CodecError as e:
        raised = type(e).__name__
        assert _training.state() == before
    return raised, time.monotonic() - begin, _training.state(), events.last_send


def load_training(saved):
    """Replace this rank's Training by a new one, loaded from a checkpoint."""
    global _training
    _training = Training()
    _training.load(saved)
