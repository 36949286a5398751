"""codec.integrations.flower compresses messages of real Flower strategies and client apps."""

import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg

import codec
from codec.integrations.flower import RESIDUALS, Compressed, CompressionMod, pack
from support.documentation import blocks
from support.federation import Federation, reply_of, trained

NODES = 3
BF16 = np.dtype(ml_dtypes.bfloat16)


class Average(Compressed, FedAvg):
    pass


class Adam(Compressed, FedAdam):
    pass


def start():
    rng = np.random.default_rng(0)
    return {
        "weight": rng.standard_normal((64, 32)).astype(np.float32),
        "bias": np.zeros(32),
        "steps": np.array(0),
    }


def record(values):
    return ArrayRecord({name: Array(x) for name, x in values.items()})


def moved(values, node):
    """Return a client's arrays after a fake training step, which depends on the node and the round."""
    rng = np.random.default_rng([node, int(values["steps"])])
    return {
        "weight": values["weight"] + np.float32(0.01) * rng.standard_normal((64, 32)).astype(np.float32),
        "bias": values["bias"] + 0.01 * rng.standard_normal(32),
        "steps": values["steps"] + 1,
    }


def app(mods, seen=None):
    made = ClientApp(mods=mods)

    @made.train()
    def train(message, context):
        values = {name: a.numpy() for name, a in message.content["arrays"].items()}
        values["steps"] = np.int64(round(float(values["steps"])))
        if seen is not None:
            seen.append(values)
        return reply_of(message, moved(values, context.node_id), examples=context.node_id)

    @made.evaluate()
    def evaluate(message, context):
        values = {name: a.numpy() for name, a in message.content["arrays"].items()}
        reply = reply_of(message, {}, loss=np.abs(values["weight"]).sum())
        del reply.content["arrays"]
        return reply

    return made


def outcome(strategy, mods, rounds=3, tamper=None, seen=None):
    federation = Federation(app(mods, seen), NODES, tamper)
    result = trained(federation, strategy, record(start()), rounds)
    return {name: a.numpy() for name, a in result.arrays.items()}, federation


@pytest.mark.parametrize("spec", ["lossless", codec.Delta()])
@pytest.mark.parametrize(("plain", "compressed"), [(FedAvg, Average), (FedAdam, Adam)])
def test_lossless_training_is_bit_identical_to_flowers(spec, plain, compressed):
    expected, raw = outcome(plain(), [])
    found, sent = outcome(compressed(), [CompressionMod(spec)])
    assert sent.errors == {}
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, strict=True)
    assert sent.up < raw.up
    assert sent.down < raw.down


def test_residuals_are_what_replies_left_out():
    """Over all rounds, a client's sent changes plus its residual equal its changes, up to rounding."""
    sent, true = [], []

    class Recording(Average):
        def aggregate_train(self, server_round, replies):
            before = {n: base["arrays", "weight"] for n, base in self._bases.items()}
            decoded = [self._decoded(r) for r in replies]
            weight = {r.metadata.src_node_id: r.content["arrays"]["weight"].numpy() for r in decoded}
            sent.append(weight[1] - before[1])
            step = moved({"weight": before[1], "bias": 0, "steps": np.int64(server_round - 1)}, 1)
            true.append(step["weight"] - before[1])
            return super().aggregate_train(server_round, decoded)

    _, federation = outcome(
        Recording(), [CompressionMod(codec.Quantize(2, levels="odd", rounding="nearest"))], rounds=5
    )
    residual = federation.context(1).state[RESIDUALS]["arrays/weight"].numpy()
    assert np.abs(residual).max() > 1e-3
    np.testing.assert_allclose(sum(sent) + residual, sum(true), atol=2e-6)
    assert "arrays/steps" not in federation.context(1).state[RESIDUALS]


def test_each_client_has_residuals_of_its_own():
    _, federation = outcome(Average(), [CompressionMod("small")])
    one, two = (federation.context(n).state[RESIDUALS]["arrays/weight"].numpy() for n in (1, 2))
    assert not np.array_equal(one, two)


