"""Training with DistributedDataParallel: deviation of the loss, time of an iteration, time to accuracy."""

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import methods
import numpy as np
from runs import ORDERED, PLAIN, Run, values_sent
from summary import deviation, mean, steps_to_target

QUANTILES = (50, 90, 99)  # percent


def label(method: str) -> str:
    return {PLAIN: "no compression", ORDERED: "order of sums"}.get(method, methods.label(method))


def quotient(a: float, b: float) -> float:
    return a / b if b else math.nan


def sent_share(runs: Sequence[Run], world: int) -> float:
    """Return the bytes that a rank sends, as a fraction of those of an all-reduce in float32."""
    return mean([r.nbytes / (4 * values_sent(r.values, world)) for r in runs])


# Figure `deviations`: deviation of the loss


def deviations(run: Run, plain: Run) -> np.ndarray[Any, Any]:
    """Return, for each step, the relative deviation of the training loss from that of the uncompressed run."""
    n = min(len(run.losses), len(plain.losses))
    exact = np.array(plain.losses[:n])
    return np.abs(np.array(run.losses[:n]) - exact) / exact


def deviation_rows(runs: Sequence[Run], world: int) -> list[dict[str, Any]]:
    """Return, for each task and method, quantiles of the deviations over steps and seeds, and of final losses."""
    rows: list[dict[str, Any]] = []
    plain = {(r.task, r.seed): r for r in runs if r.codec == PLAIN}
    for task in dict.fromkeys(r.task for r in runs):
        noise = deviation([r.loss for r in plain.values() if r.task == task])
        for name in dict.fromkeys(r.codec for r in runs if r.task == task):
            some = [r for r in runs if (r.task, r.codec) == (task, name)]
            apart = np.concatenate([deviations(r, plain[task, r.seed]) for r in some])
            final = [r.loss - plain[task, r.seed].loss for r in some]
            rows.append(
                {
                    "task": task,
                    "method": name,
                    "saved": 1 - sent_share(some, world),
                    "loss": mean([r.loss for r in some]),
                    "accuracy": mean([r.accuracy for r in some]),
                    "final": mean(final),
                    "final_deviation": deviation(final),
                    "noise": noise,
                    "stopped": sum(bool(r.stopped) for r in some),
                    **{f"p{q}": float(np.percentile(apart, q)) for q in QUANTILES},
                }
            )
    return rows


# Figure `iteration`: time of an iteration


@dataclass(frozen=True)
class Timed:
    """A training run on a link of limited rate."""

    run: Run
    ranks: int
    link: str
    rate: float  # measured rate of the link, in bits per second of TCP payload


def steady(of_steps: Sequence[float]) -> Sequence[float]:
    """Drop the measurements of the first steps, in which ranks connect, rebuild buckets and warm up."""
    return of_steps[min(methods.POWER_START + 2, len(of_steps) - 1) :]


def iteration_seconds(run: Run) -> float:
    """Return the median seconds of a step."""
    return statistics.median(steady(run.seconds))


def cpu_seconds(run: Run) -> float:
    """Return the median CPU seconds of a step on the busiest rank."""
    return statistics.median(steady(run.cpu_seconds))


def fastest(timed: Sequence[Timed]) -> list[Timed]:
    """Return, for each task, link, number of ranks and method, the run with the fastest iteration."""
    best: dict[tuple[str, str, int, str], Timed] = {}
    for t in timed:
        key = t.run.task, t.link, t.ranks, t.run.codec
        if key not in best or iteration_seconds(t.run) < iteration_seconds(best[key].run):
            best[key] = t
    return list(best.values())


def sent_by(method: str, sent: float, of_ranks: int, ranks: int) -> float:
    """Convert the bytes `sent` by a rank in a group of `of_ranks` to those sent in a group of `ranks`.

    An all-reduce sends 2 (N - 1) / N times its frames. Top-k's all-gather sends N - 1 times a rank's values.
    """
    if method == methods.TOP_K:
        return sent * (ranks - 1) / (of_ranks - 1)
    return sent * ((ranks - 1) / ranks) / ((of_ranks - 1) / of_ranks)


