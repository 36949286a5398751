"""torchft runs over codec.integrations.torchft: torchft's own test suite, large tensors, residuals, and its Manager."""

import doctest
import importlib
import os
import unittest
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torchft
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
from torchft.coordination import LighthouseServer
from torchft.process_group import ManagedProcessGroup, ProcessGroupGloo

import codec.torch
from codec.integrations.torchft import DistributedDataParallel, Manager, ProcessGroupCodec
from support.documentation import blocks
from support.ranks import RankPool

N = 6 * 4096  # float32 values: a third of a tensor has 32 KiB, above codec_group's `small`


def codec_group(timeout=20.0, small=1 << 14, **how):
    """Return a reconfigurable torchft group."""
    return ProcessGroupCodec(timeout=timedelta(seconds=timeout), small=small, **how)


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
    counted = namespace["group"].stats()
    model = [p.detach().clone() for p in namespace["net"].parameters()]
    namespace["manager"].shutdown()
    return model, counted


def test_manager_trains_replicas_over_frames():
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=10000)
    try:
        with RankPool(2, limit=240) as ranks:
            results = ranks.run(_managed, lighthouse.address(), "\n".join(blocks("torchft")))
    finally:
        lighthouse.shutdown()
    (first, counted), (second, _) = results
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert counted.frame_collectives >= 10
    assert 0 < counted.sent_nbytes < counted.raw_nbytes / 6  # two-shot sends a slice twice


NAMES = [("weight", (64, 100)), ("bias", (64,))]
SHIFT = 6464  # values of NAMES


def _gradient(rank, step=0):
    return torch.randn(SHIFT, generator=torch.Generator().manual_seed(100 * step + rank))


def _reduced(group, x):
    with group.named(NAMES):
        group.allreduce([x], ReduceOp.SUM).wait()
    return x


def _state(group):
    """Return the residuals of a group, by role."""
    (feedback,) = group._residuals.values()
    state = feedback.state_dict()
    return [{k: x for k, x in state[role].items() if isinstance(x, torch.Tensor)} for role in ("worker", "server")]


def _same(found, expected, factor=1.0):
    """Return True if residuals are the expected ones, multiplied by a factor."""
    assert [each.keys() for each in found] == [each.keys() for each in expected]
    pairs = [(each[k], x) for each, other in zip(found, expected, strict=True) for k, x in other.items()]
    return len(pairs) > 0 and all(torch.equal(x, y * torch.tensor(factor)) for x, y in pairs)


def _residuals(rank, size, port):
    """Means over three and then over two replicas add up to the exact means, also after steps that were dropped."""
    group = codec_group(spec=codec.Quantize(4), feedback=True, options=codec.options(algorithm="two_shot"), small=0)
    errors = []
    group.configure(f"localhost:{port}/three", "0", rank, size)
    total, error = torch.zeros(SHIFT), []
    for replicas in (size, size - 1):
        if replicas < size:
            if rank == replicas:
                return errors
            before = _state(group)
            group.configure(f"localhost:{port}/two", "0", rank, replicas)
            assert _same(_state(group), before, replicas / size)
        exact = sum(_gradient(r) for r in range(replicas)) / replicas
        for step in range(20):
            for committed in (False, True) if step % 4 == 3 else (True,):
                before = _state(group) if group._residuals else None
                mean = _reduced(group, _gradient(rank)) / replicas
                group.settle(committed=committed)
                if not committed:
                    assert _same(_state(group), before)
            total += mean - exact
            error.append(float((mean - exact).norm()))
        errors.append(float(total.norm()) / max(error))
    group.forget()
    assert not group._residuals
    assert group.errored() is None
    group.shutdown()
    return errors


def test_residuals_keep_their_effect_when_a_replica_leaves():
    store = master()
    with RankPool(3, limit=120) as ranks:
        found = ranks.run(_residuals, store.port)
    assert max(found[0] + found[1]) < 3  # the error of 40 steps is that of at most three


