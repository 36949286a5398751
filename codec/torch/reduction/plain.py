"""All-reduce of uncompressed values on GPUs by NCCL, for links so fast that encoding would take longer than sending."""

import torch

from codec.torch.reduction.device import DeviceReduction
from codec.torch.reduction.host import FLOATS, Values
from codec.torch.transport.collective import Part


async def all_reduce(part: Part, r: DeviceReduction) -> Values:
    """Sum values by NCCL's all-reduce, in its order and in the tensor's dtype; a mean divides before, as DDP does.

    Residuals are added to the values, and keep what rounding to the tensor's dtype loses.
    """
    values = _terms(part, r)
    if r.rejects_nonfinite:  # an error on this rank, as encoding raises it
        r.refuse_nonfinite(values)
        r.settle(part.device)
    await part.gather([0])  # a rank that has failed sends an abort: NCCL's messages could not be ended
    part.counters.round_trips += 1
    with part.device.phase():
        part.device.all_reduce(values, part.counters)
    if r.rejects_nonfinite:
        r.refuse_overflow(values)
    if r.out is None:
        return values
    return r.out.copy_(values)


def _terms(part: Part, r: DeviceReduction) -> torch.Tensor:
    """Return this rank's share of the result, in memory of its own."""
    share = part.size if r.op == "mean" else 1
    if r.residual is None and r.sum_residual is None:
        return r.x / share
    exact = r.as_float32(r.x) if r.residual is None else r.as_float32(r.x) + r.residual
    exact = exact / share
    if r.sum_residual is not None:
        mine = r.slices(part.size)[part.rank]
        sums = r.sum_residual(mine[0].begin, mine[-1].end)
        exact[mine[0].begin : mine[-1].end] += sums
        sums.zero_()
    values = exact.to(FLOATS[r.dtype])
    if r.residual is not None:
        r.residual.copy_(((exact - values.float()) * share).nan_to_num_(0.0, 0.0, 0.0))
    return values
