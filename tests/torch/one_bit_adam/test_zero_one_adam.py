"""0/1 Adam (OneBitAdam with a VarianceSchedule) equals a reimplementation of its algorithm, on two ranks, too."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.torch import VarianceSchedule
from support.ddp_training import data, net, parameter_bytes, wrapped
from support.ranks import run_ranks

SCHEDULE = VarianceSchedule(5, refreshes=2, double_every=2, max_interval=4)
KINDS = [SCHEDULE.kind(step) for step in range(1, 17)]
OPTIONS = codec.options(algorithm="two_shot")
SIGN = codec.Sign(group_size=64)


def test_distances_of_refreshes_and_of_synchronized_steps_double():
    schedule = VarianceSchedule(30, refreshes=3, double_every=7, max_interval=8)
    refreshed = [step for step in range(1, 100) if schedule.kind(step) == "gradients"]
    assert refreshed == [1, 2, 3, 5, 7, 9, 13, 17, 21, 29]
    sent = [step for step in range(31, 100) if schedule.kind(step) == "momenta"]
    assert sent == [*range(31, 38), 38, 40, 42, 44, 48, *range(56, 100, 8)]
    assert VarianceSchedule(4).kind(10**12 + 8) == "local"
    assert VarianceSchedule(4).kind(16 * 10**10) == "momenta"
    early, late = "gradients gradients momenta gradients momenta", "momenta momenta momenta local"
    assert [*early.split(), *late.split(), "local", "local", "momenta", *["local"] * 3, "momenta"] == KINDS


@pytest.mark.parametrize("how", [{"refreshes": 0}, {"max_interval": 3}, {"double_every": 0}, {"max_interval": 0.5}])
def test_wrong_schedules_are_rejected(how):
    with pytest.raises(codec.ArgumentError, match=next(iter(how))):
        VarianceSchedule(10, **how)


def reference(start, gradients, kinds, lr, betas, eps, decay, ratio=1.0):
    """Take the steps of 0/1 Adam on some ranks in float64, without compression; return the parameters of each rank.

    The paper averages sums of momenta times learning rates, and divides by the sum of learning rates; so do we, with
    Adam's bias corrections. Weights decay as in AdamW. In steps that do not update v, averaged momenta and the momenta
    of local updates are limited to `ratio` times sqrt(v).
    """
    b1, b2 = betas
    n = len(gradients)
    theta = [start.double().clone() for _ in range(n)]
    m, total = [torch.zeros_like(theta[0]) for _ in range(n)], 0.0
    u, anchor = [torch.zeros_like(theta[0]) for _ in range(n)], theta[0].clone()
    v, refreshed = torch.zeros_like(theta[0]), 0
    for t, kind in enumerate(kinds, 1):
        g = [gradients[r][t - 1].double() for r in range(n)]
        if kind == "gradients":
            mean = sum(g) / n
            v, refreshed = b2 * v + (1 - b2) * mean**2, refreshed + 1
            g = [mean] * n
        denominator = (v / (1 - b2**refreshed)).sqrt() + eps
        step_size = lr / (1 - b1**t)
        m = [b1 * x + (1 - b1) * y for x, y in zip(m, g, strict=True)]
        u = [x + step_size * y for x, y in zip(u, m, strict=True)]
        total, anchor = total + step_size, anchor * (1 - lr * decay)
        bound = (math.inf if kind == "gradients" else ratio) * denominator
        if kind == "local":
            moves = [step_size * y.clamp(-bound, bound) / denominator for y in m]
            theta = [x * (1 - lr * decay) - move for x, move in zip(theta, moves, strict=True)]
        else:
            mean = (sum(u) / n / total).clamp(-bound, bound)
            anchor = anchor - total * mean / denominator
            theta, m, u, total = [anchor] * n, [mean] * n, [torch.zeros_like(mean)] * n, 0.0
        yield theta


HOW = (1e-3, (0.9, 0.99), 1e-8, 0.1)


@pytest.mark.filterwarnings("ignore:second moments were frozen")  # these gradients differ in magnitude by step
@pytest.mark.parametrize("shape", [(40, 30), (17,)])
def test_steps_of_one_process_are_those_of_the_reference(shape):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(shape))
    gradients = [torch.randn_like(p) * 10 ** -(i % 3) for i in range(16)]
    optimizer = codec.torch.OneBitAdam([p], *HOW, freeze_step=SCHEDULE)
    for t, (expected, kind) in enumerate(zip(reference(p.detach(), [gradients], KINDS, *HOW), KINDS, strict=True)):
        p.grad = gradients[t].clone()
        optimizer.step()
        assert (p - expected[0]).abs().max() < 1e-5
        assert optimizer.frozen == (t >= 4)
        assert optimizer.synchronized == (kind != "local")


def test_first_steps_and_loaded_states_of_adamw():
    """Steps equal AdamW's until momenta are sent; a loaded AdamW state counts as refreshed in every step."""
    ours, theirs = nn.Parameter(torch.ones(50)), nn.Parameter(torch.ones(50))
    optimizer = codec.torch.OneBitAdam([ours], *HOW, freeze_step=VarianceSchedule(90, refreshes=8))
    adam = torch.optim.AdamW([theirs], *HOW)
    for _ in range(6):
        ours.grad = torch.randn(50)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        adam.step()
    assert torch.allclose(ours, theirs, atol=1e-6)
    again = codec.torch.OneBitAdam([theirs], *HOW, freeze_step=VarianceSchedule(90, refreshes=8))
    again.load_state_dict(copy.deepcopy(adam.state_dict()))
    for _ in range(6):
        ours.grad = torch.randn(50)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        again.step()
    assert torch.allclose(ours, theirs, atol=1e-5)
    with pytest.raises(codec.StateError, match="VarianceSchedule"):
        codec.torch.OneBitAdam([theirs], *HOW, freeze_step=90).load_state_dict(again.state_dict())
    for wrong in ("x", -1, True, 1.5):
        damaged = copy.deepcopy(again.state_dict())
        damaged["state"][0]["variance_step"] = wrong
        with pytest.raises(codec.StateError, match="variance_step"):
            again.load_state_dict(damaged)


