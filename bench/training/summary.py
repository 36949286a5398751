"""Tables, plots and files of training runs (bench/training/runs.py)."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from runs import ORDERED, PLAIN, Run, values_sent

LOSSLESS = ("Lossless()", "lossless")  # methods whose runs must be bit-identical to those of ORDERED
LINKS = {"100 Mbit": 100e6, "1 Gbit": 1e9}
MARKERS = "os^vD<>pP*Xhd8" * 2  # plot markers of methods


def mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def steps_to_target(run: Run, plain: Run) -> float:
    """Return the step of the first evaluation near float32's final result, or Inf if there is none."""
    for step, loss, accuracy in run.curve:
        if accuracy >= plain.accuracy - 0.01 if run.task.startswith("digits") else loss <= plain.loss + 0.05:
            return step
    return math.inf


def noise_of(runs: list[Run], plain: dict[int, Run]) -> float:
    """Return the noise of float32's loss: its standard deviation over seeds, or the effect of the order of sums."""
    order = [abs(r.loss - plain[r.seed].loss) for r in runs if r.codec == ORDERED]
    return max([deviation([r.loss for r in plain.values()]), *order])


def summarize(runs: list[Run], world: int) -> list[dict[str, Any]]:
    """Return one row for each task and codec."""
    rows: list[dict[str, Any]] = []
    for task in dict.fromkeys(r.task for r in runs):
        of_task = [r for r in runs if r.task == task]
        plain = {r.seed: r for r in of_task if r.codec == PLAIN}
        noise = noise_of(of_task, plain)
        for name in dict.fromkeys(r.codec for r in of_task):
            some = [r for r in of_task if r.codec == name]
            apart = [r.loss - plain[r.seed].loss for r in some]
            nbytes, cpu = mean([r.nbytes for r in some]), mean([r.cpu for r in some])
            steps = mean([steps_to_target(r, plain[r.seed]) for r in some])
            rows.append(
                {
                    "task": task,
                    "codec": name,
                    "steps": some[0].steps,
                    "seeds": len(some),
                    "bits": 8 * nbytes / values_sent(some[0].values, world),
                    "bytes_per_step": nbytes,
                    "loss": mean([r.loss for r in some]),
                    "loss_vs_float32": mean(apart),
                    "loss_vs_float32_deviation": deviation(apart),
                    "within_noise": mean(apart) <= 2 * noise * math.sqrt(2 / len(some)),  # False for NaN
                    "accuracy": mean([r.accuracy for r in some]),
                    "residual": max((r.residual for r in some if not math.isnan(r.residual)), default=math.nan),
                    "cpu_s": cpu,
                    "steps_to_target": steps,
                    **{f"seconds_to_target_{name}": steps * (cpu + 8 * nbytes / rate) for name, rate in LINKS.items()},
                    "noise": noise,
                    "stopped": "; ".join(f"seed {r.seed} {r.stopped}" for r in some if r.stopped),
                }
            )
    return rows


def same_bits(runs: list[Run]) -> dict[str, bool]:
    """Return, for each task, True if lossless runs are bit-identical to runs with raw sums in rank order."""
    ordered = {(r.task, r.seed): r for r in runs if r.codec == ORDERED}
    found: dict[str, bool] = {}
    for r in runs:
        if r.codec in LOSSLESS:
            other = ordered[r.task, r.seed]
            found[r.task] = found.get(r.task, True) and (r.digest, r.losses) == (other.digest, other.losses)
    return found


