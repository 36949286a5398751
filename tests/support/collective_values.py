"""Input tensors for tests of collectives, and the exact results that the collectives must return."""

import torch

LARGE = 2_200_000  # float32 values; results of large tensors are stored only when all ranks have succeeded


def rank_values(rank, shape, dtype=torch.float32):
    """Return the input tensor of a rank: normally distributed values, with a different scale for each column."""
    g = torch.Generator().manual_seed(7 + rank)
    return (torch.randn(shape, generator=g) * 2.0 ** torch.randint(-9, 0, shape[-1:], generator=g)).to(dtype)


def sum_in_order(tensors, op="sum"):
    """Return the sum of tensors, added in float32 in rank order and rounded once to the dtype of the tensors."""
    total = tensors[0].float()
    for t in tensors[1:]:
        total = torch.maximum(total, t.float()) if op == "max" else total + t.float()
    return ((total / len(tensors)) if op == "mean" else total).to(tensors[0].dtype)


def tensor_bytes(t):
    """Return the bytes of a tensor."""
    return t.detach().contiguous().view(torch.uint8).numpy().tobytes() if t.dim() else t.numpy().tobytes()
