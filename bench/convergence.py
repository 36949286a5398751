"""What codecs do to training: real data-parallel steps, every codec against float32 from the same seeds.

Ranks are processes; their gradients meet in DDP over Gloo, through `codec.torch.ddp_hook`. Models and data are those of
bench/training.py: digits by SGD with momentum, a language model by AdamW.

float32             DDP as it comes
float32 in order    sums of ranks in their order, uncompressed: to Lossless the same to the bit, or this command fails;
                    beside float32 it shows what the order of sums alone does to a training

Loss and accuracy are of held-out data. `vs float32` is the mean, over seeds, of the loss less float32's from the same
seed, with the standard deviation. Bits a value: what a rank sends over what it would send with one bit a value in both
phases of an all-reduce; all of a frame counts. Time to the target is predicted: steps until an evaluation reaches it,
each as long as the CPU was busy in this run, codec included, and then the link with what a rank sent; nothing overlaps.
The target is the accuracy in the end of float32 from the same seed less 1 point, or its loss plus 0.05. Noise is how
far float32 is from itself: the standard deviation over seeds, or the most that the order of sums made, if that is more.
"""

import argparse
import hashlib
import importlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel
from training import TASKS, Task

import codec

PLAIN, ORDERED = "float32", "float32 in order"
LINKS = {"100 Mbit": 100e6, "1 Gbit": 1e9}
STEPS = {"digits": 200, "lm": 400}
QUICK_STEPS = {"digits": 60, "lm": 80}
EVALUATIONS = 30


@dataclass(frozen=True)
class Way:
    """How gradients travel: a spec for the hook, or none."""

    spec: codec.Spec | None = None
    feedback: bool = False
    algorithm: str = "two_shot"  # left to itself it would find that on one machine values travel faster as they are


def _by_bit(guard: int) -> codec.Truncate:
    return codec.Truncate(levels="shared", granularity="bit", guard=guard)


WAYS: dict[str, Way] = {
    PLAIN: Way(),
    ORDERED: Way(),
    "Lossless": Way(codec.Lossless()),
    "Truncate exact": Way(codec.Truncate(levels="shared", guard="exact")),
    "Truncate near": Way(codec.Truncate(levels="shared")),
    "Truncate bit -8": Way(_by_bit(-8)),
    "Truncate bit -8 +e": Way(_by_bit(-8), feedback=True),
    "Truncate bit -11": Way(_by_bit(-11)),
    "Truncate bit -11 +e": Way(_by_bit(-11), feedback=True),
    "Truncate bit -13": Way(_by_bit(-13)),
    "Truncate bit -13 +e": Way(_by_bit(-13), feedback=True),
    "Float8": Way(codec.Float8()),
    "Quantize 8": Way(codec.Quantize(8)),
    "Quantize 8 +e": Way(codec.Quantize(8), feedback=True),
    "Quantize 4": Way(codec.Quantize(4)),
    "Quantize 4 +e": Way(codec.Quantize(4), feedback=True),
    "Sign +e": Way(codec.Sign(block=1024), feedback=True),
    "Ternary": Way(codec.Ternary("base3")),
    "Ternary clipped +e": Way(codec.Ternary("base3", clip=2.5), feedback=True),
    "Ternary shared": Way(codec.Ternary("base3"), algorithm="shared_scale"),
    "Ternary shared +e": Way(codec.Ternary("base3", clip=2.5), feedback=True, algorithm="shared_scale"),
}
QUICK = (PLAIN, ORDERED, "Lossless", "Truncate bit -11 +e", "Float8", "Sign +e")
FRONT = tuple(way for way in WAYS if way.startswith("Truncate bit"))  # of the language model, if nothing else is asked


@dataclass(frozen=True)
class Job:
    """One training."""

    model: str
    way: str
    seed: int
    steps: int


