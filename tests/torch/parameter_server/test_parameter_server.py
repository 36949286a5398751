"""Parameter servers: values to the bit, errors for the one who asked, lost workers and servers."""

import contextlib
import itertools
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.parameter_server import messages, sums
from codec.torch.parameter_server.table import server_of
from support import parameter_servers
from support.faults import KILLED, die
from support.parameter_servers import SOON, gradients, ternary_mean
from support.ranks import RankPool
from support.tiers import NIGHTLY

EXAMPLE = Path(__file__).parents[3] / "examples/parameter_server.py"
TRAINING = Path(__file__).parents[3] / "bench/training/parameter_server.py"
TERNARY = codec.Ternary("base3")


@pytest.fixture(scope="module")
def pools():
    """Return pools of ranks by size, each with a group."""
    made = {}

    def pool(size):
        if size not in made:
            made[size] = RankPool(size, timeout=SOON).__enter__()
        made[size].new_group()
        return made[size]

    yield pool
    for each in made.values():
        each.__exit__()


def run(pool, servers, function, *args, **how):
    """Return the results of the workers and those of the servers."""
    from functools import partial

    found = pool.run(partial(parameter_servers.run, **how), servers, function, *args)
    return found[servers:], found[:servers]


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
    steps = 6  # more than max_steps
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
    client.push(9, {"c": torch.tensor(2.0)})  # a second step in flight
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
    """Push frames of TopK, made with residuals, in three steps; return the sums of means, gradients and residuals."""
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
    """The loop of docs/methods/parameter-server.md; worker 0 does not use an expert, and a layer is frozen."""
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
    assert client.pull(0, ["w"], reduce="decode_average")["w"].shape == (4,)
    client.push(1, {"loss": 2, "steps": None, "codes": None})
    with raises(codec.SpecError, "'steps': integers have no mean in int64"):
        client.pull(1, ["steps"])
    for name, value in {"w": 0.5, "steps": 0.5, "codes": torch.ones(5), "loss": "0.5"}.items():
        with raises(codec.ArgumentError, f"'{name}'"):
            client.push(2, {name: value})
    for wrong in (float("inf"), float("nan"), 1 << 63, -1.5):
        with raises(codec.ArgumentError, "cannot hold"):
            client.push(2, {"steps": wrong})
    with raises(codec.ArgumentError, "has no mean"):
        client.average(3, {"codes": codes}, codec.Lossless())
    with raises(codec.ArgumentError, "keys are float32, bfloat16"):
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
        store.wait(["step 1 has failed"])  # a worker that has closed its client takes no part in later steps
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
    assert found[0][1].requests == 2 * (1 + 1 + 1 + 4)  # init twice, scales once, then push and pull twice
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
    assert results[0]["loss"] == results[1]["loss"]  # workers have the same model, to the bit
    assert results[0]["loss"] < 3.7  # 5.5 before the first step
    if name == "ternary":
        assert results[0]["up"] <= 1.9
        assert results[0]["down"] <= 3  # ceil(log2(2 * 2 + 1))


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


# Errors for the one who asked


def raises(error, match):
    return pytest.raises(error, match=match)


