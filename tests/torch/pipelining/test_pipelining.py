"""Compressed stages under the schedules of torch.distributed.pipelining, without and with errors."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.pipelining import PipelineStage

import codec
from codec.torch import _compat, pipelining
from codec.torch.pipelining import CompressedStage, Deltas, attempts
from support.pipelines import (
    BATCH,
    CHUNKS,
    LOSSLESS,
    SAMPLES,
    SCHEDULES,
    WIDTH,
    Pipeline,
    altered_messages,
    check_equal_sides,
    damaged,
)
from support.ranks import RankPool
from support.states import through_a_file
from support.tiers import HANG_SECONDS

ROOT = Path(__file__).parents[3]
FIRST = torch.arange(BATCH)


def _train(rank, size, schedule, epochs, arguments):
    p = Pipeline(schedule, rank, size, **arguments)
    torch.use_deterministic_algorithms(True)  # makes torch.empty fill memory with NaN
    try:
        return p.train(epochs), p.digest()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lossless_stages_train_as_those_of_torch(ranks, schedule):
    """Buffers equal torch's, too, although torch infers shapes by running modules on uninitialized memory."""
    compressed = ranks.run(_train, schedule, 2, LOSSLESS)
    assert compressed == ranks.run(_train, schedule, 2, {"plain": True, "static": True})


def _train_with_groups(rank, size, schedule, setting):
    """Train with groups of torch for edges; return losses, a digest, and whether torch has made groups."""
    config = pytest.importorskip("torch.distributed.config")
    with config.patch(**{setting: True}):
        p = Pipeline(schedule, rank, size, **LOSSLESS)
        losses = p.train(2)
    stage = p.stages[0]
    return losses, p.digest(), bool(stage._p2p_edge_groups)


# A setting of torch 2.15. That of 2.14, pipeline_per_direction_p2p, splits groups of NCCL only.
@pytest.mark.parametrize("setting", ["pipeline_per_edge_p2p"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_groups_of_torch_for_edges_change_nothing(ranks, schedule, setting):
    config = pytest.importorskip("torch.distributed.config")
    if not hasattr(config, setting):
        pytest.skip(f"torch {torch.__version__} has no {setting}")
    found = ranks.run(_train_with_groups, schedule, setting)
    assert all(groups for _, _, groups in found)
    assert [r[:2] for r in found] == ranks.run(_train, schedule, 2, LOSSLESS)


def _train_with_deltas(rank, size, schedule, epochs, arguments):
    p = Pipeline(schedule, rank, size, dropout=0.1, **arguments)
    losses = p.train(epochs)
    return losses, p.checks(), p.memories(), p.digest(), [s.stats() for s in p.stages]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_sides_of_each_edge_keep_the_same_activations(ranks, schedule):
    found = ranks.run(_train_with_deltas, schedule, 3, {})
    losses = next(r[0] for r in found if r[0])
    assert losses[-1] < losses[0]
    sides = check_equal_sides([r[1] for r in found])
    assert sum(all(checks) for checks, _ in sides.values()) >= 1
    check_equal_sides([r[2] for r in found])
    stats = [s for r in found for s in r[4]]
    assert not any(s.refused_steps for s in stats)
    # Three epochs: each sample is sent raw once, and as a delta twice.
    assert sum(x.raw_samples for s in stats for x in s.sender) * 2 == sum(
        x.delta_samples for s in stats for x in s.sender
    )


def _train_disturbed(rank, size, schedule, at, arguments):
    """Train three epochs; messages 3 and 15 of rank 0 are damaged at the fraction `at` of their bytes.

    In every schedule, rank 0 sends 4 to 12 messages per attempt, so different attempts fail.
    """
    p = Pipeline(schedule, rank, size, dropout=0.1, **arguments)
    count = 0

    def change(message):
        nonlocal count
        count += 1
        return damaged(message, at) if rank == 0 and count in (3, 15) else message

    with altered_messages(change):
        losses = p.train(3)
    return losses, p.checks(), p.memories(), p.digest(), [s.stats().refused_steps for s in p.stages]


_FIRST_TWO = [("1F1B", 0.0), ("ZBVZeroBubble", 0.3)]
_REPEATED = [(s, at) for s in SCHEDULES for at in (0.0, 0.3, 0.999)]


@pytest.mark.parametrize(
    ("schedule", "at"),
    _FIRST_TWO + [pytest.param(*c, marks=pytest.mark.nightly) for c in _REPEATED if c not in _FIRST_TWO],
)
def test_repeated_steps_after_damaged_messages_are_bit_identical(ranks, schedule, at):
    stochastic = {"forward": codec.Quantize(4)}
    disturbed = ranks.run(_train_disturbed, schedule, at, stochastic)
    assert [r[:4] for r in disturbed] == [r[:4] for r in ranks.run(_train_with_deltas, schedule, 3, stochastic)]
    assert all(set(r[4]) == {2} for r in disturbed)


def _train_after_loss(rank, size, schedule, role):
    p = Pipeline(schedule, rank, size)
    p.train(1)
    for end in p.ends():
        if end.role == role:
            for d in end.deltas:
                d.forget([7 * i for i in range(0, SAMPLES, 3)])
    losses = p.train(2)
    return losses, p.checks(), p.memories(), [s.stats().refused_steps for s in p.stages]


@pytest.mark.parametrize("role", ["sender", "receiver"])
@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B"])
def test_samples_whose_state_is_lost_are_sent_raw(ranks, schedule, role):
    found = ranks.run(_train_after_loss, schedule, role)
    check_equal_sides([r[1] for r in found])
    check_equal_sides([r[2] for r in found])
    assert (found[0][3] == [0] * len(found[0][3])) == (role == "sender")


def _direct(rank, size):
    p = Pipeline("GPipe", rank, size, activations="direct")
    x, y = p.x[:BATCH], p.y[:BATCH]
    for attempt in attempts(*p.stages):
        with attempt:
            p.schedule.step(*([x] if p.is_first else []), target=y)
    return p.stages[0].stats()


def test_direct_activations_need_no_ids(ranks):
    first, last = ranks.run(_direct)
    assert first.raw_nbytes == last.raw_nbytes == 4 * BATCH * WIDTH
    assert first.forward_nbytes > 0 == first.backward_nbytes
    assert last.backward_nbytes > 0 == last.forward_nbytes
    assert not first.sender[0].entries


def _evaluate(rank, size, schedule):
    p = Pipeline(schedule, rank, size)
    p.train(1)
    for s in p.stages:
        s.submod.eval()
    before = p.checks(), p.digest()
    inputs = [p.x[:BATCH]] if p.is_first else []
    outputs = [p.schedule.eval(*inputs, target=p.y[:BATCH]) for _ in range(2)]
    assert (p.checks(), p.digest()) == before
    for s in p.stages:
        s.submod.train()
    p.train(1)
    check = next((o for o in outputs if o is not None), None)
    return None if check is None else torch.equal(*outputs) and check.shape == (BATCH, p.x.shape[1])


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "InterleavedZeroBubble"])
def test_evaluation_changes_no_state(ranks, schedule):
    assert True in ranks.run(_evaluate, schedule)


