"""The installed package names the backend `codec` to torch, which then needs no import of codec.torch."""

import importlib.metadata
import os
import subprocess
import sys

import pytest
import torch.distributed as dist

import codec.torch

SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("codec", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(100_000)
dist.all_reduce(tensor)
assert dist.get_backend() == "codec"
print(tensor.sum().item())
dist.destroy_process_group()
"""


def test_entry_point_registers_the_backend():
    (entry,) = importlib.metadata.entry_points(group="torch.distributed.backends", name="codec")
    assert entry.load() is codec.torch.backend.register_backend
    entry.load()()  # torch calls it without arguments
    assert "CODEC" in dist.Backend._plugins


@pytest.mark.skipif(
    not hasattr(dist.Backend, "_ensure_backend_registered"), reason="torch before 2.14 reads no entry points"
)
def test_group_of_the_backend_needs_no_import():
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-W", "error", "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "100000.0\n"
