"""Links that fail between ranks in network namespaces: all raise in time, and once it is up again all is as it was."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

import codec
from support import rank_loss
from support.ranks import Team

sys.path.insert(0, str(Path(__file__).parents[2] / "bench/network"))
import netns

from support.rank_loss import ALGORITHMS, FAULT_POINTS, VICTIM, spread

# everything that the rank sends is dropped, while it still receives; both ways, and its link is down; the same at the
# other end, of which the rank sees nothing; a switch that forwards nothing any more
FAULTS = {
    "drop": ("tc", "qdisc", "replace", "dev", "eth0", "root", "blackhole"),
    "down": ("ip", "link", "set", "eth0", "down"),
    "far": ("ip", "link", "set", f"port{VICTIM}", "down"),
    "switch": ("ip", "link", "set", f"port{VICTIM}", "nomaster"),
}
REPAIRS = {
    "drop": ("tc", "qdisc", "del", "dev", "eth0", "root"),
    "down": ("ip", "link", "set", "eth0", "up"),
    "far": ("ip", "link", "set", f"port{VICTIM}", "up"),
    "switch": ("ip", "link", "set", f"port{VICTIM}", "master", "bridge"),
}


class Break:
    """What befalls a link, done by the rank behind it in the midst of a collective."""

    def __init__(self, name, fault):
        self.name, self.fault = name, fault

    def __call__(self):
        self.run(FAULTS)

    def run(self, commands):
        tool, *rest = commands[self.fault]
        netns.tool(tool, "-n", self.name, *rest)


@pytest.fixture
def network():
    if os.geteuid():
        pytest.skip("network namespaces need root")
    try:
        made = netns.Network(3).__enter__()
    except netns.NetworkError as e:
        if "not permitted" in str(e):  # root without its privileges, as in a container
            pytest.skip(f"network namespaces need root's privileges: {e}")
        raise
    with contextlib.closing(made):
        yield made


def _rounds(network, team, faults, undisturbed, disturbed, vote):
    """For each fault, at another moment: an error on all in time, then the undisturbed result.

    After the event vote(want) the victim has sent its vote, and the collective may succeed.
    """
    for i, fault in enumerate(faults):
        want = undisturbed(i)
        moment = spread(want[VICTIM][1], len(faults))[i]
        act = Break(network.names[VICTIM] if fault in ("drop", "down") else network.hub, fault)
        found = team.all(*disturbed(i), moment, act)
        act.run(REPAIRS)
        assert rank_loss.raised_in_time(found) or moment > vote(want[VICTIM]), (fault, moment, found)
        print(fault, moment, max(took for _, took, _ in found))
        assert undisturbed(i) == want, (fault, moment)


def test_a_link_fails_in_an_all_reduce(network):
    faults = list(FAULTS) * (FAULT_POINTS or 1)
    names = [ALGORITHMS[(i + i // 4) % 4] for i in range(len(faults))]
    how = [(name, codec.Lossless() if name == "raw" else codec.Quantize(4)) for name in names]
    with Team(3, namespaces=network.names) as team:

        def undisturbed(i):
            team.regroup()
            return team.all(rank_loss.undisturbed_all_reduce, *how[i])

        _rounds(
            network,
            team,
            faults,
            undisturbed,
            lambda i: (rank_loss.disturbed_all_reduce, *how[i]),
            lambda want: want[2],
        )


def test_a_link_fails_in_a_training_step(network):
    faults = ["drop", "down"] * (FAULT_POINTS or 1)
    with Team(3, namespaces=network.names) as team:
        team.regroup()
        saved = [s for _, _, s in team.all(rank_loss.train, None, 2)]

        def undisturbed(i):
            team.regroup()
            return [result[:2] for result in team.all(rank_loss.train, saved, 1 + i % 2)]

        _rounds(network, team, faults, undisturbed, lambda i: (rank_loss.disturbed_step,), lambda want: want[1] - 3)
