"""A pipeline trains with batches of different sizes and sequences of different lengths."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import codec
from codec.torch.pipelining import CompressedStage, attempts
from support.ddp_training import change_error
from support.pipelines import (
    CHUNKS,
    LOSSLESS,
    SAMPLES,
    SCHEDULES,
    Block,
    Pipeline,
    altered_messages,
    check_equal_sides,
    damaged,
    data,
    places,
)
from support.tiers import every, nightly

SIZES = (20, 19, 17, 24, 16)  # number of samples of each batch


def _train(rank, size, schedule):
    p = Pipeline(schedule, rank, size, **LOSSLESS)
    losses = [p.step(torch.arange(n)) for n in SIZES]
    for s in p.stages:
        s.submod.eval()
    evaluated = []
    if schedule not in ("ZBVZeroBubble", "DualPipeV"):
        evaluated = [p.schedule.eval(*([p.x[:n]] if p.is_first else []), target=p.y[:n]) for n in SIZES]
    return losses, {s.stage_index: [x.tolist() for x in s.submod.parameters()] for s in p.stages}, evaluated


def _alone(stages):
    """Train the same model in one process, without a pipeline; return losses, blocks and evaluated outputs."""
    blocks = nn.Sequential(*(Block(i, 0.0) for i in range(stages)))
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.05, momentum=0.9)
    x, y, _ = data()
    losses = []
    for n in SIZES:
        optimizer.zero_grad()
        found = []
        for inputs, targets in zip(x[:n].tensor_split(CHUNKS), y[:n].tensor_split(CHUNKS), strict=True):
            loss = nn.functional.mse_loss(blocks(inputs), targets)
            (loss / CHUNKS).backward()
            found.append(loss.item())
        optimizer.step()
        losses.append(sum(found) / CHUNKS)
    blocks.eval()
    return losses, list(blocks), [blocks(x[:n]) for n in SIZES]


@pytest.mark.parametrize("schedule", [s if s in ("1F1B", "InterleavedZeroBubble") else nightly(s) for s in SCHEDULES])
def test_batches_of_different_sizes_train_as_without_a_pipeline(ranks, schedule):
    found = ranks.run(_train, schedule)
    losses, blocks, evaluated = _alone(places(schedule, 0, 2)[1])
    assert next(r[0] for r in found if r[0][0] is not None) == pytest.approx(losses, rel=1e-4)
    parameters = found[0][1] | found[1][1]
    for i, block in enumerate(blocks):
        assert change_error(parameters[i], block.parameters(), Block(i, 0.0).parameters()) < 1e-3
    for outputs in (r[2] for r in found):
        if outputs and outputs[0] is not None:
            for got, want in zip(outputs, evaluated, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def _train_with_cuts(rank, size, schedule):
    """Train; in micro-batches of less than 5 samples, stage 2 passes no gradient to stage 1, which may be local."""
    p = Pipeline(schedule, rank, size, **LOSSLESS)
    for s in p.stages:
        if s.stage_index == 2:
            s.submod.register_forward_pre_hook(lambda _, args: (args[0].detach(),) if len(args[0]) < 5 else None)
    for n in (20, 16, 24):
        p.step(torch.arange(n))
        if n == 16:
            found = {
                s.stage_index: any(x.grad is not None and x.grad.any() for x in s.submod.parameters()) for s in p.stages
            }
    return found


# Schedules that split backward passes, such as ZBVZeroBubble, do not train a stage whose input needs no gradient.
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS", "DualPipeV"])
def test_missing_gradients_of_smaller_batches_are_zeros(ranks, schedule):
    found = ranks.run(_train_with_cuts, schedule)
    assert found[0] | found[1] == {0: False, 1: False, 2: True, 3: True}


def _with_deltas(rank, size, schedule, at):
    """Train two epochs; unless `at` is None, two messages of rank 0 are damaged at the fraction `at` of their bytes."""
    p = Pipeline(schedule, rank, size, dropout=0.1)
    count = 0

    def change(message):
        nonlocal count
        count += 1
        return damaged(message, at) if at is not None and rank == 0 and count in (3, 19) else message

    torch.manual_seed(5)
    with altered_messages(change):
        for _ in range(2):
            for n in (9, 15):
                p.step(torch.arange(n) if n == 9 else torch.arange(9, SAMPLES))
    return p.digest(), p.checks(), p.memories(), [s.stats().refused_steps for s in p.stages]


@pytest.mark.parametrize(("schedule", "at"), every(7, [(s, at) for s in SCHEDULES for at in (0.5, 0.999)]))
def test_repeated_steps_of_uneven_batches_are_bit_identical(ranks, schedule, at):
    """A repeated step works because envelopes of damaged and aborted messages contain the shapes of the step."""
    calm, disturbed = ranks.run(_with_deltas, schedule, None), ranks.run(_with_deltas, schedule, at)
    assert [r[:3] for r in calm] == [r[:3] for r in disturbed]
    assert disturbed[0][3][0] > 0 == calm[0][3][0]
    check_equal_sides([r[1] for r in calm])


class _Tokens(nn.Module):
    """Linear stage; the first one returns activations, a tensor that the loss ignores, and a mask."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.linear, self.rank = nn.Linear(8, 8), rank

    def forward(self, x, unused=None, mask=None):
        y = torch.tanh(self.linear(x))
        return (y, self.linear(x), x[..., 0] > 0) if self.rank == 0 else y * mask[..., None]


def _sequences(rank, size):
    stage = CompressedStage(_Tokens(rank), rank, size, "cpu", **LOSSLESS)
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
    found = []
    for length in (5, 3, 9, 5):
        x = torch.randn(4, length, 8, generator=torch.Generator().manual_seed(length))
        losses = []
        stage.submod.zero_grad()
        for attempt in attempts(stage):
            with attempt:
                schedule.step(*([x] if rank == 0 else []), target=x, losses=losses)
        found.append((stage.submod.linear.weight.grad.tolist(), [loss.item() for loss in losses]))
    return found


def test_sequences_may_have_different_lengths(ranks):
    first, last = ranks.run(_sequences)
    blocks = [_Tokens(0), _Tokens(1)]
    for i, length in enumerate((5, 3, 9, 5)):
        x = torch.randn(4, length, 8, generator=torch.Generator().manual_seed(length))
        for block in blocks:
            block.zero_grad()
        losses = [nn.functional.mse_loss(blocks[1](*blocks[0](part)), part) for part in x.tensor_split(2)]
        (sum(losses) / 2).backward()
        assert last[i][1] == pytest.approx([loss.item() for loss in losses], rel=1e-5)
        for found, block in zip((first, last), blocks, strict=True):
            torch.testing.assert_close(torch.tensor(found[i][0]), block.linear.weight.grad, rtol=1e-4, atol=1e-6)


def _other_dimensions(rank, size):
    p = Pipeline("1F1B", rank, size, **LOSSLESS)
    p.step(torch.arange(8))
    norms = [s.submod.norm for s in p.stages]
    for s in p.stages:
        s.submod.norm = nn.Identity()  # accepts tensors of any number of dimensions
    x, p.x = p.x, p.x[:, None].expand(-1, 3, -1)
    with pytest.raises(codec.CodecError, match="as many dimensions") as raised:
        p.step(torch.arange(8))
    p.x = x
    for s, norm in zip(p.stages, norms, strict=True):
        s.submod.norm = norm
    p.step(torch.arange(8))
    return type(raised.value).__name__


def test_activations_with_other_dimensions_are_an_error_on_all_ranks(ranks):
    assert ranks.run(_other_dimensions) == ["PeerError", "ArgumentError"]
