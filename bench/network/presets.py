"""Time of a training step by preset and link, and the loss that each preset reaches.

    make links                                                 # all, into the pages: 40 minutes on two idle cores
    sudo python bench/network/presets.py --quick               # the small model on three links: 2 minutes
    sudo python bench/network/presets.py --json links.json     # interrupted: the same command measures what is missing

Two ranks are processes in network namespaces (bench/network/netns.py: Linux, root, iproute2, TUN devices). They train a
causal transformer on the bytes of the source of Python's standard library with DistributedDataParallel and AdamW. A
token bucket limits what each rank sends, and packets wait for half of the round-trip time. Each rank has one core.

ms a step   milliseconds between two steps of the optimizer: median of the slowest rank. "compute" is the same step
            without communication (torch's noop_hook)
bytes       bytes that the hook sends in a step / those of the uncompressed all-reduce
loss        held-out loss after ``--loss-steps`` steps. A link changes when gradients arrive, not their values: the
            training takes its first steps on the links that are measured, and the rest without a limit

Models are ``small``, 0.9 M parameters, and ``large``, 31.8 M parameters. In bfloat16 all parameters, gradients and
state of the optimizer are bfloat16. Presets are those of the library, in ``ddp_hook(preset, optimizer=optimizer)``
with ``algorithm="two_shot"``: the default, "auto", sends uncompressed values where that is faster.

A cell (model, dtype, link, method) has one untimed step, and as many timed ones as take ``--seconds``, estimated from
the rate, at most ``--steps`` and at least 2; 1 where a step takes more than 6 seconds.
"""

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import netns
import preset_tables
from preset_tables import ALONE, Row, link_of

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))


class Model(NamedTuple):
    """Size of a transformer, and estimated times of its training on one core."""

    width: int
    layers: int
    batch: int  # sequences of 64 bytes on each rank
    step: float  # seconds of a step without communication, for estimates
    start: float  # seconds until the first step, for estimates


MODELS = {"small": Model(128, 4, 8, 0.06, 0.5), "large": Model(512, 10, 2, 0.6, 3.0)}
DTYPES = {"float32": 4, "bfloat16": 2}
# by method: estimated bytes sent per float32 value, and per bfloat16 value
SENT = {"compute": (0, 0), "none": (4, 2), "fp16 hook": (2, 2), "lossless": (3.2, 1.4), "near": (1.6, 0.6)}
SENT |= {"balanced": (1.06, 1.06), "small": (0.6, 0.6), "smallest": (0.2, 0.2)}
SHORT = ("20mbit/0", "100mbit/0", "1gbit/0", "10gbit/0")
LINKS = {  # 20mbit/100 is left out for "large", whose gradients take a minute: a round trip makes no difference
    "small": (*SHORT, "20mbit/100", "100mbit/100", "1gbit/100"),
    "large": (*SHORT, "100mbit/100", "1gbit/100"),
}
QUICK = ("20mbit/0", "100mbit/0", "1gbit/0")
WARMUP = 3  # untimed steps: DDP rebuilds its buckets, and hooks send the first gradients lossless
CONTEXT = 64


class Cell(NamedTuple):
    """Measurement to make: the time of a step on a link, the loss, or the time of computing without communication."""

    model: str
    dtype: str
    method: str
    link: str

    def step(self) -> float:
        """Return the estimated seconds of a step."""
        model, (rate, rtt) = MODELS[self.model], link_of(self.link)
        nbytes = 12 * model.width**2 * model.layers * SENT[self.method][DTYPES[self.dtype] == 2]
        return model.step + 1.15 * 8 * nbytes / (netns.bits(rate) or 1e10) + rtt / 1000  # 15% for headers and TCP

    def is_loss(self) -> bool:
        """Return True if this cell measures the loss of a training run."""
        return self.link == ALONE and self.method != "compute"

    def steps(self, args: argparse.Namespace) -> int:
        """Return the number of timed steps, or of training steps before the loss is measured."""
        if self.is_loss():
            return args.loss_steps[self.model]
        return max(1 if self.step() > 6 else 2, min(args.steps, round(args.seconds / self.step())))

    def seconds(self, args: argparse.Namespace) -> float:
        """Return the estimated seconds of the whole measurement."""
        return (self.steps(args) + (not self.is_loss())) * self.step()


