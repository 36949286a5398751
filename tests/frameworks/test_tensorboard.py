"""TensorBoard can read the curves that examples/ddp_tensorboard.py writes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/ddp_tensorboard.py"


def test_tensorboard_example_writes_curves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT)]
    command += ["--steps", "12", "--every", "4", "--folder", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of the bytes") == 3
    events = EventAccumulator(str(tmp_path)).Reload()
    names = ["ratio", "sent_MB", "residual_ratio", "encode_ms", "wire_ms", "decode_ms"]
    assert sorted(events.Tags()["scalars"]) == sorted(["loss", *(f"codec/{name}" for name in names)])
    curves = {name: events.Scalars(f"codec/{name}") for name in names}
    for name, points in curves.items():
        assert [p.step for p in points] == [4, 8, 12], name
        if name == "wire_ms":  # 0 in a window in which no message was late
            assert all(p.value >= 0 for p in points)
            assert any(p.value > 0 for p in points)
        else:
            assert all(p.value > 0 for p in points), name
    assert curves["ratio"][-1].value < 0.25
    n = 32 * 256 + 256 * 256 + 256 * 8 + 256 + 256 + 8
    assert curves["sent_MB"][-1].value == pytest.approx(curves["ratio"][-1].value * 4 * n / 1e6, rel=0.05)
