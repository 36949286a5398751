"""The example and the benchmarks of weight synchronization run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command):
    """Run a program in two processes, and return what it prints."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["weight_sync", "weight_sync_shards"])
def test_example_sends_small_updates(name):
    lines = run(ROOT / f"examples/{name}.py", "--steps", "2").splitlines()
    parts = [float(re.search(r"([\d.]+)% of the weights", line)[1]) for line in lines]
    assert parts[0] > 50
    assert max(parts[1:]) < 2


@pytest.mark.nightly
def test_training_with_updates_equals_one_with_full_weights():
    arguments = ("--steps", "3", "--batch", "4", "--width", "64", "--layers", "1", "--rate", "1e9")
    assert run(ROOT / "bench/training/weight_sync.py", *arguments).endswith("equal to the bit: yes\n")


@pytest.mark.nightly
def test_updates_of_an_adapter_are_smaller_than_snapshots():
    rows = run(ROOT / "bench/training/adapter_sync.py", "--steps", "4", "--width", "64", "--layers", "1").splitlines()
    for row in rows[1:]:
        snapshot, update = (float(share) for share in re.findall(r"([\d.]+)%", row))
        assert update < snapshot < 100
    assert len(rows) == 7


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_shards_are_sent_without_a_gather():
    """The benchmark fails if the workers' weights differ from the trainer's."""
    arguments = ("--values", "4e6", "--ranks", "3", "--steps", "1")
    rows = run(ROOT / "bench/training/sharded_sync.py", *arguments).splitlines()[2:]
    collectives = {row.split()[0]: row.rpartition("  ")[2] for row in rows}
    assert collectives.keys() == {"broadcast", "gathered", "pairs", "sharded"}
    assert [name for name, found in collectives.items() if found == "none"] == ["sharded"]
