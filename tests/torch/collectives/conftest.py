"""Fixtures for test_cuda_*.py: rank processes whose tensors are on a GPU, emulated or real."""

import pytest

from support.cuda_tensors import NCCL, new_group_of_gpus
from support.device import build
from support.ranks import RankPool
from support.tiers import nightly


@pytest.fixture(params=["emulated", pytest.param("real", marks=pytest.mark.gpu)], scope="module")
def kind(request):
    """Return "emulated" (kernels compiled for the CPU) or, with ``-m gpu``, "real"."""
    if request.param == "emulated":
        build()  # compile once, before ranks need the kernels
    return request.param


WAYS = [(2, "host"), (3, "gpus"), nightly((4, "host")), nightly((4, "gpus"))]


@pytest.fixture(scope="package", params=[(2, "gpus"), (4, "gpus")] if NCCL else WAYS)
def ranks(request):
    """Return two ranks: once frames are copied to host memory, once they stay on GPUs."""
    size, way = request.param
    with RankPool(size) as ranks:
        if way == "gpus":
            new_group_of_gpus(ranks)
        else:
            ranks.new_group()
        yield ranks


@pytest.fixture(scope="package")
def pair():
    """Return two ranks whose frames are copied to host memory. Tests share the ranks, and must leave them usable."""
    with RankPool(2, timeout=5) as ranks:
        ranks.new_group()
        yield ranks


@pytest.fixture
def gpus():
    """Return two ranks whose frames stay on GPUs."""
    with RankPool(2, timeout=5) as ranks:
        new_group_of_gpus(ranks)
        yield ranks
