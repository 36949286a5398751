"""bench/pipeline: its TAH-Quant coder follows the paper, and its time model and command line work as documented."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from support.tiers import HANG_SECONDS

sys.path.insert(0, str(Path(__file__).parents[3] / "bench/pipeline"))
import outcomes
import pipeline
import simulation
import stages
import tables
import tah_quant
import tasks
from systems import AQ, DIRECT, FP32, FP32_TCP, TAH, Setting, allowed_speedup, message_nbytes, settings_of

pytestmark = pytest.mark.nightly

FW4 = Setting(AQ, "fw4bw8")
SMALL = tasks.Sizes(width=64, context=16, batch=64, samples=192, epochs=2, pretraining=1)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def activations(samples=4, tokens=8, channels=128, seed=0):
    return np.random.default_rng(seed).standard_normal((samples, tokens, channels), np.float32)


def round_trip(x):
    coder = tah_quant.TahQuant()
    message = coder.encode(x)
    return message, coder.decode(message, out=np.empty_like(x))


# Tests of the TAH-Quant coder


@pytest.mark.parametrize("bits", [1, 3, 4, 6, 8])
def test_packed_codes_return(bits):
    codes = np.random.default_rng(0).integers(0, 1 << bits, 80).astype(np.uint8)
    packed = tah_quant.pack(codes, bits)
    assert len(packed) == 10 * bits
    assert np.array_equal(tah_quant.unpack(np.frombuffer(packed, np.uint8), bits), codes)


def test_tah_quant_sends_4_bits_for_four_fifths_of_the_tiles():
    x = activations()
    message, y = round_trip(x)
    assert len(message) == tah_quant.activation_nbytes(x.size, samples=len(x))
    assert np.linalg.norm(y - x) / np.linalg.norm(x) < 0.15


def test_tah_quant_gives_fewer_bits_to_tiles_of_low_entropy():
    x = activations(samples=1, tokens=5, channels=64)
    x[0, 3] = 0.001 * np.sign(x[0, 3])
    x[0, 3, ::8] = 1
    assert np.flatnonzero(tah_quant.low_tiles(x)[0]).tolist() == [3]


def test_tah_quant_rotates_tiles_with_an_outlier():
    x = activations(samples=1, tokens=10, channels=64)
    plain, _ = round_trip(x)
    x[0, 4, 17] = 100
    message, y = round_trip(x)
    assert len(message) == len(plain) + 6  # 6 more bytes: positions of up to 8 outliers
    tile, other = x[0, 4], y[0, 4]
    unrotated = np.rint(tile * 7 / 100) * 100 / 7
    assert np.linalg.norm(other - tile) < 0.7 * np.linalg.norm(unrotated - tile)


def test_tah_quant_decodes_constant_and_zero_tiles_exactly():
    x = np.zeros((2, 2, 64), np.float32)
    x[1] = 0.5
    assert np.array_equal(round_trip(x)[1], x)


@pytest.mark.parametrize("scale", [1.0, 1e-9, 0.0])
def test_tah_quant_gradients_have_6_bits_and_no_bias(scale):
    g = np.float32(scale) * activations()
    coder, mean = tah_quant.TahQuant(), np.zeros_like(g)
    messages = [coder.encode_gradient(g) for _ in range(50)]
    for message in messages:
        mean += coder.decode_gradient(message, out=np.empty_like(g)) / np.float32(50)
    assert {len(m) for m in messages} == {tah_quant.gradient_nbytes(g.size)}
    assert np.linalg.norm(mean - g) <= 0.01 * np.linalg.norm(g)


@pytest.mark.parametrize("change", [lambda m: m[:-1], lambda m: m + b"\0", lambda m: b""])
def test_tah_quant_rejects_messages_of_another_size(change):
    x = activations()
    with pytest.raises(ValueError, match="bytes"):
        tah_quant.TahQuant().decode(change(tah_quant.TahQuant().encode(x)), out=x)


# Tests of simulated training


def test_simulated_delta_training_follows_fp32_and_counts_its_bytes(one_thread):
    weights = tasks.pretrained(SMALL, 2)
    runs = {s.label: simulation.train(s, tasks.LANGUAGE, 2, SMALL, weights) for s in (Setting(FP32), FW4, Setting(TAH))}
    plain, delta, tah = runs.values()
    assert len(plain.losses) == SMALL.steps
    assert np.allclose(delta.losses, plain.losses, rtol=1e-3)
    assert plain.first_nbytes == plain.later_nbytes == plain.raw_nbytes
    assert 3.5 < delta.raw_nbytes / delta.first_nbytes < 64 / 17
    assert 4.6 < delta.raw_nbytes / delta.later_nbytes < allowed_speedup(FW4)
    assert 5.5 < tah.raw_nbytes / tah.later_nbytes <= allowed_speedup(Setting(TAH)) + 0.01
    assert delta.state_nbytes == 4 * SMALL.samples * SMALL.context * SMALL.width
    assert len(delta.change) == 1
    assert not delta.diverged


# Tests of the time to a loss, computed from steps and seconds per step


def test_time_to_a_loss_counts_steps_of_the_first_epoch_and_later_ones():
    assert outcomes.seconds_after(3, 2.0, 1.0, an_epoch=4) == 6
    assert outcomes.seconds_after(6, 2.0, 1.0, an_epoch=4) == 10
    assert outcomes.steps_to([9, 9, 3, 1, 1], 2.0, an_epoch=2) == 4
    assert math.isinf(outcomes.steps_to([9, 9, 3], 2.0, an_epoch=2))


def training(setting, losses, diverged=""):
    about = {"task": "language", "stages": 2, "setting": vars(setting), "label": setting.label}
    return about | {"losses": losses, "diverged": diverged}


def timed(setting, first, later):
    return {"stages": 2, "rate": "100mbit", "setting": vars(setting), "first": first, "later": later}


def test_outcomes_compare_times_to_the_loss_of_fp32():
    plain, direct = Setting(FP32), Setting(DIRECT, "fw2bw4")
    trainings = [
        training(plain, [4.0, 3, 2, 1]),
        training(FW4, [4.0, 3, 2, 1]),
        training(direct, [4.0, 4, 4, 4]),
        training(Setting(TAH), [4.0, 3], diverged="step 2: the loss is nan"),
    ]
    times = [timed(plain, 8, 8), timed(FW4, 4, 2), timed(direct, 1, 1), timed(Setting(TAH), 1, 1)]
    rows = {r["label"]: r for r in outcomes.outcome_rows(trainings, times, 2)}
    assert (rows[FW4.label]["seconds"], rows[FW4.label]["speedup"]) == (12, 32 / 12)
    assert rows[FW4.label]["step_speedup"] == 4
    assert math.isinf(rows[direct.label]["seconds"])
    assert tables.outcome_cell(rows[direct.label]) == "never"
    assert tables.outcome_cell(rows[Setting(TAH).label]) == "diverged"


# Tests of the command line


def test_settings_have_all_bits_for_systems_that_choose_them():
    found = settings_of([FP32, DIRECT, AQ, TAH], ["fw4bw8", "fw2bw4"])
    labels = ["FP32", "DirectQ fw4 bw8", "DirectQ fw2 bw4", "AQ-SGD fw4 bw8", "AQ-SGD fw2 bw4"]
    assert [s.label for s in found] == [*labels, "TAH-Quant fw3-4 bw6"]


def test_one_setting_is_selected_by_flags():
    flags = ["--parts", "losses", "--task", "language", "--rate", "100", "--system", "aq", "--bits", "fw3bw6"]
    args = pipeline.parse_arguments(flags)
    assert args.rates == ["100mbit"]
    assert settings_of(args.systems, args.bits) == [Setting(FP32), Setting(AQ, "fw3bw6")]


def test_default_messages_are_above_the_token_bucket():
    settings = settings_of([FP32, FP32_TCP, DIRECT, AQ, TAH], ["fw4bw8", "fw2bw4"])
    assert pipeline.check_messages(settings, tasks.Sizes()) == ""
    assert "use a --batch" in pipeline.check_messages(settings, tasks.Sizes(batch=64))
    assert message_nbytes(FW4, 131072, 32) == 131072 * 4 // 8 + 131072 // 64 * 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--bits", "fw9bw8"], "got 'fw9bw8'"),
        (["--rate", "fast"], "such as 100mbit"),
        (["--batch", "100"], "--batch must be a multiple of 32"),
        (["--epochs", "0"], "--epochs must be above 0"),
        (["--samples", "256"], "--samples must be at least"),
        (["--system", "ternary"], "invalid choice"),
    ],
)
def test_command_line_rejects_wrong_arguments(given, message, capsys):
    with pytest.raises(SystemExit):
        pipeline.parse_arguments(["--parts", "losses", *given])
    assert message in capsys.readouterr().err


# Tests with real processes


@pytest.mark.nightly
def test_pipelines_in_namespaces_train_as_the_simulation(one_thread):
    try:
        stages.netns.require()
    except stages.netns.NetworkError as e:
        pytest.skip(str(e))
    weights = tasks.pretrained(SMALL, 2)
    settings = [Setting(FP32), Setting(FP32_TCP), Setting(DIRECT, "fw4bw8"), FW4, Setting(TAH)]
    plan = stages.Plan(SMALL, tasks.LANGUAGE, 2, ["none"], [stages.Job(s) for s in settings])
    for setting, result in zip(settings, stages.run(plan, weights, lambda _: None, HANG_SECONDS), strict=True):
        assert result.label == setting.label
        simulated = simulation.train(setting, tasks.LANGUAGE, 2, SMALL, weights)
        assert result.losses == pytest.approx(simulated.losses, abs=1e-5)


@pytest.mark.nightly
def test_replicas_in_namespaces_train_with_quantized_adam(one_thread):
    try:
        stages.netns.require()
    except stages.netns.NetworkError as e:
        pytest.skip(str(e))
    sizes = dataclasses.replace(SMALL, batch=128, samples=384, epochs=4)
    kinds = (stages.FLOATS, stages.QUANTIZED_ADAM)
    jobs = [stages.Job(FW4, kind) for kind in kinds]
    plan = stages.Plan(sizes, tasks.LANGUAGE, 2, ["none"], jobs, 2)
    plain, quantized = stages.run(plan, tasks.pretrained(sizes, 2), lambda _: None, HANG_SECONDS)
    assert quantized.losses[0] == pytest.approx(plain.losses[0], abs=1e-5)
    assert quantized.losses[-1] == pytest.approx(plain.losses[-1], abs=0.1)
    assert quantized.losses[-1] < quantized.losses[0]
    assert quantized.sent[-1] < 0.8 * plain.sent[-1]


@pytest.mark.nightly
def test_quick_run_without_links_writes_json_and_tables(tmp_path, monkeypatch, capsys):
    pytest.importorskip("rich")
    out = tmp_path / "pipeline.json"
    given = ["--quick", "--parts", "losses", "coding", "--pretraining", "2", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["pipeline.py", *given])
    pipeline.main()
    found = json.loads(out.read_text())
    assert {r["label"] for r in found["losses"]} == {
        s.label for s in settings_of([FP32, DIRECT, AQ, TAH], ["fw4bw8", "fw2bw4"])
    }
    assert "| AQ-SGD fw4 bw8 " in capsys.readouterr().out
