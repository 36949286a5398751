"""Step time of an edge between pipeline stages, with its activation store in files and in memory; CPU time of coding.

    python bench/codec/activation_store.py                      # about two minutes; 2 GB in memory and on the disk
    python bench/codec/activation_store.py --folder /mnt/disk --samples 1000 --memory-samples 64

Two processes are the two sides of an edge of codec.ActivationDelta. In a step the sender encodes micro-batches of one
sample, the receiver decodes them, and both commit. The store has m, the last transmitted activations, for every sample,
so all samples are sent as deltas. The link is simulated by a pause of (message bits / rate) seconds. Only the store's
own thread runs during the pause, so a step includes all time that a side waits for its store. A step begins by
prefetching the samples of the next step.

ms        mean time of a step
disk      fraction of the entries' bytes that the sender read from the disk; other bytes were in the page cache
encode    median CPU time of encode and commit for a message, with m in memory; and its fraction of the time that the
          link takes for a message at the first rate
decode    median CPU time of decode and commit for a message; and the same fraction

A store that is larger than the page cache needs a limit of memory for this process, such as that of a cgroup:

    sudo systemd-run --scope -p MemoryMax=1G python bench/codec/activation_store.py --samples 400 --memory-samples 16

Without systemd, create a cgroup by hand. In version 1, create a folder in /sys/fs/cgroup/memory, write the limit in
bytes to its file memory.limit_in_bytes, and the shell's process id to its file cgroup.procs.
"""

import argparse
import json
import math
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import codec

sys.path.insert(0, str(Path(__file__).parents[1] / "network"))
import netns

DTYPES = ("float32", "bfloat16", "8bit")
POOL = 4  # number of distinct arrays of activations, which the samples share
OPTIONS = codec.options(threads=1)


