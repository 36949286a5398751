"""Compare 1-bit Adam and 0/1 Adam with AdamW: held-out loss and bytes of a language model, and the time of a step.

    python bench/training/one_bit_adam.py              # about 8 minutes on two cores
    python bench/training/one_bit_adam.py --quick      # one seed, fewer steps
    python bench/training/one_bit_adam.py --only time

loss    Trains the transformer of bench/support/models.py (task text-adamw) on local processes, over
        DistributedDataParallel. The algorithm is "two_shot"; second moments are frozen after 20% of the steps.

        AdamW                     uncompressed gradients
        AdamW, signs              gradients sent as Sign(group_size=1024) with error feedback, by ddp_hook. As with
                                  OneBitAdam, norms, biases and small parameters are sent lossless
        lossless momenta          OneBitAdam(spec=Lossless()), which shows the effect of frozen second moments only
        4-bit momenta             OneBitAdam(warmup=Quantize(4)), which sends momenta in 4 bits by default
        1-bit Adam                OneBitAdam(spec=Sign(group_size=1024)): a lossless warm-up, then signs
        1-bit Adam, Quantize(4)   1-bit Adam with warmup=Quantize(4)
        0/1 Adam, Quantize(4)     the same with ZeroOneSchedule(max_interval=4): momenta are sent in some steps of
                                  the warm-up, and later steps are partly local

        Columns: mean held-out loss; the loss minus AdamW's of the same seed, mean and largest over seeds; bits per
        value that a rank sends in both phases of an all-reduce, over the whole run and in frozen steps.

time    Time of a step of OneBitAdam after the freeze, in one process without communication, divided by that of
        torch.optim.AdamW(foreach=True). Median of several measurements, which alternate.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import codec

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))
from models import Task
from runs import PLAIN, Job, Run, train_all, values_sent
from summary import table

SIGNS = "AdamW, signs"
ZERO_ONE = "0/1 Adam, Quantize(4)"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "lossless momenta": {"spec": codec.Lossless()},
    "4-bit momenta": {"warmup": codec.Quantize(4)},
    "1-bit Adam": {"spec": codec.Sign(group_size=1024)},
    "1-bit Adam, Quantize(4)": {"warmup": codec.Quantize(4), "spec": codec.Sign(group_size=1024)},
    ZERO_ONE: {"warmup": codec.Quantize(4), "spec": codec.Sign(group_size=1024)},
}
METHODS = (PLAIN, SIGNS, *OPTIMIZERS)
FREEZE = 0.2  # fraction of steps before the freeze
VALUES = 1 << 22  # number of values in the model whose step is timed
PARAMETERS = 40


def add_optimizer(job: Job, task: Task, model: DistributedDataParallel) -> Any:
    """Set up a job's method, which may replace the task's optimizer; return the object that counts bytes."""
    if job.codec == PLAIN:
        return None
    import codec.torch

    options = codec.options(algorithm=job.algorithm)
    if job.codec == SIGNS:
        policy = codec.torch.Policy(uneven=None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the hook warns of Sign with Adam; this benchmark measures the effect
            hook = codec.torch.ddp_hook(
                codec.Sign(group_size=1024), policy=policy, optimizer=task.optimizer, options=options
            )
            return hook.register(model)
    group, freeze = task.optimizer.param_groups[0], round(FREEZE * job.steps)
    optimizer = codec.torch.OneBitAdam(
        model.parameters(),
        group["initial_lr"],
        group["betas"],
        group["eps"],
        group["weight_decay"],
        freeze_step=codec.torch.VarianceSchedule(freeze, max_interval=4) if job.codec == ZERO_ONE else freeze,
        **OPTIMIZERS[job.codec],
    )
    task.optimizer = optimizer.register(model, options=options)
    task.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, task.schedule.lr_lambdas)
    return optimizer


def summarize(runs: list[Run], ranks: int) -> list[dict[str, Any]]:
    """Return a row of the table for each method."""
    plain = {r.seed: r.loss for r in runs if r.codec == PLAIN}
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(r.codec for r in runs):
        some = [r for r in runs if r.codec == name]
        apart = [r.loss - plain[r.seed] for r in some]
        values = values_sent(some[0].values, ranks)
        frozen = [n for r in some for n in r.sent[round(FREEZE * r.steps) :]]
        rows.append(
            {
                "method": "AdamW" if name == PLAIN else name,
                "loss": statistics.mean(r.loss for r in some),
                "vs_adamw": statistics.mean(apart),
                "vs_adamw_largest": max(apart),
                "bits": 8 * statistics.mean(n for r in some for n in r.sent) / values,
                "bits_frozen": 8 * statistics.mean(frozen) / values,
                "stopped": "; ".join(r.stopped for r in some if r.stopped),
            }
        )
    return rows


def compare_losses(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train with all methods and print their table."""
    jobs = [Job("text-adamw", name, seed, args.steps) for seed in range(args.seeds) for name in METHODS]
    rows = summarize(train_all(jobs, args.ranks, add_optimizer), args.ranks)
    print(f"\n{args.ranks} ranks, {args.steps} steps, {args.seeds} seeds\n")
    heads = ["method", "loss", "vs AdamW", "largest", "bits/value", "frozen"]
    lines = [
        [
            r["method"],
            f"{r['loss']:.4f}",
            f"{r['vs_adamw']:+.4f}",
            f"{r['vs_adamw_largest']:+.4f}",
            f"{r['bits']:.2f}",
            f"{r['bits_frozen']:.2f}",
        ]
        for r in rows
    ]
    print(table(heads, lines))
    return rows


