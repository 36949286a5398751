"""Compare how codecs affect training: loss, accuracy, bytes sent and residuals, against uncompressed float32.

    python bench/training/convergence.py                           # all codecs of CODECS, about half an hour
    python bench/training/convergence.py --quick                   # fewer steps, one seed: below two minutes
    python bench/training/convergence.py --tasks text-sgd --codecs "Quantize(3)" "Sign(group_size=256)" --feedback on
    python bench/training/convergence.py --from runs.json --plot convergence.png   # show runs that --json has written

Each rank is a process. DistributedDataParallel averages gradients over Gloo through
``codec.torch.ddp_hook(spec, optimizer=optimizer)``. The policy and error feedback are the hook's defaults for the
codec, unless ``--feedback`` says otherwise. The algorithm is fixed, because "auto" may send gradients uncompressed if
that is faster on this machine. Models and data are those of bench/support/models.py. All codecs train from the same
seeds.

Two more rows are references without a codec:

float32           DistributedDataParallel without a hook
float32 in order  uncompressed sums in rank order. Lossless() must give the same bits, or this command fails. The
                  difference from float32 shows the effect of the order of summation alone.

Columns:

bits/value   bytes that a rank sends, headers included, relative to an all-reduce (both phases) of 1 bit a value
loss         held-out loss at the end, mean over seeds
vs float32   loss minus the loss of float32 from the same seed: mean and standard deviation over seeds
accuracy     held-out accuracy at the end, mean over seeds
residual     largest ||residual|| / ||gradient|| of a parameter with error feedback, over all steps, ranks and seeds
CPU/step     CPU time of the busiest rank, codec included
steps        steps until an evaluation reaches the target: 1 point below float32's final accuracy (digits), or 0.05
             above its final loss (text)
100 Mbit     predicted time until the target: steps * (CPU/step + bytes / link rate), without any overlap
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

import codec

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from models import TASKS, Task

PLAIN, ORDERED, LOSSLESS = "float32", "float32 in order", "Lossless()"
CODECS = (
    LOSSLESS,
    "Truncate()",
    'Truncate(level_coding="shared", granularity="bit", guard="feedback")',
    "Float8()",
    "Float4()",
    "Quantize(8)",
    "Quantize(4)",
    "Quantize(2)",
    "Sign()",
    "Sign(group_size=1024)",
    "Ternary()",
)
QUICK_CODECS = (LOSSLESS, CODECS[2], "Float8()", "Sign(group_size=1024)", "Ternary()")
QUICK_STEPS = {"digits-sgd": 60, "text-sgd": 80, "text-adamw": 80}
STEPS = {"digits-sgd": 400, "text-sgd": 1000, "text-adamw": 1000}
SEEDS = 3
LINKS = {"100 Mbit": 100e6, "1 Gbit": 1e9}
EVALUATIONS = 20
MARKERS = "os^vD<>pP*Xhd8" * 2  # plot markers of codecs


@dataclass(frozen=True)
class Job:
    """Training run to do."""

    task: str
    codec: str  # PLAIN, ORDERED or a spec as Python text
    seed: int
    steps: int
    feedback: bool | None = None
    algorithm: str = "two_shot"
    batch: int | None = None  # samples of a step on all ranks; None: the task's
    every: int | None = None  # steps between evaluations; None: a twentieth of all, at least 20


@dataclass
class Run:
    """Results of a training run."""

    task: str
    codec: str
    seed: int
    steps: int
    values: int = 0  # number of values of all parameters
    nbytes: float = 0  # bytes sent per rank and step
    cpu: float = 0  # CPU seconds per step of the busiest rank
    residual: float = math.nan  # largest ||residual|| / ||gradient||
    losses: list[float] = field(default_factory=list[float])  # training loss of each step, mean of the ranks
    seconds: list[float] = field(default_factory=list[float])  # time of each step on the slowest rank
    cpu_seconds: list[float] = field(default_factory=list[float])  # CPU time of each step on the busiest rank
    sent: list[float] = field(default_factory=list[float])  # bytes that rank 0 sent in each step
    curve: list[tuple[int, float, float]] = field(
        default_factory=list[tuple[int, float, float]]
    )  # step, loss, accuracy
    digest: str = ""  # digest of the final parameters
    stopped: str = ""  # why the run ended early

    @property
    def loss(self) -> float:
        return self.curve[-1][1] if self.curve and not self.stopped else math.nan

    @property
    def accuracy(self) -> float:
        return self.curve[-1][2] if self.curve and not self.stopped else math.nan


def spec_of(text: str) -> codec.Spec:
    """Return the spec that `text` writes in Python, such as ``Quantize(4)``."""
    try:
        spec = eval(text, {"__builtins__": {}}, vars(codec))
    except Exception as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; write a spec as in Python: Quantize(4)") from None
    if not isinstance(spec, codec.Spec):
        raise argparse.ArgumentTypeError(f"{text!r} is not a spec; write one as in Python: Quantize(4)")
    return spec


def sum_in_rank_order(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket uncompressed, adding the ranks' values in rank order as a receiver of frames does."""
    mine, world = bucket.buffer(), dist.get_world_size()
    of_all = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(of_all, mine)
    total, *others = of_all
    for other in others:
        total += other
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(total / world)
    return done


