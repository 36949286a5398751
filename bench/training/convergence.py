"""Compare how codecs affect training: loss, accuracy, bytes sent and residuals, against uncompressed float32.

    python bench/training/convergence.py                           # all presets and optimizers, 12 models: an hour
    python bench/training/convergence.py --quick                   # fewer steps, models and methods: two minutes
    python bench/training/convergence.py --methods codecs --seeds 3 --tasks text-sgd text-adamw digits-sgd
    python bench/training/convergence.py --tasks text-sgd --methods "Quantize(3)" "Sign(group_size=256)" --feedback on
    python bench/training/convergence.py --ranks 2 --tasks gpt-tied lstm --methods "1-bit Adam"
    python bench/training/convergence.py --from runs.json --plot convergence.png   # show runs that --json has written
    python bench/training/convergence.py --page docs/benchmarks/convergence.md  # train, and write its tables

Each rank is a process. DistributedDataParallel averages gradients over Gloo through
``codec.torch.ddp_hook(spec, optimizer=optimizer)``. The policy and error feedback are the hook's defaults for the
codec, unless ``--feedback`` says otherwise. The algorithm is fixed, because "auto" may send gradients uncompressed if
that is faster on this machine. Models and data are those of bench/support: models.py, architectures.py and
vocabularies.py. All methods train from the same seeds.

A method is a preset (lossless, near, small, ...), a spec as in Python, or an optimizer, which replaces AdamW:
OneBitAdam and 0/1 Adam with their defaults, momenta in 4 bits; 1-bit Adam, which sends signs in groups of 1,024; or
OneBitAdam(max_ratio=None), whose steps have no bound.
Second moments are frozen after 20% of the steps. ``codecs`` stands for all codecs. Presets and defaults are read from
the library. Two more rows are references without a codec:

float32           DistributedDataParallel without a hook, with at least three seeds
float32 in order  uncompressed sums in rank order. Lossless runs must give the same bits, or this command fails. The
                  difference from float32 shows the effect of the order of summation alone.

Columns:

bits/value   bytes that a rank sends, headers included, relative to an all-reduce (both phases) of 1 bit a value
loss         held-out loss at the end, mean over seeds
vs float32   loss minus the loss of float32 from the same seed: mean and standard deviation over seeds
accuracy     held-out accuracy at the end, mean over seeds
residual     largest ||residual|| / ||gradient|| of a parameter with error feedback, over all steps, ranks and seeds
CPU/step     CPU time of the busiest rank, codec included
steps        steps until an evaluation reaches the target: 1 point below float32's final accuracy (digits-sgd), or 0.05
             above its final loss (others)
100 Mbit     predicted time until the target: steps * (CPU/step + bytes / link rate), without any overlap

The noise is the standard deviation of float32's loss over seeds, or the effect of the order of sums, whichever is
larger. A loss is within the noise if it is at most float32's loss plus twice the standard error of a difference of two
means over n seeds, noise * sqrt(2 / n): a change of a training's course moves its loss like another seed.
"""

import argparse
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from runs import ADAMS, ONE_BIT, ORDERED, PLAIN, ZERO_ONE, Job, Run, spec_of, train_all
from summary import LOSSLESS, load, plot, same_bits, show, summarize, without_nonfinite, write_page

METHODS = ("lossless", "near", "balanced", "small", "smallest", "Float4()", "Quantize(2)", ONE_BIT, ZERO_ONE)
CODECS = (
    "Lossless()",
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
QUICK_METHODS = ("lossless", "near", "smallest", ONE_BIT)
QUICK_TASKS = ("digits-sgd", "text-adamw", "gpt-tied", "lstm", "vit")
STEPS = {"digits-sgd": 400, "text-sgd": 1000, "text-adamw": 1000}
STEPS |= dict.fromkeys(("gpt-tied", "gpt-bfloat16", "lora", "lstm", "vit", "diffusion"), 300)
STEPS |= dict.fromkeys(("recommendation", "words", "encoder-decoder"), 300)  # most rows of these models are rarely used
QUICK_STEPS = 60
PLAIN_SEEDS = 3  # minimum number of float32 runs with different seeds, which measure the noise
SGD_TASKS = ("digits-sgd", "text-sgd")  # tasks trained by SGD, in which OneBitAdam cannot replace the optimizer


def steps_of(task: str, args: argparse.Namespace) -> int:
    return args.steps or (QUICK_STEPS if args.quick else STEPS[task])


def methods_of(task: str, args: argparse.Namespace) -> list[str]:
    """Return a task's methods: first the references for comparison, then the chosen methods."""
    chosen = [n for name in args.methods for n in (CODECS if name == "codecs" else (name,))]
    if task in SGD_TASKS:
        chosen = [name for name in chosen if name not in ADAMS]
    return [PLAIN, *([ORDERED] if set(LOSSLESS) & set(chosen) else []), *dict.fromkeys(chosen)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=STEPS, help="trainings (all)")
    parser.add_argument(
        "--methods", nargs="+", metavar="NAME", help=f"presets, specs, optimizers ({', '.join(METHODS)})"
    )
    parser.add_argument("--feedback", choices=("default", "on", "off"), default="default")
    parser.add_argument("--algorithm", default="two_shot", help="as for ddp_hook (two_shot)")
    parser.add_argument("--steps", type=int, help=f"of each training ({STEPS})")
    parser.add_argument("--seeds", type=int, help=f"number of seeds (1; of float32 at least {PLAIN_SEEDS})")
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
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="write the tables over all tasks into a page")
    parser.add_argument("--quick", action="store_true", help="few steps, some tasks and methods: two minutes")
    args = parser.parse_args()
    if args.files:
        if args.tasks or args.methods or args.steps or args.seeds or args.quick:
            parser.error("--from trains nothing: leave out --tasks, --methods, --steps, --seeds and --quick")
        try:
            args.ranks, args.runs = load(args.files)
        except ValueError as error:
            parser.error(f"--from: {error}")
        return args
    args.tasks = args.tasks or list(QUICK_TASKS if args.quick else STEPS)
    args.methods = args.methods or list(QUICK_METHODS if args.quick else METHODS)
    args.seeds = args.seeds or 1
    try:
        for text in set(args.methods) - {*ADAMS, "codecs"}:
            spec_of(text)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    return args


def train_chosen(args: argparse.Namespace) -> list[Run]:
    """Run the training that the arguments select, and return the runs."""
    importlib.import_module("codec.torch")  # if codec.torch is missing, fail here, before any rank starts
    feedback = {"default": None, "on": True, "off": False}[args.feedback]
    jobs = [
        Job(task, name, seed, steps_of(task, args), feedback, args.algorithm)
        for task in args.tasks
        for seed in range(max(args.seeds, PLAIN_SEEDS))
        for name in (methods_of(task, args) if seed < args.seeds else [PLAIN])
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
    if args.page:
        write_page(args.page, rows, args.ranks)
    same = same_bits(runs)
    for task, is_same in same.items():
        print(f"\n{task}: lossless and {ORDERED} are {'identical' if is_same else 'DIFFERENT'}")
    if not all(same.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
