"""Compare local steps with averaging gradients in every step: held-out loss, bytes, and time on a slow, long link.

    python bench/training/local_steps.py              # about 5 minutes on two cores
    python bench/training/local_steps.py --quick      # one seed, fewer steps: half a minute
    python bench/training/local_steps.py --json FILE --rtt 0.2 --rate 100e6

Trains the transformer of bench/support/models.py (task text-adamw) on local processes from the same seeds.

    float32                  DistributedDataParallel, uncompressed
    small                    DistributedDataParallel with codec.torch.ddp_hook("small")
    1-bit Adam, 0/1 Adam     OneBitAdam with a warm-up in 4 bits, frozen after 20% of the steps; 0/1 Adam with
                             ZeroOneSchedule(max_interval=4)
    late                     uncompressed averages of the gradients of the step before, which leave a step's time to
                             send them
    local                    codec.torch.LocalSteps(every=10) with its default spec. Names of other rows
                             show the arguments that differ. A warm-up is 20% of the steps, in 4 bits

Columns:

loss          final held-out loss, mean over seeds; for LocalSteps after finish()
vs float32    loss minus the loss of float32 from the same seed: mean and largest over seeds
bits          bits that a rank sends per value and step, relative to an all-reduce (both phases) of 1 bit per value
messages      fraction of steps in which a rank sends a message
CPU/step      CPU time of the busiest rank, codec included
all steps     modelled time of all steps on the link
to target     modelled time until a held-out loss is at most 0.05 above float32's final loss

Times are modelled, since a loopback device has no delay: CPU time, plus --rtt for each round trip, plus bytes divided
by --rate, without any overlap. Between two ranks, the hooks' two-shot all-reduce takes 1.5 round trips: two phases of
data, and an agreement. The one-phase all-reduce of LocalSteps, and Gloo's, take one. All gradients fit in one bucket.
"""

import argparse
import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import codec

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))
import one_bit_adam
from models import Task
from runs import PLAIN, Job, Run, add_hook, train_all, values_sent
from summary import table

DDP = {"small": "Quantize(4)", "1-bit Adam": "1-bit Adam, Quantize(4)", "0/1 Adam": "0/1 Adam, Quantize(4)"}
TWO_BITS = codec.Quantize(2, levels="odd", rounding="nearest")
WARMUP = 0.2  # fraction of the steps that belong to the warm-up


