"""DDP hooks support every kind of parameter and model in DistributedDataParallel, or reject it at registration."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import codec
import codec.torch
from codec.torch.collectives import uncompressed
from codec.torch.ddp import reducer as reducer_module
from codec.torch.ddp.policy import default_policy
from support.ddp_training import ENCODE_ALL, parameter_bytes, small_forward, small_net, take_step
from support.ranks import run_ranks
from support.tiers import nightly

EVERYTHING = {"policy": ENCODE_ALL}


class Complex(nn.Module):
    """Model with complex parameters, some so small that the policy sends them lossless, and a real one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        shapes = [(4,), (96, 96), (16, 40), (96, 96)]
        self.ps = nn.ParameterList(nn.Parameter(torch.randn(*s, dtype=torch.complex64)) for s in shapes)
        self.real = nn.Parameter(torch.randn(96, 96))

    def forward(self, v):
        real = (self.real * v[0]).square().sum()
        return real + sum(((p.abs() ** 2) * v[i]).sum() + (p.real * v[i + 1]).sum() for i, p in enumerate(self.ps))


def _complex_forward(model, rank):
    return model(torch.randn(5, generator=torch.Generator().manual_seed(rank)))


def _complex(rank, size):
    """Check that replicas are identical, and exact if values are representable; return the gradients by spec."""
    want = take_step(DistributedDataParallel(Complex()), rank, _complex_forward)
    found = {}
    for spec, how in [
        (codec.Lossless(), {}),
        (codec.Float8(group_size=128), {}),
        (codec.Quantize(8), {"feedback": True}),
        (codec.Sign(group_size=1024), {"policy": codec.torch.Policy(start_step=1)}),
        (codec.Truncate(), {"optimizer": True}),
    ]:
        model = DistributedDataParallel(Complex())
        optimizer = torch.optim.Adam(model.parameters()) if how.pop("optimizer", None) else None
        codec.torch.ddp_hook(spec, optimizer=optimizer, options=codec.options(algorithm="two_shot"), **how).register(
            model
        )
        for _ in range(2):
            got = take_step(model, rank, _complex_forward, optimizer)
        for p, g, w in zip(model.parameters(), got, want, strict=True):
            exact = isinstance(spec, codec.Lossless) or p.numel() < 4096
            if optimizer is None:
                assert torch.equal(g, w) == exact, (spec, p.shape)
            bound = 0.7 if isinstance(spec, codec.Sign) else 0.05
            if not isinstance(spec, codec.Truncate):
                assert torch.linalg.vector_norm(g - w) <= bound * torch.linalg.vector_norm(w), spec
        found[repr(spec)] = parameter_bytes(model), [torch.view_as_real(g.to(torch.complex64)).tolist() for g in got]
    return found


def test_complex_parameters_are_reduced():
    results = run_ranks(2, _complex)
    assert results[0] == results[1]


def _uncovered(rank, size):
    """A bucket with values of no known parameter raises on all ranks, and the group stays usable."""
    model = DistributedDataParallel(nn.Linear(64, 64))
    codec.torch.ddp_hook(codec.Float8(), **EVERYTHING).register(model)
    reducer_module.n_values = lambda p: p.numel() - (p.dim() == 1)
    with pytest.raises(codec.ArgumentError, match="4160 values, but its parameters have 4159"):
        model(torch.ones(2, 64)).sum().backward()
    x = torch.full((3,), float(rank))
    codec.torch.all_reduce(x, op="sum")
    assert x[0] == sum(range(size))


def test_bucket_with_unaccounted_values_is_rejected():
    run_ranks(2, _uncovered)


