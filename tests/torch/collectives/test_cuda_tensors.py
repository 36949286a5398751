"""Collectives of GPU tensors: the CUDA engine encodes on the device, and results equal those of host tensors.

Without a GPU, kernels run on the CPU (`support.cuda_tensors`). ``make gpu-tests`` runs this file with a GPU, which all
ranks share. ``make gpu-nccl`` runs the tests of frames between GPUs with NCCL itself.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

import codec
import codec.torch
from codec.torch.group import communicator
from codec.torch.reduction import arguments, execution
from codec.torch.reduction.table import ALL_GATHER, TWO_SHOT
from codec.torch.transport import streams
from support.collective_values import rank_values, tensor_bytes
from support.cuda_tensors import DeviceTensor, gpu, host, on_device
from support.ddp_training import ENCODE_ALL, hook_state_bytes, parameter_bytes, train, wrapped
from support.gpu_collectives import SHAPE, compare, how, outcome, register_on
from support.gpu_traffic import counted_gpu
from support.specs import LOSSLESS, LOSSY, TOPKS, TRUNCATES
from support.tensors import ADAMW
from support.tiers import NIGHTLY, every

ALGORITHMS = ("two_shot", "all_gather", "ring", "raw")
SPECS = LOSSLESS | LOSSY | {name: spec for name, spec in TRUNCATES.items() if spec.fixed_level is not None}


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


def _empty_slices(rank, size, kind):
    with gpu(kind) as put:
        for n, spec, algorithm in product((0, 100, 1100), (codec.Lossless(), codec.Quantize(4)), ALGORITHMS):
            x = rank_values(rank, (n,), torch.float32)
            found = compare(put, codec.torch.all_reduce, x, spec=spec, op="mean", options=how(algorithm))
            assert found == "success", (n, spec, algorithm, found)


@pytest.mark.nccl
def test_all_reduce_with_empty_slices_equals_that_of_host_memory(ranks, kind):
    """Only the last rank has a slice with values, and with Lossless nothing to encode for other ranks."""
    ranks.run(_empty_slices, kind)


def _engine(rank, size, kind):
    """Return, for each collective and spec, the launched kernels, and the number of tensor bytes copied to the host."""
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
        specs = codec.Lossless(), codec.Float8(group_size=100), codec.Quantize(4), codec.Ternary()
        for spec, dtype in every(3, product(specs, (torch.float32, torch.bfloat16))):
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
                call(output := torch.zeros(n, 100, dtype=dtype), put(values), spec)  # GPU input, host output
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
    """GPU tensors give host results for all layouts, views, outputs, asynchronous calls and optimizer states."""
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
    """Error feedback on a GPU equals that on the host, also if residuals come from a checkpoint or the host."""
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
    """Return the number of host waits in the third call, by codec and algorithm."""
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
        # The host waits once for the frames, once for the sums (two_shot only), once for the verdict, and once for
        # the copy of the result.
        assert {k: n for k, n in found.items() if n > (4 if k[1] == "two_shot" else 3)} == {}


def test_host_waits_for_own_frames_once_a_phase_if_they_stay_on_gpus(gpus):
    for found in gpus.run(_waits):
        # The host waits once for the verdict, and once for the result
        assert found["quantize_4", "two_shot"] == found["quantize_4", "all_gather"] == 2
        for name in ("lossless", "sign_l1"):  # one more wait per phase: sizes and heads of this rank's frames
            assert found[name, "two_shot"] == 4
            assert found[name, "all_gather"] == 3


def _residual_copies(rank, size):
    """Return the bytes that error feedback copies to the host in repeated all-reduces of a tensor."""
    with gpu("emulated") as put:
        feedback = codec.torch.Feedback(codec.Quantize(4))
        for step in range(3):
            before = DeviceTensor.copied_nbytes
            x = put(rank_values(10 * step + rank, SHAPE))
            codec.torch.all_reduce(x, op="mean", feedback=feedback, options=how())
        return DeviceTensor.copied_nbytes - before


def test_residuals_stay_on_the_gpu(pair):
    assert pair.run(_residual_copies) == [0, 0]


def _by_kind(name, parameter):
    """Policy with different specs for biases and norms than for matrices."""
    if parameter.dim() > 1:
        return None
    return codec.Lossless() if name.startswith("1.") else codec.Quantize(8)


def _train(rank, size, kind, name, feedback, choose=None):
    """Train with gradients on the host and on a GPU; return True if parameters and residuals are equal."""
    spec, found = (SPECS | TOPKS | TRUNCATES)[name], []
    policy = replace(ENCODE_ALL, choose=choose)
    with gpu(kind) as put:
        for place in (torch.clone, put):
            model = wrapped()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            hook = codec.torch.ddp_hook(spec, optimizer=optimizer, feedback=feedback, policy=policy, options=how())
            register_on(model, hook, place)
            train(model, optimizer, rank, 3 if NIGHTLY else 2)
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
    """Return the kernels and host waits of a step with one bucket, once with a single spec and once with three."""
    found = []
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))
    with counted_gpu() as (device, traffic):
        for policy in (ENCODE_ALL, replace(ENCODE_ALL, choose=lambda name, _: codec.Quantize(2 + int(name[0])))):
            torch.manual_seed(0)
            net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
            model = torch.nn.parallel.DistributedDataParallel(net)  # all layers are in one bucket
            register_on(model, codec.torch.ddp_hook(codec.Quantize(4), policy=policy, options=how()), on_device)
            for _ in range(3):
                traffic.clear()
                device.launched.clear()
                model(x).square().mean().backward()
            found.append((sorted(device.launched), traffic["waits"]))
    return found


def test_parts_of_a_bucket_share_launches_and_waits(pair, gpus):
    for ranks in (pair, gpus):
        for (one, waits), (three, more_waits) in ranks.run(_launched_by_parts):
            assert one.count("encode_rows<6>") == 2  # one launch for terms, one for sums
            assert three == one
            assert more_waits == waits + 1  # the extra wait: results of three parts are copied into the bucket


def _several(rank, size, kind):
    """Concurrent reductions by algorithms with different numbers of phases succeed, or all fail if one fails."""
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


def test_copy_in_host_memory_keeps_the_sizes_of_slices(kind):
    with gpu(kind) as put:
        r = arguments.reduction_of(put(torch.ones(9000)), codec.Lossless(), "sum", 0)
        r.weights = 1, 3
        assert r.on_host().slices(2) == r.slices(2)