@dataclass
class Run:
    """What became of it."""

    model: str
    way: str
    seed: int
    steps: int
    values: int = 0
    nbytes: float = 0  # that a rank sent, in a step
    busy: float = 0  # seconds of the CPU in a step, of the busiest rank
    losses: list[float] = field(default_factory=list[float])  # of training, mean of the ranks, every step
    curve: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])
    digest: str = ""  # of the parameters in the end
    stopped: str = ""

    @property
    def loss(self) -> float:
        return self.curve[-1][1] if self.curve and not self.stopped else math.nan

    @property
    def accuracy(self) -> float:
        return self.curve[-1][2] if self.curve and not self.stopped else math.nan


def add_in_order(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that adds up what ranks have in their order, as a receiver of frames does."""
    mine, world = bucket.buffer(), dist.get_world_size()
    of_all = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(of_all, mine)
    total, *others = of_all
    for other in others:
        total += other
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(total / world)
    return done


def sharing(way: str, task: Task, model: DistributedDataParallel) -> Callable[[], int]:
    """Arrange how gradients travel; what has been sent so far, in bytes."""
    if way == ORDERED:
        model.register_comm_hook(None, add_in_order)
    if WAYS[way].spec is None:
        return lambda: 0
    from codec.torch import ddp_hook

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Sign under Adam is warned of: here it is what is to be seen
        how = {"optimizer": task.optimizer, "feedback": WAYS[way].feedback, "algorithm": WAYS[way].algorithm}
        hook = ddp_hook(WAYS[way].spec, **how)
    hook.register(model)
    return lambda: int(hook.stats().sent_nbytes)


def average_statistics(model: torch.nn.Module) -> None:
    """Those of norms, which every rank gathers from its own share."""
    for b in model.buffers():
        if b.is_floating_point():
            dist.all_reduce(b)
            b.div_(dist.get_world_size())


def evaluated(task: Task) -> tuple[float, float]:
    """Loss and accuracy on all that is held out."""
    average_statistics(task.model)
    found = task.evaluate()
    dist.all_reduce(found)
    loss, right, count = found.tolist()
    return loss / count, right / count


def any_rank(mine: bool) -> bool:
    flag = torch.tensor([mine], dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def digest_of(model: torch.nn.Module) -> str:
    """Of all bits of all parameters; ranks must have the same."""
    sha = hashlib.sha256()
    for p in model.parameters():
        sha.update(p.detach().contiguous().view(torch.uint8).numpy())
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, sha.hexdigest())
    if len(set(of_all)) != 1:
        raise SystemExit("ranks have parameters that differ")
    return of_all[0]


def take_step(task: Task, shared: DistributedDataParallel) -> tuple[float, str]:
    """The loss of this rank, and why there was no step, if so on all ranks."""
    loss = task.loss(shared, task.batch())
    task.optimizer.zero_grad()
    try:
        loss.backward()
    except (codec.CodecError, RuntimeError) as error:
        # a training that diverges ends in NaN, which codecs refuse, on all ranks: that is a result
        if any_rank(any(p.grad is not None and not p.grad.isfinite().all() for p in shared.parameters())):
            return math.nan, str(error).splitlines()[0]
        raise
    task.optimizer.step()
    task.schedule.step()
    return loss.item(), ""


def train(job: Job, tell: Callable[[int], None]) -> Run:
    rank, world = dist.get_rank(), dist.get_world_size()
    task = TASKS[job.model](job.seed, job.steps, rank, world)
    # statistics of norms are averaged where they are used; else a rank would send its own in every step
    shared = DistributedDataParallel(task.model, forward_sync_buffers=False)
    sent = sharing(job.way, task, shared)
    run = Run(job.model, job.way, job.seed, job.steps, sum(p.numel() for p in task.model.parameters()))
    every = max(10, job.steps // EVALUATIONS)
    busy, told = 0.0, 0
    for step in range(1, job.steps + 1):
        begin = time.process_time()
        loss, stopped = take_step(task, shared)
        busy += time.process_time() - begin
        if stopped:
            run.stopped = f"at step {step}: {stopped}"
            break
        run.losses.append(loss)
        if step % every == 0 or step == job.steps:
            run.curve.append((step, *evaluated(task)))
            tell(step - told)
            told = step
    tell(job.steps - told)
    gather(run, sent(), busy)
    run.digest = digest_of(task.model)
    return run


def gather(run: Run, nbytes: int, busy: float) -> None:
    """What ranks know only together."""
    world, steps = dist.get_world_size(), max(1, len(run.losses))
    most = torch.tensor([nbytes / steps, busy / steps], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    run.nbytes, run.busy = most.tolist()
    if WAYS[run.way].spec is None:
        run.nbytes = all_reduce_values(run.values, world) * 4
    losses = torch.tensor(run.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    run.losses = (losses / world).tolist()


def all_reduce_values(values: int, world: int) -> float:
    """That a rank sends in both phases of an all-reduce."""
    return 2 * (world - 1) / world * values


def rank_main(rank: int, world: int, jobs: list[Job], meet: str, reports: Any) -> None:
    """A process goes through all trainings: starting one takes longer than some of them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=world, timeout=timedelta(seconds=120))
    try:
        for job in jobs:
            run = train(job, lambda n, job=job: reports.put((job, n)) if rank == 0 else None)
            if rank == 0:
                reports.put((job, run))
    finally:
        dist.destroy_process_group()