def model_seconds(t: Timed, ranks: int, ranks_a_core: float = 1) -> float:
    """Return the modelled time of an iteration: CPU time of a core's ranks plus the time to send a rank's bytes."""
    sent = sent_by(t.run.codec, mean([*steady(t.run.sent)]), t.ranks, ranks)
    return ranks_a_core * cpu_seconds(t.run) + 8 * sent / t.rate


def iteration_rows(timed: Sequence[Timed], simulated: Sequence[int]) -> list[dict[str, Any]]:
    """Return measured and modelled times of iterations for each task, link, number of ranks and method.

    For measured numbers of ranks, the model assumes that ranks share this machine's cores. For other numbers, it
    assumes a core per rank, with the CPU time and the link's rate that were measured with the fewest ranks.
    """
    rows: list[dict[str, Any]] = []
    least, cores = min(t.ranks for t in timed), len(os.sched_getaffinity(0))
    for t in timed:
        rows.append(row_of(t, t.ranks, iteration_seconds(t.run), model_seconds(t, t.ranks, max(1, t.ranks / cores))))
        if t.ranks == least:
            rows += [row_of(t, ranks, math.nan, model_seconds(t, ranks)) for ranks in simulated]
    for row in rows:
        same = [r for r in rows if (r["task"], r["link"], r["ranks"]) == (row["task"], row["link"], row["ranks"])]
        plain = next(r for r in same if r["method"] == PLAIN)
        row["speedup"] = quotient(plain["seconds"], row["seconds"])
        row["model_speedup"] = quotient(plain["model"], row["model"])
        row["efficiency"] = quotient(plain["cpu"], row["model"])
    return rows


def row_of(t: Timed, ranks: int, seconds: float, model: float) -> dict[str, Any]:
    about = {"task": t.run.task, "link": t.link, "ranks": ranks, "method": t.run.codec}
    about["cpu"] = cpu_seconds(t.run)
    return about | {"seconds": seconds, "model": model, "model_over_measured": quotient(model, seconds)}


# Figure `accuracy`: time to accuracy


def target_of(run: Run, plain: Run) -> float:
    """Return the training time in seconds until the first evaluation near the uncompressed run's final result."""
    steps = steps_to_target(run, plain)
    return sum(run.seconds[: int(steps)]) if math.isfinite(steps) else math.inf


def accuracy_rows(timed: Sequence[Timed]) -> list[dict[str, Any]]:
    """Return the time to accuracy for each task, link and method; times and steps are means over seeds."""
    rows: list[dict[str, Any]] = []
    for task, link in dict.fromkeys((t.run.task, t.link) for t in timed):
        runs = [t.run for t in timed if (t.run.task, t.link) == (task, link)]
        plain = {r.seed: r for r in runs if r.codec == PLAIN}
        base = mean([target_of(r, r) for r in plain.values()])
        world = next(t.ranks for t in timed if (t.run.task, t.link) == (task, link))
        ranks_a_core = max(1, world / len(os.sched_getaffinity(0)))
        for name in dict.fromkeys(r.codec for r in runs):
            some = [r for r in runs if r.codec == name]
            seconds = mean([target_of(r, plain[r.seed]) for r in some])
            steps = mean([steps_to_target(r, plain[r.seed]) for r in some])
            model = mean([model_seconds(t, world, ranks_a_core) for t in timed if t.run in some and t.link == link])
            rows.append(
                {
                    "task": task,
                    "link": link,
                    "method": name,
                    "saved": 1 - sent_share(some, world),
                    "steps": steps,
                    "model": steps * model,
                    "iteration": mean([iteration_seconds(r) for r in some]),
                    "seconds": seconds,
                    "speedup": quotient(base, seconds) if math.isfinite(seconds) else 0.0,
                    "accuracy": mean([r.accuracy for r in some]),
                    "loss": mean([r.loss for r in some]),
                }
            )
        least = next(r["model"] for r in rows if (r["task"], r["link"], r["method"]) == (task, link, PLAIN))
        for row in rows:
            if (row["task"], row["link"]) == (task, link):
                row["model_speedup"] = quotient(least, row["model"])
    return rows
