"""Feedback of all-reduces: values in numpy, sums of results and residuals, errors on one rank, checkpoints, names."""

import copy
import itertools
import os
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.group import communicator
from codec.torch.transport.arena import Arena
from support import flatcall
from support.collective_values import tensor_bytes
from support.ddp_training import take_step
from support.faults import KILLED
from support.ranks import run_ranks

N = 40_000  # values: 160 KB, so that algorithm="auto" takes two-shot from three ranks on
SPECS = (codec.Quantize(4), codec.Float8(), codec.Float8("mxfp8_e4m3"), codec.Sign(group_size=256), codec.Float4())
NEAREST = (
    codec.Quantize(3, levels="odd", rounding="nearest"),
    codec.Sign(group_size=256),
    codec.Float8(group_size=128),
)
BUCKETS = [
    {"a": (40, 100), "b": (), "c": (3, 1000)},
    {"c": (3, 1000), "d": (130, 50), "a": (40, 100)},  # other buckets of the same parameters
    {"b": (), "d": (130, 50)},
]


def gradient(rank, step, n=N):
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * step + rank))


def reduce(x, feedback, algorithm="two_shot", **how):
    """Reduce x by an algorithm whose results do not depend on times; return the handle if asynchronous, else x."""
    how.setdefault("op", "mean")
    options = codec.options(algorithm=algorithm)
    return codec.torch.all_reduce(x, feedback=feedback, options=options, **how) or x


def state_bytes(feedback):
    state = feedback.state_dict()
    parts = [(role, name, x) for role in ("worker", "server") for name, x in sorted(state[role].items())]
    return [
        state["op"],
        *((role, name, x.numpy().tobytes() if isinstance(x, torch.Tensor) else x) for role, name, x in parts),
    ]


def corrections(states, op):
    """Return by parameter what the residuals of all ranks will add to later results."""
    found = {}
    for role in ("worker", "server"):
        for state in states:
            for name, x in state[role].items():
                if not isinstance(x, torch.Tensor):
                    continue
                key, _, place = name.partition("[")
                start, stop = map(int, place[:-1].split(":"))
                total = found.setdefault(key, np.zeros(1 << 16))
                share = len(states) if role == "worker" and op == "mean" else 1
                total[start:stop] += x.numpy() / share
    return found


def gathered(feedback):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, feedback.state_dict())
    return states


# Values