def _errors(client, worker, workers):
    x = {"a": torch.ones(4), "b": torch.ones(2, 2)}
    client.init(x)
    if worker == 0:
        with raises(codec.ArgumentError, "was initialized as float32 of shape"):
            client.init({"a": (5,)})
        with raises(codec.ArgumentError, "was initialized as float32 of shape"):
            client.init({"new": (5,), "a": torch.ones(4, dtype=torch.bfloat16)})
        with raises(codec.StateError, "'c' is not initialized"):
            client.push(0, {"c": torch.ones(4)})
        with raises(codec.StateError, "'c' is not initialized"):
            client.pull(0, ["c"])
        with raises(codec.StateError, "'new' is not initialized"):
            client.average(0, {"new": torch.ones(5)}, TERNARY)
        with raises(codec.ArgumentError, "initialized as float32 of shape"):
            client.push(1, {"a": torch.ones(5)})
        with raises(codec.ArgumentError, r"'a' is float32 of shape \(5,\)|frame of 'a'"):
            client.push(1, {"a": codec.encode(torch.ones(5))})
        with raises(codec.ArgumentError, "frame of 'a' is bfloat16"):
            client.push(1, {"a": codec.encode(torch.ones(4, dtype=torch.bfloat16))})
        with raises(codec.FrameError, "'a'"):
            client.push(1, {"a": b"no frame"})
        damaged = bytearray(codec.encode(torch.ones(4)))
        damaged[-1] ^= 1
        with raises(codec.FrameError, "'a'"):
            client.push(1, {"b": codec.encode(torch.ones(2, 2)), "a": damaged})
        with raises(codec.StateError, "before it has pushed"):
            client.pull(1, ["a"])
        with raises(codec.ArgumentError, "step"):
            client.push(-1, x)
        with raises(codec.ArgumentError, "reduce"):
            client.pull(1, ["a"], reduce="sum")
        with raises(codec.ArgumentError, "twice"):
            client.pull(1, ["a", "a"])
        with raises(codec.SpecError, "leave out scale"):
            client.average(1, x, codec.Ternary(scale=2.0))
        with raises(codec.SpecError, "preset"):
            client.average(1, x, "tiny")
    client.push(1, {"a": torch.ones(4)})
    with raises(codec.StateError, "has pushed 'a' in step 1 before"):
        client.push(1, {"b": torch.ones(2, 2), "a": torch.ones(4)})
    client.push(1, {"b": torch.ones(2, 2)})  # the refused push has stored nothing
    client.pull(1, ["a"])
    with raises(codec.StateError, "has pulled 'a' in step 1 before"):
        client.pull(1, ["a"])
    client.pull(1, ["b"])
    with raises(codec.SpecError, "decode_average needs Ternary frames with one scale"):
        client.push(2, x)
        client.pull(2, ["a"], reduce="decode_average")
    spec = codec.Ternary(scale=1.0 + worker)
    client.push(3, x, spec)
    with raises(codec.SpecError, "'a': decode_average needs Ternary frames with one scale"):
        client.pull(3, ["a"], reduce="decode_average")
    return client.average(4, x, TERNARY)["b"]


def test_wrong_requests_are_errors_for_the_worker_that_sent_them(pools):
    found, stats = run(pools(3), 1, _errors)
    assert torch.equal(found[0], found[1])
    assert stats[0].refused > 8


def _limits(client, worker, workers):
    with raises(codec.ArgumentError, "more than the 3"):
        client.init({str(i): (1,) for i in range(4)})
    with raises(codec.ArgumentError, "the maximum of this server is 400"):
        client.init({"large": (101,)})
    client.init({"a": (100,), "b": (1,)})
    if worker == 0:
        for step in range(2):
            client.push(step, {"a": torch.ones(100)})
        with raises(codec.StateError, "has 2 steps in flight"):
            client.push(2, {"a": torch.ones(100)})
        dist.send(torch.ones(1), 2)
    else:
        dist.recv(torch.ones(1), 1)
        for step in range(2):
            client.push(step, {"a": torch.ones(100)})
    client.pull(0, ["a"])
    client.pull(1, ["a"])
    client.push(2, {"a": torch.ones(100)})
    client.pull(2, ["a"])
    with raises(codec.StateError, "step 0"):
        client.push(0, {"b": torch.ones(1)})


def test_limits_of_a_server(pools):
    _, (stats,) = run(pools(3), 1, _limits, max_keys=3, max_key_nbytes=400, max_steps=2)
    assert stats.in_flight_nbytes == 0


def _memory(client, worker, workers):
    client.init({"a": (1000,)})
    for step in range(50):
        client.average(step, {"a": torch.randn(1000)}, codec.Lossless())


def test_frames_are_freed_when_all_workers_have_pulled(pools):
    _, (stats,) = run(pools(3), 1, _memory)
    assert stats.in_flight_nbytes == 0
    assert stats.steps == 50
    assert stats.steps_in_flight == 0


def _nonfinite(client, worker, workers, spec):
    x = {"a": torch.ones(4), "b": torch.ones(3)}
    client.init(x)
    wrong = x | {"b": torch.tensor([1.0, float("nan"), 2.0])} if worker == 1 else x
    begin = time.monotonic()
    with raises(codec.CodecError, "NaN or Inf") as raised:
        client.average(0, wrong, spec)
    assert time.monotonic() - begin < SOON
    assert raised.value.code == codec.Status.NONFINITE
    return type(raised.value).__name__, client.average(1, x, spec)["b"].tolist()


