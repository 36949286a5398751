"""Examples in docstrings and examples/diloco.py run and give the printed results."""

import contextlib
import doctest
import importlib
import io
import os
import pkgutil
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import codec
from codec.torch.group import communicator
from support.ranks import run_ranks

DILOCO = Path(__file__).parents[2] / "examples/diloco.py"
# Modules whose examples need a framework that is not installed here. tests/frameworks tests them.
FRAMEWORKS = {
    f"codec.integrations.{name}"
    for name in (
        *("accelerate", "flower", "flower_records", "lightning", "lmcache", "numcodecs", "nvflare", "sglang"),
        *("torchft", "transformers", "verl", "verl_shards", "vllm", "vllm_tier", "vllm_trainer", "zarr"),
    )
}
MODULES = ["codec", *(m.name for m in pkgutil.walk_packages(codec.__path__, "codec.") if not m.name.endswith("_cffi"))]
MODULES = [name for name in MODULES if name not in FRAMEWORKS]
# public functions and classes, each of whose docstrings must have an example
SHOWN = [
    "encode",
    "decode",
    "accumulate",
    "reduce",
    "sum_codes",
    "bound",
    "inspect",
    "encode_many",
    "segments",
    "advise",
    "engines",
    "warmup",
]


@pytest.fixture
def single_rank_group(request, tmp_path, monkeypatch):
    """Create a Gloo group of one rank, this process, for the examples of codec.torch."""
    if not request.node.callspec.params["name"].startswith("codec.torch"):
        yield
        return
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    communicator.close_communicator(dist.group.WORLD, cancel=False)
    dist.destroy_process_group()


@pytest.mark.usefixtures("single_rank_group")
@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    globs = {"codec": codec, "tempfile": tempfile, "np": np, "torch": torch, "metrics": codec.optimizers}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs=globs, optionflags=flags).failed == 0


def test_public_functions_have_examples():
    finder = doctest.DocTestFinder(recurse=False)
    for name in SHOWN:
        (found,) = finder.find(getattr(codec, name), name)
        assert found.examples, name
    for member in (codec.Codebook, codec.ErrorFeedback, codec.CodebookRefresher, codec.optimizers.from_optimizer):
        assert any(t.examples for t in finder.find(member, "it"))


def _diloco(rank, size):
    train = runpy.run_path(str(DILOCO))["train"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        results = train("float32", 3, 12), train("Quantize(4)", 3, 12)
    return *results, printed.getvalue()


@pytest.mark.nightly
def test_diloco_reaches_the_uncompressed_loss_with_a_seventh_of_the_bytes():
    for rank, (plain, compressed, printed) in enumerate(run_ranks(2, _diloco)):
        assert compressed[0] == pytest.approx(plain[0], rel=0.02)
        assert plain[0] < 1.9  # training starts at loss 2.1
        assert 6.5 < plain[1] / compressed[1] < 7.5
        assert ("Quantize(4): outer step 3/3, loss" in printed) == (rank == 0)


@pytest.mark.nightly
def test_sites_of_the_example_of_rounds_end_with_equal_parameters():
    command = [sys.executable, str(DILOCO.with_name("rounds.py")), "--merges", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    ends = re.findall(r"(\w+): .* 20 rounds, .* parameters (\w{8})", done.stdout)
    assert sorted(site for site, _ in ends) == ["lima", "oslo", "paris", "tokyo"]
    assert len({digest for _, digest in ends}) == 1
    assert done.stdout.count("oslo starts after") == 2


@pytest.mark.nightly
def test_diloco_runs_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(DILOCO)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment)
    lines = done.stdout.splitlines()[-4:]
    found = [re.search(r"loss ([\d.]+), each rank sent ([\d.]+) MB", line).groups() for line in lines]
    (loss, sent), (loss4, sent4), _, (sparse_loss, sparse_sent) = ([float(x) for x in each] for each in found)
    assert sparse_loss == pytest.approx(loss, rel=0.7)
    assert sparse_sent < sent4 / 5
    assert loss4 == pytest.approx(loss, rel=0.05)
    assert 6.5 < sent / sent4 < 7.5
