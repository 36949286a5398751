"""Collectives of tensors on a GPU: the CUDA engine encodes them in place, and results are those of host memory.

Without a GPU the kernels run on the CPU (`support.cuda_tensors`); ``make gpu-tests`` runs the file on a GPU, which all
ranks share, and ``make gpu-nccl`` those tests in which NCCL carries frames from GPU to GPU, with NCCL itself.
"""

import contextlib
import logging
import struct
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.ddp import uncompressed
from codec.torch.group import communicator
from codec.torch.group.tasks import Task
from codec.torch.group.work import Work
from codec.torch.reduction import arguments, execution, heads
from codec.torch.reduction.table import ALL_GATHER, TWO_SHOT
from codec.torch.transport import nccl, streams
from support.collective_values import rank_values, tensor_bytes
from support.cuda_tensors import NCCL, DeviceTensor, gpu, host, new_group_of_gpus, on_device
from support.ddp_training import ENCODE_ALL, hook_state_bytes, parameter_bytes, train, wrapped
from support.device import Emulated, build
from support.faults import KILLED, at_fault_point, damaged_frames, die
from support.gpu_traffic import counted_gpu
from support.ranks import RankPool, run_ranks
from support.specs import LOSSLESS, LOSSY, TOPKS, TRUNCATES
from support.tensors import ADAMW
from support.tiers import every, nightly

SHAPE = 70, 100
ALGORITHMS = ("two_shot", "all_gather", "ring", "raw")
SPECS = LOSSLESS | LOSSY | {name: spec for name, spec in TRUNCATES.items() if spec.fixed_level is not None}


@pytest.fixture(params=["emulated", pytest.param("real", marks=pytest.mark.gpu)], scope="module")
def kind(request):
    if request.param == "emulated":
        build()  # once, before ranks need it
    return request.param


WAYS = [(2, "host"), (3, "gpus"), nightly((4, "host")), nightly((4, "gpus"))]


@pytest.fixture(scope="module", params=[(2, "gpus"), (4, "gpus")] if NCCL else WAYS)
def ranks(request):
    """Ranks whose frames cross to host memory, or stay on GPUs."""
    size, way = request.param
    with RankPool(size) as ranks:
        if way == "gpus":
            new_group_of_gpus(ranks)
        else:
            ranks.new_group()
        yield ranks


@pytest.fixture(scope="module")
def pair():
    with RankPool(2, timeout=5) as ranks:
        ranks.new_group()
        yield ranks


@pytest.fixture
def gpus():
    """Two ranks whose frames stay on GPUs."""
    with RankPool(2, timeout=5) as ranks:
        new_group_of_gpus(ranks)
        yield ranks


def how(algorithm="two_shot", **settings):
    return codec.options(algorithm=algorithm, **settings)


def outcome(call, *args, **kwargs):
    """Return "success", or the type and the message of the error."""
    try:
        call(*args, **kwargs)
    except codec.CodecError as e:
        return type(e).__name__, str(e), e.code
    return "success"


def compare(put, call, x, **kwargs):
    """Run call(tensor, ...) with a tensor on the GPU and in host memory; check that outcomes and tensors are equal."""
    there, here = put(x), x.clone()
    found = [outcome(call, t, **kwargs) for t in (there, here)]
    assert found[0] == found[1], found
    assert tensor_bytes(host(there)) == tensor_bytes(here)
    return found[0]


def _all_reduces(rank, size, kind, names):
    with gpu(kind) as put:
        for name in names:
            algorithms = ALGORITHMS if name in ("lossless", "quantize_4") else ALGORITHMS[:2]
            values = (torch.float32, "sum"), (torch.bfloat16, "mean"), (torch.float16, "max")
            for algorithm, (dtype, op) in every(5, product(algorithms, values)):
                x = rank_values(rank, SHAPE, dtype)
                arguments = {"spec": SPECS[name], "op": op, "options": how(algorithm)}
                found = compare(put, codec.torch.all_reduce, x, **arguments)
                assert found == "success", (name, algorithm, dtype, found)


@pytest.mark.nccl
@pytest.mark.parametrize("part", every(2, range(6)))
def test_all_reduce_equals_that_of_host_memory_for_every_codec(ranks, kind, part):
    ranks.run(_all_reduces, kind, [*SPECS][part::6])


def _engine(rank, size, kind):
    """Return the kernels that each way to reduce has launched, and the bytes of the tensor that it copied."""
    found = {}
    with gpu(kind) as put:
        for name, settings in (("default", {}), ("native", {"engine": "native"})):
            x, before = put(rank_values(rank, SHAPE)), DeviceTensor.copied_nbytes
            codec.torch.all_reduce(x, codec.Quantize(4), options=how(**settings))
            found[name] = DeviceTensor.copied_nbytes - before
        streams.engine_is_usable.cache_clear()
        streams.choose, choose = _no_engine, streams.choose
        try:
            x, before = put(rank_values(rank, SHAPE)), DeviceTensor.copied_nbytes
            codec.torch.all_reduce(x, codec.Quantize(4), options=how())
            found["no engine"] = DeviceTensor.copied_nbytes - before
        finally:
            streams.choose = choose
            streams.engine_is_usable.cache_clear()
    return found


def _no_engine(*_):
    raise codec.EngineError("CuPy is not installed")


def test_tensor_is_copied_to_host_memory_only_without_the_cuda_engine(pair):
    nbytes = 4 * SHAPE[0] * SHAPE[1]
    want = {"default": 0, "native": nbytes, "no engine": nbytes}
    assert pair.run(_engine, "emulated") == [want, want]


