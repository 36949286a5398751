"""End of a channel: what it forgets, and what later calls raise."""

import gc
import weakref

import numpy as np
import pytest
import torch

import codec
from codec.torch.transport.channel import Channel
from support.ranks import run_ranks


def _closed(rank, size):
    channel = Channel(None, None)
    channel.request([1])
    channel.begin(channel.arena.nbytes_of([100]))
    message = channel.arena.allocate(100)
    channel.close()
    channel.close()
    assert channel.closed
    message[:] = 1  # still valid: a message in flight may be written to it
    values = np.ones(2, np.float32)
    for call in (
        lambda: channel.request([1]),
        lambda: channel.numbers.gather([1]),
        lambda: channel.requests.exchange_verdict(None),
        lambda: channel.frames.send(None, 0),
        lambda: channel.frames.receive_values(values, 0),
        lambda: channel.device.all_gather(torch.ones(4)),
        lambda: channel.connections.post("send", values.view(np.uint8), 0),
    ):
        with pytest.raises(codec.PeerError, match="new group"):
            call()
    with pytest.raises(AssertionError, match="reserved 0"):
        channel.arena.allocate(1)


def test_every_call_on_a_closed_channel_raises():
    run_ranks(1, _closed)


def _cancelled(rank, size):
    channel = Channel(None, None)
    channel.request([1])
    channel.begin(0)
    channel.cancel()
    assert channel.cancelled
    assert not channel.closed  # messages in flight end first
    with pytest.raises(codec.PeerError, match="cancelled"), channel.writing():
        pass
    with pytest.raises(codec.PeerError, match="new group"):
        channel.requests.exchange_verdict(None)
    assert channel.closed


def test_a_cancelled_channel_writes_no_tensor_and_agrees_on_no_verdict():
    run_ranks(1, _cancelled)


def _dropped(rank, size):
    gc.disable()
    channel = Channel(None, None)
    channel.numbers.gather([1])
    parts = [weakref.ref(part) for part in (channel, channel.connections, channel.frames, channel.device)]
    del channel
    assert [part() for part in parts] == [None] * 4


def test_connections_end_with_the_last_reference_to_the_channel():
    """No cycle of references keeps them open until the next garbage collection."""
    run_ranks(1, _dropped)