class Oracle:
    """All ranks of an all-reduce with error feedback, in numpy; the codec alone is the library's."""

    def __init__(self, spec, size, op, algorithm, n=N):
        self.spec, self.size, self.op, self.two_shot = spec, size, op, algorithm == "two_shot" and size > 1
        self.workers = [np.zeros(n, np.float32) for _ in range(size)]
        self.servers = np.zeros(n, np.float32)
        cuts = [i * n // size // 1024 * 1024 for i in range(size)] + [n] if self.two_shot else [0, n]
        self.slices = [slice(a, b) for a, b in itertools.pairwise(cuts)]

    def send(self, x, residual):
        """Return the values that ranks decode; `residual` gets the error."""
        x = x + residual
        seen = np.concatenate([codec.decode(codec.encode(x[s], self.spec)) for s in self.slices])
        residual[:] = x - seen
        return seen

    def step(self, gradients):
        total = None
        for x, residual in zip(gradients, self.workers, strict=True):
            seen = self.send(x, residual)
            total = seen if total is None else total + seen
        if self.op == "mean":
            total = total / np.float32(self.size)
        return self.send(total, self.servers) if self.two_shot else total


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
    """Return |sum of inputs - sum of results - residuals| and |sum of inputs - sum of results|, at most.

    Both are relative to the largest value of an input or residual; the first one in units of its rounding to float32.
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
            if algorithm != "auto" and (algorithm != "raw" or size == 1):  # "auto" may send values uncompressed
                assert lost > 0.01, (spec, algorithm, op)


def _renamed(rank, size, op):
    """Reduce the parameters in changing buckets and by changing algorithms: owners of sums change, nothing is lost."""
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
        if lost.size > 1:  # one value has its own scale
            assert np.abs(lost).max() > 0.01
        assert np.abs(lost - held[name][: lost.size]).max() < 1e-4 * size, name
    assert feedback.norms().keys() == put.keys()


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_residuals_belong_to_names_not_to_buckets(op):
    run_ranks(3, _renamed, op)


def _as_hook(rank, size):
    """A hook and an all-reduce of the same gradients have the same results and residuals."""
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
        assert len(hooks[role]) == 3
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
    """Return the imbalance of a reduce-scatter, which encodes once."""
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
    assert len(state["server"]) == 2
    dist.all_reduce(put)
    return float((put[mine] - got).abs().max()), lost


def test_reduce_scatter_takes_feedback():
    for imbalance, lost in run_ranks(3, _scattered, 6):
        assert imbalance < 1e-4
        assert lost > 0.1


def _truncated(rank, size):
    """A bound spec replaces the spec of the Feedback."""
    feedback, theta = codec.torch.Feedback(codec.Truncate(guard="feedback")), torch.linspace(-1, 1, N)
    x = gradient(rank, 0)
    codec.torch.all_reduce(x, feedback.spec.bind(codec.optimizers.SGD(0.1), theta=theta), feedback=feedback)
    assert feedback.norms()[""] > 0
    with pytest.raises(codec.SpecError, match="optimizer"):
        codec.torch.all_reduce(x, feedback=feedback)


def test_bound_spec_can_be_given_beside_feedback():
    run_ranks(2, _truncated)


# Errors


def _unchanged(rank, size):
    """Cause errors on one rank, before and after frames are sent; residuals and tensors must be unchanged."""
    found = []
    feedback = codec.torch.Feedback(codec.Quantize(4))
    for algorithm in ("two_shot", "all_gather", "raw"):
        reduce(gradient(rank, 7), feedback, algorithm)
        x = gradient(rank, 8)
        if rank == 1:
            x[N // 2] = float("nan")
        before, bits = state_bytes(feedback), tensor_bytes(x)
        with pytest.raises(codec.CodecError) as e:
            reduce(x, feedback, algorithm)
        assert state_bytes(feedback) == before
        assert tensor_bytes(x) == bits
        found.append(type(e.value).__name__)
    out, x = torch.empty(N // size), gradient(rank, 8)[: N // size * size]
    if rank == 1:
        x[0] = float("inf")
    with pytest.raises(codec.CodecError):
        codec.torch.reduce_scatter(out, codec.view(x, segments={"x": x.shape}), op="mean", feedback=feedback)
    assert state_bytes(feedback) == before
    reduce(gradient(rank, 9), feedback)
    return found, len({str(s["worker"]["role"]) for s in gathered(feedback)})


def test_error_on_one_rank_leaves_residuals_unchanged_on_all():
    results = run_ranks(3, _unchanged)
    assert results == [(["PeerError"] * 3, 1), (["ArgumentError"] * 3, 1), (["PeerError"] * 3, 1)]


def _damaged(rank, size):
    """Damage a frame of the second phase, when residuals of this step have been computed."""
    feedback, x = codec.torch.Feedback(codec.Quantize(4)), gradient(rank, 8)
    reduce(gradient(rank, 7), feedback)
    before = state_bytes(feedback)
    shrink, calls = Arena.shrink, 0

    def damage(arena, message, nbytes):
        nonlocal calls
        message, calls = shrink(arena, message, nbytes), calls + 1
        if rank == 0 and calls == size + 1:  # the frame of its sum, after frames of its terms
            message[-1] ^= 1
        return message

    Arena.shrink = damage
    with pytest.raises(codec.CodecError):
        reduce(x, feedback)
    Arena.shrink = shrink
    assert state_bytes(feedback) == before
    assert torch.equal(x, gradient(rank, 8))
    return calls


def test_damaged_frame_leaves_residuals_unchanged():
    assert min(run_ranks(3, _damaged)) >= 4


def _killed(rank, size, at):
    """Kill rank 1 at one of its messages; the others must have unchanged residuals and tensors."""
    communicator.communicator_of(None, 5)
    feedback, x = codec.torch.Feedback(codec.Sign(group_size=256)), gradient(rank, 8)
    reduce(gradient(rank, 7), feedback)
    before = state_bytes(feedback)
    shrink, calls = Arena.shrink, 0

    def die(arena, message, nbytes):
        nonlocal calls
        calls += 1
        if calls == at:
            os._exit(1)
        return shrink(arena, message, nbytes)

    if rank == 1:
        Arena.shrink = die
    with pytest.raises(codec.PeerError):
        reduce(x, feedback)
    assert state_bytes(feedback) == before
    assert torch.equal(x, gradient(rank, 8))
    return True


@pytest.mark.parametrize("at", [1, 4], ids=["term", "sum"])
def test_killed_rank_leaves_residuals_of_the_others_unchanged(at):
    assert run_ranks(3, _killed, at, killed=[1]) == [True, KILLED, True]


def _refused(rank, size):
    x, feedback = gradient(rank, 0), codec.torch.Feedback(codec.Quantize(4))
    of_sums, shorter = codec.torch.Feedback("balanced"), codec.torch.Feedback("balanced")
    reduce(x.clone(), of_sums, op="sum")
    reduce(x[:100].clone(), shorter)
    wrong = [
        ({"spec": codec.Lossless()}, codec.SpecError, "Lossless"),
        ({"spec": codec.Ternary()}, codec.SpecError, "not a contraction"),
        ({"algorithm": "ring"}, codec.ArgumentError, "ring"),
        ({"op": "max"}, codec.ArgumentError, "maximum"),
        ({"feedback": torch.zeros(N)}, codec.ArgumentError, r"must be a codec\.torch\.Feedback, None or False, got"),
        ({"feedback": True}, codec.ArgumentError, "got True"),
        ({"feedback": of_sums}, codec.ArgumentError, "residuals of a sum, and op is a mean"),
        ({"feedback": shorter}, codec.ArgumentError, "the tensor has 40000 values, but its residual has 100"),
        ({"segments": {"a": (5,)}}, codec.ArgumentError, "40000 values, but its segments only 5"),
        ({"segments": {"a": (N + 5,)}}, codec.ArgumentError, "segment"),
    ]
    usual = {"feedback": feedback, "op": "mean", "spec": codec.Quantize(4)}
    for how, error, message in wrong:
        if rank == 0:  # an error on one rank is an error on all
            with pytest.raises(error, match=message):
                flatcall.all_reduce(x, **(usual | how))
        else:
            with pytest.raises(codec.PeerError, match="rank 0"):
                flatcall.all_reduce(x, **usual)
        assert torch.equal(x, gradient(rank, 0))
        assert not feedback.norms()
    reduce(x, feedback)
    assert feedback.norms()[""] > 0


def test_wrong_arguments_on_one_rank_are_errors_on_all():
    run_ranks(2, _refused)


def test_feedback_rejects_specs_without_effect():
    for spec in (codec.Lossless(), codec.Ternary(), codec.Sign(scale="l2")):
        if not spec.contraction or isinstance(spec, codec.Lossless):
            with pytest.raises(codec.SpecError):
                codec.torch.Feedback(spec)
    with pytest.raises(codec.ArgumentError, match="bound"):
        codec.torch.Feedback(codec.Truncate().bind(codec.optimizers.SGD(0.1), theta=np.zeros(3, np.float32)))


# Collectives in the background


def _in_flight(rank, size):
    """Collectives in flight have the results and residuals of the same ones one after the other."""
    found = []
    for async_op in (True, False):
        feedback = codec.torch.Feedback(codec.Sign(group_size=128))
        tensors = [gradient(rank, i) for i in range(8)]
        works = []
        for i, t in enumerate(tensors):
            named = codec.view(t, segments={f"t{i % 3}": t.shape})
            works.append(reduce(named, feedback, async_op=async_op))
        for work in works if async_op else ():
            assert work.wait()
        found.append((state_bytes(feedback), [tensor_bytes(t) for t in tensors]))
    assert found[0] == found[1]
    return found[0][1]


def test_collectives_in_flight_take_turns():
    results = run_ranks(2, _in_flight)
    assert results[0] == results[1]


def _cancelled(rank, size):
    """Cancel a collective that another rank never joins: the residuals can be used with another group at once."""
    first, second = (dist.new_group(timeout=timedelta(seconds=60)) for _ in range(2))
    feedback = codec.torch.Feedback(codec.Sign(group_size=128))
    reduce(gradient(rank, 0), feedback, group=first)
    before = state_bytes(feedback)
    if rank == 0:
        x = gradient(rank, 1)
        work = codec.torch.all_reduce(x, op="mean", feedback=feedback, group=first, async_op=True)
        while feedback._change is None:
            time.sleep(0.001)
        with pytest.raises(codec.StateError, match="another group"):
            codec.torch.all_reduce(gradient(rank, 1), op="mean", feedback=feedback, group=second)
        with pytest.raises(codec.StateError, match="in flight"):
            feedback.load_state_dict(feedback.state_dict())
        communicator.close_communicator(first, cancel=True)
    else:
        with pytest.raises(codec.PeerError):
            codec.torch.all_reduce(gradient(rank, 1), op="mean", feedback=feedback, group=second)
    assert state_bytes(feedback) == before
    got = reduce(gradient(rank, 2), feedback, group=second)
    if rank == 1:
        communicator.close_communicator(first, cancel=True)  # ends the wait of rank 0
    else:
        with pytest.raises(codec.PeerError):
            work.wait()
        assert torch.equal(x, gradient(rank, 1))
    oracle = Oracle(feedback.spec, size, "mean", "two_shot")
    oracle.step([gradient(r, 0).numpy() for r in range(size)])
    want = oracle.step([gradient(r, 2).numpy() for r in range(size)])
    assert got.numpy().tobytes() == want.tobytes()
    worker = feedback.state_dict()["worker"][f"[0:{N}]"]
    assert worker.numpy().tobytes() == oracle.workers[rank].tobytes()


def test_cancelled_collective_releases_the_residuals():
    run_ranks(2, _cancelled)


# Checkpoints


def _continued(rank, size):
    def steps(feedback, numbers):
        for step in numbers:
            shapes = BUCKETS[step % 3]
            x = gradient(rank, step, sum(int(np.prod(s)) for s in shapes.values()))
            reduce(codec.view(x, segments=shapes), feedback)
            yield tensor_bytes(x)

    spec = codec.Sign(group_size=128)
    whole, first, again = (codec.torch.Feedback(spec) for _ in range(3))
    expected = list(steps(whole, range(8)))
    found = list(steps(first, range(4)))
    path = f"/tmp/feedback-{os.getpid()}.pt"
    torch.save(first.state_dict(), path)
    again.load_state_dict(torch.load(path, weights_only=True))
    os.unlink(path)
    copied = copy.deepcopy(first)
    assert state_bytes(again) == state_bytes(first) == state_bytes(copied)
    assert found + list(steps(again, range(4, 8))) == expected
    assert state_bytes(again) == state_bytes(whole)
    assert list(steps(copied, range(4, 8))) == expected[4:]


def test_resumed_steps_are_bit_identical():
    run_ranks(3, _continued)


def _saved(rank, size, op):
    feedback = codec.torch.Feedback(codec.Sign(group_size=128))
    for step in range(4):
        shapes = BUCKETS[step % 3]
        x = gradient(rank, step, sum(int(np.prod(s)) for s in shapes.values()))
        reduce(codec.view(x, segments=shapes), feedback, op=op)
    return feedback.state_dict()


def _resharded(rank, size, states, op):
    """Continue with the residuals of another number of ranks; nothing of them is lost."""
    feedback = codec.torch.Feedback(codec.Sign(group_size=128))
    feedback.load_state_dict(states[0])  # of another number of ranks
    x = torch.zeros(4000)
    with pytest.raises(codec.StateError, match=r"rank 0 of 4, and this is rank"):
        reduce(codec.view(x, segments={"a": (40, 100)}), feedback, op=op)
    feedback.load_state_dict(codec.torch.Feedback.reshard(states, size)[rank])
    held = corrections(states, op)
    total = {}
    for step in range(3):
        shapes = BUCKETS[(step + 1) % 3]
        x = torch.zeros(sum(int(np.prod(s)) for s in shapes.values()))  # results hold corrections only
        reduce(codec.view(x, segments=shapes), feedback, op=op)
        at = 0
        for name, shape in shapes.items():
            k = int(np.prod(shape))
            total[name] = total.get(name, 0) + x[at : at + k].double().numpy()
            at += k
    left = corrections(gathered(feedback), op)
    for name, got in total.items():
        want = held[name][: got.size]
        if name != "b":  # the sign and the scale of a single value are exact
            assert np.abs(want).max() > 0.1
            assert np.abs(got).max() > 0.01
        assert np.abs(want - got - left[name][: got.size]).max() < 1e-4, name


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("size", [1, 2])
def test_residuals_continue_on_fewer_ranks(size, op):
    states = run_ranks(4, _saved, op)
    for new in (codec.torch.Feedback.reshard(states, size), codec.torch.Feedback.reshard(states, 7)):
        for name, want in corrections(states, op).items():
            assert np.abs(corrections(new, op)[name] - want).max() < 1e-5
    run_ranks(size, _resharded, states, op)


def _in_group_of_one(rank, size):
    """Wrong states are rejected, and change nothing."""
    feedback = codec.torch.Feedback(codec.Sign(group_size=128))
    reduce(gradient(0, 0, 300), feedback)
    good, before = feedback.state_dict(), state_bytes(feedback)
    for wrong in (
        None,
        [],
        {},
        good | {"version": 9},
        good | {"more": 1},
        {name: x for name, x in good.items() if name != "server"},
        good | {"rank": 1},
        good | {"rank": -1},
        good | {"world_size": 1.0},
        good | {"op": "max"},
        good | {"worker": good["server"]},
        good | {"worker": None},
        good | {"worker": good["worker"] | {"x[0:2]": torch.zeros(3)}},
        good | {"worker": good["worker"] | {"x[0:2]": torch.full((2,), torch.nan)}},
        good | {"worker": good["worker"] | {"[5:7]": torch.zeros(2)}},
    ):
        with pytest.raises(codec.StateError):
            feedback.load_state_dict(wrong)
        assert state_bytes(feedback) == before
    for wrong in (None, [], good, [good, good], [good | {"world_size": 2}, good | {"op": "sum"}], [{}], "ab"):
        with pytest.raises(codec.StateError):
            codec.torch.Feedback.reshard(wrong, 2)
    with pytest.raises(codec.ArgumentError, match="world_size"):
        codec.torch.Feedback.reshard([good], 0)
    fresh = codec.torch.Feedback("smallest")
    fresh.load_state_dict(codec.torch.Feedback("smallest").state_dict())
    reduce(gradient(0, 0), fresh)
    assert "1 parameter" in repr(fresh)


def test_wrong_states_are_rejected():
    run_ranks(1, _in_group_of_one)


def _stats(rank, size):
    before = codec.torch.group_stats()
    codec.torch.all_reduce(gradient(rank, 0), codec.Quantize(4), op="mean", options=codec.options(algorithm="two_shot"))
    delta = codec.torch.group_stats() - before
    assert delta.frame_collectives == 1
    return delta.sent_nbytes, delta.received_nbytes


def test_stats_of_a_group_count_bytes():
    (sent, received), other = run_ranks(2, _stats)
    assert N / 2 < sent < N  # 4.5 bits a value
    assert other == (received, sent)
