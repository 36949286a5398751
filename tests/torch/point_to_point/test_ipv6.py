"""send, parameter servers and pipelines work on a machine that has only an IPv6 address."""

import os
import shutil
import subprocess
import sys

import pytest

from support.tiers import HANG_SECONDS

# Runs a command in a new network namespace whose only address is ::1, on the loopback interface.
NAMESPACE = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "
RANKS = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
import codec.torch
from codec.torch.pipelining import CompressedStage, attempts
from torch.distributed.pipelining import ScheduleGPipe

child = os.fork()
rank = 0 if child else 1
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))
if rank == 0:
    codec.torch.send(b"hello", dst=1)
    codec.torch.ParameterServer([0], [1]).serve()
else:
    assert codec.torch.recv(src=0) == b"hello"
    with codec.torch.ParameterClient([0]) as client:
        client.init({"a": (4,)})
        assert client.average(0, {"a": torch.ones(4)}, codec.Lossless())["a"].tolist() == [1.0] * 4
stage = CompressedStage(torch.nn.Linear(4, 4), rank, 2, "cpu", activations="direct")
schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
for attempt in attempts(stage):
    with attempt:
        schedule.step(*([torch.ones(4, 4)] if rank == 0 else []), target=torch.ones(4, 4))
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
sys.stdout.write("right\\n")
sys.stdout.flush()
os._exit(0)
"""


def test_ranks_with_ipv6_only(tmp_path):
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    (tmp_path / "ranks.py").write_text(RANKS)
    python = f"{sys.executable} {tmp_path / 'ranks.py'} {tmp_path / 'store'}"
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", NAMESPACE + python],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    if "not permitted" in done.stderr:  # root lacks the privilege, as in a container
        pytest.skip(f"network namespaces need root's privileges: {done.stderr}")
    assert done.stdout.split() == ["right", "right"], done.stderr
