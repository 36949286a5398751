"""Fixtures: connected meshes, a mesh whose peer is a socket of the test, certificates, a man in the middle."""

import os
import random

import pytest

from codec.torch.network.mesh import Mesh
from support.meshes import tcp_pair
from support.scenes import MODES, Scene, mode_of
from support.tls import Authority


@pytest.fixture
def two():
    a, b = tcp_pair()
    meshes = Mesh(0, {1: [a]}), Mesh(1, {0: [b]})
    yield meshes
    for mesh in meshes:
        mesh.close()


@pytest.fixture
def hand():
    """Return a mesh, and the socket of rank 1 that a test writes to."""
    a, b = tcp_pair()
    mesh = Mesh(0, {1: [a]})
    with b:
        yield mesh, b
    mesh.close()


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("other"), "another ca")


@pytest.fixture(scope="session")
def seed():
    """Return the seed of random attacks; CODEC_SEED repeats those of an earlier run."""
    return int(os.environ.get("CODEC_SEED") or random.SystemRandom().randrange(1 << 32))


@pytest.fixture
def chance(seed, request):
    """Return a random generator, whose seed pytest prints if the test fails."""
    print(f"CODEC_SEED={seed}")
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture(scope="module")
def scene():
    made = Scene()
    yield made
    made.close()


@pytest.fixture(scope="module", params=MODES)
def mode(request, tmp_path_factory):
    """Return each way to secure connections."""
    return mode_of(request.param, tmp_path_factory.mktemp("certificates"))
