"""Draw the figures of bench/gcomp."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import distributions
import netns
import numpy as np
import report
import sizes
import trainings
from runs import ORDERED, PLAIN

MARKERS = "os^vD<>pP*X"
MOST = 1.5  # end of the axis of relative times; longer bars are truncated


def style(method: str) -> dict[str, Any]:
    """Return a method's colour, marker and dashes, which are the same in all plots."""
    if method in (PLAIN, ORDERED):
        return {"color": "black", "marker": "", "ls": "-" if method == PLAIN else ":"}
    names = list(dict.fromkeys((*sizes.METHODS, *(text for _, text in sizes.STRATEGIES))))
    i = names.index(method)
    return {"color": f"C{i % 10}", "marker": MARKERS[i % len(MARKERS)], "ls": "-" if i < 10 else "--"}


def figure(rows: int, columns: int, height: float = 3.4) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt.subplots(
        rows, columns, figsize=(5.2 * columns, height * rows + 0.8), layout="constrained", squeeze=False
    )


def legend(of: Any, axis: Any, columns: int = 4) -> None:
    of.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=columns, fontsize=8)


def draw_distributions(found: list[dict[str, Any]]) -> Any:
    """Draw histograms of exponents of gradients and of gradient/parameter ratios, and the share of zeros by step."""
    drawing, axes = figure(3, len(found), 2.6)
    for column, result in zip(axes.T, found, strict=True):
        of = distributions.Distributions(**result)
        kinds = ("gradient", of.exponents), ("gradient / parameter", of.ratios)
        for axis, (name, counts) in zip(column, kinds, strict=False):
            for i in (0, len(of.steps) // 2, len(of.steps) - 1):
                shares = 100 * np.array(counts[i]) / max(1, sum(counts[i]))
                axis.plot(np.arange(256) - distributions.BIAS, shares, label=f"step {of.steps[i]}", lw=1.2)
            used = np.flatnonzero(np.sum(counts, axis=0)) - distributions.BIAS
            axis.set(xlim=(used[0], used[-1]), xlabel=f"exponent of {name}", ylabel="values, %")
            axis.legend(fontsize=7)
        shares = {"gradients that are zero": of.zeros, "parameters that the step leaves": of.still}
        for label, values in shares.items():
            column[2].plot(of.steps, [100 * v for v in values], label=label, lw=1.2)
        column[2].set(xlabel="step", ylabel="values, %")
        column[2].legend(fontsize=7)
        column[0].set_title(of.task)
    return drawing


def draw_sizes(found: list[dict[str, Any]]) -> Any:
    """Draw the compression ratio by step, and the mean bits per exponent by source of the code."""
    drawing, axes = figure(2, len(found))
    for above, below, result in zip(*axes, found, strict=True):
        for method, values in result["saved"].items():
            label = trainings.label(method)
            above.plot(result["steps"], [100 * v for v in values], label=label, ms=3, lw=1.2, **style(method))
        above.axhline(100 * report.PAPER_SAVED, color="black", lw=0.8, ls=":", label="most in the paper")
        above.set(title=result["task"], xlabel="step", ylabel="bytes saved, %", ylim=(0, 100))
        for i, source in enumerate(sizes.SOURCES):
            for key, dashes in (("capped", "-"), ("native", ":")):
                values = [np.nan if v is None else v for v in result["exponents"][source][key]]
                below.plot(result["steps"], values, dashes, color=f"C{i}", label=f"{source}, {key}", lw=1.3)
        below.set(xlabel="step", ylabel="bits of an exponent")
        below.legend(fontsize=6, ncols=2)
    legend(drawing, axes[0][0], 5)
    return drawing


def draw_strategies(found: list[dict[str, Any]]) -> Any:
    """Plot the gradient's error against the fraction of bytes saved, late in training."""
    drawing, axes = figure(1, len(found), 3.6)
    for axis, result in zip(axes[0], found, strict=True):
        some = sizes.Sizes(**result)
        for i, (name, of) in enumerate(some.strategies.items()):
            saved, error = sizes.late(some, of["saved"]), sizes.late(some, of["error"])
            axis.plot(100 * saved, error, MARKERS[i % len(MARKERS)], color=f"C{i}", label=name, ms=8)
        axis.set(title=result["task"], xlabel="bytes saved, %", ylabel="relative error of the gradient", yscale="log")
        axis.grid(alpha=0.3)
    legend(drawing, axes[0][0], 2)
    return drawing


def draw_deviations(found: dict[str, Any]) -> Any:
    """Draw the cumulative distribution of deviations of the training loss."""
    tasks = list(dict.fromkeys(r["task"] for r in found["rows"]))
    drawing, axes = figure(1, len(tasks))
    for axis, task in zip(axes[0], tasks, strict=True):
        for method in dict.fromkeys(r["method"] for r in found["rows"]):
            runs = [d["deviations"] for d in found["deviations"] if (d["task"], d["method"]) == (task, method)]
            if method == PLAIN or not runs:
                continue
            values = np.sort([100 * v for run in runs for v in run if v is not None])
            share = np.arange(1, len(values) + 1) / len(values)
            shown = {**style(method), "marker": ""}
            axis.plot(np.maximum(values, 1e-6), 100 * share, label=trainings.label(method), lw=1.4, **shown)
        axis.set(title=task, xlabel="deviation of the training loss, %", ylabel="steps, %", xscale="log")
        axis.grid(alpha=0.3)
    legend(drawing, axes[0][0])
    return drawing


def bars(axis: Any, names: Sequence[str], values: Sequence[float], title: str) -> None:
    axis.barh(names, values, color="C0")
    for i, value in enumerate(values):
        place = {"ha": "right", "color": "white"} if value > 0.2 else {"ha": "left", "color": "black"}
        at = min(value, MOST) + (-0.02 if value > 0.2 else 0.02)
        axis.text(at, i, f"{value:.2f}", va="center", fontsize=6, **place)
    axis.axvline(1, color="black", lw=0.8)
    axis.set_xlim(0, MOST)
    axis.invert_yaxis()
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=7)


