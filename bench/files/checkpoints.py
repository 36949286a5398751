"""Compare checkpoints of changes with full ones and with moonclip: bytes, time in the training loop, time to load.

    python bench/files/checkpoints.py --width 512

Trains the transformer of `bench/support/models.py` by AdamW, and saves model and optimizer every so many steps, each
way into a folder of its own: `full` and `changes` are `checkpoint_writer(full_every=1)` and `full_every=100`, by
`async_save`; moonclip runs with its defaults, if it is installed (pip install moonclip). The first checkpoint is full
in all ways, and the rows have the mean of the others. `loop` is the time that a call of save takes in the training
loop, `CPU` the CPU time of this thread in it, both medians; `load` is the time to load the last checkpoint into host
memory. The shares of weights, m and v are stored bytes of all bytes.
"""

import argparse
import functools
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import codec.torch
from codec.checkpoints.chain import Checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import models

PARTS = {"weights": "model.", "m": ".exp_avg", "v": ".exp_avg_sq"}


class Ours:
    """Checkpoints of codec, by ``dcp.async_save``."""

    def __init__(self, folder: Path, full_every: int, group: Any) -> None:
        self._folder, self._group = folder, group
        self._writer = codec.torch.checkpoint_writer(folder, full_every=full_every)
        self._steps: list[int] = []

    def save(self, step: int, state: dict[str, Any]) -> Any:
        self._steps.append(step)
        path = self._folder / str(step)
        return dcp.async_save(state, checkpoint_id=path, storage_writer=self._writer, process_group=self._group)

    def load(self, state: dict[str, Any]) -> None:
        reader = codec.torch.checkpoint_reader(self._folder / str(self._steps[-1]))
        dcp.load(state, storage_reader=reader, process_group=self._group)

    def sizes(self) -> tuple[float, dict[str, float]]:
        """Return the mean bytes of a checkpoint after the first, and the stored share of each part."""
        found = [Checkpoint(self._folder / str(step)) for step in self._steps[1:]]
        total = sum(size(each.folder) for each in found) / len(found)
        shares = {}
        for part in PARTS:
            items = [i for each in found for i in each.items.values() if part_of(i.name) == part]
            shares[part] = sum(i.length for i in items) / sum(i.nbytes for i in items)
        return total, shares


class Moonclip:
    """Checkpoints of moonclip. Model and optimizer are passed as objects, and its threads save in the background."""

    def __init__(self, folder: Path, task: models.Task) -> None:
        from moonclip import CheckpointManager  # pyright: ignore[reportMissingImports]

        self._folder, self._task = folder, task
        self._manager: Any = CheckpointManager(str(folder))
        self._first = 0

    def save(self, step: int, state: dict[str, Any]) -> Any:
        self._manager.save(step=step, model=self._task.model, optimizer=self._task.optimizer)
        return self

    def result(self) -> None:
        self._manager.flush()
        self._first = self._first or size(self._folder)

    def load(self, state: dict[str, Any]) -> None:
        self._manager.load_latest()

    def sizes(self, saves: int) -> float:
        return (size(self._folder) - self._first) / (saves - 1)


def part_of(name: str) -> str:
    ends = [part for part, mark in PARTS.items() if name.startswith(mark) or name.endswith(mark)]
    return ends[0] if ends else ""


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def train(task: models.Task, steps: int) -> None:
    for _ in range(steps):
        task.loss(task.model, task.batch()).backward()
        task.optimizer.step()
        task.schedule.step()
        task.optimizer.zero_grad()


def state_of(task: models.Task, dtype: torch.dtype) -> dict[str, Any]:
    """Return the state to save, with the weights cast to a dtype, as mixed-precision training keeps them."""
    weights = {name: x.detach().to(dtype) for name, x in task.model.state_dict().items()}
    return {"model": weights, "optimizer": task.optimizer.state_dict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=192, help="width of the transformer")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--warm", type=int, default=100, help="steps before the first checkpoint")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--saves", type=int, default=4, help="number of checkpoints")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate of AdamW")
    parser.add_argument("--then", type=float, help="learning rate after the warm-up, such as 1e-5 for a fine-tuning")
    parser.add_argument("--bfloat16", action="store_true", help="save bfloat16 weights (not by moonclip)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group(backend="gloo")

    optimizer = functools.partial(models._adamw, lr=args.lr)
    steps = args.warm + args.every * args.saves
    task = models._text_task(optimizer, 0, steps * 4, batch=args.batch, width=args.width)
    dtype = torch.bfloat16 if args.bfloat16 else torch.float32
    folder = Path(tempfile.mkdtemp())
    ways: dict[str, Any] = {
        "full": Ours(folder / "full", 1, group),
        "changes": Ours(folder / "changes", 100, group),
    }
    if importlib.util.find_spec("moonclip") and not args.bfloat16:
        ways["moonclip"] = Moonclip(folder / "moonclip", task)
    loop: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    train(task, args.warm)
    if args.then is not None:
        task.schedule = torch.optim.lr_scheduler.LambdaLR(task.optimizer, lambda _: args.then / args.lr)
    for k in range(args.saves):
        for name, way in ways.items():
            state = state_of(task, dtype)
            begin, cpu = time.perf_counter(), time.thread_time()
            saved = way.save(k, state)
            loop[name].append((time.perf_counter() - begin, time.thread_time() - cpu))
            saved.result()
            del saved
        train(task, args.every)

    nbytes = sum(x.nbytes for x in task.model.state_dict().values()) * (2 + dtype.itemsize / 4)
    lr = args.then or args.lr
    print(f"{nbytes / 1e6:.0f} MB of {str(dtype)[6:]} weights, m and v; {args.every} steps apart, lr {lr}")
    print(
        f"{'way':9} {'MB':>7} {'of raw':>7} {'weights':>8} {'m':>6} {'v':>6} {'loop ms':>8} {'CPU ms':>7} {'load s':>7}"
    )
    for name, way in ways.items():
        total, shares = (way.sizes(args.saves), {}) if name == "moonclip" else way.sizes()
        state = state_of(task, dtype)
        begin = time.perf_counter()
        way.load(state)
        load = time.perf_counter() - begin
        columns = " ".join(
            f"{100 * shares[part]:{n}.1f}%" if shares else " " * (n + 1)
            for part, n in zip(PARTS, (7, 5, 5), strict=True)
        )
        ms, cpu = (1e3 * statistics.median(column) for column in zip(*loop[name][1:], strict=True))
        print(f"{name:9} {total / 1e6:7.2f} {100 * total / nbytes:6.1f}% {columns} {ms:8.1f} {cpu:7.1f} {load:7.2f}")
    shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
