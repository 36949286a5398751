"""Speed of all-reduces of gradients over slow links: Gloo in float32, torch's hooks, and every codec.

    sudo python bench/network/allreduce.py                # 2 and 4 ranks, five links, every codec: half an hour
    sudo python bench/network/allreduce.py --quick        # a few codecs on 2 MiB: under two minutes
    sudo python bench/network/allreduce.py --ranks 4 --links 100mbit --codecs lossless float8 "sign, block"

Ranks are processes in network namespaces (bench/network/netns.py: Linux, root, iproute2). Each rank is bound to its own
cores, or two ranks share a core if there are half as many cores as ranks. A token bucket limits the rate at which a
rank sends. Each rank has different gradients, recorded in one training step: float32 computed in bfloat16 as under
autocast, with the shapes of their parameters. Truncate gets gradients with the optimizer's state. A recording that is
too short is repeated with the rows of its parameters rotated, so that ranks differ.

A row is one all-reduce, timed from the start of the first rank until the last rank has the mean. Codecs write to
another tensor (`out=`); Gloo and hooks reduce in place. Trials of `--algorithm auto` are excluded.

sent        bytes that left a rank's interface, including headers and acknowledgements: mean over ranks
frames      bytes of a rank's frames in both phases, computed as if the tensor were encoded as a whole
cpu         CPU time of a rank, excluding the kernel's network stack. Ranks that share cores wait for each other
x raw       median speed relative to dist.all_reduce of float32 on the same link in the same run
allowed     upper bound of `x raw` from frame sizes: 2 / (r1 + r2), where r1 and r2 are the sizes of frames in the
            first and second phase, relative to the tensor
reached     x raw / allowed
error       root mean square of the result minus the exact mean, relative to that of the mean

Other load on the cores can change rows by factors, so compare runs on an idle machine. The TCP rate that was measured
for each rank is printed above each table; it is below the link's rate if the cores are too slow.

The run fails if ranks end with different bits, or if a codec's error exceeds that of one two-shot all-reduce with its
frames. Hooks get one bucket with all parameters, without a model: torch's PowerSGD hook hangs on Gloo with two.
"""

import argparse
import ast
import importlib.util
import json
import math
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import netns
import numpy as np

import codec
from codec._c.library import isas

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from family import FAMILY, TRUNCATE, optimizer_state
from gradients import segments, tensors

DATA = Path(__file__).parents[1] / "data"
SPECS: dict[str, codec.Spec] = {"Lossless": codec.Lossless(), **FAMILY, **TRUNCATE}
QUICK = ("Lossless", "Truncate near, by bit", "Float8 e4m3fn", "Quantize 4", "Sign, groups of 1,024")
RAW = "Gloo float32"
HOOKS = ("fp16 hook", "PowerSGD hook, rank 1", "PowerSGD hook, rank 4")
ROUNDING = 1e-6  # relative error allowed for float32 sums
SLACK = 1.5  # tolerance: factor by which errors may differ, because frames of slices have other blocks and random bits
AHEAD = 5e-3  # seconds from agreeing on a start time to that time

Array = np.ndarray[Any, Any]
Shapes = list[tuple[int, ...]]


# Gradients of each rank


@dataclass
class Capture:
    """Gradients recorded in one step, and the optimizer's state if the file has it."""

    path: Path
    values: Array
    shapes: Shapes
    optimizer: Any = None

    def made_in_bfloat16(self) -> float:
        """Return the fraction of values whose lower 16 bits are zero."""
        return float((self.values.view(np.uint32) & 0xFFFF == 0).mean())


def captures(folder: Path) -> list[Capture]:
    """Return the float32 gradients of a file or of all files of a folder, with their shapes."""
    found: list[Capture] = []
    for path in sorted(folder.glob("*.npz")) if folder.is_dir() else [folder]:
        for name, values, dtype, shapes in tensors(path):
            if ":grad" in name and dtype == "float32" and shapes:
                found.append(Capture(path, values, shapes))
        with np.load(path) as file:
            few = int(file["param"].size) if "param" in file.files else 0
            if few:
                every = [tuple(s) for s in ast.literal_eval(str(file["shapes"]))]
                sizes = np.cumsum([math.prod(s) for s in every])
                shapes = every[: int(np.searchsorted(sizes, few)) + 1]
                found.append(Capture(path, file["grad"][:few], shapes, optimizer_state(path, few)))
    return found


