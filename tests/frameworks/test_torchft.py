"""torchft runs over codec.torch.ProcessGroup: torchft's own test suite, large tensors, and its Manager."""

import os
import unittest
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOp,
    ReduceScatterOptions,
)

import codec.torch
from support.documentation import blocks
from support.ranks import RankPool

N = 6 * 4096  # float32 values: a third of a tensor has 32 KiB, above codec_group's `small`


def codec_group(timeout=20.0, small=1 << 14):
    """Return a reconfigurable torchft group, made by the class in docs/guides/frameworks.md but lossless."""
    namespace = {}
    exec(blocks("torchft")[0], namespace)
    group = namespace["CodecGroup"](timedelta(seconds=timeout))
    group._create_pg = lambda store, rank, size: codec.torch.ProcessGroup(
        store, rank, size, group._timeout, codec.torch.BackendOptions(small=small)
    )
    return group


def _suite(small):
    """Run torchft's tests of its Gloo group on ours; return the number of tests, those skipped, and tracebacks."""
    from torchft import process_group_test as suite

    suite.ProcessGroupGloo = lambda timeout=timedelta(seconds=20): codec_group(timeout.total_seconds(), small=small)
    load = unittest.TestLoader()
    cases = [
        *load.loadTestsFromTestCase(suite.NormalGlooMultiPgTest),
        *load.loadTestsFromTestCase(suite.ProcessGroupTest),
    ]
    others = ("baby", "nccl", "cuda", "dummy", "wrapper", "managed")
    cases = [case for case in cases if not any(name in case.id() for name in others)]
    found = unittest.TestResult()
    unittest.TestSuite(cases).run(found)
    return len(cases), found.skipped, [trace for _, trace in [*found.failures, *found.errors]]


@pytest.mark.parametrize("small", [0, 1 << 14])
def test_suite_of_torchft_passes(small):
    with RankPool(1, limit=300) as ranks:
        count, skipped, failed = ranks.run_on(0, _suite, small)
    assert count == 19
    assert not skipped
    assert not failed, "\n".join(failed)


def values(rank, n=N):
    return torch.arange(n, dtype=torch.float32) % 97 + 100 * rank


def _cases(rank, size):
    """Return a function for each collective, which starts it and returns work, outputs and expected outputs."""
    every = [values(r) for r in range(size)]
    total = sum(every)
    mine = every[rank]
    n = N // size
    parts = [x.chunk(size) for x in every]
    summed = ReduceScatterOptions()
    summed.reduceOp = ReduceOp.SUM

    def allreduce(pg, options):
        x = mine.clone()
        return pg.allreduce([x], options), [x], [total]

    def allreduce_coalesced(pg):
        xs = [mine.clone(), mine[:5000].clone()]
        return pg.allreduce_coalesced(xs, AllreduceCoalescedOptions()), xs, [total, total[:5000]]

    def allgather(pg):
        out = [torch.empty(N) for _ in every]
        return pg.allgather([out], [mine], AllgatherOptions()), out, every

    def allgather_coalesced(pg):
        out = [torch.empty(size * N), torch.empty(size * 5000)]
        wanted = [torch.cat(every), torch.cat([x[:5000] for x in every])]
        return pg.allgather_into_tensor_coalesced(out, [mine, mine[:5000]], AllgatherOptions()), out, wanted

    def alltoall(pg):
        out = torch.empty(N)
        work = pg.alltoall_base(out, mine, [n] * size, [n] * size, AllToAllOptions())
        return work, [out], [torch.cat([p[rank] for p in parts])]

    def broadcast(pg):
        x = mine.clone()
        return pg.broadcast([x], BroadcastOptions()), [x], [every[0]]

    def broadcast_one(pg):
        x = mine.clone()
        return pg.broadcast_one(x, 1), [x], [every[1]]

    def reduce_scatter(pg):
        out = torch.empty(n)
        return pg.reduce_scatter([out], [list(mine.chunk(size))], summed), [out], [total.chunk(size)[rank]]

    def reduce_scatter_coalesced(pg):
        out = [torch.empty(n), torch.empty(n)]
        work = pg.reduce_scatter_tensor_coalesced(out, [mine, mine + 1], summed)
        return work, out, [total.chunk(size)[rank], (total + size).chunk(size)[rank]]

    def send_recv(pg):
        if rank == 0:
            return pg.send([mine], 1, 0), [], []
        out = torch.empty(N)
        return (pg.recv([out], 0, 0), [out], [every[0]]) if rank == 1 else (None, [], [])

    return {
        "allreduce": lambda pg: allreduce(pg, ReduceOp.SUM),
        "allreduce with options": lambda pg: allreduce(pg, AllreduceOptions()),
        "allreduce_coalesced": allreduce_coalesced,
        "allgather": allgather,
        "allgather_into_tensor_coalesced": allgather_coalesced,
        "alltoall_base": alltoall,
        "barrier": lambda pg: (pg.barrier(BarrierOptions()), [], []),
        "broadcast": broadcast,
        "broadcast_one": broadcast_one,
        "reduce_scatter": reduce_scatter,
        "reduce_scatter_tensor_coalesced": reduce_scatter_coalesced,
        "send/recv": send_recv,
    }