HOSTILE = {
    "truncated": lambda a: Array(a.dtype, a.shape, a.stype, a.data[:-1]),
    "flipped": lambda a: Array(a.dtype, a.shape, a.stype, a.data[:40] + bytes([a.data[40] ^ 1]) + a.data[41:]),
    "empty": lambda a: Array(a.dtype, a.shape, a.stype, b""),
    "another shape": lambda a: Array(a.dtype, a.shape, "codec.frame", codec.encode(np.zeros((1 << 20,), np.float32))),
    "another base": lambda a: Array(a.dtype, a.shape, "codec.difference", b"\0" * 8 + a.data[8:]),
    "bits of text": lambda a: Array(a.dtype, a.shape, a.stype, b"[1, 2, 3]" * 100),
}


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("spec", ["lossless", codec.Delta(), codec.Quantize(4)])
def test_hostile_reply_is_an_error_of_its_client_alone(how, spec):
    """A hostile reply is counted as its client's failure, and the round averages the other clients."""

    def tamper(node, content):
        if node == 2:
            content["arrays"]["weight"] = HOSTILE[how](content["arrays"]["weight"])

    failures = []

    class Watched(Average):
        def _check_and_log_replies(self, replies, is_train, validate=True):
            valid, failed = super()._check_and_log_replies(replies, is_train, validate)
            failures.extend((r.metadata.src_node_id, r.error.reason) for r in failed)
            return valid, failed

    found, _ = outcome(Watched(), [CompressionMod(spec)], rounds=1, tamper=tamper)
    assert [node for node, _ in failures] == [2]
    assert failures[0][1].startswith("the reply cannot be decoded: ")

    def only_others(node, content):
        content["metrics"]["num-examples"] = 0 if node == 2 else node

    expected, _ = outcome(Average(), [CompressionMod(spec)], rounds=1, tamper=only_others)
    np.testing.assert_allclose(found["weight"], expected["weight"], rtol=1e-6, atol=1e-7)


def test_unknown_array_is_an_error_of_its_client():
    def tamper(node, content):
        if node == 2:
            frame = codec.encode(np.zeros(1 << 20, np.float32))
            content["arrays"]["more"] = Array("float32", (1 << 20,), "codec.frame", frame)

    found, _ = outcome(Average(), [CompressionMod()], rounds=1, tamper=tamper)
    assert "more" not in found


def test_values_that_a_codec_refuses_are_an_error_of_their_client_and_keep_its_residuals():
    states = []

    def break_down(message, context, call_next):
        reply = call_next(message, context)
        if "arrays" in reply.content and context.node_id == 2 and message.content["config"]["server-round"] == 2:
            reply.content["arrays"]["weight"] = Array(np.full((64, 32), np.nan, np.float32))
            states.append(context.state[RESIDUALS]["arrays/bias"].numpy())
        return reply

    federation = Federation(app([CompressionMod("small"), break_down]), NODES)
    trained(federation, Average(), record(start()), 2)
    assert list(federation.errors) == [2]
    assert isinstance(federation.errors[2], codec.ArgumentError)
    np.testing.assert_array_equal(federation.context(2).state[RESIDUALS]["arrays/bias"].numpy(), states[0])


@pytest.mark.parametrize("spec", ["lossless", codec.Delta(), codec.Quantize(4)])
def test_bfloat16_models_are_sent_in_16_bits(spec):
    """bfloat16, which Flower's arrays do not support, takes 2 bytes per value; the strategy averages in float32."""
    first = np.random.default_rng(0).standard_normal((64, 32)).astype(BF16)
    made = ClientApp(mods=[CompressionMod(spec)])

    @made.train()
    def train(message, context):
        weight = message.content["arrays"]["weight"].numpy()
        assert weight.dtype == np.float32
        model = weight.astype(BF16)
        np.testing.assert_array_equal(model.astype(np.float32), weight)  # float32 can represent the model exactly
        model += np.asarray(0.125 * context.node_id, BF16)
        return reply_of(message, pack({"weight": model}))

    federation = Federation(made, NODES)
    result = trained(federation, Average(fraction_evaluate=0), pack({"weight": first}), 2)
    assert federation.errors == {}
    found = result.arrays["weight"].numpy()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, first.astype(np.float32) + 0.5, atol=0.05)
    assert federation.up < 2 * NODES * 64 * 32 * 2


