"""Residuals follow their parameters and lose nothing; ranks agree on codebooks without a word."""

import io
import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import codec
import codec.stateful.feedback
from support.specs import LOSSY

SGD = {"metric": codec.optimizers.SGD(1 / 10)}
REFUSING = {k: s for k, s in LOSSY.items() if not (isinstance(s, codec.Float8) and s.nonfinite == "propagate")}
NAMES = ("layer.0.weight", "layer.0.bias", "a[0:5]", "ünïcode/\n", "")


def values(rng, n):
    return (rng.standard_normal(n) * np.exp(rng.standard_normal(n))).astype(np.float32)


def same(a, b):
    """Equal dicts of arrays, ints and strings, to the bit and in the same order."""
    plain = [[(k, v.dtype, v.tobytes()) if isinstance(v, np.ndarray) else (k, v) for k, v in d.items()] for d in (a, b)]
    return plain[0] == plain[1]


def cuts(rng, n, most=4):
    """[0, n) in pieces."""
    edges = [0, *sorted(rng.integers(0, n + 1, rng.integers(0, most)).tolist()), n]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b]


def buckets(rng, sizes):
    """Pieces of all parameters in any order, in a few buckets."""
    ranges = [(k, a, b) for k, n in sizes.items() for a, b in (cuts(rng, n) if rng.random() < 0.5 else [(0, n)])]
    ranges = [ranges[i] for i in rng.permutation(len(ranges))]
    return [ranges[a:b] for a, b in cuts(rng, len(ranges))]


def some_state(rng, sizes, role="worker"):
    store = codec.ErrorFeedback(codec.Sign(), role=role)
    for layout in buckets(rng, sizes):
        buffer = store.begin(layout)
        buffer[:] = values(rng, len(buffer))
    store.commit()
    return store


sizes_of = st.lists(st.integers(1, 300), min_size=1, max_size=len(NAMES)).map(
    lambda n: dict(zip(NAMES, n, strict=False))
)
seeds = st.integers(0, 2**32 - 1)


@given(
    st.sampled_from(sorted(REFUSING)),
    sizes_of,
    seeds,
    st.lists(st.sampled_from(["commit", "rollback", "nan"]), min_size=1, max_size=6),
)
def test_nothing_is_lost(name, sizes, seed, steps):
    """Buckets, their order and their cuts change in every step; refused steps leave no trace, to the bit."""
    spec, rng = REFUSING[name], np.random.default_rng(seed)
    feedback = codec.ErrorFeedback(spec)
    owed = {k: np.zeros(n, np.float32) for k, n in sizes.items()}
    summed, rounding = ({k: np.zeros(n) for k, n in sizes.items()} for _ in range(2))
    for step in steps:
        before = feedback.state_dict()
        grads = {k: values(rng, n) for k, n in sizes.items()}
        if step == "nan":
            grads[next(iter(sizes))][-1] = np.nan
        told = {k: e.copy() for k, e in owed.items()}
        refused = False
        for layout in buckets(rng, sizes):
            bucket = np.concatenate([grads[k][a:b] for k, a, b in layout])
            error = feedback.begin(layout)
            assert error.tobytes() == np.concatenate([owed[k][a:b] for k, a, b in layout]).tobytes()
            c, sent = bucket + error, np.empty_like(bucket)
            try:
                for a, b in cuts(rng, len(bucket), 3):
                    frame = codec.encode(bucket[a:b], spec, residual=error[a:b], feedback=True)
                    codec.decode(frame, out=sent[a:b])
            except codec.SpecError:
                refused = True
                continue
            left, at = c - sent, 0
            for k, a, b in layout:
                told[k][a:b] = left[at : at + b - a]
                if step == "commit":
                    summed[k][a:b] += grads[k][a:b] - sent[at : at + b - a].astype(np.float64)
                    rounding[k][a:b] += (np.abs(c) + np.abs(left))[at : at + b - a] * 2.0**-24
                at += b - a
        assert refused == (step == "nan")
        assert same(feedback.state_dict(), before)
        if step == "commit":
            feedback.commit()
            owed = told
        else:
            feedback.rollback()
        if any(step == "commit" for step in before) or step != "commit":
            assert same(feedback.state_dict(), before)
    saved = feedback.state_dict()
    if "commit" in steps:
        assert set(saved) == {"version", "role", *(f"{k}[0:{n}]" for k, n in sizes.items())}
        for k, n in sizes.items():
            assert saved[f"{k}[0:{n}]"].tobytes() == owed[k].tobytes()
            assert (np.abs(summed[k] - owed[k]) <= 1.001 * rounding[k]).all()
    else:
        assert set(saved) == {"version", "role"}


