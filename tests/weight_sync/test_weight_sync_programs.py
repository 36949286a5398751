"""The example and the benchmarks of weight synchronization run."""

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
def test_example_sends_small_updates():
    lines = run(ROOT / "examples/weight_sync.py", "--steps", "2").splitlines()
    parts = [float(re.search(r"([\d.]+)% of the weights", line)[1]) for line in lines]
    assert parts[0] > 50
    assert max(parts[1:]) < 1


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