@pytest.mark.parametrize("spec", [TERNARY, codec.Quantize(4)])
def test_nan_on_one_worker_is_an_error_on_all(pools, spec):
    found, _ = run(pools(4), 2, _nonfinite, spec)
    assert found == [("PeerError", [1.0] * 3), ("ArgumentError", [1.0] * 3)]


def _late(client, worker, workers):
    """Worker 1 pushes after the timeout of worker 0."""
    x = {"a": torch.ones(4)}
    client.init(x)
    if worker == 0:
        client.push(0, x)
        with raises(codec.PeerError, r"worker 2 was too late \(1 s\) before it pushed 'a' in step 0"):
            client.pull(0, ["a"])
        alone = client.average(1, x, TERNARY)["a"].tolist()  # worker 1 does not take part
        dist.send(torch.ones(1), 2)
    else:
        dist.recv(torch.ones(1), 1)
        with raises(codec.StateError, "worker 2 was too late"):
            client.push(0, x)
        with raises(codec.StateError, "step 1 has begun without worker 2"):
            client.push(1, x)
        alone = None
    dist.barrier(workers_group(workers))
    return alone, client.average(2, {"a": torch.full((4,), float(worker))}, codec.Lossless())["a"].tolist()


_groups = {}


def workers_group(workers):
    return _groups["workers"]


def _make_groups(rank, size, servers):
    _groups["workers"] = dist.new_group(list(range(servers, size)))


def test_late_worker_is_refused_and_takes_part_in_later_steps(pools):
    pool = pools(3)
    pool.run(_make_groups, 1)
    found, _ = run(pool, 1, _late, timeout=1)
    assert found == [([1.0] * 4, [0.5] * 4), (None, [0.5] * 4)]


# Lost workers and servers


def training(client, worker, workers, victim, point, steps=6):
    """Average in steps; the victim dies before request number `point`. Return the mean or error of each step."""
    links = client._session.links
    count = 0
    send = links._try

    def counted(server, lost, call):
        nonlocal count
        if worker == victim and count == point:
            die()
        count += 1
        return send(server, lost, call)

    links._try = counted
    client.init(gradients(worker))
    found = []
    for step in range(steps):
        begin = time.monotonic()
        try:
            mean = client.average(step, gradients(worker, step), TERNARY)
            found.append([mean[k].tolist() for k in sorted(mean)])
        except codec.PeerError:
            found.append("PeerError")
        assert time.monotonic() - begin < SOON
    return found, count


def _killed(rank, size, servers, victim, point):
    ranks, options = list(range(servers)), codec.options(timeout=SOON)
    if rank in ranks:
        server = codec.torch.ParameterServer(ranks, list(range(servers, size)), options=options)
        server.serve()
        return server.stats().lost_workers
    with codec.torch.ParameterClient(ranks, options=options) as client:
        return training(client, rank - servers, size - servers, victim, point)


@pytest.mark.parametrize("servers", [1, 2])
def test_worker_that_dies_leaves_the_others_in_agreement(servers):
    """The living workers all raise in the same steps, get the same bits in the others, and end all steps."""
    points = 60 if NIGHTLY else 5  # five of each parameter: ten fault points
    with RankPool(servers + 3, timeout=SOON) as pool:
        pool.new_group()
        total = pool.run(_killed, servers, 2, -1)[servers + 2][1]
        failed = 0
        for i in range(points):
            pool.new_group()
            point = i * (total - 1) // (points - 1)
            pool.start(_killed, servers, 2, point)
            first, second = (f for f, _ in pool.results([servers, servers + 1]))
            assert first == second, point
            # Each server notices the loss by itself. A step that began there before that fails, and no later one: a
            # worker that waits in the step on this server gets an error only when the server has noticed. The step that
            # fails on one server may be an earlier one than that which fails on another (protocol/point-to-point.md,
            # section 2.4).
            assert first.count("PeerError") <= servers, point
            failed += first.count("PeerError")
            assert all(list(lost) == [servers + 2] for lost in pool.results(range(servers))), point
            assert pool.results([servers + 2]) == [KILLED]
            pool.replace(servers + 2)
        assert failed