class UnusualParameters(nn.Module):
    """Model with float64, sparse, nine-dimensional and ordinary parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(50, 64, sparse=True)
        self.precise = nn.Linear(64, 64).double()
        self.nine = nn.Parameter(torch.randn([2] * 8 + [32]))
        self.frozen = nn.Parameter(torch.arange(5), requires_grad=False)

    def forward(self, i):
        x = self.precise(self.table(i).double()).float()
        return (x @ self.nine.view(64, -1)).square().mean()


def _odd_forward(model, rank):
    return model(torch.tensor([1, rank, 7 + rank]))


def _odd(rank, size):
    logged = []
    uncompressed.logger.setLevel("INFO")
    uncompressed.logger.info = lambda text, *args: logged.append((text, *args))
    plain, model = DistributedDataParallel(UnusualParameters()), DistributedDataParallel(UnusualParameters())
    hook = codec.torch.ddp_hook(codec.Quantize(8), feedback=True).register(model)
    for _ in range(3):
        want, got = take_step(plain, rank, _odd_forward), take_step(model, rank, _odd_forward)
        for (name, p), g, w in zip(model.module.named_parameters(), got, want, strict=True):
            if not p.requires_grad:
                assert g is None
                continue
            tolerance = {torch.float64: 1e-15, torch.float32: 1e-6}[p.dtype] if name != "nine" else 0.02
            difference = torch.linalg.vector_norm(g.to_dense() - w.to_dense())
            assert difference <= tolerance * torch.linalg.vector_norm(w.to_dense()), name
    assert hook.stats().steps == 3
    assert sorted(kind for text, kind, *_ in logged if "frames cannot carry" in text) == ["float64", "sparse"]
    return [p.grad.to_dense().tolist() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_that_frames_cannot_carry_are_summed_uncompressed(size):
    results = run_ranks(size, _odd)
    assert all(r == results[0] for r in results)


def _registered_as_torch_does(rank, size):
    spec, found = codec.Float8(group_size=128), {}
    for form in ("register", "callable", "compiled"):
        # A new group per form: otherwise "auto" could switch to raw after a few steps of the earlier forms.
        model, hook = DistributedDataParallel(small_net(), process_group=dist.new_group()), codec.torch.ddp_hook(spec)
        if form == "register":
            hook.register(model)
        elif form == "callable":
            model.register_comm_hook(None, hook)
        else:
            hook.register(torch.compile(model, backend="eager"))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            take_step(model, rank, small_forward, optimizer)
        found[form] = parameter_bytes(model)
        assert 0 < hook.stats().ratio < 0.5
        assert set(hook.stats(by_parameter=True).parameters) == {n for n, _ in model.module.named_parameters()}
    return found


def test_every_form_of_registration_gives_the_same_bits():
    for found in run_ranks(2, _registered_as_torch_does):
        assert len(set(found.values())) == 1


class Checkpointed(nn.Module):
    """Small model with activation checkpointing."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.layers, self.use_reentrant = small_net(), use_reentrant

    def forward(self, x):
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


FORMS = {
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(use_reentrant=True),
    "compiled": small_net,
}


