"""Train a small network with DiLoCo, whose outer steps send compressed changes of parameters.

    torchrun --nproc-per-node 4 examples/diloco.py

Each process takes some AdamW steps on its own data (inner steps). Then all processes average the changes of their
parameters [1]_. This average is the only communication: codec.torch.LocalSteps sends it in 4 bits per value, with error
feedback. A further run uses the outer optimizer of the paper, SGD with Nesterov momentum, which needs many outer steps.
Another run sends only the largest 1 in 16 changes [2]_; error feedback sends the rest later, with a decay.

.. [1] A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
.. [2] A. Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import codec
import codec.torch


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random points and their classes, 8 rings around the origin."""
    x = torch.randn(256, 32, generator=generator)
    return x, (x.norm(dim=1) * 2 - 7).clamp(0, 7).long()


def nesterov(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the outer optimizer of the paper, SGD with Nesterov momentum."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


RUNS = {
    "float32": {"spec": codec.Lossless()},
    "Quantize(4)": {},
    "Quantize(4), Nesterov": {"outer": nesterov},
    "TopK(1/16)": {"spec": codec.torch.Feedback(codec.TopK(1 / 16), decay=0.95)},
}


def train(name: str, outer_steps: int, inner_steps: int) -> tuple[float, float]:
    """Train; return the mean loss of the last inner steps, and the megabytes that this rank has sent."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with codec.options(algorithm="raw" if name == "float32" else None):  # "raw": uncompressed
        local = codec.torch.LocalSteps(model, optimizer, every=inner_steps, **RUNS[name])
    generator = torch.Generator().manual_seed(dist.get_rank())
    begin, loss = time.perf_counter(), torch.zeros(1)
    for step in range(outer_steps):
        loss.zero_()
        for _ in range(inner_steps):
            x, y = batch(generator)
            optimizer.zero_grad()
            each = cross_entropy(model(x), y)
            each.backward()
            optimizer.step()
            local.step()
            loss += each.detach() / inner_steps
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - begin
            print(f"{name}: outer step {step + 1}/{outer_steps}, loss {loss.item():.3f}, {seconds:.1f} s", flush=True)
    local.finish()
    return loss.item(), local.stats().sent_nbytes / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outer-steps", type=int, default=10)
    parser.add_argument("--inner-steps", type=int, default=50)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    results = {name: train(name, args.outer_steps, args.inner_steps) for name in RUNS}
    if dist.get_rank() == 0:
        for name, (loss, megabytes) in results.items():
            print(f"{name:22} loss {loss:.3f}, each rank sent {megabytes:.2f} MB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
