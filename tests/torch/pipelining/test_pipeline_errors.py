"""Invalid gradients, sample ids and arguments of CompressedStage raise on all ranks and leave state unchanged."""

import pytest
import torch

import codec
from codec.torch.pipelining import CompressedStage, Deltas, attempts
from support.pipelines import BATCH, SAMPLES, Pipeline, check_equal_sides

FIRST = torch.arange(BATCH)


def _error_of(p, call):
    """Return type, message and code of the error that `call` raises, None if none; check that no state changed."""
    before = p.digest(), p.memories()
    try:
        call()
    except codec.CodecError as e:
        found = type(e).__name__, str(e), None if e.code is None else e.code.name
    else:
        found = None
    assert (p.digest(), p.memories()) == before
    return found


def _nan_gradient(rank, size, schedule):
    p = Pipeline(schedule, rank, size)
    p.train(1)
    p.y[0] = float("nan")
    error = _error_of(p, lambda: p.step(FIRST))
    return error, p.step(FIRST + BATCH), p.checks()


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "DualPipeV"])
def test_a_gradient_with_nan_is_an_error_on_all_ranks(ranks, schedule):
    found = ranks.run(_nan_gradient, schedule)
    assert {r[0][2] for r in found} == {"NONFINITE"}
    assert sorted(r[0][0] for r in found) == ["ArgumentError", "PeerError"]
    check_equal_sides([r[2] for r in found])


def _wrong_ids(rank, size, given):
    p = Pipeline("1F1B", rank, size)
    p.ids = {
        "none": None,
        "list": list(range(SAMPLES)),
        "float": torch.arange(SAMPLES) / 2,
        "other": p.ids + rank,
    }[given]

    def step():
        ids = {} if p.ids is None else {"sample_ids": p.ids[:BATCH]}
        for attempt in attempts(*p.stages):
            with attempt:
                p.schedule.step(*([p.x[:BATCH]] if p.is_first else []), target=p.y[:BATCH], **ids)

    error = _error_of(p, step)
    p.ids = torch.arange(SAMPLES)
    p.train(1)
    return error


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("none", "sample ids"),
        ("list", "sample_ids must be"),
        ("float", "sample id must be"),
        ("other", "pass the same ids"),
    ],
)
def test_wrong_sample_ids_are_an_error_on_all_ranks(ranks, given, text):
    for name, message, _ in ranks.run(_wrong_ids, given):
        assert name in ("ArgumentError", "PeerError")
        assert text in message


def _outside(rank, size):
    p = Pipeline("GPipe", rank, size)
    with pytest.raises(codec.StateError, match="attempts"):
        p.run(FIRST)
    with pytest.raises(codec.StateError, match="with attempt"):
        for _ in attempts(*p.stages):
            pass
    p.train(1)


def test_training_outside_of_an_attempt_is_an_error(ranks):
    ranks.run(_outside)


def _arguments(rank, size):
    net = torch.nn.Linear(4, 4)
    for wrong, error in [
        ({"activations": "deltas"}, codec.ArgumentError),
        ({"forward": codec.Lossless()}, codec.SpecError),
        ({"forward": 4}, codec.SpecError),
        ({"backward": "tiny"}, codec.SpecError),
        ({"activations": Deltas(store=5)}, codec.ArgumentError),
        ({"activations": Deltas(dtype="int8")}, codec.ArgumentError),
        ({"options": codec.CallOptions(timeout=-1)}, codec.ArgumentError),
    ]:
        with pytest.raises(error):
            CompressedStage(net, rank, size, "cpu", **wrong)
    wrapped = torch.nn.parallel.DistributedDataParallel(net)  # on both ranks: the constructor is a collective
    with pytest.raises(codec.ArgumentError, match="must not be wrapped"):
        CompressedStage(wrapped, rank, size, "cpu")
    for wrong in ((), (net,)):
        with pytest.raises(codec.ArgumentError, match="takes one or more CompressedStage"):
            attempts(*wrong)
    stage = CompressedStage(net, rank, size, "cpu", activations="delta" if rank else "direct")
    with pytest.raises(codec.PeerError, match=r"other arguments: activations is \w+ there and \w+ here"):
        next(attempts(stage)).__enter__()
    with pytest.raises(codec.ArgumentError, match="must be different ones"):
        attempts(stage, stage)


def test_wrong_arguments_are_refused(ranks):
    ranks.run(_arguments)
