"""Compare the losses of Rounds, with a slow and a killed site, with those of LocalSteps on four undisturbed ranks.

    python bench/training/rounds.py                        # five models: four minutes on two cores
    python bench/training/rounds.py --tasks lstm --json FILE

The models and data are those of bench/training/convergence.py. All methods synchronize every 10 steps in 4 bits.

    float32     DistributedDataParallel, uncompressed
    LocalSteps  four ranks, each of which takes --steps steps
    Rounds      four sites, of which site 0 takes three times as long for a step, and site 2 is killed after half of the
                steps and started again. The training ends when site 1 has taken --steps steps

A step of a site lasts --pause seconds longer than its computation. *Merged* is the number of steps whose changes were
merged, as a share of those of four undisturbed sites.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))
from local_steps import add_method
from runs import PLAIN, Job, train_all
from summary import table
from vocabularies import TASKS

SITES, SLOW, KILLED, EVERY = 4, 0, 2, 10
MODELS = ("text-adamw", "gpt-tied", "lstm", "recommendation", "encoder-decoder")
context = multiprocessing.get_context("forkserver")


def train_site(task_name: str, steps: int, site: int, pause: float, folder: Path) -> None:
    """Train one site; site 1 then writes the merged parameters. All other sites go on until they are killed."""
    import codec.torch

    torch.set_num_threads(1)
    task = TASKS[task_name](0, steps, site, SITES)
    rounds = codec.torch.Rounds(task.model, task.optimizer, folder / "run", f"site{site}", every=EVERY)
    while site != 1 or rounds.steps < steps:
        task.optimizer.zero_grad()
        task.loss(task.model, task.batch()).backward()
        task.optimizer.step()
        if rounds.steps < steps:
            task.schedule.step()
        time.sleep(pause * (3 if site == SLOW else 1))
        rounds.step()
        if site == 1 and rounds.steps == steps // 2:
            (folder / "half").touch()
        (folder / f"merged{site}-{rounds.merged}").write_text(str(rounds.stats().merged_steps))
    with rounds.averaged():
        torch.save(task.model.state_dict(), folder / "model.part")
    (folder / "model.part").replace(folder / "model.pt")


def train_sites(task_name: str, steps: int, pause: float) -> tuple[float, float]:
    """Train four sites by Rounds; return the held-out loss, and the share of merged steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def start(site: int) -> Any:
            process = context.Process(target=train_site, args=(task_name, steps, site, pause, folder), daemon=True)
            process.start()
            return process

        sites = [start(site) for site in range(SITES)]
        while not (folder / "half").exists() and sites[1].is_alive():
            time.sleep(0.05)
        sites[KILLED].kill()
        merged = _merged(folder, KILLED)  # by the process that is lost
        for path in folder.glob(f"merged{KILLED}-*"):
            path.unlink()
        sites[KILLED] = start(KILLED)
        sites[1].join()
        for process in sites:
            process.kill()
            process.join()
        merged += sum(_merged(folder, site) for site in range(SITES))
        state = torch.load(folder / "model.pt")
    found = torch.zeros(3, dtype=torch.float64)
    for part in range(SITES):
        task = TASKS[task_name](0, steps, part, SITES)
        task.model.load_state_dict(state)
        found += task.evaluate()
    return float(found[0] / found[2]), merged / (SITES * steps)


def _merged(folder: Path, site: int) -> int:
    """Return the number of steps of a site's process that were merged."""
    return max((int(path.read_text() or 0) for path in folder.glob(f"merged{site}-*")), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=MODELS, metavar="TASK", help="trainings (five)")
    parser.add_argument("--steps", type=int, default=150, help="of each training (150)")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds that a step takes in addition (0.1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table")
    args = parser.parse_args()
    jobs = [Job(task, method, 0, args.steps) for task in args.tasks for method in (PLAIN, "local")]
    losses = {(run.task, run.codec): run.loss for run in train_all(jobs, SITES, add_method)}
    rows: list[dict[str, Any]] = []
    for task in args.tasks:
        loss, merged = train_sites(task, args.steps, args.pause)
        plain, local = losses[task, PLAIN], losses[task, "local"]
        rows.append({"task": task, "float32": plain, "local": local, "rounds": loss, "merged": merged})
    lines = [[r["task"], *(f"{r[x]:.4f}" for x in ("float32", "local", "rounds")), f"{r['merged']:.0%}"] for r in rows]
    print(table(["task", "float32", "LocalSteps", "Rounds", "merged"], lines))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