def _accumulate(rank, size, disturbed):
    """Accumulate gradients of two steps; in the second, with two runs, a damaged message forces a repeat."""
    p = Pipeline("1F1B", rank, size)
    for attempt in attempts(*p.stages):
        with attempt:
            p.run(FIRST)
    count = 0

    def change(message):
        nonlocal count
        count += 1
        return damaged(message, 0.5) if disturbed and rank == 0 and count == CHUNKS + 2 else message

    with altered_messages(change):
        for attempt in attempts(*p.stages):
            with attempt:
                p.run(FIRST)
                p.run(FIRST + BATCH)
    p.optimizer.step()
    return p.digest(), p.checks(), [s.stats().refused_steps for s in p.stages]


def test_accumulated_gradients_survive_a_repeated_step(ranks):
    calm, disturbed = ranks.run(_accumulate, False), ranks.run(_accumulate, True)
    assert [r[:2] for r in calm] == [r[:2] for r in disturbed]
    assert [r[2] for r in disturbed] == [[1], [1]]


def _resume(rank, size, schedule, folder, through):
    """Train three epochs, with a checkpoint after each but the last; return the parameters as bytes.

    `through` is "states" or "files", the place of m; "checkpoint" for torch.distributed.checkpoint; or "nothing" and
    "nothing, files" for a run without checkpoints.
    """
    store = f"{folder}/rank-{rank}-{through[:4]}"
    in_files = through.endswith("files")
    folder = f"{folder}/checkpoint" if through == "checkpoint" else None
    arguments = {"activations": Deltas(store=store, dtype="8bit")} if in_files else {}
    p = Pipeline(schedule, rank, size, **arguments)
    p.train(1)
    for _ in range(2):
        if not through.startswith("nothing"):
            p = _restarted(p, schedule, rank, size, arguments, folder)
        p.train(1)
        assert not any(s.stats().refused_steps for s in p.stages)
    if not through.startswith("nothing"):
        assert not any(x.raw_samples for s in p.stages for x in s.stats().sender)
    for s in p.stages:
        with pytest.raises(codec.StateError):
            s.load_state_dict({"version": 1, "edges": {}})
        s.close()
    return [x.detach().numpy().tobytes() for x in p.parameters], p.checks()


