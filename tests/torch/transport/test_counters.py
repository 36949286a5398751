"""Counters of a channel (bytes, seconds, numbers of collectives)."""

import time

import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.group import communicator
from codec.torch.transport.counters import Counters, Stopwatch
from support.ranks import run_ranks

KEPT = "waited_s", "connections"  # fields that are not added value by value


def _counted(rank, size):
    n = 100_000
    counters = communicator.communicator_of(None).channel.counters
    found = []
    for run in (
        lambda: codec.torch.all_reduce(torch.ones(n), codec.Float8(), options=codec.options(algorithm="two_shot")),
        lambda: codec.torch.all_reduce(torch.ones(n), options=codec.options(algorithm="raw")),
        lambda: codec.torch.all_gather(torch.empty(size * n), torch.ones(n)),
        lambda: codec.torch.all_to_all_bytes([bytes(1000)] * size),
    ):
        before, begin = counters.copy(), time.perf_counter()
        run()
        took = time.perf_counter() - begin
        delta = counters.copy() - before
        assert 0 <= delta.encode_s + delta.wire_s + delta.decode_s < took
        assert min(delta.encode_s, delta.wire_s, delta.decode_s) >= 0
        found.append(delta)
    return found


def test_counters_agree_with_what_collectives_send_and_receive():
    results = run_ranks(2, _counted)
    for deltas in zip(*results, strict=True):
        assert deltas[0].sent_nbytes == deltas[1].received_nbytes > 0
        assert deltas[1].sent_nbytes == deltas[0].received_nbytes
    frames, raw, gathered, exchanged = results[0]
    assert [(d.frame_collectives, d.raw_collectives) for d in results[0]] == [(1, 0), (0, 1), (1, 0), (1, 0)]
    assert [d.raw_nbytes for d in results[0]] == [400_000, 400_000, 400_000, 2000]
    assert 90_000 < frames.sent_nbytes < 110_000
    assert 400_000 <= raw.sent_nbytes < 401_000
    assert gathered.sent_nbytes < 50_000
    assert exchanged.sent_nbytes == 1000
    assert frames.encode_s > 0 < frames.decode_s
    assert [d.round_trips for d in results[0]] == [1.5, 1.5, 1, 1.5]
    total = frames + raw
    sums = {name: getattr(total, name) - getattr(raw, name) for name in vars(raw) if name not in KEPT}
    waited = {rank: seconds - raw.waited_s.get(rank, 0.0) for rank, seconds in total.waited_s.items()}
    assert total - raw == Counters(**sums, waited_s=waited, connections="not encrypted, not authenticated")


def test_inner_phase_interrupts_outer_phase():
    counters = Counters()
    clock = Stopwatch(counters)
    with clock.during("decode_s"):
        with clock.during("encode_s"):
            time.sleep(0.05)
        with clock.during("encode_s"):
            pass
    assert 0.05 <= counters.encode_s < 5
    assert counters.decode_s < counters.encode_s
    before = counters.copy()
    time.sleep(0.01)
    assert counters == before


def test_waits_are_added_to_the_rank_that_ended_them():
    counters = Counters()
    counters.add_wait(1.0, 2)
    before = counters.copy()
    counters.add_wait(0.5, 2)
    counters.add_wait(0.25, None)
    assert before.waited_s == {2: 1.0}
    assert (counters.wire_s, counters.waited_s) == (1.75, {2: 1.5})
    assert (counters - before).waited_s == {2: 0.5}


def _of_backend(rank, size):
    group = dist.group.WORLD
    assert group.stats() == Counters()
    dist.all_reduce(torch.ones(3))  # small: sent over Gloo
    assert group.stats() == Counters()
    dist.all_reduce(torch.ones(50_000))
    first = group.stats()
    dist.all_reduce(torch.ones(50_000))
    assert first.frame_collectives == 1
    assert first.raw_nbytes == 200_000
    delta = group.stats() - first
    assert delta.frame_collectives == 1
    assert 0 < delta.sent_nbytes == delta.received_nbytes < 200_000


def test_backend_group_has_stats():
    run_ranks(2, _of_backend, backend="codec")
