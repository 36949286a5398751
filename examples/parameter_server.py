"""Train a model with parameter servers: workers push ternary gradients, and pull their exact mean.

    python examples/parameter_server.py --processes 4
    torchrun --nproc-per-node 5 examples/parameter_server.py --servers 2 --codec lossless

The first ranks are servers, all others are workers. Each worker computes gradients on its part of each batch, pushes
them, pulls the mean over all workers, and updates its own copy of the model. The model predicts the next byte in the
source of Python's standard library from the preceding 16 bytes.
"""

import argparse
import os
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn import functional as F

import codec
import codec.torch

CODECS = {
    "ternary": codec.Ternary("base3", clip=2.5),  # TernGrad: about 1.6 bits per value
    "float8": codec.Float8(group_size=128),
    "lossless": codec.Lossless(),
}
CONTEXT = 16  # number of bytes before the predicted byte
BATCH = 64  # predictions per worker and step


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the source of the standard library as bytes: the training part, and the last 1/20, which is held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    whole = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    end = len(whole) * 19 // 20
    return whole[:end], whole[end:]


def windows(data: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the window of bytes at each of `starts`, and the byte after each window."""
    rows = data[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, -1]


def make_model(seed: int) -> nn.Module:
    """Return the same model on all workers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 256)
    )


def work(client: codec.torch.ParameterClient, spec: codec.Spec, steps: int, seed: int, worker: int) -> dict[str, float]:
    """Train as one worker; return held-out loss and accuracy, and bits sent and received for each gradient value."""
    model = make_model(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    parameters = dict(model.named_parameters())
    client.init(parameters)
    before = client.stats()
    data, held_out = text()
    generator = torch.Generator().manual_seed(1000 * seed + worker)
    for step in range(steps):
        x, y = windows(data, torch.randint(len(data) - CONTEXT, (BATCH,), generator=generator))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        means = client.average(step, gradients, spec)
        for name, mean in means.items():
            parameters[name].grad = mean
        optimizer.step()
    after = client.stats()
    values = steps * sum(p.numel() for p in parameters.values())
    with torch.no_grad():
        x, y = windows(held_out, torch.arange(0, len(held_out) - CONTEXT, 23))
        out = model(x)
    return {
        "loss": float(F.cross_entropy(out, y)),
        "accuracy": 100 * float((out.argmax(1) == y).float().mean()),
        "up": 8 * (after.sent_nbytes - before.sent_nbytes) / values,
        "down": 8 * (after.received_nbytes - before.received_nbytes) / values,
    }


def run(name: str, servers: int, steps: int, seed: int) -> dict[str, float] | None:
    """Run this rank as a server or a worker; return the results on workers, and None on servers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank < servers:
        codec.torch.ParameterServer(servers=range(servers), workers=range(servers, size)).serve()
        return None
    with codec.torch.ParameterClient(servers=range(servers)) as client:
        return work(client, CODECS[name], steps, seed, rank - servers)


def rank_main(args: argparse.Namespace) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    for name in [args.codec] if args.codec else CODECS:
        found = run(name, args.servers, args.steps, args.seed)
        if dist.get_rank() == args.servers and found is not None:
            print(
                f"{name}: held-out loss {found['loss']:.3f}, accuracy {found['accuracy']:.1f}% in {args.steps} steps; "
                f"bits per value: {found['up']:.2f} up, {found['down']:.2f} down",
                flush=True,
            )
        dist.barrier()
    dist.destroy_process_group()


def spawned(rank: int, args: argparse.Namespace, meet: str) -> None:
    dist.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=args.processes)
    rank_main(args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, help="start this many ranks here; default: torchrun has started them")
    parser.add_argument("--servers", type=int, default=1, help="number of servers (1)")
    parser.add_argument("--codec", choices=CODECS, help="default: all of these, one after the other")
    parser.add_argument("--steps", type=int, default=200, help="number of steps (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the batches (0)")
    args = parser.parse_args()
    if args.processes is None and "RANK" not in os.environ:
        parser.error("start it by torchrun, or pass --processes")
    if args.servers < 1 or args.servers >= (args.processes or int(os.environ.get("WORLD_SIZE", "0"))):
        parser.error("--servers must leave at least one process to work")
    if args.processes is None:
        dist.init_process_group("gloo")
        rank_main(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(spawned, (args, f"{folder}/meet"), nprocs=args.processes)


if __name__ == "__main__":
    main()
