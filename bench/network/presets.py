"""Time of a training step by preset and link, and the loss that each preset reaches.

    sudo python bench/network/presets.py --quick                         # the small model on three links: 3 minutes
    sudo python bench/network/presets.py --plot docs/links.png --json links.json              # all: half an hour

Two ranks are processes in network namespaces (bench/network/netns.py: Linux, root, iproute2, TUN devices). They train a
causal transformer on the bytes of the source of Python's standard library with DistributedDataParallel and AdamW. A
token bucket limits what each rank sends, and packets wait for half of the round-trip time. Each rank has one core.

ms a step   milliseconds between two steps of the optimizer: median of the slowest rank. "compute" is the same step
            without communication (torch's noop_hook)
sent        bytes that the hook sent in a step / those of the uncompressed all-reduce
loss        held-out loss after ``--loss-steps`` steps, which are taken without a limit of the link

Models are ``small``, 0.9 M parameters, and ``large``, 36 M parameters; ``--dtype bfloat16`` makes all parameters and
gradients bfloat16. Presets are those of the library, in ``ddp_hook(preset, optimizer=optimizer)`` with
``algorithm="two_shot"``: the default, "auto", sends uncompressed values where that is faster.
"""

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import netns

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

METHODS = ("compute", "none", "fp16 hook", "lossless", "near", "balanced", "small", "smallest")
MODELS = {"small": (128, 4, 8), "large": (704, 6, 2)}  # width, layers, sequences of 64 bytes on each rank
LINKS = ("20mbit/0", "20mbit/100", "100mbit/0", "100mbit/100", "1gbit/0", "1gbit/100", "10gbit/0")
QUICK = ("20mbit/0", "100mbit/0", "1gbit/0")
WARMUP = 3  # untimed steps: DDP rebuilds its buckets, and hooks send the first gradients lossless
CONTEXT = 64

Row = dict[str, Any]


# what a rank does


class Training:
    """Data-parallel training of a model with one preset, or without a hook."""

    def __init__(self, method: str, model: str, dtype: str) -> None:
        import torch
        from models import Language
        from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
        from torch.nn.parallel import DistributedDataParallel

        import codec.torch

        torch.manual_seed(0)
        width, layers, self.batch = MODELS[model]
        self.net = Language(width, layers, CONTEXT).to(getattr(torch, dtype))
        self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        self.hook = None
        if method == "compute":
            self.model.register_comm_hook(None, debugging_hooks.noop_hook)
        elif method == "fp16 hook":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif method != "none":
            options = codec.options(algorithm="two_shot")
            self.hook = codec.torch.ddp_hook(method, optimizer=self.optimizer, options=options).register(self.model)

    def loss_of(self, windows: Any) -> Any:
        """Return the mean cross-entropy of windows of bytes."""
        from torch.nn import functional as F

        logits = self.model(windows[:, :-1]).flatten(0, -2).float()
        return F.cross_entropy(logits, windows[:, 1:].flatten())

    def step(self, source: Any) -> None:
        """Take a step on random windows of a text."""
        import torch

        at = torch.randint(len(source) - CONTEXT, (self.batch, 1), generator=self.generator)
        self.optimizer.zero_grad()
        self.loss_of(source[at + torch.arange(CONTEXT + 1)].long()).backward()
        self.optimizer.step()

    def sent_nbytes(self) -> int:
        """Return the bytes that the hook has sent; 0 without one."""
        return 0 if self.hook is None else self.hook.stats().sent_nbytes

    def evaluate(self, held_out: Any) -> float:
        """Return the mean loss on held-out windows."""
        import torch

        with torch.no_grad():
            return statistics.mean(float(self.loss_of(some)) for some in held_out.long().split(32))


def largest(*values: float) -> list[float]:
    """Return the maximum over ranks of each value."""
    import torch
    import torch.distributed as dist

    t = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.tolist()