# Functions that run on each rank


class Training:
    """Data-parallel training of a model with one preset, or without a hook."""

    def __init__(self, method: Any, model: str, dtype: str, source: Any) -> None:
        import torch
        from models import Language
        from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
        from torch.nn.parallel import DistributedDataParallel

        import codec.torch

        torch.manual_seed(0)
        width, layers, self.batch = MODELS[model][:3]
        self.source, self.taken = source, 0
        self.net = Language(width, layers, CONTEXT).to(getattr(torch, dtype))
        self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        self.hook = None
        if method == "compute":
            self.model.register_comm_hook(None, debugging_hooks.noop_hook)
        elif method == "fp16 hook":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif method != "none":
            options = codec.options(algorithm="two_shot")
            self.hook = codec.torch.ddp_hook(method, optimizer=self.optimizer, options=options).register(self.model)

    def loss_of(self, windows: Any) -> Any:
        """Return the mean cross-entropy of windows of bytes."""
        from torch.nn import functional as F

        logits = self.model(windows[:, :-1]).flatten(0, -2).float()
        return F.cross_entropy(logits, windows[:, 1:].flatten())

    def train(self, steps: int) -> list[float]:
        """Run training steps on random windows of the text; return the seconds between the ends of steps."""
        import torch

        ends = [time.perf_counter()]
        for _ in range(steps):
            at = torch.randint(len(self.source) - CONTEXT, (self.batch, 1), generator=self.generator)
            self.optimizer.zero_grad()
            self.loss_of(self.source[at + torch.arange(CONTEXT + 1)].long()).backward()
            self.optimizer.step()
            ends.append(time.perf_counter())
        self.taken += steps
        return [b - a for a, b in itertools.pairwise(ends)]

    def evaluate(self, held_out: Any) -> float:
        """Return the mean loss on held-out windows."""
        import torch

        with torch.no_grad():
            return statistics.mean(float(self.loss_of(some)) for some in held_out.long().split(32))

    def measure(self, rate: str, steps: int) -> Row:
        """Return the time of a step at this rate of the link, and the fraction of bytes that the hook sends."""
        import torch
        import torch.distributed as dist

        dist.barrier()  # so that no rank sends while the rates of ranks differ
        netns.shape(rate)
        dist.barrier()
        self.train(1)  # an untimed step: ranks leave the barrier at different times, and TCP adapts to the rate
        before = self.sent_nbytes()
        step = torch.tensor(statistics.median(self.train(steps)), dtype=torch.float64)
        dist.all_reduce(step, op=dist.ReduceOp.MAX)
        values = sum(p.numel() for p in self.net.parameters())
        raw = next(self.net.parameters()).element_size() * values
        share = (self.sent_nbytes() - before) / steps / raw
        return {"values": values, "steps": steps, "step_ms": 1e3 * step.item(), "share": share}

    def sent_nbytes(self) -> int:
        """Return the bytes that the hook has sent; 0 without one."""
        return 0 if self.hook is None else self.hook.stats().sent_nbytes


