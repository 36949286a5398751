"""Figures of GComp (SoCC 2024, doi 10.1145/3698038.3698541) for this library, on small models.

    python bench/gcomp/gcomp.py --figures sizes deviations            # without root
    sudo python bench/gcomp/gcomp.py --json gcomp.json --plots docs   # all figures: about half an hour
    sudo python bench/gcomp/gcomp.py --quick                          # fewer steps and methods: below two minutes

figures        contents                                                              the paper's figures
distributions  exponents of gradients, gradients over parameters, zeros              1, 2, 3
sizes          compression over steps, truncation strategies, sources of codebooks   9, 14, 12
deviations     deviation of the loss from that of the uncompressed run               18
allreduce      time of an all-reduce, relative to Gloo's in float32                  10
iteration      time of an iteration; simulated for more ranks than were measured     15, 16, 17
accuracy       time until the accuracy of the uncompressed run                       20

Tasks are those of bench/support/models.py: digits-sgd (SGD with momentum), text-adamw (AdamW), and, only if --tasks
names it, text-adamw-wide, whose model has 12 times as many parameters.
The last three figures run ranks in network namespaces (bench/network/netns.py: Linux, root, iproute2). The figure
`allreduce` also runs the C++ program of `make gloo-programs` if it is built.

Losses, bytes and bits are the same on any machine. Times are not: compare methods of one run, on an idle machine. An
iteration is modelled as the CPU time of the ranks that share a core, plus the bytes that a rank sends divided by the
rate of its link, without overlap. For numbers of ranks that were not measured, times are predictions of this model with
one core per rank. The number of samples per rank is always the same.
"""

import argparse
import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from codec._c.library import isas

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
sys.path.insert(0, str(Path(__file__).parents[1] / "network"))

import distributions
import links
import methods
import report
import sizes
import trainings
from runs import ORDERED, PLAIN, Job, train_all
from summary import without_nonfinite

TASKS = ("digits-sgd", "text-adamw")
MORE_TASKS = ("text-adamw-wide",)  # tasks that run only if --tasks names them
FIGURES = ("distributions", "sizes", "deviations", "allreduce", "iteration", "accuracy")
ON_LINKS = FIGURES[3:]  # figures that need network namespaces
WITH_ZSTD = ("sizes", "allreduce", "iteration")
EXACT = 'Truncate(guard="exact")'
DEVIATION_METHODS = (
    PLAIN,
    ORDERED,
    EXACT,
    methods.NEAR,
    methods.BY_BIT,
    methods.FP16,
    methods.TOP_K,
    methods.RANDOM_K,
    methods.POWER_SGD,
)
TIMED_METHODS = (
    PLAIN,
    methods.LOSSLESS,
    methods.NEAR,
    methods.BY_BIT,
    methods.FP16,
    methods.TOP_K,
    methods.RANDOM_K,
    methods.POWER_SGD,
    methods.ZLIB,
    methods.ZSTD,
)
ACCURACY_METHODS = (
    PLAIN,
    methods.NEAR,
    methods.BY_BIT,
    methods.FP16,
    methods.TOP_K,
    methods.POWER_SGD,
)
QUICK_METHODS = (PLAIN, methods.NEAR, methods.BY_BIT, methods.FP16, methods.TOP_K, methods.POWER_SGD)
ROUNDS = 2  # timed training runs per method for the figure `iteration`; the fastest run counts
SIMULATED = (8, 16, 32, 64)
EVALUATIONS, QUICK_EVALUATIONS = 30, 6  # evaluations in a run that is timed until it reaches the target
SAMPLES_A_RANK = {"digits-sgd": 8, "text-adamw": 8, "text-adamw-wide": 8}


def of_task(task: str, chosen: Sequence[str]) -> list[str]:
    """Return the methods that can train a task: PowerSGD can hang on models above 1 MiB (methods.PowerSGD)."""
    return [m for m in chosen if m != methods.POWER_SGD or task in TASKS]


def progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def run_on_gradients(measure: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Call `measure` for each task on this machine without a network, and return the results."""
    torch.set_num_threads(1)
    with progress() as bar:
        line = bar.add_task("gradients of a training", total=len(args.tasks) * args.size_steps)
        measured: list[dict[str, Any]] = []
        for task in args.tasks:
            bar.update(line, description=f"gradients of {task}")
            measured.append(asdict(measure(task, args.size_steps, args.samples, lambda: bar.advance(line))))
    return measured


def run_deviations(args: argparse.Namespace) -> dict[str, Any]:
    ranks = args.ranks[-1]
    chosen = [m for m in DEVIATION_METHODS if not args.quick or m in QUICK_METHODS]
    jobs = [
        Job(task, method, seed, args.steps)
        for task in args.tasks
        for seed in range(args.seeds)
        for method in of_task(task, chosen)
    ]
    runs = train_all(jobs, ranks, methods.add_hook)
    apart = [
        {"task": r.task, "method": r.codec, "seed": r.seed, "deviations": trainings.deviations(r, p).tolist()}
        for r in runs
        for p in runs
        if p.codec == PLAIN and (p.task, p.seed) == (r.task, r.seed)
    ]
    about = {"ranks": ranks, "steps": args.steps, "seeds": args.seeds}
    return about | {"rows": trainings.deviation_rows(runs, ranks), "deviations": apart}


def run_all_reduces(args: argparse.Namespace) -> list[dict[str, Any]]:
    tables: list[dict[str, Any]] = []
    with progress() as bar:
        line = bar.add_task("all-reduces", total=len(args.ranks) * links.all_reduce_rows(args.links))
        for ranks in args.ranks:
            bar.update(line, description=f"all-reduces of {ranks} ranks")
            found = links.all_reduces(ranks, args.links, args.mib, args.repeat, lambda n: bar.update(line, advance=n))
            tables += [{"program": "Python", **table} for table in found]
            if links.missing_program():
                print(f"The C++ program is left out: {links.missing_program()}", file=sys.stderr)
                continue
            bar.update(line, description=f"all-reduces of {ranks} ranks, C++")
            tables += [{"program": "C++", **t} for t in links.cpp_all_reduces(ranks, args.links, args.mib, args.repeat)]
    return [report.all_reduce_table(t) for t in tables]


def run_iteration(args: argparse.Namespace) -> list[dict[str, Any]]:
    chosen = QUICK_METHODS if args.quick else TIMED_METHODS
    tasks, rounds = (args.tasks[:1], 1) if args.quick else (args.tasks, ROUNDS)
    timed: list[trainings.Timed] = []
    with progress() as bar:
        of_tasks = [(task, method) for task in tasks for method in of_task(task, chosen)]
        total = rounds * len(args.ranks) * len(args.links) * len(of_tasks)
        line = bar.add_task("iterations", total=total)
        for ranks in args.ranks:
            bar.update(line, description=f"iterations of {ranks} ranks")
            jobs = [
                Job(task, method, 0, args.iterations, batch=SAMPLES_A_RANK[task] * ranks, every=args.iterations)
                for _ in range(rounds)
                for task, method in of_tasks
            ]
            timed += links.trainings(ranks, args.links, jobs, lambda n: bar.update(line, advance=n))
    return trainings.iteration_rows(trainings.fastest(timed), [n for n in SIMULATED if n > max(args.ranks)])


def run_accuracy(args: argparse.Namespace) -> dict[str, Any]:
    chosen = QUICK_METHODS if args.quick else ACCURACY_METHODS
    evaluations = QUICK_EVALUATIONS if args.quick else EVALUATIONS
    ranks = args.ranks[0]
    tasks = args.tasks[:1] if args.quick else args.tasks
    jobs = [
        Job(task, method, seed, args.steps, every=max(1, args.steps // evaluations))
        for task in tasks
        for seed in range(1 if args.quick else args.accuracy_seeds)
        for method in of_task(task, chosen)
    ]
    with progress() as bar:
        line = bar.add_task(f"time to accuracy, {ranks} ranks", total=len(args.links) * len(jobs))
        timed = links.trainings(ranks, args.links, jobs, lambda n: bar.update(line, advance=n))
    curves = [
        {
            "task": t.run.task,
            "link": t.link,
            "method": t.run.codec,
            "seed": t.run.seed,
            "points": [(sum(t.run.seconds[:step]), loss, accuracy) for step, loss, accuracy in t.run.curve],
        }
        for t in timed
    ]
    return {"ranks": ranks, "steps": args.steps, "rows": trainings.accuracy_rows(timed), "curves": curves}


RUN = {
    "distributions": functools.partial(run_on_gradients, distributions.measure),
    "sizes": functools.partial(run_on_gradients, sizes.measure),
    "deviations": run_deviations,
    "allreduce": run_all_reduces,
    "iteration": run_iteration,
    "accuracy": run_accuracy,
}


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", nargs="+", choices=FIGURES, help="what to measure (all)")
    parser.add_argument(
        "--tasks", nargs="+", choices=(*TASKS, *MORE_TASKS), default=list(TASKS), help=f"trainings ({' '.join(TASKS)})"
    )
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit"], help="what a rank may send (100mbit 1gbit)")
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        choices=(2, 4),
        help="measured numbers of ranks (2 4); the figure accuracy uses the first one, deviations the last one",
    )
    parser.add_argument("--seeds", type=int, help="seeds of the figure deviations (2)")
    parser.add_argument("--accuracy-seeds", type=int, default=3, help="seeds of the figure accuracy (3)")
    parser.add_argument("--steps", type=int, help="steps of the figures deviations and accuracy (150)")
    parser.add_argument("--size-steps", type=int, help="steps of the training whose gradients are compressed (400)")
    parser.add_argument("--iterations", type=int, help="steps that are timed for the figure iteration (26)")
    parser.add_argument("--samples", type=int, help="steps of that training whose gradients are compressed (25)")
    parser.add_argument("--mib", type=float, help="MiB of float32 that an all-reduce sums (4)")
    parser.add_argument("--repeat", type=int, help="minimum number of repetitions of an all-reduce (3)")
    parser.add_argument("--quick", action="store_true", help="fewer steps and methods: below two minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements; adds to those in the file")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw gcomp-*.png (needs matplotlib)")
    args = parser.parse_args(given)
    args.ranks = args.ranks or ([2] if args.quick else [2, 4])
    full_and_quick = {
        "seeds": (2, 1),
        "steps": (150, 30),
        "size_steps": (400, 80),
        "samples": (25, 6),
        "iterations": (26, 20),
        "mib": (4, 1),
        "repeat": (3, 2),
    }
    for name, (full, quick) in full_and_quick.items():
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else full)
        elif getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, got {getattr(args, name)}")
    check(parser, args)
    return args


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Reject arguments that would fail later. Without --figures, skip figures that cannot run here."""
    if args.plots and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plots needs matplotlib")
    lacking = links.why_not()
    if args.figures is None:
        args.figures = [f for f in FIGURES if f not in ON_LINKS or not lacking]
        if lacking:
            print(f"Figures {', '.join(ON_LINKS)} are left out: {lacking}", file=sys.stderr)
    elif lacking and (asked := [f for f in args.figures if f in ON_LINKS]):
        parser.error(f"--figures {' '.join(asked)}: {lacking}")
    needed = ["rich"]
    if any(task.startswith("digits") for task in args.tasks):
        needed.append("sklearn")
    if any(figure in WITH_ZSTD for figure in args.figures):
        needed.append("zstandard")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        parser.error(f"missing packages: {', '.join(missing)}; install the extra `bench` of this project")
    for link in args.links:
        try:
            links.netns.bits(link)
        except links.netns.NetworkError as e:
            parser.error(f"--links: {e}")


def main() -> None:
    args = parse_arguments()
    links.netns.end_on_sigterm()
    found: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    try:
        for figure in FIGURES:
            if figure not in args.figures:
                continue
            begin = time.perf_counter()
            found[figure] = without_nonfinite(json.loads(json.dumps(RUN[figure](args))))
            found[f"{figure} about"] = {
                "cores": len(os.sched_getaffinity(0)),
                "isa": isas()[-1],
                "torch": torch.__version__,
                "load": round(os.getloadavg()[0], 1),
                "seconds": round(time.perf_counter() - begin),
            }
            report.show(figure, found)
            if args.json:  # write after each figure, since measurements take long
                args.json.write_text(json.dumps(found))
    except links.netns.NetworkError as e:
        raise SystemExit(f"bench/gcomp/gcomp.py: {e}") from None
    except KeyboardInterrupt:
        sys.exit(130)
    if args.plots:
        import plots

        plots.draw(found, args.plots)


if __name__ == "__main__":
    main()