def _server_dies(rank, size, point):
    ranks, options = [0, 1], codec.options(timeout=SOON)
    if rank in ranks:
        server = codec.torch.ParameterServer(ranks, [2, 3], options=options)
        if rank == 1:
            answer, count = server._perform, 0

            def counted(*args):
                nonlocal count
                if count == point:
                    die()
                count += 1
                return answer(*args)

            server._perform = counted
        with pytest.raises(codec.PeerError, match="no worker is left"):
            server.serve()
        return None
    begin, done = time.monotonic(), []

    def train():
        with codec.torch.ParameterClient(ranks, options=options) as client:
            client.init(gradients(rank))
            for step in range(4):
                done.append(client.average(step, gradients(rank, step), TERNARY)["layer0.weight"].tolist())

    with pytest.raises(codec.PeerError, match=r"server 1|rank 1 cannot be reached"):
        train()
    assert time.monotonic() - begin < SOON
    return done


@pytest.mark.parametrize("point", range(0, 14, 1 if NIGHTLY else 6))
def test_server_that_dies_is_an_error_for_all_workers(point):
    with RankPool(4, timeout=SOON) as pool:
        pool.new_group()
        pool.start(_server_dies, point)
        found = pool.results([0, 2, 3])
        assert abs(len(found[1]) - len(found[2])) <= 1  # the server may die between two replies
        assert all(a == b for a, b in zip(found[1], found[2], strict=False))
        assert pool.results([1]) == [KILLED]


def _train_for_ever(client, x):
    for step in itertools.count():
        client.average(step, x, TERNARY)


def _interrupted(rank, size, where):
    options = codec.options(timeout=SOON)
    if rank == 0:
        server = codec.torch.ParameterServer([0], [1, 2], options=options)
        if where == "server":
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                server.serve()
            with pytest.raises(codec.StateError, match="new ParameterServer"):
                server.serve()
            return None
        server.serve()
        return list(server.stats().lost_workers)
    client = codec.torch.ParameterClient([0], options=options)
    x = {"a": torch.ones(4)}
    client.init(x)
    if where == "worker" and rank == 1:
        client.push(0, x)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            client.pull(0, ["a"])
        with pytest.raises(codec.StateError, match="client is closed"):
            client.pull(0, ["a"])
        again = codec.torch.ParameterClient([0], options=options)  # takes part in later steps
        again.init(x)
        dist.send(torch.ones(1), 2)
        found = again.average(5, x, codec.Lossless())["a"].tolist()
        again.close()
        return found
    if where == "worker":
        dist.recv(torch.ones(1), 1)
        found = client.average(5, x, codec.Lossless())["a"].tolist()
        client.close()
        return found
    with pytest.raises(codec.PeerError, match="server 0"):
        _train_for_ever(client, x)
    return None


@pytest.mark.parametrize("where", ["server", "worker"])
def test_ctrl_c_closes_connections_and_serving_goes_on(pools, where):
    found = pools(3).run(_interrupted, where)
    assert found == ([None] * 3 if where == "server" else [[], [1.0] * 4, [1.0] * 4])


def _missing(rank, size):
    """Worker 2 never connects."""
    options = codec.options(timeout=1)
    if rank == 0:
        server = codec.torch.ParameterServer([0], [1, 2], options=options)
        server.serve()
        return None
    if rank == 2:
        return None
    with codec.torch.ParameterClient([0], options=options) as client:
        x = {"a": torch.ones(4)}
        client.init(x)
        client.push(0, x)
        with pytest.raises(codec.PeerError, match="worker 2"):
            client.pull(0, ["a"])
        time.sleep(0.1)
        return client.average(1, x, TERNARY)["a"].tolist()


def test_worker_that_never_connects_is_left_behind(pools):
    assert pools(3).run(_missing)[1] == [1.0] * 4


def _arguments(rank, size):
    if rank == 1:  # rank 0 has no port yet
        with pytest.raises(codec.PeerError, match="in time"):
            codec.torch.ParameterClient([0], options=codec.options(timeout=0.1))
    dist.barrier()
    for servers, workers in (([], [1]), ([0], []), ([0, 0], [1]), ([0], [0, 1]), ([0], [2]), ([1], [0]), ("0", [1])):
        if rank == 0:
            with pytest.raises(codec.ArgumentError):
                codec.torch.ParameterServer(servers, workers)
    for limits in (dict(max_keys=0), dict(max_steps=0), dict(max_key_nbytes=-1), dict(options=3)):
        with pytest.raises(codec.ArgumentError):
            codec.torch.ParameterServer([rank], [1 - rank], **limits)
    for servers in ([], [rank], [2], [1 - rank, 1 - rank], 0):
        with pytest.raises(codec.ArgumentError):
            codec.torch.ParameterClient(servers)


