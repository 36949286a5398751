"""ErrorFeedback: residuals follow their parameters through any buckets, and steps can be rolled back."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import codec
import codec.stateful.feedback
from support.specs import LOSSY, TOPKS
from support.states import (
    equal_states,
    parameter_sizes,
    random_buckets,
    random_cuts,
    random_feedback,
    random_values,
    seeds,
    through_npz,
    through_torch_save,
)

REFUSING = {k: s for k, s in (LOSSY | TOPKS).items() if getattr(s, "nonfinite", "") != "propagate"}


@given(
    st.sampled_from(sorted(REFUSING)),
    parameter_sizes,
    seeds,
    st.lists(st.sampled_from(["commit", "rollback", "nan"]), min_size=1, max_size=6),
)
def test_frames_and_residuals_add_up_to_the_gradients(name, sizes, seed, steps):
    """Decoded frames plus residuals equal all gradients, although buckets change in every step and steps fail."""
    spec, rng = REFUSING[name], np.random.default_rng(seed)
    feedback = codec.ErrorFeedback(spec)
    residuals = {k: np.zeros(n, np.float32) for k, n in sizes.items()}
    summed, rounding = ({k: np.zeros(n) for k, n in sizes.items()} for _ in range(2))
    for step in steps:
        before = feedback.state_dict()
        grads = {k: random_values(rng, n) for k, n in sizes.items()}
        if step == "nan":
            grads[next(iter(sizes))][-1] = np.nan
        updated = {k: e.copy() for k, e in residuals.items()}
        refused = False
        for layout in random_buckets(rng, sizes):
            bucket = np.concatenate([grads[k][a:b] for k, a, b in layout])
            error = feedback.begin(layout)
            assert error.tobytes() == np.concatenate([residuals[k][a:b] for k, a, b in layout]).tobytes()
            c, sent = bucket + error, np.empty_like(bucket)
            try:
                for a, b in random_cuts(rng, len(bucket), 3):
                    frame = codec.encode(bucket[a:b], spec, residual=error[a:b], feedback=True)
                    codec.decode(frame, out=sent[a:b])
            except codec.ArgumentError:
                refused = True
                continue
            left, at = c - sent, 0
            for k, a, b in layout:
                updated[k][a:b] = left[at : at + b - a]
                if step == "commit":
                    summed[k][a:b] += grads[k][a:b] - sent[at : at + b - a].astype(np.float64)
                    rounding[k][a:b] += (np.abs(c) + np.abs(left))[at : at + b - a] * 2.0**-24
                at += b - a
        assert refused == (step == "nan")
        assert equal_states(feedback.state_dict(), before)
        if step == "commit":
            feedback.commit()
            residuals = updated
        else:
            feedback.rollback()
        if any(step == "commit" for step in before) or step != "commit":
            assert equal_states(feedback.state_dict(), before)
    saved = feedback.state_dict()
    if "commit" in steps:
        assert set(saved) == {"format", "version", "role", *(f"{k}[0:{n}]" for k, n in sizes.items())}
        for k, n in sizes.items():
            assert saved[f"{k}[0:{n}]"].tobytes() == residuals[k].tobytes()
            assert (np.abs(summed[k] - residuals[k]) <= 1.001 * rounding[k]).all()
    else:
        assert set(saved) == {"format", "version", "role"}


@given(parameter_sizes, seeds)
def test_residuals_are_assembled_for_any_layout(sizes, seed):
    """begin() assembles residuals for any layout, and keeps those outside of the layout."""
    rng = np.random.default_rng(seed)
    feedback = random_feedback(rng, sizes)
    before = feedback.state_dict()
    for _ in range(4):
        layout = random_buckets(rng, sizes)[0]
        expected = [before[f"{k}[0:{sizes[k]}]"][a:b] for k, a, b in layout]
        assert feedback.begin(layout).tobytes() == np.concatenate(expected).tobytes()
        feedback.commit()
        assert equal_states(feedback.state_dict(), before)
        assert all(
            array.base is None for array in feedback._store.state.kept.values()
        )  # kept residuals are copies: a view would keep its bucket's memory alive
    key, n = next(iter(sizes.items()))
    longer = feedback.begin([(key, n + 5)])  # new values have no residual
    assert longer.tobytes() == before[f"{key}[0:{n}]"].tobytes() + bytes(20)


def test_range_cannot_be_begun_twice():
    """Beginning a range that a buffer already contains is an error, for known and new layouts."""
    feedback = codec.ErrorFeedback(codec.Sign())
    feedback.begin([("a", 10), ("b", 10)])
    for layout in ([("a", 10), ("b", 10)], [("b", 10)], [("c", 5), ("a", 9, 12)]):
        with pytest.raises(codec.StateError, match="is in a buffer of begin"):
            feedback.begin(layout)
    feedback.begin([("a", 10, 12)])[:] = 1
    feedback.commit()
    feedback.begin([("a", 5, 11)])
    for layout in ([("a", 10), ("b", 10)], [("a", 10, 12)], [("a", 5, 11)]):
        with pytest.raises(codec.StateError, match="is in a buffer of begin"):
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
def test_wrong_layouts_are_rejected(layout):
    feedback = codec.ErrorFeedback(codec.Sign())
    with pytest.raises(codec.ArgumentError):
        feedback.begin(layout)
    feedback.commit()
    assert len(feedback.state_dict()) == 3


def test_view_with_names_is_a_layout():
    feedback, bucket = codec.ErrorFeedback(codec.Sign()), np.zeros(107, np.float32)
    view = codec.view(bucket, segments={"weight": (10, 10), "bias": (7,)})
    feedback.begin(view)[:] = np.arange(107)
    feedback.commit()
    assert (feedback.begin([("bias", 7)]) == np.arange(100, 107)).all()
    for wrong in (codec.view(bucket), codec.view(bucket, segments=[(0, (107,))])):
        with pytest.raises(codec.ArgumentError, match="segments of the view have no names"):
            feedback.begin(wrong)


def test_steady_state_alternates_between_two_buffers():
    """In steady state two buffers alternate, in steps that succeed and in steps that fail."""
    feedback = codec.ErrorFeedback(codec.Sign())
    layouts = [[("a", 1000), ("b", 10)], [("c", 1000)]]
    seen = {}
    for step in range(20):
        for i, layout in enumerate(layouts):
            buffer = feedback.begin(layout)
            assert (buffer == step).all()
            buffer += 1
            seen.setdefault(i, []).append(buffer)  # keeps a reference, so that ids stay unique
        if step % 3 == 2:
            for layout in layouts:  # fail a step for each layout; the loop then repeats it
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


def test_encode_equals_begin_encode_and_commit():
    """encode() equals begin(), encode and commit of its own buffer; other begun buffers are not committed."""
    rng = np.random.default_rng(0)
    feedback, spec = codec.ErrorFeedback(codec.Quantize(4)), codec.Quantize(4)
    error = np.zeros(6000, np.float32)
    other = feedback.begin([("other", 7)])
    for step in range(5):
        x = random_values(rng, 6000).reshape(60, 100)
        expected = codec.encode(x, spec, residual=error, feedback=True, stream=step)
        tensor = torch.from_numpy(x) if step % 2 else x
        assert feedback.encode("w", tensor, stream=step) == expected
        assert feedback.state_dict()["w[0:6000]"].tobytes() == error.tobytes()
    half = np.full(8, 1.5, np.float16)
    assert codec.inspect(feedback.encode("h", codec.view(half.view(np.uint16), "float16"))).dtype == "float16"
    assert codec.inspect(feedback.encode("none", np.zeros((0, 3), np.float32))).shape == (0, 3)
    other[:] = 3
    feedback.commit()
    saved = feedback.state_dict()
    assert set(saved) == {"format", "version", "role", "w[0:6000]", "h[0:8]", "other[0:7]"}
    assert (saved["other[0:7]"] == 3).all()


def test_errors_of_encode_leave_residuals_unchanged(monkeypatch):
    """NaN, a small `out`, wrong arguments or Ctrl-C at any point leave residuals unchanged; the next step works."""
    rng = np.random.default_rng(0)
    feedback, x = codec.ErrorFeedback(codec.Sign()), random_values(rng, 1000)
    feedback.encode("w", x)
    pending = feedback.begin([("v", 3)])
    before = feedback.state_dict()
    bad = x.copy()
    bad[500] = np.inf
    for error, arguments in [
        (codec.ArgumentError, ("w", bad)),
        (codec.ArgumentError, ("w", x, bytearray(20))),
        (codec.ArgumentError, ("w", "no tensor")),
        (codec.ArgumentError, (5, x)),
        (codec.StateError, ("v", x)),
        (TypeError, ("w", x, None, x)),
    ]:
        key, tensor, out, residual = (*arguments, None, None)[:4]
        more = {"residual": residual} if residual is not None else {}
        with pytest.raises(error):
            feedback.encode(key, tensor, out=out, **more)
        assert equal_states(feedback.state_dict(), before)
    encode, commit = codec.encode, feedback._store.commit

    def interrupted(*arguments, **keywords):
        encode(*arguments, **keywords)
        raise KeyboardInterrupt

    def late(begun):
        commit(begun)
        raise KeyboardInterrupt

    for where, name, function in [(codec.stateful.feedback, "encode", interrupted), (feedback._store, "commit", late)]:
        with monkeypatch.context() as m:
            m.setattr(where, name, function)
            for key in ("w", "new"):
                with pytest.raises(KeyboardInterrupt):
                    feedback.encode(key, x)
                assert equal_states(feedback.state_dict(), before)
    other = codec.ErrorFeedback(codec.Sign())
    other.load_state_dict(before)
    for _ in range(3):
        assert feedback.encode("w", x) == other.encode("w", x)
        assert equal_states(feedback.state_dict(), other.state_dict())
    pending[:] = 1
    feedback.commit()
    assert (feedback.state_dict()["v[0:3]"] == 1).all()


def test_wrong_arguments_are_rejected():
    for bad in (codec.Lossless(), None, "sign"):
        with pytest.raises(codec.SpecError):
            codec.ErrorFeedback(bad)
    with pytest.raises(codec.ArgumentError, match="role"):
        codec.ErrorFeedback(codec.Sign(), role="boss")


@pytest.mark.parametrize("through", [dict, through_npz, through_torch_save])
def test_training_resumes_from_a_checkpoint(through):
    """Resumed training is bit-identical, also with other buckets."""
    rng = np.random.default_rng(0)
    sizes = {"layer.weight": 3000, "layer.bias": 50, "[0:1]": 9}
    a, b = (codec.ErrorFeedback(codec.Float8(), role="server") for _ in range(2))
    for _ in range(3):
        for k, n in sizes.items():
            a.encode(k, random_values(rng, n))
    a.begin([("[0:1]", 9)])[:] = 5  # not committed, so state_dict() leaves it out
    saved = a.state_dict()
    a.rollback()
    a.encode("layer.bias", random_values(np.random.default_rng(5), 50))  # must not change `saved`, which is a copy
    a.load_state_dict(saved)
    b.encode("of another run", random_values(rng, 10))
    b.load_state_dict(through(saved))
    assert equal_states(b.state_dict(), saved)
    for _ in range(3):
        grads = {k: random_values(rng, n) for k, n in sizes.items()}
        bucket = np.concatenate(list(grads.values()))
        frames = [codec.encode(bucket, codec.Float8(), residual=f.begin(sizes.items()), feedback=True) for f in (a, b)]
        a.commit()
        b.commit()
        assert frames[0] == frames[1]
        assert equal_states(a.state_dict(), b.state_dict())


def test_wrong_states_are_rejected():
    """A state of another role, or with wrong ranges, is an error that changes nothing."""
    feedback = codec.ErrorFeedback(codec.Sign())
    feedback.encode("w", random_values(np.random.default_rng(0), 10))
    good = feedback.state_dict()
    e = good["w[0:10]"]
    bad = [
        ({**good, "role": "server"}, "has role .server."),
        ({**good, "w[0:10]": e[:9]}, "got 9 values"),
        ({**good, "w[10:0]": e}, "must be named key"),
        ({**good, "w[5:15]": e}, r"w\[5:10\] twice"),
    ]
    for state, match in bad:
        with pytest.raises(codec.StateError, match=match):
            feedback.load_state_dict(state)
        assert equal_states(feedback.state_dict(), good)


def test_rescale_multiplies_residuals_by_the_change_of_scale():
    feedback = codec.ErrorFeedback(codec.Sign())
    feedback.begin([("a", 10)])[:] = np.arange(10, dtype=np.float32)
    feedback.commit()
    state = pickle.dumps(feedback.state_dict())
    feedback.rescale(1024)
    assert feedback.begin([("a", 2, 5)]).tolist() == [2048, 3072, 4096]
    assert pickle.dumps(feedback.state_dict()) == state
    with pytest.raises(codec.StateError):
        feedback.rescale(2)
    feedback.rollback()  # rollback restores the scale, too
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
    assert list(server.state_dict())[3:] == ["a[8:9]"]
    server.rollback()
    assert list(server.state_dict())[3:] == []
    feedback.load_state_dict(pickle.loads(state))
    assert pickle.dumps(feedback.state_dict()) == state
    for scale in (0, -1, float("inf"), float("nan"), "a", None, True, [1], 2.0**-127, 2.0**127, 10**400):
        with pytest.raises(codec.ArgumentError, match="scale must be a number"):
            feedback.rescale(scale)
    feedback.rescale(np.float32(2.0**100))
    with pytest.raises(codec.ArgumentError, match="ratio must be"):
        feedback.rescale(2.0**-100)
    assert pickle.dumps(feedback.state_dict()) == state


def test_rollback_of_both_sides_undoes_pass_on():
    """A rollback on both sides undoes pass_on(), even if buffers were begun since; a commit is final."""
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
    residuals = worker.state_dict()
    assert residuals["a[0:300]"][99] == 4 * 99
    assert residuals["b[0:50]"][49] == 4 * 349