def _trained(rank, size, form):
    found = []
    for make in (small_net, FORMS[form]):
        model = DistributedDataParallel(make(), process_group=dist.new_group())
        hook = codec.torch.ddp_hook(codec.Quantize(4), policy=ENCODE_ALL).register(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        called = torch.compile(model, backend="eager") if found and form == "compiled" else model
        for _ in range(3):
            take_step(called, rank, small_forward, optimizer)
        assert hook.stats().steps == 3
        found.append(parameter_bytes(model))
    return found


@pytest.mark.parametrize("form", ["checkpoint", "reentrant checkpoint", nightly("compiled")])
def test_checkpointed_and_compiled_models_train_as_others(form):
    for plain, found in run_ranks(2, _trained, form):
        assert plain == found


class Branches(nn.Module):
    """Model with two branches; a forward pass uses branch number `used`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(96, 96) for _ in range(2))
        self.used = 0

    def forward(self, x):
        return self.branches[self.used](x)


def _branches(rank, size, **kwargs):
    model = DistributedDataParallel(Branches(), **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = codec.torch.ddp_hook(codec.Quantize(4), feedback=True, options=codec.options(algorithm="two_shot")).register(
        model
    )
    for step in range(4):
        if "find_unused_parameters" in kwargs:
            model.module.used = step // 2
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(size * step + rank))
        take_step(model, rank, lambda model, rank, x=x: model(x).square().mean(), optimizer)
    assert hook.stats().steps == 4
    return parameter_bytes(model)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_replicas_stay_equal_while_parameters_are_unused(option):
    assert len(set(run_ranks(2, functools.partial(_branches, **{option: True})))) == 1


class Vocabulary(nn.Module):
    """Model with an embedding and a head, tied or not, and parameters with sparse gradients or of equal shape."""

    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.up, self.down = nn.Embedding(256, 64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.rare, self.dense = nn.Parameter(torch.randn(128, 64)), nn.Linear(64, 64)
        self.head = nn.Linear(64, 256, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, i):
        x = self.down(self.up(self.token(i))) + self.rare[i % 3]
        return nn.functional.cross_entropy(self.head(self.dense(x)), (i + 1) % 256)


def _vocabulary(rank, size):
    found = {}
    for spec in (codec.Sign(group_size=1024), codec.Ternary(), codec.Quantize(4)):
        for tied in (False, True):
            model = DistributedDataParallel(Vocabulary(tied))
            hook = codec.torch.ddp_hook(spec).register(model)
            for step in range(3):
                i = torch.randint(256, (64,), generator=torch.Generator().manual_seed(10 * step + rank))
                take_step(model, rank, lambda m, _, i=i: m(i))
                parameters = hook.stats(by_parameter=True).parameters
                lossy = {name for name, p in parameters.items() if p.spec == spec}
                assert bool(lossy) == (step > 0 or isinstance(spec, codec.Quantize)), (spec, step)
            found[type(spec).__name__, tied] = lossy
    return found


def test_default_policy_leaves_embeddings_heads_and_sparse_gradients_lossless():
    dense = {"up.weight", "down.weight", "dense.weight"}
    for found in run_ranks(2, _vocabulary):
        for kind in ("Sign", "Ternary"):
            assert found[kind, False] == dense
            assert found[kind, True] == {"down.weight", "dense.weight"} | ({"up.weight"} & found[kind, True])
        assert found["Quantize", False] == {"token.weight", "rare", "head.weight", *dense}


def _policies(rank, size):
    """Return, for each policy, the parameters that are encoded lossy after the first step."""
    default, sign = default_policy, codec.Sign(group_size=1024)
    policies = [
        default,
        lambda name, p: default(name, p),
        lambda name, p: None,
        lambda name, p: codec.Lossless() if name == "up.weight" else None,
        lambda name, p: sign if name == "token.weight" else default(name, p),
        lambda name, p: sign,
        codec.torch.Policy(uneven=None),
        ENCODE_ALL,
    ]
    found = []
    for policy in policies:
        torch.manual_seed(0)
        model = DistributedDataParallel(Vocabulary(tied=False))
        hook = codec.torch.ddp_hook(sign, policy=policy).register(model)
        for step in range(2):
            i = torch.randint(256, (64,), generator=torch.Generator().manual_seed(10 * step + rank))
            take_step(model, rank, lambda m, _, i=i: m(i))
        parameters = hook.stats(by_parameter=True).parameters
        found.append({name for name, p in parameters.items() if isinstance(p.spec, codec.Sign)})
    return found


def test_functions_around_the_default_policy_keep_its_protection():
    """A function around the default policy changes only the parameters for which it returns a spec."""
    dense, uneven = {"up.weight", "down.weight", "dense.weight"}, {"token.weight", "rare", "head.weight"}
    for found in run_ranks(2, _policies):
        default, around, none, up, token, *all_weights, everything = found
        assert default == around == none == dense
        assert up == dense - {"up.weight"}
        assert token == dense | {"token.weight"}
        assert [names & (dense | uneven) for names in all_weights] == [dense | uneven] * 2
        assert everything >= dense | uneven


@pytest.mark.parametrize("policy", [None, "small", codec.Sign()])
def test_policy_is_refused_unless_it_can_be_called(policy):
    with pytest.raises(codec.ArgumentError, match=r"policy must be a codec\.torch\.Policy or a function"):
        codec.torch.ddp_hook(policy=policy)


def _frozen(rank, size):
    """If a layer is frozen after DDP wrapped the model, before or after register(), gradients equal plain DDP's."""
    found = []
    for registers, when in [(False, "before"), (True, "before"), (True, "after")]:
        model = DistributedDataParallel(small_net(), find_unused_parameters=True)
        if when == "before":
            model.module[0].requires_grad_(False)
        if registers:
            hook = codec.torch.ddp_hook(options=codec.options(algorithm="two_shot")).register(model)
        model.module[0].requires_grad_(False)
        for _ in range(2):
            gradients = take_step(model, rank, small_forward)
        found.append([None if g is None else g.tolist() for g in gradients])
    assert found[0] == found[1] == found[2]
    assert found[0][0] is None
    assert hook.stats().steps == 2


def test_layers_frozen_after_wrapping_train_as_with_plain_ddp():
    run_ranks(2, _frozen)
