"""Train a small network with DiLoCo, whose outer steps send compressed parameter differences.

    torchrun --nproc-per-node 4 examples/diloco.py

Each process takes some AdamW steps on its own data (inner steps). Then all processes average the differences of their
parameters, and use the mean as the gradient of an outer step with Nesterov momentum [1]_. That average is the only
communication. It sends 4 bits a value, with error feedback: `residual` holds the losses of frames.

.. [1] A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import codec
import codec.torch


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points and the class of each: in which of 8 rings around the origin it lies."""
    x = torch.randn(256, 32, generator=generator)
    return x, (x.norm(dim=1) * 2 - 7).clamp(0, 7).long()


class OuterStep:
    """The outer step of DiLoCo.

    Parameters
    ----------
    model : torch.nn.Module
        The model that the inner steps train.
    spec : codec.Spec or None
        Codec of the parameter differences. None sends them uncompressed.
    """

    def __init__(self, model: torch.nn.Module, spec: codec.Spec | None) -> None:
        self.model, self.calls = model, 0
        self.parameters = torch.nn.Parameter(parameters_to_vector(model.parameters()).detach().clone())
        self.optimizer = torch.optim.SGD([self.parameters], lr=0.7, momentum=0.9, nesterov=True)
        self.feedback = None if spec is None else codec.torch.Feedback(spec)  # save its state_dict() on each rank

    def step(self) -> None:
        """Average the ranks' parameter differences, and begin the next inner steps from the outer parameters."""
        difference = self.parameters.data - parameters_to_vector(self.model.parameters()).detach()
        if self.feedback is None:
            codec.torch.all_reduce(difference, op="mean", options=codec.options(algorithm="raw"))
        else:
            codec.torch.all_reduce(
                difference,
                op="mean",
                feedback=self.feedback,
                stream=self.calls,
                options=codec.options(algorithm="two_shot"),
            )
        self.calls += 1
        self.parameters.grad = difference
        self.optimizer.step()
        vector_to_parameters(self.parameters.data.clone(), self.model.parameters())


def train(name: str, spec: codec.Spec | None, outer_steps: int, inner_steps: int) -> tuple[float, float]:
    """Return the mean loss of the last inner steps, and the megabytes that this rank has sent."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)
    )
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = OuterStep(model, spec)
    generator = torch.Generator().manual_seed(dist.get_rank())
    sent, begin, loss = codec.torch.group_stats().sent_nbytes, time.perf_counter(), torch.zeros(1)
    for step in range(outer_steps):
        loss.zero_()
        for _ in range(inner_steps):
            x, y = batch(generator)
            inner.zero_grad()
            each = cross_entropy(model(x), y)
            each.backward()
            inner.step()
            loss += each.detach() / inner_steps
        outer.step()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - begin
            print(f"{name}: outer step {step + 1}/{outer_steps}, loss {loss.item():.3f}, {seconds:.1f} s", flush=True)
    return loss.item(), (codec.torch.group_stats().sent_nbytes - sent) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outer-steps", type=int, default=10)
    parser.add_argument("--inner-steps", type=int, default=50)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    runs = {"plain": None, "Quantize(4)": codec.Quantize(4)}
    results = {name: train(name, spec, args.outer_steps, args.inner_steps) for name, spec in runs.items()}
    if dist.get_rank() == 0:
        for name, (loss, megabytes) in results.items():
            print(f"{name:12} loss {loss:.3f}, each rank sent {megabytes:.2f} MB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
