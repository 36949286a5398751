"""Fixtures: connected meshes in one process, a mesh whose peer is a socket of the test, and issuers of certificates."""

import pytest

from codec.torch.network.mesh import Mesh
from support.meshes import tcp_pair
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
