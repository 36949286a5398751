"""codec.integrations.nvflare in real NVFlare filter chains and contexts, and in NVFlare's simulator."""

import json
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import FilterContextKey
from nvflare.apis.fl_constant import FilterKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.utils.task_utils import apply_filters
from nvflare.app_common.decomposers.numpy_decomposers import NumpyArrayDecomposer
from nvflare.app_common.np.np_trainer import NPTrainer
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.fuel.utils import fobs
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType

import codec
from codec.integrations.nvflare import KINDS, FrameFilter
from support.documentation import blocks


class Site:
    """Server or client: our filters in its two chains, as NVFlare creates them from a job, and its run's context."""

    def __init__(self, name, spec="lossless", feedback=True):
        self.manager = FLContextManager(None, name, "job")
        self.filters = {}
        ways = [FilterKey.OUT, FilterKey.IN] if name == "server" else [FilterKey.IN, FilterKey.OUT]
        for chain, way in zip(("task_data", "task_result"), ways, strict=True):
            f = FrameFilter(spec, feedback)
            f.set_prop(FilterContextKey.CHAIN_TYPE, chain)
            self.filters[chain] = {f"train/{way}": [f]}, way

    def apply(self, chain, shareable, peer):
        context = self.manager.new_context()
        other = FLContext()
        other.put("__identity_name__", peer, private=False, sticky=False)
        context.set_peer_context(other)
        filters, way = self.filters[chain]
        return apply_filters("x", shareable, context, filters, "train", way)


def sent(shareable):
    """Serialize a shareable; return the one that the receiver deserializes, and the size in bytes."""
    dxo = from_shareable(shareable)
    data = fobs.dumps(dxo.to_dict())
    d = fobs.loads(data)
    return DXO(d["kind"], d["data"], d["meta"]).to_shareable(), len(data)


def weights(seed=0):
    rng = np.random.default_rng(seed)
    return {"weight": rng.standard_normal((64, 32)).astype(np.float32), "bias": np.zeros(32), "count": np.array(3)}


def exchange(server, client, name, model, train, kind=DataKind.WEIGHTS, tamper=None):
    """Send a task; return the result that the server's workflow receives, and the size of its message in bytes."""
    task, _ = sent(server.apply("task_data", DXO(DataKind.WEIGHTS, model).to_shareable(), name))
    received = from_shareable(client.apply("task_data", task, "server")).data
    result = DXO(kind, train(received), {"NUM_STEPS_CURRENT_ROUND": 7}).to_shareable()
    result, size = sent(client.apply("task_result", result, "server"))
    if tamper:
        dxo = from_shareable(result)
        tamper(dxo.data, dxo.meta)
        result = dxo.to_shareable()
    return from_shareable(server.apply("task_result", result, name)), size


def step(model):
    model["weight"] += np.float32(0.01)  # in place, as in NVFlare's own trainers
    model["bias"] = model["bias"] + 1
    return model


@pytest.mark.parametrize("spec", ["lossless", "Delta()"])
def test_lossless_results_are_exact_and_other_entries_are_kept(spec):
    model = weights() | {"note": "text"}
    dxo, _ = exchange(Site("server"), Site("one", spec), "one", model, step)
    assert dxo.data_kind == DataKind.WEIGHTS
    assert dxo.meta["NUM_STEPS_CURRENT_ROUND"] == 7
    assert KINDS not in dxo.meta
    expected = step({name: x.copy() if name != "note" else x for name, x in model.items()})
    assert dxo.data["note"] == "text"
    for name in ("weight", "bias", "count"):
        np.testing.assert_array_equal(dxo.data[name], expected[name], strict=True)
    np.testing.assert_array_equal(model["weight"], weights()["weight"])  # the server's own copy did not change


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        ((), ""),
        (("server", "task_data"), "no FrameFilter is an output filter of the other site"),
        (("client", "task_data"), "no FrameFilter is an input filter of this client"),
        (("client", "task_result"), "no FrameFilter is an output filter of the other site"),
    ],
)
def test_a_missing_filter_is_logged_once(missing, why, caplog):
    fobs.register(NumpyArrayDecomposer)  # arrays that no filter encodes
    sites = {"server": Site("server"), "client": Site("one", "Quantize(4)")}
    if missing:
        sites[missing[0]].filters[missing[1]] = {}, ""
    model = {"weight": weights()["weight"]}
    for _ in range(2):
        if missing == ("client", "task_data"):  # without the filter, frames would be refused by the trainer
            client = sites["client"].apply("task_result", DXO(DataKind.WEIGHTS, model).to_shareable(), "server")
            assert KINDS not in from_shareable(client).meta or not from_shareable(client).meta[KINDS]
            continue
        refused = pytest.raises(codec.FrameError, match="no FrameFilter is an output filter of this server's tasks")
        with refused if missing == ("server", "task_data") else nullcontext():
            exchange(sites["server"], sites["client"], "one", model, lambda x: x)
    assert [r.message.partition("because ")[2] for r in caplog.records if r.name == "codec.nvflare"] == [why] * bool(
        why
    )


