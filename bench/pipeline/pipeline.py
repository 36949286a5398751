"""AQ-SGD in pipelines (arXiv 2206.01299): loss over steps and over time, throughput, gradient compression, bytes.

    sudo python bench/pipeline/pipeline.py --json pipeline.json --plots docs   # all: about 25 minutes on two cores
    sudo python bench/pipeline/pipeline.py --quick                             # under three minutes
    sudo python bench/pipeline/pipeline.py --rate 100 --system aq --bits fw4bw8
    python bench/pipeline/pipeline.py --parts losses coding                    # without root

part        contents                                                                 the paper's figure
losses      training loss of each system by step                                     2
times       time of a step by link, in the first epoch and in later epochs           table of throughput
outcomes    losses and times combined: time to FP32's loss, with 0.5% tolerance      3
check       complete training runs on a link, to check `outcomes`
mesh        a pipeline with two replicas, and compressed gradients of parameters     4
coding      CPU time of a message, and its share of the time on a 100 Mbit/s wire
store       bytes of m, and time of a step with m in files

Systems: FP32 in torch's stages over Gloo ("fp32"), FP32 over the connections of codec.torch.send ("fp32-tcp"), DirectQ
("direct") and AQ-SGD ("aq") by codec.torch.pipelining.CompressedStage, and TAH-Quant ("tah", arXiv 2506.01352),
written from the paper (tah_quant.py). fw4bw8 means 4 bits for activations, 8 for their gradients. TAH-Quant has the
bits of its paper.

Losses come from a simulation in one process with the messages of the real pipeline; they do not depend on links. Steps
are timed with one process per stage, in network namespaces with a limited rate of sending (bench/network/netns.py:
Linux, root, iproute2). `outcomes` assumes the measured step time of the first epoch for all steps of that epoch, and
that of later epochs for all later steps. Losses and bytes are the same on any machine. Times are not: use an idle
machine.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import tables
import torch
from parts import CODING_RATE, SAFE, Bench
from stages import FIRST_STEPS, netns
from summary import without_nonfinite
from systems import BITS_OF, FP32, FP32_TCP, SYSTEMS, Setting, message_nbytes, parse_bits, settings_of
from tasks import CLASSIFY, LANGUAGE, TASKS, Sizes

from codec._c.library import isas

PARTS = ("losses", "times", "outcomes", "check", "mesh", "coding", "store")
ON_LINKS = ("times", "check", "mesh", "store")
RATES = ("20mbit", "100mbit", "500mbit", "1gbit", "10gbit")
QUICK = Sizes(samples=384, epochs=3, pretraining=40)


def rate_of(text: str) -> str:
    """Return a link's rate from the command line, where a number such as "100" means Mbit/s."""
    rate = f"{text}mbit" if text.replace(".", "", 1).isdigit() else text
    netns.bits(rate)
    return rate


def check_messages(settings: Iterable[Setting], sizes: Sizes) -> str:
    """Return the reason why messages are too small to be timed on a link; "" if they are large enough."""
    each = sizes.batch // sizes.micro_batches
    least = SAFE * netns.bucket_nbytes(0)
    for s in settings:
        n = message_nbytes(s, sizes.values, each)
        if n < least:
            return (
                f"messages of {s.label} have {n:,} bytes; a link passes {netns.bucket_nbytes(0):,} bytes at "
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
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="folder that keeps pretrained parameters")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw pipeline-*.png (needs matplotlib)")
    args = parser.parse_args(given)
    fill(args)
    check(parser, args)
    return args


def fill(args: argparse.Namespace) -> None:
    """Set the defaults of arguments that were not given."""
    quick = args.quick
    base = QUICK if quick else Sizes()
    names = ("batch", "samples", "epochs", "pretraining")
    chosen = {k: getattr(args, k) for k in names if getattr(args, k) is not None}
    args.sizes = replace(base, seed=args.seed, **chosen)
    args.bits = args.bits or (["fw4bw8", "fw2bw4"] if quick else list(BITS_OF))
    args.rates = args.rates or (["20mbit", "100mbit"] if quick else list(RATES))
    args.stages = args.stages or ([2] if quick else [2, 4])
    args.steps = (2 if quick else 5) if args.steps is None else args.steps
    systems = args.systems or [s for s in SYSTEMS if not quick or s != FP32_TCP]
    args.systems = [s for s in SYSTEMS if s in systems or s == FP32]
    tasks = args.tasks or ([LANGUAGE] if quick else list(TASKS))
    # Messages of the classifier have the same sizes as those of the language model, so one number of stages suffices.
    args.places = [(task, n) for task in tasks for n in (args.stages if task == LANGUAGE else args.stages[:1])]
    args.train_mesh = not quick


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Reject arguments that would fail later. Without --parts, skip parts that cannot run here."""
    try:
        args.rates = [rate_of(r) for r in args.rates]
    except netns.NetworkError as e:
        parser.error(f"--rate: {e}")
    args.check_rate = CODING_RATE if CODING_RATE in args.rates else args.rates[0]
    args.mesh_rates = [r for r in args.rates if (netns.bits(r) or 1e12) <= 1e9] or args.rates[:1]
    for name, value in (vars(args.sizes) | {"steps": args.steps}).items():
        if name != "seed" and value <= 0:
            parser.error(f"--{name} must be above 0, got {value}")
    sizes = args.sizes
    if sizes.batch % (8 * sizes.micro_batches) or sizes.samples % sizes.batch:
        parser.error(f"--batch must be a multiple of {8 * sizes.micro_batches} and divide --samples")
    if sizes.samples < FIRST_STEPS * sizes.batch:
        parser.error(f"--samples must be at least {FIRST_STEPS} times --batch: {FIRST_STEPS * sizes.batch}")
    try:
        for b in args.bits:
            parse_bits(b)
    except ValueError as e:
        parser.error(f"--bits: {e}")
    lacking = ""
    try:
        netns.require()
    except netns.NetworkError as e:
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
    needed += ["sklearn"] if any(task == CLASSIFY for task, _ in args.places) else []
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        parser.error(f"missing packages: {', '.join(missing)}; install the extra `bench` of this project")


def main() -> None:
    args = parse_arguments()
    netns.end_on_sigterm()
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(Bench(args, args.weights or Path(folder)))
    except (netns.NetworkError, ValueError) as e:
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
        found[part] = without_nonfinite(json.loads(json.dumps(getattr(bench, f"run_{part}")())))
        found["about"][part] = {
            "cores": len(os.sched_getaffinity(0)),
            "isa": isas()[-1],
            "torch": torch.__version__,
            "load": round(os.getloadavg()[0], 1),
            "seconds": round(time.perf_counter() - begin),
        }
        tables.show(found, [part])
        if args.json:  # write after each part, since measurements take long
            args.json.write_text(json.dumps(found))
    if args.plots:
        import drawings

        drawings.draw(found, args.plots)


if __name__ == "__main__":
    main()