def test_wrong_arguments_of_servers_and_clients_are_rejected(pools):
    pools(2).run(_arguments)


# Messages


def _hostile(rank, size):
    """Worker 1 sends bytes by hand; the server reports errors, and goes on with worker 2."""
    from codec.torch.network.endpoint import endpoint_of

    if rank == 0:
        limits = {"max_keys": 10, "max_key_nbytes": 1 << 16}  # flipped bytes may register keys; requests stay short
        server = codec.torch.ParameterServer([0], [1, 2], **limits, options=codec.options(timeout=SOON))
        server.serve()
        return server.stats()
    if rank == 2:
        with codec.torch.ParameterClient([0], options=codec.options(timeout=SOON)) as client:
            client.init({"a": (4,)})
            dist.barrier(_groups["workers"])
            dist.barrier(_groups["workers"])
            for step in itertools.count(1000):
                try:
                    return client.average(step, {"a": torch.ones(4)}, codec.Lossless())["a"].tolist()
                except codec.PeerError:  # the server has not yet noticed that worker 1 is gone
                    assert step < 1100
    dist.barrier(_groups["workers"])
    link = endpoint_of(dist.group.WORLD).connect(0, messages.TAG, SOON)

    def ask(*parts):
        link.send(parts, SOON)
        return link.receive(1 << 20, SOON).tobytes()

    rng = np.random.default_rng(0)
    good = {
        "init": messages.init_request([messages.Key("a", "float32", (4,))]).parts[0],
        "push": b"".join(messages.request(messages.PUSH, 7, [0], [codec.encode(torch.ones(4))]).parts),
        "abandon": messages.request(messages.ABANDON, 9).parts[0],
    }
    head = messages._REQUEST.pack
    wrong = [
        b"",
        b"x",
        head(99, 0, 0, 0, 0),
        head(messages.PULL, 99, 0, 1, 0) + bytes(4),
        head(messages.PULL, 0, 0, 1 << 31, 0),
        head(messages.PUSH, 0, 0, 1, 3) + bytes(4) + (1 << 63).to_bytes(8, "little"),
        head(messages.PUSH, 0, 0, 1, 3) + b"\xff\xff\xff\xff" + bytes(8),
        head(messages.PUSH, 0, 0, 2, 3) + bytes(8) + bytes(16),
        head(messages.INIT, 0, 0, 1, 0) + b"\x01\x00\x01\x09" + bytes(72) + b"a",
        head(messages.INIT, 0, 0, 1, 0) + b"\x01\x00\x01\x02" + (0).to_bytes(8, "little") + b"\xff" * 8 + b"a",
        head(messages.INIT, 0, 0, 1, 0) + b"\x01\x00\x01\x00\xff",
        head(messages.INIT, 0, 0, 1, 0) + b"\x00\x00\x01\x00",
        head(messages.INIT, 0, 0, (1 << 32) - 1, 0) + good["init"][16:] * 1000,
        head(messages.ABANDON, 0, 0, 0, -1),
        *(good[k][:n] for k in good for n in range(0, len(good[k]), 7)),
        *(good[k] + b"x" for k in good),
    ]
    for message in wrong:
        status = ask(message)[0]
        assert status in range(1, 7), (message, status)
    for _ in range(2000 if NIGHTLY else 200):  # flipped bytes: an error, or a request that happens to be valid
        message = bytearray(good[["init", "push"][rng.integers(2)]])
        for at in rng.integers(0, len(message), rng.integers(1, 4)):
            message[at] = rng.integers(256)
        if message[0] in (messages.PULL, messages.CLOSE):
            continue
        assert ask(message)[0] in range(7), bytes(message)
    with pytest.raises(codec.PeerError):
        ask(bytes(1 << 23))  # longer than any request
    dist.barrier(_groups["workers"])
    return None