@pytest.mark.parametrize("spec", ["Quantize(4)", "TopK()", "Sign(group_size=1024)", "Float8()", "Delta()"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_scalars_and_empty_arrays_arrive(spec, library):
    model = {
        "scale": np.array(2.6592, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "one": np.ones(1, np.float32),
    }
    if library == "torch":
        model = {name: torch.from_numpy(x) for name, x in model.items()}
    server, client = Site("server"), Site("one", spec)

    def moved(values):
        return {name: x + 0.01 if torch.is_tensor(x) else np.asarray(x + 0.01, x.dtype) for name, x in values.items()}

    for _ in range(3):
        dxo, _ = exchange(server, client, "one", model, moved)
        for name, x in model.items():
            assert (type(dxo.data[name]), dxo.data[name].shape) == (type(x), x.shape)
            np.testing.assert_allclose(np.asarray(dxo.data[name]), np.asarray(x) + 0.01, atol=0.01)
        model = dxo.data


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_feedback_sends_what_earlier_results_left_out(kind):
    server, client = Site("server"), Site("one", "Quantize(4)")
    change = np.random.default_rng(1).standard_normal((64, 32)).astype(np.float32)
    total = np.zeros((64, 32))
    for _ in range(20):
        model = {"weight": weights()["weight"]}

        def train(received):
            return {"weight": received["weight"] + change if kind == DataKind.WEIGHTS else change}

        dxo, size = exchange(server, client, "one", model, train, kind)
        assert size < change.nbytes / 4
        total += dxo.data["weight"] - (model["weight"] if kind == DataKind.WEIGHTS else 0)
    one = codec.decode(codec.encode(change, codec.Quantize(4)))
    assert np.abs(total / 20 - change).max() < 0.2 * np.abs(one - change).max()


HOSTILE = {
    "truncated": lambda data, meta: data.update(weight=data["weight"][:-1]),
    "empty": lambda data, meta: data.update(weight=b""),
    "no bytes": lambda data, meta: data.update(weight=[1, 2]),
    "another shape": lambda data, meta: data.update(weight=codec.encode(np.zeros(1 << 20, np.float32))),
    "another name": lambda data, meta: (data.update(more=data["weight"]), meta[KINDS].update(more="codec.frame")),
    "another kind": lambda data, meta: meta[KINDS].update(weight="codec.other"),
    "kinds are no dict": lambda data, meta: meta.update({KINDS: [1]}),
}


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("spec", ["lossless", "Delta()", "Quantize(4)"])
def test_hostile_result_is_an_error_of_its_task(how, spec):
    """The server's filter raises for a hostile result, and accepts the next result of the same client."""
    server, client = Site("server"), Site("one", spec)
    with pytest.raises(codec.FrameError):
        exchange(server, client, "one", weights(), step, tamper=HOSTILE[how])
    dxo, _ = exchange(server, client, "one", weights(), step)
    np.testing.assert_allclose(dxo.data["bias"], 1, rtol=1e-6)


def test_difference_to_an_earlier_task_is_refused():
    server, client = Site("server"), Site("one", "Quantize(4)")
    late = []
    exchange(server, client, "one", weights(), step, tamper=lambda data, meta: late.append(dict(data)))
    with pytest.raises(codec.StateError, match="not one from the arrays of this round"):
        exchange(server, client, "one", weights(1), step, tamper=lambda data, meta: data.update(late[0]))


def test_clients_have_bases_of_their_own():
    """If clients received different models, the server adds each client's difference to the model that it was sent."""
    server, one, two = Site("server"), Site("one", "Quantize(4)"), Site("two", "Quantize(4)")
    task_one, _ = sent(server.apply("task_data", DXO(DataKind.WEIGHTS, weights(1)).to_shareable(), "one"))
    exchange(server, two, "two", weights(2), step)
    received = from_shareable(one.apply("task_data", task_one, "server")).data
    result, _ = sent(one.apply("task_result", DXO(DataKind.WEIGHTS, step(received)).to_shareable(), "server"))
    found = from_shareable(server.apply("task_result", result, "one")).data["weight"]
    np.testing.assert_allclose(found, weights(1)["weight"] + np.float32(0.01), atol=0.01)


@pytest.mark.parametrize("spec", ["lossless", "Delta()", "Quantize(4)"])
def test_bfloat16_tensors_of_torch_come_back_as_such(spec):
    model = {"weight": torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()}
    dxo, size = exchange(
        Site("server"), Site("one", spec), "one", model, lambda received: {"weight": received["weight"] * 1.0625}
    )
    assert dxo.data["weight"].dtype == torch.bfloat16
    torch.testing.assert_close(dxo.data["weight"], model["weight"] * 1.0625, rtol=0, atol=0.06)
    assert size < 64 * 32 * 2


def test_job_has_the_arguments_of_filters(tmp_path):
    job = FedJob("job", min_clients=1)
    job.to(FrameFilter("Quantize(4)", feedback=False), "site-1", filter_type=FilterType.TASK_RESULT, tasks=["train"])
    job.to(NPTrainer(), "site-1", tasks=["train"])
    job.to(FedAvg(num_clients=1, num_rounds=1), "server")
    job.export_job(str(tmp_path))
    (config,) = tmp_path.rglob("config_fed_client.*")
    (chain,) = json.loads(config.read_text())["task_result_filters"]
    assert chain["filters"] == [
        {"path": "codec.integrations.nvflare.FrameFilter", "args": {"spec": "Quantize(4)", "feedback": False}}
    ]


CLIENT = """
import numpy as np
import nvflare.client as flare

flare.init()
while flare.is_running():
    model = flare.receive()
    rng = np.random.default_rng(0)
    params = {k: np.asarray(v) + rng.standard_normal(np.shape(v)).astype(np.float32) for k, v in model.params.items()}
    flare.send(flare.FLModel(params=params, meta={"NUM_STEPS_CURRENT_ROUND": 1}))
"""
JOB = """
import numpy as np
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.recipe import SimEnv

if __name__ == "__main__":
    model = np.zeros((60, 100), np.float32)
    recipe = NumpyFedAvgRecipe(name="job", model=model, min_clients=2, num_rounds=1, train_script="client.py")
    compress(recipe)
    recipe.execute(SimEnv(num_clients=2, workspace_root="."))
"""


def test_simulator_trains_with_the_filters_of_the_page(tmp_path):
    """Clients in the simulator train equally, so their mean must equal one decoded Quantize(4) frame."""
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "job.py").write_text("\n".join(blocks("NVFlare", "docs/guides/federated-learning.md")) + JOB)
    done = subprocess.run(
        [sys.executable, "-P", "job.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.rglob("server.npy")
    change = np.random.default_rng(0).standard_normal((60, 100)).astype(np.float32)
    frame = codec.encode(change, codec.Quantize(4), stream=codec.digest(change))
    np.testing.assert_allclose(np.load(path), codec.decode(frame), atol=1e-6)