def test_a_copied_optimizer_goes_on_alike():
    p = nn.Parameter(torch.ones(50))
    optimizer = codec.torch.OneBitAdam([p], *HOW, freeze_step=SCHEDULE)
    for _ in range(8):
        p.grad = torch.randn(50)
        optimizer.step()
    other = pickle.loads(pickle.dumps(optimizer))
    (q,) = other.param_groups[0]["params"]
    for _ in range(8):
        p.grad = torch.randn(50)
        q.grad = p.grad.clone()
        optimizer.step()
        other.step()
        assert torch.equal(p, q)
        if not optimizer.synchronized:
            with pytest.raises(codec.StateError, match=r"finish\(\).*a multiple of 4"):
                pickle.dumps(optimizer)


class Given(nn.Module):
    """Model with one parameter, whose gradient is the input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6000).view(60, 100))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


def gradient(rank, step):
    x = torch.randn(60, 100, generator=torch.Generator().manual_seed(100 * step + rank))
    return x + 0.3 * rank * x.sign() + 0.5


def optimizer_of(model, spec=SIGN, max_ratio=1.0, **how):
    optimizer = codec.torch.OneBitAdam(model.parameters(), *HOW, freeze_step=SCHEDULE, spec=spec, max_ratio=max_ratio)
    return optimizer.register(model, options=OPTIONS, **how)


def _as_the_reference(rank, size):
    """With lossless momenta, both ranks follow the reference, and diverge from each other in local steps."""
    gradients = [[gradient(r, t) for t in range(len(KINDS))] for r in range(size)]
    start = Given().weight.detach()
    found = []
    for model in (Given(), DistributedDataParallel(Given())):
        optimizer = optimizer_of(model, codec.Lossless())
        (p,) = model.parameters()
        for t, theta in enumerate(reference(start, gradients, KINDS, *HOW)):
            sent = optimizer.stats().sent_nbytes
            optimizer.zero_grad()
            model(gradients[rank][t]).backward()
            optimizer.step()
            assert (p - theta[rank]).abs().max() < 1e-5, t
            assert (optimizer.stats().sent_nbytes > sent) == (KINDS[t] != "local"), t
            found.append(parameter_bytes(model))
    return found


def test_ranks_move_as_in_the_reference():
    first, second = run_ranks(2, _as_the_reference)
    for kind, mine, other in zip(KINDS * 2, first, second, strict=True):
        assert (mine == other) == (kind != "local")


def take_step(model, optimizer, rank, step, factor=1.0):
    x, y = data(rank, step)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    (loss * factor).backward()
    optimizer.step()
    return loss.item()


def _trained(rank, size):
    """With signs, replicas are identical after synchronized steps, NaN raises, and checkpoints resume bit for bit."""
    found = []
    for make in (net, wrapped):
        model = make()
        optimizer = optimizer_of(model)
        saved, losses = None, []
        for t, kind in enumerate(KINDS):
            # With NaN the step is refused on both ranks; repeated without NaN, it succeeds
            if kind == "momenta" and t > 8:
                with pytest.raises(codec.CodecError) as caught:
                    take_step(model, optimizer, rank, t, math.nan if rank == 1 else 1.0)
                assert caught.value.code == codec.Status.NONFINITE
            losses.append(take_step(model, optimizer, rank, t))
            if kind == "local":
                with pytest.raises(codec.StateError, match=f"step {t + 1} was local"):
                    optimizer.state_dict()
            else:
                found.append(parameter_bytes(model))
            if t == 7:
                inner = getattr(model, "module", model)
                saved = copy.deepcopy([inner.state_dict(), optimizer.state_dict(gather=True)])
        inner = net()
        inner.load_state_dict(saved[0])
        again = make(inner) if make is wrapped else inner
        optimizer = optimizer_of(again)
        optimizer.load_state_dict(saved[1])
        for t in range(8, len(KINDS)):
            take_step(again, optimizer, rank, t)
        assert parameter_bytes(again) == parameter_bytes(model)
        assert sum(losses[-4:]) < sum(losses[:4])

    # NaN in a local step: this rank skips the step, and both ranks later reach the same values
    model, other = net(), net()
    optimizer, twin = optimizer_of(model), optimizer_of(other)
    for t, kind in enumerate(KINDS[:12]):
        take_step(other, twin, rank, t)
        if kind == "local" and rank == 1:
            before = parameter_bytes(model)
            with pytest.raises(codec.ArgumentError, match=f"local step {t + 1}"):
                take_step(model, optimizer, rank, t, math.nan)
            assert parameter_bytes(model) == before
        else:
            take_step(model, optimizer, rank, t)
    found.append(parameter_bytes(model))
    assert found[-1] != parameter_bytes(other)
    with pytest.raises(codec.ArgumentError, match="grad_scaler"):
        optimizer_of(wrapped(), grad_scaler=torch.amp.GradScaler("cpu"))
    return found


def test_replicas_stay_identical_and_resume_to_the_bit():
    first, second = run_ranks(2, _trained)
    assert first == second


def _without_learning_rate(rank, size):
    """If the learning rate of a group is 0, its parameters stay, momenta are still computed, and no step fails."""
    found = []
    for zero in ("group", "norms", "end", "once"):
        for make in (wrapped, net)[: 1 + (zero == "end")]:
            model = make()
            some = [p for i, p in enumerate(model.parameters()) if {"group": i < 9, "norms": p.dim() < 2}.get(zero)]
            others = [p for p in model.parameters() if all(p is not q for q in some)]
            groups = [{"params": others}, *([{"params": some, "lr": 0.0}] if some else [])]
            optimizer = codec.torch.OneBitAdam(groups, 1e-3, weight_decay=0.1, freeze_step=SCHEDULE, spec=SIGN)
            optimizer.register(model, options=OPTIONS)
            before = [p.detach().clone() for p in some]
            for t in range(len(KINDS) + 4):
                optimizer.param_groups[0]["lr"] = 0.0 if t >= {"end": 9, "once": 10}.get(zero, 99) else 1e-3
                if zero == "once" and t == 11:
                    optimizer.param_groups[0]["lr"] = 1e-3
                stopped = parameter_bytes(model)
                take_step(model, optimizer, rank, t)
                if zero == "end" and t >= 12:
                    assert parameter_bytes(model) == stopped
            assert all(torch.equal(p, q) for p, q in zip(some, before, strict=True))
            assert all(p.isfinite().all() and (optimizer.state[p]["exp_avg"] != 0).any() for p in model.parameters())
            assert optimizer.stats().failed_steps == 0
            found.append(parameter_bytes(model))
    return found


def test_learning_rates_of_zero_stop_parameters_and_nothing_else():
    first, second = run_ranks(2, _without_learning_rate)
    assert first == second


def _finished(rank, size):
    """Unless steps are limited, finish() sets parameters to their mean over ranks; checkpoints resume bit for bit."""
    found = []
    for make in (net, wrapped):
        model = make()
        optimizer = optimizer_of(model, codec.Lossless(), max_ratio=None)
        for t in range(12):
            take_step(model, optimizer, rank, t)
            sent = optimizer.stats().sent_nbytes
            apart = [p.detach().clone() for p in model.parameters()]
            synchronized = optimizer.synchronized
            optimizer.finish()
            assert optimizer.synchronized
            if synchronized:  # finish() sends and changes nothing
                assert optimizer.stats().sent_nbytes == sent
                assert all(torch.equal(p, q) for p, q in zip(model.parameters(), apart, strict=True))
            for p, q in zip(model.parameters(), apart, strict=True):
                mean = q.clone()
                torch.distributed.all_reduce(mean)
                assert torch.allclose(p, mean / size, atol=1e-6)
            assert float(optimizer.state[p]["step"]) == t + 1
        state = copy.deepcopy([getattr(model, "module", model).state_dict(), optimizer.state_dict()])
        inner = net()
        inner.load_state_dict(state[0])
        again = make(inner) if make is wrapped else inner
        other = optimizer_of(again, codec.Lossless(), max_ratio=None)
        other.load_state_dict(state[1])
        for t in range(12, 17):
            take_step(model, optimizer, rank, t)
            take_step(again, other, rank, t)
        optimizer.finish()
        other.finish()
        assert parameter_bytes(model) == parameter_bytes(again)
        found.append(parameter_bytes(model))
    other = optimizer_of(again := net())
    for t in range(11):
        take_step(again, other, rank, t)
    before = parameter_bytes(again)
    with pytest.raises(codec.PeerError):
        take_step(again, other, rank, 11) if rank == 0 else other.finish()
    assert parameter_bytes(again) == before
    other.finish()
    assert other.synchronized
    return [*found, parameter_bytes(again)]


def test_finish_synchronizes_parameters_and_momenta():
    first, second = run_ranks(2, _finished)
    assert first == second


def test_finish_works_without_ranks():
    p = nn.Parameter(torch.ones(50))
    optimizer = codec.torch.OneBitAdam([p], *HOW, freeze_step=SCHEDULE, max_ratio=None)
    optimizer.finish()
    for t in range(11):
        p.grad = torch.randn(50, generator=torch.Generator().manual_seed(t))
        optimizer.step()
    assert not optimizer.synchronized
    before = p.detach().clone()
    optimizer.finish()
    assert optimizer.synchronized
    assert torch.allclose(p, before, atol=1e-6)
