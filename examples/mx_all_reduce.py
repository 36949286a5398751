"""All-reduce a real gradient in MXFP8, and compare its errors with those of other specs.

    torchrun --nproc-per-node 4 examples/mx_all_reduce.py
    torchrun --nproc-per-node 4 examples/mx_all_reduce.py bench/data/cnn_float32.npz

Of N ranks, rank r has every N-th value of the file's gradient, from value r on. For each spec, the program prints the
bits per value of a frame, and the errors of three means over the ranks, relative to the exact mean:

all_gather   values are rounded once
two_shot     the sum is rounded once more
feedback     mean of 16 results of two_shot with error feedback, which adds each call's rounding error to the next call
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import codec
import codec.torch

GRADIENT = Path(__file__).parents[1] / "bench/data/transformer_autocast.npz"
SPECS = {
    'Float8("mxfp8_e4m3")': codec.Float8("mxfp8_e4m3"),
    'Float8("mxfp8_e4m3", scale="rceil")': codec.Float8("mxfp8_e4m3", scale="rceil"),
    'Float8("mxfp8_e5m2")': codec.Float8("mxfp8_e5m2"),
    "Float8(group_size=128)": codec.Float8(group_size=128),
    "Float8(group_size=32)": codec.Float8(group_size=32),
    'Float4("mxfp4")': codec.Float4("mxfp4"),
}
STEPS = 16


def errors_of(gradient: torch.Tensor, spec: codec.Spec) -> tuple[float, float, float]:
    """Return the errors of the mean over all ranks, relative to the exact mean.

    Parameters
    ----------
    gradient : torch.Tensor
        Values of this rank, float32; not changed.
    spec : codec.Spec
        Codec.

    Returns
    -------
    all_gather, two_shot, feedback : float
        Error with each algorithm, and of the mean of `STEPS` calls with error feedback.
    """
    exact = gradient.double()
    dist.all_reduce(exact)
    exact /= dist.get_world_size()

    all_gather, two_shot = codec.options(algorithm="all_gather"), codec.options(algorithm="two_shot")

    def error_of(mean: torch.Tensor) -> float:
        return float((mean - exact).norm() / exact.norm())

    once, twice = gradient.clone(), gradient.clone()
    codec.torch.all_reduce(once, spec, op="mean", options=all_gather)
    codec.torch.all_reduce(twice, spec, op="mean", options=two_shot)

    feedback = codec.torch.Feedback(spec)  # stores the residuals of error feedback between steps
    total = torch.zeros_like(exact)
    for _ in range(STEPS):
        mean = gradient.clone()
        codec.torch.all_reduce(mean, op="mean", feedback=feedback, options=two_shot)
        total += mean
    return error_of(once), error_of(twice), error_of(total / STEPS)


def table_of(path: Path) -> list[str]:
    """Return the lines of the table, which are equal on all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    values = np.load(path)["grad"]
    gradient = torch.from_numpy(values[rank : len(values) // size * size : size].copy())
    lines = [f"{'':38} bits  all_gather  two_shot  feedback"]
    for text, spec in SPECS.items():
        bits = 8 * codec.bound(len(gradient), "float32", spec, exact=True) / len(gradient)
        once, twice, steps = errors_of(gradient, spec)
        lines.append(f"{text:38} {bits:4.2f}  {once:10.4f}  {twice:8.4f}  {steps:8.4f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gradient", nargs="?", type=Path, default=GRADIENT, help=".npz file with an array `grad`")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    lines = table_of(args.gradient)
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
