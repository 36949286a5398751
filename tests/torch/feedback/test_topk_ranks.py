"""TopK on two ranks works with error feedback in collectives, hooks and local steps, and raises without it."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.torch.backend import BackendOptions
from codec.torch.collectives import lists
from support import local_training
from support.ddp_training import ENCODE_ALL, parameter_bytes, small_forward, small_net, take_step
from support.ranks import RankPool
from support.states import through_a_file

N, DECAY = 3000, 0.9
TOPK = codec.TopK(1 / 16, chunk=256)
STOCHASTIC = codec.TopK(rounding="stochastic")


def gradient(rank, step):
    return torch.randn(N, generator=torch.Generator().manual_seed(1000 * step + rank))


def everyones(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _collectives(rank, size):
    """Check that results equal means of frames with decayed residuals, also after a state was saved and loaded."""
    for spec in (TOPK, codec.Quantize(3, levels="odd", rounding="nearest")):
        feedback, residuals = codec.torch.Feedback(spec, decay=DECAY), [np.zeros(N, np.float32) for _ in range(size)]
        for step in range(5):
            if step == 3:
                state, feedback = through_a_file(feedback.state_dict()), codec.torch.Feedback(spec, decay=DECAY)
                feedback.load_state_dict(state)
            frames = []
            for r, e in enumerate(residuals):
                np.multiply(e, np.float32(DECAY), out=e)
                frames.append(codec.encode(gradient(r, step).numpy(), spec, residual=e, feedback=True))
            x = gradient(rank, step)
            how = codec.options(algorithm="all_gather")
            codec.torch.all_reduce(x, op="mean", feedback=feedback, options=how)
            assert x.numpy().tobytes() == codec.reduce(frames, op="mean").tobytes()
    feedback = codec.torch.Feedback(TOPK, decay=DECAY)
    for algorithm in ("two_shot", "all_gather"):
        for step in range(3):
            x = gradient(rank, step)
            codec.torch.all_reduce(x, feedback=feedback, op="mean", options=codec.options(algorithm=algorithm))
            assert len(set(everyones(x.numpy().tobytes()))) == 1


def _step_of_a_policy(rank):
    """Take a step with a hook without error feedback whose policy returns TopK."""
    model = DistributedDataParallel(small_net())
    codec.torch.ddp_hook(policy=lambda name, p: TOPK).register(model)
    take_step(model, rank, small_forward)


def _refused(rank, size):
    x = torch.ones(N)
    for call in (
        lambda: codec.torch.all_reduce(x, TOPK),
        lambda: codec.torch.reduce_scatter(torch.empty(N // size), x, TOPK),
        lambda: lists.all_reduce([x], TOPK, group=None, op="sum", stream=0, options=codec.options()).wait(),
        lambda: codec.torch.ddp_hook(STOCHASTIC),
        lambda: _step_of_a_policy(rank),
        lambda: codec.torch.FsdpReduceScatter(TOPK),
        lambda: BackendOptions(TOPK),
        lambda: codec.torch.LocalSteps(torch.nn.Linear(9, 9), None, spec=STOCHASTIC),
        lambda: codec.torch.LocalSteps(torch.nn.Linear(9, 9), None, warmup=(3, TOPK)),
    ):
        with pytest.raises(codec.SpecError, match="needs error feedback"):
            call()
    assert (x == 1).all()
    codec.torch.all_reduce(x, TOPK, feedback=False, options=codec.options(algorithm="two_shot"))
    assert int((x != 0).sum()) < N // 15
    assert codec.torch.ddp_hook(STOCHASTIC, feedback=False)
    with pytest.raises(codec.ArgumentError, match="feedback must be a"):
        codec.torch.all_reduce(x, TOPK, feedback=True)


def hooked(model, **how):
    model = DistributedDataParallel(model)
    options = codec.options(algorithm="two_shot")
    return model, codec.torch.ddp_hook(TOPK, **how, policy=ENCODE_ALL, options=options)


def _ddp(rank, size):
    """Check that all ranks have equal parameters, and that resumed training equals uninterrupted training."""
    for how in ({}, {"feedback": 0.9}):
        model, hook = hooked(small_net(), **how)
        assert hook.register(model).reducer.plan.feedback
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            take_step(model, rank, small_forward, optimizer)
        again, second = hooked(small_net(), **how)
        again.module.load_state_dict(model.module.state_dict())
        second.load_state_dict(through_a_file(hook.state_dict()))
        second.register(again)
        for m in (model, again):
            own = torch.optim.SGD(m.parameters(), lr=0.01)
            for _ in range(3):
                take_step(m, rank, small_forward, own)
        assert len({*everyones(parameter_bytes(model)), parameter_bytes(again)}) == 1
        assert sum(hook.reducer.state.residuals.norms().values()) > 0


def _decay_of_the_hook(rank, size):
    """Check that set_spec also changes the decay of existing residuals."""
    model, hook = hooked(small_net(), feedback=0.5)
    hook.register(model)
    take_step(model, rank, small_forward)
    pair = hook.reducer.state.residuals
    assert (pair.worker.decay, pair.server.decay) == (0.5, 0.5)
    hook.set_spec(TOPK, feedback=0.25)
    assert (pair.worker.decay, pair.server.decay) == (0.25, 0.25)
    hook.set_spec(TOPK)
    assert pair.worker.decay == 1
    for wrong in (0.0, 1.5, -1.0, 2, "yes", float("nan")):
        with pytest.raises(codec.ArgumentError, match="decay above 0"):
            codec.torch.ddp_hook(TOPK, feedback=wrong)


def _local_steps(rank, size):
    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        spec = codec.torch.Feedback(TOPK, decay=0.9)
        return optimizer, codec.torch.LocalSteps(model, optimizer, every=3, spec=spec)

    model = local_training.net()
    optimizer, local = make(model)
    local_training.train(model, optimizer, rank, range(7), local.step)
    assert local._state.feedback.decay == 0.9
    again = local_training.net()
    other, resumed = make(again)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(through_a_file(local.state_dict()))
    assert resumed._state.feedback.decay == 0.9
    for m, o, run in ((model, optimizer, local), (again, other, resumed)):
        local_training.train(m, o, rank, range(7, 14), run.step)
        run.finish()
    found = {local_training.parameter_bytes(m) for m in (model, again)}
    assert {*everyones(local_training.parameter_bytes(model))} == found
    assert len(found) == 1
    spec = codec.torch.Feedback(TOPK, decay=0.9 if rank else 0.8)
    with pytest.raises(codec.PeerError, match="decay"):
        codec.torch.LocalSteps(model, optimizer, spec=spec)


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as ranks:
        yield ranks


@pytest.fixture
def ranks(pool):
    pool.new_group()
    return pool


def test_collectives_decay_residuals(ranks):
    ranks.run(_collectives)


def test_calls_without_error_feedback_are_refused(ranks):
    ranks.run(_refused)


def test_ddp_hook(ranks):
    ranks.run(_ddp)


def test_decay_of_the_ddp_hook(ranks):
    ranks.run(_decay_of_the_hook)


def test_local_steps(ranks):
    ranks.run(_local_steps)


def test_decay_of_a_single_process():
    """The residual is multiplied by the decay before it is added; an error or a rollback leaves it unchanged."""
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    feedback, e = codec.ErrorFeedback(TOPK, decay=0.5), np.zeros(1000, np.float32)
    for _ in range(4):
        before = feedback.state_dict()
        with pytest.raises(codec.ArgumentError):
            feedback.encode("x", np.full(1000, np.nan, np.float32))
        feedback.begin([("x", 1000)])
        feedback.rollback()
        assert before.keys() == feedback.state_dict().keys()
        e *= np.float32(0.5)
        expected = codec.encode(x, TOPK, residual=e, feedback=True)
        assert feedback.encode("x", x) == expected
        assert feedback.state_dict()["x[0:1000]"].tobytes() == e.tobytes()
    for wrong in (0, 1.1, -1, "1", None, float("nan"), True):
        with pytest.raises(codec.ArgumentError, match="decay"):
            codec.ErrorFeedback(TOPK, decay=wrong)
        with pytest.raises(codec.ArgumentError, match="decay"):
            codec.torch.Feedback(TOPK, decay=wrong)
