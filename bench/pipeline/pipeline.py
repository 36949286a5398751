"""AQ-SGD in pipelines (arXiv 2206.01299): loss over steps and over time, throughput, gradient compression, bytes.

    sudo python bench/pipeline/pipeline.py --json pipeline.json --plots docs   # all: about 25 minutes on two cores
    sudo python bench/pipeline/pipeline.py --quick                             # under three minutes
    sudo python bench/pipeline/pipeline.py --rate 100 --system aq --bits fw4bw8
    python bench/pipeline/pipeline.py --parts losses coding                    # without root

part        what                                                                     the paper's figure
losses      training loss over steps of each system                                  2
times       time of a step on links, in the first epoch and in later ones            table of throughput
outcomes    losses and times combined: time to FP32's loss, with 0.5% tolerance      3
check       whole trainings on a link, to compare with the combination
mesh        a pipeline with two replicas, and compressed gradients of parameters     4
coding      CPU time of a message, and its share of the time on a 100 Mbit/s wire
store       bytes of m, and time of a step with m in files

Systems: FP32 in torch's stages over Gloo ("fp32"), FP32 over the connections of codec.torch.send ("fp32-tcp"), DirectQ
("direct") and AQ-SGD ("aq") by codec.torch.pipelining.CompressedStage, and TAH-Quant ("tah", arXiv 2506.01352),
written from the paper (tah_quant.py). fw4bw8 means 4 bits for activations, 8 for their gradients. TAH-Quant has the
bits of its paper.

Losses are those of a simulation in one process with the messages of the real pipeline; links do not change them. Steps
are timed on processes in network namespaces (bench/network/netns.py: Linux, root, iproute2), one process a stage, whose
sending is limited. In the combination each step of the first epoch takes the time that was measured for one, each
later step that of a later one. Losses and bytes repeat on any machine. Times do not: use an idle machine.
"""

import argparse
import concurrent.futures
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import coding
import outcomes
import simulation
import stages
import tables
import torch
from netns import NetworkError, bits, bucket_nbytes, end_on_sigterm, require
from systems import (
    AQ,
    BITS_OF,
    FP32,
    FP32_TCP,
    SYSTEMS,
    Setting,
    allowed_speedup,
    message_nbytes,
    parse_bits,
    settings_of,
)
from tasks import LANGUAGE, TASKS, Sizes, pretrained

import codec

PARTS = ("losses", "times", "outcomes", "check", "mesh", "coding", "store")
ON_LINKS = ("times", "check", "mesh", "store")
RATES = ("20mbit", "100mbit", "500mbit", "1gbit", "10gbit")
CODING_RATE = "100mbit"
REPLICAS = 2
SAFE = 2  # token buckets that a message should fill
QUICK = Sizes(samples=384, epochs=3, pretraining=40)


def rate_of(text: str) -> str:
    """Return a rate of a link: "100" is 100 Mbit/s."""
    rate = f"{text}mbit" if text.replace(".", "", 1).isdigit() else text
    bits(rate)
    return rate


def progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:38}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


