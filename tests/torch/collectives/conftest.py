"""Ranks with tensors on a GPU, for test_cuda_*.py."""

import pytest

from support.cuda_tensors import NCCL, new_group_of_gpus
from support.device import build
from support.ranks import RankPool
from support.tiers import nightly


@pytest.fixture(params=["emulated", pytest.param("real", marks=pytest.mark.gpu)], scope="module")
def kind(request):
    """Kernels compiled for the CPU, or with ``-m gpu`` a GPU."""
    if request.param == "emulated":
        build()  # once, before ranks need it
    return request.param


WAYS = [(2, "host"), (3, "gpus"), nightly((4, "host")), nightly((4, "gpus"))]


@pytest.fixture(scope="package", params=[(2, "gpus"), (4, "gpus")] if NCCL else WAYS)
def ranks(request):
    """Ranks whose frames cross to host memory, or stay on GPUs."""
    size, way = request.param
    with RankPool(size) as ranks:
        if way == "gpus":
            new_group_of_gpus(ranks)
        else:
            ranks.new_group()
        yield ranks


@pytest.fixture(scope="package")
def pair():
    """Two ranks whose frames cross to host memory, which no test may break."""
    with RankPool(2, timeout=5) as ranks:
        ranks.new_group()
        yield ranks


@pytest.fixture
def gpus():
    """Two ranks whose frames stay on GPUs."""
    with RankPool(2, timeout=5) as ranks:
        new_group_of_gpus(ranks)
        yield ranks