def test_hostile_requests_are_refused_and_the_server_goes_on(pools):
    pool = pools(3)
    pool.run(_make_groups, 1)
    stats, _, mean = pool.run(_hostile)
    assert mean == [1.0] * 4
    assert stats.keys <= 10
    assert list(stats.lost_workers) == [1]


def _replies():
    """Return wrong replies to a pull of one key of four float32 values."""
    head, frame = messages._REPLY.pack, codec.encode(torch.ones(4))

    def value(body, nbytes=None):
        return head(0, 0, 0, 1) + (len(body) if nbytes is None else nbytes).to_bytes(8, "little") + body

    return [
        b"",
        head(0, 0, 0, 1)[:7],
        head(0, 0, 0, 2) + bytes(16),
        head(0, 0, 0, 1),
        value(b"abcd"),
        value(frame, (1 << 64) - 1),
        value(frame, len(frame) + 1),
        value(frame) + b"x",
        value(frame[:-1] + bytes([frame[-1] ^ 1])),
        value(codec.encode(torch.ones(5))),
        value(codec.encode(torch.ones(2, 2))),
        value(codec.encode(torch.ones(4, dtype=torch.bfloat16))),
        head(200, 0, 0, 0) + b"unknown status",
        head(1, 0, 0, 0) + b"\xff",
    ]


def _hostile_server(rank, size):
    """Rank 0 sends replies by hand."""
    from codec.torch.network.endpoint import endpoint_of

    good = messages.reply(values=[(b"", bytes(codec.encode(torch.ones(4))))])
    if rank == 0:
        link = endpoint_of(dist.group.WORLD).accept(1, messages.TAG, SOON)
        for parts in [messages.reply(ids=[7]), *([r] for r in _replies()), good, [bytes(1 << 20)]]:
            link.receive(1 << 20, SOON)
            with contextlib.suppress(codec.PeerError):  # the client closes a connection whose reply is too long
                link.send(parts, SOON)
        return
    client = codec.torch.ParameterClient([0], options=codec.options(timeout=SOON))
    client.init({"a": (4,)})
    for reply in _replies():
        try:
            found = client.pull(0, ["a"])
        except codec.CodecError:
            continue
        raise AssertionError(f"{reply} was read as {found}")
    assert client.pull(0, ["a"])["a"].tolist() == [1.0] * 4  # the client is still usable
    for _ in range(2):  # a reply longer than any value closes the connection
        with pytest.raises(codec.PeerError, match="server 0"):
            client.pull(0, ["a"])
    client.close()


def test_hostile_replies_raise_on_the_worker(pools):
    pools(2).run(_hostile_server)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 8, 127, 128, 1000])
def test_packed_sums_have_the_fewest_bits_and_return_exactly(workers):
    bits = sums.bits_per_sum(workers)
    assert 2 ** (bits - 1) < 2 * workers + 1 <= 2**bits
    values = np.random.default_rng(0).integers(-workers, workers + 1, 1001).astype(np.int32)
    packed = sums._pack(values, workers)
    assert len(packed) == -(-1001 * bits // 8)
    assert np.array_equal(sums._unpack(np.frombuffer(packed, np.uint8), 1001, workers, 1), values)


def test_damaged_averages_are_refused():
    frames = [codec.encode(torch.ones(100), codec.Ternary(scale=1.0)) for _ in range(2)]
    head, body = sums.encode_average(frames)
    value = np.frombuffer(head + body, np.uint8)

    def decode(value, shape=(100,), scale=1.0):
        return sums.decode_average(np.asarray(value), shape, torch.float32, scale)

    assert torch.equal(decode(value), torch.ones(100))
    for wrong in (value[:-1], value[:11], np.append(value, np.uint8(0))):
        with pytest.raises(codec.FrameError):
            decode(wrong)
    for how in (dict(shape=(99,)), dict(scale=0.5)):
        with pytest.raises(codec.FrameError):
            decode(value, **how)
    for at, byte in ((0, 0), (7, 0xFF), (8, 2), (6, 0xFF)):
        changed = value.copy()
        changed[at] = byte
        with pytest.raises(codec.FrameError):
            decode(changed)
    packed = np.frombuffer(sums._HEAD.pack(2, 1.0, 1) + b"\xff" * 37 + b"\x0f", np.uint8)  # sums of 5
    with pytest.raises(codec.FrameError, match="largest sum"):
        decode(packed)
