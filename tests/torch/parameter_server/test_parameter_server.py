"""Parameter servers return bit-exact values in single calls, in training loops and in the example."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.parameter_server.table import server_of
from support.parameter_servers import TERNARY, gradients, raises, run, ternary_mean
from support.tiers import NIGHTLY

EXAMPLE = Path(__file__).parents[3] / "examples/parameter_server.py"
TRAINING = Path(__file__).parents[3] / "bench/training/parameter_server.py"


def _average(client, worker, workers, spec, dtype, steps):
    client.init(gradients(worker, dtype=dtype))
    return [client.average(step, gradients(worker, step, dtype=dtype), spec) for step in range(steps)]


@pytest.mark.parametrize(
    ("servers", "workers", "spec", "dtype"),
    [
        (1, 1, TERNARY, torch.float32),
        (1, 3, codec.Ternary("2bit", clip=2.5, seed=3), torch.float32),
        (2, 2, codec.Ternary("entropy", clip=2.5), torch.bfloat16),
        (3, 1, codec.Ternary("base3", clip=1.0), torch.float16),
        (2, 2, TERNARY, torch.float32),
    ],
)
def test_average_is_the_integer_mean_times_the_scale(pools, servers, workers, spec, dtype):
    steps = 6  # more than the server's max_steps
    found, stats = run(pools(servers + workers), servers, _average, spec, dtype, steps)
    ranks = list(range(servers, servers + workers))
    for step in range(steps):
        every = [gradients(w, step, dtype=dtype) for w in range(workers)]
        for name in every[0]:
            want = ternary_mean([(name, g[name]) for g in every], spec, step, ranks)
            for result in found:
                assert torch.equal(result[step][name], want), (step, name)
                assert result[step][name].dtype == dtype
    assert sum(s.keys for s in stats) >= len(every[0])
    assert all(s.refused == 0 and not s.lost_workers for s in stats)


@pytest.mark.parametrize("spec", [codec.Lossless(), codec.Quantize(8), codec.Float8("mxfp8_e4m3"), "small"])
def test_average_of_other_specs_is_the_mean_of_frames(pools, spec):
    def mean(name):
        frames = []
        for worker, rank in ((0, 1), (1, 2)):
            from codec.torch.network.version import hash64

            stream = hash64("parameter server", 0, rank, name) % (1 << 64)
            frames.append(codec.encode(gradients(worker)[name], spec, stream=stream))
        return torch.as_tensor(codec.reduce(frames, op="mean", like=torch.empty(0)))

    found, _ = run(pools(3), 1, _average, spec, torch.float32, 1)
    for result in found:
        for name, value in result[0].items():
            assert torch.equal(value, mean(name)), name


def _push_and_pull(client, worker, workers):
    x = torch.arange(6.0).reshape(2, 3) * (worker + 1)
    client.init({"a": x, "b": (3,), "c": ()})
    client.push(5, {"a": x})
    client.push(5, {"b": codec.encode(torch.full((3,), worker - 1.0))})
    client.push(5, {"c": torch.tensor(float(worker))}, codec.Float8())
    client.push(9, {"c": torch.tensor(2.0)})  # step 9 is in flight together with step 5
    found = client.pull(5, ["b", "a"]) | client.pull(5, ["c"], reduce="max")
    assert list(found) == ["b", "a", "c"]
    return found, client.pull(9, ["c"])


def test_push_and_pull(pools):
    for found, later in run(pools(3), 1, _push_and_pull)[0]:
        assert torch.equal(found["a"], torch.arange(6.0).reshape(2, 3) * 1.5)
        assert torch.equal(found["b"], torch.full((3,), -0.5))
        assert found["c"] == 1
        assert later["c"] == 2


def _topk(client, worker, workers):
    """Push TopK frames with error feedback for three steps; return sums of means and of gradients, and the residual."""
    spec, left = codec.TopK(1 / 16, chunk=64), np.zeros(1000, np.float32)
    total, given = np.zeros_like(left), np.zeros_like(left)
    client.init({"x": (1000,)})
    for step in range(3):
        x = torch.randn(1000, generator=torch.Generator().manual_seed(10 * step + worker))
        for call in (client.push, client.average):
            with pytest.raises(codec.SpecError, match=r"needs error feedback.*residual="):
                call(step, {"x": x}, spec)
        client.push(step, {"x": codec.encode(x, spec, residual=left, feedback=True)})
        total += client.pull(step, ["x"])["x"].numpy()
        given += x.numpy()
    return total, given, left


def test_frames_of_topk_are_averaged_and_topk_without_residuals_is_refused(pools):
    found, _ = run(pools(3), 1, _topk)
    assert found[0][0].tobytes() == found[1][0].tobytes()
    sent = np.mean([given - left for _, given, left in found], axis=0)
    np.testing.assert_allclose(found[0][0], sent, atol=1e-5)
    assert np.linalg.norm(found[0][2]) > 1


def _unused_and_frozen(client, worker, workers):
    """Run the loop of docs/methods/parameter-server.md with an expert that worker 0 does not use and a frozen layer."""
    torch.manual_seed(0)
    net = torch.nn.ModuleDict({name: torch.nn.Linear(20, 20) for name in ("frozen", "expert", "last")})
    net["frozen"].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    client.init(parameters)
    for step, spec in enumerate((codec.Lossless(), TERNARY)):
        optimizer.zero_grad()
        x = net["frozen"](torch.full((4, 20), worker + 1.0))
        net["last"](x if worker == 0 else net["expert"](x)).square().mean().backward()
        gradients = {name: p.grad for name, p in parameters.items()}
        assert (gradients["expert.weight"] is None) == (worker == 0)
        for name, mean in client.average(step, gradients, spec).items():
            parameters[name].grad = mean
        if step == 0 and worker == 1:
            assert torch.equal(parameters["expert.bias"].grad, gradients["expert.bias"] / 2)
        optimizer.step()
    return [p.tolist() for p in net.parameters()]


def test_gradient_of_none_counts_as_zeros(pools):
    (first, second), (stats,) = run(pools(3), 1, _unused_and_frozen)
    assert first == second
    assert stats.keys == 4


def _numbers_and_integers(client, worker, workers):
    names = {"loss": (), "steps": torch.zeros((), dtype=torch.int64), "codes": torch.zeros(5, dtype=torch.uint8)}
    client.init({**names, "w": (4,)})
    codes = torch.arange(5, dtype=torch.uint8) * (worker + 50)
    frame = torch.frombuffer(bytearray(codec.encode(torch.ones(4), codec.Ternary(scale=2.0))), dtype=torch.uint8)
    client.push(0, {"loss": 0.5 + worker, "steps": (1 << 60) + worker, "codes": codes, "w": frame}, codec.Quantize(4))
    found = client.pull(0, ["loss"]) | client.pull(0, ["steps", "codes"], reduce="max")
    assert client.pull(0, ["w"], reduce="exact_mean")["w"].shape == (4,)
    client.push(1, {"loss": 2, "steps": None, "codes": None})
    with raises(codec.SpecError, "'steps' is int64, and a mean needs floats"):
        client.pull(1, ["steps"])
    for name, value in {"w": 0.5, "steps": 0.5, "codes": torch.ones(5), "loss": "0.5"}.items():
        with raises(codec.ArgumentError, f"'{name}'"):
            client.push(2, {name: value})
    for wrong in (float("inf"), float("nan"), 1 << 63, -1.5):
        with raises(codec.ArgumentError, "cannot hold"):
            client.push(2, {"steps": wrong})
    with raises(codec.ArgumentError, "a mean needs floats"):
        client.average(3, {"codes": codes}, codec.Lossless())
    with raises(codec.ArgumentError, "must be one of float32, bfloat16"):
        client.init({"z": torch.zeros(2, dtype=torch.complex64)})
    return {name: (t.dtype, t.tolist()) for name, t in (found | client.pull(1, ["loss"])).items()}, found["loss"].item()


def test_numbers_and_integers(pools):
    for found, loss in run(pools(3), 1, _numbers_and_integers)[0]:
        assert loss == 1.0
        assert found["loss"] == (torch.float32, 2.0)
        assert found["steps"] == (torch.int64, (1 << 60) + 1)
        assert found["codes"] == (torch.uint8, [0, 51, 102, 153, 204])


def _abandons(client, worker, workers):
    client.init({"a": (4,)})
    client.average(0, {"a": torch.ones(4)}, TERNARY)
    store = dist.distributed_c10d._get_default_store()
    if worker == 1:
        client.abandon(1)
        # Keep the client open: a closed worker is not expected in steps that begin later
        store.wait(["step 1 has failed"])
        return None
    with raises(codec.PeerError, "before it pushed the shared scales in step 1") as raised:
        client.average(1, {"a": torch.ones(4)}, TERNARY)
    store.set("step 1 has failed", "")
    return str(raised.value)


def test_errors_name_no_internal_key(pools):
    (message, _), (stats,) = run(pools(3), 1, _abandons, max_keys=1)
    assert "\0" not in message
    assert "\\x00" not in message
    assert stats.keys == 1


def _many_keys(client, worker, workers, count):
    shapes = {f"key {i}": (i % 5, 3) for i in range(count)}
    client.init(shapes)
    client.init(shapes)
    found = client.average(0, {k: torch.full(s, 1.0 + worker) for k, s in shapes.items()}, codec.Ternary(seed=worker))
    assert all(found[k].shape == s for k, s in shapes.items())
    return [found[k].unique().tolist() for k in shapes][:3], client.stats()


def test_thousand_keys(pools):
    found, stats = run(pools(4), 2, _many_keys, 1000)
    assert found[0][0] == found[1][0]
    # Requests to two servers: init, init, scales, and four that push and pull
    assert found[0][1].requests == 2 * (1 + 1 + 1 + 4)
    assert sum(s.keys for s in stats) == 1000
    assert min(s.keys for s in stats) > 400


def test_server_of_a_key_is_computed_from_its_name():
    assert [server_of(n, [3, 5, 8]) for n in ("fc.weight", "conv1.bias", "\u00fc")] == [5, 8, 5]


def _example(rank, size, servers, name):
    run = runpy.run_path(str(EXAMPLE))["run"]
    return run(name, servers, 200 if NIGHTLY else 40, 0)


@pytest.mark.parametrize("name", ["ternary", "lossless"])
def test_example_learns_with_few_bits(pools, name):
    results = pools(3).run(_example, 1, name)[1:]
    assert results[0]["loss"] == results[1]["loss"]  # workers have bit-identical models
    assert results[0]["loss"] < 3.7  # the loss is 5.5 before the first step
    if name == "ternary":
        assert results[0]["up"] <= 1.9
        assert results[0]["down"] <= 3  # bits per value of a sum of two workers: ceil(log2(2 * 2 + 1))


@pytest.mark.nightly
@pytest.mark.parametrize("start", [[], ["-m", "torch.distributed.run", "--nproc-per-node", "3"]])
def test_example_runs_as_a_program(start):
    command = [sys.executable, *start, str(EXAMPLE), "--steps", "20", *([] if start else ["--processes", "3"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    assert re.findall(r"^(\w+): held-out loss", done.stdout, re.MULTILINE) == ["ternary", "float8", "lossless"]


def _digits(rank, size, name, seed):
    return runpy.run_path(str(TRAINING))["train"](name, 1, seed, 400)


@pytest.mark.nightly
def test_ternary_reaches_the_accuracy_of_float32_on_digits(pools):
    pytest.importorskip("sklearn", reason="the digits are those of scikit-learn (pip install 'codec[bench]')")
    accuracies = {"float32": [], "Ternary, clip 2.5": []}
    pool = pools(3)
    for seed in range(3):
        for name, found in accuracies.items():
            pool.start(_digits, name, seed)
            found.append(pool.results()[1]["accuracy"])
    float32, ternary = (sum(found) / len(found) for found in accuracies.values())
    assert float32 > 95
    assert ternary > float32 - 1
