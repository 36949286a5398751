"""Uncompressed means, added in rank order, of gradients that frames do not support: float64 and sparse ones."""

import logging
from math import prod

import numpy as np
import torch

from codec import CallOptions, FrameError
from codec.specs import Lossless
from codec.torch._compat import from_numpy
from codec.torch.group.exchange import swap
from codec.torch.network.version import hash64
from codec.torch.reduction.execution import agreed, run_several
from codec.torch.reduction.host import Reduction
from codec.torch.reduction.raw import Within
from codec.torch.reduction.table import RAW
from codec.torch.transport.collective import Collective
from codec.torch.transport.values import check_norm, norm_of

logger = logging.getLogger("codec.torch")

_logged: set[str] = set()  # kinds of gradients, such as "float64" or "sparse", that were already logged


async def mean(
    collective: Collective, buffer: torch.Tensor, item: int | str | None, settings: CallOptions
) -> torch.Tensor:
    """Return the mean of a bucket over all ranks; float64 is summed in float64.

    Parameters
    ----------
    collective : Collective
        The collective of the bucket.
    buffer : torch.Tensor
        Bucket of float64, or a sparse (COO) tensor of any dtype.
    item : int or str, optional
        Result of ``transform=``, which must be the same on all ranks.
    settings : CallOptions
        Options of the hook; only ``max_norm`` is used.
    """
    bounded = CallOptions(max_norm=settings.max_norm)
    kind = "sparse" if buffer.is_sparse else str(buffer.dtype).removeprefix("torch.")
    if kind not in _logged:
        _logged.add(kind)
        logger.info("gradients that are %s are sent uncompressed: frames cannot carry their sums", kind)
    if buffer.is_sparse:
        return await _sparse_mean(collective, buffer, item, bounded)
    if collective.size == 1:
        return buffer
    r = Reduction(buffer.cpu().numpy(), "float64", Lossless(), "mean", 0, settings=bounded)
    within = Within(collective, [r])
    planned = [(each, RAW) for each in await within.scatter()]
    [result] = await within.gather(await run_several(collective, RAW.name, planned, item))
    return from_numpy(result).to(buffer.device, copy=True)


async def _sparse_mean(
    collective: Collective, buffer: torch.Tensor, item: int | str | None, settings: CallOptions
) -> torch.Tensor:
    """Return the mean of sparse tensors. Each rank sends its entries to all ranks, and each adds them in rank order.

    In two levels, ranks do so within their machine, and then send the sum to the other machines.
    """
    shape, dims = tuple(buffer.shape), buffer.sparse_dim()
    total, levels = buffer.detach().coalesce(), collective.levels
    fields = {"collective": "sparse gradients", "shape": f"{shape}, {dims} sparse", "dtype": str(total.dtype)}
    fields |= agreed(item)
    for members in (levels.between,) if levels.flat else (levels.within, levels.between):
        indices, values = total.indices().contiguous().cpu().numpy(), total.values().contiguous().cpu()
        message = np.concatenate([indices.reshape(-1).view(np.uint8), values.view(-1).view(torch.uint8).numpy()])
        received = await swap(collective.part(hash64(*fields.items()), fields, members), [message] * members.size)
        parts = [_entries(each, buffer, shape, dims) for each in received]
        if (most := settings.max_norm) is not None:
            count = 1 if members is not levels.between else levels.all.size // members.size
            for o, (_, entries) in enumerate(parts):
                check_norm(norm_of(entries.double().view(-1).numpy()), most, members.ranks[o], count)
        all_indices, all_values = torch.cat([i for i, _ in parts], 1), torch.cat([v for _, v in parts])
        sums = torch.sparse_coo_tensor(  # pyright: ignore[reportUnknownMemberType] - torch types its arguments in part
            all_indices, all_values, shape, device="cpu", check_invariants=False
        )
        total = sums.coalesce()
    return (total / collective.size).to(buffer.device)


def _entries(data: bytes, like: torch.Tensor, shape: tuple[int, ...], dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parse the indices and values of a sparse tensor that a rank sent.

    Raises
    ------
    FrameError
        The number of bytes is no multiple of the size of an entry, or an index is outside of the shape.
    """
    dense = shape[dims:]
    each = 8 * dims + like.element_size() * prod(dense)
    n, rest = divmod(len(data), each)
    if rest:
        raise FrameError(
            f"a rank has sent {len(data)} bytes of sparse entries, which is no multiple of {each} bytes, the size of "
            "an entry"
        )
    if data:
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        raw = torch.empty(0, dtype=torch.uint8, device="cpu")
    indices = raw[: 8 * dims * n].view(torch.int64).view(dims, n)
    sizes = torch.tensor(shape[:dims], dtype=torch.int64, device="cpu").view(dims, 1)
    if not ((indices >= 0) & (indices < sizes)).all():
        raise FrameError(f"a rank has sent a sparse entry whose index is outside of shape {shape}")
    return indices, raw[8 * dims * n :].view(like.dtype).view(n, *dense)
