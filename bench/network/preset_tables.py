"""Markdown tables and the plot of bench/network/presets.py."""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import netns

Row = dict[str, Any]

ALONE = "none/0"  # link of cells that depend on no link: the computing time and the losses
LABELS = {"none": "no codec", "fp16 hook": "fp16 hook"}
PLOTTED = ("large", "float32")  # model and dtype of the plot, on links without a round-trip time
MARKED = re.compile(r"(<!-- presets: (\w+)(?: (\w+))?((?: \S+/\d+)*) -->\n).*?(<!-- end presets -->)", re.DOTALL)


def link_of(text: str) -> tuple[str, float]:
    """Parse a link such as ``100mbit/20``; return its rate and its round-trip time in milliseconds."""
    rate, _, rtt = text.partition("/")
    netns.bits(rate)
    try:
        return rate, float(rtt or 0)
    except ValueError:
        raise netns.NetworkError(f"a link is rate/round-trip time in ms, such as 100mbit/20: {text!r}") from None


def shown(link: str) -> str:
    """Return a link as text for people, such as "100 Mbit/s, 20 ms"."""
    rate, rtt = link_of(link)
    return netns.shown(rate).replace("bit", "bit/s") + (f", {rtt:g} ms" if rtt else "")


def milliseconds(row: Row | None, plain: Row | None) -> str:
    """Return text with the time of a step, and the speedup over a step without a hook."""
    if row is None:
        return ""
    faster = f" ({plain['step_ms'] / row['step_ms']:.1f}x)" if plain is not None and row is not plain else ""
    return f"{row['step_ms']:,.0f}{faster}"


def share(rows: Sequence[Row], method: str) -> str:
    """Return text with the bytes that a method sends, in percent of the bytes sent without a hook."""
    known = {"none": 1.0, "fp16 hook": 0.5}.get(method)
    return f"{100 * known:.0f}%" if known else f"{100 * statistics.mean(row['share'] for row in rows):.1f}%"


def line(rows: Sequence[Row], plain: Sequence[Row], links: Sequence[str], method: str) -> list[str]:
    """Return a method's cells: its name, its percentage of bytes, its times by link, and its loss."""
    of, without = ({row["link"]: row for row in some if "step_ms" in row} for some in (rows, plain))
    loss = next((f"{row['loss']:.4f}" for row in rows if "loss" in row), "")
    times = [milliseconds(of.get(link), without.get(link)) for link in links]
    return [LABELS.get(method, f'`"{method}"`'), share(list(of.values()), method) if of else "", *times, loss]


def table(rows: Sequence[Row], model: str, only: str | None = None, links: Sequence[str] = ()) -> str:
    """Return the table of a model, with a line per dtype and method, and a column per link.

    Parameters
    ----------
    rows : sequence of dict
        Rows of all models.
    model : str
        Name of the model.
    only : str, optional
        Show only this dtype. None: show all dtypes, with a column that names the dtype.
    links : sequence of str
        Show only these links. Empty: show all.

    Returns
    -------
    str
        Markdown, which begins with a sentence about the model; "" if the model has no rows.
    """
    rows = [row for row in rows if row["model"] == model and only in (None, row["dtype"])]
    found = dict.fromkeys(row["link"] for row in rows if row["link"] != ALONE)
    links = [link for link in found if not links or link in links]
    links.sort(key=lambda link: (netns.bits(link_of(link)[0]), link_of(link)[1]))
    if not links:
        return ""
    by: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by.setdefault((row["dtype"], row["method"]), []).append(row)
    steps = next((f" Losses are those after {row['steps']} steps." for row in rows if "loss" in row), "")
    table = [["dtype", "preset", "bytes", *map(shown, links), "loss"]]
    table += [[":--", ":--"] + ["--:"] * (len(links) + 2)]
    for (dtype, method), some in by.items():
        if method != "compute":
            table.append([dtype, *line(some, by.get((dtype, "none"), []), links, method)])
    skip = 0 if only is None else 1
    alone = [f"{row['step_ms']:,.0f} ms in {row['dtype']}" for row in rows if row["method"] == "compute"]
    values = next(row["values"] for row in rows if "values" in row)
    said = f"{values / 1e6:.1f} M parameters, milliseconds a step."
    said += f" Computing alone takes {' and '.join(alone)}." if alone else ""
    return said + steps + "\n\n" + "\n".join(f"| {' | '.join(cells[skip:])} |" for cells in table)


def tables(rows: Sequence[Row]) -> str:
    """Return the tables of all models."""
    return "".join(f"\n{table(rows, model)}\n" for model in dict.fromkeys(row["model"] for row in rows))


def write(rows: Sequence[Row], page: Path) -> None:
    """Replace the tables between pairs of comments in a page.

    ``<!-- presets: small float32 -->`` begins the table of a model and a dtype, ``<!-- presets: small -->`` the table
    of a model and all dtypes, ``<!-- presets: small float32 100mbit/0 -->`` that of the given links;
    ``<!-- end presets -->`` ends a table. A table for which there are no rows is left unchanged.
    """

    def new(match: re.Match[str]) -> str:
        made = table(rows, match[2], match[3], match[4].split())
        return f"{match[1]}\n{made}\n\n{match[5]}" if made else match[0]

    page.write_text(MARKED.sub(new, page.read_text()))


def plot(rows: Sequence[Row], path: str) -> None:
    """Plot step time against link rate, by preset, for one model without a round-trip time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    rows = [row for row in rows if (row["model"], row["dtype"]) == PLOTTED and "step_ms" in row]
    rates = {netns.bits(rate): netns.shown(rate) for rate, rtt in (link_of(r["link"]) for r in rows) if not rtt}
    rates.pop(None, None)
    if len(rates) < 2:
        raise SystemExit(f"{path}: the plot needs {' '.join(PLOTTED)} on two rates without a round-trip time")
    figure, ax = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for method in dict.fromkeys(row["method"] for row in rows):
        found = [(link_of(row["link"]), row["step_ms"]) for row in rows if row["method"] == method]
        if method == "compute":
            ax.axhline(found[0][1], color="k", linestyle=":", label="compute alone")
            continue
        points = sorted((netns.bits(rate), ms) for (rate, rtt), ms in found if not rtt)
        ax.loglog(*zip(*points, strict=True), "k-" if method == "none" else "o-", label=LABELS.get(method, method))
    values = next(row["values"] for row in rows)
    ax.set_title(f"{values / 1e6:.1f} M parameters, {PLOTTED[1]}, two ranks")
    ax.set_xticks(list(rates), [name.replace("bit", "bit/s") for name in rates.values()])
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(ticker.NullFormatter())
    ax.set_ylabel("milliseconds a step")
    ax.grid(alpha=0.3)
    ax.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
