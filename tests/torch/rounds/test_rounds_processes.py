"""Rounds of codec.torch.Rounds between real processes that are killed at fault points, come back, or are slow."""

import os
import random
import signal
import time

import pytest
import torch.distributed as dist

from codec.stores.folder import LocalFolder
from codec.torch.replicas.landing import Landing
from codec.torch.rounds import follower
from codec.torch.rounds.names import StoreContents, snapshot_name
from support.faults import KILLED
from support.local_training import ROUNDED, nesterov
from support.ranks import Rank
from support.rounds import Pushing


class Counting(LocalFolder):
    """Folder that calls `event(kind)` before and after each write."""

    event = staticmethod(lambda kind: None)

    def put(self, name, data):
        self.event(f"before put {name[:6]}")
        super().put(name, data)
        self.event(f"after put {name[:6]}")

    def create(self, name, data):
        kind = "first" if name == snapshot_name(0) else name[:8]
        self.event(f"before create {kind}")
        created = super().create(name, data)
        self.event(f"after create {kind}")
        return created

    def delete(self, names):
        kind = "probe" if names[0].startswith("probe") else "old"
        self.event(f"before delete {kind}")
        super().delete(names)


def goal(path):
    """Return the number of rounds after which the sites end: that in the file beside their folder."""
    file = path.with_name("goal")
    return int(file.read_text()) if file.exists() else 1000


def set_goal(path, more=10):
    """Let the sites end after some more rounds."""
    file = path.with_name("goal")
    file.with_suffix(".part").write_text(str(max(StoreContents.of(os.listdir(path)).manifests, default=0) + more))
    file.with_suffix(".part").replace(file)


def train(path, number, fault="", pause=0.01, grace=1.0):
    """Train a site until the goal, and return the digest of the anchors after each round that it has merged.

    The process kills itself at the event `fault`. Only a site with a fault writes snapshots.
    """
    follower._SNAPSHOT_ROUNDS = 3 if fault else 1000
    store = Counting(path, f"site{number}")

    def event(kind):
        if kind == fault and site is not None and site.rounds.merged > 1:
            os.kill(os.getpid(), signal.SIGKILL)

    write = Landing.write
    store.event = event

    def watched(self, masters):
        event("before write")
        write(self, masters)
        event("after write")

    Landing.write, site = watched, None
    try:
        site = Pushing(store, number, spec=ROUNDED, outer=nesterov, quorum=2, every=2, grace=grace, timeout=120)
        found = {site.rounds.merged: site.member.site.anchors_digest()}
        while site.rounds.merged < goal(path):
            time.sleep(pause)
            before = site.rounds.merged
            site.steps(1)
            if site.rounds.merged != before:
                found[site.rounds.merged] = site.member.site.anchors_digest()
        return found
    finally:
        Landing.write = write


def check_equal(path, results):
    """Check that sites have equal anchors after equal numbers of rounds, and that all have ended."""
    for number in {n for found in results for n in found}:
        assert len({found[number] for found in results if number in found}) == 1, number
    assert all(max(found) >= goal(path) for found in results)


@pytest.fixture
def processes():
    """Return a function that starts a process, all of which are killed at the end."""
    some = []

    def start(*args):
        some.append(Rank())
        some[-1].start(*args)
        return some[-1]

    yield start
    for each in some:
        each.close()


def result(process):
    succeeded, found = process.result(time.monotonic() + 120)
    assert succeeded, found
    return found


FAULTS = [
    "before put change",
    "after put change",
    "before create manifest",
    "after create manifest",
    "before write",
    "after write",
    "before create snapshot",
    "after create snapshot",
    "before delete old",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_killed_site_changes_no_other_and_comes_back(fault, tmp_path, processes):
    path = tmp_path / "run"
    others = [processes(train, path, i) for i in range(2)]
    # The victim is the last one of each round, so that it closes the round.
    victim = processes(train, path, 2, fault, 0.05, 30.0)
    assert result(victim) == KILLED
    again = processes(train, path, 2)
    set_goal(path)
    check_equal(path, [result(each) for each in (*others, again)])


def test_slow_site_takes_part_in_the_rounds_of_others(tmp_path, processes):
    path = tmp_path / "run"
    fast = [processes(train, path, i, "", 0.02) for i in range(3)]
    slow = processes(train, path, 3, "", 0.06)
    while not path.exists() or len({change.site for change in StoreContents.of(os.listdir(path)).changes}) < 4:
        time.sleep(0.05)
    begin = max(StoreContents.of(os.listdir(path)).manifests, default=0)
    set_goal(path, 20)
    check_equal(path, [result(each) for each in (*fast, slow)])
    rounds = [change.round for change in StoreContents.of(os.listdir(path)).changes if change.site == "site3"]
    assert len([n for n in rounds if n >= begin]) > 10


def test_sites_train_through_a_tcp_store(processes):
    """The host of the store is a process of its own; a site that is killed, and one that joins, change no other."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    some = [processes(train_through_store, host.port, i, 8) for i in range(3)]
    while len(host.list_keys()) < 12:
        time.sleep(0.02)
    some[2].close()
    joined = processes(train_through_store, host.port, 2, 8)
    assert len({result(each) for each in (*some[:2], joined)}) == 1


def train_through_store(port, number, rounds):
    """Train a site until the goal; return the digest of the anchors."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    site = Pushing(store, number, spec=ROUNDED, outer=nesterov, quorum=2, grace=1.0, timeout=60)
    while site.rounds.merged < rounds:
        time.sleep(0.05)
        site.steps(1)
    return site.member.site.anchors_digest()


@pytest.mark.nightly
def test_sites_that_are_killed_at_random_end_with_equal_parameters(tmp_path, processes):
    path, rng = tmp_path / "run", random.Random(0)
    sites = [processes(train, path, i, "", 0.02) for i in range(4)]
    for _ in range(20):
        time.sleep(rng.uniform(0.1, 1.5))
        i = rng.randrange(4)
        sites[i].close()
        sites[i] = processes(train, path, i, "", 0.02)
    set_goal(path)
    check_equal(path, [result(each) for each in sites])
