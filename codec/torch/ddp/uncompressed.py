"""Uncompressed sums, in rank order, of buckets that frames cannot carry: float64, and sparse gradients."""

import logging
from math import prod

import numpy as np
import torch

from codec import FrameError
from codec.specs import Lossless
from codec.torch._compat import from_numpy
from codec.torch.collectives.bytes import swap
from codec.torch.group.communicator import Communicator, close_on_error, exchange_requests, hash64
from codec.torch.reduction.execution import Agree, Planned, agreed, run_all_reduce
from codec.torch.reduction.host import Reduction, Values
from codec.torch.reduction.phases import FirstError
from codec.torch.reduction.table import RAW
from codec.torch.transport.messages import Array

logger = logging.getLogger("codec.torch")

_logged: set[str] = set()  # kinds of buckets that were logged


def is_other(buffer: torch.Tensor) -> bool:
    """Return True if frames cannot carry a bucket."""
    return buffer.is_sparse or buffer.dtype == torch.float64


def mean(comm: Communicator, buffer: torch.Tensor, begin: Agree) -> torch.Tensor:
    """Return the mean of a bucket over all ranks; float64 is summed in float64.

    Parameters
    ----------
    comm : Communicator
        Communicator of the group.
    buffer : torch.Tensor
        float64, or sparse (COO) of any dtype. A dense one gets the result.
    begin : callable
        Called before the request; if it raises an error, all ranks raise one. All ranks must agree on its result.
    """
    kind = "sparse" if buffer.is_sparse else str(buffer.dtype).removeprefix("torch.")
    if kind not in _logged:
        _logged.add(kind)
        logger.info("gradients that are %s are sent uncompressed: frames cannot carry their sums", kind)
    if buffer.is_sparse:
        return _sparse_mean(comm, buffer, begin)

    if comm.channel.size == 1:
        begin()
        return buffer

    item: int | str | None = None

    def prepare() -> Planned:
        nonlocal item
        item = begin()
        return Reduction(buffer.cpu().numpy(), "float64", Lossless(), "mean", 0), RAW

    def store(result: Values, _: Reduction) -> None:
        buffer.copy_(from_numpy(result))

    run_all_reduce(comm, RAW.name, prepare, store, lambda: item)
    return buffer


def _sparse_mean(comm: Communicator, buffer: torch.Tensor, begin: Agree) -> torch.Tensor:
    """Return the mean of sparse tensors: each rank sends its entries to all, and all add them in rank order."""
    channel = comm.channel
    shape, dims = tuple(buffer.shape), buffer.sparse_dim()

    def prepare() -> tuple[tuple[Array, Array], list[int]]:
        item = begin()
        t = buffer.detach().coalesce()
        entries = t.indices().contiguous().cpu().numpy(), t.values().contiguous().cpu()
        signature = hash64("sparse", shape, dims, str(t.dtype))
        return (entries[0], entries[1].view(-1).view(torch.uint8).numpy()), [agreed(signature, item)]

    (indices, values), _ = exchange_requests(channel, prepare)
    with close_on_error(channel):
        message = np.concatenate([indices.reshape(-1).view(np.uint8), values])
        received, error = swap(channel, [message] * channel.size)
        first_error = FirstError(channel)
        first_error.error = error
        parts = [first_error(_entries, received[rank], buffer, shape, dims) for rank in range(channel.size)]
    channel.requests.exchange_verdict(first_error.error)
    all_indices, all_values = torch.cat([i for i, _ in parts], 1), torch.cat([v for _, v in parts])
    total = torch.sparse_coo_tensor(  # pyright: ignore[reportUnknownMemberType] - torch types its arguments in part
        all_indices, all_values, shape, device="cpu", check_invariants=False
    )
    return (total.coalesce() / channel.size).to(buffer.device)


def _entries(data: bytes, like: torch.Tensor, shape: tuple[int, ...], dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and values that a rank sent.

    Raises
    ------
    FrameError
        The bytes are no entries of such a tensor.
    """
    dense = shape[dims:]
    each = 8 * dims + like.element_size() * prod(dense)
    n, rest = divmod(len(data), each)
    if rest:
        raise FrameError(f"a rank sent {len(data)} bytes of sparse entries, which have {each} bytes each")
    if data:
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        raw = torch.empty(0, dtype=torch.uint8, device="cpu")
    indices = raw[: 8 * dims * n].view(torch.int64).view(dims, n)
    sizes = torch.tensor(shape[:dims], dtype=torch.int64, device="cpu").view(dims, 1)
    if not ((indices >= 0) & (indices < sizes)).all():
        raise FrameError(f"an index of sparse entries is outside of shape {shape}")
    return indices, raw[8 * dims * n :].view(like.dtype).view(n, *dense)