FRAMES = ("allreduce", "allgather", "reduce_scatter")  # collectives that our group runs; Gloo runs all others


def _run(pg, name, case):
    work, found, wanted = case(pg)
    if work is not None:
        work.wait()
        if name != "send/recv":  # Gloo's work of send and recv has no future
            work.get_future().wait()
    for x, want in zip(found, wanted, strict=True):
        assert torch.equal(x, want), name


def _large(rank, size, port):
    pg = codec_group()
    pg.configure(f"localhost:{port}/large{size}", "0", rank, size)
    for name, case in _cases(rank, size).items():
        before = codec.torch.group_stats(pg.parent)
        _run(pg, name, case)
        counted = codec.torch.group_stats(pg.parent) - before
        assert counted.frame_collectives + counted.raw_collectives == name.startswith(FRAMES), name
    pg.shutdown()


def master():
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def test_collectives_of_large_tensors():
    store = master()
    for size in (2, 3):
        with RankPool(size, limit=120) as ranks:
            ranks.run(_large, store.port)


def _resilient(rank, size, port, name):
    """Run a collective; run it again after the last rank has aborted; run all in a group of the remaining ranks."""
    pg = codec_group(timeout=5)
    pg.configure(f"localhost:{port}/{name}/first", "0", rank, size)
    _run(pg, name, _cases(rank, size)[name])
    if rank == size - 1:
        pg.abort(errored=False)
        return "gone"
    error = "no error"
    try:
        _run(pg, name, _cases(rank, size)[name])
    except Exception as e:
        error = type(e).__name__
    pg.configure(f"localhost:{port}/{name}/second", "0", rank, size - 1)
    for again, case in _cases(rank, size - 1).items():
        _run(pg, again, case)
    return error


RESILIENT = [name for name in _cases(0, 3) if name not in ("send/recv", "broadcast", "broadcast_one")]


@pytest.mark.parametrize("name", RESILIENT)
def test_group_is_reconfigured_after_a_rank_died(name):
    """All remaining ranks raise. Broadcasts and send/recv are not tested: a rank that only sends may succeed."""
    store = master()
    with RankPool(3, limit=120) as ranks:
        *left, gone = ranks.run(_resilient, store.port, name)
    assert gone == "gone"
    assert "no error" not in left
    if name.startswith(FRAMES):
        assert left == ["PeerError"] * 2


def _managed(rank, size, lighthouse, code):
    """Run the page's training loop as a torchft replica group with a single rank."""
    store = master()
    os.environ |= {
        "TORCHFT_LIGHTHOUSE": lighthouse,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "REPLICA_GROUP_ID": str(rank),
    }
    namespace = {"__name__": "__main__"}
    exec(code, namespace)
    counted = codec.torch.group_stats(namespace["group"].parent)
    model = [p.detach().clone() for p in namespace["net"].parameters()]
    namespace["manager"].shutdown()
    return model, counted


def test_manager_trains_replicas_over_frames():
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=10000)
    try:
        with RankPool(2, limit=240) as ranks:
            results = ranks.run(_managed, lighthouse.address(), "\n".join(blocks("torchft")))
    finally:
        lighthouse.shutdown()
    (first, counted), (second, _) = results
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert counted.frame_collectives >= 10
    assert 0 < counted.sent_nbytes < counted.raw_nbytes / 3