@given(sizes_of, seeds)
def test_any_range_from_any_ranges(sizes, seed):
    """What is asked for is put together from what there is; what is not asked for stays."""
    rng = np.random.default_rng(seed)
    feedback = some_state(rng, sizes)
    before = feedback.state_dict()
    for _ in range(4):
        layout = buckets(rng, sizes)[0]
        expected = [before[f"{k}[0:{sizes[k]}]"][a:b] for k, a, b in layout]
        assert feedback.begin(layout).tobytes() == np.concatenate(expected).tobytes()
        feedback.commit()
        assert same(feedback.state_dict(), before)
        assert all(array.base is None for array in feedback._now.kept.values())  # no view that keeps a bucket alive
    key, n = next(iter(sizes.items()))
    longer = feedback.begin([(key, n + 5)])  # new values have no residual
    assert longer.tobytes() == before[f"{key}[0:{n}]"].tobytes() + bytes(20)


def test_begun_twice():
    """A value belongs to one buffer at a time, whether its layout is known or not."""
    feedback = codec.ErrorFeedback(codec.Sign())
    feedback.begin([("a", 10), ("b", 10)])
    for layout in ([("a", 10), ("b", 10)], [("b", 10)], [("c", 5), ("a", 9, 12)]):
        with pytest.raises(codec.StateError, match="has been begun"):
            feedback.begin(layout)
    feedback.begin([("a", 10, 12)])[:] = 1
    feedback.commit()
    feedback.begin([("a", 5, 11)])
    for layout in ([("a", 10), ("b", 10)], [("a", 10, 12)], [("a", 5, 11)]):
        with pytest.raises(codec.StateError, match="has been begun"):
            feedback.begin(layout)
    feedback.rollback()
    assert feedback.begin([("a", 12)]).tolist() == [0] * 10 + [1, 1]
    assert len(feedback.begin([])) == len(feedback.begin([])) == len(feedback.begin([("a", 3, 3)])) == 0


@pytest.mark.parametrize(
    "layout",
    [
        None,
        5,
        "ab",
        [5],
        ["a"],
        [("a",)],
        [("a", -1)],
        [("a", 1.5)],
        [(b"a", 1)],
        [("a", 5, 3)],
        [("a", 1, 2, 3)],
        [("a", [])],
        [("a", 5), ("b", 2), ("a", 4, 6)],
    ],
)
def test_what_is_no_layout(layout):
    feedback = codec.ErrorFeedback(codec.Sign())
    with pytest.raises(codec.SpecError):
        feedback.begin(layout)
    feedback.commit()
    assert len(feedback.state_dict()) == 2


def test_no_memory_in_the_steady_state():
    """Two buffers take turns, whether steps succeed or not; a copy of one is what the other is made of."""
    feedback = codec.ErrorFeedback(codec.Sign())
    layouts = [[("a", 1000), ("b", 10)], [("c", 1000)]]
    seen = {}
    for step in range(20):
        for i, layout in enumerate(layouts):
            buffer = feedback.begin(layout)
            assert (buffer == step).all()
            buffer += 1
            seen.setdefault(i, []).append(buffer)  # kept alive, so that ids stay unique
        if step % 3 == 2:
            for layout in layouts:  # failed steps are repeated
                with pytest.raises(codec.StateError):
                    feedback.begin(layout)
            feedback.rollback()
            assert all((feedback.begin(layout) == step).all() for layout in layouts)
            feedback.rollback()
            for layout in layouts:
                feedback.begin(layout)[:] = step + 1
        feedback.commit()
    for buffers in seen.values():
        assert len({id(b) for b in buffers}) == 2


