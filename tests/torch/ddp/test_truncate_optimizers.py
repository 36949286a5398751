"""DDP hooks with Truncate, for optimizers whose formulas are not those of GComp's paper."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import codec
from support import ddp_training
from support.lion import Lion
from support.ranks import run_ranks


def matrices(model):
    return [p for p in model.parameters() if p.dim() == 2 and p.numel() >= 4096]


OPTIMIZERS = {
    "nadam": lambda model: torch.optim.NAdam(model.parameters()),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "lion": lambda model: Lion(model.parameters(), 1e-3),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = lambda model: torch.optim.Muon(matrices(model))


def _train(rank, size):
    found = {}
    for name, make in OPTIMIZERS.items():
        for spec in ("near", codec.Truncate(level_coding="shared", granularity="bit")):
            model = ddp_training.wrapped()
            optimizer = make(model.module)
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            hook = codec.torch.ddp_hook(
                spec,
                optimizer=optimizer,
                # Lossless for parameters outside the optimizer: Muon accepts matrices only
                policy=lambda _, p, mine=mine: None if id(p) in mine else codec.Lossless(),
                options=codec.options(algorithm="two_shot"),
            )
            hook.register(model)
            losses = ddp_training.train(model, optimizer, rank, 6)
            copies = [None] * size
            dist.all_gather_object(copies, ddp_training.parameter_bytes(model))
            stats = hook.stats()
            found[name, str(spec)] = losses, len(set(copies)), stats.sent_nbytes / stats.raw_nbytes
        plain = ddp_training.wrapped()
        found[name] = ddp_training.train(plain, make(plain.module), rank, 6)
    return found


def test_hooks_of_four_more_optimizers_train_as_float32():
    """Six steps have about float32's losses, equal parameters on all ranks, and fewer bytes sent."""
    first, second = run_ranks(2, _train)
    for found in (first, second):
        for name in OPTIMIZERS:
            for spec in ("near", str(codec.Truncate(level_coding="shared", granularity="bit"))):
                losses, copies, share = found[name, spec]
                assert losses == pytest.approx(found[name], abs=2e-3), (name, spec)
                assert copies == 1
                assert share < 0.9, (name, spec, share)


LATE = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, dampening=0.5),
}


