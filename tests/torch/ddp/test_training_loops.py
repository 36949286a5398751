"""Training loops that plain DistributedDataParallel allows: the hook trains as well, or all ranks raise an error."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.torch.ddp import policy
from support.ddp_training import hook_state_bytes
from support.ranks import run_ranks

TWO_SHOT = codec.options(algorithm="two_shot")  # instead of "auto", which may switch to raw


def _batch(rank, step, n=80):
    return torch.randn(16, n, generator=torch.Generator().manual_seed(10 * step + rank))


def _nan_with_scaler_off(rank, size):
    """With a disabled GradScaler, a NaN on rank 0 raises on all ranks, and training continues with the next batch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(80, 80))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    codec.torch.ddp_hook("small", grad_scaler=scaler).register(model)
    for step in range(4):
        x = _batch(rank, step)
        if step == 1 and rank == 0:
            x[0, 0] = torch.nan
        optimizer.zero_grad()
        loss = scaler.scale(model(x).square().mean())
        if step == 1:
            with pytest.raises(codec.PeerError if rank else codec.ArgumentError):
                loss.backward()
            continue
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
    return model.module.weight.detach().numpy().tobytes(), bool(model.module.weight.isfinite().all())


def test_disabled_grad_scaler_skips_no_step():
    first, second = run_ranks(2, _nan_with_scaler_off)
    assert first == second
    assert first[1]


def _uneven_join(rank, size):
    """join(divide_by_initial_world_size=False) is refused on all ranks; join() trains as with plain DDP."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(80, 80))
    codec.torch.ddp_hook().register(model)
    before = model.module.weight.detach().clone()
    for divide in (False, True):
        found = None
        try:
            with model.join(divide_by_initial_world_size=divide):
                for step in range(1 if rank else 2):
                    model(_batch(rank, step)).square().mean().backward()
        except codec.CodecError as e:
            found = type(e).__name__, "join()" in str(e)
        assert found == (None if divide else ("ArgumentError", True)), (rank, divide, found)
    assert torch.equal(model.module.weight, before)


def test_join_refuses_other_divisors_on_all_ranks():
    run_ranks(2, _uneven_join)


def _frozen_late(rank, size):
    """If a layer is frozen after DDP wrapped the model, the other layers train as with plain DDP."""
    norms = []
    for when in (None, "before", "after"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.Linear(80, 80))
        model = DistributedDataParallel(net, find_unused_parameters=True)
        hook = codec.torch.ddp_hook()
        if when == "after":
            hook.register(model)
        net[0].requires_grad_(False)
        if when == "before":
            hook.register(model)
        for step in range(3):
            model.zero_grad()
            model(_batch(rank, step)).square().mean().backward()
        norms.append(net[1].weight.grad.double().norm().item())
        if when is not None:
            assert hook.stats().steps == 3
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)


def test_layers_may_be_frozen_between_wrapping_and_registering():
    run_ranks(2, _frozen_late)


class Adapter(torch.nn.Module):
    """Linear layer with a low-rank adapter whose second matrix is zero at first."""

    def __init__(self, n, rank):
        super().__init__()
        self.base = torch.nn.Linear(n, n).requires_grad_(False)
        self.a, self.b = torch.nn.Linear(n, rank, bias=False), torch.nn.Linear(rank, n, bias=False)
        torch.nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def _zero_head():
    net = torch.nn.Sequential(*(torch.nn.Linear(128, 128), torch.nn.ReLU()) * 2, torch.nn.Linear(128, 64))
    torch.nn.init.zeros_(net[-1].weight)
    return net


MODELS = {"zero head": _zero_head, "adapters": lambda: torch.nn.Sequential(*(Adapter(128, 8) for _ in range(3)))}


def _begins_at_zero(rank, size, kind, spec):
    """Train; return the specs of the matrices after a few steps, sent / raw bytes, and log messages from level INFO."""
    logged = []
    policy.logger.setLevel("INFO")
    policy.logger.info = policy.logger.warning = lambda text, *args: logged.append(text % args)
    torch.manual_seed(0)
    net = MODELS[kind]()
    hook = codec.torch.ddp_hook(spec, options=TWO_SHOT).register(model := DistributedDataParallel(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(12):
        optimizer.zero_grad()
        (model(_batch(rank, step, 128)) - 1).square().mean().backward()
        optimizer.step()
        if step == 7:
            saved = hook.state_dict(gather=True)
            hook = codec.torch.ddp_hook(spec, options=TWO_SHOT)
            hook.register(model := DistributedDataParallel(net))
            hook.load_state_dict(saved)
    stats = hook.stats(by_parameter=True)
    assert sum(stats.contents.values()) == 4 * sum(p.numel() for p in net.parameters() if p.requires_grad)
    specs = {name: type(p.spec).__name__ for name, p in stats.parameters.items() if name.endswith("weight")}
    return specs, stats.ratio, logged


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("spec", ["smallest", "small"])
def test_layers_that_begin_at_zero_keep_nothing_lossless(kind, spec):
    """A layer whose gradient is zero in the first steps is measured in a later step, and not kept lossless for ever."""
    for rank, (specs, ratio, logged) in enumerate(run_ranks(2, _begins_at_zero, kind, spec)):
        assert set(specs.values()) == {"Sign" if spec == "smallest" else "Quantize"}, specs
        assert ratio < (0.08 if spec == "smallest" else 0.18), ratio
        assert ("of gradients a step" in "".join(logged)) == (rank == 0), logged
        assert "are not compressed" not in "".join(logged)


def _tells(rank, size):
    """Run a step whose policy keeps half of the gradients lossless; return the hook's report of it and the log."""
    logged = []
    policy.logger.setLevel("INFO")
    policy.logger.info = policy.logger.warning = lambda text, *args: logged.append(text % args)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    lossless = codec.torch.Policy(lambda name, p: codec.Lossless() if name == "weight" else None)
    hook = codec.torch.ddp_hook("small", policy=lossless, options=TWO_SHOT).register(model)
    for step in range(3):
        model(_batch(rank, step, 64)).square().mean().backward()
    return hook.stats().contents, logged


def test_hook_warns_if_much_stays_uncompressed():
    for rank, (contents, logged) in enumerate(run_ranks(2, _tells)):
        assert contents == {"Lossless() (policy)": 4 * 64 * 64, "Lossless() (small)": 4 * 64}
        assert [text.startswith("100% of the bytes") for text in logged] == ([False, True] if rank == 0 else [])


def _smaller(rank, size):
    """A state whose shape of a parameter differs from the model's is refused, before and after register()."""

    def hooked(*shape, state=None):
        model = DistributedDataParallel(torch.nn.Linear(*shape, bias=False))
        hook = codec.torch.ddp_hook(codec.Quantize(4), feedback=True)
        if state is not None:
            hook.load_state_dict(state)
        return model, hook.register(model)

    model, hook = hooked(128, 128)
    model(_batch(rank, 0, 128)).square().mean().backward()
    state = hook.state_dict()
    for shape in ((160, 128), (64, 256), (256, 64)):
        with pytest.raises(codec.StateError, match=r"residual of weight with shape \(128, 128\)"):
            hooked(*shape, state=state)
        model, other = hooked(*shape)
        model(_batch(rank, 0, shape[0])).square().mean().backward()
        before = hook_state_bytes(other)
        with pytest.raises(codec.StateError, match=r"residual of weight with shape \(128, 128\)"):
            other.load_state_dict(state)
        assert hook_state_bytes(other) == before
    hooked(128, 128, state=state)


def test_state_of_a_matrix_of_another_shape_is_refused():
    run_ranks(2, _smaller)
