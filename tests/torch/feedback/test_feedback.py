"""Error feedback of all-reduces equals a numpy oracle, loses no part of a gradient, and keeps residuals by name."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from support.ddp_training import take_step
from support.feedback import BUCKETS, NEAREST, SPECS, N, Oracle, corrections, gathered, gradient, reduce
from support.ranks import run_ranks


def _values(rank, size):
    for spec in NEAREST:
        for algorithm, op in (("two_shot", "mean"), ("two_shot", "sum"), ("all_gather", "mean")):
            oracle, feedback = Oracle(spec, size, op, algorithm), codec.torch.Feedback(spec)
            for step in range(4):
                want = oracle.step([gradient(r, step).numpy() for r in range(size)])
                got = reduce(gradient(rank, step), feedback, algorithm, op=op)
                assert got.numpy().tobytes() == want.tobytes(), (spec, algorithm, op, step)
            state = feedback.state_dict()
            assert state["worker"][f"[0:{N}]"].numpy().tobytes() == oracle.workers[rank].tobytes()
            mine = oracle.slices[rank] if oracle.two_shot else slice(0, 0)
            server = {name: x for name, x in state["server"].items() if isinstance(x, torch.Tensor)}
            if not oracle.two_shot:
                assert not server
            else:
                assert server[f"[{mine.start}:{mine.stop}]"].numpy().tobytes() == oracle.servers[mine].tobytes()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_values_and_residuals_are_those_of_the_definition(size):
    run_ranks(size, _values)


def _imbalance(rank, size, spec, algorithm, op, steps):
    """Return the largest |sum of inputs - sum of results - residuals| and |sum of inputs - sum of results| of any
    value.

    Both are divided by the largest magnitude of an input or residual. The first is also multiplied by 2**23, so that 1
    means one float32 rounding step of that magnitude.
    """
    feedback, largest = codec.torch.Feedback(spec), 0.0
    put, got = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    for step in range(steps):
        x = gradient(rank, step)
        put += x
        got += reduce(x, feedback, algorithm, op=op, stream=step)
        largest = max(largest, float(x.abs().max()))
    dist.all_reduce(put)
    put /= size if op == "mean" else 1
    held = torch.from_numpy(corrections(gathered(feedback), op)[""][:N])
    largest = max(largest, float(held.abs().max()))
    return float((put - got - held).abs().max()) / largest * 2.0**23, float((put - got).abs().max()) / largest


CASES = [("two_shot", "mean"), ("two_shot", "sum"), ("all_gather", "mean"), ("raw", "mean"), ("auto", "sum")]


def _balances(rank, size, steps):
    return {
        (spec, algorithm, op): _imbalance(rank, size, spec, algorithm, op, steps)
        for spec in SPECS
        for algorithm, op in CASES
    }


@pytest.mark.parametrize("size", [1, 3])
def test_results_and_residuals_add_up_to_the_inputs(size):
    steps = 6
    for found in run_ranks(size, _balances, steps):
        for (spec, algorithm, op), (imbalance, lost) in found.items():
            assert imbalance < 4 * size * steps, (spec, algorithm, op)
            # "auto" may choose the uncompressed all-reduce
            if algorithm != "auto" and (algorithm != "raw" or size == 1):
                assert lost > 0.01, (spec, algorithm, op)


def _renamed(rank, size, op):
    """Change buckets and algorithms between steps, so that other ranks own the sums; check that no residual is lost."""
    feedback = codec.torch.Feedback(codec.Quantize(2, levels="odd", rounding="nearest"))
    put, got = {}, {}
    for step in range(9):
        shapes = BUCKETS[step % 3]
        n = sum(int(np.prod(s)) for s in shapes.values())
        x = gradient(rank, step, n)
        sent = x.double()
        result = x.clone()
        algorithm = ("two_shot", "raw", "all_gather", "two_shot")[step % 4]
        codec.torch.all_reduce(
            codec.view(result, segments=shapes), feedback=feedback, op=op, options=codec.options(algorithm=algorithm)
        )
        dist.all_reduce(sent)
        at = 0
        for name, shape in shapes.items():
            k = int(np.prod(shape))
            for store, values in ((put, sent / (size if op == "mean" else 1)), (got, result.double())):
                store[name] = store.get(name, 0) + values[at : at + k].numpy()
            at += k
    held = corrections(gathered(feedback), op)
    assert held.keys() == put.keys()
    for name, sent in put.items():
        lost = sent - got[name]
        if lost.size > 1:  # a parameter of one value has its own scale, and no error
            assert np.abs(lost).max() > 0.01
        assert np.abs(lost - held[name][: lost.size]).max() < 1e-4 * size, name
    assert feedback.norms().keys() == put.keys()


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_residuals_belong_to_names_not_to_buckets(op):
    run_ranks(3, _renamed, op)


def _as_hook(rank, size):
    """Check that a DDP hook and an all-reduce of the same gradients give the same results and residuals."""
    spec = codec.Quantize(2, levels="odd", rounding="nearest")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 300, bias=False))
    two_shot = codec.options(algorithm="two_shot")
    hook = codec.torch.ddp_hook(spec, feedback=True, options=two_shot).register(model)
    feedback, name = codec.torch.Feedback(spec), "weight"
    for step in range(4):
        x = gradient(rank, step, 400).view(4, 100)
        (got,) = take_step(model, rank, lambda model, rank, x=x: (model(x) ** 2).sum())
        alone = model.module.weight.detach().clone().requires_grad_()
        ((x @ alone.T) ** 2).sum().backward()
        t = alone.grad.clone()
        codec.torch.all_reduce(codec.view(t, segments={name: t.shape}), op="mean", feedback=feedback, options=two_shot)
        assert torch.equal(t, got)
    hooks, mine = hook.state_dict(), feedback.state_dict()
    for role in ("worker", "server"):
        assert hooks[role].keys() == mine[role].keys()
        assert len(hooks[role]) == 4
        for key, x in hooks[role].items():
            assert torch.equal(torch.as_tensor(mine[role][key]), torch.as_tensor(x)) if key.startswith(name) else True


def test_hook_has_the_same_residuals():
    run_ranks(2, _as_hook)


def _growth(rank, size, spec, steps):
    feedback, norms = codec.torch.Feedback(spec), []
    for step in range(steps):
        reduce(gradient(rank, step), feedback, stream=step)
        norms.append(float(feedback.norms()[""]))
    return max(norms[: steps // 2]), max(norms[steps // 2 :])


@pytest.mark.parametrize(
    "spec", [codec.Quantize(2, levels="odd", rounding="nearest"), codec.Sign(group_size=256)], ids=["Quantize", "Sign"]
)
def test_residuals_of_two_shot_stay_bounded(spec):
    for early, late in run_ranks(3, _growth, spec, 60):
        assert late < 1.2 * early


def _dtypes(rank, size):
    for dtype in (torch.bfloat16, torch.float16):
        feedback, x = codec.torch.Feedback(codec.Float8()), gradient(rank, 0).to(dtype).reshape(200, -1)
        out = torch.empty_like(x)
        codec.torch.all_reduce(x, feedback=feedback, out=out, op="mean")
        assert torch.equal(x.flatten(), gradient(rank, 0).to(dtype))
        assert feedback.state_dict()["worker"][f"[0:{N}]"].dtype == torch.float32
        assert 0 < float((out.float() - x.float()).abs().max()) < 8


def test_residuals_of_half_precision_tensors_are_float32():
    run_ranks(2, _dtypes)


def _scattered(rank, size, steps):
    """Return the largest |inputs - results - residuals| and |inputs - results|, summed over reduce-scatters."""
    n = 3 * size * 5000
    feedback, mine = codec.torch.Feedback(codec.Quantize(4)), slice(n // size * rank, n // size * (rank + 1))
    put, got = torch.zeros(n), torch.zeros(n // size)
    for step in range(steps):
        x, out = gradient(rank, step, n), torch.empty(n // size)
        put += x
        named = codec.view(x, segments={"a": (n - 100,), "b": (100,)})
        codec.torch.reduce_scatter(out, named, stream=step, feedback=feedback)
        got += out
    lost = put.clone()
    dist.all_reduce(lost)
    lost = float((lost[mine] - got).abs().max())
    state = feedback.state_dict()
    put -= torch.cat([state["worker"][f"a[0:{n - 100}]"], state["worker"]["b[0:100]"]])
    assert len(state["server"]) == 3
    dist.all_reduce(put)
    return float((put[mine] - got).abs().max()), lost


def test_reduce_scatter_takes_feedback():
    for imbalance, lost in run_ranks(3, _scattered, 6):
        assert imbalance < 1e-4
        assert lost > 0.1


def _truncated(rank, size):
    """Check that a bound spec passed to all_reduce replaces the spec of the Feedback."""
    feedback, theta = codec.torch.Feedback(codec.Truncate(guard="feedback")), torch.linspace(-1, 1, N)
    x = gradient(rank, 0)
    codec.torch.all_reduce(x, feedback.spec.bind(codec.optimizers.SGD(0.1), theta=theta), feedback=feedback)
    assert feedback.norms()[""] > 0
    with pytest.raises(codec.SpecError, match="optimizer"):
        codec.torch.all_reduce(x, feedback=feedback)


def test_bound_spec_can_be_given_beside_feedback():
    run_ranks(2, _truncated)