def _unfrozen(rank, size, name, hooked):
    """Train the last layers; then unfreeze all layers, wrap the model again, and train all."""
    net = ddp_training.net()
    late = [p for layer in list(net)[:10] for p in layer.parameters()]
    optimizer = LATE[name](net)
    hook = codec.torch.ddp_hook("near", optimizer=optimizer) if hooked else None
    losses = []
    for first, trainable in ((0, False), (4, True)):
        for p in late:
            p.requires_grad_(trainable)
        model = ddp_training.wrapped(net)
        if hook is not None:
            hook.register(model)
        losses += ddp_training.train(model, optimizer, rank, 4, first)
    copies = [None] * size
    dist.all_gather_object(copies, ddp_training.parameter_bytes(net))
    assert len(set(copies)) == 1
    return losses, [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("name", LATE)
def test_layers_unfrozen_later_train_as_float32(name):
    """Truncate works if parameters of one group have taken different numbers of optimizer steps, some of them none."""
    hooked, float32 = (run_ranks(2, _unfrozen, name, hooked) for hooked in (True, False))
    for (losses, found), (plain, expected) in zip(hooked, float32, strict=True):
        assert losses == pytest.approx(plain, abs=1e-5)
        assert ddp_training.change_error(found, expected, ddp_training.net().parameters()) < 1e-3


def rmsprop_term(theta, state, group):
    """Return A of RMSprop with momentum."""
    if not state:
        return None
    kept = theta / group["lr"] - group["momentum"] * state["momentum_buffer"]
    return kept * ((group["alpha"] * state["square_avg"]).sqrt() + group["eps"])


def _several(model, how):
    """Return two optimizers of a model, of which the second one needs a formula, and the argument ``optimizer=``."""
    first, second = list(model.parameters())[::2], list(model.parameters())[1::2]
    adamw = torch.optim.AdamW([{"params": first[:3], "lr": 1e-2}, {"params": first[3:], "weight_decay": 0}])
    rmsprop = torch.optim.RMSprop(second, lr=1e-3, momentum=0.9)
    formula = codec.optimizers.Formula(rmsprop, rmsprop_term)
    return (adamw, rmsprop), {"list": [adamw, formula], "tuple": (formula, adamw)}[how]


class _Both:
    """Two optimizers that step together."""

    def __init__(self, *each):
        self.each = each

    def zero_grad(self):
        for optimizer in self.each:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.each:
            optimizer.step()


def _with_several(rank, size, guard, how):
    """Train 6 steps without codec, then one with the hook; return the parameters of each."""
    results = []
    for hooked in (False, True):
        model = ddp_training.wrapped()
        both, argument = _several(model.module, how)
        if hooked:
            hook = codec.torch.ddp_hook(
                codec.Truncate(guard=guard), optimizer=argument, policy=replace(ddp_training.ENCODE_ALL, start_step=6)
            )
            hook.register(model)
        ddp_training.train(model, _Both(*both), rank, 6)
        before = [p.detach().clone() for p in model.parameters()]
        ddp_training.train(model, _Both(*both), rank, 1, first=6)
        results.append((before, [p.detach().clone() for p in model.parameters()]))
    copies = [None] * size
    dist.all_gather_object(copies, ddp_training.parameter_bytes(model))
    assert len(set(copies)) == 1
    (start, plain), (same, found) = results
    assert all(torch.equal(a, b) for a, b in zip(start, same, strict=True))
    return start, plain, found, hook.stats()


@pytest.mark.parametrize("how", ["list", "tuple"])
@pytest.mark.parametrize("guard", ["exact", "near"])
def test_step_of_several_optimizers_is_within_the_bound_of_plain_ddp(guard, how):
    """One of the two optimizers has a user's formula. Frames are encoded twice: by workers and of sums."""
    start, plain, found, stats = run_ranks(2, _with_several, guard, how)[0]
    relative = 2 * 2.0 ** (-28 if guard == "exact" else -16)
    equal = total = 0
    for w, p, q in zip(start, plain, found, strict=True):
        step = (p - w).abs()
        # c A is the new parameter without the gradient: within the step of the old parameter; 2^-23 is its rounding
        assert ((p - q).abs() <= 1.2 * relative * (w.abs() + 10 * step) + 2**-23 * w.abs() + 1e-9).all()
        equal += int((p == q).sum())
        total += p.numel()
    assert equal / total > (0.99 if guard == "exact" else 0.01)
    assert stats.parameters == {}
    assert any("Truncate" in key for key in stats.contents)


def _lacking(rank, size):
    for places, words in (
        ((0,), "lacks the parameters .*: pass a list of all optimizers"),
        ((0, 1, 0), "several optimizers of optimizer= have the parameters"),
    ):
        model = ddp_training.wrapped()
        (adamw, rmsprop), known = _several(model.module, "list")
        given = [known[i] for i in places]
        hook = codec.torch.ddp_hook("near", optimizer=given, policy=ddp_training.ENCODE_ALL).register(model)
        with pytest.raises(codec.CodecError, match=words):
            ddp_training.train(model, _Both(adamw, rmsprop), rank, 1)
        assert hook.stats().failed_steps == 1


def test_parameters_must_be_in_exactly_one_of_several_optimizers():
    run_ranks(2, _lacking)


def test_hook_says_how_to_pass_an_optimizer_that_is_not_built_in():
    """Each error leads to Formula, and none back to the argument that was refused."""
    model = ddp_training.net()

    class Mine(torch.optim.SGD):
        pass

    bound = codec.Truncate().bind(codec.optimizers.SGD(0.1), theta=torch.ones(3))
    mine = Mine(model.parameters())
    for spec, optimizer, words in (
        ("near", mine, "the formula for the step of Mine is not known"),
        ("near", codec.optimizers.Custom(lambda theta: theta), "has no parameters and no state"),
        ("near", codec.optimizers.SGD(0.1), "has no parameters and no state"),
        ("near", [mine], "the formula for the step of Mine is not known"),
        ("near", [model], "must be a torch optimizer"),
        (bound, mine, "spec must not be bound"),
    ):
        with pytest.raises(codec.ArgumentError, match=rf"{words}.*codec\.optimizers\.Formula\(optimizer, function\)"):
            codec.torch.ddp_hook(spec, optimizer=optimizer)
    with pytest.raises(codec.ArgumentError, match="empty list"):
        codec.torch.ddp_hook("near", optimizer=[])
    formula = codec.optimizers.Formula(mine, lambda theta, state, group: theta / group["lr"])
    assert codec.torch.ddp_hook("near", optimizer=formula).optimizers == (formula,)


class _Experts(torch.nn.Module):
    """A mixture of experts, of which the caller chooses some."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(64, 64)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x, chosen):
        return sum(self.experts[i](self.first(x)) for i in chosen)


def _mixture(rank, size, hooked):
    """Train with an expert that is never used, one that is used late, and one unfrozen with a group of its own."""
    net = _Experts()
    late = net.experts[3].requires_grad_(False)
    known = [p for module in (net.first, *net.experts[:2]) for p in module.parameters()]
    optimizer = torch.optim.AdamW(known, lr=1e-2)
    optimizer.add_param_group({"params": [*net.experts[2].parameters()], "lr": 1e-3})
    hook = codec.torch.ddp_hook("near", optimizer=optimizer) if hooked else None
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        _take_steps(net, late, optimizer, hook, rank)
    return [p.detach().clone() for p in net.parameters()]


def _take_steps(net, late, optimizer, hook, rank):
    for step, chosen in enumerate(((0,), (0,), (0, 2), (0, 2, 3), (0, 2, 3))):
        if step in (0, 3):
            if step:
                optimizer.add_param_group({"params": [*late.requires_grad_().parameters()], "lr": 1e-3})
            model = torch.nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
            if hook is not None:
                hook.register(model)
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        model(x, chosen).square().mean().backward()
        optimizer.step()


def test_experts_that_are_unused_or_added_later_train_as_float32_without_a_warning():
    plain, hooked = (run_ranks(2, _mixture, hooked) for hooked in (False, True))
    for p, q in zip(plain[0], hooked[0], strict=True):
        torch.testing.assert_close(p, q, atol=2e-5, rtol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(*hooked, strict=True))
