"""DDP hooks over two levels: they train as over a flat group, for all models and loops that the flat hook supports."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from support import flatcall
from support.ddp_training import (
    ENCODE_ALL,
    change_error,
    check_failed_step,
    hook_state_bytes,
    net,
    parameter_bytes,
    small_forward,
    small_net,
    take_step,
    train,
    wrapped,
)
from support.ranks import run_ranks


def mesh_of(rank=0, size=4):
    return init_device_mesh("cpu", (2, size // 2))


def check_replicas(model):
    """Check that the parameters are identical on all ranks."""
    everyones = codec.torch.all_to_all_bytes([parameter_bytes(model)] * dist.get_world_size())
    assert len(set(map(bytes, everyones))) == 1


SPECS = [  # spec, arguments, error relative to plain DDP, and relative to the flat hook
    (codec.Lossless(), {}, 1e-4),
    (codec.Quantize(4, rounding="nearest"), {"feedback": True}, 0.1),
    (codec.Sign(group_size=64), {"policy": codec.torch.Policy(start_step=2)}, 0.5),
]


def _trained(rank, size):
    initial = [p.detach().clone() for p in net().parameters()]
    mesh = mesh_of(size=size)
    plain = wrapped()
    train(plain, torch.optim.SGD(plain.parameters(), 0.05), rank, 6)
    for spec, how, most in SPECS:
        errors = [0.0] if spec == codec.Lossless() else []
        for group in (None, mesh)[len(errors) :]:
            model = wrapped()
            hook = flatcall.ddp_hook(spec, **({"policy": ENCODE_ALL, "group": group, "algorithm": "two_shot"} | how))
            hook.register(model)
            train(model, torch.optim.SGD(model.parameters(), 0.05), rank, 6)
            check_replicas(model)
            errors.append(change_error(model.parameters(), plain.parameters(), initial))
        assert errors[1] < most, (spec, errors)
        assert errors[1] < 2.5 * errors[0] + 1e-4, (spec, errors)  # feedback works as well as over a flat group
        stats = hook.stats()
        assert stats.levels == f"2 x {size // 2} ranks"
        assert stats.local_nbytes > 0
        assert "2 x" not in repr(stats.advice)
    return hook.stats().sent_nbytes


def test_training_over_two_levels_is_as_exact_as_over_a_flat_group():
    run_ranks(4, _trained)


class Odd(nn.Module):
    """Tied embedding and head, a frozen layer, an unused layer, a low-rank adapter, and a scalar."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(50, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.unused = nn.Linear(32, 7)
        self.sometimes = nn.Linear(32, 32)
        self.a, self.b = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, more):
        x = self.embedding(tokens)
        x = self.frozen(x) + self.b(self.a(x)) * self.scale
        return self.head(self.sometimes(x) if more else x)


def odd_step(model, rank, step, optimizer):
    g = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(0, 50, (16,), generator=g)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens, (step + rank) % 3 == 0), tokens).backward()
    optimizer.step()


