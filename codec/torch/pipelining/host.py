"""Copy tensors of any device to contiguous host memory, and back."""

from collections.abc import Callable
from typing import Any

import torch


def on_host(t: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor in host memory with the values of a tensor; it may be the tensor itself."""
    return t.detach().to("cpu").contiguous()


def write(output: torch.Tensor, decode: Callable[[Any], Any]) -> None:
    """Call decode(out) with a contiguous tensor in host memory, whose values become those of `output`.

    If decode() raises an error and does not change `out`, `output` is unchanged, too.
    """
    if output.device.type == "cpu" and output.is_contiguous():
        decode(output.detach())
    else:
        out = torch.empty(output.shape, dtype=output.dtype, device="cpu")
        decode(out)
        output.detach().copy_(out)