def turned(values: Array, shapes: Shapes, turn: int) -> Array:
    """Return a bucket of parameters, each with its rows rotated by `turn`."""
    parts = np.split(values, np.cumsum([math.prod(s) for s in shapes])[:-1])
    return np.concatenate([np.roll(p.reshape(s), turn, 0).ravel() for p, s in zip(parts, shapes, strict=True)])


def cut(shapes: Shapes, n: int) -> Shapes:
    """Repeat shapes up to a total of n values; the last shape is split into whole rows and the rest of a row."""
    found: Shapes = []
    while n:
        for shape in shapes:
            size = math.prod(shape)
            if size > n:
                row = size // shape[0]
                found += [(n // row, *shape[1:])] if n >= row else []
                found += [(n % row,)] if n % row else []
                return found
            found.append(shape)
            n -= size
    return found


@dataclass
class Gradients:
    """Values of one rank, the segments of its parameters, and the optimizer state that Truncate needs."""

    source: str
    values: Array
    shapes: Shapes
    how: dict[str, Any]


def gradients(which: Sequence[Capture], n: int, rank: int, world: int) -> Gradients:
    """Return a rank's values: captures of the same parameters, repeated with different rotations of their rows."""
    first = which[0]
    count = -(-n // first.values.size)
    tiles: list[Array] = []
    for tile in range(count):
        turn = tile * world + rank
        tiles.append(turned(which[turn % len(which)].values, first.shapes, turn // len(which)))
    how: dict[str, Any] = {}
    if first.optimizer is not None:
        # the optimizer state is equal on all ranks, so it is not rotated by rank
        metric, state = first.optimizer
        moved = {
            k: np.concatenate([turned(v, first.shapes, t * world) for t in range(count)]) for k, v in state.items()
        }
        how = {"optimizer": metric, "state": {k: v[:n] for k, v in moved.items()}}
    return Gradients(first.path.stem, np.concatenate(tiles)[:n], cut(first.shapes, n), how)


def kinds(folder: Path) -> tuple[list[Capture], list[Capture]]:
    """Return the captures without and with optimizer state, for other codecs and for Truncate."""
    found = captures(folder)
    plain, stateful = [c for c in found if c.optimizer is None], [c for c in found if c.optimizer is not None]
    if not plain:
        raise SystemExit(f"{folder}: no float32 gradients with shapes")
    main = max(plain, key=Capture.made_in_bfloat16)
    same = [c for c in plain if c.shapes == main.shapes]
    return same, stateful[:1]


# Functions that run on each rank


@dataclass
class Contender:
    """A method that all-reduces to the mean, and its frame sizes relative to the tensor in both phases."""

    name: str
    gradients: Gradients
    call: Callable[[Any, int], Any]  # call(tensor, number of the repetition) returns the tensor with the mean
    ratios: tuple[float, float] | None = (1.0, 1.0)
    limit: float = math.inf
    warm: int = 1  # number of untimed first repetitions, in which ranks connect and allocate
    before: Callable[[], None] = lambda: None
    after: Callable[[], tuple[float, float]] | None = None


class FlatBucket:
    """Replacement of DDP's bucket for hooks: a flat tensor with all parameters."""

    def __init__(self, flat: Any, shapes: Shapes) -> None:
        self.flat, self.shapes = flat, shapes

    def buffer(self) -> Any:
        return self.flat

    def gradients(self) -> list[Any]:
        sizes = [math.prod(s) for s in self.shapes]
        return [p.view(s) for p, s in zip(self.flat.split(sizes), self.shapes, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def raw(g: Gradients) -> Contender:
    import torch.distributed as dist

    def call(t: Any, _: int) -> Any:
        dist.all_reduce(t, op=dist.ReduceOp.AVG)
        return t

    return Contender(RAW, g, call, limit=ROUNDING)


def hooks(g: Gradients) -> list[Contender]:
    """Return torch's compression hooks. PowerSGD's error is reset, so that each repetition is a first step."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def fp16(t: Any, _: int) -> Any:
        default_hooks.fp16_compress_hook(None, FlatBucket(t, g.shapes)).wait()  # type: ignore[arg-type]
        return t

    found = [Contender(HOOKS[0], g, fp16, (0.5, 0.5), 0.1)]
    for name, order in zip(HOOKS[1:], (1, 4), strict=True):
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=order, start_powerSGD_iter=2)
        state.iter = state.start_powerSGD_iter  # the steps before it would be all-reduces without compression

        def power(t: Any, _: int, state: Any = state) -> Any:
            powerSGD_hook.powerSGD_hook(state, FlatBucket(t, g.shapes)).wait()  # type: ignore[arg-type]
            return t

        def forget(state: Any = state) -> None:
            state.total_numel_before_compression = state.total_numel_after_compression = 0
            for error in state.error_dict.values():
                error.zero_()

        def ratios(state: Any = state) -> tuple[float, float]:
            ratio = state.total_numel_after_compression / state.total_numel_before_compression
            return ratio, ratio

        found.append(Contender(name, g, power, None, before=forget, after=ratios))
    return found


def codecs(names: Sequence[str], plain: Gradients, stateful: Gradients | None, plan: dict[str, Any]) -> list[Contender]:
    """Return the methods of this library, for the codecs with these names."""
    import torch

    from codec.torch import all_reduce
    from codec.torch.group import autotune

    found: list[Contender] = []
    warm = autotune.TRIALS if plan["algorithm"] == "auto" else 1  # trials are not timed: training amortizes them
    out = None if plan["in_place"] else torch.empty(plain.values.size)
    for name in names:
        spec = SPECS[name]
        g = stateful if isinstance(spec, codec.Truncate) else plain
        if g is None:
            continue  # Truncate needs the optimizer's state, which no capture has
        inside, options = segments(g.shapes), codec.options(algorithm=plan["algorithm"])
        bound = spec
        if isinstance(spec, codec.Truncate):
            state = {k: torch.from_numpy(v) for k, v in g.how["state"].items()}
            bound = spec.bind(g.how["optimizer"], **state)

        def call(t: Any, repetition: int, spec: Any = bound, inside: Any = inside) -> Any:
            bucket = codec.view(t, segments=inside)
            all_reduce(bucket, spec, op="mean", stream=repetition, out=out, options=options)
            return t if out is None else out

        found.append(Contender(name, g, call, None, warm=warm))
    return found


def error_of(result: Array, exact: Array) -> float:
    return float(np.sqrt(((result - exact) ** 2).mean()) / np.sqrt((exact**2).mean()))


def exact_mean(of_ranks: Sequence[Gradients]) -> Array:
    return sum((g.values.astype(np.float64) for g in of_ranks), np.zeros(1)) / len(of_ranks)


def two_shot(spec: codec.Spec, of_ranks: Sequence[Gradients], exact: Array) -> tuple[tuple[float, float], float]:
    """Compute a two-shot all-reduce in one process; return the relative frame sizes of both phases, and the error."""
    inside = segments(of_ranks[0].shapes)
    nbytes = of_ranks[0].values.nbytes
    how = of_ranks[0].how
    bound = spec.bind(how["optimizer"], **how["state"]) if how and isinstance(spec, codec.Truncate) else None
    by, values = bound or spec, [codec.view(g.values, segments=inside) for g in of_ranks]
    frames = [codec.encode(x, by, stream=r) for r, x in enumerate(values)]
    mean = codec.reduce(frames, bound)
    frame = codec.encode(codec.view(mean, segments=inside), by, stream=len(frames))
    r1 = sum(map(len, frames)) / len(frames) / nbytes
    return (r1, len(frame) / nbytes), error_of(codec.decode(frame, bound, max_nbytes=1 << 40), exact)


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def worker(plan: dict[str, Any], others: Callable[[Gradients], list[Contender]] = lambda plain: []) -> None:
    """Measure all methods on all links, as one rank; `others` returns additional methods."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(plan["threads"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    n = round(plan["mib"] * (1 << 18))
    of_kinds = [[gradients(k, n, r, world) for r in range(world)] for k in kinds(Path(plan["data"])) if k]
    mine = [of_ranks[rank] for of_ranks in of_kinds]
    plain, stateful = mine[0], mine[1] if len(mine) > 1 else None
    contenders = [raw(plain), *hooks(plain), *others(plain)]
    if plan["codecs"]:
        contenders += codecs(plan["codecs"], plain, stateful, plan)
    exact: dict[str, Array] = {}
    if rank == 0:  # all other ranks wait for rank 0 in the next collective
        exact = {of_ranks[0].source: exact_mean(of_ranks) for of_ranks in of_kinds}
        for c in contenders:
            if c.name in SPECS:
                of_ranks = of_kinds[0] if c.gradients is plain else of_kinds[1]
                c.ratios, least = two_shot(SPECS[c.name], of_ranks, exact[c.gradients.source])
                c.limit = SLACK * least + ROUNDING
                say(kind="prepared", name=c.name)
    for turn, link in enumerate(plan["links"]):
        netns.shape(link)
        address = f"tcp://{os.environ['MASTER_ADDR']}:{netns.PORT + 1 + turn}"
        dist.init_process_group("gloo", address, timedelta(seconds=300), world, rank)
        say(kind="link", link=link, rate=netns.tcp_rate(rank, world), congestion=congestion())
        for c in [*contenders, contenders[0]]:  # raw again at the end, to detect changes of the machine's speed
            repeat(c, link, plan, exact.get(c.gradients.source))
        dist.barrier()
        dist.destroy_process_group()


def congestion() -> str:
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def together(dist: Any) -> None:
    """Wait until a time that rank 0 chooses, because ranks leave a barrier one by one. All ranks share one clock."""
    import torch

    start = torch.tensor([time.perf_counter() + AHEAD], dtype=torch.float64)
    dist.broadcast(start, 0)
    time.sleep(max(0, start.item() - time.perf_counter()))


def repeat(c: Contender, link: str, plan: dict[str, Any], exact: Array | None) -> None:
    """Repeat a method for the planned seconds, at least the planned number of times, and print the measurements."""
    import torch
    import torch.distributed as dist

    source, t = torch.from_numpy(c.gradients.values), torch.empty(c.gradients.values.size)
    mean = t
    times: list[tuple[float, float]] = []
    cpu: list[float] = []
    digests: list[int] = []
    sent: list[int] = []
    least, seconds = plan["repeat"], plan["seconds"]
    count, repetition = torch.tensor([c.warm + least]), 0
    while repetition < count:
        t.copy_(source)
        c.before()
        time.sleep(plan["pause"])
        before = netns.sent_nbytes()
        together(dist)
        cpu_before, start = time.process_time(), time.perf_counter()
        mean = c.call(t, repetition)
        times.append((start, time.perf_counter()))
        cpu.append(time.process_time() - cpu_before)
        dist.barrier()  # after it, no data are in flight, so that all sent bytes are counted
        sent.append(netns.sent_nbytes() - before)
        digests.append(zlib.crc32(mean.numpy()))
        if repetition == c.warm - 1:
            took = times[-1][1] - times[-1][0]
            count[0] = c.warm + max(least, min(8 * least, int(seconds / took)))
            dist.broadcast(count, 0)
        repetition += 1
    say(
        kind="result",
        link=link,
        name=c.name,
        source=c.gradients.source,
        times=times[c.warm :],
        sent=statistics.mean(sent[c.warm :]),
        cpu=statistics.median(cpu[c.warm :]),
        digests=digests,
        nbytes=t.numel() * 4,
        ratios=c.after() if c.after else c.ratios,
        limit=c.limit,
        error=None if exact is None else error_of(mean.numpy(), exact),
    )


# Functions that run in the parent process


def run(ranks: int, plan: dict[str, Any], args: argparse.Namespace, tick: Callable[[int, str], None]) -> list[Any]:
    """Start `ranks` ranks that measure, and return the reports of each rank."""
    how = {"both_ways": args.both_ways, "congestion": args.congestion, "slow_start_after_idle": not args.no_restart}
    command, threads = netns.worker_of(__file__, plan, ranks)
    with netns.Network(ranks, **how) as network:
        return network.run(command, timeout=args.timeout, environment=threads, on_line=tick, bind=not args.unbound)


def of_links(said: list[list[dict[str, Any]]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Combine the reports of ranks; return a table for each link, and a list of error messages."""
    tables: list[dict[str, Any]] = []
    wrong: list[str] = []
    for events in zip(*([e for e in events if e["kind"] != "prepared"] for events in said), strict=True):
        first = events[0]
        if first["kind"] == "link":
            rates = [e["rate"] for e in events]
            tables.append({"ranks": len(events), **first, "rates": rates, "rate": statistics.mean(rates), "rows": {}})
            continue
        where = f"{first['name']}, {len(events)} ranks, {netns.shown(first['link'])}"
        if any(e["digests"] != first["digests"] for e in events):
            wrong.append(f"{where}: replicas differ")
        if not first["error"] <= first["limit"]:  # `not <=` is also True for NaN
            wrong.append(f"{where}: wrong values, error {first['error']:.3g} is above {first['limit']:.3g}")
        seconds = durations(events)
        row = {k: first[k] for k in ("name", "source", "nbytes", "ratios", "error", "limit")}
        row |= {"seconds": seconds} | {k: statistics.mean(e[k] for e in events) for k in ("sent", "cpu")}
        if row["name"] in tables[-1]["rows"]:
            tables[-1]["rows"][row["name"]]["seconds"] += seconds
        else:
            tables[-1]["rows"][row["name"]] = row
    for table in tables:
        finish(table)
    return tables, wrong


def durations(events: Sequence[dict[str, Any]]) -> list[float]:
    """Return the seconds from the first rank's start to the last rank's end, since all ranks share a clock."""
    spans = zip(*(e["times"] for e in events), strict=True)
    return [max(end for _, end in s) - min(start for start, _ in s) for s in spans]


def finish(table: dict[str, Any]) -> None:
    """Add columns with speeds relative to raw Gloo to a table."""
    base = table["rows"][RAW]
    for row in table["rows"].values():
        row["median"], row["best"] = statistics.median(row["seconds"]), min(row["seconds"])
        row["speedup"] = statistics.median(base["seconds"]) / row["median"]
        row["frames"] = sum(row["ratios"]) * row["nbytes"] * (table["ranks"] - 1) / table["ranks"]
        row["allowed"] = 2 / sum(row["ratios"])
        row["reached"] = row["speedup"] / row["allowed"]
    table["rows"] = list(table["rows"].values())


HEADINGS = {"name": "", "speedup": "x raw"}
FORMATS: dict[str, Callable[[float], str]] = {
    "sent": lambda x: f"{x / 1e6:.2f} MB",
    "frames": lambda x: f"{x / 1e6:.2f} MB",
    "less": lambda x: f"{100 * x:.1f}%",
    "median": lambda x: f"{1e3 * x:,.1f} ms",
    "best": lambda x: f"{1e3 * x:,.1f} ms",
    "cpu": lambda x: f"{1e3 * x:,.1f} ms",
    "speedup": lambda x: f"{x:.2f}",
    "allowed": lambda x: f"{x:.2f}",
    "normalised": lambda x: f"{x:.3f}",
    "reached": lambda x: f"{100 * x:.0f}%",
    "error": lambda x: f"{x:.2g}",
}


def report(table: dict[str, Any], columns: Sequence[str]) -> None:
    """Print columns of a table; those without an entry in FORMATS are texts."""
    from rich.console import Console
    from rich.table import Table

    low, high = min(table["rates"]) / 1e6, max(table["rates"]) / 1e6
    title = f"{table['ranks']} ranks, {netns.shown(table['link'])} (TCP payload {low:,.0f} - {high:,.0f} Mbit/s a rank)"
    grid = Table(title=title, title_justify="left")
    for column in columns:
        justify = "right" if column in FORMATS else "left"
        grid.add_column(HEADINGS.get(column, column), justify=justify, no_wrap=True)
    for r in table["rows"]:
        grid.add_row(*(FORMATS.get(column, str)(r[column]) for column in columns))
    Console(width=max(132, Console().width)).print(grid)


def plot(tables: list[dict[str, Any]], path: str) -> None:
    """Draw speed relative to raw Gloo by link, a panel per number of ranks. Hollow markers: bound by frame size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = list(dict.fromkeys(t["ranks"] for t in tables))
    names = list(dict.fromkeys(r["name"] for t in tables for r in t["rows"] if r["name"] != RAW))
    colours = dict(zip(names, pyplot.get_cmap("turbo")(np.linspace(0.02, 0.98, max(len(names), 2))), strict=False))
    figure, panels = pyplot.subplots(1, len(counts), figsize=(2 + 5 * len(counts), 6), sharey=True, squeeze=False)
    for panel, ranks in zip(panels[0], counts, strict=True):
        some = [t for t in tables if t["ranks"] == ranks]
        where = range(len(some))
        for name in names:
            rows = [next((r for r in t["rows"] if r["name"] == name), None) for t in some]
            style = {"color": colours[name], "marker": "o"}
            panel.plot(where, [r["speedup"] if r else math.nan for r in rows], label=name, lw=1.2, ms=4, **style)
            allowed = [r["allowed"] if r else math.nan for r in rows]
            panel.plot(where, allowed, ls="none", ms=7, mfc="none", mew=0.7, **style)
        panel.axhline(1, color="black", lw=0.8)
        panel.set_xticks(list(where), [netns.shown(t["link"]) for t in some])
        panel.set_yscale("log")
        panel.set_title(f"{ranks} ranks")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("times as fast as Gloo in float32 (hollow: what frames allow)")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130, bbox_inches="tight")


def chosen(asked: Sequence[str]) -> list[str]:
    """Return the codecs whose names begin with the given texts."""
    found: list[str] = []
    for text in asked:
        if text.lower() == "none":
            continue
        exact = [name for name in SPECS if name.lower() == text.lower()]
        matches = exact or [name for name in SPECS if name.lower().startswith(text.lower())]
        if not matches:
            raise SystemExit(f"no codec begins with {text!r}; there are: {'; '.join(SPECS)}; none")
        found += [m for m in matches if m not in found]
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that the benchmarks of all-reduces share."""
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="numbers of ranks (2 4)")
    parser.add_argument("--codecs", nargs="+", help="beginnings of names of codecs; none: no codec (all)")
    parser.add_argument("--mib", type=float, help="MiB of float32 on each rank (25)")
    parser.add_argument("--repeat", type=int, help="minimum number of timed repetitions (5)")
    parser.add_argument("--seconds", type=float, help="minimum time for the repetitions of a row (0.5)")
    parser.add_argument("--unbound", action="store_true", help="do not bind ranks to cores")
    parser.add_argument("--congestion", help="TCP's congestion control (the machine's)")
    parser.add_argument("--no-restart", action="store_true", help="net.ipv4.tcp_slow_start_after_idle=0")
    parser.add_argument("--quick", action="store_true", help="a few codecs, 2 MiB, 2 repetitions: under two minutes")
    parser.add_argument("--json", metavar="FILE", help="write all measurements")
    parser.add_argument("--plot", metavar="FILE", help="draw a plot (.png; needs matplotlib)")


def set_defaults(args: argparse.Namespace) -> None:
    """Set sizes and repetitions that were not given."""
    args.mib = args.mib or (2 if args.quick else 25)
    args.repeat = args.repeat or (2 if args.quick else 5)
    args.seconds = args.seconds or (0.1 if args.quick else 0.5)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    links = " ".join(netns.LINKS)
    parser.add_argument("--links", nargs="+", default=list(netns.LINKS), help=f"what a rank may send ({links})")
    parser.add_argument(
        "--pause", type=float, default=0, help="seconds before each repetition, as backward() would take"
    )
    parser.add_argument("--data", type=Path, default=DATA, help="folder with other captures (.npz)")
    parser.add_argument("--algorithm", default="two_shot", help="algorithm of codec.torch.all_reduce (two_shot)")
    parser.add_argument("--in-place", action="store_true", help="also measure codecs that write to the tensor itself")
    parser.add_argument("--threads", type=int, help="threads of each rank (cores / ranks, at least 1)")
    parser.add_argument("--both-ways", action="store_true", help="also limit what a rank receives")
    parser.add_argument("--timeout", type=float, default=3600, help="maximum seconds for a number of ranks (3,600)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    set_defaults(args)
    return args


def check(args: argparse.Namespace) -> list[str]:
    """Reject arguments that would fail later; return the names of the codecs."""
    netns.require()
    for link in args.links:
        netns.bits(link)
    if min(args.ranks) < 2:
        raise SystemExit("an all-reduce needs two ranks")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("--plot needs matplotlib")
    return chosen(args.codecs or (QUICK if args.quick else list(SPECS)))


def main() -> None:
    args = arguments()
    if args.worker:
        worker(json.loads(args.worker))
        return
    with netns.ending(__file__):
        names = check(args)
        if names:
            import codec.torch  # noqa: F401
        kinds(args.data)
        measure(args, names)


def measure(args: argparse.Namespace, names: list[str]) -> None:
    from rich.console import Console
    from rich.progress import Progress

    cores = len(os.sched_getaffinity(0))
    tables: list[dict[str, Any]] = []
    wrong: list[str] = []
    each = len(names) + len(args.links) * (len(names) + len(HOOKS) + 3)
    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=each * len(args.ranks))
            for ranks in args.ranks:
                plan = {
                    k: getattr(args, k) for k in ("links", "mib", "repeat", "seconds", "pause", "algorithm", "in_place")
                }
                plan |= {"codecs": names, "data": str(args.data), "threads": args.threads or max(1, cores // ranks)}

                def tick(rank: int, line: str, ranks: int = ranks) -> None:
                    if rank == 0 and line.startswith("{"):
                        event = json.loads(line)
                        what = netns.shown(event["link"]) if "link" in event else "frames"
                        bar.update(task, advance=1, description=f"{ranks} ranks, {what} {event.get('name', '')}")

                bar.update(task, description=f"{ranks} ranks")
                found, problems = of_links(run(ranks, plan, args, tick))
                tables += found
                wrong += problems
    finally:  # show results even after an error, since measurements take long
        if tables:
            show(tables, args, {"cores": cores, "isa": isas()[-1]})
    if wrong:
        raise SystemExit("WRONG\n" + "\n".join(wrong))
    print("Replicas were identical to the bit in all repetitions.")


def show(tables: list[dict[str, Any]], args: argparse.Namespace, about: dict[str, Any]) -> None:
    about |= {
        "congestion": tables[0]["congestion"],
        "algorithm": args.algorithm,
        "in_place": args.in_place,
        "both_ways": args.both_ways,
        "bound": not args.unbound,
    }
    about |= {"slow_start_after_idle": not args.no_restart, "pause": args.pause}
    about |= {"load": [round(x, 1) for x in os.getloadavg()]}  # above the number of ranks: other processes ran, too
    sources = dict.fromkeys(r["source"] for t in tables for r in t["rows"])
    print(f"{args.mib:g} MiB of float32 a rank: {', '.join(sources)}")
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    for table in tables:
        report(table, ("name", "sent", "frames", "median", "best", "cpu", "speedup", "allowed", "reached", "error"))
    if args.json:
        Path(args.json).write_text(json.dumps({"mib": args.mib, **about, "tables": tables}, indent=1))
    if args.plot:
        plot(tables, args.plot)


if __name__ == "__main__":
    main()