def _other_collectives(rank, size, kind):
    x = rank_values(rank, (40 * size, 100))
    with gpu(kind) as put:
        for spec in (codec.Lossless(), codec.Float8(group_size=100), codec.Quantize(4), codec.Ternary()):
            for dtype in (torch.float32, torch.bfloat16):
                values = x.to(dtype)
                for call, n in (
                    (codec.torch.reduce_scatter, len(x) // size),
                    (codec.torch.all_gather, len(x) * size),
                    (codec.torch.all_to_all, len(x)),
                ):
                    results = [torch.zeros(n, 100, dtype=dtype), put(torch.zeros(n, 100, dtype=dtype))]
                    for output, tensor in zip(results, (values, put(values)), strict=True):
                        call(output, tensor, spec)
                    assert torch.equal(results[0], host(results[1])), (call, spec)
                    call(output := torch.zeros(n, 100, dtype=dtype), put(values), spec)  # from the GPU to the host
                    assert torch.equal(results[0], output)


@pytest.mark.nccl
def test_other_collectives_equal_those_of_host_memory(ranks, kind):
    ranks.run(_other_collectives, kind)


def _mixed(rank, size, kind):
    with gpu(kind) as put:
        for spec in (codec.Lossless(), codec.Quantize(4)):
            for algorithm in ALGORITHMS:
                x = put(rank_values(rank, SHAPE)) if rank else rank_values(rank, SHAPE)
                codec.torch.all_reduce(x, spec, options=how(algorithm))
                codec.torch.all_reduce(want := rank_values(rank, SHAPE), spec, options=how(algorithm))
                assert torch.equal(host(x), want), (spec, algorithm)


def test_ranks_with_and_without_a_gpu_reduce_together(pair, kind):
    pair.run(_mixed, kind)


def _arguments(rank, size, kind):
    """Layouts, views, outputs, callers in the background, and state of an optimizer."""
    x = rank_values(rank, (40, 300))
    with gpu(kind) as put:
        compare(put, lambda t: codec.torch.all_reduce(t.t(), codec.Float8(), options=how()), x)
        compare(put, lambda t: codec.torch.all_reduce(t[5:, 1:7], codec.Float8(), options=how()), x)
        bucket = rank_values(rank, (12_000,))
        shapes = {"weight": (100, 100), "bias": (2000,)}
        compare(
            put,
            lambda t: codec.torch.all_reduce(codec.view(t, segments=shapes), codec.Sign("l1", "row"), options=how()),
            bucket,
        )
        there, before = put(x), tensor_bytes(x)
        for out in (put(torch.zeros_like(x)), torch.zeros_like(x)):
            codec.torch.all_reduce(there, codec.Quantize(4), out=out, options=how())
            codec.torch.all_reduce(want := x.clone(), codec.Quantize(4), options=how())
            assert torch.equal(host(out), want)
            assert tensor_bytes(host(there)) == before
        found = outcome(codec.torch.all_reduce, there, out=there.view(-1), options=how())
        assert "shares memory" in found[1]
        work = codec.torch.all_reduce(there, codec.Quantize(4), async_op=True, options=how())
        assert work.wait()
        assert torch.equal(host(there), want)

        state = {name: rank_values(7, (12_000,)).square() for name in ("theta", "m", "v")}
        for spec in TRUNCATES.values():
            if spec.fixed_level is None:
                on_host, on_gpu = spec.bind(ADAMW, **state), spec.bind(ADAMW, **{k: put(v) for k, v in state.items()})
                codec.torch.all_reduce(here := bucket.clone(), on_host, options=how())
                codec.torch.all_reduce(there := put(bucket), on_gpu, options=how())
                assert torch.equal(here, host(there)), spec


def test_all_reduce_takes_views_outputs_and_optimizer_state_on_the_gpu(pair, kind):
    pair.run(_arguments, kind)


def _feedback(rank, size, kind):
    """Reduce tensors with error feedback, on a GPU in most steps, and with residuals from a checkpoint in others."""
    with gpu(kind) as put:
        for algorithm in ("two_shot", "all_gather", "raw"):
            spec = TOPKS["topk_2"] if algorithm == "all_gather" else codec.Sign()
            here, there = codec.torch.Feedback(spec), codec.torch.Feedback(spec)
            for step, place in enumerate((put, put, torch.clone, put)):
                x = rank_values(10 * step + rank, SHAPE)
                codec.torch.all_reduce(x_here := x.clone(), op="mean", feedback=here, options=how(algorithm))
                codec.torch.all_reduce(x_there := place(x), op="mean", feedback=there, options=how(algorithm))
                assert torch.equal(x_here, host(x_there)), (algorithm, step)
                if step == 0:
                    there.load_state_dict(there.state_dict())
            mine, its = here.state_dict(), there.state_dict()
            assert here.norms() == pytest.approx(there.norms())
            for role in ("worker", "server"):
                tensors = {k: v for k, v in mine[role].items() if isinstance(v, torch.Tensor)}
                assert tensors.keys() == {k for k, v in its[role].items() if isinstance(v, torch.Tensor)}
                assert all(torch.equal(v, its[role][k]) for k, v in tensors.items())


@pytest.mark.nccl
def test_error_feedback_equals_that_of_host_memory(ranks, kind):
    ranks.run(_feedback, kind)


def _waits(rank, size):
    """Return how often the host waits in the third call, by codec and algorithm."""
    found = {}
    with counted_gpu() as (_, traffic):
        for name in ("lossless", "quantize_4", "sign_l1"):
            for algorithm in ("two_shot", "all_gather"):
                x = on_device(rank_values(rank, SHAPE))
                for _ in range(3):
                    traffic.clear()
                    codec.torch.all_reduce(x, SPECS[name], op="mean", options=how(algorithm))
                found[name, algorithm] = traffic["waits"]
    return found


def test_host_waits_for_few_things(pair):
    for found in pair.run(_waits):
        # frames, sums, the verdict, the result in place
        assert {k: n for k, n in found.items() if n > (4 if k[1] == "two_shot" else 3)} == {}


def test_host_waits_for_own_frames_once_a_phase_if_they_stay_on_gpus(gpus):
    for found in gpus.run(_waits):
        assert found["quantize_4", "two_shot"] == found["quantize_4", "all_gather"] == 2  # the verdict, and the result
        for name in ("lossless", "sign_l1"):  # besides, sizes and heads of this rank's frames in each phase
            assert found[name, "two_shot"] == 4
            assert found[name, "all_gather"] == 3


def _residual_copies(rank, size):
    """Return the bytes that error feedback copies to the host, for a tensor that is reduced again and again."""
    with gpu("emulated") as put:
        feedback = codec.torch.Feedback(codec.Quantize(4))
        for step in range(3):
            before = DeviceTensor.copied_nbytes
            x = put(rank_values(10 * step + rank, SHAPE))
            codec.torch.all_reduce(x, op="mean", feedback=feedback, options=how())
        return DeviceTensor.copied_nbytes - before


def test_residuals_stay_on_the_gpu(pair):
    assert pair.run(_residual_copies) == [0, 0]


class _BucketOnGpu:
    """Bucket of DistributedDataParallel whose gradients lie on a GPU."""

    def __init__(self, bucket, buffer):
        self._bucket, self._buffer = bucket, buffer

    def __getattr__(self, name):
        return getattr(self._bucket, name)

    def buffer(self):
        return self._buffer


def _register(model, hook, place):
    """Register a hook for buckets that `place` puts on a GPU."""

    def reduce(hook, bucket):
        future = hook.reduce(_BucketOnGpu(bucket, place(bucket.buffer())))
        return future.then(lambda done: host(done.value()))

    reduce.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    model.register_comm_hook(hook, reduce)


def _by_kind(name, parameter):
    """Return other specs for biases and norms than for matrices."""
    if parameter.dim() > 1:
        return None
    return codec.Lossless() if name.startswith("1.") else codec.Quantize(8)


def _train(rank, size, kind, name, feedback, choose=None):
    """Train by a hook with gradients in host memory and on a GPU; return whether parameters and residuals are equal."""
    spec, found = (SPECS | TOPKS | TRUNCATES)[name], []
    policy = replace(ENCODE_ALL, choose=choose)
    with gpu(kind) as put:
        for place in (torch.clone, put):
            model = wrapped()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            hook = codec.torch.ddp_hook(spec, optimizer=optimizer, feedback=feedback, policy=policy, options=how())
            _register(model, hook, place)
            train(model, optimizer, rank, 3 if choose is None else 2)
            assert place is torch.clone or hook.stats().scratch_nbytes > 0
            found.append((parameter_bytes(model), hook_state_bytes(hook) if feedback else b""))
    return found[0] == found[1]


@pytest.mark.nccl
@pytest.mark.parametrize(
    ("name", "feedback"),
    [("quantize_4", True), ("topk_2", True), ("truncate_bit", False)]
    + [
        pytest.param(*x, marks=pytest.mark.nightly)
        for x in (("lossless", False), ("sign_row", True), ("float8_e4m3fn", False))
    ],
)
def test_ddp_hook_trains_as_with_gradients_in_host_memory(ranks, kind, name, feedback):
    assert all(ranks.run(_train, kind, name, feedback))


@pytest.mark.nccl
def test_ddp_hook_with_several_specs_trains_as_with_gradients_in_host_memory(ranks, kind):
    assert all(ranks.run(_train, kind, "quantize_4", True, _by_kind))


def _launched_by_parts(rank, size):
    """Return the kernels and the waits of steps over one bucket of one part, and of three parts."""
    found = []
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))
    with counted_gpu() as (device, traffic):
        for policy in (ENCODE_ALL, replace(ENCODE_ALL, choose=lambda name, _: codec.Quantize(2 + int(name[0])))):
            torch.manual_seed(0)
            net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
            model = torch.nn.parallel.DistributedDataParallel(net)  # one bucket
            _register(model, codec.torch.ddp_hook(codec.Quantize(4), policy=policy, options=how()), on_device)
            for _ in range(3):
                traffic.clear()
                device.launched.clear()
                model(x).square().mean().backward()
            found.append((sorted(device.launched), traffic["waits"]))
    return found