def test_stochastic_rounding_differs_between_clients_and_rounds():
    sent = []

    def tamper(node, content):
        sent.append(content["arrays"]["weight"].data)

    outcome(Average(), [CompressionMod(codec.Ternary(), feedback=False)], rounds=2, tamper=tamper)
    assert len({data[8:] for data in sent}) == 2 * NODES


@pytest.mark.parametrize(
    ("spec", "how"),
    [
        (codec.Ternary(), {}),
        (codec.TopK(), {"feedback": False}),
        (codec.Truncate().bind(codec.optimizers.SGD(lr=0.1), theta=np.ones(3, np.float32)), {}),
        ("no such preset", {}),
    ],
)
def test_specs_that_cannot_serve_are_refused_at_once(spec, how):
    with pytest.raises(codec.SpecError):
        CompressionMod(spec, **how)


@pytest.mark.parametrize(
    "spec", [codec.Quantize(4), codec.TopK(), codec.Sign(group_size=1024), codec.Float8(), codec.Delta()]
)
def test_scalars_and_empty_arrays_arrive(spec):
    """A learned temperature is a 0-d array, which keeps its shape in every round."""
    first = {"scale": np.array(2.6592, np.float32), "empty": np.zeros((0, 4), np.float32), "one": np.ones(1)}
    made = ClientApp(mods=[CompressionMod(spec)])

    @made.train()
    def train(message, context):
        values = {name: a.numpy() for name, a in message.content["arrays"].items()}
        return reply_of(message, {name: np.asarray(x + 0.01, x.dtype) for name, x in values.items()})

    federation = Federation(made, NODES)
    result = trained(federation, Average(fraction_evaluate=0), record(first), 3)
    assert federation.errors == {}
    for name, x in first.items():
        found = result.arrays[name].numpy()
        assert found.shape == x.shape
        np.testing.assert_allclose(found, x + 0.03, atol=0.02)


def test_mod_without_the_strategy_is_logged_once(caplog):
    _, federation = outcome(FedAvg(), [CompressionMod("small")])
    assert federation.errors == {}
    [line] = [r.message for r in caplog.records if r.name == "codec.flower"]
    assert "the strategy must be codec.integrations.flower.Compressed" in line


def test_strategy_without_the_mod_is_logged_once(caplog):
    outcome(Average(), [])
    [line] = [r.message for r in caplog.records if r.name == "codec.flower"]
    assert line.startswith("3 of 3 clients failed, one of them with ")
    assert "need the mod codec.integrations.flower.CompressionMod" in line
    caplog.clear()

    def only_decodes(message, context, call_next):
        given = message.content["arrays"]
        message.content["arrays"] = ArrayRecord({n: Array(codec.decode(a.data)) for n, a in given.items()})
        return call_next(message, context)

    outcome(Average(fraction_evaluate=0), [only_decodes])
    [line] = [r.message for r in caplog.records if r.name == "codec.flower"]
    assert line.startswith("3 of 3 clients reply with uncompressed arrays: ")


def test_a_complete_integration_logs_nothing(caplog):
    outcome(Average(), [CompressionMod("small")])
    assert not [r for r in caplog.records if r.name == "codec.flower"]


def test_example_trains():
    command = [sys.executable, "-P", "examples/federated.py", "--rounds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert re.fullmatch(
        r"small: replies have 1\d\.\d% of the bytes of float32; relative error .* 0\.\d+\n", done.stdout
    )


def test_page_runs():
    """The page's client app and strategy train, starting from a bfloat16 model."""
    names = {}
    torch.manual_seed(0)
    for block in blocks("Flower", "docs/guides/federated-learning.md"):
        exec(block, names)
    app, net = names["app"], names["net"]

    @app.train()
    def train(message, context):
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        with torch.no_grad():
            net.bias.add_(context.node_id)
        return reply_of(message, pack(net.state_dict()))

    federation = Federation(app, NODES)
    result = trained(federation, names["Strategy"](fraction_evaluate=0), names["initial"], 1)
    assert federation.errors == {}
    before = torch.from_numpy(codec.decode(names["initial"]["bias"].data).astype(np.float32))
    torch.testing.assert_close(torch.from_numpy(result.arrays["bias"].numpy()), before + 2, atol=0.1, rtol=0)
