"""Train a small network by 1-bit SGD: one bit per gradient value, with error feedback.

    torchrun --nproc-per-node 4 examples/one_bit_sgd.py
    torchrun --nproc-per-node 4 examples/one_bit_sgd.py --lr 0.1

Each process adds the residuals of earlier steps to its gradients, and sends the signs of the sums and two scales per
row: the means of the positive and of the negative values [1]_. The program trains the same network in float32 for
comparison. Then it checks that error feedback only delays errors: the sum of the gradients that the optimizer has seen
is the sum of all gradients minus the last residuals. The hook's default policy sends biases and the first step
lossless. Longer trainings and larger learning rates widen the gap between the losses: with --steps 900 or --lr 0.1,
1-bit SGD ends far above the loss of float32.

.. [1] F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
   Speech DNNs", Interspeech 2014.
"""

import argparse
import os
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch

SPEC = codec.Sign("two_mean", group_size="row")


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random points and their classes, 8 rings around the origin."""
    x = torch.randn(256, 32, generator=generator)
    return x, (x.norm(dim=1) * 2 - 7).clamp(0, 7).long()


class Sums:
    """Sums over all steps, in float64 and by parameter: this rank's gradients, and the means passed to the optimizer.

    Parameters
    ----------
    model : DistributedDataParallel
        The model.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._parameters = dict(model.module.named_parameters())
        self.computed = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self._parameters.items()}
        self.seen = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self._parameters.items()}
        for name, p in self._parameters.items():
            p.register_hook(partial(self._add_computed, name))  # runs before DistributedDataParallel averages

    def _add_computed(self, name: str, gradient: torch.Tensor) -> None:
        self.computed[name] += gradient

    def add_seen(self) -> None:
        """Add the averaged gradients, which the optimizer uses in its step. Call this after backward."""
        for name, p in self._parameters.items():
            self.seen[name] += p.grad


def residuals(hook: codec.torch.Hook, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return the part of the mean gradient that error feedback has not sent yet. All ranks must call this.

    Parameters
    ----------
    hook : codec.torch.Hook
        Hook of the model.
    sizes : mapping of str to int
        Number of values of each parameter.

    Returns
    -------
    dict of str to torch.Tensor
        Mean over ranks of the residuals of gradients, plus the residuals of the encoded means, each of which is stored
        on one rank.
    """
    held = {name: torch.zeros(n, dtype=torch.float64) for name, n in sizes.items()}
    states = hook.state_dict(gather=True)["ranks"]
    workers, server = codec.ErrorFeedback(SPEC, role="worker"), codec.ErrorFeedback(SPEC, role="server")
    for feedback, weight in ((workers, 1 / len(states)), (server, 1)):
        for state in states:
            feedback.load_state_dict(state[feedback.role])
            for name, n in sizes.items():
                held[name] += weight * torch.from_numpy(feedback.begin([(name, n)])).double()
    return held


def imbalance(hook: codec.torch.Hook, sums: Sums) -> tuple[float, float]:
    """Compare sums of gradients over all steps. All ranks must call this.

    Parameters
    ----------
    hook : codec.torch.Hook
        Hook of the model.
    sums : Sums
        Sums over all steps of the hook.

    Returns
    -------
    difference : float
        Norm of (computed gradients - gradients seen by the optimizer - residuals), divided by the norm of the computed
        gradients.
    held : float
        Norm of the residuals, divided by the norm of the gradients.
    """
    held = residuals(hook, {name: x.numel() for name, x in sums.computed.items()})
    total = difference = residual = 0.0
    for name, x in sums.computed.items():
        mean = x.flatten().clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        total += float(mean.square().sum())
        residual += float(held[name].square().sum())
        difference += float((mean - sums.seen[name].flatten() - held[name]).square().sum())
    return (difference / total) ** 0.5, (residual / total) ** 0.5


def train(one_bit: bool, steps: int, lr: float) -> tuple[list[float], float, tuple[float, float]]:
    """Train with SGD and momentum.

    Parameters
    ----------
    one_bit : bool
        True: 1-bit SGD. False: uncompressed gradients.
    steps : int
        Number of steps.
    lr : float
        Learning rate.

    Returns
    -------
    losses : list of float
        Loss of each step, mean over ranks.
    bits : float
        Bits that this rank has sent for each value, in both phases of the all-reduces.
    balance : tuple of float
        Results of :func:`imbalance`; zeros without compression.
    """
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    sums, hook = Sums(model), None
    if one_bit:  # "auto" would send gradients uncompressed, which is faster within one machine
        options = codec.options(algorithm="two_shot")
        hook = codec.torch.ddp_hook(SPEC, feedback=True, options=options).register(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = torch.zeros(steps)
    for step in range(steps):
        x, y = batch(generator)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        sums.add_seen()
        optimizer.step()
        losses[step] = loss.detach()
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    if hook is None:
        return losses.tolist(), 32.0, (0.0, 0.0)
    size, n = dist.get_world_size(), sum(p.numel() for p in net.parameters())
    uncompressed = 2 * (size - 1) / size * n * steps  # number of values that a rank sends without compression
    bits = 8 * hook.stats().sent_nbytes / max(1, uncompressed)
    return losses.tolist(), bits, imbalance(hook, sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=0.03)
    args = parser.parse_args()
    if args.steps < 1 or args.lr <= 0:
        parser.error("--steps must be 1 or more, and --lr above 0")
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    difference = held = 0.0
    for name, one_bit in (("float32", False), ("1-bit SGD", True)):
        losses, bits, (difference, held) = train(one_bit, args.steps, args.lr)
        if dist.get_rank() == 0:
            last = losses[-10:]
            print(f"{name:9} loss {losses[0]:.3f} -> {sum(last) / len(last):.3f}, {bits:.2f} bits a value", flush=True)
    if dist.get_rank() == 0:
        print(f"residuals after the last step: {held:.1%} of the sum of all gradients")
        print(f"gradients - gradients seen - residuals: {difference:.1e} of that sum")
    dist.destroy_process_group()
    if difference > 1e-5:
        raise SystemExit("gradients are lost")


if __name__ == "__main__":
    main()
