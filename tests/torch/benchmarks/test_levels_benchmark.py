"""bench/network/levels.py: replicas stay equal with each method, and "within" sends frames within a machine."""

import sys
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh

import codec.torch
from support.ranks import run_ranks

NETWORK = str(Path(__file__).parents[3] / "bench/network")
STEPS = 5  # one synchronization of LocalSteps


def _trained(rank, size):
    """Return, by method, the checksum of the parameters, and the bytes sent within machines and between them."""
    sys.path.insert(0, NETWORK)
    import levels

    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within")), {}
    for method in levels.METHODS:
        training = levels.Training(method, {"width": 128, "layers": 4, "buckets": 1}, mesh)
        before = codec.torch.group_stats(mesh)
        for _ in range(STEPS):
            training.step()
        if training.local is not None:
            training.local.finish()
        sent = codec.torch.group_stats(mesh) - before
        found[method] = training.digest(), sent.local_nbytes, sent.sent_nbytes
    return found


def test_methods_keep_replicas_equal_and_differ_in_bytes():
    results = run_ranks(4, _trained)
    for method in results[0]:
        assert len({found[method][0] for found in results}) == 1, method
    for found in results:
        plain, near, far = found["levels"]
        narrow, less, same = found["within"]
        assert narrow != plain
        assert less < 0.3 * near
        assert same == pytest.approx(far, rel=0.05)
        assert 0 < found["local"][2] < 0.3 * far
        assert found["float32"][1:] == found["flat"][1:] == (0, 0)  # without the levels of the mesh
