"""A worker that does not receive a result which other workers have takes part in no later step."""

import threading

import pytest
import torch

import codec
import codec.torch
from codec.torch.parameter_server.steps import KeyFrames
from support.fault_lines import at_line, raising
from support.parameter_servers import run
from support.rank_loss import fault_points
from support.tiers import NIGHTLY

SPEC = codec.Quantize(4)
FILES = ("parameter_server/session.py", "parameter_server/links.py", "parameter_server/average.py")


def _average(client, worker, step):
    gradient = torch.randn(40, generator=torch.Generator().manual_seed(10 * step + worker))
    try:
        return client.average(step, {"a": gradient}, SPEC)["a"].tolist()
    except (codec.CodecError, RuntimeError, KeyboardInterrupt) as e:
        return type(e).__name__


def _interrupted(client, worker, workers, error, point):
    """Average three times, with an exception at a line of the second call on worker 1."""
    client.init({"a": (40,)})
    found = [_average(client, worker, 0)]
    with at_line(point if worker == 1 else -1, raising(error), *FILES) as lines:
        found.append(_average(client, worker, 1))
    return [*found, _average(client, worker, 2), lines.count, lines.place]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_worker_takes_part_in_no_later_step(pools, error):
    (one, two), _ = run(pools(3), 1, _interrupted, error, -1)
    assert one[:3] == two[:3]
    n = two[3]
    assert n > 100
    for point in range(n) if NIGHTLY else fault_points(n, 8):
        (one, two), _ = run(pools(3), 1, _interrupted, error, point)
        first, second, third, _, place = two
        assert isinstance(first, list)
        if place is None or isinstance(second, list):
            assert place is None, place
            continue
        assert second == error.__name__, place
        assert third == "StateError", place  # the client is closed
        assert isinstance(one[2], list) or one[2] == "PeerError", place


def _failing_server(client, worker, workers):
    client.init({"a": (40,)})
    return [_average(client, worker, step) for step in range(3)]


def _with_failing_server(rank, size, *args, **how):
    """Let the thread that serves worker 2 fail once, when the mean of the second step is computed."""
    from support.parameter_servers import serve_or_call

    original, calls = KeyFrames.result, []

    def result(entry, *args):
        found = original(entry, *args)
        if threading.current_thread().name == "codec, worker 2":
            calls.append(None)
            if len(calls) == 2:
                raise MemoryError("injected by the test")
        return found

    KeyFrames.result = result
    try:
        return serve_or_call(rank, size, *args, **how)
    finally:
        KeyFrames.result = original


def test_worker_whose_request_failed_on_the_server_takes_part_in_no_later_step(pools):
    found = pools(3).run(_with_failing_server, 1, _failing_server)
    one, two = found[1:]
    assert isinstance(one[1], list)
    assert two[0] == one[0]
    assert two[1:] == ["PeerError", "PeerError"]
    assert isinstance(one[2], list) or one[2] == "PeerError"