def test_one_tensor():
    """encode() is begin, encode and commit, apart from what else has been begun."""
    rng = np.random.default_rng(0)
    feedback, spec = codec.ErrorFeedback(codec.Quantize(4)), codec.Quantize(4)
    error = np.zeros(6000, np.float32)
    other = feedback.begin([("other", 7)])
    for step in range(5):
        x = values(rng, 6000).reshape(60, 100)
        expected = codec.encode(x, spec, residual=error, feedback=True, stream=step)
        tensor = torch.from_numpy(x) if step % 2 else x
        assert feedback.encode("w", tensor, stream=step) == expected
        assert feedback.state_dict()["w[0:6000]"].tobytes() == error.tobytes()
    half = np.full(8, 1.5, np.float16)
    assert codec.inspect(feedback.encode("h", half.view(np.uint16), dtype="float16")).dtype == "float16"
    assert codec.inspect(feedback.encode("none", np.zeros((0, 3), np.float32))).shape == (0, 3)
    other[:] = 3
    feedback.commit()
    saved = feedback.state_dict()
    assert set(saved) == {"version", "role", "w[0:6000]", "h[0:8]", "other[0:7]"}
    assert (saved["other[0:7]"] == 3).all()


def test_errors_of_one_tensor(monkeypatch):
    """NaN, no room, arguments, and Ctrl-C at any moment: all is owed as before, and the next step works."""
    rng = np.random.default_rng(0)
    feedback, x = codec.ErrorFeedback(codec.Sign()), values(rng, 1000)
    feedback.encode("w", x)
    pending = feedback.begin([("v", 3)])
    before = feedback.state_dict()
    bad = x.copy()
    bad[500] = np.inf
    for error, arguments in [
        (codec.SpecError, ("w", bad)),
        (codec.SpecError, ("w", x, bytearray(20))),
        (codec.SpecError, ("w", "no tensor")),
        (codec.SpecError, (5, x)),
        (codec.StateError, ("v", x)),
        (TypeError, ("w", x, None, x)),
    ]:
        key, tensor, out, residual = (*arguments, None, None)[:4]
        more = {"residual": residual} if residual is not None else {}
        with pytest.raises(error):
            feedback.encode(key, tensor, out=out, **more)
        assert same(feedback.state_dict(), before)
    encode, commit = codec.encode, feedback._commit

    def interrupted(*arguments, **keywords):
        encode(*arguments, **keywords)
        raise KeyboardInterrupt

    def late(begun):
        commit(begun)
        raise KeyboardInterrupt

    for where, name, function in [(codec.stateful.feedback, "encode", interrupted), (feedback, "_commit", late)]:
        with monkeypatch.context() as m:
            m.setattr(where, name, function)
            for key in ("w", "new"):
                with pytest.raises(KeyboardInterrupt):
                    feedback.encode(key, x)
                assert same(feedback.state_dict(), before)
    other = codec.ErrorFeedback(codec.Sign())
    other.load_state_dict(before)
    for _ in range(3):
        assert feedback.encode("w", x) == other.encode("w", x)
        assert same(feedback.state_dict(), other.state_dict())
    pending[:] = 1
    feedback.commit()
    assert (feedback.state_dict()["v[0:3]"] == 1).all()


def test_arguments():
    for bad in (codec.Lossless(), None, "sign"):
        with pytest.raises(codec.SpecError):
            codec.ErrorFeedback(bad)
    with pytest.raises(codec.SpecError, match="role"):
        codec.ErrorFeedback(codec.Sign(), role="boss")


def npz(saved):
    file = io.BytesIO()
    np.savez(file, **saved)
    file.seek(0)
    return np.load(file, allow_pickle=False)