def measured(method: str, plan: Row) -> Row:
    """Train, and return a row of the table."""
    from models import text

    source = text()
    kept, held = source[: len(source) // 10 * 9], source[len(source) // 10 * 9 :]
    training = Training(method, plan["model"], plan["dtype"])
    for _ in range(WARMUP):
        start = time.perf_counter()
        training.step(kept)
    (took,) = largest(time.perf_counter() - start)
    count = max(2, min(plan["steps"], int(plan["seconds"] / took)))
    training.step(kept)  # ranks leave the exchange of times at different moments
    times, sent = [time.perf_counter()], training.sent_nbytes()
    for _ in range(count):
        training.step(kept)
        times.append(time.perf_counter())
    values = sum(p.numel() for p in training.net.parameters())
    raw = next(training.net.parameters()).element_size() * values
    row = {"method": method, "values": values, "steps": count, "share": (training.sent_nbytes() - sent) / count / raw}
    (step,) = largest(statistics.median(b - a for a, b in itertools.pairwise(times)))
    row["step_ms"] = 1e3 * step
    if plan["loss"] and method != "compute":
        for _ in range(plan["loss_steps"] - WARMUP - 1 - count):
            training.step(kept)
        windows = held[: len(held) // 65 * 65].view(-1, 65)
        row["loss"] = training.evaluate(windows[:: max(1, len(windows) // plan["held_out"])])
    return row


def worker(plan: Row) -> None:
    """Measure all methods and links of a model on one rank; rank 0 prints the rows."""
    import logging
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(plan["threads"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rtt = netns.tcp_round_trip(rank)
    dist.init_process_group("gloo", "env://", timedelta(seconds=900), world, rank)
    for method in plan["methods"]:
        row = measured(method, plan) | {"measured_rtt_ms": 1e3 * rtt}
        if rank == 0:
            print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# tables and plot


def link_of(text: str) -> tuple[str, float]:
    """Return rate and round-trip time of a link such as ``100mbit/20``."""
    rate, _, rtt = text.partition("/")
    netns.bits(rate)
    return rate, float(rtt or 0)


def shown(link: str) -> str:
    rate, rtt = link_of(link)
    return netns.shown(rate) + (f", {rtt:g} ms" if rtt else "")


def milliseconds(row: Row, plain: Row) -> str:
    """Return the time of a step, and how many times faster than without a hook it is."""
    faster = f" ({plain['step_ms'] / row['step_ms']:.1f}x)" if row["method"] not in ("compute", "none") else ""
    return f"{row['step_ms']:,.0f}{faster}"


def show(rows: Sequence[Row], loss_steps: int) -> None:
    """Print a table in Markdown for each model: a line a method, a column a link."""
    for model, dtype in dict.fromkeys((row["model"], row["dtype"]) for row in rows):
        some = {(r["method"], r["link"]): r for r in rows if (r["model"], r["dtype"]) == (model, dtype)}
        links = list(dict.fromkeys(link for _, link in some))
        first = next(iter(some.values()))
        print(f"\n{first['values'] / 1e6:.1f} M parameters in {dtype}, {len(links)} links, ms a step\n")
        print("| | bytes | " + " | ".join(map(shown, links)) + f" | loss after {loss_steps} steps |")
        print("| :-- |" + " --: |" * (len(links) + 2))
        for method in dict.fromkeys(method for method, _ in some):
            line = [some[method, link] for link in links]
            share = f"{100 * line[-1]['share']:.1f}%" if line[-1]["share"] else ""
            cells = [milliseconds(row, some["none", row["link"]]) for row in line]
            loss = next((f"{row['loss']:.4f}" for row in line if "loss" in row), "")
            print(f"| {method} | {share} | {' | '.join(cells)} | {loss} |")


def plot(rows: Sequence[Row], path: str) -> None:
    """Draw the time of a step over the rate of the link, for each model and round-trip time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    throttled = [row for row in rows if link_of(row["link"])[0] != "none" and row["method"] != "fp16 hook"]
    links = {(r["model"], r["dtype"], *link_of(r["link"])[::-1]) for r in throttled}
    counts = Counter(cell[:3] for cell in links)
    cells = sorted((cell for cell, rates in counts.items() if rates > 1), reverse=True)  # lines need two rates
    figure, axes = plt.subplots(1, len(cells), figsize=(3 + 4 * len(cells), 4), squeeze=False, layout="constrained")
    for ax, (model, dtype, rtt) in zip(axes[0], cells, strict=True):
        some = [r for r in throttled if (r["model"], r["dtype"], link_of(r["link"])[1]) == (model, dtype, rtt)]
        for method in dict.fromkeys(r["method"] for r in some):
            points = [(netns.bits(link_of(r["link"])[0]), r["step_ms"]) for r in some if r["method"] == method]
            style = {"none": "k-", "compute": "k:"}.get(method, "o-")
            label = {"none": "without codec", "compute": "compute alone"}.get(method, method)
            ax.loglog(*zip(*points, strict=True), style, label=label, markersize=4)
        ax.set_title(f"{some[0]['values'] / 1e6:.1f} M {dtype}, round trip {rtt:g} ms", fontsize=10)
        ax.set_xlabel("link, bit/s")
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("ms a step")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: both")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the parameters")
    parser.add_argument("--links", nargs="+", help="rate/round-trip time in ms, such as 100mbit/20; default: 7 links")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--quick", action="store_true", help="the small model on three links, without losses")
    parser.add_argument("--steps", type=int, default=12, help="most timed steps of a cell (12)")
    parser.add_argument("--seconds", type=float, default=4, help="seconds after which a cell has enough steps (4)")
    parser.add_argument("--loss-steps", type=int, nargs=2, default=(400, 60), metavar=("SMALL", "LARGE"),
                        help="steps of trainings whose loss is measured (400 60); 0 0: none")  # fmt: skip
    parser.add_argument("--plot", metavar="FILE", help="draw a plot (.png; needs matplotlib)")
    parser.add_argument("--json", metavar="FILE", help="write the rows; complete links survive an interruption")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib")
    args.models = args.models or (["small"] if args.quick else list(MODELS))
    args.links = args.links or list(QUICK if args.quick else LINKS)
    args.loss_steps = (0, 0) if args.quick else args.loss_steps
    return args


def main() -> None:
    args = arguments()
    if args.worker:
        worker(json.loads(args.worker))
        return
    from rich.progress import Progress

    netns.end_on_sigterm()
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    environment = {k: str(threads) for k in ("OMP_NUM_THREADS", "CODEC_NUM_THREADS")}
    plan = {"threads": threads, "held_out": 128}
    plan |= {k: getattr(args, k) for k in ("methods", "dtype", "steps", "seconds")}
    loss_steps = dict(zip(MODELS, args.loss_steps, strict=True))
    cells = [(m, link, False) for m in args.models for link in args.links]
    cells += [(m, "none/0", True) for m in args.models if loss_steps[m]]
    rows: list[Row] = []
    try:
        with Progress(transient=True) as bar:
            task = bar.add_task("steps", total=len(cells) * len(args.methods))

            def tick(rank: int, line: str) -> None:
                if rank == 0 and line.startswith("{"):
                    bar.update(task, advance=1)

            for model, link, loss in cells:
                bar.update(task, description=f"{model}, {shown(link)}")
                rate, rtt = link_of(link)
                some = plan | {"model": model, "loss": loss, "loss_steps": loss_steps[model]}
                with netns.Network(2, rate, rtt=rtt) as network:
                    command = [sys.executable, __file__, "--worker", json.dumps(some)]
                    run: Row = {"environment": environment, "timeout": 3600, "on_line": tick, "bind": True}
                    found = network.run(command, **run)[0]
                rows += [{"model": model, "dtype": args.dtype, "link": link, **row} for row in found]
                if args.json:
                    Path(args.json).write_text(json.dumps(rows, indent=1))
    except netns.NetworkError as e:
        raise SystemExit(f"bench/network/presets.py: {e}") from None
    except KeyboardInterrupt:
        sys.exit(130)
    for model in args.models:
        show([row for row in rows if row["model"] == model], loss_steps[model])
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