def _lost(rank, size, port):
    """The error of an all-reduce is reported until the group is configured again, and residuals are unchanged."""
    group = codec_group(spec=codec.Quantize(4), feedback=True, small=0)
    group.configure(f"localhost:{port}/first", "0", rank, size)
    _reduced(group, _gradient(rank))
    group.settle(committed=True)
    counted, before = group.stats(), _state(group)
    if rank == size - 1:
        os._exit(0)
    x = _gradient(rank)
    with pytest.raises(codec.PeerError):
        _reduced(group, x)
    assert torch.equal(x, _gradient(rank))
    assert isinstance(group.errored(), codec.PeerError)
    group.settle(committed=False)
    assert _same(_state(group), before)
    group.configure(f"localhost:{port}/second", "0", rank, size - 1)
    assert group.errored() is None
    _reduced(group, x)
    group.shutdown()
    assert (group.stats() - counted).frame_collectives == 1


def test_error_of_an_all_reduce_is_reported_until_the_next_quorum():
    store = master()
    with RankPool(3, limit=120) as ranks:
        ranks.run(_lost, store.port)


def test_arguments_are_checked():
    for spec in (codec.Sign(), codec.TopK(1 / 64)):
        assert ProcessGroupCodec(spec).feedback
        assert not ProcessGroupCodec(spec, feedback=False).feedback
    with pytest.raises(codec.SpecError, match="needs the state of the optimizer"):
        ProcessGroupCodec(codec.Truncate())
    with pytest.raises(codec.ArgumentError, match=r"pg must be a codec.integrations.torchft.ProcessGroupCodec"):
        Manager(ProcessGroupGloo())
    with pytest.raises(codec.SpecError):
        ProcessGroupCodec(codec.Lossless(), feedback=True)
    with pytest.raises(codec.ArgumentError, match="feedback must be"):
        ProcessGroupCodec(codec.Quantize(4), feedback=2.0)
    group, store = ProcessGroupCodec(codec.Quantize(4), feedback=0.9), master()
    group.configure(f"localhost:{store.port}/alone", "0", 0, 1)
    with pytest.raises(codec.ArgumentError, match="reduced, but the next name is"), group.named([("weight", (9000,))]):
        group.allreduce([torch.ones(8000)], ReduceOp.SUM)
    with pytest.raises(codec.ArgumentError, match="needs names"):
        group.allreduce([torch.ones(8000)], ReduceOp.SUM)
    with group.named([("w", (8000,)), ("w", (8000,))]):
        group.allreduce([torch.ones(8000)], ReduceOp.SUM).wait()
        with pytest.raises(codec.ArgumentError, match="twice"):
            group.allreduce([torch.ones(8000)], ReduceOp.SUM)


def test_manager_refuses_error_feedback_for_values_without_names():
    lighthouse, store = LighthouseServer(bind="[::]:0", min_replicas=1), master()
    manager = Manager(
        ProcessGroupCodec(codec.Quantize(4), feedback=True),
        min_replica_size=1,
        load_state_dict=None,
        state_dict=None,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse.address(),
        hostname="localhost",
    )
    try:
        manager.start_quorum()
        with pytest.raises(codec.ArgumentError, match=r"needs names of values.*manager.group.named"):
            manager.allreduce(torch.ones(9000))
        assert manager.allreduce(torch.ones(9), reduce_op=ReduceOp.SUM).wait()  # sent uncompressed
        with manager.group.named([("values", (9000,))]):
            assert manager.allreduce(torch.ones(9000)).wait()
        assert manager.should_commit()
        assert list(manager.group._residuals) == [("values",)]
        manager.start_quorum()
        managed, x, options = ManagedProcessGroup(manager), torch.ones(9000), AllreduceOptions()
        options.reduceOp = ReduceOp.AVG
        with manager.group.named([("values", (90, 100))]):
            assert managed.allreduce([x], options).wait()
        assert x.eq(1).all()
        assert managed.size() == 1
        with pytest.raises(codec.ArgumentError, match="static_graph"):
            DistributedDataParallel(manager, torch.nn.Linear(9, 9), static_graph=True)
    finally:
        manager.shutdown(wait=False)
        lighthouse.shutdown()


def test_docstring_examples():
    module = importlib.import_module("codec.integrations.torchft")
    assert doctest.testmod(module, extraglobs={"codec": codec, "torch": torch, "torchft": torchft}).failed == 0