class Bench:
    """Arguments, trained weights and results."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.settings = settings_of(args.systems, args.bits)
        self.found: dict[str, Any] = {}

    def weights(self, blocks: int) -> dict[str, torch.Tensor]:
        """Return the parameters that trainings begin with, trained once."""
        path = weights_path(self.folder, blocks)
        if not path.exists():
            with progress() as bar:
                line = bar.add_task(f"pretraining, {blocks} blocks", total=self.args.sizes.pretraining)
                torch.save(pretrained(self.args.sizes, blocks, lambda: bar.advance(line)), path)
        return torch.load(path, weights_only=True)

    # parts

    def run_losses(self) -> list[dict[str, Any]]:
        """Train all settings on all tasks, in as many processes as there are cores."""
        sizes = self.args.sizes
        for count in self.args.stages:
            self.weights(count)
        jobs = [
            (setting, task, count, sizes, str(self.folder))
            for task, count in self.args.places
            for setting in self.settings
            if setting.system != FP32_TCP  # has the losses of FP32
        ]
        with pool() as workers, progress() as bar:
            line = bar.add_task("trainings", total=len(jobs))
            futures = [workers.submit(train_job, *job) for job in jobs]
            for future in futures:
                future.add_done_callback(lambda _: bar.advance(line))
            return [future.result() for future in futures]

    def run_times(self) -> list[dict[str, Any]]:
        """Time steps of all settings on all links."""
        rows: list[dict[str, Any]] = []
        for count in self.args.stages:
            plan = self.plan(count, self.args.rates, [stages.Job(s, timed=self.args.steps) for s in self.settings])
            rows += self.timed_rows(plan, f"steps of {count} stages")
        return rows

    def run_outcomes(self) -> list[dict[str, Any]]:
        an_epoch = self.args.sizes.steps_an_epoch
        return outcomes.outcome_rows(self.found["losses"], self.found["times"], an_epoch)

    def run_check(self) -> list[dict[str, Any]]:
        """Train FP32 and the first setting of AQ-SGD on a link, and compare with the simulation and the timed steps."""
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
        """Time steps of a pipeline with replicas, and train it without a limit of the rate."""
        count, args = self.args.stages[0], self.args
        sizes = replace(args.sizes, batch=args.sizes.batch * REPLICAS, samples=args.sizes.samples * REPLICAS)
        coded = [s for s in self.settings if s.system not in (FP32, FP32_TCP)]
        chosen = [(Setting(FP32), stages.FLOATS)]
        for setting in coded:
            chosen += [(setting, kind) for kind in (stages.FLOATS, stages.FOUR_BITS) if setting.system == AQ]
            chosen += [(setting, stages.FOUR_BITS)] if setting.system != AQ else []
        timed = [stages.Job(s, kind, args.steps) for s, kind in chosen]
        plan = stages.Plan(sizes, LANGUAGE, count, args.mesh_rates, timed, REPLICAS)
        found: dict[str, Any] = {"stages": count, "replicas": REPLICAS}
        found["times"] = self.timed_rows(plan, f"steps of {count} x {REPLICAS} ranks")
        trained = [stages.Job(s, kind) for s, kind in chosen if args.train_mesh and s.system in (FP32, AQ)]
        found["losses"] = []
        if trained:
            plan = stages.Plan(sizes, LANGUAGE, count, ["none"], trained, REPLICAS)
            an_epoch = sizes.steps_an_epoch
            for job, result in zip(trained, self.run_plan(plan, "trainings with replicas"), strict=True):
                loss = sum(result.losses[-an_epoch:]) / an_epoch
                row = {"label": job.setting.label, "averaging": job.averaging, "loss": loss, "losses": result.losses}
                found["losses"].append(row)
        return found

    def run_coding(self) -> list[dict[str, Any]]:
        torch.set_num_threads(1)
        rate, rows = bits(CODING_RATE) or 1, [s for s in self.settings if coding.is_coded(s)]
        with codec_threads():
            return [coding.measure(s, self.args.sizes, rate) | {"rate": CODING_RATE} for s in rows]

    def run_store(self) -> list[dict[str, Any]]:
        """Time AQ-SGD's steps with m in memory and in files, in turn."""
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

    # helpers

    def plan(self, count: int, rates: Sequence[str], jobs: Sequence[stages.Job]) -> stages.Plan:
        return stages.Plan(self.args.sizes, LANGUAGE, count, rates, jobs)

    def run_plan(self, plan: stages.Plan, text: str) -> list[stages.Result]:
        weights = self.weights(plan.stages)
        with progress() as bar:
            line = bar.add_task(text, total=stages.steps_in(plan))
            return stages.run(plan, weights, lambda n: bar.advance(line, n))

    def timed_rows(self, plan: stages.Plan, text: str) -> list[dict[str, Any]]:
        """Return a row for each timed job and rate of a plan."""
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
                    "sent": r.sent[-1],
                    "samples": sizes.batch,
                    "allowed": allowed_speedup(job.setting),
                    "below": speed is not None and smallest < SAFE * bucket_nbytes(speed),
                }
            )
        return rows


