"""Measure the steps that sites merge while one of them is slow, or is killed: Rounds, and LocalSteps with restarts.

    python bench/network/members.py

Each site is a process that trains the network of examples/diloco.py. After each step it sleeps, in place of a GPU's
work. A slow site sleeps longer. Every few seconds, one of the other sites is killed. With Rounds, its process starts
again. With LocalSteps, all ranks do, as under torchrun, and load what each of them has saved after a synchronization.

Goodput is the number of steps per second whose changes were merged, relative to that of LocalSteps without any
disturbance. The loss is that of the last merged parameters. A new process starts after the seconds of --restart, which
stand for the start of a job; processes are forked from one that has imported torch.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

Config = dict[str, Any]
SITES = 4
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch._dynamo", "codec.torch"])


def batch(generator: Any) -> Any:
    """Return random points and their classes, 8 rings around the origin."""
    import torch

    x = torch.randn(64, 32, generator=generator)
    return x, (x.norm(dim=1) * 2 - 7).clamp(0, 7).long()


def network() -> Any:
    """Return the network of examples/diloco.py."""
    import torch
    from torch.nn import GELU, Linear

    torch.manual_seed(0)
    return torch.nn.Sequential(Linear(32, 256), GELU(), Linear(256, 256), GELU(), Linear(256, 8))


def write(path: Path, state: Any) -> None:
    """Replace a file atomically."""
    import torch

    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def work(config: Config) -> None:
    """Train one site until the parent kills this process; record each merge in a file."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # errors of ranks whose peers were killed
    folder, site = Path(config["folder"]), config["site"]
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = begin_rounds if config["method"] == "Rounds" else begin_local
    step, merged, save = start(config, folder, site, model, optimizer)
    generator = torch.Generator().manual_seed(time.monotonic_ns() % (1 << 40) + site)
    pause = config["pause"] * (config["slow"] if site == 0 else 1)
    before = merged()
    (folder / f"ready{site}").touch()
    while True:
        x, y = batch(generator)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(pause)
        step()
        if (now := merged()) != before:
            with open(folder / f"merged{site}", "a") as file:
                file.write(json.dumps([time.time(), now[0], now[1] - before[1]]) + "\n")
            save(now[0])
            before = now


def begin_rounds(config: Config, folder: Path, site: int, model: Any, optimizer: Any) -> Any:
    """Return functions that end a step, that count merges and merged steps, and that save the model."""
    import codec.torch

    rounds = codec.torch.Rounds(model, optimizer, folder / "run", f"site{site}", every=config["every"])

    def save(number: int) -> None:
        write(folder / f"model{site}", model.state_dict())

    return rounds.step, lambda: (rounds.merged, rounds.stats().merged_steps), save


def begin_local(config: Config, folder: Path, site: int, model: Any, optimizer: Any) -> Any:
    """As :func:`begin_rounds`, for LocalSteps; continue from the synchronization that the parent has chosen."""
    import torch
    import torch.distributed as dist

    import codec.torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/group{config['start']}", rank=site, world_size=SITES)
    local = codec.torch.LocalSteps(model, optimizer, every=config["every"])
    if (number := config["resume"]) > 0:
        state = torch.load(folder / f"state{site}-{number}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        local.load_state_dict(state["local"])

    def save(number: int) -> None:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "local": local.state_dict()}
        write(folder / f"state{site}-{number}", states)
        write(folder / f"model{site}", model.state_dict())
        (folder / f"state{site}-{number - 2}").unlink(missing_ok=True)

    def merged() -> tuple[int, int]:
        number = local.stats().synchronizations
        return number, number * config["every"]

    return local.step, merged, save