def add_hook(job: Job, task: Task, model: DistributedDataParallel) -> Any:
    """Register the job's communication hook. Return codec's hook, or None for the references without a codec."""
    if job.codec == ORDERED:
        model.register_comm_hook(None, sum_in_rank_order)
    if job.codec in (PLAIN, ORDERED):
        return None
    from codec.torch import ddp_hook

    spec = spec_of(job.codec)
    feedback = None if isinstance(spec, codec.Lossless) else job.feedback
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Sign warns under Adam; this benchmark shows the effect
        hook = ddp_hook(
            spec, optimizer=task.optimizer, feedback=feedback, options=codec.options(algorithm=job.algorithm)
        )
    return hook.register(model)


HookOf = Callable[[Job, Task, DistributedDataParallel], Any]


def residual_ratio(hook: Any) -> float:
    """Return the largest ||residual|| / ||gradient|| of this rank's last step, NaN without error feedback."""
    return math.nan if hook is None else float(hook.stats().residual_ratio) or math.nan


def average_buffers(model: torch.nn.Module) -> None:
    """Average the running statistics of batch norms, which each rank gathers from its own share of the batches."""
    for b in model.buffers():
        if b.is_floating_point():
            dist.all_reduce(b)
            b.div_(dist.get_world_size())


def evaluate(task: Task) -> tuple[float, float]:
    """Return loss and accuracy on all held-out data."""
    average_buffers(task.model)
    found = task.evaluate()
    dist.all_reduce(found)
    loss, right, count = found.tolist()
    return loss / count, right / count


def any_rank(mine: bool) -> bool:
    flag = torch.tensor([mine], dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def digest_of(model: torch.nn.Module) -> str:
    """Return a digest of all bits of all parameters, after a check that all ranks have the same."""
    sha = hashlib.sha256()
    for p in model.parameters():
        sha.update(p.detach().contiguous().view(torch.uint8).numpy())
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, sha.hexdigest())
    if len(set(of_all)) != 1:
        raise SystemExit("parameters differ between ranks")
    return of_all[0]


def take_step(task: Task, model: DistributedDataParallel) -> tuple[float, str]:
    """Return this rank's loss, and an error message if gradients were not finite on any rank."""
    loss = task.loss(model, task.batch())
    task.optimizer.zero_grad()
    try:
        loss.backward()
    except (codec.CodecError, RuntimeError) as error:
        # a diverging training ends in NaN, which lossy codecs reject on all ranks: a valid result
        if any_rank(any(p.grad is not None and not p.grad.isfinite().all() for p in model.parameters())):
            return math.nan, str(error).splitlines()[0]
        raise
    task.optimizer.step()
    task.schedule.step()
    return loss.item(), ""


