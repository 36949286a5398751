"""bench/training: records of runs, tables of several tasks, methods per task, and models of other architectures."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "bench/training"))
import convergence
import summary
from runs import ONE_BIT, ONE_BIT_SIGNS, ORDERED, PLAIN, TASKS, Run

pytestmark = pytest.mark.nightly


def run_of(codec, seed, loss=2.0, task="text-sgd", **fields):
    curve = [(20, loss + 1, 0.2), (40, loss, 0.4)]
    return Run(task, codec, seed, 40, values=100, nbytes=500.0, cpu=0.01, losses=[3.0, loss], curve=curve, **fields)


def write(path, runs, ranks=4):
    report = {"ranks": ranks, "rows": [], "runs": [asdict(r) for r in runs]}
    path.write_text(json.dumps(summary.without_nonfinite(report)))
    return path


def test_runs_of_several_files_give_the_table_of_one_run(tmp_path, capsys):
    stopped = run_of("Ternary()", 0, residual=math.nan, stopped="at step 41: NaN")
    runs = [run_of(PLAIN, 0), stopped, run_of(PLAIN, 1, 2.2), run_of("Ternary()", 1, 2.3, residual=0.5)]
    summary.show(summary.summarize(runs, 4), 4)
    expected = capsys.readouterr().out
    ranks, loaded = summary.load([write(tmp_path / "a.json", runs[:2]), write(tmp_path / "b.json", runs[2:])])
    summary.show(summary.summarize(loaded, ranks), ranks)
    assert capsys.readouterr().out == expected
    assert "4 ranks, 40 steps, 2 seeds" in expected
    assert "Ternary(): stopped seed 0 at step 41: NaN" in expected


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([([run_of(PLAIN, 0)], 4), ([run_of(PLAIN, 1)], 2)], r"runs of \[2, 4\] ranks"),
        ([([run_of(PLAIN, 0)], 4), ([run_of(PLAIN, 0)], 4)], "two runs of"),
        ([([run_of(PLAIN, 0), run_of("Sign()", 1)], 4)], "no run of"),
        ([([], 4)], "no runs"),
    ],
)
def test_files_whose_runs_do_not_belong_together_are_refused(tmp_path, files, message):
    paths = [write(tmp_path / f"{i}.json", runs, ranks) for i, (runs, ranks) in enumerate(files)]
    with pytest.raises(ValueError, match=message):
        summary.load(paths)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ranks": 4, "runs": [{"task": 1}]}', '{"ranks": 4, "runs": [0]}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other.json has not been written by --json"):
        summary.load([path])


def test_short_names_of_codecs_differ():
    names = [summary.short(name) for name in convergence.CODECS]
    assert len(set(names)) == len(names)
    assert "Sign(group_size=1024)" in names


def test_page_has_ranges_over_tasks_and_losses_by_task(tmp_path):
    """The page has ranges over tasks, and losses by task; a loss above float32's by more than the noise is marked."""
    runs = [run_of(PLAIN, seed, loss, task) for task in ("vit", "lstm") for seed, loss in enumerate((2.0, 2.1, 2.2))]
    runs += [run_of("near", 0, 2.05, "vit"), run_of("near", 0, 1.5, "lstm"), run_of("smallest", 0, 2.5, "vit")]
    rows = summary.summarize(runs, 2)
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- overview: begin -->\nold\n<!-- overview: end -->\nbelow\n")
    summary.write_page(page, rows, 2)
    text = page.read_text()
    assert text.startswith("above\n<!-- overview: begin -->\n\n2 ranks; seeds: 1, and 3 of float32.\n\n")
    assert text.endswith("\n\n<!-- overview: end -->\nbelow\n")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    assert ["`near`", "40.0", "-0.5000 to +0.0500", "2 of 2"] in lines
    assert ["`smallest`", "40.0", "+0.5000", "0 of 1"] in lines
    assert ["float32: noise", "0.1000", "0.1000"] in lines
    assert ["`near`", "+0.0500", "-0.5000"] in lines
    assert ["`smallest`", "+0.5000 !", ""] in lines
    summary.write_page(page, rows, 2)
    assert page.read_text() == text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no lines"):
        summary.write_page(page, rows, 2)
    assert page.read_text() == "no marks"


def test_methods_are_presets_specs_and_optimizers(monkeypatch, capsys):
    def parsed(*given):
        monkeypatch.setattr(sys, "argv", ["convergence.py", *given])
        return convergence.parse_arguments()

    args = parsed("--methods", "lossless", "codecs", "Float4()", ONE_BIT, ONE_BIT_SIGNS)
    of_adamw = [PLAIN, ORDERED, "lossless", *convergence.CODECS, ONE_BIT, ONE_BIT_SIGNS]
    assert convergence.methods_of("text-adamw", args) == of_adamw
    assert convergence.methods_of("text-sgd", args) == of_adamw[:-2]
    assert convergence.methods_of("vit", parsed("--methods", "near")) == [PLAIN, "near"]
    assert set(parsed().tasks) == set(TASKS) - {"text-adamw-wide"}
    for wrong in ("nearly", "Float4(", "1"):
        with pytest.raises(SystemExit):
            parsed("--methods", wrong)
        assert wrong in capsys.readouterr().err


@pytest.mark.parametrize("task", sorted(set(convergence.STEPS) - {"digits-sgd", "text-sgd", "text-adamw"}))
def test_tasks_of_other_architectures_train(task, monkeypatch):
    """Each task's loss on a batch falls when the model trains on the batch, and the seed determines all results."""
    import architectures

    if task in ("vit", "diffusion"):
        pytest.importorskip("sklearn")
    monkeypatch.setattr(architectures, "_pretrained", lambda: architectures.GPT().state_dict())
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = []
        for _ in range(2):
            made = TASKS[task](0, 20, rank=1, world=2)
            batch = made.batch()
            losses = []
            for _ in range(6):
                made.optimizer.zero_grad()
                loss = made.loss(made.model, batch)
                loss.backward()
                made.optimizer.step()
                made.schedule.step()
                losses.append(loss.item())
            total, right, count = made.evaluate().tolist()
            found.append((losses, total))
            assert losses[-1] < losses[0]
            assert count > 0
            assert math.isnan(right) == (task == "diffusion")
        assert found[0] == found[1]
    finally:
        torch.set_num_threads(before)
