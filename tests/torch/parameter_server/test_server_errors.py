"""Parameter servers report invalid requests, exceeded limits, NaN and late workers to the worker concerned."""

import time

import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from support.parameter_servers import SOON, TERNARY, make_groups, raises, run, workers_group


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
        with raises(codec.StateError, "but has not pushed"):
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
    with raises(codec.StateError, "has already pushed 'a' in step 1"):
        client.push(1, {"b": torch.ones(2, 2), "a": torch.ones(4)})
    client.push(1, {"b": torch.ones(2, 2)})  # accepted, because the refused push stored none of its tensors
    client.pull(1, ["a"])
    with raises(codec.StateError, "has already pulled 'a' in step 1"):
        client.pull(1, ["a"])
    client.pull(1, ["b"])
    with raises(codec.SpecError, "exact_mean needs Ternary frames with one scale"):
        client.push(2, x)
        client.pull(2, ["a"], reduce="exact_mean")
    spec = codec.Ternary(scale=1.0 + worker)
    client.push(3, x, spec)
    with raises(codec.SpecError, "'a': exact_mean needs Ternary frames with one scale"):
        client.pull(3, ["a"], reduce="exact_mean")
    return client.average(4, x, TERNARY)["b"]


def test_wrong_requests_are_errors_for_the_worker_that_sent_them(pools):
    found, stats = run(pools(3), 1, _errors)
    assert torch.equal(found[0], found[1])
    assert stats[0].refused > 8


def _limits(client, worker, workers):
    with raises(codec.ArgumentError, "the maximum of this server is 3"):
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
    """Worker 1 pushes too late: worker 0's pull has already timed out."""
    x = {"a": torch.ones(4)}
    client.init(x)
    if worker == 0:
        client.push(0, x)
        with raises(codec.PeerError, r"worker 2 was too late \(1 s\) before it pushed 'a' in step 0"):
            client.pull(0, ["a"])
        alone = client.average(1, x, TERNARY)["a"].tolist()  # step 1 begins without worker 1
        dist.send(torch.ones(1), 2)
    else:
        dist.recv(torch.ones(1), 1)
        with raises(codec.StateError, "worker 2 was too late"):
            client.push(0, x)
        with raises(codec.StateError, "step 1 has begun without worker 2"):
            client.push(1, x)
        alone = None
    dist.barrier(workers_group())
    return alone, client.average(2, {"a": torch.full((4,), float(worker))}, codec.Lossless())["a"].tolist()


def test_late_worker_is_refused_and_takes_part_in_later_steps(pools):
    pool = pools(3)
    pool.run(make_groups, 1)
    found, _ = run(pool, 1, _late, timeout=1)
    assert found == [([1.0] * 4, [0.5] * 4), (None, [0.5] * 4)]


def _arguments(rank, size):
    if rank == 1:  # rank 0 is not listening yet
        with pytest.raises(codec.PeerError, match="within the timeout"):
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