def seconds_of(optimizer: torch.optim.Optimizer, repeat: int) -> float:
    """Return the mean time of a step in seconds."""
    begin = time.perf_counter()
    for _ in range(repeat):
        optimizer.step()
    return (time.perf_counter() - begin) / repeat


def compare_times(args: argparse.Namespace) -> dict[str, float]:
    """Time optimizer steps in this process, and print the result."""
    import codec.torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = VALUES // PARAMETERS // 64, 64

    def parameters() -> list[torch.nn.Parameter]:
        found = [torch.nn.Parameter(torch.randn(shape)) for _ in range(PARAMETERS)]
        for p in found:
            p.grad = torch.randn(shape)
        return found

    adam = torch.optim.AdamW(parameters(), foreach=True)
    ours = codec.torch.OneBitAdam(parameters(), weight_decay=0.01, freeze_step=5)
    for optimizer in (adam, ours):
        seconds_of(optimizer, 10)
    pairs = [(seconds_of(adam, 5), seconds_of(ours, 5)) for _ in range(5 if args.quick else 15)]
    found = {
        "adamw_s": statistics.median(a for a, _ in pairs),
        "one_bit_adam_s": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
    }
    print(
        f"\nStep of {VALUES:,} values in {PARAMETERS} parameters, one thread: AdamW {1e3 * found['adamw_s']:.1f} ms, "
        f"OneBitAdam after the freeze {1e3 * found['one_bit_adam_s']:.1f} ms ({found['ratio']:.2f} times)"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("loss", "time"))
    parser.add_argument("--steps", type=int, help="of each training (300)")
    parser.add_argument("--seeds", type=int, help="number of seeds (3)")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2, help="divisors of the batch (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables")
    parser.add_argument("--quick", action="store_true", help="one seed, 60 steps")
    args = parser.parse_args()
    args.steps = args.steps or (60 if args.quick else 300)
    args.seeds = args.seeds or (1 if args.quick else 3)
    report: dict[str, Any] = {"ranks": args.ranks, "steps": args.steps, "seeds": args.seeds}
    if args.only != "loss":
        report["time"] = compare_times(args)
    if args.only != "time":
        report["loss"] = compare_losses(args)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