def _odd(rank, size):
    """Train a model with all oddities, without a hook, losslessly and by Quantize with feedback."""
    runs = []
    for spec in (None, codec.Lossless(), codec.Quantize(8)):
        model = DistributedDataParallel(Odd(), find_unused_parameters=True)
        if spec is not None:
            feedback = None if spec == codec.Lossless() else True
            codec.torch.ddp_hook(spec, feedback=feedback, group=mesh_of(), policy=ENCODE_ALL).register(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(6):
            odd_step(model, rank, step, optimizer)
        check_replicas(model)
        runs.append([p.detach() for p in model.parameters()])
    initial = list(Odd().parameters())
    assert change_error(runs[1], runs[0], initial) < 1e-4
    assert change_error(runs[2], runs[0], initial) < 0.05

    # two models with hooks of their own, in one backward pass
    first, second = (DistributedDataParallel(small_net()) for _ in range(2))
    mesh = mesh_of()
    for model in (first, second):
        codec.torch.ddp_hook(codec.Quantize(8), group=mesh, policy=ENCODE_ALL).register(model)
    for step in range(2):
        loss = small_forward(first, 10 * step + rank) + small_forward(second, 10 * step + rank + 1)
        loss.backward()
    check_replicas(first)
    check_replicas(second)


def test_odd_models_train_over_two_levels():
    run_ranks(4, _odd)


class Kinds(nn.Module):
    """Layers of other dtypes: float64, and an embedding with sparse gradients."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(1)
        self.sparse = nn.Embedding(20, 64, sparse=True)
        self.wide = nn.Linear(64, 64, dtype=torch.float64)
        self.own = nn.Linear(64, 64, dtype=dtype)

    def forward(self, tokens):
        return self.own(self.wide(self.sparse(tokens).double()).to(self.own.weight.dtype))


def _dtypes(rank, size):
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        found = []
        for spec in (None, codec.Lossless(), codec.Quantize(8)):
            model = DistributedDataParallel(Kinds(dtype))
            if spec is not None:
                codec.torch.ddp_hook(spec, group=mesh_of(), policy=ENCODE_ALL).register(model)
            tokens = torch.randint(0, 20, (16,), generator=torch.Generator().manual_seed(rank))
            model(tokens).float().square().mean().backward()
            found.append([p.grad.to_dense() for p in model.parameters()])
            everyones = codec.torch.all_to_all_bytes([b"".join(g.float().numpy().tobytes() for g in found[-1])] * size)
            assert len(set(map(bytes, everyones))) == 1
        for plain, exact, lossy in zip(*found, strict=True):
            torch.testing.assert_close(exact, plain, rtol=tolerance, atol=1e-3 * tolerance)
            assert (lossy - plain).norm() <= 0.02 * plain.norm()


def test_dtypes_and_sparse_gradients_over_two_levels():
    run_ranks(4, _dtypes)


def _nan(rank, size):
    model = wrapped()
    hook = flatcall.ddp_hook(codec.Quantize(4), feedback=True, group=mesh_of(), algorithm="two_shot").register(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    train(model, optimizer, rank, 2)
    check_failed_step(model, hook, optimizer, rank, 2)
    train(model, optimizer, rank, 2, 3)
    check_replicas(model)

    def spoil(buffer, gradients):
        for p, gradient in gradients:
            if rank == 3 and p is model.module[2].weight:
                gradient[2, 5] = torch.nan

    model = DistributedDataParallel(small_net())
    codec.torch.ddp_hook("small", policy=ENCODE_ALL, transform=spoil, group=mesh_of()).register(model)
    with pytest.raises(codec.CodecError) as e:
        take_step(model, rank, small_forward)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()) or rank == 3
    return type(e.value).__name__, str(e.value)


def test_nan_on_one_rank_is_named_there_and_raises_on_all():
    *others, own = run_ranks(4, _nan)
    assert own[0] == "ArgumentError"
    assert own[1].startswith("the gradient of '2.weight' holds NaN or Inf in 1 of")
    assert "at (2, 5)" in own[1]
    for kind, text in others:
        assert kind == "PeerError"
        assert text.startswith("rank 3 has NaN or Inf: nothing was changed")


def _scaled(rank, size):
    """An overflow on one rank is skipped by all scalers; a disabled scaler raises."""
    model = DistributedDataParallel(small_net())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hook = codec.torch.ddp_hook(codec.Quantize(4), feedback=True, grad_scaler=scaler, group=mesh_of()).register(model)
    for step in range(4):
        before, state = parameter_bytes(model), hook_state_bytes(hook)
        optimizer.zero_grad()
        loss = scaler.scale(small_forward(model, 10 * step + rank))
        (loss * torch.inf if step == 2 and rank == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (parameter_bytes(model) == before) == (step == 2)
        if step == 2:
            assert hook_state_bytes(hook) == state
    assert scaler.get_scale() == 512
    check_replicas(model)
    off = torch.amp.GradScaler("cpu", enabled=False)
    model = DistributedDataParallel(small_net())
    codec.torch.ddp_hook("small", grad_scaler=off, group=mesh_of()).register(model)
    with pytest.raises(codec.ArgumentError if rank == 1 else codec.PeerError):
        (small_forward(model, rank) * (torch.nan if rank == 1 else 1)).backward()


def test_grad_scalers_over_two_levels():
    run_ranks(4, _scaled)


def _looped(rank, size):
    """join(), transform=, a refresher of codebooks, Truncate bound to an optimizer, and "auto"."""
    mesh = mesh_of()
    model = DistributedDataParallel(small_net())
    codec.torch.ddp_hook("small", group=mesh).register(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join():
        for step in range(1 + rank % 2):
            take_step(model, 10 * step + rank, small_forward, optimizer)
    check_replicas(model)

    calls = []

    def halved(buffer, gradients):
        buffer.mul_(0.5)
        calls.append(len(gradients))
        return "item"

    grads = []
    for transform in (None, halved):
        model = DistributedDataParallel(small_net())
        codec.torch.ddp_hook(codec.Lossless(), transform=transform, group=mesh).register(model)
        grads.append(torch.cat([g.flatten() for g in take_step(model, rank, small_forward)]))
    assert calls == [6]
    torch.testing.assert_close(grads[1], grads[0] / 2)
    model = DistributedDataParallel(small_net())
    codec.torch.ddp_hook(codec.Lossless(), transform=lambda *_: rank // 3, group=mesh).register(model)
    with pytest.raises(codec.PeerError, match=r"step is|rank 3 has passed other arguments"):
        take_step(model, rank, small_forward)

    for spec, how in (
        (codec.Lossless(), {"refresher": codec.CodebookRefresher(codec.Lossless(), interval=2, delay=1)}),
        (codec.Truncate(guard="feedback"), {"optimizer": True}),
        ("auto", {}),
        (codec.Ternary(), {"options": codec.options(algorithm="shared_scale")}),
    ):
        finals = []
        for group in (None, mesh):
            model = DistributedDataParallel(net())
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            arguments = how | ({"optimizer": optimizer} if "optimizer" in how else {})
            if "refresher" in how:
                arguments["refresher"] = codec.CodebookRefresher(codec.Lossless(), interval=2, delay=1)
            hook = codec.torch.ddp_hook(spec, group=group, policy=ENCODE_ALL, **arguments).register(model)
            train(model, optimizer, rank, 4)
            check_replicas(model)
            finals.append([p.detach() for p in model.parameters()])
        if not isinstance(spec, codec.Ternary):
            assert change_error(finals[1], finals[0], net().parameters()) < 0.2, spec
        if "refresher" in how:
            assert hook.state_dict()["refresher"]


def test_loops_and_arguments_over_two_levels():
    run_ranks(4, _looped)


def _wide(rank, size):
    _trained(rank, size)


@pytest.mark.nightly
def test_training_over_machines_of_four_ranks():
    run_ranks(8, _wide)
