"""If the rank that hosts the store is frozen, other ranks wait for the store's answer only until the timeout."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import ScheduleGPipe

import codec
import codec.torch
from codec.torch.network.endpoint import endpoint_of
from codec.torch.pipelining import CompressedStage, attempts
from support.faults import freeze
from support.ranks import RankPool
from support.tiers import HANG_SECONDS

SECONDS = 1.5
OPTIONS = codec.options(timeout=SECONDS)


@pytest.fixture
def ranks():
    with RankPool(2, limit=HANG_SECONDS) as ranks:
        yield ranks


def _host():
    """Host a store in this process, as rank 0 of init_process_group does without torchrun; return the port."""
    global _store
    _store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return _store.port


def _join(rank, size, port, ready):
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS))
    if ready:
        endpoint_of(dist.group.WORLD)


def _all_reduce():
    codec.torch.all_reduce(torch.ones(10))


def _all_reduce_with_timeout():
    codec.torch.all_reduce(torch.ones(10), options=OPTIONS)


def _send():
    codec.torch.send(b"x", 0)


def _client():
    codec.torch.ParameterClient([0], options=OPTIONS)


def _step():
    example = torch.zeros(2, 4, requires_grad=True)
    stage = CompressedStage(torch.nn.Linear(4, 4), 1, 2, "cpu", input_args=example, output_args=example)
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    for attempt in attempts(stage):
        with attempt:
            schedule.step(target=torch.zeros(4, 4))


def _error_of(call):
    begin = time.monotonic()
    with pytest.raises(codec.PeerError) as raised:
        call()
    return str(raised.value), time.monotonic() - begin


@pytest.mark.parametrize(
    ("call", "ready"),
    [
        (_all_reduce, False),
        (_send, False),
        # Rank 0 is ready: send() looks up its address in the store
        pytest.param(_send, True, marks=pytest.mark.nightly),
        pytest.param(_all_reduce_with_timeout, False, marks=pytest.mark.nightly),
        pytest.param(_client, True, marks=pytest.mark.nightly),
        pytest.param(_step, False, marks=pytest.mark.nightly),
    ],
)
def test_frozen_host_of_the_store_is_an_error_after_the_timeout(ranks, call, ready):
    port = ranks.run_on(0, _host)
    ranks.run(_join, port, ready)
    ranks[0].start(freeze)
    ranks[0].await_stop()
    message, seconds = ranks.run_on(1, _error_of, call)
    assert "does not answer within" in message
    assert seconds < 20 * SECONDS
    ranks[0].resume()
    ranks.results([0])