class Plan(NamedTuple):
    """Measurements to make with one pair of processes, a sender and a receiver."""

    dtype: Any
    store: str  # "ram", or a folder with one folder for each side
    samples: int
    shape: tuple[int, ...]
    batch: int  # number of messages per step
    rates: tuple[str, ...]
    steps: int  # number of timed steps at each rate

    def batches(self) -> list[list[int]]:
        """Return the sample ids of each step of an epoch."""
        return [list(range(i, min(i + self.batch, self.samples))) for i in range(0, self.samples, self.batch)]

    def epochs(self) -> list[str]:
        """Return the rate of each epoch. The first one stores all samples."""
        return ["none", *(rate for rate in self.rates for _ in range(-(-self.steps // len(self.batches()))))]

    def edge(self, side: str) -> codec.ActivationDelta:
        store = self.store if self.store == "ram" else Path(self.store) / side
        return codec.ActivationDelta(store=store, dtype=self.dtype)

    def steps_of_all(self) -> Iterator[tuple[int, str, list[int], list[int]]]:
        """Yield, for each step, the epoch, the rate, the step's samples and the next step's samples."""
        batches = self.batches()
        for epoch, rate in enumerate(self.epochs()):
            for i, samples in enumerate(batches):
                yield epoch, rate, samples, batches[(i + 1) % len(batches)]


class Measured(NamedTuple):
    """Measurements of one side of the edge; times are in seconds, by rate."""

    steps: dict[str, list[float]]
    calls: dict[str, list[float]]  # seconds to encode or decode one message, plus the message's part of the commit
    message_nbytes: int
    disk: dict[str, float]  # bytes read from the disk / bytes of all entries used


def send(plan: Plan, link: Connection, results: Connection) -> None:
    """Run the sending side. Send the parent the seconds of each step as a float, and a Measured at the end."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((1, *plan.shape), np.float32) for _ in range(POOL)]
    changes = [0.01 * rng.standard_normal((1, *plan.shape), np.float32) for _ in range(3)]
    now = [np.empty((1, *plan.shape), np.float32) for _ in range(plan.batch)]
    edge, found, nbytes = plan.edge("sender"), Measured({}, {}, 0, {}), 0
    read: dict[str, int] = {}
    for epoch, rate, samples, following in plan.steps_of_all():
        for x, sample in zip(now, samples, strict=False):
            np.add(values[sample % POOL], changes[epoch % 3], out=x)
        speed, busy, before = netns.bits(rate), 0.0, disk_nbytes()
        start = time.perf_counter()
        edge.prefetch(following)
        for x, sample in zip(now, samples, strict=False):
            begin = time.thread_time()
            message = edge.encode(x, [sample], options=OPTIONS)
            busy += time.thread_time() - begin
            nbytes = len(message)
            if speed:
                time.sleep(8 * nbytes / speed)
            link.send_bytes(message)
        link.recv_bytes()
        begin = time.thread_time()
        edge.commit()
        busy += time.thread_time() - begin
        took = time.perf_counter() - start
        if epoch:
            found.steps.setdefault(rate, []).append(took)
            found.calls.setdefault(rate, []).append(busy / len(samples))
            read[rate] = read.get(rate, 0) + disk_nbytes() - before
        results.send(took)
    entry = edge.stats().entries_nbytes / plan.samples
    for rate, steps in found.steps.items():
        found.disk[rate] = read[rate] / (entry * plan.samples * len(steps) / len(plan.batches()))
    if edge.stats().delta_samples != plan.samples * (len(plan.epochs()) - 1):
        raise RuntimeError("samples were sent raw")
    edge.close()
    results.send(found._replace(message_nbytes=nbytes))


def receive(plan: Plan, link: Connection, results: Connection) -> None:
    """Run the receiving side, and send its Measured to the parent at the end."""
    out, edge, found = np.empty((1, *plan.shape), np.float32), plan.edge("receiver"), Measured({}, {}, 0, {})
    for epoch, rate, samples, following in plan.steps_of_all():
        busy = 0.0
        edge.prefetch(following)
        for sample in samples:
            message = link.recv_bytes()
            begin = time.thread_time()
            edge.decode(message, [sample], out=out, options=OPTIONS)
            busy += time.thread_time() - begin
        link.send_bytes(b"")
        begin = time.thread_time()
        edge.commit()
        if epoch:
            found.calls.setdefault(rate, []).append((busy + time.thread_time() - begin) / len(samples))
    edge.close()
    results.send(found)


def disk_nbytes() -> int:
    """Return the bytes that this process has read from disks."""
    return 512 * resource.getrusage(resource.RUSAGE_SELF).ru_inblock


def run(plan: Plan, advance: Callable[[], None]) -> tuple[Measured, Measured]:
    """Run both sides, and return the times of sender and receiver."""
    context = multiprocessing.get_context("spawn")
    left, right = context.Pipe()
    sides: list[tuple[Any, Connection]] = []
    for function, link in ((send, left), (receive, right)):
        results, theirs = context.Pipe()
        sides.append((context.Process(target=function, args=(plan, link, theirs), daemon=True), results))
        sides[-1][0].start()
        theirs.close()
        link.close()
    try:
        while isinstance(found := sides[0][1].recv(), float):
            advance()
        return found, sides[1][1].recv()
    except EOFError:
        raise SystemExit(f"a side of the edge failed: {plan.dtype}, store {plan.store}") from None
    finally:
        for process, results in sides:
            results.close()
            process.join(10)
            process.kill()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row of the table for each combination of a dtype of entries and a rate."""
    from rich.console import Console
    from rich.progress import Progress

    shape, rates = tuple(args.shape), tuple(args.rates)
    rows: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), transient=True) as bar:
        for dtype in args.dtypes:
            found: dict[str, tuple[Measured, Measured]] = {}
            for kind, samples in (("memory", args.memory_samples or args.samples), ("files", args.samples)):
                with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                    store = "ram" if kind == "memory" else folder
                    plan = Plan(dtype, store, samples, shape, args.batch, rates, args.steps)
                    line = bar.add_task(f"{dtype}, {kind}", total=len(plan.epochs()) * len(plan.batches()))
                    found[kind] = run(plan, lambda line=line: bar.advance(line))
            for rate in rates:
                rows.append({"dtype": dtype, "rate": rate, **row(found, rate)})
    return rows


def row(found: dict[str, tuple[Measured, Measured]], rate: str) -> dict[str, float]:
    """Return the figures of the table for one rate, by column."""
    step = {kind: statistics.mean(sides[0].steps[rate]) for kind, sides in found.items()}
    sender, receiver = found["memory"]
    encode, decode = (statistics.median(side.calls[rate]) for side in (sender, receiver))
    wire = 8 * sender.message_nbytes / (netns.bits(rate) or math.inf)
    return {
        "memory_ms": 1e3 * step["memory"],
        "files_ms": 1e3 * step["files"],
        "files_over_memory": step["files"] / step["memory"],
        "disk": found["files"][0].disk[rate],
        "message_nbytes": sender.message_nbytes,
        "encode_ms": 1e3 * encode,
        "decode_ms": 1e3 * decode,
        "encode_share": encode / wire if wire else math.inf,
        "decode_share": decode / wire if wire else math.inf,
    }


def report(rows: list[dict[str, Any]]) -> None:
    print(f"{'entries':10}{'rate':>14}{'memory ms':>12}{'files ms':>12}{'files / memory':>17}{'disk':>8}")
    for r in rows:
        print(
            f"{r['dtype']:10}{netns.shown(r['rate']):>14}{r['memory_ms']:12.1f}{r['files_ms']:12.1f}"
            f"{r['files_over_memory']:17.3f}{r['disk']:8.0%}"
        )
    print(f"\n{'entries':10}{'message':>14}{'encode ms':>12}{'decode ms':>12}{'encode':>10}{'decode':>10}  of the wire")
    for r in {r["dtype"]: r for r in reversed(rows)}.values():
        print(
            f"{r['dtype']:10}{r['message_nbytes']:14,}{r['encode_ms']:12.2f}{r['decode_ms']:12.2f}"
            f"{r['encode_share']:10.1%}{r['decode_share']:10.1%}  at {netns.shown(r['rate'])}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtypes of entries (all)")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "500mbit"], help="rates (100mbit 500mbit)")
    parser.add_argument("--shape", nargs="+", type=int, default=[1024, 1600], help="shape of a sample (1024 1600)")
    parser.add_argument("--samples", type=int, default=128, help="samples of an epoch (128)")
    parser.add_argument("--memory-samples", type=int, help="samples of an epoch with m in memory (as many)")
    parser.add_argument("--batch", type=int, default=4, help="micro-batches of a step (4)")
    parser.add_argument("--steps", type=int, default=32, help="timed steps at each rate, in whole epochs (32)")
    parser.add_argument("--folder", help="folder on the disk to measure (that of temporary files)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = measure(args)
    print(json.dumps(rows, indent=1)) if args.json else report(rows)


if __name__ == "__main__":
    main()