def nesterov(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


# by method: arguments of LocalSteps; a pair as `spec` is a codec and the decay of its residuals
LOCAL: dict[str, dict[str, Any]] = {
    "local, Lossless()": {"spec": codec.Lossless()},
    "local": {},
    "local, every=2, delay=1": {"every": 2, "delay": 1},
    "local, every=30": {"every": 30},
    "local, Quantize(2, odd)": {"spec": TWO_BITS},
    "local, Sign(1024)": {"spec": codec.Sign(group_size=1024)},
    "local, TopK(), decay .95": {"spec": (codec.TopK(), 0.95)},
    "local, every=30, TopK(), decay .95": {"every": 30, "spec": (codec.TopK(), 0.95)},
    "local, TopK(1/16), decay .95": {"spec": (codec.TopK(1 / 16), 0.95)},
    "local, 5 fragments, delay 1": {"fragments": 5, "delay": 1},
    "local, outer Nesterov": {"outer": nesterov},
    "warm-up, local": {"warmup": True},
    "warm-up, local, Quantize(2, odd)": {"warmup": True, "spec": TWO_BITS},
}
LATE = "late"
METHODS = (PLAIN, *DDP, LATE, *LOCAL)


def send_nothing(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook that sends nothing: each rank keeps its own gradients."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class LateGradients:
    """Replaces the gradients of each step by the averages of the step before, by zeros in the first step."""

    residual_ratio = math.nan

    def __init__(self, task: Task, model: DistributedDataParallel) -> None:
        self.sent_nbytes = 0.0
        self.parameters = [p for p in task.model.parameters() if p.requires_grad]
        self.former = [torch.zeros_like(p) for p in self.parameters]
        model.register_comm_hook(None, send_nothing)
        task.optimizer.register_step_pre_hook(self.before_step)

    def before_step(self, *_: Any) -> None:
        now = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters]
        for x in now:
            dist.all_reduce(x)
            x.div_(dist.get_world_size())
            self.sent_nbytes += values_sent(x.numel(), dist.get_world_size()) * x.element_size()
        for p, x in zip(self.parameters, self.former, strict=True):
            p.grad = x
        self.former = now

    def stats(self) -> "LateGradients":
        return self


class Stats:
    """Statistics of LocalSteps with the attributes of a hook's statistics, as runs.py reads them."""

    def __init__(self, local: Any) -> None:
        self.local = local
        self.residual_ratio = math.nan

    def stats(self) -> "Stats":
        self.sent_nbytes = self.local.stats().sent_nbytes
        return self


def add_method(job: Job, task: Task, model: DistributedDataParallel) -> Any:
    """Set up a job's method of averaging gradients or parameters; return the object that counts bytes."""
    if job.codec in (PLAIN, "small"):
        return add_hook(Job(job.task, DDP.get(job.codec, PLAIN), job.seed, job.steps), task, model)
    if job.codec in DDP:
        return one_bit_adam.add_optimizer(Job(job.task, DDP[job.codec], job.seed, job.steps), task, model)
    if job.codec == LATE:
        return LateGradients(task, model)
    from codec.torch import Feedback, LocalSteps

    how = dict(LOCAL[job.codec])
    if how.pop("warmup", False):
        how["warmup"] = (round(WARMUP * job.steps), "small")
    if isinstance(how.get("spec"), tuple):
        how["spec"] = Feedback(how["spec"][0], decay=how["spec"][1])
    model.register_comm_hook(None, send_nothing)
    local = LocalSteps(task.model, task.optimizer, **how)

    def after_step(*_: Any) -> None:
        local.step()
        if local.steps == job.steps:
            local.finish()

    task.optimizer.register_step_post_hook(after_step)
    return Stats(local)


def modelled(run: Run, rtt: float, rate: float) -> list[float]:
    """Return the modelled time of each step in a run, in seconds."""
    trips = 1.5 if run.codec in DDP else 1.0
    return [
        cpu + (trips * rtt + 8 * sent / rate if sent else 0.0)
        for cpu, sent in zip(run.cpu_seconds, run.sent, strict=True)
    ]


def to_target(run: Run, plain: Run, times: list[float]) -> float:
    """Return the modelled time until a run reaches float32's final loss plus 0.05; Inf if it never does."""
    steps = next((step for step, loss, _ in run.curve if loss <= plain.loss + 0.05), None)
    return math.inf if steps is None else sum(times[:steps])


def summarize(runs: list[Run], ranks: int, rtt: float, rate: float) -> list[dict[str, Any]]:
    """Return a row of the table for each method."""
    plain = {r.seed: r for r in runs if r.codec == PLAIN}
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(r.codec for r in runs):
        some = [r for r in runs if r.codec == name]
        apart = [r.loss - plain[r.seed].loss for r in some]
        times = [modelled(r, rtt, rate) for r in some]
        sent = [n for r in some for n in r.sent]
        rows.append(
            {
                "method": name,
                "loss": statistics.mean(r.loss for r in some),
                "vs_float32": statistics.mean(apart),
                "vs_float32_largest": max(apart),
                "bits": 8 * statistics.mean(sent) / values_sent(some[0].values, ranks),
                "messages": sum(n > 0 for n in sent) / len(sent),
                "cpu_s": statistics.mean(r.cpu for r in some),
                "all_s": statistics.mean(sum(t) for t in times),
                "to_target_s": statistics.mean(
                    to_target(r, plain[r.seed], t) for r, t in zip(some, times, strict=True)
                ),
                "stopped": "; ".join(r.stopped for r in some if r.stopped),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a Markdown table."""
    heads = ["method", "loss", "vs float32", "largest", "bits", "messages", "CPU/step", "all steps", "to target"]
    number: Callable[[float], str] = lambda x: f"{x:.0f} s" if math.isfinite(x) else "never"  # noqa: E731
    lines = [
        [
            r["method"],
            f"{r['loss']:.4f}",
            f"{r['vs_float32']:+.4f}",
            f"{r['vs_float32_largest']:+.4f}",
            f"{r['bits']:.3f}",
            f"{r['messages']:.0%}",
            f"{1e3 * r['cpu_s']:.0f} ms",
            number(r["all_s"]),
            number(r["to_target_s"]),
        ]
        for r in rows
    ]
    print(table(heads, lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help="rows besides float32 (all)")
    parser.add_argument("--steps", type=int, help="of each training, a multiple of 30 (300)")
    parser.add_argument("--seeds", type=int, help="number of seeds (3)")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2, help="divisors of the batch (2)")
    parser.add_argument("--rtt", type=float, default=0.1, help="round trip of the modelled link, in seconds (0.1)")
    parser.add_argument("--rate", type=float, default=20e6, help="rate of the modelled link, in bit/s (20e6)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table")
    parser.add_argument("--quick", action="store_true", help="one seed, 60 steps")
    args = parser.parse_args()
    args.steps = args.steps or (60 if args.quick else 300)
    args.seeds = args.seeds or (1 if args.quick else 3)
    if args.steps % 30:
        parser.error(f"--steps {args.steps}: give a multiple of 30, so that evaluations follow a synchronization")
    names = list(dict.fromkeys([PLAIN, *(args.methods or METHODS)]))
    jobs = [Job("text-adamw", name, seed, args.steps, every=30) for seed in range(args.seeds) for name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = summarize(train_all(jobs, args.ranks, add_method), args.ranks, args.rtt, args.rate)
    link = f"{1e3 * args.rtt:.0f} ms, {args.rate / 1e6:.0f} Mbit/s"
    print(f"\n{args.ranks} ranks, {args.steps} steps, {args.seeds} seeds; modelled link: {link}\n")
    show(rows)
    if args.json:
        report = {name: getattr(args, name) for name in ("ranks", "steps", "seeds", "rtt", "rate")} | {"rows": rows}
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
