"""Small buckets of a DDP step are reduced together: runs, messages, results, residuals, errors."""

import pytest
import torch
from torch import nn

import codec
import codec.torch
from codec.torch.ddp import joined
from codec.torch.ddp.buckets import Bucket
from codec.torch.network.mesh import Mesh
from support.ddp_training import (
    ENCODE_ALL,
    check_failed_step,
    data,
    hook_state_bytes,
    parameter_bytes,
    separate_buckets,
    train,
    wrapped,
)
from support.ranks import run_ranks
from support.states import through_a_file

LIMIT = 3 << 14  # bytes of a run of 3 ranks in tests with several runs


def _some_runs():
    """Let about three of the buckets of `wrapped` join in a run of 3 ranks."""
    joined.SLICE_NBYTES = LIMIT // 3


def _buckets(*kinds):
    """Return buckets: (number of values, dtype), or None for a sparse one."""
    made = [torch.ones(2).to_sparse() if kind is None else torch.ones(kind[0], dtype=kind[1]) for kind in kinds]
    return [Bucket(buffer, [], i, i == len(made) - 1) for i, buffer in enumerate(made)]


@pytest.mark.parametrize(
    ("kinds", "runs"),
    [
        ([(10, torch.float32)] * 4, [4]),
        ([(100, torch.float32)] * 5, [3, 2]),  # 1,200 bytes reach the limit of 1,024
        ([(100, torch.bfloat16)] * 5, [5]),
        ([(10, torch.float32), (256, torch.float32), (10, torch.float32)], [1, 1, 1]),  # not before large buckets
        ([(10, torch.float32), (10, torch.float32), (10, torch.bfloat16), (10, torch.bfloat16)], [2, 2]),
        ([(10, torch.float32), (10, torch.float64), (10, torch.float64), (10, torch.float32)], [1, 1, 1, 1]),
        ([None, (10, torch.float32), (10, torch.float32), None], [1, 2, 1]),
    ],
)
def test_consecutive_small_buckets_of_a_dtype_join(monkeypatch, kinds, runs):
    monkeypatch.setattr(joined, "SLICE_NBYTES", 256)
    joiner, buckets = joined.Joiner(), _buckets(*kinds)
    works, begun = zip(*(joiner.add(bucket, 4, lambda: None) for bucket in buckets), strict=True)
    found = [run for pairs in begun for run, _ in pairs]
    assert [len(run.members) for run in found] == runs
    assert [run.number for run in found] == list(range(len(runs)))
    assert [run.last for run in found] == [False] * (len(runs) - 1) + [True]
    assert [bucket.number for run in found for bucket in run.members] == list(range(len(buckets)))
    for run, work in (pair for pairs in begun for pair in pairs):
        work.set_result([bucket.number for bucket in run.members])
    assert [work.result() for work in works] == list(range(len(buckets)))