def train(job: Job, report_steps: Callable[[int], None], hook_of: HookOf = add_hook) -> Run:
    """Train on this rank, together with all others."""
    rank, world = dist.get_rank(), dist.get_world_size()
    task = TASKS[job.task](job.seed, job.steps, rank, world, **({} if job.batch is None else {"batch": job.batch}))
    # evaluate() averages the buffers; without this argument rank 0 would broadcast its own in every step
    model = DistributedDataParallel(task.model, forward_sync_buffers=False)
    hook = hook_of(job, task, model)
    run = Run(job.task, job.codec, job.seed, job.steps, sum(p.numel() for p in task.model.parameters()))
    every = job.every or max(20, job.steps // EVALUATIONS)
    reported, residuals = 0, [math.nan]
    for step in range(1, job.steps + 1):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        loss, run.stopped = take_step(task, model)
        cpu, seconds = time.process_time() - cpu_begin, time.perf_counter() - begin
        if run.stopped:
            run.stopped = f"at step {step}: {run.stopped}"
            break
        run.losses.append(loss)
        run.cpu_seconds.append(cpu)
        run.seconds.append(seconds)
        run.sent.append(0 if hook is None else hook.stats().sent_nbytes - sum(run.sent))
        residuals.append(residual_ratio(hook))
        if step % every == 0 or step == job.steps:
            run.curve.append((step, *evaluate(task)))
            report_steps(step - reported)
            reported = step
    report_steps(job.steps - reported)
    largest = max((r for r in residuals if not math.isnan(r)), default=math.nan)
    gather(run, largest)
    run.digest = digest_of(task.model)
    return run


def gather(run: Run, residual: float) -> None:
    """Fill in the fields of `run` that combine all ranks: maxima of bytes, times and residual, mean losses."""
    world, steps = dist.get_world_size(), max(1, len(run.losses))
    of_rank = [sum(run.sent) / steps, sum(run.cpu_seconds) / steps, -1 if math.isnan(residual) else residual]
    most = torch.tensor(of_rank, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    run.nbytes, run.cpu, run.residual = most.tolist()
    if run.residual < 0:
        run.residual = math.nan
    if run.codec in (PLAIN, ORDERED):
        run.nbytes = values_sent(run.values, world) * 4
        run.sent = [run.nbytes] * len(run.losses)
    losses = torch.tensor(run.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    run.losses = (losses / world).tolist()
    times = torch.tensor([run.seconds, run.cpu_seconds], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    run.seconds, run.cpu_seconds = times.tolist()


def values_sent(values: int, world: int) -> float:
    """Return how many values a rank sends in both phases of an all-reduce."""
    return 2 * (world - 1) / world * values


def rank_main(rank: int, world: int, jobs: list[Job], meet: str, reports: Any, hook_of: HookOf) -> None:
    """Do all jobs in one process: to start one takes longer than some of the trainings."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=world, timeout=timedelta(seconds=120))
    try:
        for job in jobs:
            run = train(job, lambda n, job=job: reports.put((job, n)) if rank == 0 else None, hook_of)
            if rank == 0:
                reports.put((job, run))
    finally:
        dist.destroy_process_group()


def train_all(jobs: list[Job], world: int, hook_of: HookOf = add_hook) -> list[Run]:
    """Run all jobs on `world` new processes, with a progress bar. `hook_of` registers the hook of a job."""
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
        Progress(TextColumn("{task.description:42}"), *columns, console=Console(stderr=True)) as bar,
    ):
        line = bar.add_task("starting ranks", total=sum(j.steps for j in jobs))
        arguments = (world, jobs, str(Path(folder) / "meet"), reports, hook_of)
        ranks = multiprocessing.start_processes(rank_main, arguments, nprocs=world, join=False, start_method="spawn")
        while True:
            done = ranks.join(timeout=0.2)
            while not reports.empty():
                job, what = reports.get()
                if isinstance(what, Run):
                    runs.append(what)
                else:
                    bar.update(line, advance=what, description=f"{job.task}, {job.codec:.20}, seed {job.seed}")
            if done:
                return runs


def mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def steps_to_target(run: Run, plain: Run) -> float:
    """Return the step of the first evaluation that is nearly as good as float32's last one, Inf if there is none."""
    for step, loss, accuracy in run.curve:
        if accuracy >= plain.accuracy - 0.01 if run.task.startswith("digits") else loss <= plain.loss + 0.05:
            return step
    return math.inf


def noise_of(runs: list[Run], plain: dict[int, Run]) -> float:
    """Return how much float32 varies: over seeds, or by the order of sums, whichever is larger."""
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
                    "within_noise": abs(mean(apart)) <= noise,
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
    """Return for each task whether Lossless() gave the same bits as uncompressed sums in rank order."""
    ordered = {(r.task, r.seed): r for r in runs if r.codec == ORDERED}
    found: dict[str, bool] = {}
    for r in runs:
        if r.codec == LOSSLESS:
            other = ordered[r.task, r.seed]
            found[r.task] = found.get(r.task, True) and (r.digest, r.losses) == (other.digest, other.losses)
    return found


def table(heads: list[str], lines: list[list[str]]) -> str:
    """Return a Markdown table whose columns are aligned in plain text, too."""
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    rule = [":" + "-" * (w - 1) if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    padded = [
        [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
        for line in (heads, rule, *lines)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def show(rows: list[dict[str, Any]], ranks: int) -> None:
    """Print a Markdown table for each task."""

    def number(value: float, form: str, other: str) -> str:
        return format(value, form) if math.isfinite(value) else other

    heads = ["codec", "bits/value", "loss", "vs float32", "accuracy", "residual", "CPU/step", "steps", *LINKS]
    for task in dict.fromkeys(r["task"] for r in rows):
        some = [r for r in rows if r["task"] == task]
        print(f"\n**{task}**: {ranks} ranks, {some[0]['steps']} steps, {some[0]['seeds']} seeds\n")
        lines = [
            [
                f"`{r['codec']}`" if r["codec"] not in (PLAIN, ORDERED) else r["codec"],
                f"{r['bits']:.2f}",
                number(r["loss"], ".4f", "NaN"),
                number(r["loss_vs_float32"], "+.4f", "NaN")
                + number(r["loss_vs_float32_deviation"], " 5.4f", "").replace(" ", " ±"),
                number(100 * r["accuracy"], ".2f", "NaN ") + "%",
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
            print(f"\nNoise of float32 (seeds, order of sums): ±{noise:.4f}. Within it: {near or 'none'}.")
        for r in some:
            if r["stopped"]:
                print(f"\n{r['codec']}: stopped {r['stopped']}")


def plot(runs: list[Run], rows: list[dict[str, Any]], path: Path) -> None:
    """Draw held-out loss over steps, and the final loss minus float32's over bits a value."""
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
    """Return a codec's name for a plot: a long one keeps its last argument."""
    return name if len(name) < 30 else f"{name.partition('(')[0]}(..., {name.rpartition(', ')[2]}"


def plot_front(axis: Any, rows: list[dict[str, Any]], styles: dict[str, Any]) -> None:
    """Draw final loss minus float32's over bits a value, with the standard deviation over seeds."""
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


def steps_of(task: str, args: argparse.Namespace) -> int:
    return args.steps or (QUICK_STEPS if args.quick else STEPS)[task]


def codecs_of(args: argparse.Namespace) -> list[str]:
    """Return the rows of a task: the references that the chosen codecs are compared with, then the codecs."""
    chosen = args.codecs or (QUICK_CODECS if args.quick else CODECS)
    return [PLAIN, *([ORDERED] if LOSSLESS in chosen else []), *chosen]


def without_nonfinite(value: Any) -> Any:
    """Replace NaN and Inf by None: JSON has no such numbers."""
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
        A file is not such a file, files differ in the number of ranks, two runs are the same training, or a task has a
        seed without float32, with which all other runs are compared.
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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=STEPS, help="trainings (all)")
    parser.add_argument("--codecs", nargs="+", metavar="SPEC", help=f"specs as in Python ({', '.join(CODECS)})")
    parser.add_argument("--feedback", choices=("default", "on", "off"), default="default")
    parser.add_argument("--algorithm", default="two_shot", help="as for ddp_hook (two_shot)")
    parser.add_argument("--steps", type=int, help=f"of each training ({STEPS})")
    parser.add_argument("--seeds", type=int, help=f"number of seeds ({SEEDS})")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=4, help="divisors of the batch (4)")
    parser.add_argument(
        "--from",
        dest="files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="train nothing; show, plot or combine (--json) the runs of files that --json has written",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all runs with their curves, and the table")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw loss over steps, and loss over bits a value"
    )
    parser.add_argument("--quick", action="store_true", help="few steps, one seed, some codecs: below two minutes")
    args = parser.parse_args()
    if args.files:
        if args.tasks or args.codecs or args.steps or args.seeds or args.quick:
            parser.error("--from trains nothing: leave out --tasks, --codecs, --steps, --seeds and --quick")
        try:
            args.ranks, args.runs = load(args.files)
        except ValueError as error:
            parser.error(f"--from: {error}")
        return args
    args.tasks = args.tasks or list(STEPS)
    args.seeds = args.seeds or (1 if args.quick else SEEDS)
    try:
        for text in args.codecs or ():
            spec_of(text)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    return args


def train_chosen(args: argparse.Namespace) -> list[Run]:
    """Do the trainings that the arguments name."""
    importlib.import_module("codec.torch")  # fail here, before any rank starts, if it is missing
    feedback = {"default": None, "on": True, "off": False}[args.feedback]
    jobs = [
        Job(task, name, seed, steps_of(task, args), feedback, args.algorithm)
        for task in args.tasks
        for seed in range(args.seeds)
        for name in codecs_of(args)
    ]
    return train_all(jobs, args.ranks)


def main() -> None:
    args = parse_arguments()
    runs = args.runs if args.files else train_chosen(args)
    rows = summarize(runs, args.ranks)
    show(rows, args.ranks)
    if args.json:
        report = {"ranks": args.ranks, "rows": rows, "runs": [asdict(r) for r in runs]}
        args.json.write_text(json.dumps(without_nonfinite(report), indent=1))
    if args.plot:
        plot(runs, rows, args.plot)
    same = same_bits(runs)
    for task, is_same in same.items():
        print(f"\n{task}: Lossless() and {ORDERED} are {'identical' if is_same else 'DIFFERENT'}")
    if not all(same.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
