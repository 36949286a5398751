"""Train on local ranks with a codec, an optimizer of codec.torch or neither, and record each step.

:func:`train_all` runs a list of jobs on new processes. bench/training/convergence.py and other benchmarks call it.
"""

import argparse
import hashlib
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

import codec

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from models import Task
from vocabularies import TASKS

PLAIN, ORDERED = "float32", "float32 in order"
ONE_BIT, ONE_BIT_SIGNS, ZERO_ONE = "OneBitAdam", "1-bit Adam", "0/1 Adam"
UNLIMITED = "OneBitAdam(max_ratio=None)"
# Methods that replace the optimizer, with arguments that differ from the defaults
ADAMS: dict[str, dict[str, Any]] = {
    ONE_BIT: {},
    ONE_BIT_SIGNS: {"spec": codec.Sign(group_size=1024)},
    ZERO_ONE: {},
    UNLIMITED: {"max_ratio": None},
}
FREEZE = 0.2  # fraction of steps before OneBitAdam's freeze
EVALUATIONS = 20


@dataclass(frozen=True)
class Job:
    """Training run to make: task, method, seed and settings."""

    task: str
    codec: str  # PLAIN, ORDERED, one of ADAMS, a preset, or a spec as Python text
    seed: int
    steps: int
    feedback: bool | None = None
    algorithm: str = "two_shot"
    batch: int | None = None  # samples per step on all ranks together; None: the task's default
    every: int | None = None  # steps between evaluations; None: 1/20 of all steps, at least 20


@dataclass
class Run:
    """Results of a training run."""

    task: str
    codec: str
    seed: int
    steps: int
    values: int = 0  # number of values of all trained parameters
    nbytes: float = 0  # mean bytes that a rank sends per step
    cpu: float = 0  # CPU seconds per step on the busiest rank
    residual: float = math.nan  # largest ||residual|| / ||gradient|| of a parameter; NaN without error feedback
    losses: list[float] = field(default_factory=list[float])  # training loss of each step, mean over ranks
    seconds: list[float] = field(default_factory=list[float])  # seconds of each step on the slowest rank
    cpu_seconds: list[float] = field(default_factory=list[float])  # CPU seconds of each step on the busiest rank
    sent: list[float] = field(default_factory=list[float])  # bytes that rank 0 sent in each step
    curve: list[tuple[int, float, float]] = field(
        default_factory=list[tuple[int, float, float]]
    )  # evaluations: step, held-out loss, accuracy
    digest: str = ""  # digest of the final parameters
    stopped: str = ""  # reason why the run ended early; "" if it did not

    @property
    def loss(self) -> float:
        return self.curve[-1][1] if self.curve and not self.stopped else math.nan

    @property
    def accuracy(self) -> float:
        return self.curve[-1][2] if self.curve and not self.stopped else math.nan


def spec_of(text: str) -> codec.Spec:
    """Return the spec of a preset, or the one that `text` writes in Python, such as ``Quantize(4)``."""
    if text.isidentifier():
        try:
            return codec.preset(text)
        except codec.SpecError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    try:
        spec = eval(text, {"__builtins__": {}}, vars(codec))
    except Exception as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; write a spec as in Python: Quantize(4)") from None
    if not isinstance(spec, codec.Spec):
        raise argparse.ArgumentTypeError(f"{text!r} is not a spec; write one as in Python: Quantize(4)")
    return spec


