"""Train a small network on four sites that exchange changes through a folder; one is killed, and comes back.

    python examples/rounds.py

Each site is a process, which stands for a machine in another place, and the folder for an object store, such as
s3://bucket/run. No site waits for the one that is killed for longer than the grace time. The process that replaces it
adopts the parameters of the run.
"""

import argparse
import hashlib
import multiprocessing
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import codec.torch

SITES = ("paris", "tokyo", "lima", "oslo")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["codec.torch", "torch._dynamo"])  # processes then start at once


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random points and their classes, 8 rings around the origin."""
    x = torch.randn(64, 32, generator=generator)
    return x, (x.norm(dim=1) * 2 - 7).clamp(0, 7).long()


def nesterov(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the outer optimizer of DiLoCo."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def train(store: str, site: str, merges: int, every: int) -> None:
    """Train one site until the run has merged a number of rounds; print the loss and a digest of the parameters."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rounds = codec.torch.Rounds(model, optimizer, store, site, every=every, quorum=(2, 2.0), outer=nesterov)
    print(f"{site} starts after round {rounds.merged}", flush=True)
    generator = torch.Generator().manual_seed(SITES.index(site))
    while rounds.merged < merges:
        x, y = batch(generator)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.01)  # in place of the work of a large model
        rounds.step()
    with rounds.averaged():
        x, y = batch(generator)
        loss = cross_entropy(model(x), y)
        data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    digest = hashlib.sha256(data).hexdigest()[:8]
    print(f"{site}: {rounds.stats()}; loss {loss.item():.2f}, parameters {digest}", flush=True)


def main() -> None:
    """Start the sites, kill one of them, and start it again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--merges", type=int, default=40, help="number of rounds")
    parser.add_argument("--every", type=int, default=50, help="number of steps of a round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:

        def start(site: str) -> BaseProcess:
            process = _context.Process(target=train, args=(store, site, args.merges, args.every))
            process.start()
            return process

        processes = [start(site) for site in SITES]
        while len(list(Path(store).glob("manifest-*"))) < args.merges / 4 or not [*Path(store).glob("[ce]*-oslo")]:
            time.sleep(0.1)
        processes[-1].kill()
        print("oslo was killed", flush=True)
        processes[-1] = start(SITES[-1])
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
