"""Residuals of hooks and of Feedback over two levels: saved, loaded on other machines, and resharded."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.stateful.schema import signed
from codec.torch.ddp.residuals import HookResiduals
from codec.torch.feedback.checkpoint import ResidualOwner
from support import flatcall
from support.ddp_training import ENCODE_ALL, small_forward, small_net, take_step, train_small_net
from support.ranks import run_ranks
from support.states import through_a_file

SIGN = codec.Sign(group_size=1024)
LEVELS = {1: None, 2: (2, 2), 4: (1, 4)}


def group_of(within, size=4):
    """Return the argument group= for machines of `within` ranks."""
    return None if within == 1 else init_device_mesh("cpu", (size // within, within))


def hooked(within, spec=SIGN, size=4, cap=25, **how):
    model = DistributedDataParallel(small_net(), bucket_cap_mb=cap)
    how = {"algorithm": "two_shot", "group": group_of(within, size), "policy": ENCODE_ALL} | how
    return model, flatcall.ddp_hook(spec, **how).register(model)


def total(states, op="mean"):
    """Return the effect of all residuals on the results, by parameter."""
    found = {}
    for state in states:
        worker = (state["within"] if op == "mean" else 1) / (len(states) if op == "mean" else 1)
        for role, factor in (("worker", worker), ("server", 1)):
            for key, values in state[role].items():
                name, _, where = key.rpartition("[")
                if name or where.endswith("]"):
                    start, stop = map(int, where[:-1].split(":"))
                    there = found.setdefault(name, torch.zeros(64 * 1024, dtype=torch.float64))
                    there[start:stop] += factor * values
    return found


def check_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)


def _resumed(rank, size):
    """Interrupt training in the middle; a hook with the same levels continues it to the bit."""
    for spec, how in [(SIGN, {}), (codec.Quantize(4), {"feedback": 0.9, "policy": codec.torch.Policy()})]:
        make = partial(hooked, 2, spec, cap=0.05, **how)  # bucket cap in MB: two buckets from the second step on
        *whole, _ = train_small_net(make, rank, 6)
        *resumed, saved = train_small_net(make, rank, 6, pause=3)
        assert whole == resumed, spec
        assert saved["within"] == 2


def test_resumed_training_over_two_levels_is_the_uninterrupted_one_to_the_bit():
    run_ranks(4, _resumed)


def sum_of_steps(model, rank, steps):
    """Return the sum of the gradients of some steps, and that of their exact means."""
    sums = []
    for exact in (True, False):
        total = 0
        for step in steps:
            if exact:
                with model.no_sync():
                    grads = [g.clone() for g in take_step(model, 10 * step + rank, small_forward)]
                for g in grads:
                    codec.torch.all_reduce(g, op="mean")
            else:
                grads = [g.clone() for g in take_step(model, 10 * step + rank, small_forward)]
            total = total + torch.cat([g.flatten() for g in grads])
        sums.append(total)
    return sums


def _moved(rank, size, before, now, live):
    """Residuals of machines with `before` ranks have the same total effect on machines with `now` ranks."""
    model, hook = hooked(before)
    exact, sent = sum_of_steps(model, rank, range(3))
    states = through_a_file(hook.state_dict(gather=True))["ranks"]
    assert {s["within"] for s in states} == {before}
    net = model.module
    if live:  # the hook itself serves another DistributedDataParallel
        model = DistributedDataParallel(net)
        hook.register(model, group=group_of(now) or model.process_group)
    else:
        model, hook = hooked(now)
        hook.load_state_dict(states[rank])
    moved = hook.state_dict(gather=True)["ranks"]
    assert {s["within"] for s in moved} == {now}
    check_equal(total(moved), total(states))
    hook.set_spec(codec.Lossless())  # sends all residuals in the next step
    more, flushed = sum_of_steps(model, rank, range(3, 4))
    torch.testing.assert_close(sent + flushed, exact + more, rtol=1e-4, atol=1e-5)
    assert not hook.reducer.state.residuals.ranges()


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1), (2, 2)])
def test_residuals_move_between_flat_groups_and_two_levels(before, now, live):
    run_ranks(4, _moved, before, now, live)


def test_residuals_move_to_machines_of_another_size():
    run_ranks(8, _other_machines)


def _other_machines(rank, size):
    """2 x 4 ranks save, and 4 x 2 load; gradients and residuals add up to the exact means."""
    model, hook = hooked(4, size=8)
    exact, sent = sum_of_steps(model, rank, range(2))
    states = hook.state_dict(gather=True)["ranks"]
    model, late = hooked(2, size=8)
    late = codec.torch.ddp_hook(SIGN, policy=ENCODE_ALL)
    late.load_state_dict(states[rank])  # before it is registered
    assert late.state_dict()["within"] == 4
    model = DistributedDataParallel(small_net())
    late.register(model, group=group_of(2, 8))
    check_equal(total(late.state_dict(gather=True)["ranks"]), total(states))
    late.set_spec(codec.Lossless())
    more, flushed = sum_of_steps(model, rank, range(2, 3))
    torch.testing.assert_close(sent + flushed, exact + more, rtol=1e-4, atol=1e-5)


def _resharded(rank, size):
    model, hook = hooked(2)
    for step in range(3):
        take_step(model, 10 * step + rank, small_forward)
    states = hook.state_dict(gather=True)
    for new in (1, 3, 4):
        flat = codec.torch.Hook.reshard(states, new)
        assert [s["within"] for s in flat] == [1] * new
        check_equal(total(flat), total(states["ranks"]))
    model, flat_hook = hooked(1)
    flat_hook.load_state_dict(flat[rank])
    take_step(model, rank, small_forward)
    return states


def test_reshard_returns_flat_states_with_the_same_total_effect():
    states = run_ranks(4, _resharded)[0]["ranks"]
    mixed = [*states[:3], signed(states[3] | {"within": 1})]
    with pytest.raises(codec.StateError, match=r"item 3 of machines with 1: pass states that were saved at the same"):
        codec.torch.Hook.reshard(mixed, 2)


def test_states_without_the_number_of_ranks_of_a_machine_are_flat():
    hook = codec.torch.ddp_hook(SIGN)
    old = hook.state_dict()
    assert old.pop("within") == 1
    hook.load_state_dict(signed(old))
    feedback = codec.torch.Feedback(SIGN)
    old = feedback.state_dict()
    assert old.pop("within") == 1
    feedback.load_state_dict(signed(old))
    for wrong in (0, -1, 1.0, "2"):
        with pytest.raises(codec.StateError, match="within"):
            hook.load_state_dict(signed(hook.state_dict() | {"within": wrong}))


def test_residuals_of_a_failed_collective_are_moved_once():
    residuals = HookResiduals(codec.Quantize(4))
    residuals.worker.begin((("w", 0, 3),))[:] = 1
    residuals.commit()
    residuals.rescale(8)
    residuals.move(ResidualOwner(0, 4, 2), ResidualOwner(0, 4, 4))
    residuals.rollback()
    assert residuals.state_dict()["worker"]["w[0:3]"].tolist() == [0.5] * 3


N = 5000


def _fed(rank, size, op):
    """The results of all-reduces add up to the exact ones, also if the levels change between two calls."""
    feedback, sums = codec.torch.Feedback(codec.Quantize(4), decay=1.0), [0, 0]
    groups = {within: group_of(within) for within in (1, 2, 4)}
    two = codec.options(algorithm="two_shot")

    def call(seed, within, spec=None, given=None):
        x = torch.randn(N, generator=torch.Generator().manual_seed(size * seed + rank))
        exact = x.clone()
        codec.torch.all_reduce(exact, op=op)
        group = groups[within]
        codec.torch.all_reduce(
            codec.view(x, segments={"a": (10, 100), "b": (N - 1000,)}),
            spec,
            op=op,
            group=group,
            feedback=feedback if given is None else given,
            options=two,
        )
        sums[0] += x
        sums[1] += exact

    before = None
    for i, within in enumerate((2, 2, 1, 2, 1, 4, 2)):
        if i == 1:  # the same levels: no residual leaves this rank
            before = feedback.state_dict()
        call(i, within)
        state = feedback.state_dict()
        assert (state["rank"], state["world_size"], state["within"]) == (rank, size, 1 if within == 4 else within)
    assert sorted(before["worker"]) == sorted(
        {0: ["a[0:1000]", "b[0:1048]"], 1: ["b[1048:4000]"]}[rank % 2] + ["format", "role", "version"]
    ), before["worker"].keys()
    everyones = [torch.load(io, weights_only=True) for io in gathered(feedback.state_dict())]
    left = total(everyones, op)
    rest = torch.cat([left["a"][:1000], left["b"][: N - 1000]]).float()
    torch.testing.assert_close(sums[0] + rest, sums[1], rtol=1e-4, atol=1e-4 * (size if op == "sum" else 1))
    check_equal(total(codec.torch.Feedback.reshard(everyones, 3), op), left)

    again = codec.torch.Feedback(codec.Quantize(4))
    again.load_state_dict(everyones[rank])
    a, b = (torch.randn(N, generator=torch.Generator().manual_seed(rank)) for _ in range(2))
    for x, given in ((a, feedback), (b, again)):
        named = codec.view(x, segments={"a": (10, 100), "b": (N - 1000,)})
        codec.torch.all_reduce(named, op=op, group=groups[2], feedback=given, options=two)
    assert torch.equal(a, b)
    other = codec.torch.Feedback(codec.Quantize(4))
    other.load_state_dict(everyones[rank - 1])
    with pytest.raises(codec.StateError, match="belong to rank"):
        codec.torch.all_reduce(named, op=op, group=groups[2], feedback=other, options=two)


def gathered(state):
    """Return files with the states of all ranks."""
    import io

    file = io.BytesIO()
    torch.save(state, file)
    return [io.BytesIO(each) for each in codec.torch.all_to_all_bytes([file.getvalue()] * 4)]


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_feedback_continues_over_other_levels(op):
    run_ranks(4, _fed, op)


def _scattered(rank, size):
    """A Feedback may serve an all-reduce over two levels and a reduce-scatter over all ranks of the mesh."""
    mesh, feedback = group_of(2), codec.torch.Feedback(codec.Quantize(4))
    x = torch.randn(4000, generator=torch.Generator().manual_seed(rank))
    exact, whole, part = x.clone(), x.clone(), torch.empty(1000)
    codec.torch.all_reduce(exact, op="mean")
    codec.torch.all_reduce(whole, op="mean", group=mesh, feedback=feedback)
    codec.torch.reduce_scatter(part, x, op="mean", group=mesh, feedback=feedback)
    everyones = [torch.load(io, weights_only=True) for io in gathered(feedback.state_dict())]
    left = total(everyones)[""][1000 * rank : 1000 * rank + 1000].float()
    mine = slice(1000 * rank, 1000 * rank + 1000)
    torch.testing.assert_close(whole[mine] + part + left, 2 * exact[mine], rtol=1e-4, atol=1e-5)


def test_feedback_of_all_reduce_and_reduce_scatter_over_a_mesh():
    run_ranks(4, _scattered)