class codec_threads:
    """Use one thread in codec's calls."""

    def __enter__(self) -> None:
        self._before = os.environ.get("CODEC_NUM_THREADS")
        os.environ["CODEC_NUM_THREADS"] = "1"

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del os.environ["CODEC_NUM_THREADS"]
        else:
            os.environ["CODEC_NUM_THREADS"] = self._before


def weights_path(folder: Path, blocks: int) -> Path:
    return folder / f"weights-{blocks}.pt"


def pool() -> concurrent.futures.ProcessPoolExecutor:
    cores = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(cores, context, torch.set_num_threads, (1,))


def train_job(setting: Setting, task: str, count: int, sizes: Sizes, folder: str) -> dict[str, Any]:
    """Train in a process of the pool."""
    weights = torch.load(weights_path(Path(folder), count), weights_only=True)
    return asdict(simulation.train(setting, task, count, sizes, weights))


def check_messages(settings: Iterable[Setting], sizes: Sizes) -> str:
    """Return why messages are too small to be timed on any link; "" if they are large enough."""
    each = sizes.batch // sizes.micro_batches
    least = SAFE * bucket_nbytes(0)
    for s in settings:
        n = message_nbytes(s, sizes.values, each)
        if n < least:
            return (
                f"messages of {s.label} have {n:,} bytes; a link passes {bucket_nbytes(0):,} bytes at "
                f"once, so that small messages look faster than their bytes allow: use a --batch that makes {least:,}"
            )
    return ""


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="what to measure (all)")
    parser.add_argument(
        "--rate", nargs="+", dest="rates", metavar="RATE", help="100 or 100mbit (20 100 500 1gbit 10gbit)"
    )
    parser.add_argument("--system", nargs="+", dest="systems", choices=SYSTEMS, help="systems (all); fp32 always runs")
    parser.add_argument("--bits", nargs="+", help=f"of direct and aq ({' '.join(BITS_OF)})")
    parser.add_argument("--stages", nargs="+", type=int, choices=(2, 3, 4), help="numbers of stages (2 4)")
    parser.add_argument("--task", nargs="+", dest="tasks", choices=TASKS, help="tasks of the part losses (both)")
    parser.add_argument("--batch", type=int, help="samples of a step, in 4 micro-batches (128)")
    parser.add_argument("--samples", type=int, help="samples of an epoch (1024)")
    parser.add_argument("--epochs", type=int, help="epochs (8)")
    parser.add_argument("--pretraining", type=int, help="steps before (400)")
    parser.add_argument("--steps", type=int, help="timed steps of later epochs for each system and rate (5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="short trainings, fewer links and systems")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements; adds to those in the file")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw pipeline-*.png (needs matplotlib)")
    args = parser.parse_args(given)
    fill(args)
    check(parser, args)
    return args