def train_all(jobs: list[Job], world: int) -> list[Run]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    os.environ |= {"OMP_NUM_THREADS": "1", "CODEC_NUM_THREADS": "1"}
    runs: list[Run] = []
    reports = multiprocessing.get_context("spawn").SimpleQueue()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn(), TimeRemainingColumn())
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(TextColumn("{task.description:36}"), *columns, console=Console(stderr=True)) as bar,
    ):
        line = bar.add_task("ranks start", total=sum(j.steps for j in jobs))
        arguments = (world, jobs, str(Path(folder) / "meet"), reports)
        ranks = multiprocessing.start_processes(rank_main, arguments, nprocs=world, join=False, start_method="spawn")
        while True:
            done = ranks.join(timeout=0.2)
            while not reports.empty():
                job, what = reports.get()
                if isinstance(what, Run):
                    runs.append(what)
                else:
                    bar.update(line, advance=what, description=f"{job.model}, {job.way}, seed {job.seed}")
            if done:
                return runs


def mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


def spread(found: float) -> str:
    """Of several seeds; one has none."""
    return "" if math.isnan(found) else f" ±{found:.4f}"


def shown(found: float, digits: int, unit: str = "") -> str:
    """What is infinite if a seed did not get there."""
    return f"{found:.{digits}f}{unit}" if math.isfinite(found) else "never"


def reached(run: Run, plain: Run) -> float:
    """Steps until an evaluation is nearly as good as float32's last one."""
    for step, loss, accuracy in run.curve:
        if accuracy >= plain.accuracy - 0.01 if run.model == "digits" else loss <= plain.loss + 0.05:
            return step
    return math.inf


def summary(runs: list[Run], world: int) -> list[dict[str, Any]]:
    """A row a model and codec."""
    rows: list[dict[str, Any]] = []
    for model in dict.fromkeys(r.model for r in runs):
        plain = {r.seed: r for r in runs if (r.model, r.way) == (model, PLAIN)}
        ordered = [abs(r.loss - plain[r.seed].loss) for r in runs if (r.model, r.way) == (model, ORDERED)]
        noise = max([deviation([r.loss for r in plain.values()]), *ordered])
        for way in dict.fromkeys(r.way for r in runs if r.model == model):
            some = [r for r in runs if (r.model, r.way) == (model, way)]
            apart = [r.loss - plain[r.seed].loss for r in some]
            nbytes, busy, steps = (
                mean(v) for v in zip(*((r.nbytes, r.busy, reached(r, plain[r.seed])) for r in some), strict=True)
            )
            rows.append(
                {
                    "model": model,
                    "codec": way,
                    "bits": 8 * nbytes / all_reduce_values(some[0].values, world),
                    "bytes_per_step": nbytes,
                    "loss": mean([r.loss for r in some]),
                    "loss_deviation": deviation([r.loss for r in some]),
                    "accuracy": mean([r.accuracy for r in some]),
                    "loss_vs_float32": mean(apart),
                    "loss_vs_float32_deviation": deviation(apart),
                    "within_noise": abs(mean(apart)) <= noise,
                    "busy_s": busy,
                    "steps_to_target": steps,
                    **{f"seconds_to_target_{name}": steps * (busy + 8 * nbytes / rate) for name, rate in LINKS.items()},
                    "noise": noise,
                    "stopped": "; ".join(r.stopped for r in some if r.stopped),
                }
            )
    return rows


