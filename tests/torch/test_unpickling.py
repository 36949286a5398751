"""Bytes of other ranks are never unpickled: unpickling runs code that the sender chooses."""

import ast
import contextlib
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import codec
import codec.torch
from support import ddp_training, fsdp_training, local_training, one_bit_adam, parameter_servers
from support.pipelines import BATCH, LOSSLESS, Pipeline
from support.ranks import RankPool

ROOT = Path(codec.__file__).parent
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
OBJECTS = {  # functions of torch.distributed that unpickle what another rank has sent
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


# Files that may import pickle. The unpickler of compose.py accepts only the classes of torch's metadata.
ALLOWED = {"torch/saving/compose.py"}


def unpickling(path):
    """Yield the lines of a file that can unpickle bytes."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [getattr(node, "id", ""), getattr(node, "attr", "")]
        if isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.name.split(".")[0] for alias in node.names] + [(getattr(node, "module", "") or "")]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in OBJECTS:
            names.append(node.value)  # as in getattr(dist, "all_gather_object")
        if set(names) & (MODULES | OBJECTS):
            yield node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            owner, how = (
                getattr(node.func.value, "id", ""),
                {k.arg: getattr(k.value, "value", None) for k in node.keywords},
            )
            safe = {"torch": ("weights_only", True), "np": ("allow_pickle", False), "numpy": ("allow_pickle", False)}
            if owner in safe and how.get(safe[owner][0]) is not safe[owner][1]:
                yield node.lineno


def test_no_module_can_unpickle():
    found = {path.relative_to(ROOT).as_posix(): lines for path in ROOT.rglob("*.py") if (lines := [*unpickling(path)])}
    assert found.keys() == ALLOWED


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from _pickle import loads",
        "dist.all_gather_object(found, mine)",
        'getattr(dist, "broadcast_object_list")(found)',
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file)",
    ],
)
def test_check_finds_each_way_to_unpickle(tmp_path, line):
    (tmp_path / "module.py").write_text(f"{line}\n")
    assert list(unpickling(tmp_path / "module.py")) == [1]


@contextlib.contextmanager
def refused():
    """Make each way to unpickle raise an error."""

    def refuse(*_, **__):
        raise AssertionError("bytes are unpickled")

    c10d = dist.distributed_c10d
    places = [(pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (pickle, "_Unpickler"), (c10d, "_unpickler")]
    places = [(owner, name) for owner, name in places if hasattr(owner, name)]
    kept = [getattr(owner, name) for owner, name in places]
    for owner, name in places:
        setattr(owner, name, refuse)
    try:
        yield
    finally:
        for (owner, name), value in zip(places, kept, strict=True):
            setattr(owner, name, value)


def collectives(rank, size):
    x, out = torch.arange(4000.0), torch.empty(2000)
    for algorithm in ("two_shot", "all_gather", "ring", "raw"):
        codec.torch.all_reduce(x.clone(), codec.Quantize(4), options=codec.options(algorithm=algorithm))
    codec.torch.all_reduce(x.clone(), codec.Ternary(), options=codec.options(algorithm="shared_scale"))
    codec.torch.reduce_scatter(out, x)
    codec.torch.all_gather(x, out)
    codec.torch.all_to_all(torch.empty(4000), x)
    codec.torch.all_to_all_bytes([b"abc"] * size)
    codec.torch.all_to_all_rows(x.view(-1, 4), [500, 500], [500, 500])


def messages(rank, size):
    codec.torch.send(codec.encode(torch.ones(100)), dst=1 - rank, async_op=True)
    codec.decode(codec.torch.recv(src=1 - rank))


def hook(rank, size):
    model = ddp_training.wrapped()
    made = codec.torch.ddp_hook(codec.Quantize(4), feedback=True, refresher=None).register(model)
    ddp_training.train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 2)
    made.load_state_dict(made.state_dict(gather=True))


def fsdp(rank, size):
    model = fully_shard(fsdp_training.small_model())
    made = codec.torch.FsdpReduceScatter(codec.Quantize(4), feedback=True).register(model)
    codec.torch.FsdpAllGather(codec.Quantize(8)).register(model)
    model(fsdp_training.batch(rank)).square().mean().backward()
    made.load_state_dict(made.state_dict(gather=True))


def one_bit(rank, size):
    model = ddp_training.wrapped()
    optimizer = one_bit_adam.registered(model)
    one_bit_adam.take_steps(model, optimizer, rank, 0, 5)
    optimizer.load_state_dict(optimizer.state_dict(gather=True))


def local_steps(rank, size):
    model, optimizer, local = local_training.started(every=2, warmup=2)
    local_training.train(model, optimizer, rank, range(7))
    local.load_state_dict(local.state_dict())
    local_training.train(model, optimizer, rank, range(2))


def average(client, worker, workers):
    client.init(parameter_servers.gradients(worker))
    client.average(0, parameter_servers.gradients(worker), parameter_servers.TERNARY)


def parameter_server(rank, size):
    parameter_servers.serve_or_call(rank, size, 1, average)


def pipeline(rank, size):
    p = Pipeline("GPipe", rank, size, static=True, **LOSSLESS)
    p.step(torch.arange(BATCH))


CALLS = [collectives, messages, hook, fsdp, one_bit, local_steps, parameter_server, pipeline]


def _call(rank, size, call):
    with refused():
        call(rank, size)
        with pytest.raises(AssertionError, match="unpickled"):  # the check works
            dist.all_gather_object([None] * size, rank)


@pytest.fixture(scope="module")
def pair():
    with RankPool(2) as ranks:
        yield ranks


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_ranks_unpickle_nothing(pair, call):
    pair.new_group()
    pair.run(_call, call)
