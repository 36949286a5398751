"""Reduce a matrix in FP8 over all ranks, as torchft's quantized all-reduce does: step by step, and in one call.

    torchrun --nproc-per-node 4 examples/fp8_all_reduce.py
    torchrun --nproc-per-node 4 examples/fp8_all_reduce.py --op sum --dtype bfloat16 --rows 4096
    torchrun --nproc-per-node 4 examples/fp8_all_reduce.py --signed

Each row of the matrix has a scale of its own, so that its largest magnitude becomes 448, the largest number of the
format e4m3fn. Ranks exchange quantized rows, add them up in float32, and exchange the quantized sums [1]_. The program
checks that both forms give the same bits on all ranks. It prints the error in the measure of torchft's tests, and the
bytes that a rank sends. Values are uniform from 0 to 1, as in torchft's tests, or from -1 to 1 with ``--signed``: sums
near zero then dominate the mean of abs(error / value).

.. [1] torchft, github.com/meta-pytorch/torchft, pull requests 194 and 201, torchft/collectives.py.
"""

import argparse
import os

import torch
import torch.distributed as dist

import codec
import codec.torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def all_reduce_in_steps(matrix: torch.Tensor, spec: codec.Float8, op: str) -> None:
    """Reduce a matrix in place, with a call for each step of torchft's algorithm.

    Parameters
    ----------
    matrix : torch.Tensor
        Values of this rank; rows and columns are equal on all ranks.
    spec : codec.Float8
        Codec, with a row of the matrix as a group.
    op : {"mean", "sum"}
        Operation.
    """
    size = dist.get_world_size()
    slices = matrix.tensor_split(size)  # whole rows; rank r sums up slice r

    # 1. Quantize: scale = 448 / max |row|, code = round(row * scale). A frame carries scales and codes.
    frames = [codec.encode(rows, spec) for rows in slices]

    # 2. All-to-all: frame r goes to rank r.
    terms = codec.torch.all_to_all_bytes(frames)

    # 3. Dequantize the terms, add them up in float32 in the order of ranks, and quantize the result.
    total = codec.reduce(terms, like=matrix, op=op)
    frame = codec.encode(total.to(matrix.dtype), spec)

    # 4. All-gather: each rank receives the quantized sums of all slices.
    sums = codec.torch.all_to_all_bytes([frame] * size)

    # 5. Dequantize. The rank that encoded a sum decodes its own frame, too, so that all ranks have the same bits.
    for rows, frame in zip(slices, sums, strict=True):
        codec.decode(frame, out=rows)


def all_reduce_in_one_call(matrix: torch.Tensor, spec: codec.Float8, op: str) -> None:
    """Reduce a matrix in place. Encoding, sending and decoding overlap; an error on a rank changes no tensor."""
    codec.torch.all_reduce(matrix, spec, op=op, options=codec.options(algorithm="two_shot"))


def mean_relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the mean of abs(error / value), the measure of torchft's tests, whose limit is 0.04."""
    return float(((exact - result) / (exact + 1e-7)).abs().mean())


def equal_on_all_ranks(tensor: torch.Tensor) -> bool:
    """Return True if the tensor is bit-identical on all ranks."""
    mine = tensor.contiguous().view(torch.uint8)
    first = mine.clone()
    dist.broadcast(first, 0)
    differs = torch.tensor([not torch.equal(mine, first)], dtype=torch.int32)
    dist.all_reduce(differs)
    return not differs.item()


def compare(rows: int, columns: int, dtype: torch.dtype, op: str, signed: bool = False) -> tuple[bool, float, float]:
    """Reduce random matrices in both ways.

    Parameters
    ----------
    rows, columns : int
        Shape of the matrix. A row is a group.
    dtype : torch.dtype
        Dtype of the matrix.
    op : {"mean", "sum"}
        Operation.
    signed : bool, optional
        True: values are uniform from -1 to 1. Default: from 0 to 1.

    Returns
    -------
    equal : bool
        True if both ways gave the same bits on all ranks.
    error : float
        Mean relative error against the result in float64.
    ratio : float
        Bytes that this rank has sent in the one call, divided by those of an uncompressed all-reduce.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    matrix = torch.rand(rows, columns, generator=generator)
    matrix = (2 * matrix - 1 if signed else matrix).to(dtype)
    exact = matrix.double()
    dist.all_reduce(exact)
    if op == "mean":
        exact /= size

    spec = codec.Float8(group_size=columns)
    in_steps, in_one_call = matrix.clone(), matrix.clone()
    all_reduce_in_steps(in_steps, spec, op)
    before = codec.torch.group_stats()
    all_reduce_in_one_call(in_one_call, spec, op)
    sent = (codec.torch.group_stats() - before).sent_nbytes
    uncompressed = 2 * (size - 1) / size * matrix.numel() * matrix.element_size()
    equal = torch.equal(in_steps, in_one_call) and equal_on_all_ranks(in_one_call)
    return equal, mean_relative_error(in_one_call.double(), exact), sent / max(1, uncompressed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=768, help="values of a row, at most 65,536; longer rows are cut")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--op", choices=("mean", "sum"), default="mean")
    parser.add_argument("--signed", action="store_true", help="values from -1 to 1 instead of 0 to 1")
    args = parser.parse_args()
    if args.rows < 1 or not 1 <= args.columns <= 1 << 16:
        parser.error("--rows must be 1 or more, --columns 1 to 65,536")
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    equal, error, ratio = compare(args.rows, args.columns, DTYPES[args.dtype], args.op, args.signed)
    if dist.get_rank() == 0:
        print(f"{args.op} of {args.rows} x {args.columns} {args.dtype} values over {dist.get_world_size()} ranks")
        print(f"five steps and one call: {'the same bits on all ranks' if equal else 'DIFFERENT bits'}")
        print(f"mean relative error: {error:.4f} (torchft's tests of positive values allow 0.04)")
        print(f"bytes that a rank sends: {ratio:.1%} of an uncompressed all-reduce")
    dist.destroy_process_group()
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
