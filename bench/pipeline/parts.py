"""Parts of the benchmark: the training and timing behind each of its tables."""

import argparse
import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import coding
import outcomes
import simulation
import stages
import torch
from netns import bits, bucket_nbytes
from systems import AQ, BITS_OF, FP32, FP32_TCP, Setting, allowed_speedup, message_nbytes, settings_of
from tasks import LANGUAGE, Sizes, pretrained

CODING_RATE = "100mbit"
REPLICAS = 2
SAFE = 2  # minimum size of a message in token buckets, so that the bucket does not hide the link's rate


def progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:38}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


class Bench:
    """Arguments, pretrained weights and results of the benchmark."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.settings = settings_of(args.systems, args.bits)
        self.found: dict[str, Any] = {}

    def prepare(self, counts: Sequence[int]) -> None:
        """Pretrain the models with these numbers of blocks, unless their files exist."""
        sizes = self.args.sizes
        missing = [n for n in counts if not weights_path(self.folder, sizes, n).exists()]
        if missing:
            in_pool("pretraining", pretrain_job, [(sizes, n, self.folder) for n in missing])

    def run_losses(self) -> list[dict[str, Any]]:
        """Train all settings on all tasks, in one process per core, and return the results with losses."""
        sizes = self.args.sizes
        self.prepare(self.args.stages)
        jobs = [
            (setting, task, count, sizes, self.folder)
            for task, count in self.args.places
            for setting in self.settings
            if setting.system != FP32_TCP  # FP32_TCP has the same losses as FP32
        ]
        return in_pool("trainings", train_job, jobs)

    def run_times(self) -> list[dict[str, Any]]:
        """Measure the step times of all settings on all links, and return the rows."""
        rows: list[dict[str, Any]] = []
        for count in self.args.stages:
            plan = self.plan(count, self.args.rates, [stages.Job(s, timed=self.args.steps) for s in self.settings])
            rows += self.timed_rows(plan, f"steps of {count} stages")
        return rows

    def run_outcomes(self) -> list[dict[str, Any]]:
        an_epoch = self.args.sizes.steps_an_epoch
        return outcomes.outcome_rows(self.found["losses"], self.found["times"], an_epoch)

    def run_check(self) -> list[dict[str, Any]]:
        """Train FP32 and the first AQ-SGD setting on a link; compare with simulated losses and timed steps."""
        count, rate = self.args.stages[0], self.args.check_rate
        chosen = [Setting(FP32), next((s for s in self.settings if s.system == AQ), Setting(AQ, BITS_OF[0]))]
        plan = self.plan(count, [rate], [stages.Job(s) for s in chosen])
        rows: list[dict[str, Any]] = []
        for setting, result in zip(chosen, self.run_plan(plan, "whole trainings"), strict=True):
            row: dict[str, Any] = {"label": setting.label, "stages": count, "rate": rate}
            row |= {"seconds": sum(result.seconds), "losses": result.losses, "of_steps": result.seconds}
            place = {"task": LANGUAGE, "stages": count}
            same = [r for r in self.found.get("losses", []) if place.items() <= r.items()]
            simulated = next((r for r in same if Setting(**r["setting"]) == setting), None)
            pairs = zip(simulated["losses"], result.losses, strict=True) if simulated else ()
            row["largest_difference"] = max((abs(a - b) for a, b in pairs), default=float("nan"))
            timed = [r for r in self.found.get("times", []) if (r["stages"], r["rate"]) == (count, rate)]
            of = next((r for r in timed if Setting(**r["setting"]) == setting), None)
            steps, an_epoch = len(result.losses), self.args.sizes.steps_an_epoch
            row["model_seconds"] = (
                outcomes.seconds_after(steps, of["first"], of["later"], an_epoch) if of else float("nan")
            )
            rows.append(row)
        return rows

    def run_mesh(self) -> dict[str, Any]:
        """Time steps of a pipeline with replicas on each link, and train it on an unlimited link."""
        count, args = self.args.stages[0], self.args
        sizes = replace(args.sizes, batch=args.sizes.batch * REPLICAS, samples=args.sizes.samples * REPLICAS)
        coded = [s for s in self.settings if s.system not in (FP32, FP32_TCP)]
        chosen = [(Setting(FP32), stages.FLOATS)]
        for setting in coded:
            kinds = stages.FLOATS, stages.FOUR_BITS, stages.QUANTIZED_ADAM
            chosen += [(setting, kind) for kind in kinds if setting.system == AQ]
            chosen += [(setting, stages.FOUR_BITS)] if setting.system != AQ else []
        timed = [stages.Job(s, kind, args.steps) for s, kind in chosen]
        plan = stages.Plan(sizes, LANGUAGE, count, args.mesh_rates, timed, REPLICAS)
        found: dict[str, Any] = {"stages": count, "replicas": REPLICAS, "losses": []}
        found["times"] = self.timed_rows(plan, f"steps of {count} x {REPLICAS} ranks")
        coarse_and_fine = {self.args.bits[0], self.args.bits[-1]}
        trained = [
            stages.Job(s, kind)
            for s, kind in chosen
            if args.train_mesh and (s.system == FP32 or (s.system == AQ and s.bits in coarse_and_fine))
        ]
        for task in args.tasks or [LANGUAGE] if trained else ():
            found["losses"] += self.mesh_losses(stages.Plan(sizes, task, count, ["none"], trained, REPLICAS))
        return found

    def mesh_losses(self, plan: stages.Plan) -> list[dict[str, Any]]:
        """Train the plan's pipelines with replicas, and return a row for each."""
        rows: list[dict[str, Any]] = []
        an_epoch = plan.sizes.steps_an_epoch
        for job, result in zip(plan.jobs, self.run_plan(plan, f"{plan.task} with replicas"), strict=True):
            rows.append(
                {
                    "task": plan.task,
                    "label": job.setting.label,
                    "averaging": job.averaging,
                    "loss": sum(result.losses[-an_epoch:]) / an_epoch,
                    "losses": result.losses,
                }
            )
        return rows

    def run_coding(self) -> list[dict[str, Any]]:
        torch.set_num_threads(1)
        rate, coded = bits(CODING_RATE) or 1, [s for s in self.settings if coding.is_coded(s)]
        places = [(shape, s) for shape in coding.shapes_of(self.args.sizes) for s in coded]
        os.environ["CODEC_NUM_THREADS"] = "1"
        with progress() as bar:
            return [
                coding.measure(s, shape, rate) | {"rate": CODING_RATE}
                for shape, s in bar.track(places, description="coding of messages")
            ]

    def run_store(self) -> list[dict[str, Any]]:
        """Time AQ-SGD's steps with m in memory and with m in files, in alternation."""
        base = next((s for s in self.settings if s.system == AQ), Setting(AQ, BITS_OF[0]))
        dtypes, rate = ("float32", "bfloat16", "8bit"), self.args.check_rate
        kinds = [replace(base, store=store, dtype=dtype) for dtype in dtypes for store in ("ram", "files")]
        rows = {dtype: coding.store_row(replace(base, dtype=dtype), self.args.sizes) for dtype in dtypes}
        count, steps = self.args.stages[0], 2 * self.args.steps
        plan = self.plan(count, [rate], [stages.Job(s, timed=steps) for s in kinds])
        later = [r.later for r in self.run_plan(plan, "m in memory and in files")]
        for dtype, ram, files in zip(dtypes, later[::2], later[1::2], strict=True):
            rows[dtype] |= {"ram": ram, "files": files, "files_over_ram": files / ram, "rate": rate}
        return list(rows.values())

    def plan(self, count: int, rates: Sequence[str], jobs: Sequence[stages.Job]) -> stages.Plan:
        return stages.Plan(self.args.sizes, LANGUAGE, count, rates, jobs)

    def run_plan(self, plan: stages.Plan, text: str) -> list[stages.Result]:
        self.prepare([plan.stages])
        weights = torch.load(weights_path(self.folder, self.args.sizes, plan.stages), weights_only=True)
        with progress() as bar:
            line = bar.add_task(text, total=stages.steps_in(plan))
            return stages.run(plan, weights, lambda n: bar.advance(line, n))

    def timed_rows(self, plan: stages.Plan, text: str) -> list[dict[str, Any]]:
        """Run a plan, and return a row for each timed job and rate."""
        rows: list[dict[str, Any]] = []
        sizes = plan.sizes
        each = sizes.batch // plan.replicas // sizes.micro_batches
        jobs = [job for _ in plan.rates for job in plan.jobs]
        for job, r in zip(jobs, self.run_plan(plan, text), strict=True):
            smallest = message_nbytes(job.setting, each * sizes.context * sizes.width, each)
            speed = bits(r.rate)
            rows.append(
                {
                    "stages": plan.stages,
                    "rate": r.rate,
                    "tcp_rate": r.tcp_rate,
                    "label": r.label,
                    "setting": asdict(job.setting),
                    "averaging": job.averaging,
                    "first": r.first,
                    "later": r.later,
                    "seconds": r.seconds,
                    "cpu": sorted(r.cpu_seconds)[len(r.cpu_seconds) // 2],
                    "first_sent": r.sent[1],
                    "sent": r.sent[-1],
                    "samples": sizes.batch,
                    "allowed": allowed_speedup(job.setting),
                    "below": speed is not None and smallest < SAFE * bucket_nbytes(speed),
                }
            )
        return rows


def weights_path(folder: Path, sizes: Sizes, blocks: int) -> Path:
    """Return the path of pretrained parameters. The name contains all settings on which they depend."""
    return folder / f"blocks-{blocks}-{sizes.width}x{sizes.context}-steps-{sizes.pretraining}-seed-{sizes.seed}.pt"


def in_pool(text: str, function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call a function for each job, on a pool of one single-threaded process per core, and return the results."""
    cores = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(cores, context, torch.set_num_threads, (1,)) as workers,
        progress() as bar,
    ):
        line = bar.add_task(text, total=len(jobs))
        futures = [workers.submit(function, *job) for job in jobs]
        for future in futures:
            future.add_done_callback(lambda _: bar.advance(line))
        return [future.result() for future in futures]


def pretrain_job(sizes: Sizes, blocks: int, folder: Path) -> None:
    """Pretrain a model, and write its parameters."""
    torch.save(pretrained(sizes, blocks), weights_path(folder, sizes, blocks))


def train_job(setting: Setting, task: str, count: int, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Train one setting by simulation, and return the result."""
    weights = torch.load(weights_path(folder, sizes, count), weights_only=True)
    return asdict(simulation.train(setting, task, count, sizes, weights))
