"""Parameter servers encode means with the spec of the workers: equal bytes for all of them, residuals on the server."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.parameter_server import means
from codec.torch.parameter_server.messages import Key
from codec.torch.parameter_server.table import server_of
from support.parameter_servers import SOON, gradients, raises

SPECS = [
    codec.Quantize(4),
    codec.Quantize(4, levels="odd", rounding="nearest"),
    codec.Sign(),
    codec.TopK(0.1),
    codec.Float8(group_size=None),
    codec.Ternary("base3"),
    "small",
]


def _served(rank, size, function, states, limits):
    """Serve on rank 0 from a state, and return the new state and the stats; run the function on the other ranks."""
    options = codec.options(timeout=SOON)
    if rank == 0:
        server = codec.torch.ParameterServer([0], list(range(1, size)), options=options, **limits)
        if states is not None:
            server.load_state_dict(states)
        server.serve()
        found = server.state_dict(), server.stats()
    else:
        with codec.torch.ParameterClient([0], options=options) as client:
            found = function(client, rank - 1), client.stats()
    dist.barrier()
    return found


def _serve(pool, function, state=None, **limits):
    """Return the results of the workers, the state of the server, and the stats of all ranks."""
    found = pool.run(_served, function, state, limits)
    return [result for result, _ in found[1:]], found[0][0], [stats for _, stats in found]


class _Steps:
    """Steps `begin` to `end` of a worker: pushes lossless gradients, and returns exact means and means by a spec."""

    def __init__(self, spec, begin, end, dtype=torch.float32):
        self.spec, self.begin, self.end, self.dtype = spec, begin, end, dtype

    def __call__(self, client, worker):
        client.init(gradients(worker, dtype=self.dtype))
        found = []
        for step in range(self.begin, self.end):
            client.push(step, gradients(worker, step, dtype=self.dtype))
            found.append(client.pull(step, gradients(worker), spec=self.spec))
        return found


def _exact(step, workers, dtype=torch.float32):
    every = [gradients(w, step, dtype=dtype) for w in range(workers)]
    frames = {name: [codec.encode(g[name]) for g in every] for name in every[0]}
    return {n: torch.as_tensor(codec.reduce(f, op="mean", like=torch.empty(0))).to(dtype) for n, f in frames.items()}


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_all_workers_receive_equal_means_and_the_residual_holds_the_rest(pools, spec):
    steps = 5
    found, state, _ = _serve(pools(3), _Steps(spec, 0, steps))
    exact = [_exact(step, 2) for step in range(steps)]
    for name in exact[0]:
        assert all(torch.equal(found[0][step][name], found[1][step][name]) for step in range(steps)), name
    if spec == codec.Ternary("base3"):  # no contraction
        assert set(state) == {"format", "role", "version"}
        return
    for name in exact[0]:
        n = exact[0][name].numel()
        residual = state[f"{name}[0:{n}]"] if n else torch.zeros(0)
        sent = sum(found[0][step][name].double() for step in range(steps)).flatten()
        total = sum(exact[step][name].double() for step in range(steps)).flatten()
        assert torch.allclose(sent + residual, total, atol=1e-5), name
    assert any(x.abs().max() > 0 for x in state.values() if isinstance(x, torch.Tensor))


def test_residuals_of_bfloat16_keys_hold_the_rest_of_lossless_means(pools):
    dtype = torch.bfloat16
    found, state, _ = _serve(pools(3), _Steps(codec.Quantize(4), 0, 4, dtype))
    for name in ("layer3.weight", "scalar"):
        sent = sum(found[0][step][name].double() for step in range(4)).flatten()
        total = sum(_exact(step, 2, dtype)[name].double() for step in range(4)).flatten()
        assert torch.allclose(sent + state[f"{name}[0:{sent.numel()}]"], total, atol=1e-5), name


def test_restored_server_continues_bit_identically(pools):
    spec = codec.Quantize(4)
    whole, end, _ = _serve(pools(3), _Steps(spec, 0, 6))
    first, state, _ = _serve(pools(3), _Steps(spec, 0, 3))
    second, again, _ = _serve(pools(3), _Steps(spec, 3, 6), state)
    fresh, _, _ = _serve(pools(3), _Steps(spec, 3, 6))
    for name in ("layer4.weight", "scalar", "zero on one"):
        for step, means_of in enumerate(first[0] + second[0]):
            assert torch.equal(means_of[name], whole[0][step][name]), (step, name)
    assert not torch.equal(fresh[0][0]["layer4.weight"], second[0][0]["layer4.weight"])
    assert end.keys() == again.keys()
    assert all(torch.equal(x, again[n]) for n, x in end.items() if isinstance(x, torch.Tensor))


def test_server_without_feedback_keeps_no_residual_and_refuses_top_k(pools):
    spec = codec.Quantize(4, levels="odd", rounding="nearest")
    found, state, _ = _serve(pools(3), _Steps(spec, 0, 2), feedback=False)
    assert set(state) == {"format", "role", "version"}
    for step in range(2):
        for name, exact in _exact(step, 2).items():
            want = torch.as_tensor(codec.decode(codec.encode(exact, spec), like=torch.empty(0)))
            assert torch.equal(found[0][step][name], want)
    _serve(pools(3), _top_k_without_feedback, feedback=False)


def _top_k_without_feedback(client, worker):
    client.init({"a": (4,)})
    client.push(0, {"a": torch.ones(4)})
    with raises(codec.SpecError, "needs error feedback.*create the server with feedback=True"):
        client.pull(0, ["a"], spec=codec.TopK(0.1))


def _averages(client, worker):
    x = {"a": torch.randn(40_000, generator=torch.Generator().manual_seed(worker))}
    client.init(x)
    how = {"mean_spec": codec.Quantize(4)}
    return [client.average(step, x, s, **how)["a"] for step, s in enumerate([codec.Quantize(4), codec.Ternary()] * 20)]


def test_average_compresses_both_directions(pools):
    found, _, stats = _serve(pools(3), _averages)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    exact = sum(torch.randn(40_000, generator=torch.Generator().manual_seed(w)) for w in range(2)) / 2
    assert (sum(found[0]) / 40 - exact).square().mean().sqrt() < 0.2
    server, *clients = stats
    assert 4 < 8 * clients[0].received_nbytes / (40 * 40_000) < 4.7  # bits per value: 4, and scales
    # Clients return their stats before their close requests
    assert 0 < server.sent_nbytes - sum(c.received_nbytes for c in clients) < 100
    assert 0 < server.received_nbytes - sum(c.sent_nbytes for c in clients) < 100


def _wrong(client, worker):
    client.init({"a": (10, 100), "b": (64,), "n": torch.zeros(3, dtype=torch.int32)})
    x = {"a": torch.ones(10, 100), "b": torch.ones(64)}
    for how in ("max", "exact_mean"):
        with raises(codec.SpecError, f"reduce='{how}' has exact results"):
            client.pull(0, ["a"], reduce=how, spec=codec.Sign())
    for spec in (codec.Delta(), codec.Truncate()):
        with raises(codec.SpecError, "which this call does not take"):
            client.pull(0, ["a"], spec=spec)
    client.push(0, x | {"n": torch.ones(3, dtype=torch.int32)})
    with raises(codec.SpecError, "'n' is int32, and a mean needs floats"):
        client.pull(0, ["n"], spec=codec.Sign())
    with raises(codec.SpecError, "'a': scale=0.5 is smaller"):
        client.pull(0, ["a"], spec=codec.Ternary(scale=0.5))
    client.push(1, x)
    store = dist.distributed_c10d._get_default_store()
    if worker == 0:
        mean = client.pull(1, ["a"], spec=codec.Sign())["a"]
        store.set("pulled", "")
    else:
        store.wait(["pulled"])
        with raises(codec.SpecError, "all workers must pull with one spec, but got Quantize.* after Sign"):
            client.pull(1, ["a"], spec=codec.Quantize(4))
        mean = None
    client.pull(1, ["b"])
    client.push(2, x | {"a": torch.full((10, 100), float("nan") if worker else 1.0)})
    with raises(codec.PeerError, "'a': the mean holds NaN or Inf") as raised:
        client.pull(2, ["b", "a"], spec=codec.Sign())
    assert raised.value.code == codec.Status.NONFINITE
    client.push(3, x)
    return mean, client.pull(3, ["b", "a"], spec=codec.Sign())


def test_wrong_specs_and_nan_are_errors_that_leave_residuals_unchanged(pools):
    found, state, _ = _serve(pools(3), _wrong)
    assert torch.equal(found[0][1]["a"], found[1][1]["a"])
    assert found[0][1]["b"].tolist() == [1.0] * 64
    assert sorted(n for n in state if "[" in n) == ["a[0:1000]", "b[0:64]"]
    assert state["b[0:64]"].abs().max() == 0  # "b" was encoded twice before a later key had an error


def _lost(client, worker):
    x = {"a": torch.arange(100.0)}
    client.init(x)
    client.push(0, x)
    first = client.pull(0, ["a"], spec=codec.Sign())["a"]
    if worker == 1:
        client._session.links.close()
        return first, None
    for step in range(1, 1000):
        try:
            return first, client.average(step, x, codec.Lossless(), mean_spec=codec.Sign())["a"]
        except codec.PeerError:
            continue
    return None


def test_residual_is_carried_over_a_lost_worker(pools):
    found, state, _ = _serve(pools(3), _lost)
    first, second = found[0]
    assert torch.allclose(first + second + state["a[0:100]"], 2 * torch.arange(100.0), atol=1e-3)


def _out_of_order(client, worker):
    steps = [{"a": torch.linspace(-1, 1 + step, 50)} for step in range(3)]
    client.init(steps[0])
    for step, x in enumerate(steps):
        client.push(step, x)
    return sum(client.pull(step, ["a"], spec=codec.Sign())["a"] for step in (2, 0, 1))


def test_residual_is_exact_if_steps_in_flight_are_pulled_out_of_order(pools):
    found, state, _ = _serve(pools(3), _out_of_order)
    assert torch.equal(*found)
    exact = sum(torch.linspace(-1, 1 + step, 50) for step in range(3))
    assert torch.allclose(found[0] + state["a[0:50]"], exact, atol=1e-5)


@pytest.mark.parametrize("text", [b"\xff", b"Sign(", b"tiny", b"Delta()", b"x" * 2000, b"(" * 1000, b"Sign(seed=1)"])
def test_spec_of_a_request_that_is_not_valid_is_an_error(text):
    with pytest.raises((codec.FrameError, codec.SpecError)):
        means.spec_in(text)


def test_spec_of_a_request_round_trips():
    for spec in [codec.Lossless(), codec.Lossless(model="flat"), *(s for s in SPECS if isinstance(s, codec.Spec))]:
        assert means.spec_in(means.text_of(spec).encode()) == spec


def test_state_of_another_server_or_size_is_refused():
    encoder = means.MeanEncoder([0], 0, feedback=True)
    key = Key("a", "float32", (4,))
    with encoder.transaction():
        encoder.encode(key, 0, torch.arange(4.0), codec.Sign())
    state = encoder.state_dict()
    for wrong in (
        codec.ErrorFeedback(codec.Sign()).state_dict() | {"a[0:4]": np.zeros(4, np.float32)},
        {**state, "a[1:4]": torch.zeros(3)} | {"a[0:4]": torch.zeros(4)},
        {**{n: x for n, x in state.items() if n != "a[0:4]"}, "a[1:4]": torch.zeros(3)},
        {**state, "a[0:4]": torch.full((4,), float("nan"))},
        {},
    ):
        with pytest.raises(codec.StateError):
            encoder.load_state_dict(wrong)
    other = [r for r in (0, 1) if r != server_of("a", [0, 1])]
    with pytest.raises(codec.StateError, match="another server"):
        means.MeanEncoder([0, 1], other[0], feedback=True).load_state_dict(state)
    encoder.load_state_dict(state)
    assert torch.equal(encoder.state_dict()["a[0:4]"], state["a[0:4]"])
    encoder.load_state_dict({**{n: x for n, x in state.items() if n != "a[0:4]"}, "a[0:3]": torch.zeros(3)})
    with pytest.raises(codec.StateError, match="has 3 values, but the key has 4"):
        encoder.encode(key, 1, torch.arange(4.0), codec.Sign())
