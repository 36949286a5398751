"""Peak memory and time of a transformer's training step if saved activations are compressed.

    python bench/training/saved_tensors.py

Each row is measured in a new process, in which malloc returns freed memory to the system. Memory is the process's peak
minus its memory before the first step.
"""

import contextlib
import multiprocessing
import os
import resource
import time
from pathlib import Path

import torch

import codec
import codec.torch

WIDTH, LAYERS, BATCH, LENGTH = 256, 12, 16, 256
SPECS = (None, "lossless", "balanced", "small")


def model():
    """Return layers of a transformer without dropout."""
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
    return torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def resident():
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def step(net, x, spec, autocast):
    """Run one forward and backward pass; return the gradients."""
    with contextlib.nullcontext() if spec is None else codec.torch.saved_tensors(spec):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = net(x)
        loss = (y.float() - x).square().mean()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def measure(spec, autocast):
    """Run two steps; return the peak memory in bytes, the seconds of the second step, and the gradients."""
    torch.manual_seed(0)
    net, x = model(), torch.randn(BATCH, LENGTH, WIDTH)
    torch.mm(x[0], x[0].T)  # before the measurement, make torch load its library for matrix products
    codec.encode(x[0].clone())
    before = resident()
    gradients = step(net, x, spec, autocast)
    net.zero_grad()
    begin = time.perf_counter()
    step(net, x, spec, autocast)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return peak - before, seconds, gradients.numpy()


def main():
    """Measure all specs, each in a new process, and print the table."""
    print("| forward pass | spec | peak MB | s a step | error of gradients |\n|---|---|---|---|---|")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # inherited by the processes that measure
    for autocast in (False, True):
        exact = None
        for spec in SPECS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                peak, seconds, gradients = pool.apply(measure, (spec, autocast))
            gradients = torch.from_numpy(gradients)
            exact = gradients if exact is None else exact
            error = float((gradients - exact).norm() / exact.norm())
            kind = "bfloat16 autocast" if autocast else "float32"
            print(f"| {kind} | {spec or 'without'} | {peak / 1e6:.0f} | {seconds:.2f} | {error:.3g} |", flush=True)


if __name__ == "__main__":
    main()
