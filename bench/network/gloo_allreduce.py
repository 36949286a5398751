"""All-reduce in C++ over slow links: Gloo in float32, and every codec with every algorithm of codec/gloo.h.

    sudo python bench/network/gloo_allreduce.py                # 2 and 4 ranks, four links: about 25 minutes
    sudo python bench/network/gloo_allreduce.py --quick        # a few codecs on 2 MiB: under two minutes
    sudo python bench/network/gloo_allreduce.py --ranks 4 --links 100mbit --codecs lossless --algorithms ring
    sudo python bench/network/gloo_allreduce.py --rtt 100 --mib 0.01 --links 1gbit --algorithms two_shot auto

This is the experiment of figure 10 in GComp (SoCC 2024): the time of an all-reduce of gradients, relative to
gloo::allreduce of float32 in the same run. `make gloo` builds bench/network/gloo_allreduce.cc, the program that each
rank runs. Ranks, cores and gradients are those of bench/network/allreduce.py.

sent        bytes of frames and uncompressed values that a rank sends: mean over ranks
less        bytes that Gloo's ring sends / `sent`
cpu         CPU time of a rank, including Gloo's thread
normalised  median time / that of Gloo's ring on the same link in the same run, as in the paper's figure
reached     speed relative to Gloo's ring, divided by `less`
error       root mean square of the result minus the exact mean, relative to that of the mean

The run fails if ranks end with different bits, or if an error is far above that of encoding each value once.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import allreduce
import netns
import numpy as np

import codec
from codec import _call
from codec._c.library import ffi, isas
from codec._c.spec_structs import spec_struct
from codec.optimizers.arguments import level_source

HERE = Path(__file__).parent
PROGRAM = HERE.parents[1] / "build" / "native" / "gloo_allreduce"
LINKS = ("100mbit", "500mbit", "1gbit", "10gbit")
STOCK = "Gloo float32"
ALGORITHMS = ("two_shot", "all_gather", "ring", "raw", "auto")
HOPS = 3.0  # maximum error of a ring, which encodes sums at each hop, as a multiple of the error of one encoding


def hexed(struct: Any) -> str:
    return bytes(ffi.buffer(struct)).hex()


class Plan:
    """Plan of the measurements, and the files from which ranks read it."""

    def __init__(self, folder: Path, ranks: int, args: argparse.Namespace, names: Sequence[str]) -> None:
        self.folder, self.ranks = folder, ranks
        n = round(args.mib * (1 << 18))
        self.lines = [f"n {n}", f"repeat {args.repeat}", f"seconds {args.seconds}", f"pause {args.pause}"]
        self.limits: dict[str, float] = {}
        self.about: dict[str, tuple[str, str]] = {}  # by label: name and algorithm of the row
        kinds = [[allreduce.gradients(k, n, r, ranks) for r in range(ranks)] for k in args.kinds if k]
        exact = [allreduce.exact_mean(of_ranks) for of_ranks in kinds]
        self.sources = [of_ranks[0].source for of_ranks in kinds]
        for i, of_ranks in enumerate(kinds):
            self.add_data(f"data{i}", of_ranks, exact[i])
        blank = "00" * ffi.sizeof("codec_spec")
        self.add_row(STOCK, "ring", f"data0 stock_ring {blank}", allreduce.ROUNDING)
        if args.bcube:
            self.add_row(STOCK, "bcube", f"data0 stock_bcube {blank}", allreduce.ROUNDING)
        for name in names:
            spec = allreduce.SPECS[name]
            stateful = isinstance(spec, codec.Truncate)
            if stateful and len(kinds) == 1 and not kinds[0][0].how:
                continue  # Truncate needs the optimizer's state, which no capture has
            which = len(kinds) - 1 if stateful else 0
            _, least = allreduce.two_shot(spec, kinds[which], exact[which])
            for algorithm in args.algorithms:
                hops = allreduce.SLACK if algorithm in ("two_shot", "all_gather", "auto") else HOPS
                row = f"data{which} {algorithm} {hexed(spec_struct(spec))}"
                self.add_row(name, algorithm, row, hops * least + allreduce.ROUNDING)
        self.add_row(
            STOCK, "ring", f"data0 stock_ring {blank}", allreduce.ROUNDING
        )  # measured again at the end, to detect changes of the machine's speed
        self.path = folder / "plan"
        self.path.write_text("\n".join(self.lines) + "\n")

    def add_data(self, name: str, of_ranks: Sequence[allreduce.Gradients], exact: allreduce.Array) -> None:
        for r, g in enumerate(of_ranks):
            g.values.astype("<f4").tofile(self.folder / f"{name}-{r}")
        exact.tofile(self.folder / f"{name}-exact")
        self.lines.append(f"data {name} {self.folder}/{name}-%r {self.folder}/{name}-exact")
        offset = 0
        for shape in of_ranks[0].shapes:
            self.lines.append(f"segment {name} {offset} {' '.join(map(str, shape))}")
            offset += int(np.prod(shape))
        how = of_ranks[0].how
        if how:
            call = _call.take()
            bound = codec.Truncate().bind(how["optimizer"], **how["state"])
            call.set_levels(level_source(bound, exact.size))
            metric = call.context.metric
            self.lines.append(f"metric {name} {hexed(metric)}")
            for field in ("theta", "v", "m"):
                if getattr(metric, field):
                    how["state"][field].astype("<f4").tofile(self.folder / f"{name}-{field}")
                    self.lines.append(f"state {name} {field} {self.folder}/{name}-{field}")

    def add_row(self, name: str, algorithm: str, rest: str, limit: float) -> None:
        key = f"row{len(self.about)}"
        self.about[key] = name, algorithm
        self.limits[key] = limit
        self.lines.append(f"row {key} {rest}")


def table_of(plan: Plan, said: list[list[dict[str, Any]]], link: str, rates: list[float]) -> tuple[Any, list[str]]:
    """Combine the reports of ranks for a link; return a table and a list of error messages."""
    wrong: list[str] = []
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for events in zip(*said, strict=True):
        first = events[0]
        name, algorithm = plan.about[first["name"]]
        where = f"{name} by {algorithm}, {plan.ranks} ranks, {netns.shown(link)}"
        if any(e["digests"] != first["digests"] for e in events):
            wrong.append(f"{where}: replicas differ")
        if not first["error"] <= plan.limits[first["name"]]:  # `not <=` is also True for NaN
            wrong.append(f"{where}: error {first['error']:.3g} is above {plan.limits[first['name']]:.3g}")
        row = rows.setdefault((name, algorithm), {"name": name, "algorithm": algorithm, "seconds": []})
        row["seconds"] += allreduce.durations(events)
        row["error"] = first["error"]
        row |= {k: statistics.mean(e[k] for e in events) for k in ("sent", "cpu")}
    base = rows[STOCK, "ring"]
    nbytes = np.fromfile(plan.folder / "data0-0", "<f4").nbytes
    stock_sent = 2 * (plan.ranks - 1) / plan.ranks * nbytes
    for row in rows.values():
        if row["name"] == STOCK:
            row["sent"] = stock_sent
        row["median"], row["best"] = statistics.median(row["seconds"]), min(row["seconds"])
        row["normalised"] = row["median"] / statistics.median(base["seconds"])
        row["less"] = 1 - row["sent"] / stock_sent
        row["reached"] = row["sent"] / stock_sent / row["normalised"]
    return {"ranks": plan.ranks, "link": link, "rates": rates, "rows": list(rows.values())}, wrong


COLUMNS = ("name", "algorithm", "sent", "less", "median", "best", "cpu", "normalised", "reached", "error")


def plot(tables: list[dict[str, Any]], path: str) -> None:
    """Draw normalised times, with a panel for each link and number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(tables), figsize=(1 + 3.2 * len(tables), 5), sharey=True, squeeze=False)
    for panel, table in zip(panels[0], tables, strict=True):
        labels = [f"{r['name']}\n{r['algorithm']}" for r in table["rows"]]
        panel.barh(labels, [r["normalised"] for r in table["rows"]])
        panel.axvline(1, color="black", lw=0.8)
        panel.invert_yaxis()
        panel.set_title(f"{table['ranks']} ranks, {netns.shown(table['link'])}", fontsize=9)
        panel.tick_params(labelsize=7)
        panel.set_xlabel("time over Gloo's float32")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def measure(args: argparse.Namespace, names: list[str]) -> None:
    from rich.console import Console
    from rich.progress import Progress

    tables: list[dict[str, Any]] = []
    wrong: list[str] = []
    how = {"congestion": args.congestion, "slow_start_after_idle": not args.no_restart}
    bind = not args.unbound
    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            for ranks in args.ranks:
                task = bar.add_task(f"{ranks} ranks: preparing", total=None)
                with tempfile.TemporaryDirectory() as folder, netns.Network(ranks, rtt=args.rtt, **how) as network:
                    plan = Plan(Path(folder), ranks, args, names)
                    bar.update(task, total=len(plan.about) * len(args.links))
                    for link in args.links:
                        probe = [sys.executable, str(HERE / "netns.py"), "--probe", "--links", link]
                        rates = [found[0]["rate"] for found in network.run(probe, timeout=60, bind=bind)]
                        with tempfile.TemporaryDirectory() as store:

                            def tick(rank: int, line: str, ranks: int = ranks, link: str = link) -> None:
                                if rank == 0 and line.startswith("{"):
                                    bar.update(task, advance=1, description=f"{ranks} ranks, {netns.shown(link)}")

                            command = [str(args.program), str(plan.path), store]
                            said = network.run(command, timeout=args.timeout, on_line=tick, bind=bind)
                        table, problems = table_of(plan, said, link, rates)
                        tables.append(table)
                        wrong += problems
                bar.remove_task(task)
    finally:  # show results even after an error, since measurements take long
        if tables:
            about = {"mib": args.mib, "cores": len(os.sched_getaffinity(0)), "bound": bind, "isa": isas()[-1]}
            about |= {
                "rtt_ms": args.rtt,
                "sources": ", ".join(plan.sources),
                "load": [round(x, 1) for x in os.getloadavg()],
            }
            print(", ".join(f"{k} {v}" for k, v in about.items()))
            for table in tables:
                allreduce.report(table, COLUMNS)
            if args.json:
                Path(args.json).write_text(json.dumps({**about, "tables": tables}, indent=1))
            if args.plot:
                plot(tables, args.plot)
    if wrong:
        raise SystemExit("WRONG\n" + "\n".join(wrong))
    print("Replicas were identical to the bit in all repetitions.")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    allreduce.add_arguments(parser)
    parser.add_argument("--links", nargs="+", default=list(LINKS), help=f"what a rank may send ({' '.join(LINKS)})")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, help="two_shot ring auto")
    parser.add_argument("--bcube", action="store_true", help="also measure Gloo's algorithm bcube")
    parser.add_argument("--rtt", type=float, default=0, help="round-trip time in milliseconds (0)")
    parser.add_argument("--pause", type=float, default=0, help="seconds before each repetition")
    parser.add_argument(
        "--data", type=Path, default=HERE.parent / "data", help="capture (.npz), or a folder of captures"
    )
    parser.add_argument("--program", type=Path, default=PROGRAM, help="program that each rank runs")
    parser.add_argument("--timeout", type=float, default=3600, help="maximum seconds for a link (3,600)")
    args = parser.parse_args()
    allreduce.set_defaults(args)
    args.algorithms = args.algorithms or (["two_shot"] if args.quick else ["two_shot", "ring", "auto"])
    return args


def main() -> None:
    args = arguments()
    with netns.ending(__file__):
        names = allreduce.check(args)
        if not args.program.exists():
            raise SystemExit(f"{args.program} is missing: make gloo")
        args.kinds = allreduce.kinds(args.data)
        measure(args, names)


if __name__ == "__main__":
    main()
