"""Print the results of bench/pipeline as tables."""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
sys.path.insert(0, str(Path(__file__).parents[1] / "network"))
import netns
from summary import table

MARK = "†"
BELOW = f"{MARK} messages are smaller than two token buckets: the link carries them faster than its rate"


def number(value: float | None, form: str = ".2f", unit: str = "") -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:{form}}{unit}"


def times(value: float | None) -> str:
    return number(value, ".2f", "x")


def epoch_loss(training: dict[str, Any], an_epoch: int) -> float:
    """Return a run's mean loss over the last epoch."""
    last = training["losses"][-an_epoch:]
    return sum(last) / len(last) if last else math.nan


def whole_nbytes(training: dict[str, Any], an_epoch: int) -> float:
    """Return the bytes of a training run for all planned steps, even if it stopped early."""
    later = max(0, len(training["losses"]) - an_epoch)
    return training["first_nbytes"] * min(an_epoch, len(training["losses"])) + training["later_nbytes"] * later


def show_losses(found: dict[str, Any]) -> None:
    rows, an_epoch = found["losses"], found["sizes"]["steps_an_epoch"]
    for task, stages in dict.fromkeys((r["task"], r["stages"]) for r in rows):
        some = [r for r in rows if (r["task"], r["stages"]) == (task, stages)]
        base = next((epoch_loss(r, an_epoch) for r in some if r["setting"]["system"] == "fp32"), math.nan)
        print(f"\n**{task}**, {stages} stages: mean loss of the last epoch; bytes relative to FP32's\n")
        lines = [loss_line(r, base, an_epoch) for r in some]
        heads = ["", "loss", "minus FP32", "held out", "accuracy", "first epoch", "later", "training", "change of a"]
        print(table(heads, lines))


def loss_line(r: dict[str, Any], base: float, an_epoch: int) -> list[str]:
    steps = len(r["losses"])
    loss = epoch_loss(r, an_epoch)
    ratios = [
        r["raw_nbytes"] / n if n else math.nan
        for n in (r["first_nbytes"], r["later_nbytes"], whole_nbytes(r, an_epoch) / max(steps, 1))
    ]
    change = f"{r['change'][0]:.3f} to {r['change'][-1]:.3f}" if r["change"] else "-"
    label = r["label"] + (" (diverged)" if r["diverged"] else "")
    return [
        label,
        number(loss, ".4f"),
        number(loss - base, "+.4f"),
        number(r["held_loss"], ".4f"),
        number(r["accuracy"], ".1%"),
        *map(times, ratios),
        change,
    ]


def show_times(found: dict[str, Any]) -> None:
    marked = False
    for stages, rate in dict.fromkeys((r["stages"], r["rate"]) for r in found["times"]):
        some = [r for r in found["times"] if (r["stages"], r["rate"]) == (stages, rate)]
        base = next((r["later"] for r in some if r["setting"]["system"] == "fp32"), math.nan)
        tcp = some[0]["tcp_rate"] / 1e6
        print(f"\n**{stages} stages**, {netns.shown(rate)} (TCP {tcp:,.1f} Mbit/s)\n")
        lines: list[list[str]] = []
        for r in some:
            marked |= r["below"]
            lines.append(
                [
                    r["label"] + (f" {MARK}" if r["below"] else ""),
                    number(1e3 * r["first"], ".0f"),
                    number(1e3 * r["later"], ".0f"),
                    number(r["samples"] / r["later"], ".0f"),
                    times(base / r["later"]),
                    times(r["allowed"]),
                    number(1e3 * r["cpu"], ".0f"),
                    number(r["first_sent"] / 1e6, ".2f"),
                    number(r["sent"] / 1e6, ".2f"),
                ]
            )
        heads = [
            "",
            "first epoch ms",
            "later ms",
            "samples/s",
            "x FP32",
            "bytes allow",
            "CPU ms",
            "first MB",
            "later MB",
        ]
        print(table(heads, lines))
    if marked:
        print(f"\n{BELOW}")


def show_outcomes(found: dict[str, Any]) -> None:
    rows = found["outcomes"]
    for task, stages in dict.fromkeys((r["task"], r["stages"]) for r in rows):
        some = [r for r in rows if (r["task"], r["stages"]) == (task, stages)]
        rates = list(dict.fromkeys(r["rate"] for r in some))
        print(f"\n**{task}**, {stages} stages: time to a loss of {some[0]['target']:.4f}, and speedup over FP32\n")
        lines: list[list[str]] = []
        for label in dict.fromkeys(r["label"] for r in some):
            of = {r["rate"]: r for r in some if r["label"] == label}
            cells = [outcome_cell(of[rate]) if rate in of else "-" for rate in rates]
            lines.append([label, number(next(iter(of.values()))["steps"], ".0f"), *cells])
        print(table(["", "steps", *map(netns.shown, rates)], lines))


