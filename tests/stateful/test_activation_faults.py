"""Under random faults of messages and state, no difference of m is undetected, and raw samples repair every step."""

from collections import Counter

import numpy as np
import pytest

import codec
from support.activations import differing, m_of
from support.tiers import NIGHTLY, nightly

N_STEPS = 1000 if NIGHTLY else 200
N_SAMPLES, BATCH, VALUES = 24, 4, 40
FAULTS = (
    "none",
    "lost",
    "repeated",
    "late",
    "flipped",
    "cut",
    "sender restarted",
    "receiver restarted",
    "sender stale",
    "receiver stale",
    "sender forgets",
    "receiver forgets",
    "only the sender commits",
    "only the receiver commits",
    "rollback",
)


class Edge:
    """Sender and receiver of an edge, with random faults."""

    def __init__(self, rng, **arguments):
        self.rng, self.arguments = rng, arguments
        self.sides = {"sender": self.new(), "receiver": self.new()}
        self.old = {}
        self.counts = Counter()

    def new(self):
        return codec.ActivationDelta(**self.arguments)

    def fail(self, fault):
        """Damage the state of one side by the given fault."""
        name, _, what = fault.partition(" ")
        if what == "restarted":
            self.sides[name] = self.new()
        elif what == "stale" and name in self.old:
            self.sides[name].load_state_dict(self.old[name])
        elif what == "forgets":
            self.sides[name].forget(self.rng.integers(0, N_SAMPLES, 5).tolist())

    def transmit(self, message, fault):
        """Return the messages that arrive if `message` is sent with the given fault."""
        damaged = bytearray(message)
        if fault == "flipped":
            damaged[self.rng.integers(len(damaged))] ^= 1 << self.rng.integers(8)
            return [bytes(damaged)]
        if fault == "cut":
            return [message[: self.rng.integers(len(message))]]
        return {"lost": [], "repeated": [message, message]}.get(fault, [message])

    def attempt(self, messages, samples):
        """Decode the first message; return the result, or None if it is refused. Check that others are refused."""
        receiver, result = self.sides["receiver"], None
        for i, message in enumerate(messages):
            try:
                received = receiver.decode(message, samples)
            except (codec.StateError, codec.FrameError) as e:
                self.counts[type(e)] += 1
            else:
                assert i == 0, "a repeated message was accepted"
                result = received
        return result

    def step(self, a, samples, fault):
        """Send a batch, and repeat it raw if it is refused; return the activations that the receiver decoded."""
        sender, receiver = self.sides.values()
        message = bytes(sender.encode(a, samples))
        received = self.attempt(self.transmit(message, fault), samples)
        if fault == "late":
            sender.rollback()
            receiver.rollback()
            assert self.attempt([bytes(sender.encode(a, samples)), message], samples) is None or received is not None
        if received is None:
            self.counts["refused"] += 1
            sender.rollback()
            receiver.rollback()
            sender.forget(samples)
            received = receiver.decode(sender.encode(a, samples), samples)
            assert np.abs(received - a).max() < 0.02
        return received


@pytest.mark.parametrize("entries", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("budget", [None, 12 * VALUES * 4])
@pytest.mark.parametrize("seed", [0, *(nightly(i) for i in range(1, 10))])
def test_no_fault_makes_m_differ(entries, budget, seed):
    """No fault makes m differ undetected. Once faults stop, one more visit of each sample repairs all m."""
    rng = np.random.default_rng(seed)
    edge = Edge(rng, dtype=entries, budget=budget, spec=codec.Quantize(3, rounding="nearest"))
    a = rng.standard_normal((N_SAMPLES, VALUES)).astype(np.float32)
    for _ in range(N_STEPS):
        fault = FAULTS[rng.integers(len(FAULTS))]
        if rng.random() < 0.2:
            edge.old = {name: side.state_dict() for name, side in edge.sides.items()}
        edge.fail(fault)
        samples = rng.choice(N_SAMPLES, BATCH, replace=False).tolist()
        a[samples] += 0.01 * rng.standard_normal((BATCH, VALUES)).astype(np.float32)
        received = edge.step(a[samples], samples, fault)
        assert np.abs(received - a[samples]).max() < 0.2
        sender, receiver = edge.sides.values()
        for side, other in ((sender, "only the receiver commits"), (receiver, "only the sender commits")):
            side.rollback() if fault in ("rollback", other) else side.commit()
        assert differing(sender, receiver) == []
        if budget is None and fault in FAULTS[:8]:
            assert sender.checks(samples).tolist() == receiver.checks(samples).tolist()
    assert edge.counts["refused"] > N_STEPS / 10
    assert edge.counts[codec.StateError] > N_STEPS / 10
    assert edge.counts[codec.FrameError] > N_STEPS / 100

    for visit in range(3):
        for start in range(0, N_SAMPLES, BATCH):
            samples = list(range(start, start + BATCH))
            edge.step(a[samples], samples, "none")
            for side in edge.sides.values():
                side.commit()
        if visit == 0:
            edge.counts.clear()
    assert not edge.counts
    assert m_of(edge.sides["sender"]).keys() == m_of(edge.sides["receiver"]).keys()
    assert len(m_of(edge.sides["sender"])) >= 10
