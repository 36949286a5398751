"""Pipelines whose stages are replicated: gradients are averaged between replicas of a stage, on four ranks."""

import pytest
import torch
import torch.distributed as dist

import codec
from codec.torch.pipelining import attempts
from support.pipelines import BATCH, SAMPLES, Pipeline, altered_messages, check_equal_sides, damaged
from support.ranks import RankPool
from support.tiers import HANG_SECONDS

FIRST = torch.arange(BATCH)


@pytest.fixture(scope="module")
def four_ranks():
    with RankPool(4, timeout=HANG_SECONDS) as ranks:
        ranks.new_group()
        yield ranks


def _mesh(rank, size, disturbed):
    """Train two replicas of a two-stage pipeline; replicas average gradients in 4 bits with error feedback."""
    replica, place = divmod(rank, 2)
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    p = Pipeline("1F1B", place, 2, group=pipelines[replica])
    feedback = codec.torch.Feedback(codec.Quantize(4))
    named = [(n, x) for s in p.stages for n, x in s.submod.named_parameters()]
    losses, refused, count = [], 0, 0

    def change(message):
        nonlocal count
        count += 1
        return damaged(message, 0.4) if disturbed and rank == 0 and count % 9 == 5 else message

    for step in range(9):
        batch = (FIRST + BATCH * step) % SAMPLES
        found = []
        p.optimizer.zero_grad()
        with altered_messages(change):
            for attempt in attempts(*p.stages):
                with attempt:
                    p.run((batch + replica * 3) % SAMPLES, found)
        flat = torch.cat([x.grad.reshape(-1) for _, x in named])
        bucket = codec.view(flat, segments={n: x.shape for n, x in named})
        codec.torch.all_reduce(bucket, op="mean", group=replicas[place], feedback=feedback)
        for (_, x), mean in zip(named, flat.split([x.numel() for _, x in named]), strict=True):
            x.grad.copy_(mean.view_as(x))
        p.optimizer.step()
        losses += [float(torch.stack(found).detach().mean())] if found else []
    refused = p.stages[0].stats().refused_steps
    return [x.detach().tolist() for _, x in named], losses, p.checks(), refused


def test_pipelines_with_data_parallelism_keep_replicas_equal(four_ranks):
    calm, disturbed = four_ranks.run(_mesh, False), four_ranks.run(_mesh, True)
    assert calm[0][0] == calm[2][0] != calm[1][0] == calm[3][0]
    assert [r[:3] for r in calm] == [r[:3] for r in disturbed]
    assert disturbed[0][3] == disturbed[1][3] > 0 == disturbed[2][3]
    losses = calm[1][1]
    assert sum(losses[-3:]) < sum(losses[:3])
    for pipeline in (calm[:2], calm[2:]):
        check_equal_sides([r[2] for r in pipeline])


def _one_bit_adam(rank, size):
    replica, place = divmod(rank, 2)
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    p = Pipeline("GPipe", place, 2, group=pipelines[replica])
    p.optimizer = codec.torch.OneBitAdam(p.parameters, lr=0.01, freeze_step=3)
    p.optimizer.register(p.stages[0].submod, group=replicas[place])
    p.x = p.x + replica
    losses = p.train(4)
    assert p.optimizer.frozen
    return [x.detach().tolist() for x in p.parameters], losses


def test_pipelines_train_with_one_bit_adam(four_ranks):
    found = four_ranks.run(_one_bit_adam)
    assert found[0][0] == found[2][0] != found[1][0] == found[3][0]
    assert found[1][1][-1] < found[1][1][0]
