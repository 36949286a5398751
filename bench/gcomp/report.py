"""Print the figures of bench/gcomp as tables."""

import statistics
from collections.abc import Sequence
from typing import Any

import allreduce
import distributions
import netns
import sizes
import trainings
from summary import table

PAPER_SAVED, PAPER_SPEEDUP = 0.671, 1.9  # maxima in the paper's abstract
PAPER = (
    f"GComp reports up to {PAPER_SAVED:.1%} of the bytes saved and up to {PAPER_SPEEDUP} times the speed of training."
)


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def deviation(value: float) -> str:
    return f"{100 * value:.2g}%" if value < 1 else f"{100 * value:.0f}%"


def number(value: float | None, form: str = ".2f", unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:.1f} ms"


def all_reduce_table(t: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that the figure needs from a bench/network table, with times of the fastest repetition."""
    base = next(r for r in t["rows"] if r["name"] in (allreduce.RAW, "Gloo float32"))
    plain = min(base["seconds"])
    rows = [
        {
            "method": r["name"] if "algorithm" not in r else f"{r['name']}, {r['algorithm']}",
            "seconds": min(r["seconds"]),
            "normalised": min(r["seconds"]) / plain,
            "sent": r["sent"],
        }
        for r in t["rows"]
    ]
    return {k: t[k] for k in ("program", "ranks", "link")} | {"rows": rows}


def show_distributions(found: list[dict[str, Any]]) -> None:
    for r in found:
        of = distributions.Distributions(**r)
        print(f"\n**{of.task}**: {of.values:,} values, {of.steps[-1]} steps; exponents are powers of 2\n")
        chosen = [0, len(of.steps) // 2, len(of.steps) - 1]

        def spread(counts: list[int]) -> str:
            return ", ".join(str(distributions.quantile(counts, q)) for q in distributions.QUANTILES)

        lines = [
            ["gradient: exponent, 1, 50, 99%", *(spread(of.exponents[i]) for i in chosen)],
            ["exponents that occur", *(str(sum(n > 0 for n in of.exponents[i])) for i in chosen)],
            [
                f"share of the {distributions.TOP} most frequent",
                *(percent(distributions.top_share(of.exponents[i]), 2) for i in chosen),
            ],
            ["entropy of an exponent, bits", *(number(of.entropy[i]) for i in chosen)],
            ["gradient over parameter: exponent, 1, 50, 99%", *(spread(of.ratios[i]) for i in chosen)],
            ["parameters that the step leaves", *(percent(of.still[i], 2) for i in chosen)],
            ["gradients that are zero", *(percent(of.zeros[i], 2) for i in chosen)],
        ]
        print(table(["distribution", *(f"step {of.steps[i]}" for i in chosen)], lines))


def show_sizes(found: list[dict[str, Any]]) -> None:
    of = [sizes.Sizes(**{k: v for k, v in d.items()}) for d in found]
    for r in of:
        print(f"\n**{r.task}**: {r.values:,} values, {r.steps[-1]} steps; late: mean of the last fifth of the steps\n")
        lines = [
            [
                trainings.label(m),
                percent(v[0]),
                percent(v[len(v) // 2]),
                percent(sizes.late(r, v)),
                percent(max(v)),
            ]
            for m, v in r.saved.items()
        ]
        print(table(["bytes saved", "first", "middle", "late", "most"], lines))
        lines = [
            [
                name,
                percent(sizes.late(r, v["saved"])),
                f"{sizes.late(r, v['error']):.1e}",
                percent(sizes.late(r, v["changed"])),
            ]
            for name, v in r.strategies.items()
        ]
        print("\n" + table(["truncation, late", "saved", "error of g", "parameters changed"], lines))
        lines = [
            [
                sizes.SOURCES.get(s, s),
                *(number(last(v[k]), ".3f") for k in ("capped", "native")),
                number(last(v["longest"]), ".0f"),
            ]
            for s, v in r.exponents.items()
        ]
        print("\n" + table(["code from, late", "capped at 8 bits", "native", "longest native"], lines))
    print(f"\n{PAPER}")


def last(values: Sequence[float | None]) -> float | None:
    """Return the mean of the last fifth of the measurements, or None if one of these is missing."""
    some = values[-max(1, len(values) // 5) :]
    known = [v for v in some if v is not None]
    return statistics.fmean(known) if len(known) == len(some) else None


def show_deviations(found: dict[str, Any]) -> None:
    for task in dict.fromkeys(r["task"] for r in found["rows"]):
        print(f"\n**{task}**: {found['ranks']} ranks, {found['steps']} steps, {found['seeds']} seeds\n")
        some = [r for r in found["rows"] if r["task"] == task]
        heads = ["method", "saved", *(f"{q}%" for q in trainings.QUANTILES), "final loss", "vs none", "accuracy"]
        lines = [
            [
                trainings.label(r["method"]),
                percent(r["saved"]),
                *(deviation(r[f"p{q}"]) for q in trainings.QUANTILES),
                number(r["loss"], ".4f"),
                number(r["final"], "+.4f") + ("" if r["final_deviation"] is None else f" ±{r['final_deviation']:.4f}"),
                percent(r["accuracy"]),
            ]
            for r in some
        ]
        print(table(heads, lines))
        print(f"\nStandard deviation of the uncompressed final loss over seeds: {number(some[0]['noise'], '.4f')}")


def show_all_reduces(found: list[dict[str, Any]]) -> None:
    for t in found:
        print(f"\n**{t['program']}**: {t['ranks']} ranks, {netns.shown(t['link'])}\n")
        lines = [
            [r["method"], number(r["normalised"], ".3f"), milliseconds(r["seconds"]), f"{r['sent'] / 1e6:.2f} MB"]
            for r in t["rows"]
        ]
        print(table(["all-reduce", "normalised", "fastest", "sent"], lines))


def show_iteration(found: list[dict[str, Any]]) -> None:
    for task, link in dict.fromkeys((r["task"], r["link"]) for r in found):
        some = [r for r in found if (r["task"], r["link"]) == (task, link)]
        counts = list(dict.fromkeys(r["ranks"] for r in some))
        measured = [n for n in counts if any(r["ranks"] == n and r["seconds"] is not None for r in some)]
        print(f"\n**{task}**, {netns.shown(link)}: speedup over no compression (time of an iteration)\n")
        lines: list[list[str]] = []
        for method in dict.fromkeys(r["method"] for r in some):
            of = {r["ranks"]: r for r in some if r["method"] == method}
            cells = [f"{number(of[n]['speedup'])} ({milliseconds(of[n]['seconds'])})" for n in measured]
            cells += [number(max(abs(of[n]["model_over_measured"] - 1) for n in measured), ".0%")]
            cells += [
                f"{number(of[n]['model_speedup'])} ({milliseconds(of[n]['model'])})"
                for n in counts
                if n not in measured
            ]
            lines.append([trainings.label(method), *cells])
        heads = [f"{n} ranks" for n in measured] + ["model off by"]
        heads += [f"{n} simulated" for n in counts if n not in measured]
        print(table(["method", *heads], lines))


def show_accuracy(found: dict[str, Any]) -> None:
    for task, link in dict.fromkeys((r["task"], r["link"]) for r in found["rows"]):
        print(f"\n**{task}**, {netns.shown(link)}: {found['ranks']} ranks, {found['steps']} steps\n")
        lines = [
            [
                trainings.label(r["method"]),
                percent(r["saved"]),
                milliseconds(r["iteration"]),
                number(r["steps"], ".0f"),
                number(r["seconds"], ".1f", " s"),
                number(r["speedup"], ".2f", "x") if r["seconds"] else "never",
                number(r["model_speedup"], ".2f", "x") if r["seconds"] else "never",
                percent(r["accuracy"]),
                number(r["loss"], ".4f"),
            ]
            for r in found["rows"]
            if (r["task"], r["link"]) == (task, link)
        ]
        heads = [
            "method",
            "saved",
            "iteration",
            "steps",
            "time to target",
            "speedup",
            "model",
            "accuracy",
            "final loss",
        ]
        print(table(heads, lines))
    print(f"\n{PAPER}")


SHOW = {
    "distributions": show_distributions,
    "sizes": show_sizes,
    "deviations": show_deviations,
    "allreduce": show_all_reduces,
    "iteration": show_iteration,
    "accuracy": show_accuracy,
}


def show(figure: str, found: dict[str, Any]) -> None:
    """Print the tables of a figure."""
    about = ", ".join(f"{k} {v}" for k, v in found[f"{figure} about"].items())
    print(f"\n## {figure} ({about})", flush=True)
    SHOW[figure](found[figure])