def sum_in_rank_order(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket without compression, in rank order, as codec.reduce adds frames."""
    mine, world = bucket.buffer(), dist.get_world_size()
    of_all = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(of_all, mine)
    total, *others = (x.float() for x in of_all)
    for other in others:
        total = total + other
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result((total / world).to(mine.dtype))
    return done


def add_hook(job: Job, task: Task, model: DistributedDataParallel) -> Any:
    """Register the job's communication hook. Return codec's hook, or None for the references without a codec."""
    if job.codec == ORDERED:
        model.register_comm_hook(None, sum_in_rank_order)
    if job.codec in (PLAIN, ORDERED):
        return None
    if job.codec in ADAMS:
        return replace_optimizer(job, task, model)
    from codec.torch import ddp_hook

    spec = spec_of(job.codec)
    feedback = None if isinstance(spec, codec.Lossless) else job.feedback
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the hook warns of Sign with Adam; this benchmark measures the effect
        hook = ddp_hook(
            spec, optimizer=task.optimizer, feedback=feedback, options=codec.options(algorithm=job.algorithm)
        )
    return hook.register(model)


def replace_optimizer(job: Job, task: Task, model: DistributedDataParallel) -> Any:
    """Replace the task's optimizer by OneBitAdam, with the arguments of the job's method, and return the new one.

    Second moments are frozen after 20% of the steps.
    """
    from codec.torch import OneBitAdam, VarianceSchedule

    group, freeze = task.optimizer.param_groups[0], max(1, round(FREEZE * job.steps))
    optimizer = OneBitAdam(
        group["params"],
        group["initial_lr"],
        group["betas"],
        group["eps"],
        group["weight_decay"],
        freeze_step=VarianceSchedule(freeze) if job.codec == ZERO_ONE else freeze,
        decoupled_weight_decay=isinstance(task.optimizer, torch.optim.AdamW),
        **ADAMS[job.codec],
    )
    task.optimizer = optimizer.register(model, options=codec.options(algorithm=job.algorithm))
    task.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, task.schedule.lr_lambdas)
    return optimizer


HookOf = Callable[[Job, Task, DistributedDataParallel], Any]


def residual_ratio(hook: Any) -> float:
    """Return the largest ||residual|| / ||gradient|| of this rank's last step, NaN without error feedback."""
    return math.nan if hook is None else float(hook.stats().residual_ratio) or math.nan


def average_buffers(model: torch.nn.Module) -> None:
    """Average the running statistics of batch norms over ranks, each of which has seen only its part of the batches."""
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


def digest_of(model: torch.nn.Module, equal: bool = True) -> str:
    """Return a digest of this rank's parameters. If `equal`, check that all ranks have the same digest."""
    sha = hashlib.sha256()
    for p in model.parameters():
        sha.update(p.detach().contiguous().view(torch.uint8).numpy())
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, sha.hexdigest())
    if equal and len(set(of_all)) != 1:
        raise SystemExit("parameters differ between ranks")
    return of_all[0]


def take_step(task: Task, model: DistributedDataParallel) -> tuple[float, str]:
    """Run a training step; return this rank's loss, and an error message if a gradient on any rank is not finite."""
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
    # evaluate() averages the buffers; by default, rank 0 would broadcast its buffers in every step
    model = DistributedDataParallel(task.model, forward_sync_buffers=False)
    hook = hook_of(job, task, model)
    trained = [p for p in task.model.parameters() if p.requires_grad]
    run = Run(job.task, job.codec, job.seed, job.steps, sum(p.numel() for p in trained))
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
    gather(run, largest, sum(p.nbytes for p in trained) / run.values)
    run.digest = digest_of(task.model, job.codec != ZERO_ONE)  # 0/1 Adam: ranks differ after local steps
    return run


def gather(run: Run, residual: float, itemsize: float) -> None:
    """Set the fields of `run` that combine all ranks: maxima of bytes, times and residuals, and mean losses.

    `itemsize` is the mean size of an uncompressed value in bytes.
    """
    world, steps = dist.get_world_size(), max(1, len(run.losses))
    of_rank = [sum(run.sent) / steps, sum(run.cpu_seconds) / steps, -1 if math.isnan(residual) else residual]
    most = torch.tensor(of_rank, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    run.nbytes, run.cpu, run.residual = most.tolist()
    if run.residual < 0:
        run.residual = math.nan
    if run.codec in (PLAIN, ORDERED):
        run.nbytes = values_sent(run.values, world) * itemsize
        run.sent = [run.nbytes] * len(run.losses)
    losses = torch.tensor(run.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    run.losses = (losses / world).tolist()
    times = torch.tensor([run.seconds, run.cpu_seconds], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    run.seconds, run.cpu_seconds = times.tolist()


def values_sent(values: int, world: int) -> float:
    """Return the number of values that a rank sends in both phases of an all-reduce."""
    return 2 * (world - 1) / world * values


def rank_main(rank: int, world: int, jobs: list[Job], meet: str, reports: Any, hook_of: HookOf) -> None:
    """Run all jobs as one rank in this process: starting a process for each job would take longer than some jobs."""
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
