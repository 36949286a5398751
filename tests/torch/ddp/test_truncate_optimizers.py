"""DDP hooks with Truncate, for optimizers whose formulas are not those of GComp's paper."""

import pytest
import torch
import torch.distributed as dist

import codec
from support import ddp_training
from support.ranks import run_ranks


class Lion(torch.optim.Optimizer):
    """The optimizer Lion, as PyPI packages implement it."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"]).sub_(m.mul(beta1).add(p.grad, alpha=1 - beta1).sign(), alpha=lr)
                m.lerp_(p.grad, 1 - beta2)


def matrices(model):
    return [p for p in model.parameters() if p.dim() == 2 and p.numel() >= 4096]


OPTIMIZERS = {
    "nadam": lambda model: torch.optim.NAdam(model.parameters()),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "lion": lambda model: Lion(model.parameters()),
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
        for p, q in zip(found, expected, strict=True):
            torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-4)
