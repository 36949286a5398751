"""Measure the memory that weight synchronization needs besides the weights themselves.

    python bench/training/weight_memory.py --values 2e9
    python bench/training/weight_memory.py --values 1e9 --workers 8

A sender encodes an update between two versions of bfloat16 weights, in which one tensor has a quarter of all values. A
receiver applies the update, and copies changed tensors into the served weights, by ``load=`` and by ``into=``. All
weights are in memory-mapped files, whose pages can be reclaimed and are not counted. For each step, the script prints
the peak increase of anonymous memory (RssAnon of /proc/self/status). Each side runs in its own process.

With --workers, that many receivers apply a snapshot and an update at the same time, as the workers of one machine do,
each in its own process: with weights in memory, each in a folder of its own, and in one folder that they share. The
script prints the proportional set size of all workers together (Pss of /proc/PID/smaps_rollup), in which a page that n
processes map counts 1/n in each: after the snapshot, and the highest during the update; and of the update the CPU time
of all workers and the elapsed time. Tensors are passed to ``load=``, which drops them.
"""

import argparse
import multiprocessing
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import codec

PART = 1 << 24  # number of values per write


def anonymous() -> int:
    """Return the anonymous memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon")


def measured(name: str, call: Callable[[], Any]) -> Any:
    """Call a function, and print its time and the peak of anonymous memory."""
    before = peak = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    begin = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - begin
    done.set()
    thread.join()
    print(f"{name:28} {(peak - before) / 1e6:8.0f} MB  {seconds:6.1f} s", flush=True)
    return result


def shapes(values: int) -> dict[str, int]:
    """Return the number of values by tensor: an embedding with a quarter of all values, and 24 equal tensors."""
    rest = 3 * values // (4 * 24)
    return {"embedding": values // 4} | {f"layer.{i}": rest for i in range(24)}


def mapped(path: Path, values: int, mode: str) -> dict[str, Any]:
    """Map a file of weights into memory, and return its tensors by name."""
    memory = np.memmap(path, np.uint16, mode, shape=(values,))
    tensors, at = {}, 0
    for name, n in shapes(values).items():
        tensors[name] = np.asarray(memory[at : at + n]).view(ml_dtypes.bfloat16)
        at += n
    return tensors


def proportional(pids: list[int]) -> int:
    """Return the proportional set size of processes together, in bytes."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) << 10
    return total


def work(pipe: Any, folder: Path, how: dict[str, Any]) -> None:
    """Apply the update that the parent names, and answer with the CPU time, until the parent closes the pipe."""
    receiver = codec.WeightReceiver(**how)
    with suppress(EOFError):
        while name := pipe.recv():
            before = time.process_time()
            receiver.apply(codec.Update.open(folder / name), lambda tensors: deque(tensors, maxlen=0))
            pipe.send(time.process_time() - before)


def measure_workers(name: str, folder: Path, ways: list[dict[str, Any]]) -> None:
    """Print memory and time of workers that each make a receiver with the arguments in `ways`."""
    context = multiprocessing.get_context("spawn")
    pipes, workers = list[Any](), list[Any]()
    for how in ways:
        mine, other = context.Pipe()
        workers.append(context.Process(target=work, args=(other, folder, how)))
        workers[-1].start()
        other.close()
        pipes.append(mine)
    pids = [worker.pid for worker in workers]

    def apply(name: str) -> tuple[float, float, int]:
        begin, peak = time.perf_counter(), 0
        for pipe in pipes:
            pipe.send(name)
        while not all(pipe.poll(0.05) for pipe in pipes):
            peak = max(peak, proportional(pids))
        return sum(pipe.recv() for pipe in pipes), time.perf_counter() - begin, peak

    apply("snapshot")
    after = proportional(pids)
    cpu, elapsed, peak = apply("update")
    print(f"{name:28} {after / 1e6:8.0f} MB {peak / 1e6:8.0f} MB {cpu:8.1f} s {elapsed:8.1f} s", flush=True)
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.close()
        worker.join()
        if worker.exitcode:
            raise SystemExit(worker.exitcode)


def compare_workers(folder: Path, number: int) -> None:
    """Print memory and time of workers with private and with shared weights."""
    print(f"{number} workers                    snapshot   update, peak        CPU    elapsed")
    ranks = range(number)
    measure_workers("in memory", folder, [{} for _ in ranks])
    for name, ways in (
        ("folder=", [{"folder": folder / f"worker-{k}"} for k in ranks]),
        ("folder=, shared=True", [{"folder": folder / "worker-0", "shared": True} for _ in ranks]),
    ):
        measure_workers(name, folder, ways)
        for k in ranks:
            shutil.rmtree(folder / f"worker-{k}", ignore_errors=True)


def write(old: Path, new: Path, values: int) -> None:
    """Write two versions of the weights, in which about 1% of values differ."""
    rng = np.random.default_rng(0)
    one = (rng.standard_normal(PART, np.float32) / 50).astype(ml_dtypes.bfloat16).view(np.uint16)
    two = np.where(rng.random(PART, np.float32) < 0.01, one ^ 1, one)
    for path, part in ((old, one), (new, two)):
        with path.open("wb") as f:
            for at in range(0, values, PART):
                f.write(part[: min(PART, values - at)])


def send(folder: Path, values: int) -> None:
    old, new = (mapped(folder / name, values, "r") for name in ("old", "new"))
    sender = measured("WeightSender(folder=)", lambda: codec.WeightSender(iter(old.items()), folder=folder / "base"))
    measured("snapshot(file=)", lambda: sender.snapshot(file=folder / "snapshot"))
    update = measured("diff(file=)", lambda: sender.diff(iter(new.items()), file=folder / "update"))
    measured("commit()", sender.commit)
    print(f"update of {100 * update.nbytes / (2 * values):.2f}% of the weights")


def receive(folder: Path, values: int, into: bool) -> None:
    served = mapped(folder / "old", values, "r+")

    def load(tensors: Any) -> None:
        for name, x in tensors:
            served[name][:] = x

    how: dict[str, Any] = {"into": served} if into else {"load": load}
    receiver = codec.WeightReceiver(folder=folder / "receiver")
    for name in ("snapshot", "update"):
        update = codec.Update.open(folder / name)
        measured(f"apply({name}, {next(iter(how))}=)", lambda u=update: receiver.apply(u, **how))
    new = mapped(folder / "new", values, "r")
    assert all(np.array_equal(x.view(np.uint16), new[name].view(np.uint16)) for name, x in served.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=float, default=2e9)
    parser.add_argument("--folder", help="where files of 9 times the weights fit; default: a temporary one")
    parser.add_argument("--workers", type=int, help="number of receivers; default: measure sender and one receiver")
    args = parser.parse_args()
    values = int(args.values)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        write(folder / "old", folder / "new", values)
        print(f"{values / 1e9:.3g} billion values, {values / 5e8:.3g} GB; the largest tensor has {values / 2e9:.3g} GB")
        context = multiprocessing.get_context("spawn")
        for target, *more in ((send,), *(() if args.workers else ((receive, True), (receive, False)))):
            process = context.Process(target=target, args=(folder, values, *more))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(process.exitcode)
            for path in (folder / "receiver").glob("*"):
                path.unlink()
        if args.workers:
            (folder / "old").unlink()
            (folder / "new").unlink()
            shutil.rmtree(folder / "base")
            compare_workers(folder, args.workers)


if __name__ == "__main__":
    main()
