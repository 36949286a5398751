"""bench/training/convergence.py --from shows the runs that --json has written."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "bench/training"))
import convergence
from convergence import PLAIN, Run


def run_of(codec, seed, loss=2.0, task="text-sgd", **fields):
    curve = [(20, loss + 1, 0.2), (40, loss, 0.4)]
    return Run(task, codec, seed, 40, values=100, nbytes=500.0, cpu=0.01, losses=[3.0, loss], curve=curve, **fields)


def write(path, runs, ranks=4):
    report = {"ranks": ranks, "rows": [], "runs": [asdict(r) for r in runs]}
    path.write_text(json.dumps(convergence.without_nonfinite(report)))
    return path


def test_runs_of_several_files_give_the_table_of_one_run(tmp_path, capsys):
    stopped = run_of("Ternary()", 0, residual=math.nan, stopped="at step 41: NaN")
    runs = [run_of(PLAIN, 0), stopped, run_of(PLAIN, 1, 2.2), run_of("Ternary()", 1, 2.3, residual=0.5)]
    convergence.show(convergence.summarize(runs, 4), 4)
    expected = capsys.readouterr().out
    ranks, loaded = convergence.load([write(tmp_path / "a.json", runs[:2]), write(tmp_path / "b.json", runs[2:])])
    convergence.show(convergence.summarize(loaded, ranks), ranks)
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
        convergence.load(paths)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ranks": 4, "runs": [{"task": 1}]}', '{"ranks": 4, "runs": [0]}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other.json has not been written by --json"):
        convergence.load([path])


def test_short_names_of_codecs_differ():
    names = [convergence.short(name) for name in convergence.CODECS]
    assert len(set(names)) == len(names)
    assert "Sign(group_size=1024)" in names