class Run:
    """Processes of all sites for one method and disturbance."""

    def __init__(self, config: Config) -> None:
        self.config, self.folder = config, Path(config["folder"])
        self.processes: dict[int, Any] = {}
        self.starts = 0

    def start(self, sites: list[int]) -> None:
        """Start the processes of some sites."""
        self.starts += 1
        saved = [
            {int(path.name.rpartition("-")[2]) for path in self.folder.glob(f"state{site}-*[0-9]")}
            for site in range(SITES)
        ]
        resume = max(set.intersection(*saved), default=0)
        for site in sites:
            given = self.config | {"site": site, "start": self.starts, "resume": resume}
            self.processes[site] = context.Process(target=work, args=(given,), daemon=True)
            self.processes[site].start()

    def kill(self, sites: list[int]) -> None:
        """Kill the processes of some sites."""
        for site in sites:
            self.processes[site].kill()
            self.processes[site].join()

    def measure(self) -> tuple[float, float, list[str]]:
        """Return merged steps per second, the loss of the merged parameters, and what was unexpected."""
        self.start(list(range(SITES)))
        while not all((self.folder / f"ready{site}").exists() for site in range(SITES)):
            if not all(process.is_alive() for process in self.processes.values()):
                raise RuntimeError("a site has ended")
            time.sleep(0.05)
        victims = list[int]()
        begin, victim, back, every = time.time(), 0, 0.0, self.config["kill_every"]
        kills = [begin + every * (n + 0.5) for n in range(10**4)] if every else []
        while (now := time.time()) < begin + self.config["seconds"]:
            if kills and now > kills[0]:
                kills.pop(0)
                victim = victim % (SITES - 1) + 1
                victims = [victim] if self.config["method"] == "Rounds" else list(range(SITES))
                self.kill(victims)
                back = now + self.config["restart"]
            if back and now > back:
                self.start([site for site, p in self.processes.items() if not p.is_alive()])
                back = 0.0
            time.sleep(0.05)
        awaited = set(victims) if back else set[int]()
        ended = [
            f"site {site} has ended" for site, p in self.processes.items() if not p.is_alive() and site not in awaited
        ]
        self.kill(list(self.processes))
        return self.rate(), self.loss(), ended

    def rate(self) -> float:
        """Return the merged steps per second, the sum over the sites, each between its first and last merge.

        Steps that a restart repeats count once.
        """
        found = 0.0
        for site in range(SITES):
            lines = [json.loads(line) for line in (self.folder / f"merged{site}").read_text().splitlines()]
            steps = {number: count for _, number, count in lines[1:]}
            found += sum(steps.values()) / (lines[-1][0] - lines[0][0])
        return found

    def loss(self) -> float:
        """Return the mean loss of the sites' last merged parameters on new data."""
        import torch
        from torch.nn.functional import cross_entropy

        losses, model = list[float](), network()
        for path in self.folder.glob("model[0-9]"):
            model.load_state_dict(torch.load(path))
            generator = torch.Generator().manual_seed(123456)
            with torch.no_grad():
                losses += [float(cross_entropy(model(x), y)) for x, y in (batch(generator) for _ in range(20))]
        return statistics.mean(losses)


def main() -> None:
    """Print a table: for each disturbance and method, goodput and loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=75, help="duration of each run")
    parser.add_argument("--every", type=int, default=12, help="steps between two merges")
    parser.add_argument("--pause", type=float, default=250, help="milliseconds for which a step sleeps")
    parser.add_argument("--slow", type=float, default=3, help="factor of the pauses of the slow site")
    parser.add_argument("--kill-every", type=float, default=25, help="seconds between two kills")
    parser.add_argument("--restart", type=float, default=3, help="seconds until a killed process starts again")
    args = parser.parse_args()
    disturbances = {
        "none": (1.0, 0.0),
        f"a site {args.slow:g} x slower": (args.slow, 0.0),
        f"a kill every {args.kill_every:g} s": (1.0, args.kill_every),
        "both": (args.slow, args.kill_every),
    }
    print("| disturbance | method | merged steps/s | goodput | loss |\n|---|---|--:|--:|--:|")
    base = 0.0
    for disturbance, (slow, kill_every) in disturbances.items():
        for method in ("LocalSteps", "Rounds"):
            with tempfile.TemporaryDirectory() as folder:
                config = {"folder": folder, "method": method, "every": args.every, "pause": args.pause / 1e3}
                config |= {"slow": slow, "kill_every": kill_every, "seconds": args.seconds}
                config["restart"] = args.restart
                rate, loss, notes = Run(config).measure()
            base = base or rate
            print(f"| {disturbance} | {method} | {rate:.0f} | {rate / base:.0%} | {loss:.3f} |", *notes, flush=True)


if __name__ == "__main__":
    main()
