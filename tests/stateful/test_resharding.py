"""ErrorFeedback.reshard converts residuals to another number of ranks."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from support.states import equal_states, parameter_sizes, random_buckets, random_feedback, random_values, seeds


@given(st.integers(1, 5), st.integers(1, 5), parameter_sizes, seeds, st.sampled_from(["mean", "sum"]))
def test_resharded_workers_keep_the_mean_or_sum_of_residuals(old, new, sizes, seed, op):
    rng = np.random.default_rng(seed)
    states = [random_feedback(rng, sizes).state_dict() for _ in range(old)]
    missing = next(iter(sizes))
    if old > 1:
        del states[0][f"{missing}[0:{sizes[missing]}]"]  # rank 0 has no residual of one parameter
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
        assert all(equal_states(r, states[0]) for r in resharded)


def random_owners(rng, sizes, ranks):
    """Return a layout for each rank, such that each value belongs to exactly one rank."""
    layouts = [[] for _ in range(ranks)]
    for r in itertools.chain.from_iterable(random_buckets(rng, sizes)):
        layouts[rng.integers(ranks)].append(r)
    return layouts


@given(st.integers(1, 5), st.integers(1, 5), parameter_sizes, seeds)
def test_resharded_servers_own_each_residual_once(old, new, sizes, seed):
    """Each value's residual moves to its new owner bit for bit."""
    rng = np.random.default_rng(seed)
    residuals = {k: random_values(rng, n) for k, n in sizes.items()}
    states = []
    for layout in random_owners(rng, sizes, old):
        server = codec.ErrorFeedback(codec.Sign(), role="server")
        server.begin(layout)[:] = np.concatenate([[], *(residuals[k][a:b] for k, a, b in layout)])
        server.commit()
        states.append(server.state_dict())
    layouts = random_owners(rng, sizes, new)
    resharded = codec.ErrorFeedback.reshard(states, new, owned=lambda rank: layouts[rank])
    for layout, state in zip(layouts, resharded, strict=True):
        server = codec.ErrorFeedback(codec.Sign(), role="server")
        server.load_state_dict(state)
        assert sum(len(v) for v in state.values() if isinstance(v, np.ndarray)) == sum(b - a for _, a, b in layout)
        assert server.begin(layout).tolist() == [x for k, a, b in layout for x in residuals[k][a:b]]
    moved = codec.ErrorFeedback.reshard(states, new)  # without layouts, which can be passed later
    assert len(moved) == new
    again = codec.ErrorFeedback.reshard(moved, 1, owned=lambda rank: sizes.items())
    for k, n in sizes.items():
        assert again[0][f"{k}[0:{n}]"].tobytes() == residuals[k].tobytes()


def test_wrong_states_and_owners_are_rejected():
    worker, server = (
        random_feedback(np.random.default_rng(0), {"a": 10}, role).state_dict() for role in ("worker", "server")
    )
    reshard = codec.ErrorFeedback.reshard
    for error, match, call in [
        (codec.ArgumentError, "got none", lambda: reshard([], 2)),
        (codec.ArgumentError, "world_size", lambda: reshard([worker], 0)),
        (codec.ArgumentError, "op must be", lambda: reshard([worker], 2, op="max")),
        (codec.ArgumentError, "for servers", lambda: reshard([worker], 2, owned=lambda rank: [])),
        (codec.StateError, "must have the same role, got server and worker", lambda: reshard([worker, server], 2)),
        (codec.StateError, "two of the old", lambda: reshard([server, server], 2)),
        (
            codec.StateError,
            r"gives a\[9:10\] to no server",
            lambda: reshard([server], 1, owned=lambda rank: [("a", 9)]),
        ),
        (codec.ArgumentError, r"gives a\[0:10\] to two", lambda: reshard([server], 2, owned=lambda rank: [("a", 10)])),
        (codec.StateError, "lacks .format.", lambda: reshard([worker, {}], 2)),
        (codec.StateError, "thousands of digits", lambda: reshard([{**worker, "version": 10**5000}], 2)),
        (codec.ArgumentError, "world_size", lambda: reshard([worker], 1 << 62)),
        (codec.ArgumentError, "sequence of state dicts.*got NoneType", lambda: reshard(None, 2)),
        (codec.ArgumentError, "sequence of state dicts.*got dict", lambda: reshard(worker, 2)),
        (codec.ArgumentError, "sequence of state dicts.*got str", lambda: reshard("worker", 2)),
    ]:
        with pytest.raises(error, match=match):
            call()