def outcome_cell(r: dict[str, Any]) -> str:
    if r["diverged"]:
        return "diverged"
    if r["seconds"] is None or not math.isfinite(r["seconds"]):
        return "never"
    return f"{r['seconds']:.1f} s ({r['speedup']:.2f}x)"


def show_check(found: dict[str, Any]) -> None:
    rows = found["check"]
    print(f"\nWhole trainings at {netns.shown(rows[0]['rate'])}, {rows[0]['stages']} stages\n")
    lines = [
        [
            r["label"],
            number(r["seconds"], ".1f"),
            number(r["model_seconds"], ".1f"),
            number(r["model_seconds"] / r["seconds"] - 1, "+.1%"),
            number(r["largest_difference"], ".1e"),
        ]
        for r in rows
    ]
    heads = ["", "measured s", "combined s", "off by", "largest difference of a loss"]
    print(table(heads, lines))


def show_mesh(found: dict[str, Any]) -> None:
    rows = found["mesh"]["times"]
    losses = {(r["label"], r["averaging"], r["task"]): r["loss"] for r in found["mesh"]["losses"]}
    tasks = list(dict.fromkeys(r["task"] for r in found["mesh"]["losses"]))
    rates = list(dict.fromkeys(r["rate"] for r in rows))
    base = {r["rate"]: r["later"] for r in rows if r["setting"]["system"] == "fp32"}
    print(
        f"\n**{found['mesh']['stages']} stages x {found['mesh']['replicas']} replicas**: ms of a step, later epochs\n"
    )
    lines: list[list[str]] = []
    for key in dict.fromkeys((r["label"], r["averaging"]) for r in rows):
        of = {r["rate"]: r for r in rows if (r["label"], r["averaging"]) == key}
        cells = [f"{1e3 * of[x]['later']:.0f} ({times(base[x] / of[x]['later'])})" for x in rates]
        sent = next(iter(of.values()))["sent"]
        ends = [number(losses.get((*key, task)), ".4f") for task in tasks]
        lines.append([*key, *cells, number(sent / 1e6, ".2f"), *ends])
    heads = [f"loss, {task}" for task in tasks]
    print(table(["", "gradients", *map(netns.shown, rates), "MB a step", *heads], lines))


def show_coding(found: dict[str, Any]) -> None:
    for shape in dict.fromkeys(tuple(r["shape"]) for r in found["coding"]):
        rows = [r for r in found["coding"] if tuple(r["shape"]) == shape]
        text = " x ".join(f"{n:,}" for n in shape)
        print(f"\n**{text} values**: CPU time of a message over its time at {netns.shown(rows[0]['rate'])}\n")
        lines = [
            [
                r["label"],
                f"{r['nbytes']:,}",
                number(1e3 * r["encode"], ".2f"),
                number(1e3 * r["decode"], ".2f"),
                number(r["share"], ".1%"),
                f"{r['gradient_nbytes']:,}",
                number(1e3 * r["gradient"], ".2f"),
                number(r["gradient_share"], ".1%"),
            ]
            for r in rows
        ]
        heads = ["", "activations, bytes", "encode ms", "decode ms", "share", "gradient, bytes", "ms", "share"]
        print(table(heads, lines))


def show_store(found: dict[str, Any]) -> None:
    rows = found["store"]
    rate = next((netns.shown(r["rate"]) for r in rows if "rate" in r), "")
    print(f"\nm of one side of an edge, and steps with m in files{' at ' + rate if rate else ''}\n")
    lines = [
        [
            r["label"],
            f"{r['entry_nbytes']:,}",
            number(r["kept_nbytes"] / 1e6, ".1f"),
            number(r["step_nbytes"] / 1e6, ".2f"),
            number(r.get("files_over_ram"), ".3f"),
        ]
        for r in rows
    ]
    heads = [
        "m",
        "bytes a sample",
        "MB of all samples",
        "MB read and written in a step",
        "time of a step, files / memory",
    ]
    print(table(heads, lines))


SHOW: dict[str, Callable[[dict[str, Any]], None]] = {
    "losses": show_losses,
    "times": show_times,
    "outcomes": show_outcomes,
    "check": show_check,
    "mesh": show_mesh,
    "coding": show_coding,
    "store": show_store,
}


def show(found: dict[str, Any], names: Sequence[str]) -> None:
    """Print the tables of the results with the given names, if they were measured."""
    for name in names:
        if found.get(name):
            print(f"\n## {name}", flush=True)
            SHOW[name](found)
