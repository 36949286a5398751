"""Differentiable all-to-all of rows with uneven splits, for dispatch and combine in expert parallelism."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, cast

import numpy as np
import torch

from codec import ArgumentError, CallOptions, FrameError
from codec._options import settings_of
from codec.arguments import shown, whole
from codec.specs import Lossless, SpecLike, require_feedback
from codec.tensors.segments import pack
from codec.torch.group.communicator import start
from codec.torch.group.exchange import swap
from codec.torch.group.levels import all_ranks
from codec.torch.network.version import hash64
from codec.torch.reduction.arguments import check_dense, publish, reduction_of
from codec.torch.reduction.execution import signed
from codec.torch.reduction.host import Reduction, Values
from codec.torch.reduction.partition import Piece
from codec.torch.transport.collective import Collective
from codec.torch.transport.messages import Array

_BACKWARD = 1 << 63  # bit that is flipped in the number of the random stream for gradients

Splits = Sequence[int]


def all_to_all_rows(
    tensor: torch.Tensor,
    output_split_sizes: Splits,
    input_split_sizes: Splits,
    spec: SpecLike = Lossless(),  # noqa: B008 - immutable
    *,
    backward_spec: SpecLike | None = None,
    group: Any = None,
    stream: int = 0,
    options: CallOptions | None = None,
) -> torch.Tensor:
    """Send some rows of a tensor to each rank, and return the rows received from all ranks; differentiable.

    The function is like ``dist.all_to_all_single`` with split sizes. Its backward pass sends the rows of the gradient
    back. The rows for one rank are one frame; no frame is sent for zero rows. GPU tensors are copied to host memory.

    Parameters
    ----------
    tensor : torch.Tensor
        Rows of this rank, of shape (sum of `input_split_sizes`, ...), in float32, bfloat16 or float16. The rows for
        rank 0 come first.
    output_split_sizes : sequence of int
        Number of rows that each rank sends to this rank.
    input_split_sizes : sequence of int
        Number of rows that this rank sends to each rank. All of them may be zero.
    spec : Spec, BoundSpec or str
        Codec, or the name of a preset. Default: lossless.
    backward_spec : Spec or str, optional
        Codec of gradients. Default: `spec`.
    group, options
        As for :func:`all_reduce`; ``codec.options(algorithm=)`` is ignored.
    stream : int
        Number of the random stream for codecs with random rounding. Use different numbers for the calls of a step.

    Returns
    -------
    torch.Tensor
        Received rows, of shape (sum of `output_split_sizes`, ...); rows from rank 0 come first. It has no rows if this
        rank is not in the group.

    Raises
    ------
    ArgumentError, SpecError, FrameError, PeerError
        As for :func:`all_reduce`, also in the backward pass. If a rank sends rows where `output_split_sizes` has 0, or
        vice versa, FrameError is raised.

    Examples
    --------
    >>> x = torch.ones(3, 8, requires_grad=True)
    >>> y = codec.torch.all_to_all_rows(x, [3], [3])  # with one rank
    >>> y.square().sum().backward()
    >>> bool(x.grad.eq(2).all())
    True
    """
    gradients = spec if backward_spec is None else backward_spec
    rows = cast(Any, _Rows)  # torch has no types for this base class
    return rows.apply(
        tensor, output_split_sizes, input_split_sizes, spec, gradients, group, stream, settings_of(options)
    )


class _Rows(torch.autograd.Function):
    """Differentiable all-to-all: its backward pass is an all-to-all with input and output splits exchanged."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, theirs: Splits, mine: Splits, spec: Any, gradients: Any, group: Any, *how: Any
    ) -> torch.Tensor:
        ctx.back = mine, theirs, gradients, group, *how
        return _exchanged(x, theirs, mine, spec, group, *how)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        mine, theirs, gradients, group, stream, settings = ctx.back
        found = _exchanged(grads[0], mine, theirs, gradients, group, stream ^ _BACKWARD, settings)
        return found, *[None] * 7


