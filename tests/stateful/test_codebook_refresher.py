"""CodebookRefresher: all ranks switch to the same codebook at the same step."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import codec
from support.states import equal_states, random_values, seeds, through_npz, through_torch_save

SGD = codec.optimizers.SGD(1 / 10)


def gradients(step, rank, spread=20):
    """Return tensors of a step and rank whose distribution changes every `spread` steps."""
    rng = np.random.default_rng([step, rank])
    x = rng.standard_normal((6, 1000)) * np.exp(rng.standard_normal((6, 1000)) * (step // spread))
    return list(x.astype(np.float32))


@given(st.integers(2, 3), st.integers(2, 6), st.data())
def test_ranks_switch_to_the_same_codebook_at_the_same_step(ranks, interval, data):
    """Ranks switch to the same codebook at the same step, even if sums arrive at different steps; frames in flight
    still decode.
    """
    delay = data.draw(st.integers(1, interval - 1))
    rng = np.random.default_rng(data.draw(seeds))
    all_ranks = [codec.CodebookRefresher(interval=interval, delay=delay) for _ in range(ranks)]
    used, frames, sums, latest = [], [], {}, []
    arrives = [{} for _ in all_ranks]
    for step in range(5 * interval):
        agreed = []
        for i, rank in enumerate(all_ranks):
            if arrives[i].get(step):
                at = arrives[i][step]
                rank.propose(at, torch.from_numpy(sums[at]) if i else sums[at])
            agreed.append(rank.current(step))
            if rank.due(step):
                for x in gradients(step, i, interval):
                    rank.count(x)
                arrives[i][step + int(rng.integers(1, delay + 1))] = step
        assert len(set(agreed)) == 1
        used.append(agreed[0])
        sent = [(x := gradients(step, i, interval)[0], codec.encode(x, codebook=agreed[i])) for i in range(ranks)]
        for x, frame in sent + latest:  # frames of the previous step may still be in flight, and must decode, too
            for rank in all_ranks:
                assert (codec.decode(frame, codebooks=rank.books) == x).all()
        frames.append((step, *sent[0]))
        latest = sent
        if all_ranks[0].due(step):
            sums[step] = np.sum([r.counts() for r in all_ranks], axis=0)
    assert len({r.books for r in all_ranks}) == 1
    switches = [step for step in range(1, len(used)) if used[step] != used[step - 1]]
    assert len(switches) > 2
    assert all((step - delay) % interval == 0 for step in switches)
    last = switches[-1]
    for step, x, frame in frames:
        if used[step] in (used[last], used[last - 1]):
            assert (codec.decode(frame, codebooks=all_ranks[0].books) == x).all()
        elif codec.inspect(frame).codebook_id:
            with pytest.raises(codec.StateError):
                codec.decode(frame, codebooks=all_ranks[0].books)
    assert all(len(r.books) == 2 for r in all_ranks)


def proposed(tensors, **how):
    """Return the codebook that is proposed from the counts of one rank."""
    refresher = codec.CodebookRefresher(**how, interval=2, delay=1)
    for x in tensors:
        refresher.count(x)
    refresher.propose(2, refresher.counts())
    assert not refresher.counts().any()
    return refresher.current(3)


def test_codebook_is_proposed_only_if_frames_become_smaller():
    rng = np.random.default_rng(0)
    cnn = np.load(Path(__file__).parents[2] / "bench/data/cnn_float32.npz")["grad"]
    alike = gradients(0, 0)
    pieces = [p for p in np.array_split(cnn, 17)]
    for tensors, pays in [(alike, True), (pieces, False)]:
        book = codec.Codebook.from_tensors(*tensors)
        own = sum(len(codec.encode(x)) for x in tensors)
        agreed = sum(len(codec.encode(x, codebook=book)) for x in tensors)
        assert (agreed < own) == pays
        assert (proposed(tensors) is not None) == pays
    assert proposed([]) is None
    few = codec.CodebookRefresher()
    few.count(alike[0][:511])  # ignored: a frame of 511 values uses no codebook
    assert not few.counts().any()
    assert proposed([np.zeros(0, np.float32)]) is None
    noise = rng.integers(0, 256, (6, 4000), dtype=np.uint8).view(np.float32)
    assert proposed(list(noise)) is None
    halves = [x.astype(np.float16) for x in alike]
    for levels in ("coded", "shared"):
        how = {"spec": codec.Truncate(level_coding=levels), "dtype": "float16"}
        refresher = codec.CodebookRefresher(**how)
        for x in halves:
            refresher.count(x, how["spec"].bind(SGD, theta=x))
        refresher.propose(50, refresher.counts())
        book = refresher.current(60)
        frame = codec.encode(halves[0], how["spec"].bind(SGD, theta=halves[0]), codebook=book)
        assert codec.inspect(frame).codebook_id == book.id


def test_counts_are_scaled_to_the_number_of_values():
    """Counts are scaled to the number of values, although large tensors are sampled."""
    x = random_values(np.random.default_rng(0), 1 << 20)
    refresher = codec.CodebookRefresher()
    refresher.count(x)
    assert 0.999 * x.size < refresher.counts()[:256].sum() <= x.size
    assert refresher.counts()[256] < 4 * x.size
    refresher.counts()[:] = 0  # must have no effect: counts() returns a copy
    assert refresher.counts().any()


def test_wrong_arguments_are_rejected():
    """Wrong arguments, and proposals that come too early or too late, are rejected without a change of state."""
    with pytest.raises(codec.ArgumentError):
        codec.CodebookRefresher(interval=10, delay=10)
    with pytest.raises(codec.ArgumentError):
        codec.CodebookRefresher(interval=10, delay=0)
    with pytest.raises(codec.SpecError):
        codec.CodebookRefresher(codec.Sign())
    with pytest.raises(codec.ArgumentError):
        codec.CodebookRefresher(dtype="int8")
    refresher = codec.CodebookRefresher(codec.Truncate(), interval=10, delay=5)
    with pytest.raises(codec.ArgumentError, match="other symbols"):
        refresher.count(np.ones(1000, np.float16), codec.Truncate().bind(SGD, theta=np.ones(1000, np.float32)))
    refresher = codec.CodebookRefresher(interval=10, delay=5)
    assert [s for s in range(35) if refresher.due(s)] == [10, 20, 30]
    with pytest.raises(codec.ArgumentError, match="exponents"):
        refresher.count(np.ones(1000, np.int32))
    for x in gradients(0, 0):
        refresher.count(x)
    sums = refresher.counts()
    refresher.current(15)
    before = refresher.state_dict()
    for error, match, arguments in [
        (codec.StateError, "too late", (10, sums)),
        (codec.ArgumentError, "257", (20, sums[:256])),
        (codec.ArgumentError, "257", (20, -sums)),
        (codec.ArgumentError, "int64", (20, sums.astype(np.int32))),
        (codec.ArgumentError, "must be an array of int64", (20, None)),
        (codec.ArgumentError, "step", (-1, sums)),
        (codec.ArgumentError, "step", (None, sums)),
    ]:
        with pytest.raises(error, match=match):
            refresher.propose(*arguments)
        assert equal_states(refresher.state_dict(), before)
    refresher.propose(20, sums)
    with pytest.raises(codec.StateError, match="too early"):
        refresher.propose(24, sums)
    refresher.propose(30, sums)  # proposes the current codebook: no switch, and older codebooks stay known
    assert refresher.current(24) is None
    assert refresher.current(25) is refresher.current(40) is refresher.books[0]
    refresher.propose(40, np.zeros(257, np.int64))
    assert refresher.current(45) is None
    with pytest.raises(codec.StateError, match="no longer stored"):
        refresher.current(24)
    with pytest.raises(codec.StateError, match="no longer stored"):
        refresher.rollback(24)


def test_rollback_makes_ranks_agree():
    """After a rollback, ranks agree although only one of them had received a sum."""
    a, b = (codec.CodebookRefresher(interval=10, delay=5) for _ in range(2))
    for x in gradients(0, 0):
        a.count(x)
    sums = a.counts()
    a.current(12), b.current(12)
    a.propose(10, sums)
    a.rollback(12), b.rollback(12)
    for rank in (a, b):
        assert rank.current(20) is None
        assert rank.books == ()
    b.count(gradients(0, 0)[0])
    a.rollback(12), b.rollback(12)
    assert not b.counts().any()
    for rank in (a, b):
        rank.propose(10, sums)
    assert a.current(15) == b.current(15) == a.books[0]


@pytest.mark.parametrize("through", [dict, through_npz, through_torch_save])
def test_training_resumes_from_a_checkpoint(through):
    """Training resumes from this rank's checkpoint or another rank's, including a pending switch of the codebook."""
    a, b = (codec.CodebookRefresher(interval=10, delay=5) for _ in range(2))
    for step in (10, 20):
        for x in gradients(step, 0, 10):
            a.count(x)
        a.propose(step, a.counts())
        a.current(step + 2)
    a.count(gradients(0, 0)[0])
    saved = a.state_dict()
    b.load_state_dict(through(saved))
    assert equal_states(b.state_dict(), saved)
    assert len(b.books) == 2
    for step in range(22, 40):
        assert a.current(step) == b.current(step)
        if step == 30:
            assert (a.counts() == b.counts()).all()
            a.propose(step, a.counts())
            b.propose(step, b.counts())
    with pytest.raises(codec.StateError, match="too late"):
        b.propose(30, b.counts())


def test_wrong_states_are_rejected():
    a = codec.CodebookRefresher(interval=10, delay=5)
    for x in gradients(0, 0):
        a.count(x)
    a.propose(10, a.counts())
    good = a.state_dict()
    book = good["book[15]"]
    damaged = book.copy()
    damaged[3] ^= 1
    truncates = codec.Codebook.from_counts(np.ones(256, int), codec.Truncate())
    for bad in (
        {**good, "symbols": 1},
        {**good, "counts": np.full(257, 1 << 62)},
        {**good, "book[99999999999999999999]": book},
        {**good, "book[9223372036854775807]": book},
        {k: v for k, v in good.items() if k[:4] != "book"},
        {**good, "book[20]": book},
        {**good, "book[15]": damaged},
        {**good, "book[15]": book[:-1]},
        {**good, "book[15]": np.frombuffer(truncates.to_bytes(), np.uint8)},
    ):
        with pytest.raises(codec.StateError):
            a.load_state_dict(bad)
        assert equal_states(a.state_dict(), good)
    with pytest.raises(codec.StateError, match="other symbols"):
        codec.CodebookRefresher(codec.Truncate()).load_state_dict(good)
