"""bench/gcomp: baselines, Huffman codes, the time model of a step, and measurements agree with their definitions."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

import codec
from support.ranks import RankPool

sys.path.insert(0, str(Path(__file__).parents[3] / "bench/gcomp"))
import gcomp
import huffman
import methods
import report
import sizes
import trainings
from runs import PLAIN, Job, Run, train

pytestmark = pytest.mark.nightly

STEPS = 13  # training steps: enough for PowerSGD, which compresses from step 10 on
TRAINED = (PLAIN, methods.ZLIB, methods.FP16, methods.TOP_K, methods.RANDOM_K, methods.POWER_SGD, methods.NEAR)


def counts_of(*values):
    return np.array([*values, *[0] * (huffman.SYMBOLS - len(values))], np.int64)


# Tests of Huffman codes


def test_native_huffman_code_has_the_textbook_lengths():
    lengths = huffman.native_lengths(counts_of(8, 4, 2, 1))  # the escape code has weight 1
    assert lengths[:4].tolist() == [1, 2, 3, 4]
    assert lengths[huffman.SYMBOLS] == 4
    assert not lengths[4 : huffman.SYMBOLS].any()


def test_exponents_cost_at_least_their_entropy_and_least_with_native_codes():
    with np.load(Path(__file__).parents[3] / "bench/data/cnn_float32.npz") as file:
        counts = sizes.exponent_counts(file["grad"])
    native = huffman.bits(counts, huffman.native_lengths(counts))
    capped = huffman.bits(counts, huffman.capped_lengths(codec.Codebook.from_counts(counts)))
    assert huffman.entropy(counts) <= native <= capped < huffman.entropy(counts) + 0.1


def test_exponents_without_a_code_are_escaped():
    lengths = huffman.native_lengths(counts_of(3, 1))
    assert huffman.bits(counts_of(0, 0, 5), lengths) == lengths[huffman.SYMBOLS] + huffman.LITERAL


# Tests of baselines: other compression methods


def train_all(rank, size):
    """Train by each method; return the runs, and the number of values that PowerSGD should send by its formula."""
    runs = {m: train(Job("text-adamw", m, 0, STEPS, batch=4), lambda _: None, methods.add_hook) for m in TRAINED}
    model = sizes.TASKS["text-adamw"](0, STEPS).model
    return runs, methods.power_sgd_values([tuple(p.shape) for p in model.parameters()])


@pytest.fixture(scope="module")
def trained():
    """Return the results of train_all on each of two ranks."""
    with RankPool(2, timeout=300) as ranks:
        ranks.new_group()
        return ranks.run(train_all)


@pytest.mark.parametrize("method", TRAINED)
def test_baselines_keep_replicas_identical(trained, method):
    assert trained[0][0][method].digest == trained[1][0][method].digest


def test_lossless_baseline_is_bit_identical_to_no_compression(trained):
    runs = trained[0][0]
    assert runs[methods.ZLIB].digest == runs[PLAIN].digest
    assert not trainings.deviations(runs[methods.ZLIB], runs[PLAIN]).any()
    assert runs[methods.TOP_K].digest != runs[PLAIN].digest


def test_baselines_count_the_bytes_that_they_send(trained):
    runs, power_sgd_values = trained[0]
    # Bytes per rank and step: with two ranks, an all-reduce sends each float32 value once
    plain = runs[PLAIN].values * 4

    def sent(method):
        return {round(n) for n in runs[method].sent}

    kept = methods.kept(runs[PLAIN].values)
    assert sent(PLAIN) == {plain}
    assert sent(methods.FP16) == {plain // 2}
    assert sent(methods.TOP_K) == {8 * kept}
    assert sent(methods.RANDOM_K) == {4 * kept}
    assert all(n < 0.95 * plain for n in sent(methods.ZLIB))
    assert {round(n) for n in runs[methods.POWER_SGD].sent[: methods.POWER_START]} == {plain}
    assert {round(n) for n in runs[methods.POWER_SGD].sent[methods.POWER_START :]} == {4 * power_sgd_values}


def test_near_lossless_gradients_change_the_loss_less_than_float16(trained):
    runs = trained[0][0]
    near, fp16 = (trainings.deviations(runs[m], runs[PLAIN]).max() for m in (methods.NEAR, methods.FP16))
    assert 0 < near < fp16


# Tests of sizes.py, which measures frame sizes during training


def test_sizes_of_a_short_training(monkeypatch):
    steps, ticks = 12, []
    # Zstandard is not in the `test` extra
    monkeypatch.setattr(sizes, "METHODS", tuple(m for m in sizes.METHODS if m != methods.ZSTD))
    monkeypatch.setattr(sizes, "INTERVAL", 4)
    monkeypatch.setattr(sizes, "DELAY", 2)
    result = sizes.measure("text-adamw", steps, 2, lambda: ticks.append(1))
    assert len(ticks) == steps
    assert result.steps == [6, 12]
    saved = {m: sizes.late(result, v) for m, v in result.saved.items()}
    assert 0 < saved[methods.LOSSLESS] < saved[methods.PLANE] < saved[methods.NEAR] < saved[methods.BY_BIT] < 1
    assert saved[methods.FP16] == 0.5
    by_level = [sizes.late(result, result.strategies[name]["error"]) for name, _ in sizes.STRATEGIES[:3]]
    assert by_level == sorted(by_level)
    assert max(result.strategies["optimizer metric, guard exact"]["changed"]) < 0.01
    bits = result.exponents
    for source in sizes.SOURCES:
        assert bits["entropy"]["capped"][-1] <= bits[source]["capped"][-1]
    assert bits[sizes.OWN]["capped"][-1] < bits[sizes.PRIOR]["capped"][-1]


def test_distributions_of_a_short_training():
    result = gcomp.distributions.measure("text-adamw", 6, 2, lambda: None)
    assert result.steps == [2, 3, 6]
    for i in range(3):
        nonzero = round(result.values * (1 - result.zeros[i]))
        assert sum(result.exponents[i]) == nonzero
        assert 0.9 * nonzero < sum(result.ratios[i]) <= nonzero
        low, middle, high = (
            gcomp.distributions.quantile(result.exponents[i], q) for q in gcomp.distributions.QUANTILES
        )
        assert -40 < low < middle < high < 0
        assert 0.9 < gcomp.distributions.top_share(result.exponents[i]) <= 1
        assert 0 < result.zeros[i] < 0.5  # zeros: embeddings of bytes that do not occur in the batch
        assert result.entropy[i] < 5
    assert gcomp.distributions.counts(np.array([1.5, -2.0, 0.25, 3.0], np.float32))[125:129] == [1, 0, 1, 2]


# Tests of the time model of a training step, and of the time to an accuracy


def timed(method, ranks, seconds, sent, cpu=0.0, curve=((20, 1.0, 0.9),)):
    """Return the record of a run with 20 equal steps over a link of 8 Mbit/s (1 MB per second)."""
    n, values = 20, 1000
    run = Run("digits-sgd", method, 0, n, values, nbytes=sent, curve=list(curve))
    run.seconds, run.sent, run.cpu_seconds, run.losses = [seconds] * n, [sent] * n, [cpu] * n, [1.0] * n
    return trainings.Timed(run, ranks, "8mbit", 8e6)


def test_model_of_an_iteration_adds_cpu_time_and_sending():
    assert trainings.model_seconds(timed(PLAIN, 2, 0, 1e6, cpu=0.5), 2) == 1.5
    assert trainings.model_seconds(timed(PLAIN, 2, 0, 1e6, cpu=0.5), 2, ranks_a_core=2) == 2


@pytest.mark.parametrize(("method", "factor"), [(PLAIN, 2 * 7 / 8), (methods.FP16, 2 * 7 / 8), (methods.TOP_K, 7)])
def test_bytes_scale_with_the_number_of_ranks_as_the_collective_does(method, factor):
    assert trainings.sent_by(method, 100, 2, 8) == pytest.approx(100 * factor)


def test_simulated_numbers_of_ranks_have_no_measured_time():
    rows = trainings.iteration_rows([timed(PLAIN, 2, 2.0, 1e6), timed(methods.FP16, 2, 1.0, 5e5)], [16])
    speedups = {(r["method"], r["ranks"]): (r["speedup"], r["model_speedup"]) for r in rows}
    assert speedups[methods.FP16, 2] == (2, 2)
    assert math.isnan(speedups[methods.FP16, 16][0])
    assert speedups[methods.FP16, 16][1] == pytest.approx(2)


def test_fastest_training_of_each_method_counts():
    slow, fast, other = timed(PLAIN, 2, 2.0, 1), timed(PLAIN, 2, 1.0, 1), timed(PLAIN, 4, 3.0, 1)
    assert trainings.fastest([slow, fast, other]) == [fast, other]


def test_time_to_accuracy_ends_at_the_first_good_evaluation():
    curve = [(5, 1.0, 0.5), (10, 1.0, 0.895), (20, 1.0, 0.9)]
    rows = trainings.accuracy_rows(
        [
            timed(PLAIN, 2, 2.0, 4000, curve=curve),
            timed(methods.FP16, 2, 1.0, 2000, curve=curve),
            timed(methods.TOP_K, 2, 0.1, 80, curve=[(20, 1.0, 0.8)]),
        ]
    )
    plain, fp16, top_k = rows
    assert (plain["seconds"], fp16["seconds"], fp16["speedup"], fp16["saved"]) == (20, 10, 2, 0.5)
    assert math.isinf(top_k["seconds"])
    assert top_k["speedup"] == 0


# Tests of the command line


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--steps", "0"], "--steps must be above 0, got 0"),
        (["--figures", "deviations", "--tasks", "text-adamw", "--links", "10furlong"], "or none: '10furlong'"),
        (["--figures", "speed"], "invalid choice: 'speed'"),
    ],
)
def test_command_line_rejects_wrong_arguments(given, message, capsys):
    with pytest.raises(SystemExit):
        gcomp.parse_arguments(given)
    assert message in capsys.readouterr().err


@pytest.mark.nightly
def test_quick_run_writes_json_and_tables(tmp_path, monkeypatch, capsys):
    out = tmp_path / "gcomp.json"
    given = ["--quick", "--figures", "deviations", "--tasks", "text-adamw", "--steps", "12", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["gcomp.py", *given])
    gcomp.main()
    found = json.loads(out.read_text())
    rows = {r["method"]: r for r in found["deviations"]["rows"]}
    assert set(rows) == set(gcomp.QUICK_METHODS)
    assert rows[methods.FP16]["saved"] == pytest.approx(0.5)
    report.show("deviations", found)
    first, second = capsys.readouterr().out.split("## deviations")[1:]
    assert first.strip() == second.strip()
    assert "| near, shared, by bit |" in first