def worker(plan: Row) -> None:
    """Measure the links and losses of all methods on one rank; rank 0 prints the rows."""
    import torch.distributed as dist
    from models import text

    rank, rtt = netns.join(plan["threads"], 900)
    source = text()
    kept, held = source[: len(source) // 10 * 9], source[len(source) // 10 * 9 :]
    windows = held[: len(held) // 65 * 65].view(-1, 65)
    windows = windows[:: max(1, len(windows) // 128)]
    for method, links in plan["methods"].items():
        training = Training(method, plan["model"], plan["dtype"], kept)
        training.train(WARMUP)
        for link, steps in links.items():
            if link == ALONE and method != "compute":  # the last cell: `steps` counts all steps of the training
                netns.shape("none")
                training.train(steps - training.taken)
                row = {"loss": training.evaluate(windows), "steps": steps}
            else:
                row = training.measure(link_of(link)[0], steps) | {"measured_rtt_ms": 1e3 * rtt}
            if rank == 0:
                print(json.dumps({"method": method, "link": link, **row}), flush=True)
        dist.barrier()
        netns.shape("none")
    dist.barrier()
    dist.destroy_process_group()


# Functions that run in the parent process


class Results:
    """Rows of finished cells, in a file that survives interruptions.

    Parameters
    ----------
    path : str, optional
        JSON file of earlier results, if it exists, and of new results. None: store rows in memory only.
    settings : dict
        Settings on which the rows depend, as JSON types.

    Raises
    ------
    SystemExit
        The file has rows measured with other settings, or was not written by this script.
    """

    def __init__(self, path: str | None, settings: Row) -> None:
        self.path, self.settings = Path(path) if path else None, settings
        self.rows: list[Row] = []
        if self.path is None or not self.path.exists():
            return
        try:
            found = json.loads(self.path.read_text())
            theirs, self.rows = found["settings"], found["rows"]
        except (ValueError, TypeError, KeyError):
            raise SystemExit(f"{path}: not a file of bench/network/presets.py; give --json another name") from None
        if theirs != settings:
            differ = ", ".join(k for k in settings | theirs if settings.get(k) != theirs.get(k))
            raise SystemExit(f"{path}: its rows were measured with another {differ}; delete it to measure all again")

    def add(self, row: Row) -> None:
        """Add the row of a finished cell, and write all rows to the file."""
        self.rows.append(row)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_name(self.path.name + ".part")
            part.write_text(json.dumps({"settings": self.settings, "rows": self.rows}, indent=1))
            part.replace(self.path)

    def missing(self, cells: list[Cell]) -> list[Cell]:
        """Return those of the cells that have no row in the results yet."""
        have = {tuple(row[field] for field in Cell._fields) for row in self.rows}
        return [cell for cell in cells if cell not in have]


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """Return all cells; a method's loss comes after its links without a round-trip time, whose steps it continues."""
    cells: list[Cell] = []
    for model, dtype, method in itertools.product(args.models, args.dtypes, args.methods):
        if method == "fp16 hook" and DTYPES[dtype] == 2:
            continue  # the fp16 hook sends as many bytes for bfloat16 as no hook
        links = [] if method == "compute" else list(args.links or (QUICK if args.quick else LINKS[model]))
        some = [Cell(model, dtype, method, link) for link in links]
        taken = WARMUP + sum(1 + cell.steps(args) for cell in some if not link_of(cell.link)[1])
        if 0 < args.loss_steps[model] < taken:
            raise SystemExit(f"--loss-steps: timing {model} takes {taken} steps; ask for as many or more, or for 0")
        if method == "compute" or args.loss_steps[model]:
            some.append(Cell(model, dtype, method, ALONE))
        cells += some
    return cells


def runs_of(cells: list[Cell]) -> dict[tuple[str, str, float], list[Cell]]:
    """Return the cells grouped by model, dtype and round-trip time. Each group is measured on a network of its own."""
    runs: dict[tuple[str, str, float], list[Cell]] = {}
    for cell in cells:
        runs.setdefault((cell.model, cell.dtype, link_of(cell.link)[1]), []).append(cell)
    return runs


def estimate(cells: list[Cell], args: argparse.Namespace) -> float:
    """Return the estimated seconds that measuring the cells takes on idle cores."""
    starts = {(cell.model, cell.dtype, cell.method, link_of(cell.link)[1]) for cell in cells}
    seconds = sum(MODELS[model].start + WARMUP * MODELS[model].step for model, *_ in starts)
    return seconds + 8 * len(runs_of(cells)) + sum(cell.seconds(args) for cell in cells)


def measure(results: Results, cells: list[Cell], args: argparse.Namespace) -> None:
    """Measure cells, and add their rows to the results."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    environment = {k: str(threads) for k in ("OMP_NUM_THREADS", "CODEC_NUM_THREADS")}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("/"))
    with Progress(*columns, TimeRemainingColumn(), transient=True) as bar:
        task = bar.add_task("", total=sum(cell.seconds(args) for cell in cells))
        for (model, dtype, rtt), some in runs_of(cells).items():
            methods: dict[str, dict[str, int]] = {}
            for cell in some:
                methods.setdefault(cell.method, {})[cell.link] = cell.steps(args)

            def add(rank: int, line: str, of: tuple[str, str] = (model, dtype)) -> None:
                if rank or not line.startswith("{"):
                    return
                row = json.loads(line)
                results.add({"model": of[0], "dtype": of[1], **row})
                bar.update(task, advance=Cell(*of, row["method"], row["link"]).seconds(args))

            bar.update(task, description=f"{model}, {dtype}, round trip {rtt:g} ms")
            plan = {"threads": threads, "model": model, "dtype": dtype, "methods": methods}
            command = [sys.executable, __file__, "--worker", json.dumps(plan)]
            with netns.Network(2, rtt=rtt) as network:
                network.run(command, environment=environment, timeout=7200, on_line=add, bind=True)


def processor() -> str:
    """Return the name of the processor."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else "unknown processor"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: both")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="dtypes of parameters and gradients (both)")
    parser.add_argument("--links", nargs="+", help="rate/round-trip time in ms, such as 100mbit/20; default: 7 links")
    parser.add_argument("--methods", nargs="+", choices=SENT, default=list(SENT))
    parser.add_argument("--quick", action="store_true", help="small, float32, three links, no losses, 2 seconds a cell")
    parser.add_argument("--steps", type=int, default=10, help="most timed steps of a cell (10)")
    parser.add_argument("--seconds", type=float, help="seconds of the timed steps of a cell (5)")
    parser.add_argument("--loss-steps", type=int, nargs=2, metavar=("SMALL", "LARGE"),
                        help="steps of trainings whose loss is measured (250 50); 0 0: none")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="keep finished cells; those that are in it are not measured")
    parser.add_argument("--plot", metavar="FILE", help="draw a plot (.png; needs matplotlib)")
    parser.add_argument("--pages", nargs="+", default=[], metavar="FILE",
                        help="replace the tables between <!-- presets: ... --> and <!-- end presets -->")  # fmt: skip
    parser.add_argument("--estimate", action="store_true", help="print the estimated duration only")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib")
    args.models = args.models or (["small"] if args.quick else list(MODELS))
    args.dtypes = args.dtypes or (["float32"] if args.quick else list(DTYPES))
    args.seconds = args.seconds or (2 if args.quick else 5)
    try:
        unlimited = [link for link in args.links or () if netns.bits(link_of(link)[0]) is None]
    except netns.NetworkError as e:
        parser.error(str(e))
    if unlimited:
        parser.error(f"--links: {unlimited[0]}: a link needs a rate, such as 10gbit/0")
    args.loss_steps = dict(zip(MODELS, args.loss_steps or ((0, 0) if args.quick else (250, 50)), strict=True))
    return args


def main() -> None:
    args = arguments()
    if args.worker:
        worker(json.loads(args.worker))
        return
    settings = {k: getattr(args, k) for k in ("steps", "seconds", "loss_steps")}
    settings |= {"models": {k: list(v) for k, v in MODELS.items()}, "processor": processor()}
    results, cells = Results(args.json, settings), cells_of(args)
    missing = results.missing(cells)
    minutes = estimate(missing, args) / 60
    print(f"{len(missing)} of {len(cells)} cells are to be measured: about {minutes:.0f} minutes on two idle cores")
    if args.estimate:
        return
    netns.end_on_sigterm()
    kept = f"Finished cells are in {args.json}: run the same command to go on" if args.json else "--json keeps cells"
    try:
        if missing:
            netns.require()
            print(f"The load average is {os.getloadavg()[0]:.1f}; other programs make steps slower", flush=True)
            measure(results, missing, args)
    except netns.NetworkError as e:
        raise SystemExit(f"bench/network/presets.py: {e}\n{kept if results.rows else ''}") from None
    except KeyboardInterrupt:
        print(kept, file=sys.stderr)
        sys.exit(130)
    print(preset_tables.tables(results.rows))
    for page in args.pages:
        preset_tables.write(results.rows, Path(page))
    if args.plot:
        preset_tables.plot(results.rows, args.plot)


if __name__ == "__main__":
    main()