def table(heads: list[str], lines: list[list[str]]) -> str:
    """Return a Markdown table whose columns are also aligned as plain text."""
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    rule = [":" + "-" * (w - 1) if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    padded = [
        [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
        for line in (heads, rule, *lines)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def number(value: float, form: str, other: str) -> str:
    """Return a number as text; `other` for NaN and Inf."""
    return format(value, form) if math.isfinite(value) else other


def shown(method: str) -> str:
    """Return a method's name in Markdown."""
    return method if method in (PLAIN, ORDERED) else f"`{method}`"


def span(values: list[float], form: str) -> str:
    """Return the smallest and the largest number as text."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def overview(rows: list[dict[str, Any]]) -> str:
    """Return two Markdown tables: ranges over tasks by method, and losses by method and task."""
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    cells = {(r["codec"], r["task"]): r for r in rows}
    methods = [name for name in dict.fromkeys(r["codec"] for r in rows) if name not in (PLAIN, ORDERED)]
    ranges: list[list[str]] = []
    for name in methods:
        some = [cells[name, task] for task in tasks if (name, task) in cells]
        trained = [r for r in some if math.isfinite(r["loss_vs_float32"])]
        good = sum(bool(r["within_noise"]) for r in some)
        losses = span([r["loss_vs_float32"] for r in trained], "+.4f") if trained else "NaN"
        ranges.append([shown(name), span([r["bits"] for r in some], ".1f"), losses, f"{good} of {len(some)}"])

    def cell(name: str, task: str) -> str:
        if (name, task) not in cells:
            return ""
        r = cells[name, task]
        return number(r["loss_vs_float32"], "+.4f", "NaN") + ("" if r["within_noise"] else " !")

    plain = [cells[PLAIN, task] for task in tasks]
    lines = [
        ["float32: loss", *(f"{r['loss']:.4f}" for r in plain)],
        ["float32: noise", *(number(r["noise"], ".4f", "-") for r in plain)],
        *([shown(name), *(cell(name, task) for task in tasks)] for name in methods),
    ]
    return (
        table(["method", "bits/value", "loss minus float32's", "within noise"], ranges)
        + "\n\n"
        + table(["loss minus float32's", *tasks], lines)
    )


def write_page(path: Path, rows: list[dict[str, Any]], ranks: int) -> None:
    """Replace the text between the page's two marks by the overview.

    Raises
    ------
    ValueError
        The page has no marks.
    """
    begin, end = "<!-- overview: begin -->\n", "<!-- overview: end -->\n"
    before, found, rest = path.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{path} has no lines {begin.strip()} and {end.strip()}")
    seeds = max(r["seeds"] for r in rows if r["codec"] != PLAIN), min(r["seeds"] for r in rows if r["codec"] == PLAIN)
    text = f"{ranks} ranks; seeds: {seeds[0]}, and {seeds[1]} of float32.\n\n{overview(rows)}\n"
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def show(rows: list[dict[str, Any]], ranks: int) -> None:
    """Print a Markdown table for each task, and the overview of all."""
    heads = ["codec", "bits/value", "loss", "vs float32", "accuracy", "residual", "CPU/step", "steps", *LINKS]
    for task in dict.fromkeys(r["task"] for r in rows):
        some = [r for r in rows if r["task"] == task]
        print(f"\n**{task}**: {ranks} ranks, {some[0]['steps']} steps, {some[0]['seeds']} seeds\n")
        lines = [
            [
                shown(r["codec"]),
                f"{r['bits']:.2f}",
                number(r["loss"], ".4f", "NaN"),
                number(r["loss_vs_float32"], "+.4f", "NaN")
                + number(r["loss_vs_float32_deviation"], " 5.4f", "").replace(" ", " ±"),
                number(100 * r["accuracy"], ".2f", "-") + ("%" if math.isfinite(r["accuracy"]) else ""),
                number(r["residual"], ".2f", "-"),
                f"{1e3 * r['cpu_s']:.1f} ms",
                number(r["steps_to_target"], ".0f", "never"),
                *(number(r[f"seconds_to_target_{name}"], ".1f", "never ") + " s" for name in LINKS),
            ]
            for r in some
        ]
        print(table(heads, lines))
        if math.isfinite(noise := some[0]["noise"]):
            near = ", ".join(r["codec"] for r in some if r["within_noise"] and r["codec"] != PLAIN)
            print(f"\nNoise of float32 (seeds, order of sums): {noise:.4f}. Within the noise: {near or 'none'}.")
        for r in some:
            if r["stopped"]:
                print(f"\n{r['codec']}: stopped {r['stopped']}")
    print(f"\n**all tasks** (!: above float32's loss by more than the noise)\n\n{overview(rows)}")


def plot(runs: list[Run], rows: list[dict[str, Any]], path: Path) -> None:
    """Plot held-out loss against steps, and final loss minus float32's against bits per value."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    tasks = list(dict.fromkeys(r.task for r in runs))
    names = [name for name in dict.fromkeys(r.codec for r in runs) if name != ORDERED]
    styles = {name: {"color": plt.get_cmap("tab20")(i % 20), "marker": MARKERS[i]} for i, name in enumerate(names)}
    styles[PLAIN] = {"color": "black", "marker": ""}
    figure, axes = plt.subplots(2, len(tasks), figsize=(5 * len(tasks), 9), layout="constrained", squeeze=False)
    for above, below, task in zip(*axes, tasks, strict=True):
        for name in names:
            curves = [r.curve for r in runs if (r.task, r.codec) == (task, name)]
            points = [(p[0][0], mean([q[1] for q in p])) for p in zip(*curves, strict=False)]
            if points:
                above.plot(*zip(*points, strict=True), label=short(name), lw=1.2, ms=4, **styles[name])
        above.set(title=task, xlabel="steps", ylabel="held-out loss", yscale="log")
        plot_front(below, [r for r in rows if r["task"] == task and r["codec"] in styles], styles)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
    figure.savefig(path, dpi=90)


def short(name: str) -> str:
    """Return a method's name for a plot. Long names are shortened to the last argument."""
    return name if len(name) < 30 else f"{name.partition('(')[0]}(..., {name.rpartition(', ')[2]}"


def plot_front(axis: Any, rows: list[dict[str, Any]], styles: dict[str, Any]) -> None:
    """Plot final loss minus float32's against bits per value, with the standard deviation over seeds."""
    for r in rows:
        if r["codec"] == PLAIN or math.isnan(r["loss"]):
            continue
        spread = 0 if math.isnan(r["loss_vs_float32_deviation"]) else r["loss_vs_float32_deviation"]
        axis.errorbar(r["bits"], r["loss_vs_float32"], spread, ms=8, capsize=3, **styles[r["codec"]])
    axis.axhline(0, color="black", lw=0.8)
    axis.set(xscale="log", xlabel="bits a value", ylabel="final loss minus float32's")
    axis.set_yscale("symlog", linthresh=0.01)
    axis.margins(y=0.15)
    ticks = [1, 2, 4, 8, 16, 32]
    axis.set_xticks(ticks, [str(t) for t in ticks])
    axis.grid(alpha=0.3)


def without_nonfinite(value: Any) -> Any:
    """Replace NaN and Inf, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {k: without_nonfinite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_nonfinite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_nan(value: Any) -> Any:
    """Replace None by NaN, as :func:`without_nonfinite` has replaced NaN by None."""
    if isinstance(value, dict):
        return {k: with_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [with_nan(v) for v in value]
    return math.nan if value is None else value


def load(paths: list[Path]) -> tuple[int, list[Run]]:
    """Return the number of ranks and all runs of files that ``--json`` has written.

    Raises
    ------
    ValueError
        A file has another format, files differ in the number of ranks, two runs have the same job, or a seed of a task
        lacks the float32 run for comparison.
    """
    runs: list[Run] = []
    ranks: set[int] = set()
    for path in paths:
        try:
            report = json.loads(path.read_text())
            runs += [Run(**with_nan(run)) for run in report["runs"]]
            ranks.add(report["ranks"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} has not been written by --json: {error!r}") from None
    if not runs:
        raise ValueError("the files have no runs")
    if len(ranks) != 1:
        raise ValueError(f"the files have runs of {sorted(ranks)} ranks; give files with equal numbers")
    trainings = [(r.task, r.codec, r.seed) for r in runs]
    if twice := [t for t in dict.fromkeys(trainings) if trainings.count(t) > 1]:
        raise ValueError(f"the files have two runs of {twice[0]}")
    if lone := [r for r in runs if (r.task, PLAIN, r.seed) not in trainings]:
        raise ValueError(f"the files have no run of {(lone[0].task, PLAIN, lone[0].seed)}")
    return ranks.pop(), runs