def draw_all_reduces(found: list[dict[str, Any]]) -> Any:
    """Draw the time of an all-reduce relative to Gloo's in float32; a panel per program, number of ranks and link."""
    columns = len({t["link"] for t in found})
    drawing, axes = figure(len(found) // columns, columns, 2.6)
    for axis, t in zip(axes.flat, found, strict=True):
        title = f"{t['program']}, {t['ranks']} ranks, {netns.shown(t['link'])}"
        bars(axis, [r["method"] for r in t["rows"]], [r["normalised"] for r in t["rows"]], title)
    for axis in axes[-1]:
        axis.set_xlabel("time relative to Gloo's float32")
    return drawing


def draw_iteration(found: list[dict[str, Any]]) -> Any:
    """Draw speedups over no compression by number of ranks: lines are predictions, markers are measured."""
    pairs = list(dict.fromkeys((r["task"], r["link"]) for r in found))
    drawing, axes = figure(-(-len(pairs) // 2), min(2, len(pairs)))
    for axis, (task, link) in zip(axes.flat, pairs, strict=False):
        some = [r for r in found if (r["task"], r["link"]) == (task, link)]
        for method in dict.fromkeys(r["method"] for r in some if r["method"] != PLAIN):
            of = sorted((r for r in some if r["method"] == method), key=lambda r: r["ranks"])
            shown = style(method)
            label = trainings.label(method)
            line = [(r["ranks"], r["model_speedup"]) for r in of if r["speedup"] is None]
            axis.plot(*zip(*line, strict=True), color=shown["color"], lw=1.2)
            points = [(r["ranks"], r["speedup"]) for r in of if r["speedup"] is not None]
            axis.plot(*zip(*points, strict=True), ms=6, label=label, **{**shown, "ls": ""})
        axis.axhline(1, color="black", lw=0.8)
        axis.set(title=f"{task}, {netns.shown(link)}", xlabel="ranks", xscale="log", yscale="log")
        axis.set_ylabel("speedup over no compression")
        axis.set_xticks(counts := sorted({r["ranks"] for r in some}), [str(n) for n in counts])
        axis.set_yticks(marks := [0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8], [str(mark) for mark in marks])
        axis.minorticks_off()
        least, most = (f(r[k] for r in some for k in ("speedup", "model_speedup") if r[k]) for f in (min, max))
        axis.set_ylim(0.9 * least, 1.1 * most)
        axis.grid(alpha=0.3)
    legend(drawing, axes[0][0], 5)
    return drawing


def draw_accuracy(found: dict[str, Any]) -> Any:
    """Plot held-out accuracy or loss of seed 0 against training time."""
    pairs = list(dict.fromkeys((c["task"], c["link"]) for c in found["curves"]))
    drawing, axes = figure(-(-len(pairs) // 2), min(2, len(pairs)))
    for axis, (task, link) in zip(axes.flat, pairs, strict=False):
        digits = task.startswith("digits")
        for c in found["curves"]:
            if (c["task"], c["link"], c["seed"]) == (task, link, 0):
                times, values = [p[0] for p in c["points"]], [100 * p[2] if digits else p[1] for p in c["points"]]
                axis.plot(times, values, label=trainings.label(c["method"]), ms=3, lw=1.2, **style(c["method"]))
        axis.set(title=f"{task}, {netns.shown(link)}", xlabel="seconds", ylabel="accuracy, %" if digits else "loss")
        axis.grid(alpha=0.3)
    legend(drawing, axes[0][0])
    return drawing


DRAW = {
    "distributions": (("distributions", draw_distributions),),
    "sizes": (("ratio", draw_sizes), ("truncation", draw_strategies)),
    "deviations": (("deviation", draw_deviations),),
    "allreduce": (("allreduce", draw_all_reduces),),
    "iteration": (("iteration", draw_iteration),),
    "accuracy": (("accuracy", draw_accuracy),),
}


def draw(found: dict[str, Any], folder: Path) -> list[Path]:
    """Draw all measured figures, and return the paths of the files."""
    written: list[Path] = []
    for name, drawings in DRAW.items():
        for part, function in drawings if name in found else ():
            path = folder / f"gcomp-{part}.png"
            function(found[name]).savefig(path, dpi=80)
            written.append(path)
    return written
