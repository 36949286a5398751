"""codec.torch.saved_tensors: exact gradients with Lossless, frames that are freed, tensors that are not compressed."""

import contextlib
import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import codec
import codec.torch

X = torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(3))


class Block(torch.nn.Module):
    """Block of masked attention, convolution and dropout: autograd saves views, expanded tensors, masks and -Inf."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.qkv = torch.nn.Linear(64, 192)
        self.convolution = torch.nn.Conv1d(32, 32, 3, padding=1)
        self.rest = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Dropout(0.1))
        self.last = torch.nn.Linear(256, 64)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(8, 32, 3, 4, 16).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT).masked_fill(torch.ones(32, 32, dtype=torch.bool).triu(1), -torch.inf)
        x = x + (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(x.shape)
        scale = x.mean(0, keepdim=True).expand(x.shape)
        return x + self.last(self.rest(self.convolution(x * scale)))


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block())


def gradients(net, context, forward=None, autocast=False):
    torch.manual_seed(1)  # equal dropout masks in all runs
    with context, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = (forward or net)(X.clone()).float().square().mean()
    loss.backward()
    found = [p.grad for p in net.parameters()]
    net.zero_grad()
    return found


def equal(some, others):
    return all(a is b or torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_lossless_gives_the_same_gradients_and_frees_its_frames(autocast):
    net = model()
    want = gradients(net, contextlib.nullcontext(), autocast=autocast)
    saved = codec.torch.saved_tensors(min_nbytes=1)
    assert equal(gradients(net, saved, autocast=autocast), want)
    gc.collect()
    stats = saved.stats()
    assert stats.held_nbytes == 0
    assert stats.peak_nbytes == stats.frame_nbytes < 0.75 * stats.raw_nbytes
    assert str(stats) == f"{stats.tensors} tensors: {str(stats).partition(': ')[2]}"


def test_lossy_gradients_have_the_error_of_the_codec():
    net = model()
    want = torch.cat([g.flatten() for g in gradients(net, contextlib.nullcontext())])
    saved = codec.torch.saved_tensors("balanced")
    got = torch.cat([g.flatten() for g in gradients(net, saved)])
    assert 0.001 < float((got - want).norm() / want.norm()) < 0.1
    assert saved.stats().frame_nbytes < 0.3 * saved.stats().raw_nbytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_keep_their_gradients(reentrant):
    net = model()

    def forward(x):
        x = net[0](x.requires_grad_())
        return checkpoint(net[1], x, use_reentrant=reentrant)

    want = gradients(net, contextlib.nullcontext(), forward)
    saved = codec.torch.saved_tensors()
    assert equal(gradients(net, saved, forward), want)
    assert saved.stats().tensors


def test_second_derivatives_and_retained_graphs_are_exact():
    def derivatives(context):
        w = torch.nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
        with context:
            y = torch.tanh(torch.tanh(X.view(-1, 64) @ w) @ w).pow(3).sum()
            (first,) = torch.autograd.grad(y, w, create_graph=True)
        first.square().sum().backward(retain_graph=True)
        first.square().sum().backward()
        return first.detach(), w.grad

    assert equal(derivatives(codec.torch.saved_tensors()), derivatives(contextlib.nullcontext()))


def test_values_at_the_time_of_saving_count():
    """Backward uses values at the time of saving, even if an activation is later changed in place, which autograd
    refuses without saved_tensors.
    """
    w = torch.nn.Parameter(torch.ones(64))
    with codec.torch.saved_tensors(min_nbytes=1):
        y = torch.exp(X * w)
        other = y.square()
        y.zero_()
        other = other.sum() + y.square().sum()
    other.backward()
    (want,) = torch.autograd.grad(torch.exp(X * w).square().sum(), w)
    assert torch.equal(w.grad, want)


def saved_by(call, **how):
    with codec.torch.saved_tensors(min_nbytes=1, **how) as saved:
        call().sum().backward()
    return saved.stats().tensors


def test_tensors_that_others_hold_are_left_alone():
    w = torch.nn.Parameter(torch.randn(64))
    square = torch.nn.Parameter(torch.randn(64, 64))
    x = X.clone().requires_grad_()
    assert saved_by(lambda: x * w) == 0
    assert saved_by(lambda: torch.nn.functional.linear(x, square.view(4096).bfloat16().float().view(64, 64))) == 0
    assert saved_by(lambda: (x + 1) * w) == 1
    y = torch.sigmoid(x)  # two tensors, y and exp(y), are saved several times, but compressed once each
    assert saved_by(lambda: y * y + torch.exp(y) + y * w) == 2
    windows = (x + 1).view(-1).unfold(0, 64, 32)  # a view with overlapping windows is not compressed
    assert saved_by(lambda: windows.square()) == 0
    # Nine dimensions, more than a frame can have
    assert saved_by(lambda: (x + 1).view(2, 2, 2, 2, 2, 2, 2, 2, 64).square()) == 0
    assert saved_by(lambda: ((x + 1j) * (x + 2j)).abs()) == 0  # complex tensors are not compressed
    with codec.torch.saved_tensors(min_nbytes=1 << 20) as saved:
        (x.exp() * w).sum().backward()
    assert saved.stats().tensors == 0


def test_nonfinite_activations_are_kept_exactly():
    x = torch.full((100, 100), torch.nan)
    with codec.torch.saved_tensors("small", min_nbytes=1) as saved:
        w = torch.nn.Parameter(torch.ones(100))
        y = x * w
    y.sum().backward()
    assert w.grad.isnan().all()
    assert saved.stats().tensors == 1


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(0, 2),
        lambda x: x[:, ::2, 3:],  # a view with gaps
        lambda x: x[:, :1].expand(8, 32, 64),
        lambda x: x[None].to(memory_format=torch.channels_last),
    ],
)
def test_backward_pass_gets_strides_that_were_saved(layout):
    strides = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sum()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            strides.append((x.stride(), x.detach().clone()))
            return x * g

    x = layout(X.clone().requires_grad_() + 1)
    with codec.torch.saved_tensors(min_nbytes=1) as saved:
        Note.apply(x).backward()
    assert saved.stats().tensors == 1
    ((stride, values),) = strides
    assert stride == x.stride()
    assert torch.equal(values, x)


def test_wrong_arguments_are_refused():
    for spec in (codec.Delta(), codec.TopK(), "near", "tiny"):
        with pytest.raises(codec.SpecError):
            codec.torch.saved_tensors(spec)
    with pytest.raises(codec.ArgumentError, match="min_nbytes must be an int of at least 0"):
        codec.torch.saved_tensors(min_nbytes=-1)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models_keep_their_gradients(backend):
    net = model().eval()
    torch.compiler.reset()
    compiled = torch.compile(net, backend=backend)
    want = gradients(net, contextlib.nullcontext(), compiled)
    saved = codec.torch.saved_tensors()
    assert equal(gradients(net, saved, compiled), want)
    assert saved.stats().tensors


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # a warning that torch.compile causes as it inspects tensors
def test_compiled_functions_may_use_it_inside():
    net = model().eval()
    saved = []

    def forward(x):
        with codec.torch.saved_tensors() as context:
            y = net(x)
        saved.append(context)
        return y

    want = gradients(net, contextlib.nullcontext())
    torch.compiler.reset()
    assert equal(gradients(net, contextlib.nullcontext(), torch.compile(forward, backend="aot_eager")), want)
    assert saved[0].stats().tensors