def _exchanged(
    x: torch.Tensor, theirs: Splits, mine: Splits, spec: Any, group: Any, stream: int, settings: CallOptions
) -> torch.Tensor:
    async def work(_: Any, collective: Collective) -> torch.Tensor:
        check_dense(x)
        if not x.dim():
            raise ArgumentError("the tensor must have at least one dimension, whose items are rows, got shape ()")
        row = tuple(x.shape[1:])
        outgoing = _pieces("input_split_sizes", mine, row, collective.size)
        incoming = _pieces("output_split_sizes", theirs, row, collective.size)
        if outgoing[-1].end != x.numel():
            raise ArgumentError(
                f"input_split_sizes must add up to the number of rows of the tensor, {len(x)}, got {sum(mine)}"
            )
        r = reduction_of(x, spec, "sum", stream, settings=settings).on_host()
        require_feedback(r.spec, "send rows with another codec")
        result = await _rows_of(collective, r, row, outgoing, incoming)
        await collective.agree()
        collective.counters.frame_collectives += 1
        collective.counters.raw_nbytes += r.x.nbytes
        with collective.storing():
            output = x.new_empty((sum(theirs), *row))
            publish(result, r, output)
        return output

    # One line: an interrupt between two lines would be an error on this rank alone, after all ranks have succeeded.
    name, ranks, how = "all_to_all_rows", all_ranks(group), settings
    return x.new_empty((0, *x.shape[1:])) if (found := start(name, ranks, how, False, work)) is None else found


async def _rows_of(
    collective: Collective, r: Reduction, row: tuple[int, ...], outgoing: list[Piece], incoming: list[Piece]
) -> Values:
    """Exchange rows; return the rows from all ranks, in rank order (docs/spec/protocol/collectives.md, section 4)."""
    fields = signed(r, "all_to_all of rows") | {"number of values": f"rows of {row}"}
    part = collective.part(hash64(*fields.items()), fields)
    own, frames = r.own_term_is_exact, list[Array]()
    for o, piece in enumerate(outgoing):
        keep = piece.n and not (o == part.rank and own)
        room = np.empty(r.frame_bound(piece) if keep else 0, np.uint8)
        with part.clock.during("encode_s"):
            nbytes = r.encode(piece, room, part.rank * part.size + o) if keep else 0
        frames.append(room[:nbytes])
    received = await swap(part, frames, [r.frame_bound(piece) if piece.n else 0 for piece in incoming])
    result = np.empty(incoming[-1].end, r.x.dtype)
    for o, (frame, piece) in enumerate(zip(received, incoming, strict=True)):
        if o == part.rank and own:
            if outgoing[o].n != piece.n:
                raise ArgumentError(
                    f"input_split_sizes and output_split_sizes must have the same number of rows for this rank, {o}, "
                    "itself"
                )
            result[piece.begin : piece.end] = r.own_term(outgoing[o])
        elif bool(frame) != bool(piece.n):
            raise FrameError(
                f"rank {o} has sent {'rows' if frame else 'no rows'}, but output_split_sizes expects "
                f"{'none' if frame else 'some'}"
            )
        elif frame:
            with part.clock.during("decode_s"):
                r.decode(np.frombuffer(frame, np.uint8), piece, result)
                if r.settings.max_norm is not None:
                    r.check_values(part, o, r.as_float32(result[piece.begin : piece.end]))
    return result


def _pieces(name: str, sizes: Any, row: tuple[int, ...], ranks: int) -> list[Piece]:
    """Return the range of a flat tensor for each rank's rows, with one segment of the shape of these rows."""
    if not isinstance(sizes, Sequence) or len(cast(Sequence[Any], sizes)) != ranks:
        raise ArgumentError(
            f"{name} must be a list with the number of rows for each of {ranks} ranks, got {shown(cast(object, sizes))}"
        )
    rows = [whole(name, n, 0) for n in cast(Sequence[Any], sizes)]
    ends = pairwise([0, *accumulate(n * prod(row) for n in rows)])
    return [Piece(a, b, pack([(0, (n, *row))]) if b > a else None) for (a, b), n in zip(ends, rows, strict=True)]