def _restarted(p, schedule, rank, size, arguments, folder):
    """Return a new pipeline with the state of pipeline `p`, whose states have passed through files.

    Without a folder, these are files of torch.save; else a folder of torch.distributed.checkpoint.
    """
    states = None if folder else [through_a_file(s.state_dict()) for s in p.stages]
    if folder:
        dcp.save({f"stage {i}": codec.torch.per_rank(s) for i, s in enumerate(p.stages)}, checkpoint_id=folder)
    for s in p.stages:
        s.close()
    q = Pipeline(schedule, rank, size, **arguments)
    if folder:
        dcp.load({f"stage {i}": codec.torch.per_rank(s) for i, s in enumerate(q.stages)}, checkpoint_id=folder)
    for i, (old, new) in enumerate(zip(p.stages, q.stages, strict=True)):
        new.submod.load_state_dict(old.submod.state_dict())
        if states:
            new.load_state_dict(states[i])
    q.optimizer.load_state_dict(p.optimizer.state_dict())
    return q


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch.distributed.checkpoint
@pytest.mark.parametrize("through", ["states", "files", "checkpoint"])
def test_a_resumed_pipeline_is_bit_identical_to_an_uninterrupted_one(ranks, tmp_path, through):
    """Also with stochastic rounding, which gradients have by default."""
    uninterrupted = "nothing, files" if through == "files" else "nothing"
    want = ranks.run(_resume, "Interleaved1F1B", str(tmp_path), uninterrupted)
    assert ranks.run(_resume, "Interleaved1F1B", str(tmp_path), through) == want


class _Tuple(torch.nn.Module):
    """Stage with several outputs in bfloat16, float32 and int64."""

    def __init__(self, first, last):
        super().__init__()
        self.linear, self.first, self.last = torch.nn.Linear(8, 8), first, last

    def forward(self, x, y=None, tokens=None):
        if self.first:
            x, y, tokens = x.bfloat16(), x * 2, torch.arange(len(x)) + 5
        h = self.linear(x.float())
        if self.last:
            self.tokens = tokens.tolist()  # arbitrary numbers while torch infers shapes on uninitialized memory
            return h + y
        return h.bfloat16(), y + h, tokens


def _tuples(rank, size):
    torch.manual_seed(rank)
    stage = CompressedStage(_Tuple(rank == 0, rank == size - 1), rank, size, "cpu")
    schedule = torch.distributed.pipelining.Schedule1F1B(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    found = []
    for _ in range(3):
        losses = []
        for attempt in attempts(stage):
            with attempt:
                schedule.step(*([x] if rank == 0 else []), target=x, losses=losses, sample_ids=torch.arange(4))
        found += [x.item() for x in losses]
    assert all(p.grad.isfinite().all() for p in stage.submod.parameters())
    assert rank == 0 or stage.submod.tokens == [5, 6]
    return [d.checks(range(4)).tolist() for end in stage.traffic.ends for d in end.deltas], found


def test_stages_may_have_outputs_of_several_dtypes(ranks):
    sender, receiver = ranks.run(_tuples)
    assert sender[0][:2] == receiver[0][:2]
    assert all(map(all, sender[0][:2]))


@pytest.mark.parametrize("name", _compat.STAGE_METHODS)
def test_torch_has_the_methods_that_stages_override(monkeypatch, name):
    _compat.check_stage_class(PipelineStage)
    for kind in PipelineStage.__mro__:
        if name in vars(kind):
            monkeypatch.delattr(kind, name)
    with pytest.raises(codec.EngineError, match=rf"has no PipelineStage.{name}\(.*tested with torch"):
        _compat.check_stage_class(PipelineStage)


@pytest.mark.parametrize("name", _compat.STAGE_ATTRIBUTES)
def test_torch_has_the_attributes_that_stages_read(monkeypatch, name):
    stage = type("Stage", (), dict.fromkeys(_compat.STAGE_ATTRIBUTES))()
    _compat.check_stage(stage)
    monkeypatch.delattr(type(stage), name)
    with pytest.raises(codec.EngineError, match=f"has no PipelineStage.{name}:"):
        _compat.check_stage(stage)


def test_public_names_are_documented():
    assert all(getattr(pipelining, name).__doc__ for name in pipelining.__all__)
    assert not dist.is_initialized()


@pytest.fixture(scope="module")
def four_ranks():
    with RankPool(4, timeout=HANG_SECONDS) as ranks:
        ranks.new_group()
        yield ranks


def test_deltas_work_on_four_ranks(four_ranks):
    found = four_ranks.run(_train_with_deltas, "Interleaved1F1B", 3, {})
    assert len(check_equal_sides([r[1] for r in found])) == 7
    check_equal_sides([r[2] for r in found])


@pytest.mark.nightly
def test_example_runs_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command += [str(ROOT / "examples/pipeline.py"), "--pretraining", "40", "--samples", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    assert "fine-tuning: loss of each epoch" in done.stdout
    assert "change of activations between epochs" in done.stdout
