"""Two machines of two ranks: if a rank or a machine fails in a training step, the others raise, and nothing changes."""

import time

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from support.faults import KILLED, at_fault_point, die, freeze
from support.rank_loss import PROMISED_SECONDS, SLACK_SECONDS, Training, fault_points
from support.ranks import RankPool

SIZE = 4
FAULTS = {  # ranks that fail; the fault
    "rank": ((1,), die),
    "leader of a machine": ((2,), die),
    "first rank": ((0,), die),
    "machine": ((2, 3), die),
    "frozen rank": ((3,), freeze),
}


class LeveledTraining(Training):
    """Training whose hook reduces within machines of two ranks first."""

    def wrap(self):
        """Wrap the model for the current group, and register the hook."""
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=0.015)
        self.hook.register(self.model, group=init_device_mesh("cpu", (2, 2)))


_training = None  # this rank's LeveledTraining


def _train(rank, size, saved, steps):
    """Train as :func:`support.rank_loss.train` does, over two levels."""
    global _training
    _training = _training or LeveledTraining()
    return _training.run(rank, saved and saved[rank], steps)


def _disturbed(rank, size, faulty, point, fault):
    """Run a training step in which some ranks fail; return the error's name or None, the duration, and the state."""
    before, raised = _training.state(), None
    begin = time.monotonic()
    try:
        with at_fault_point(_training.channel, point if rank in faulty else -1, fault):
            _training.step(rank)
    except codec.CodecError as e:
        raised = type(e).__name__
        assert _training.state() == before
        assert all(p.grad is None or p.grad.isfinite().all() for p in _training.net.parameters())
        with pytest.raises(codec.PeerError, match="new group"):
            codec.torch.all_reduce(torch.ones(3), group=_training.hook.reducer.group)
    return raised, time.monotonic() - begin, _training.state()


def _load(saved):
    global _training
    _training = LeveledTraining()
    _training.load(saved)


def _undisturbed(ranks, saved):
    """Return the states after a step in one group, and a second one in another group."""
    ranks.new_group()
    ranks.run(_train, saved, 1)
    ranks.new_group()
    return [states for states, _, _ in ranks.run(_train, None, 1)]


@pytest.mark.parametrize("name", FAULTS)
def test_ranks_lost_during_a_step_over_two_levels_leave_the_others_unchanged(name):
    faulty, fault = FAULTS[name]
    left = [r for r in range(SIZE) if r not in faulty]
    with RankPool(SIZE) as ranks:
        ranks.new_group()
        saved = [s for _, _, s in ranks.run(_train, None, 1)]
        ranks.new_group()
        undisturbed = ranks.run(_train, saved, 2)
        events = min(undisturbed[r][1] for r in faulty)
        want = _undisturbed(ranks, saved)
        for point in fault_points(events, 3)[: 2 if fault is freeze else 3]:
            ranks.new_group()
            both = [s for _, _, s in ranks.run(_train, saved, 1)]
            ranks.start(_disturbed, faulty, point, fault)
            found = ranks.results(left)
            errors = {error for error, *_ in found}
            last = point == events - 1  # the ranks may know the outcome before this event
            assert errors == {"PeerError"} or (last and errors <= {"PeerError", None}), (point, found)
            within = PROMISED_SECONDS + SLACK_SECONDS
            assert all(took < within for _, took, _ in found), (point, found)
            for r in faulty:
                if fault is freeze:
                    ranks[r].resume()
                    assert ranks.results([r])[0][0] == "PeerError"
                else:
                    [result] = ranks.results([r])  # of a machine, one rank may notice the other's death before it dies
                    assert result is KILLED or (len(faulty) > 1 and result[0] == "PeerError")
                    ranks.replace(r)
            if errors != {"PeerError"}:
                continue
            ranks.new_group()
            for r in faulty:
                ranks.run_on(r, _load, both[r])
            assert [states for states, _, _ in ranks.run(_train, None, 1)] == want, point


def _raising(rank, size, kind):
    """Raise an error in rank 2's backward pass; return the error of each rank, and the state of the hook."""
    before = _training.state()

    def fails(_):
        raise (KeyboardInterrupt if kind == "interrupt" else RuntimeError)("of rank 2")

    handle = None
    if rank == 2:
        handle = _training.net[5].weight.register_hook(fails)
    begin, raised = time.monotonic(), None
    try:
        _training.step(rank)
    except (codec.CodecError, RuntimeError, KeyboardInterrupt) as e:
        raised = type(e).__name__
    took = time.monotonic() - begin
    if handle is not None:
        handle.remove()
        _training.hook.reducer.cancel()
    assert _training.state()[1:] == before[1:]
    return raised, took


@pytest.mark.parametrize("kind", ["error", "interrupt"])
def test_error_in_the_backward_pass_of_one_rank_raises_on_all(kind):
    with RankPool(SIZE) as ranks:
        ranks.new_group()
        saved = [s for _, _, s in ranks.run(_train, None, 1)]
        ranks.new_group()
        want = _undisturbed(ranks, saved)
        ranks.new_group()
        ranks.run(_train, saved, 1)
        found = ranks.run(_raising, kind)
        own = "KeyboardInterrupt" if kind == "interrupt" else "RuntimeError"
        assert [error for error, _ in found] == ["PeerError", "PeerError", own, "PeerError"]
        assert all(took < PROMISED_SECONDS + SLACK_SECONDS for _, took in found)
        ranks.new_group()
        assert [states for states, _, _ in ranks.run(_train, None, 1)] == want