def pt(saved):
    file = io.BytesIO()
    torch.save({k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in saved.items()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("through", [dict, npz, pt])
def test_resumed(through):
    """From a checkpoint training goes on as it would have, in other buckets too."""
    rng = np.random.default_rng(0)
    sizes = {"layer.weight": 3000, "layer.bias": 50, "[0:1]": 9}
    a, b = (codec.ErrorFeedback(codec.Float8(), role="server") for _ in range(2))
    for _ in range(3):
        for k, n in sizes.items():
            a.encode(k, values(rng, n))
    a.begin([("[0:1]", 9)])[:] = 5  # not committed, so not saved
    saved = a.state_dict()
    a.rollback()
    a.encode("layer.bias", values(np.random.default_rng(5), 50))  # the saved state is a copy
    a.load_state_dict(saved)
    b.encode("of another run", values(rng, 10))
    b.load_state_dict(through(saved))
    assert same(b.state_dict(), saved)
    for _ in range(3):
        grads = {k: values(rng, n) for k, n in sizes.items()}
        bucket = np.concatenate(list(grads.values()))
        frames = [codec.encode(bucket, codec.Float8(), residual=f.begin(sizes.items()), feedback=True) for f in (a, b)]
        a.commit()
        b.commit()
        assert frames[0] == frames[1]
        assert same(a.state_dict(), b.state_dict())


def test_other_states():
    """What is not a state of this role and version is refused in words, and nothing is changed."""
    feedback = codec.ErrorFeedback(codec.Sign())
    feedback.encode("w", values(np.random.default_rng(0), 10))
    good = feedback.state_dict()
    e = good["w[0:10]"]
    bad = [
        ({}, "not a state dict"),
        (None, "not a state dict"),
        ([], "not a state dict"),
        ({**good, "version": 2}, "version 2"),
        ({**good, "version": "1"}, "not of type int"),
        ({**good, "version": e}, "not of type int"),
        ({**good, "role": "server"}, "of a server"),
        ({**good, "role": "boss"}, "none of"),
        ({**good, "role": None}, "not of type str"),
        ({**good, "w[0:10]": e[:9]}, "with 9 values"),
        ({**good, "w[0:10]": e.astype(np.float64)}, "float64"),
        ({**good, "w[0:10]": "ten"}, "not an array"),
        ({**good, "w": e}, "is not a range"),
        ({**good, "w[0:-10]": e}, "is not a range"),
        ({**good, "w[10:0]": e}, "is not a range"),
        ({**good, 5: e}, "is not a range"),
        ({**good, "w[5:15]": e}, r"w\[5:10\] twice"),
        ({**good, "w[10:11]": np.array([np.nan], np.float32)}, "NaN"),
    ]
    for state, match in bad:
        with pytest.raises(codec.StateError, match=match):
            feedback.load_state_dict(state)
        assert same(feedback.state_dict(), good)


@given(st.integers(1, 5), st.integers(1, 5), sizes_of, seeds, st.sampled_from(["mean", "sum"]))
def test_workers_reshard(old, new, sizes, seed, op):
    """What is owed to the parameters stays what it was: the mean, or the sum, of all ranks' residuals."""
    rng = np.random.default_rng(seed)
    states = [some_state(rng, sizes).state_dict() for _ in range(old)]
    missing = next(iter(sizes))
    if old > 1:
        del states[0][f"{missing}[0:{sizes[missing]}]"]  # a parameter without a residual on this rank
    resharded = codec.ErrorFeedback.reshard(states, new, op=op)
    assert len(resharded) == new
    ranks = [codec.ErrorFeedback(codec.Sign()) for _ in range(new)]
    for rank, state in zip(ranks, resharded, strict=True):
        rank.load_state_dict(state)
    combine = np.mean if op == "mean" else np.sum
    for k, n in sizes.items():
        before = combine([s.get(f"{k}[0:{n}]", np.zeros(n)) for s in states], axis=0, dtype=np.float64)
        after = combine([r.begin([(k, n)]) for r in ranks], axis=0, dtype=np.float64)
        assert np.allclose(after, before, rtol=1e-6, atol=1e-12)
    if (old, op) == (1, "mean"):
        assert all(same(r, states[0]) for r in resharded)


def ownership(rng, sizes, ranks):
    """Every value to some rank: a layout for each."""
    layouts = [[] for _ in range(ranks)]
    for r in itertools.chain.from_iterable(buckets(rng, sizes)):
        layouts[rng.integers(ranks)].append(r)
    return layouts


@given(st.integers(1, 5), st.integers(1, 5), sizes_of, seeds)
def test_servers_reshard(old, new, sizes, seed):
    """Each value's residual moves to its new owner as it is, and is nowhere else."""
    rng = np.random.default_rng(seed)
    owed = {k: values(rng, n) for k, n in sizes.items()}
    states = []
    for layout in ownership(rng, sizes, old):
        server = codec.ErrorFeedback(codec.Sign(), role="server")
        server.begin(layout)[:] = np.concatenate([[], *(owed[k][a:b] for k, a, b in layout)])
        server.commit()
        states.append(server.state_dict())
    layouts = ownership(rng, sizes, new)
    resharded = codec.ErrorFeedback.reshard(states, new, owned=lambda rank: layouts[rank])
    for layout, state in zip(layouts, resharded, strict=True):
        server = codec.ErrorFeedback(codec.Sign(), role="server")
        server.load_state_dict(state)
        assert sum(len(v) for v in state.values() if isinstance(v, np.ndarray)) == sum(b - a for _, a, b in layout)
        assert server.begin(layout).tolist() == [x for k, a, b in layout for x in owed[k][a:b]]
    moved = codec.ErrorFeedback.reshard(states, new)  # without layouts; they can be given later
    assert len(moved) == new
    again = codec.ErrorFeedback.reshard(moved, 1, owned=lambda rank: sizes.items())
    for k, n in sizes.items():
        assert again[0][f"{k}[0:{n}]"].tobytes() == owed[k].tobytes()


def test_what_does_not_reshard():
    worker, server = (
        some_state(np.random.default_rng(0), {"a": 10}, role).state_dict() for role in ("worker", "server")
    )
    reshard = codec.ErrorFeedback.reshard
    for error, match, call in [
        (codec.SpecError, "got none", lambda: reshard([], 2)),
        (codec.SpecError, "world_size", lambda: reshard([worker], 0)),
        (codec.SpecError, "op must be", lambda: reshard([worker], 2, op="max")),
        (codec.SpecError, "for servers", lambda: reshard([worker], 2, owned=lambda rank: [])),
        (codec.StateError, "different roles", lambda: reshard([worker, server], 2)),
        (codec.StateError, "two of the old", lambda: reshard([server, server], 2)),
        (codec.StateError, r"owns a\[9:10\]", lambda: reshard([server], 1, owned=lambda rank: [("a", 9)])),
        (codec.SpecError, r"own a\[0:10\]", lambda: reshard([server], 2, owned=lambda rank: [("a", 10)])),
        (codec.StateError, "not a state dict", lambda: reshard([worker, {}], 2)),
        (codec.StateError, "thousands of digits", lambda: reshard([{**worker, "version": 10**5000}], 2)),
        (codec.SpecError, "world_size", lambda: reshard([worker], 1 << 62)),
        (codec.SpecError, "sequence of state dicts.*not NoneType", lambda: reshard(None, 2)),
        (codec.SpecError, "sequence of state dicts.*not dict", lambda: reshard(worker, 2)),
        (codec.SpecError, "sequence of state dicts.*not str", lambda: reshard("worker", 2)),
    ]:
        with pytest.raises(error, match=match):
            call()


def grads_of(step, rank, spread=20):
    """Pieces that are alike, but others from time to time."""
    rng = np.random.default_rng([step, rank])
    x = rng.standard_normal((6, 1000)) * np.exp(rng.standard_normal((6, 1000)) * (step // spread))
    return list(x.astype(np.float32))


@given(st.integers(2, 3), st.integers(2, 6), st.data())
def test_ranks_switch_alike(ranks, interval, data):
    """Sums arrive on each rank when they do: all encode with one codebook, and know it when frames come."""
    delay = data.draw(st.integers(1, interval - 1))
    rng = np.random.default_rng(data.draw(seeds))
    all_ranks = [codec.CodebookRefresher(interval=interval, delay=delay) for _ in range(ranks)]
    used, frames, sums, latest = [], [], {}, []
    arrives = [{} for _ in all_ranks]
    for step in range(5 * interval):
        told = []
        for i, rank in enumerate(all_ranks):
            if arrives[i].get(step):
                at = arrives[i][step]
                rank.propose(at, torch.from_numpy(sums[at]) if i else sums[at])
            told.append(rank.current(step))
            if rank.due(step):
                for x in grads_of(step, i, interval):
                    rank.count(x)
                arrives[i][step + int(rng.integers(1, delay + 1))] = step
        assert len(set(told)) == 1
        used.append(told[0])
        sent = [(x := grads_of(step, i, interval)[0], codec.encode(x, codebook=told[i])) for i in range(ranks)]
        for x, frame in sent + latest:  # frames of the last step may still be in flight
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


def refreshed(tensors, **how):
    """The codebook that sums of one rank give."""
    refresher = codec.CodebookRefresher(**how, interval=2, delay=1)
    for x in tensors:
        refresher.count(x)
    refresher.propose(2, refresher.counts())
    assert not refresher.counts().any()
    return refresher.current(3)


def test_only_where_it_pays():
    """A codebook is proposed where frames are smaller with it, and not where they are larger."""
    rng = np.random.default_rng(0)
    cnn = np.load(Path(__file__).parents[2] / "bench/data/cnn_float32.npz")["grad"]
    alike = grads_of(0, 0)
    pieces = [p for p in np.array_split(cnn, 17)]
    for tensors, pays in [(alike, True), (pieces, False)]:
        book = codec.Codebook.from_tensors(*tensors)
        own = sum(len(codec.encode(x)) for x in tensors)
        agreed = sum(len(codec.encode(x, codebook=book)) for x in tensors)
        assert (agreed < own) == pays
        assert (refreshed(tensors) is not None) == pays
    assert refreshed([]) is None
    few = codec.CodebookRefresher()
    few.count(alike[0][:511])  # frames of so few values use no codebook
    assert not few.counts().any()
    assert refreshed([np.zeros(0, np.float32)]) is None
    noise = rng.integers(0, 256, (6, 4000), dtype=np.uint8).view(np.float32)
    assert refreshed(list(noise)) is None
    halves = [x.astype(np.float16) for x in alike]
    for levels in ("coded", "shared"):
        how = {"spec": codec.Truncate(level_coding=levels), "dtype": "float16"}
        refresher = codec.CodebookRefresher(**how)
        for x in halves:
            refresher.count(x, **SGD, state={"theta": x})
        refresher.propose(50, refresher.counts())
        book = refresher.current(60)
        frame = codec.encode(halves[0], how["spec"], codebook=book, **SGD, state={"theta": halves[0]})
        assert codec.inspect(frame).codebook_id == book.id


def test_counts_of_large_tensors():
    """A tensor counts by its values, not by how many of them encoding looks at."""
    x = values(np.random.default_rng(0), 1 << 20)
    refresher = codec.CodebookRefresher()
    refresher.count(x)
    assert 0.999 * x.size < refresher.counts()[:256].sum() <= x.size
    assert refresher.counts()[256] < 4 * x.size
    refresher.counts()[:] = 0  # counts() returns a copy
    assert refresher.counts().any()


def test_refresher_arguments():
    """Too late, too early and nonsense are errors, which change nothing."""
    with pytest.raises(codec.SpecError):
        codec.CodebookRefresher(interval=10, delay=10)
    with pytest.raises(codec.SpecError):
        codec.CodebookRefresher(interval=10, delay=0)
    with pytest.raises(codec.SpecError):
        codec.CodebookRefresher(codec.Sign())
    with pytest.raises(codec.SpecError):
        codec.CodebookRefresher(dtype="int8")
    refresher = codec.CodebookRefresher(codec.Truncate(), interval=10, delay=5)
    with pytest.raises(codec.SpecError, match="other symbols"):
        refresher.count(np.ones(1000, np.float16), **SGD, state={"theta": np.ones(1000, np.float32)})
    refresher = codec.CodebookRefresher(interval=10, delay=5)
    assert [s for s in range(35) if refresher.due(s)] == [10, 20, 30]
    with pytest.raises(codec.SpecError, match="exponents"):
        refresher.count(np.ones(1000, np.int32))
    for x in grads_of(0, 0):
        refresher.count(x)
    sums = refresher.counts()
    refresher.current(15)
    before = refresher.state_dict()
    for error, match, arguments in [
        (codec.StateError, "too late", (10, sums)),
        (codec.SpecError, "257", (20, sums[:256])),
        (codec.SpecError, "257", (20, -sums)),
        (codec.SpecError, "int64", (20, sums.astype(np.int32))),
        (codec.SpecError, "not an array", (20, None)),
        (codec.SpecError, "step", (-1, sums)),
        (codec.SpecError, "step", (None, sums)),
    ]:
        with pytest.raises(error, match=match):
            refresher.propose(*arguments)
        assert same(refresher.state_dict(), before)
    refresher.propose(20, sums)
    with pytest.raises(codec.StateError, match="before the last one is in use"):
        refresher.propose(24, sums)
    refresher.propose(30, sums)  # the same codebook: no switch, and older ones stay known
    assert refresher.current(24) is None
    assert refresher.current(25) is refresher.current(40) is refresher.books[0]
    refresher.propose(40, np.zeros(257, np.int64))
    assert refresher.current(45) is None
    with pytest.raises(codec.StateError, match="no longer known"):
        refresher.current(24)
    with pytest.raises(codec.StateError, match="no longer known"):
        refresher.rollback(24)


def test_rollback_of_a_switch():
    """Where one rank has a sum and another has not, rolling back to a step makes them agree."""
    a, b = (codec.CodebookRefresher(interval=10, delay=5) for _ in range(2))
    for x in grads_of(0, 0):
        a.count(x)
    sums = a.counts()
    a.current(12), b.current(12)
    a.propose(10, sums)
    a.rollback(12), b.rollback(12)
    for rank in (a, b):
        assert rank.current(20) is None
        assert rank.books == ()
    b.count(grads_of(0, 0)[0])
    a.rollback(12), b.rollback(12)
    assert not b.counts().any()
    for rank in (a, b):
        rank.propose(10, sums)
    assert a.current(15) == b.current(15) == a.books[0]


@pytest.mark.parametrize("through", [dict, npz, pt])
def test_refresher_resumed(through):
    """From a checkpoint, also of another rank, all goes on as it would have, a switch to come included."""
    a, b = (codec.CodebookRefresher(interval=10, delay=5) for _ in range(2))
    for step in (10, 20):
        for x in grads_of(step, 0, 10):
            a.count(x)
        a.propose(step, a.counts())
        a.current(step + 2)
    a.count(grads_of(0, 0)[0])
    saved = a.state_dict()
    b.load_state_dict(through(saved))
    assert same(b.state_dict(), saved)
    assert len(b.books) == 2
    for step in range(22, 40):
        assert a.current(step) == b.current(step)
        if step == 30:
            assert (a.counts() == b.counts()).all()
            a.propose(step, a.counts())
            b.propose(step, b.counts())
    with pytest.raises(codec.StateError, match="too late"):
        b.propose(30, b.counts())


def test_other_states_of_a_refresher():
    a = codec.CodebookRefresher(interval=10, delay=5)
    for x in grads_of(0, 0):
        a.count(x)
    a.propose(10, a.counts())
    good = a.state_dict()
    book = good["book[15]"]
    damaged = book.copy()
    damaged[3] ^= 1
    truncates = codec.Codebook.from_counts(np.ones(256, int), codec.Truncate())
    for bad in (
        {},
        None,
        {**good, "version": 2},
        {**good, "symbols": 1},
        {**good, "latest": "now"},
        {**good, "latest": 1 << 70},
        {**good, "latest": -2},
        {**good, "latest": True},
        {**good, "counts": np.full(257, 1 << 62)},
        {**good, "book[99999999999999999999]": book},
        {**good, "book[9223372036854775807]": book},
        {**good, "book[-1]": book},
        {**good, "book[20": book},
        {**good, 5: book},
        {**good, "counts": good["counts"][:256]},
        {**good, "counts": -1 - good["counts"]},
        {**good, "counts": None},
        {k: v for k, v in good.items() if k[:4] != "book"},
        {**good, "book[20]": book},
        {**good, "book[15]": damaged},
        {**good, "book[15]": book[:-1]},
        {**good, "book[15]": np.frombuffer(truncates.to_bytes(), np.uint8)},
        {**good, "book[x]": book},
        {**good, "more": 5},
        {k: v for k, v in good.items() if k != "counts"},
    ):
        with pytest.raises(codec.StateError):
            a.load_state_dict(bad)
        assert same(a.state_dict(), good)
    with pytest.raises(codec.StateError, match="other symbols"):
        codec.CodebookRefresher(codec.Truncate()).load_state_dict(good)


def test_scaled_gradients_are_owed_scaled_residuals():
    feedback = codec.ErrorFeedback(codec.Sign())
    feedback.begin([("a", 10)])[:] = np.arange(10, dtype=np.float32)
    feedback.commit()
    state = pickle.dumps(feedback.state_dict())
    feedback.rescale(1024)
    assert feedback.begin([("a", 2, 5)]).tolist() == [2048, 3072, 4096]
    assert pickle.dumps(feedback.state_dict()) == state
    with pytest.raises(codec.StateError):
        feedback.rescale(2)
    feedback.rollback()  # restores the scale, too
    assert feedback.begin([("a", 2, 5)]).tolist() == [2, 3, 4]
    feedback.rollback()
    feedback.rescale(0.5)
    feedback.begin([("b", 1)])[:] = 1
    feedback.commit()
    feedback.rollback()
    assert feedback.begin([("a", 8, 10)]).tolist() == [4, 4.5]
    assert feedback.state_dict()["b[0:1]"] == [2]
    feedback.rollback()
    server = codec.ErrorFeedback(codec.Sign(), role="server")
    feedback.pass_on([("a", 8, 10)], server, 3)
    assert server.state_dict()["a[8:10]"].tolist() == [24, 27]
    assert server.settle([("a", 9, 12)]).tolist() == [27, 0, 0]
    assert list(server.state_dict())[2:] == ["a[8:9]"]
    server.rollback()
    assert list(server.state_dict())[2:] == []
    feedback.load_state_dict(pickle.loads(state))
    assert pickle.dumps(feedback.state_dict()) == state
    for scale in (0, -1, float("inf"), float("nan"), "a", None, True, [1], 2.0**-127, 2.0**127, 10**400):
        with pytest.raises(codec.SpecError, match="a scale must be a number"):
            feedback.rescale(scale)
    feedback.rescale(np.float32(2.0**100))
    with pytest.raises(codec.SpecError, match="no factor"):
        feedback.rescale(2.0**-100)
    assert pickle.dumps(feedback.state_dict()) == state


def test_what_was_passed_on_is_taken_back():
    """By a rollback of both, whatever was begun meanwhile; not after a commit."""
    worker, server = (codec.ErrorFeedback(codec.Sign(), role=role) for role in ("worker", "server"))
    for feedback in (worker, server):
        feedback.begin([("a", 300), ("b", 50)])[:] = np.arange(350, dtype=np.float32)
        feedback.commit()
    before = pickle.dumps([worker.state_dict(), server.state_dict()])
    for committed in (False, True):
        server.pass_on([("a", 0, 100)], worker, 3)
        server.pass_on([("b", 0, 50)], worker, 3)
        for feedback in (worker, server):
            feedback.begin([("a", 100, 300)])[:] = 7
            if committed:
                feedback.commit()
            feedback.rollback()
        assert (pickle.dumps([worker.state_dict(), server.state_dict()]) == before) != committed
    owed = worker.state_dict()
    assert owed["a[0:300]"][99] == 4 * 99
    assert owed["b[0:50]"][49] == 4 * 349