def fill(args: argparse.Namespace) -> None:
    """Set what was not given."""
    quick = args.quick
    base = QUICK if quick else Sizes()
    names = ("batch", "samples", "epochs", "pretraining")
    chosen = {k: getattr(args, k) for k in names if getattr(args, k) is not None}
    args.sizes = replace(base, seed=args.seed, **chosen)
    args.bits = args.bits or (["fw4bw8", "fw2bw4"] if quick else list(BITS_OF))
    args.rates = args.rates or (["20mbit", "100mbit"] if quick else list(RATES))
    args.stages = args.stages or ([2] if quick else [2, 4])
    args.steps = args.steps or (2 if quick else 5)
    systems = args.systems or [s for s in SYSTEMS if not quick or s != FP32_TCP]
    args.systems = [s for s in SYSTEMS if s in systems or s == FP32]
    tasks = args.tasks or ([LANGUAGE] if quick else list(TASKS))
    # The classification has the messages of the language model: one number of stages shows it.
    args.places = [(task, n) for task in tasks for n in (args.stages if task == LANGUAGE else args.stages[:1])]
    args.train_mesh = not quick


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Reject what would fail later; without --parts, leave out those that cannot run here."""
    try:
        args.rates = [rate_of(r) for r in args.rates]
    except NetworkError as e:
        parser.error(f"--rate: {e}")
    args.check_rate = CODING_RATE if CODING_RATE in args.rates else args.rates[0]
    args.mesh_rates = [r for r in args.rates if (bits(r) or 1e12) <= 1e9] or args.rates[:1]
    for name in ("batch", "samples", "epochs", "pretraining", "steps"):
        value = getattr(args.sizes, name) if hasattr(args.sizes, name) and name != "steps" else getattr(args, name)
        if value <= 0:
            parser.error(f"--{name} must be above 0, got {value}")
    sizes = args.sizes
    if sizes.batch % (8 * sizes.micro_batches) or sizes.samples % sizes.batch:
        parser.error(f"--batch must be a multiple of {8 * sizes.micro_batches} and divide --samples")
    if sizes.samples < stages.FIRST_STEPS * sizes.batch:
        parser.error(
            f"--samples must be at least {stages.FIRST_STEPS} times --batch: {stages.FIRST_STEPS * sizes.batch}"
        )
    try:
        for b in args.bits:
            parse_bits(b)
    except ValueError as e:
        parser.error(f"--bits: {e}")
    lacking = ""
    try:
        require()
    except NetworkError as e:
        lacking = str(e)
    left_out = {*ON_LINKS, "outcomes"} if lacking else set()
    if args.parts is None:
        args.parts = [p for p in PARTS if p not in left_out and not (args.quick and p in ("check", "store"))]
        if lacking:
            print(f"Left out: {', '.join(p for p in PARTS if p in left_out)}: {lacking}", file=sys.stderr)
    elif asked := [p for p in args.parts if p in ON_LINKS and lacking]:
        parser.error(f"--parts {' '.join(asked)}: {lacking}")
    if any(p in ON_LINKS for p in args.parts):
        small = check_messages(settings_of(args.systems, args.bits), sizes)
        if small:
            parser.error(small)
    needed = ["rich", *(["matplotlib"] if args.plots else [])]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        parser.error(f"missing packages: {', '.join(missing)}; install the extra `bench` of this project")


def main() -> None:
    args = parse_arguments()
    end_on_sigterm()
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(Bench(args, Path(folder)))
    except (NetworkError, ValueError) as e:
        raise SystemExit(f"bench/pipeline/pipeline.py: {e}") from None
    except KeyboardInterrupt:
        sys.exit(130)


def run(bench: Bench) -> None:
    """Measure all parts, and print, write and draw them."""
    args, found = bench.args, bench.found
    if args.json and args.json.exists():
        found |= json.loads(args.json.read_text())
    found["sizes"] = asdict(args.sizes) | {"steps_an_epoch": args.sizes.steps_an_epoch}
    found.setdefault("about", {})
    for part in PARTS:
        if part not in args.parts:
            continue
        if part == "outcomes" and not (found.get("losses") and found.get("times")):
            raise ValueError("the part outcomes needs losses and times: measure them, too, or give their --json file")
        begin = time.perf_counter()
        found[part] = tables.without_nonfinite(json.loads(json.dumps(getattr(bench, f"run_{part}")())))
        found["about"][part] = {
            "cores": len(os.sched_getaffinity(0)),
            "isa": codec.isas()[-1],
            "torch": torch.__version__,
            "load": round(os.getloadavg()[0], 1),
            "seconds": round(time.perf_counter() - begin),
        }
        tables.show(found, [part])
        if args.json:  # after each part, since measurements take long
            args.json.write_text(json.dumps(found))
    if args.plots:
        import drawings

        drawings.draw(found, args.plots)


if __name__ == "__main__":
    main()
