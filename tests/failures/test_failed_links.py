"""If a link between ranks fails, all ranks raise in time, and a new group works once the link is repaired."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

import codec
from support import rank_loss
from support.ranks import RankPool

sys.path.insert(0, str(Path(__file__).parents[2] / "bench/network"))
import netns

from support.rank_loss import ALGORITHMS, FAULT_POINTS, FAULTY, fault_points

# Commands by fault. drop: the kernel drops packets that the rank sends; down: the rank's interface is down; far: the
# other end of its link is down, which the rank cannot see; switch: the bridge does not forward its packets.
FAULTS = {
    "drop": ("tc", "qdisc", "replace", "dev", "eth0", "root", "blackhole"),
    "down": ("ip", "link", "set", "eth0", "down"),
    "far": ("ip", "link", "set", f"port{FAULTY}", "down"),
    "switch": ("ip", "link", "set", f"port{FAULTY}", "nomaster"),
}
REPAIRS = {
    # tc reports no error even if no packet was dropped
    "drop": ("tc", "qdisc", "replace", "dev", "eth0", "root", "pfifo"),
    "down": ("ip", "link", "set", "eth0", "up"),
    "far": ("ip", "link", "set", f"port{FAULTY}", "up"),
    "switch": ("ip", "link", "set", f"port{FAULTY}", "master", "bridge"),
}


class LinkFault:
    """Fault of a rank's link, which the rank itself causes during a collective."""

    def __init__(self, name, fault):
        self.name, self.fault = name, fault

    def __call__(self):
        self.run(FAULTS)

    def run(self, commands):
        """Run this fault's command in `commands`: FAULTS break the link, REPAIRS repair it."""
        tool, *rest = commands[self.fault]
        netns.tool(tool, "-n", self.name, *rest)


@pytest.fixture
def network():
    """Return three network namespaces joined by a bridge."""
    if os.geteuid():
        pytest.skip("network namespaces need root")
    try:
        made = netns.Network(3).__enter__()
    except netns.NetworkError as e:
        if "not permitted" in str(e):  # root lacks the privilege, as in a container
            pytest.skip(f"network namespaces need root's privileges: {e}")
        raise
    with contextlib.closing(made):
        yield made


def _rounds(network, ranks, faults, undisturbed, disturbed, vote):
    """Cause each fault at another fault point; check that all ranks raise in time, and then get the undisturbed result.

    vote(want, found) is the event number at which the faulty rank votes; after it the collective may succeed.
    """
    for i, fault in enumerate(faults):
        want = undisturbed(i)
        point = fault_points(want[FAULTY][1], len(faults))[i]
        link_fault = LinkFault(network.names[FAULTY] if fault in ("drop", "down") else network.hub, fault)
        found = ranks.run(*disturbed(i), point, link_fault)
        link_fault.run(REPAIRS)
        assert rank_loss.raised_in_time(found) or point > vote(want[FAULTY], found[FAULTY]), (fault, point, found)
        print(fault, point, max(took for _, took, *_ in found))
        assert undisturbed(i) == want, (fault, point)


def test_link_failure_during_an_all_reduce_is_an_error_on_all(network):
    faults = list(FAULTS) * (FAULT_POINTS or 1)
    names = [ALGORITHMS[(i + i // 4) % 4] for i in range(len(faults))]
    how = [(name, codec.Lossless() if name == "raw" else codec.Quantize(4)) for name in names]
    with RankPool(3, namespaces=network.names) as ranks:

        def undisturbed(i):
            ranks.new_group()
            return ranks.run(rank_loss.undisturbed_all_reduce, *how[i])

        _rounds(
            network,
            ranks,
            faults,
            undisturbed,
            lambda i: (rank_loss.disturbed_all_reduce, *how[i]),
            lambda want, found: want[2],
        )


def test_link_failure_during_a_training_step_is_an_error_on_all(network):
    faults = ["drop", "down"] * (FAULT_POINTS or 1)
    with RankPool(3, namespaces=network.names) as ranks:
        ranks.new_group()
        saved = [s for _, _, s in ranks.run(rank_loss.train, None, 2)]

        def undisturbed(i):
            ranks.new_group()
            return [result[:2] for result in ranks.run(rank_loss.train, saved, 1 + i % 2)]

        def disturbed(i):
            return (rank_loss.disturbed_step,)

        _rounds(network, ranks, faults, undisturbed, disturbed, lambda want, found: found[3])