def same_bits(runs: list[Run]) -> dict[str, bool]:
    """Has Lossless, model by model, left what sums in the same order leave?"""
    ordered = {(r.model, r.seed): r for r in runs if r.way == ORDERED}
    found: dict[str, bool] = {}
    for r in runs:
        if r.way == "Lossless":
            other = ordered[r.model, r.seed]
            found[r.model] = found.get(r.model, True) and (r.digest, r.losses) == (other.digest, other.losses)
    return found


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(150, Console().width))
    for model in dict.fromkeys(r["model"] for r in rows):
        some = [r for r in rows if r["model"] == model]
        title = f"{model}: {args.ranks} ranks, {steps_of(model, args)} steps, seeds 0 to {args.seeds - 1}"
        table = Table(title=title, title_justify="left")
        heads = (
            "codec",
            "bits a value",
            "KB a step",
            "loss",
            "vs float32",
            "accuracy",
            "CPU a step",
            "steps to target",
        )
        for head in (*heads, *LINKS):
            table.add_column(head, justify="left" if head == "codec" else "right", no_wrap=True)
        for r in some:
            table.add_row(
                r["codec"],
                f"{r['bits']:.2f}",
                f"{r['bytes_per_step'] / 1e3:.1f}",
                f"{r['loss']:.4f}",
                f"{r['loss_vs_float32']:+.4f}{spread(r['loss_vs_float32_deviation'])}",
                f"{100 * r['accuracy']:.2f}%",
                f"{1e3 * r['busy_s']:.1f} ms",
                shown(r["steps_to_target"], 0),
                *(shown(r[f"seconds_to_target_{name}"], 1, " s") for name in LINKS),
            )
        console.print(table)
        plain = next(r for r in some if r["codec"] == PLAIN)
        if spread(plain["noise"]):
            near = ", ".join(r["codec"] for r in some if r["within_noise"] and r is not plain)
            console.print(f"float32's noise, by seeds or the order of sums:{spread(plain['noise'])}; within it: {near}")
        for r in some:
            if r["stopped"]:
                console.print(f"{r['codec']} stopped {r['stopped']}")