def _counted(rank, size, joins):
    """Train 50 buckets of 4 KB; return the messages and the bytes of frames of a step."""
    if not joins:
        separate_buckets()
    sent, send = [], Mesh._send
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(50)])
    model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.003)
    hook = codec.torch.ddp_hook(codec.Quantize(4), options=codec.options(algorithm="two_shot")).register(model)
    for step in range(3):
        if step == 2:  # the hook's state was exchanged, and DistributedDataParallel has rebuilt its buckets
            before = hook.stats()
            Mesh._send = lambda self, *args: sent.append(args) or send(self, *args)
        model(torch.randn(4, 32, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    Mesh._send = send
    after = hook.stats()
    assert after.buckets - before.buckets == after.frame_collectives - before.frame_collectives == 50
    return len(sent), after.sent_nbytes - before.sent_nbytes


@pytest.mark.parametrize("size", [3, 4])
def test_messages_do_not_grow_with_the_number_of_small_buckets(size):
    for rank, (messages, nbytes) in enumerate(run_ranks(size, _counted, True)):
        assert messages == 2 * (size - 1) + (1 if rank else size - 1)  # terms and sums; report or verdicts
        if not rank:
            apart = run_ranks(size, _counted, False)[0]
            assert apart[0] >= 50 * (size - 1)
            assert nbytes <= apart[1]


class _Kinds(nn.Module):
    """Layers whose gradients are sparse, float64, bfloat16 and float32, in many buckets; one is unused."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.early = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.embedding = nn.Embedding(10, 8, sparse=True)
        self.doubles = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
        self.halves = nn.ModuleList(nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(6))
        self.unused = nn.Linear(8, 8)
        self.late = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layers in (self.early, self.doubles, self.halves, self.late):
            for layer in layers:
                x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float() + self.embedding(torch.arange(4))


def _exact(rank, size):
    """Return gradients of a model with lossless buckets, joined and separate, and what transform= was called for."""
    found = []
    for joins in (True, False):
        for views in (False, True):
            calls = []

            def halved(buffer, gradients, calls=calls):
                assert sum(g.numel() for _, g in gradients) == buffer.numel() or buffer.is_sparse
                calls.append(buffer.numel())
                if not buffer.is_sparse:
                    buffer.mul_(0.5)
                return "halved"

            how = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
            model = nn.parallel.DistributedDataParallel(_Kinds(), bucket_cap_mb=0.0005, **how)
            if not joins:
                separate_buckets()
            hook = codec.torch.ddp_hook(codec.Lossless(), transform=halved).register(model)
            for _ in range(2):
                model.zero_grad()
                model(torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found.append(([g.to_dense().tolist() for g in gradients], sorted(calls)))
        runs = len(hook.reducer.state.buckets)
        assert runs == (3 if joins else 7), hook.reducer.state.buckets
    return found


def test_lossless_results_are_those_of_separate_buckets():
    for found in run_ranks(3, _exact):
        assert found[0] == found[1] == found[2] == found[3]
        assert len(found[0][1]) >= 2 * 8  # every bucket of both steps is transformed


def _resumed(rank, size, feedback):
    """Train in several runs of several buckets; resume once from a checkpoint."""
    _some_runs()
    ends = []
    for interrupted in (False, True):
        model = wrapped(joins=True)
        spec, options = codec.Quantize(4), codec.options(algorithm="two_shot")
        hook = codec.torch.ddp_hook(spec, feedback=feedback, policy=ENCODE_ALL, options=options).register(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        train(model, optimizer, rank, 4)
        number = len(hook.reducer.state.buckets)
        if interrupted:
            saved = through_a_file([model.module.state_dict(), optimizer.state_dict(), hook.state_dict()])
            model = wrapped(joins=True)
            hook = codec.torch.ddp_hook(spec, feedback=feedback, policy=ENCODE_ALL, options=options).register(model)
            optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
            model.module.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            hook.load_state_dict(saved[2])
        train(model, optimizer, rank, 4, 4)
        ends.append((parameter_bytes(model), hook_state_bytes(hook)))
    assert ends[0] == ends[1]
    return ends[0][0], number, hook.stats().buckets


@pytest.mark.parametrize("feedback", [False, True])
def test_training_resumes_bit_identically_in_joined_buckets(feedback):
    results = run_ranks(3, _resumed, feedback)
    assert len(set(results)) == 1
    _, runs, buckets = results[0]
    assert 2 <= runs < 8 < buckets  # several runs, each of several buckets


def _failing(rank, size):
    """NaN in one bucket of a run fails on all ranks, and names the parameter; later steps succeed."""
    _some_runs()
    model = wrapped(joins=True)
    hook = codec.torch.ddp_hook(codec.Quantize(4), feedback=True).register(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    train(model, optimizer, rank, 2)
    check_failed_step(model, hook, optimizer, rank, 2)
    names = []
    for name, p in model.module.named_parameters():
        if name in ("8.weight", "10.weight"):
            spoilt = p.register_hook(lambda g: g * torch.nan) if rank == 1 else None
            with pytest.raises(codec.ArgumentError if rank == 1 else codec.PeerError, match="NaN") as caught:
                train(model, optimizer, rank, 1, 3)
            names.append(f"the gradient of {name!r} holds" in str(caught.value))
            if spoilt is not None:
                spoilt.remove()
    train(model, optimizer, rank, 2, 4)
    stats = hook.stats()
    return parameter_bytes(model), stats.steps, stats.failed_steps, names


def test_nan_in_a_joined_bucket_names_its_parameter():
    results = run_ranks(3, _failing)
    assert len({r[0] for r in results}) == 1
    assert [r[1:3] for r in results] == [(4, 3)] * 3
    assert [r[3] for r in results] == [[False, False], [True, True], [False, False]]


def _overflowing(rank, size):
    """After an overflow on one rank, gradients are NaN on all ranks, and all GradScalers skip the step."""
    _some_runs()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    model = wrapped(joins=True)
    hook = codec.torch.ddp_hook(codec.Quantize(4), grad_scaler=scaler).register(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found = []
    for step in range(4):
        x, y = data(rank, step)
        if step == 2 and rank == 1:
            x[3, 4] = torch.inf
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        found.append(all(bool(p.grad.isnan().all()) for p in model.parameters()))
        scaler.step(optimizer)
        scaler.update()
    return found, scaler.get_scale(), hook.stats().failed_steps, parameter_bytes(model)


def test_overflow_in_a_joined_bucket_makes_all_gradients_nan():
    results = run_ranks(3, _overflowing)
    assert results[0] == results[1] == results[2]
    assert results[0][:3] == ([False, False, True, False], 512, 1)


def _interrupted(rank, size):
    """The backward pass of one rank fails while buckets wait for others to join; no future waits forever."""
    model = wrapped(joins=True)
    hook, futures = codec.torch.ddp_hook(codec.Quantize(4), options=codec.options(timeout=60)), []

    def noted(state, bucket):
        futures.append(hook.reduce(bucket))
        return futures[-1]

    model.register_comm_hook(None, noted)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    train(model, optimizer, rank, 2)
    futures.clear()
    if rank == 1:

        def fail(gradient):
            raise OSError("this rank fails")

        model.module[0].weight.register_hook(fail)
    with pytest.raises(OSError if rank == 1 else codec.PeerError):
        train(model, optimizer, rank, 1, 2)
    if rank == 1:
        assert len(futures) > 5
        for future in futures:
            with pytest.raises(RuntimeError, match="cancelled before this bucket was sent"):
                future.wait()


def test_failed_backward_pass_ends_buckets_that_wait_to_be_joined():
    run_ranks(2, _interrupted, limit=60)


def _items(rank, size, differ):
    """All ranks must agree on what transform= returns for each bucket."""
    model = wrapped(joins=True)
    calls = []

    def transform(buffer, gradients):
        calls.append(None)
        return f"call {len(calls) + rank * (differ and len(calls) == 2)}"

    codec.torch.ddp_hook(codec.Lossless(), transform=transform).register(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    train(model, optimizer, rank, 1)
    calls.clear()
    if not differ:
        train(model, optimizer, rank, 1, 1)
        return len(calls)
    with pytest.raises(codec.PeerError, match=r"step is \['call 1', 'call [23]', "):
        train(model, optimizer, rank, 1, 1)
    return len(calls)


@pytest.mark.parametrize("differ", [False, True])
def test_ranks_agree_on_the_items_of_all_joined_buckets(differ):
    assert all(calls >= 8 for calls in run_ranks(2, _items, differ))
