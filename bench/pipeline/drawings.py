"""Draw the results of bench/pipeline."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import netns
from outcomes import same_setting, seconds_after, trailing
from systems import AQ, DIRECT, FP32, FP32_TCP, TAH

COLORS = {FP32: "black", FP32_TCP: "gray", DIRECT: "C3", AQ: "C0", TAH: "C2"}
DASHES = ("-", "--", ":", "-.")


def style(setting: dict[str, Any], bits: Sequence[str]) -> dict[str, Any]:
    """Return the colour of a setting's system, and the dashes of its bits."""
    dashes = DASHES[bits.index(setting["bits"]) % len(DASHES)] if setting["bits"] in bits else "-"
    return {"color": COLORS[setting["system"]], "ls": dashes, "lw": 1.3}


def figure(panels: int, height: float = 3.6) -> tuple[Any, list[Any]]:
    """Return a figure and its panels, at most three per row."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(3, panels)
    rows = -(-panels // columns)
    size = (4.6 * columns, height * rows + 0.8)
    drawing, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[panels:]:
        axis.set_visible(False)
    return drawing, list(axes.flat[:panels])


def bits_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(r["setting"]["bits"] for r in rows if r["setting"]["bits"]))


def finish(drawing: Any, axes: Any) -> Any:
    drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return drawing


def draw_losses(found: dict[str, Any]) -> Any:
    """Plot the loss against steps, as the mean over the preceding epoch."""
    rows, an_epoch = found["losses"], found["sizes"]["steps_an_epoch"]
    places = list(dict.fromkeys((r["task"], r["stages"]) for r in rows))
    drawing, axes = figure(len(places))
    for axis, place in zip(axes, places, strict=True):
        for r in rows:
            if (r["task"], r["stages"]) == place and r["losses"]:
                label = r["label"] + (" (diverged)" if r["diverged"] else "")
                means = trailing(r["losses"], an_epoch)
                axis.plot(range(1, len(means) + 1), means, label=label, **style(r["setting"], bits_of(rows)))
        axis.set(title=f"{place[0]}, {place[1]} stages", xlabel="step", ylabel="training loss")
        axis.grid(alpha=0.3)
    return finish(drawing, axes)


def draw_outcomes(found: dict[str, Any]) -> Any:
    """Plot the loss against time for the first task and number of stages, with a panel per rate."""
    an_epoch = found["sizes"]["steps_an_epoch"]
    place = found["losses"][0]["task"], found["losses"][0]["stages"]
    rates = list(dict.fromkeys(t["rate"] for t in found["times"] if t["stages"] == place[1]))
    drawing, axes = figure(len(rates))
    for axis, rate in zip(axes, rates, strict=True):
        for r in found["losses"]:
            timed = next(
                (
                    t
                    for t in found["times"]
                    if t["rate"] == rate and same_setting(t["setting"], r["setting"]) and t["stages"] == place[1]
                ),
                None,
            )
            if (r["task"], r["stages"]) != place or timed is None:
                continue
            means = trailing(r["losses"], an_epoch)
            seconds = [seconds_after(i + 1, timed["first"], timed["later"], an_epoch) for i in range(len(means))]
            axis.plot(seconds, means, label=r["label"], **style(r["setting"], bits_of(found["losses"])))
        axis.set(title=netns.shown(rate), xlabel="seconds", ylabel="training loss")
        axis.grid(alpha=0.3)
    return finish(drawing, axes)


def draw_times(found: dict[str, Any]) -> Any:
    """Plot the throughput after the first epoch against the link's rate, with a panel per number of stages."""
    counts = list(dict.fromkeys(t["stages"] for t in found["times"]))
    drawing, axes = figure(len(counts))
    for axis, stages in zip(axes, counts, strict=True):
        some = [t for t in found["times"] if t["stages"] == stages]
        for label in dict.fromkeys(t["label"] for t in some):
            of = [t for t in some if t["label"] == label and netns.bits(t["rate"])]
            points = [((netns.bits(t["rate"]) or 0) / 1e6, t["samples"] / t["later"]) for t in of]
            axis.plot(
                *zip(*points, strict=True), marker="o", ms=3, label=label, **style(of[0]["setting"], bits_of(some))
            )
        axis.set(title=f"{stages} stages", xlabel="Mbit/s", ylabel="samples per second", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    return finish(drawing, axes)


def draw_mesh(found: dict[str, Any]) -> Any:
    """Draw the step time of a pipeline with replicas, with a panel per rate."""
    rows = found["mesh"]["times"]
    rates = list(dict.fromkeys(r["rate"] for r in rows))
    drawing, axes = figure(len(rates), 2.8)
    for axis, rate in zip(axes, rates, strict=True):
        some = [r for r in rows if r["rate"] == rate]
        names = [f"{r['label']}, gradients: {r['averaging']}" for r in some]
        axis.barh(names, [r["later"] for r in some], color=[COLORS[r["setting"]["system"]] for r in some])
        axis.invert_yaxis()
        axis.set(title=netns.shown(rate), xlabel="seconds of a step")
        axis.tick_params(labelsize=6)
    return drawing


DRAW = {"losses": draw_losses, "outcomes": draw_outcomes, "times": draw_times, "mesh": draw_mesh}
FILES = {"losses": "loss", "outcomes": "time", "times": "throughput", "mesh": "mesh"}


def draw(found: dict[str, Any], folder: Path) -> list[Path]:
    """Draw all results that were measured, and return the paths of the files."""
    written: list[Path] = []
    for name, function in DRAW.items():
        if found.get(name):
            path = folder / f"pipeline-{FILES[name]}.png"
            function(found).savefig(path, dpi=80)
            written.append(path)
    return written
