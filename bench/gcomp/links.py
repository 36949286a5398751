"""Run training and all-reduces of one bucket on ranks in network namespaces (bench/network/netns.py)."""

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import allreduce
import methods
import netns
import torch
import torch.distributed as dist
from runs import Job, Run, train
from trainings import Timed

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "network" / "gloo_allreduce.py"
PROGRAM = ROOT / "build" / "native" / "gloo_allreduce"
SECONDS = 0.5  # minimum total time in which an all-reduce is repeated; the fastest repetition counts
CAPTURES = ("cnn_float32.npz", "cnn_adamw.npz")  # gradients of a CNN without optimizer state, and with AdamW's state
CODECS = ("Lossless", "Truncate near, plane", "Truncate near, coded", "Truncate near, by bit")
Tick = Callable[[int], None]


def why_not() -> str:
    """Return the reason why network namespaces cannot be created here; "" if they can."""
    try:
        netns.require()
    except netns.NetworkError as e:
        return str(e)
    return ""


# Training runs on a link


def train_on(link: str, turn: int, jobs: Sequence[Job]) -> None:
    """Run jobs on this rank, with its link limited to a rate; print one JSON line per job."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    netns.shape(link)
    address = f"tcp://{os.environ['MASTER_ADDR']}:{netns.PORT + 1 + turn}"
    dist.init_process_group("gloo", address, timedelta(seconds=300), world, rank)
    rate = netns.tcp_rate(rank, world)
    for job in jobs:
        run = train(job, lambda _: None, methods.add_hook)
        print(json.dumps({"link": link, "rate": rate, "run": asdict(run) if rank == 0 else None}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def trainings(ranks: int, links: Sequence[str], jobs: Sequence[Job], tick: Tick) -> list[Timed]:
    """Run all jobs on all links with this number of ranks; call tick(1) after each job."""

    def on_line(rank: int, line: str) -> None:
        if rank == 0 and line.startswith("{"):
            tick(1)

    plan = {"kind": "train", "links": links, "jobs": [asdict(j) for j in jobs]}
    said = run_ranks(ranks, plan, on_line)
    return [Timed(Run(**event["run"]), ranks, event["link"], event["rate"]) for event in said[0]]


def run_ranks(ranks: int, plan: dict[str, Any], on_line: Callable[[int, str], None]) -> list[list[Any]]:
    environment = {"OMP_NUM_THREADS": "1", "CODEC_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file, netns.Network(ranks) as network:
        json.dump(plan, file)
        file.flush()
        return network.run([*command, file.name], environment=environment, timeout=3600, on_line=on_line, bind=True)


# All-reduces of one bucket on a link


def hooks(plain: allreduce.Gradients) -> list[allreduce.Contender]:
    """Return the baselines of bench/gcomp that bench/network/allreduce.py lacks."""
    found: list[allreduce.Contender] = []
    parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in plain.shapes]
    for name in (methods.TOP_K, methods.RANDOM_K, methods.ZLIB, methods.ZSTD):
        hook, counted = methods.baseline(name), [0.0, 0]

        def call(t: torch.Tensor, _: int, hook: Any = hook, counted: list[Any] = counted) -> torch.Tensor:
            before = hook.sent_nbytes
            bucket: Any = Bucket(t, plain.shapes, parameters)
            mean = hook.reduce(None, bucket).value()
            counted[0] = hook.sent_nbytes - before
            getattr(hook, "residuals", {}).clear()
            return mean

        def ratios(counted: list[Any] = counted) -> tuple[float, float]:
            world = dist.get_world_size()
            half = counted[0] / (2 * (world - 1) / world * plain.values.nbytes)
            return half, half

        found.append(allreduce.Contender(name, plain, call, None, after=ratios))
    return found


class Bucket(allreduce.FlatBucket):
    """Bucket for hooks that also lists its parameters, which the baseline Sparse needs."""

    def __init__(self, flat: Any, shapes: allreduce.Shapes, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(flat, shapes)
        self.of = list(parameters)

    def parameters(self) -> list[torch.nn.Parameter]:
        return self.of


@contextlib.contextmanager
def data() -> Iterator[Path]:
    """Yield a folder that contains only the float32 captures; bfloat16 captures would favour lossless methods."""
    with tempfile.TemporaryDirectory() as folder:
        for name in CAPTURES:
            (Path(folder) / name).symlink_to(allreduce.DATA / name)
        yield Path(folder)


def all_reduces(ranks: int, links: Sequence[str], mib: float, repeat: int, tick: Tick) -> list[dict[str, Any]]:
    """Measure codec.torch and all baselines by bench/network/allreduce.py; return a table for each link."""
    plan = {"kind": "all-reduce", "links": links, "mib": mib, "repeat": repeat, "seconds": SECONDS, "pause": 0}
    plan |= {"algorithm": "two_shot", "in_place": False, "codecs": CODECS, "threads": 1}

    def on_line(rank: int, line: str) -> None:
        if rank == 0 and line.startswith('{"kind": "result"'):
            tick(1)

    with data() as folder:
        tables, wrong = allreduce.of_links(run_ranks(ranks, plan | {"data": str(folder)}, on_line))
    if wrong:
        raise SystemExit("\n".join(wrong))
    return tables


def all_reduce_rows(links: Sequence[str]) -> int:
    """Return the number of times that :func:`all_reduces` calls its tick."""
    return len(links) * (2 + len(allreduce.HOOKS) + 4 + len(CODECS))


def cpp_all_reduces(ranks: int, links: Sequence[str], mib: float, repeat: int) -> list[dict[str, Any]]:
    """Run the C++ program of bench/network/gloo_allreduce.py; return a table for each link."""
    with data() as folder:
        out = folder / "tables.json"
        sizes = ["--mib", str(mib), "--repeat", str(repeat), "--seconds", str(SECONDS), "--ranks", str(ranks)]
        command = [sys.executable, str(SCRIPT), *sizes, "--links", *links, "--codecs", *CODECS]
        command += ["--algorithms", "two_shot", "ring", "--program", str(PROGRAM)]
        command += ["--data", str(folder), "--json", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}:\n{done.stderr or done.stdout}")
        return json.loads(out.read_text())["tables"]


def missing_program() -> str:
    """Return the reason why the C++ program cannot run; "" if it can."""
    return "" if PROGRAM.exists() else f"{PROGRAM.relative_to(ROOT)} is missing: make gloo-programs"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one rank of a plan. bench/gcomp/gcomp.py starts this script.")
    parser.add_argument("plan", type=Path)
    plan = json.loads(parser.parse_args().plan.read_text())
    torch.set_num_threads(1)
    importlib.util.find_spec("codec.torch")
    if plan["kind"] == "all-reduce":
        allreduce.worker(plan, hooks)
        return
    for turn, link in enumerate(plan["links"]):
        train_on(link, turn, [Job(**job) for job in plan["jobs"]])


if __name__ == "__main__":
    main()