def test_parts_of_a_bucket_share_launches_and_waits(pair, gpus):
    for ranks in (pair, gpus):
        for (one, waits), (three, more_waits) in ranks.run(_launched_by_parts):
            assert one.count("encode_rows<6>") == 2  # terms, and sums
            assert three == one
            assert more_waits == waits + 1  # results of parts are copied into the bucket


def _several(rank, size, kind):
    """Reduce tensors side by side, by algorithms with other numbers of phases; an error of one is an error of all."""
    comm, found = communicator.communicator_of(None), []
    cases = [
        (600_000, torch.float32, codec.Quantize(4), TWO_SHOT),
        (3000, torch.float32, codec.Lossless(), ALL_GATHER),
        (9000, torch.bfloat16, codec.Float8(), TWO_SHOT),
        (0, torch.float32, codec.Sign(), ALL_GATHER),
        (70_000, torch.bfloat16, codec.Lossless(), TWO_SHOT),
    ]
    with gpu(kind) as put:
        for place, spoiled in ((torch.clone, None), (put, 2), (put, None)):

            async def reduced(collective, place=place, spoiled=spoiled):
                planned = []
                for i, (n, dtype, spec, algorithm) in enumerate(cases):
                    x = rank_values(10 * rank + i, (n,)).to(dtype)
                    if (rank, i) == (1, spoiled):
                        x[n // 2] = torch.nan
                    r = arguments.reduction_of(place(x), spec, "mean", i)
                    on_gpus = collective.device.connected and r.on_device
                    planned.append((r, algorithm.on_device if on_gpus else algorithm))
                results = await execution.run_several(collective, "two_shot", planned)
                for r, _ in planned:
                    await execution.settle(collective, r)
                await collective.agree()
                tensors = [r.tensor_of(result) for (r, _), result in zip(planned, results, strict=True)]
                return [tensor_bytes(host(t)) for t in tensors]

            try:
                found.append(comm.run(reduced))
            except codec.CodecError as e:
                found.append(type(e).__name__)
    assert found[2] == found[0]
    return found[1]


@pytest.mark.nccl
def test_several_tensors_are_reduced_together(ranks, kind):
    errors = ranks.run(_several, kind)
    assert errors[1] == "ArgumentError"
    assert set(errors) == {"ArgumentError", "PeerError"}


def _float64(rank, size, kind):
    comm = communicator.communicator_of(None)
    every = [rank_values(r, (9000,)).double() for r in range(size)]
    with gpu(kind) as put:
        x = put(every[rank])
        mean = comm.run(lambda collective: uncompressed.mean(collective, x, None))
        assert mean.device == x.device
        assert torch.equal(host(x), every[rank])
    total = every[0]
    for other in every[1:]:
        total = total + other
    assert torch.equal(host(mean), total / size)


@pytest.mark.nccl
def test_float64_gradients_on_a_gpu_are_summed_uncompressed(ranks, kind):
    ranks.run(_float64, kind)


def _fsdp(rank, size, kind):
    """Call the collectives of FSDP2 as it does."""
    group, average = dist.group.WORLD, dist.ReduceOp.AVG
    x = rank_values(rank, (4000 * size,))
    with gpu(kind) as put:
        results = []
        for place in (torch.clone, put):
            reduce_scatter = codec.torch.ReduceScatter(codec.Float8(group_size=100))
            all_gather = codec.torch.AllGather()
            shard, whole = place(torch.zeros(4000)), place(torch.zeros(4000 * size))
            reduce_scatter(shard, place(x), group, average)
            if (work := all_gather(whole, shard, group, async_op=True)) is not None:
                work.wait()
            replicas = codec.torch.AllReduce(codec.Quantize(4), group=group, feedback=True, options=how())
            for step in range(3):
                replicas.all_reduce("layer", gradients := place(rank_values(10 * step + rank, (9000,))))
            residual = replicas.state_dict()[f"rank {rank}"]["residuals"]["layer"]
            norm = replicas.stats().residual_norm
            results.append((*(tensor_bytes(host(t)) for t in (shard, whole, gradients, residual)), norm))
        assert results[0][:4] == results[1][:4]
        assert results[0][4] == pytest.approx(results[1][4])


@pytest.mark.nccl
def test_fsdp_collectives_equal_those_of_host_memory(ranks, kind):
    ranks.run(_fsdp, kind)


def _backend(rank, size, kind):
    """Call torch.distributed over the backend `codec`."""
    how = codec.torch.Options(codec.Float8(group_size=100), algorithm="two_shot")  # rounds to nearest
    group = dist.new_group(backend="codec", pg_options=how)
    x = rank_values(rank, (5000 * size,))
    results = []
    with gpu(kind) as put:
        for place in (torch.clone, put):
            reduced, shard, whole = place(x), place(torch.zeros(5000)), place(torch.zeros(5000 * size))
            dist.all_reduce(reduced, group=group)
            dist.reduce_scatter_tensor(shard, place(x), group=group)
            dist.all_gather_into_tensor(whole, shard, group=group)
            tensors = [place(torch.zeros(5000)) for _ in range(size)]
            dist.all_gather(tensors, shard, group=group)
            small = place(torch.full((7,), float(rank)))
            dist.all_reduce(small, dist.ReduceOp.MAX, group=group)
            results.append([tensor_bytes(host(t)) for t in (reduced, shard, whole, small, *tensors)])
    assert results[0] == results[1]
    assert group.stats().frame_collectives == 9  # all but the small one in host memory
    dist.destroy_process_group(group)


def test_backend_takes_tensors_on_a_gpu(pair, kind):
    pair.run(_backend, kind)


def _auto(rank, size, kind):
    """Reduce by "auto"; return which calls sent uncompressed values, the messages of the log, and the last outcome."""
    ways, messages, feedback = [], [], codec.torch.Feedback(codec.Quantize(4))
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("codec.torch").addHandler(handler)
    logging.getLogger("codec.torch").setLevel(logging.INFO)
    try:
        with gpu(kind) as put:
            total = torch.zeros(100, 400)
            for call in range(7):
                before = codec.torch.group_stats()
                every = [rank_values(size * call + q, (100, 400)) for q in range(size)]
                x = put(every[rank])
                codec.torch.all_reduce(x, op="mean", feedback=feedback, options=how("auto"))
                total += host(x) - sum(every) / size
                ways.append((codec.torch.group_stats() - before).raw_collectives)
            residuals = feedback.state_dict()
            assert max(float(t.abs().max()) for t in residuals["worker"].values() if isinstance(t, torch.Tensor)) < 1e-6
            assert float(total.abs().max()) < 1e-5  # residuals of frames were sent with uncompressed values
            for _ in range(5):
                codec.torch.all_reduce(x := put(torch.ones(100, 400)), options=how("auto"))
                assert bool(host(x).eq(size).all())
                assert not communicator.communicator_of(None).channel.device._in_flight
            every[0][3, 5] = torch.nan
            found = outcome(codec.torch.all_reduce, put(every[rank]), op="mean", feedback=feedback, options=how("auto"))
    finally:
        logging.getLogger("codec.torch").removeHandler(handler)
    return ways, [m for m in messages if "Quantize" in m and "sent uncompressed from now on" in m], found


@pytest.mark.nccl
def test_auto_uses_all_reduce_of_nccl_where_it_is_faster(gpus, kind):
    (ways, messages, found), (others, _, other) = gpus.run(_auto, kind)
    assert ways == others
    assert ways[:5] == [0, 0, 0, 1, 1]  # the trial
    if kind == "emulated":  # kernels on the CPU are slower than any link
        assert ways[5:] == [1, 1]
        assert len(messages) == 1
    assert (found[0], found[2]) == ("ArgumentError", codec.Status.NONFINITE)
    assert (other[0], other[2]) == ("PeerError", codec.Status.NONFINITE)


def _special_values(rank, size, kind):
    with gpu(kind) as put:
        found = []
        for spec in (codec.Float8(), codec.Sign(), codec.Lossless(), codec.Float8(nonfinite="propagate")):
            for algorithm in ("two_shot", "all_gather", "raw"):
                x = rank_values(rank, SHAPE)
                x[3, 5] = torch.nan if rank == 1 else 1
                found.append(compare(put, codec.torch.all_reduce, x, spec=spec, options=how(algorithm)))
                x[3, 5] = 3e38
                compare(put, codec.torch.all_reduce, x, spec=spec, options=how(algorithm))
        codec.torch.all_reduce(x := put(torch.ones(SHAPE)), codec.Float8(), options=how())  # the group still works
        assert bool(host(x).eq(size).all())
        return found


@pytest.mark.nccl
def test_nan_on_one_rank_is_an_error_on_all_ranks(ranks, kind):
    for rank, found in enumerate(ranks.run(_special_values, kind)):
        want = "ArgumentError" if rank == 1 else "PeerError"
        assert [error[0] for error in found[:6]] == [want] * 6
        assert [error[2] for error in found[:6]] == [codec.Status.NONFINITE] * 6
        assert found[6:] == ["success"] * 6


def _nan_later(rank, size, kind):
    """Reduce three times, in the third one with NaN on rank 1, when no rank waits for the heads of frames."""
    found = []
    with gpu(kind) as put:
        for algorithm in ("two_shot", "all_gather"):
            for last in (False, False, True, False):
                values = rank_values(rank, SHAPE)
                values[3, 5] = torch.nan if last and rank == 1 else 1
                x = put(values)
                result = outcome(codec.torch.all_reduce, x, codec.Quantize(4), options=how(algorithm))
                found.append(result if result == "success" else (result[0], result[2]))
                assert result == "success" or tensor_bytes(host(x)) == tensor_bytes(values)
    return found


@pytest.mark.nccl
def test_nan_is_an_error_on_all_ranks_if_the_host_does_not_wait_for_frames(ranks, kind):
    for rank, found in enumerate(ranks.run(_nan_later, kind)):
        error = "ArgumentError" if rank == 1 else "PeerError", codec.Status.NONFINITE
        assert found == ["success", "success", error, "success"] * 2


def _damaged(rank, size, kind):
    """Rank 1 sends damaged frames; return the outcome and whether the tensor is unchanged."""
    found = []

    def damage(frame, to):
        frame = np.array(frame)
        frame[-1] ^= 1
        return frame

    with gpu(kind) as put:
        for spec in (codec.Lossless(), codec.Quantize(4), codec.Ternary()):
            for algorithm in ("two_shot", "all_gather"):
                x = put(values := rank_values(rank, SHAPE))
                with damaged_frames(damage) if rank == 1 else contextlib.nullcontext():
                    found.append(outcome(codec.torch.all_reduce, x, spec, options=how(algorithm))[0])
                assert torch.equal(host(x), values)
    return found


def test_damaged_frame_is_an_error_on_all_ranks(pair, kind):
    assert pair.run(_damaged, kind) == [["ChecksumError"] * 6, ["PeerError"] * 6]


def _killed(rank, size, kind, spec, point):
    with gpu(kind) as put:
        codec.torch.all_reduce(put(torch.ones(10)), options=how())
        channel = communicator.communicator_of(None).channel
        x = put(values := rank_values(rank, SHAPE))
        with at_fault_point(channel, point if rank == 1 else -1, die):
            found = outcome(codec.torch.all_reduce, x, spec, options=how())
        assert torch.equal(host(x), values)
        return found[0]


def _bytes_by_way(rank, size):
    """Return the bytes that an all-reduce sends from GPU to GPU and from host memory, and copies to host memory."""
    with gpu("emulated") as put:
        for spec in (codec.Float8(), codec.Lossless()):
            codec.torch.all_reduce(x := put(rank_values(rank, (70_000,))), spec, options=how())
            channel, messages, read = communicator.communicator_of(None).channel, [], Emulated.read_nbytes
            copied = DeviceTensor.copied_nbytes
            before, send = channel.counters.copy(), channel.mesh.send
            channel.mesh.send = lambda *args, send=send, messages=messages: messages.append(args[-1]) or send(*args)
            codec.torch.all_reduce(x, spec, options=how())
            del channel.mesh.send
            assert all(sum(part.nbytes for part in body) < 1024 for body in messages)  # integers and heads
            assert DeviceTensor.copied_nbytes == copied
            assert Emulated.read_nbytes - read < 2 * size * (8 + 4096 + 256)  # lengths, first bytes, verdicts
            yield (channel.counters - before).sent_nbytes


def _frames_stay_on_gpus(rank, size):
    fixed, variable = _bytes_by_way(rank, size)
    largest = codec.frame_nbytes(70_000 - 34_816, "float32", codec.Float8())  # slices begin at multiples of 1,024
    assert fixed == 2 * -(-(8 + largest) // 16) * 16
    assert fixed < variable < 4 * 70_000


def test_only_headers_are_copied_to_host_memory_if_frames_stay_on_gpus(gpus):
    gpus.run(_frames_stay_on_gpus)


def _slots(rank, size):
    """Return the rows of both phases of a two-shot all-reduce, the messages before them, and this rank's values."""
    channel, rows, messages = communicator.communicator_of(None).channel, [], []
    device, send = channel.device, channel.mesh.send
    channel.mesh.send = lambda *args: messages.append(b"".join(bytes(b) for b in args[-1])) or send(*args)
    for name in ("all_to_all", "all_gather"):
        collective = getattr(device, name)

        def noted(sent, counters, run=collective):
            rows.append(host(sent).numpy().copy())
            return run(sent, counters)

        setattr(device, name, noted)
    with gpu("emulated") as put:
        x = rank_values(rank, (7000,))
        codec.torch.all_reduce(put(x), codec.Quantize(4), stream=5, options=how())
    return *rows, messages[:2], x.numpy()


def _frame(values, number):
    return codec.encode(values, codec.Quantize(4), stream=(5 * 0x9E3779B97F4A7C15 + number) % 2**64)


def test_slots_between_gpus_are_as_specified(gpus):
    found = gpus.run(_slots)
    size, cuts = 2, [0, 3072, 7000]
    slices = [slice(a, b) for a, b in pairwise(cuts)]
    T = -(-(8 + codec.frame_nbytes(7000 - 3072, "float32", codec.Quantize(4))) // 16) * 16
    for r, (terms, sums, messages, x) in enumerate(found):
        assert (terms.shape, sums.shape) == ((size, 1, T), (1, T))
        total = codec.reduce([_frame(x[slices[r]], q * size + r) for q, (*_, x) in enumerate(found)], op="sum")
        want = [_frame(x[slices[o]], r * size + o) for o in range(size)] + [_frame(total, size * size + r)]
        for slot, frame in zip([*terms[:, 0], sums[0]], want, strict=True):
            assert slot[:8].tobytes() == len(frame).to_bytes(8, "little")
            assert slot[8 : 8 + len(frame)].tobytes() == frame
        terms_most = max(len(frame) for frame in want[:size])
        (first, second), head = messages, codec.inspect(want[0]).sections["directory"][0]
        assert first == struct.pack("<4q", terms_most, len(want[1 - r]), head, 1) + want[1 - r][:head]
        assert second[:56] == struct.pack("<4q", len(want[2]), len(want[2]), head, 0) + want[2][:24]
        assert second[64:] == want[2][32:head]  # behind the checksum, which the sender does not know


def _altered(rank, size, kind):
    """Alter what rank 0 gets from rank 1; return the outcomes and whether all tensors are unchanged."""
    device, found = communicator.communicator_of(None).channel.device, []

    def altering(name, at, value):
        collective = getattr(device, name)

        def run(rows, counters):
            received = collective(rows, counters)
            if rank == 0:
                slot = host(received[1, 0]).clone()
                slot[at] = slot[at] ^ value
                received[1, 0].copy_(slot.to(received.device))
            return received

        return run

    with gpu(kind) as put:
        for name in ("all_to_all", "all_gather"):
            for at, value in ((500, 1), (7, 64), (8 + 5, 3), (8 + 48, 1)):  # a value, the length, the codec, the shape
                x = put(values := rank_values(rank, SHAPE))
                setattr(device, name, altering(name, at, value))
                try:
                    found.append(outcome(codec.torch.all_reduce, x, codec.Quantize(4), options=how("two_shot"))[0])
                finally:
                    delattr(device, name)
                assert torch.equal(host(x), values)
    return found


@pytest.mark.nccl
def test_altered_frame_between_gpus_is_an_error_on_all_ranks(gpus, kind):
    errors = ["ChecksumError", "FrameError", "FrameError", "FrameError"] * 2
    assert gpus.run(_altered, kind) == [errors, ["PeerError"] * 8]


def _announcing(rank, size, kind):
    """Have rank 1 send wrong heads; return the outcomes and whether all tensors are unchanged."""
    found, pack = [], heads.pack

    def damaged(largest, row, at):
        head = row[0].head.copy()
        head[at % len(head)] ^= 1
        return pack(largest, [row[0]._replace(head=head), *row[1:]])

    def resized(largest, row, change):
        return pack(largest, [row[0]._replace(nbytes=row[0].nbytes + change), *row[1:]])

    def cut(largest, row):
        return pack(largest, [row[0]._replace(head=row[0].head[:-8]), *row[1:]])

    changes = [partial(damaged, at=at) for at in (5, 24, 48, -1)]
    changes += [partial(resized, change=8), partial(resized, change=-8), partial(resized, change=1 << 40), cut]
    with gpu(kind) as put:
        for change in changes:
            for algorithm in ("two_shot", "all_gather"):
                x = put(values := rank_values(rank, SHAPE))
                heads.pack = change if rank == 1 else pack
                try:
                    found.append(outcome(codec.torch.all_reduce, x, codec.Lossless(), options=how(algorithm))[0])
                finally:
                    heads.pack = pack
                assert torch.equal(host(x), values)
        assert outcome(codec.torch.all_reduce, put(values), codec.Lossless(), options=how()) == "success"
    return found


@pytest.mark.nccl
def test_wrong_heads_of_frames_are_errors_on_all_ranks(gpus, kind):
    mine, theirs = gpus.run(_announcing, kind)
    assert theirs == ["PeerError"] * len(mine)
    assert set(mine) == {"FrameError", "ChecksumError", "UnsupportedError"}


def _malformed(rank, size, how_many):
    """Have rank 1 send `how_many` bytes more than it should about its frames."""
    pack = heads.pack

    def changed(largest, row):
        body = np.concatenate(pack(largest, row))
        return [body[:how_many] if how_many < 0 else np.append(body, np.zeros(how_many, np.uint8))]

    with gpu("emulated") as put:
        codec.torch.all_reduce(put(torch.ones(10)), options=how())
        x = put(values := rank_values(rank, SHAPE))
        heads.pack = changed if rank == 1 else pack
        try:
            found = outcome(codec.torch.all_reduce, x, codec.Lossless(), options=how())[0]
        finally:
            heads.pack = pack
        assert torch.equal(host(x), values)
        return found, communicator.communicator_of(None).channel.closed


@pytest.mark.parametrize("how_many", [-1, 8])
def test_malformed_message_about_frames_ends_the_group_at_once(gpus, how_many):
    [mine, _], [theirs, closed] = gpus.run(_malformed, how_many)
    assert (mine, theirs, closed) == ("FrameError", "PeerError", True)


def _large_frame(rank, size):
    """Announce a frame on rank 1 that is larger than possible."""
    pack = heads.pack
    if rank == 1:
        heads.pack = lambda largest, row: pack(1 << 40, row)
    try:
        with gpu("emulated") as put:
            return outcome(codec.torch.all_reduce, put(torch.ones(SHAPE)), codec.Lossless(), options=how())[0]
    finally:
        heads.pack = pack


def test_size_beyond_the_bound_of_a_frame_is_an_error_on_all_ranks(gpus):
    gpus.run(_connect)
    assert gpus.run(_large_frame) == ["PeerError", "PeerError"]


def _connect(rank, size):
    communicator.communicator_of(None)


def _cannot_encode(rank, size):
    """Let rank 1 have no CUDA engine; return whether frames stay on GPUs."""
    nccl.engine_is_usable = lambda: rank == 0
    with gpu("emulated") as put:
        codec.torch.all_reduce(x := put(torch.ones(SHAPE)), codec.Float8(), options=how())
        assert bool(host(x).eq(size).all())
    return communicator.communicator_of(None).channel.device.connected


def test_frames_cross_to_host_memory_if_a_rank_cannot_encode_on_its_gpu(gpus):
    assert gpus.run(_cannot_encode) == [False, False]


def _on_one_gpu(rank, size):
    with gpu("emulated") as put:
        x = put(torch.ones(SHAPE)) if rank else torch.ones(SHAPE)
        found = outcome(codec.torch.all_reduce, x, codec.Float8(), options=how())[0]
        codec.torch.all_reduce(put(x) if rank == 0 else x, codec.Float8(), options=how())  # the group still works
        return found


def test_tensors_in_host_memory_and_on_gpus_are_not_reduced_together_over_nccl(gpus):
    assert gpus.run(_on_one_gpu) == ["PeerError"] * 2


def _silent(rank, size, kind, cancel):
    """Let rank 1 keep rank 0 waiting for its frame until a timeout, or until rank 0 cancels the collective."""
    comm = communicator.communicator_of(None, timeout=60 if cancel else 0.5)
    device = comm.channel.device

    def gather():
        with device.phase():
            device.all_gather(rows, comm.channel.counters)
        device.settle()

    with gpu(kind) as put:
        codec.torch.all_reduce(put(torch.ones(10)), options=how())  # NCCL connects GPUs in its first collective
        if rank == 1:
            return None
        rows = put(torch.zeros(10, dtype=torch.uint8))
        work = comm.worker.submit(gather)
        if cancel:
            comm.cancel()
        with pytest.raises(codec.PeerError) as error:
            work.wait(30)
    return str(error.value), comm.channel.closed


@pytest.mark.nccl
@pytest.mark.parametrize("cancel", [False, True])
def test_wait_for_frames_of_other_gpus_ends(gpus, kind, cancel):
    message, closed = gpus.run(_silent, kind, cancel)[0]
    assert ("was cancelled" if cancel else "did not arrive within 0:00:00.5") in message
    assert closed


@pytest.mark.nccl
@pytest.mark.parametrize("collective", ["all_to_all", "all_gather"])
def test_tensor_is_unchanged_if_a_rank_dies_before_its_frames_leave_the_gpu(gpus, kind, collective):
    gpus.start(_dies, kind, collective)
    assert gpus.results() == ["PeerError", KILLED]


def _dies(rank, size, kind, collective):
    with gpu(kind) as put:
        codec.torch.all_reduce(put(torch.ones(10)), options=how())
        if rank == 1:
            setattr(communicator.communicator_of(None).channel.device, collective, lambda *_: die())
        x = put(values := rank_values(rank, SHAPE))
        found = outcome(codec.torch.all_reduce, x, codec.Quantize(4), options=how())
        assert torch.equal(host(x), values)
        return found[0]


@pytest.mark.nccl
@pytest.mark.parametrize("collective", ["all_to_all", "all_gather"])
def test_error_while_frames_leave_the_gpu_fails_all_ranks_at_once(gpus, kind, collective):
    [message, unchanged], [_, also_unchanged] = gpus.run(_lacks_memory, kind, collective)
    assert "is gone" in message  # not a timeout
    assert unchanged
    assert also_unchanged


def _lacks_memory(rank, size, kind, collective):
    def fail(*_):
        raise MemoryError("no memory for received frames")

    with gpu(kind) as put:
        codec.torch.all_reduce(put(torch.ones(10)), options=how())
        if rank == 1:
            setattr(communicator.communicator_of(None).channel.device, collective, fail)
        x = put(values := rank_values(rank, SHAPE))
        with pytest.raises(MemoryError if rank == 1 else codec.PeerError) as error:
            codec.torch.all_reduce(x, codec.Quantize(4), options=how())
        return str(error.value), torch.equal(host(x), values)


class _FakeCuda:
    """Part of torch.cuda that notes the order of calls."""

    def __init__(self):
        self.calls = []
        self.caller, self.side = self._stream("caller"), self._stream("side")

    def _stream(self, name):
        def note(what):
            return lambda *args: self.calls.append((name, what, *args)) or f"event of {name}"

        return SimpleNamespace(
            record_event=note("record"), wait_event=note("wait for"), synchronize=note("synchronize")
        )

    capturing = False

    def is_initialized(self):
        return True

    def is_current_stream_capturing(self):
        return self.capturing

    def current_device(self):
        return 1

    def current_stream(self, device):
        assert device == 1
        return self.caller

    def Stream(self, device):
        assert device == 1
        return self.side

    def device(self, _):
        return nullcontext()

    @contextmanager
    def stream(self, stream):
        assert stream is self.side
        self.calls.append("enter")
        yield
        self.calls.append("leave")

    def synchronize(self, device):
        self.calls.append(("synchronize", device))


def _install_fake(monkeypatch):
    """Replace functions of torch.cuda by those of a _FakeCuda, which is returned."""
    fake = _FakeCuda()
    for name in ("is_initialized", "current_device", "current_stream", "Stream", "device", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fake.is_current_stream_capturing)
    streams._side_stream.cache_clear()
    return fake


@pytest.fixture
def fake_cuda(monkeypatch):
    yield _install_fake(monkeypatch)
    streams._side_stream.cache_clear()


def test_collective_waits_for_work_of_the_caller_and_returns_after_its_own(fake_cuda):
    async def collective():
        fake_cuda.calls.append("collective")

    task = Task(Work(None), collective, streams.StreamOrder.of_this_thread(), alone=False, of_callback=False)
    assert fake_cuda.calls == [("caller", "record")]  # when the collective is submitted, not when its turn comes
    assert task.step()
    assert fake_cuda.calls[1:] == [
        "enter",
        ("side", "wait for", "event of caller"),
        "collective",
        ("side", "synchronize"),
        "leave",
    ]


def test_collective_is_refused_while_its_stream_is_captured(fake_cuda):
    fake_cuda.capturing = True
    with pytest.raises(codec.EngineError, match="cannot be captured in a CUDA graph"):
        streams.StreamOrder.of_this_thread()
    assert not fake_cuda.calls


def _streams(rank, size):
    """Compute gradients in a stream of the caller, and reduce while it is captured; return the calls of the hook."""
    with pytest.MonkeyPatch.context() as m:
        model = wrapped(torch.nn.Linear(64, 64))
        codec.torch.ddp_hook(codec.Quantize(4)).register(model)
        fake = _install_fake(m)
        fake.caller = fake._stream("producer")
        model(torch.ones(2, 64)).sum().backward()
        calls = [call for call in fake.calls if call not in ("enter", "leave")]
        fake.capturing = True
        x = torch.arange(4.0)
        with pytest.raises(codec.EngineError, match="cannot be captured in a CUDA graph"):
            codec.torch.all_reduce(x)
        assert x.tolist() == [0, 1, 2, 3]
        streams._side_stream.cache_clear()
    return calls


def test_hook_follows_the_stream_in_which_gradients_were_computed():
    for calls in run_ranks(2, _streams):
        assert calls[0] == ("producer", "record")  # when the first bucket is ready
        assert calls[1] == ("side", "wait for", "event of producer")
        assert calls[-1] == ("side", "synchronize")


def test_tensor_on_another_gpu_is_synchronized(fake_cuda):
    for index in (1, 0):
        streams.settle(SimpleNamespace(device=torch.device("cuda", index)))
    streams.settle(torch.ones(1))
    assert fake_cuda.calls == [("synchronize", torch.device("cuda", 0))]


@pytest.mark.parametrize("point", [1, 4])
def test_tensor_is_unchanged_if_a_rank_dies(kind, point):
    with RankPool(2, timeout=5) as ranks:
        ranks.new_group()
        ranks.start(_killed, kind, codec.Quantize(4), point)
        assert ranks.results() == ["PeerError", KILLED]


@pytest.mark.nccl
@pytest.mark.parametrize("point", [0, 2, 5])  # before it sends heads, before it waits for them, in the second phase
def test_tensor_is_unchanged_if_a_rank_dies_while_heads_are_sent(gpus, kind, point):
    gpus.start(_killed, kind, codec.Lossless(), point)
    assert gpus.results() == ["PeerError", KILLED]