def plot(runs: list[Run], rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    models = list(dict.fromkeys(r.model for r in runs))
    figure, axes = plt.subplots(2, len(models), figsize=(8 * len(models), 11), layout="constrained", squeeze=False)
    ways = list(dict.fromkeys(r.way for r in runs))
    colors = {way: plt.get_cmap("tab20")(i % 20) for i, way in enumerate(ways)}
    for above, below, model in zip(*axes, models, strict=True):
        for way in ways:
            curves = [r.curve for r in runs if (r.model, r.way) == (model, way)]
            if not curves:
                continue
            points = [(p[0][0], mean([q[1] for q in p])) for p in zip(*curves, strict=False)]
            style = {PLAIN: {"color": "black", "lw": 2.5}}.get(way, {"color": colors[way], "lw": 1.2})
            above.plot(*zip(*points, strict=True), label=way, **style)
        above.set(title=model, xlabel="steps", ylabel="held-out loss", yscale="log")
        above.legend(fontsize=8)
        front(below, [r for r in rows if r["model"] == model], colors)
    figure.savefig(path, dpi=110)


def front(axis: Any, rows: list[dict[str, Any]], colors: dict[str, Any]) -> None:
    """Loss against bits a value; with error feedback as stars."""
    for r in rows:
        if r["codec"] == PLAIN or math.isnan(r["loss"]):
            continue
        apart = r["loss_vs_float32_deviation"]
        mark = "*" if WAYS[r["codec"]].feedback else "o"
        axis.errorbar(
            r["bits"], r["loss_vs_float32"], 0 if math.isnan(apart) else apart,
            color=colors[r["codec"]], marker=mark, ms=12 if mark == "*" else 7, capsize=3,
        )  # fmt: skip
        axis.annotate(r["codec"], (r["bits"], r["loss_vs_float32"]), (6, 4), textcoords="offset points", fontsize=8)
    axis.axhline(0, color="black", lw=0.8)
    axis.set(xscale="log", xlabel="bits a value", ylabel="loss in the end less float32's (stars: with error feedback)")
    axis.set_yscale("symlog", linthresh=0.01)
    low, high = axis.get_ylim()
    heights = [h for h in (-0.01, -0.005, 0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1) if low <= h <= high]
    axis.set_yticks(heights, [f"{h:g}" for h in heights])
    ticks = [1, 2, 4, 8, 16, 32]
    axis.set_xticks(ticks, [str(t) for t in ticks])
    axis.grid(alpha=0.3)


def steps_of(model: str, args: argparse.Namespace) -> int:
    return args.steps or (QUICK_STEPS if args.quick else STEPS)[model]


def finite(what: Any) -> Any:
    """JSON has no word for NaN and infinity."""
    if isinstance(what, dict):
        return {k: finite(v) for k, v in what.items()}
    if isinstance(what, list | tuple):
        return [finite(v) for v in what]
    return None if isinstance(what, float) and not math.isfinite(what) else what


def ways_of(model: str, args: argparse.Namespace) -> list[str]:
    """float32 and what Lossless is compared with are always there."""
    chosen = args.codecs or (QUICK if args.quick else [way for way in WAYS if model == "lm" or way not in FRONT])
    return [way for way in WAYS if way in chosen or way == PLAIN or (way == ORDERED and "Lossless" in chosen)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--codecs", nargs="+", choices=WAYS, metavar="NAME", help=f"float32 and these of: {', '.join(WAYS)}"
    )
    parser.add_argument(
        "--steps", type=int, help=f"of each training ({', '.join(f'{m} {n}' for m, n in STEPS.items())})"
    )
    parser.add_argument("--seeds", type=int, help="how many (2)")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=4, help="that batches divide by (4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all runs with their curves, and the table")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="curves of loss, and loss against bits a value")
    parser.add_argument("--quick", action="store_true", help="few steps, one seed, some codecs: below two minutes")
    args = parser.parse_args()
    args.seeds = args.seeds or (1 if args.quick else 2)
    return args


def main() -> None:
    args = arguments()
    jobs = [
        Job(model, way, seed, steps_of(model, args))
        for model in args.models
        for seed in range(args.seeds)
        for way in ways_of(model, args)
    ]
    if any(WAYS[job.way].spec for job in jobs):
        importlib.import_module("codec.torch")  # if it is not there, better now than when ranks want it
    runs = train_all(jobs, args.ranks)
    rows = summary(runs, args.ranks)
    show(rows, args)
    if args.json:
        report = {"ranks": args.ranks, "rows": rows, "runs": [asdict(r) for r in runs]}
        args.json.write_text(json.dumps(finite(report), indent=1))
    if args.plot:
        plot(runs, rows, args.plot)
    same = same_bits(runs)
    for model, is_same in same.items():
        print(f"{model}: Lossless and float32 in order are {'identical' if is_same else 'DIFFERENT'}")
    if not all(same.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
