"""Collectives over torch.distributed whose tensors travel as frames."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from codec import ArgumentError
from codec.specs import Lossless, Spec
from codec.tensors.segments import Segments
from codec.tensors.view import mark_written
from codec.torch import algorithms, ternary
from codec.torch.arguments import as_array, check_output, check_sizes, publish, reduction_of
from codec.torch.communicator import Communicator, start, storing_results
from codec.torch.connection import Timeout
from codec.torch.execution import Algorithm, run, run_algorithm
from codec.torch.messages import Array
from codec.torch.reduction import Reduction
from codec.torch.residuals import CallersResidual, check_feedback_algorithm
from codec.torch.work import Work


def all_reduce(
    tensor: torch.Tensor,
    spec: Spec = Lossless(),  # noqa: B008 - it cannot change
    *,
    group: Any = None,
    op: Any = dist.ReduceOp.SUM,
    algorithm: Algorithm = "auto",
    segments: Segments | None = None,
    metric: Any = None,
    state: Mapping[str, Any] | None = None,
    stream: int = 0,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    timeout: Timeout | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce a tensor over all ranks of a group, in place, as ``dist.all_reduce`` does, with frames on the wire.

    Values are summed in float32, in the order of ranks, so that all ranks get the same bits; lossless, the bits of that
    sum. A rank's own values are encoded as all others'. If anything goes wrong on any rank, all of them raise, and all
    tensors are as they were.

    Parameters
    ----------
    tensor : torch.Tensor
        float32, bfloat16 or float16; of the same shape on all ranks.
    spec : Spec
        How frames are encoded; lossless if left out.
    group : ProcessGroup, optional
        Whose ranks; all if left out. It gets connections of its own, over Gloo, with its first collective.
    op : ReduceOp or {"sum", "mean", "avg", "max"}
        Reduction over ranks: ``ReduceOp.SUM`` (the default, as for ``dist.all_reduce``), ``ReduceOp.AVG`` or
        ``ReduceOp.MAX``.
    algorithm : {"auto", "two_shot", "all_gather", "ring", "raw", "shared_scale"}
        Who sends what to whom. Two-shot: each rank reduces a slice, 2 (N - 1) / N frames on the wire; all-gather: one
        phase, N - 1 frames; ring: as much as two-shot, to one neighbour, encoded N - 1 times; raw: two-shot without
        frames, values as they are; shared scale: two-shot for :class:`codec.Ternary`, each parameter under one scale of
        all ranks, so that sums come back whole. Left out: all-gather for two ranks and small tensors, else two-shot;
        but raw where ranks are busy encoding and it has turned out to be faster, which is tried out by the first calls
        with tensors of a size. Then what lossy codecs give depends on the time: name an algorithm if runs must be
        alike.
    segments : list of (int, tuple of int), optional
        Parameters inside a flat bucket, as :func:`codec.encode` takes them. Left out: the tensor's own shape.
    metric, state : optional
        What :class:`codec.Truncate` goes by. State tensors have as many values as `tensor`.
    stream : int
        Tells tensors of one step apart, where a codec draws at random.
    residual : torch.Tensor, optional
        Error feedback with a lossy `spec`, for a sum or mean by any `algorithm` but the ring: float32, contiguous, in
        host memory, with as many values as `tensor`; zeros before the first call. This rank sends ``tensor +
        residual``, and `residual` gets all that its frames lose, those of sums included. Residuals of all ranks
        together then hold what the results so far lack. With two-shot and a mean, a rank's residual holds N times the
        error of its slice of the mean. The rounding of results to bfloat16 or float16 is not fed back. After an error
        on any rank `residual` is unchanged on all.
    out : torch.Tensor, optional
        Where to put the result instead of into `tensor`, which then stays as it is: contiguous, of the same dtype and
        size, in host memory of its own. In place nothing may be written before all have succeeded, so that frames are
        decoded aside and what comes out is copied, or, low-bit codecs' of large tensors, decoded last of all; with
        `out` while others are on the wire. After an error it holds anything.
    timeout : float or timedelta, optional
        Seconds that a rank may keep others waiting, set with the group's first collective; left out: the group's.
    async_op : bool
        Return at once, and reduce in the background, in the order of calls.

    Returns
    -------
    Work or None
        Handle of the collective if `async_op`; its result is ``[tensor]``, or ``[out]``.

    Raises
    ------
    ArgumentError, SpecError
        The tensor or an argument cannot be used; the values hold NaN or Inf, which lossy codecs refuse.
    FrameError
        What another rank sent was damaged.
    PeerError
        Another rank raised one of these, asked for something else, is gone or did not answer in time. If a connection
        was lost a new group is needed.

    Examples
    --------
    >>> codec.torch.all_reduce(gradient, codec.Float8(group_size=128))  # doctest: +SKIP
    """

    def work(comm: Communicator) -> list[torch.Tensor]:
        return _all_reduce(comm, tensor, spec, op, algorithm, segments, metric, state, stream, residual, out)

    return _work(start("all_reduce", group, timeout, async_op, work))


def _work(started: Any) -> Work | None:
    """Return the handle of a collective in flight; None after one that has ended."""
    return started if isinstance(started, Work) else None


def _all_reduce(
    comm: Communicator,
    tensor: torch.Tensor,
    spec: Spec,
    op: Any,
    algorithm: Algorithm,
    segments: Segments | None,
    metric: Any,
    state: Mapping[str, Any] | None,
    stream: int,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> list[torch.Tensor]:
    kept: CallersResidual | None = None

    def prepare() -> Reduction:
        nonlocal kept
        whole = [(0, tuple(tensor.shape))] if len(getattr(tensor, "shape", ())) > 1 else None
        inside = whole if segments is None else segments
        r = reduction_of(tensor, spec, op, inside, metric, state, stream)
        if algorithm == "shared_scale":
            ternary.check(r.spec, r.op)
        if out is None:
            check_output(tensor, tensor.dtype, tensor.numel(), "the tensor")
        r.out = None if out is None else _place(out, tensor, r)
        if out is None and r.can_defer and r.x.ctypes.data == tensor.data_ptr():
            r.deferred = []
        if residual is not None:
            check_feedback_algorithm(algorithm)
            kept = CallersResidual(residual, r, tensor if out is None else out)
        return r

    result, r = run(comm, prepare, algorithm)
    with storing_results(comm.channel):
        if out is None:
            _store(result, r, tensor)
        if kept is not None:
            kept.commit(comm.channel.size)
    return [tensor if out is None else out]


def _store(result: Array, r: Reduction, tensor: torch.Tensor) -> None:
    """Store the result of a reduction in the caller's tensor."""
    for each in r.deferred or ():
        each()
    if r.deferred is None:
        publish(result, r, tensor)
    else:
        mark_written(tensor)


def _place(out: torch.Tensor, tensor: torch.Tensor, r: Reduction) -> Array:
    """Where a result goes that is not written to the tensor itself."""
    check_output(out, tensor.dtype, tensor.numel(), "out=")
    if out.device.type != "cpu" or not out.is_contiguous():
        raise ArgumentError(
            f"out= must be contiguous and in host memory; it has strides {out.stride()} on {out.device}"
        )
    place = as_array(out)
    inside = out.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    if np.may_share_memory(place, r.x) or (inside and not tensor.is_contiguous()):
        raise ArgumentError("out= shares memory with the tensor")
    return place


def reduce_scatter(
    output: torch.Tensor,
    tensor: torch.Tensor,
    spec: Spec = Lossless(),  # noqa: B008 - it cannot change
    *,
    group: Any = None,
    op: Any = dist.ReduceOp.SUM,
    stream: int = 0,
    residual: torch.Tensor | None = None,
    timeout: Timeout | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce a tensor over all ranks and give each rank its part, as ``dist.reduce_scatter_tensor`` does.

    Parameters
    ----------
    output : torch.Tensor
        Gets the part of this rank: the `rank`-th of N equal parts of the flattened sum. It may be a part of `tensor`.
    tensor : torch.Tensor
        N times as many values, of the same dtype: float32, bfloat16 or float16.
    spec, group, op, stream, residual, timeout, async_op
        As for :func:`all_reduce`, and so are the errors. `residual` has as many values as `tensor`.
    """
    kept: CallersResidual | None = None

    def prepare(size: int) -> Reduction:
        nonlocal kept
        check_sizes(tensor, size, output)
        r = reduction_of(tensor, spec, op, None, None, None, stream)
        if residual is not None:
            kept = CallersResidual(residual, r, output)
        return r

    def commit(size: int) -> None:
        if kept is not None:
            kept.commit(size)

    return _begin(group, timeout, async_op, algorithms.reduce_scatter, prepare, output, commit)


def all_gather(
    output: torch.Tensor,
    tensor: torch.Tensor,
    spec: Spec = Lossless(),  # noqa: B008 - it cannot change
    *,
    group: Any = None,
    stream: int = 0,
    timeout: Timeout | None = None,
    async_op: bool = False,
) -> Work | None:
    """Give all ranks the tensors of all, as ``dist.all_gather_single`` does. The sender sees its own as others do.

    Parameters
    ----------
    output : torch.Tensor
        N times as many values: those of rank 0 first.
    tensor : torch.Tensor
        float32, bfloat16 or float16.
    spec, group, stream, timeout, async_op
        As for :func:`all_reduce`, and so are the errors.
    """

    def prepare(size: int) -> Reduction:
        check_sizes(output, size, tensor)
        return reduction_of(tensor, spec, "sum", None, None, None, stream)

    return _begin(group, timeout, async_op, algorithms.gather, prepare, output)


def all_to_all(
    output: torch.Tensor,
    tensor: torch.Tensor,
    spec: Spec = Lossless(),  # noqa: B008 - it cannot change
    *,
    group: Any = None,
    stream: int = 0,
    timeout: Timeout | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send the i-th of N equal parts of a flattened tensor to rank i, as ``dist.all_to_all_single`` does.

    Parameters
    ----------
    output : torch.Tensor
        As many values as `tensor`: the part that rank 0 sent first.
    tensor : torch.Tensor
        float32, bfloat16 or float16.
    spec, group, stream, timeout, async_op
        As for :func:`all_reduce`, and so are the errors.
    """

    def prepare(size: int) -> Reduction:
        check_sizes(output, 1, tensor)
        if tensor.numel() % size:
            raise ArgumentError(f"{tensor.numel()} values cannot be cut into {size} equal parts")
        return reduction_of(tensor, spec, "sum", None, None, None, stream)

    return _begin(group, timeout, async_op, algorithms.all_to_all, prepare, output)


def _nothing(size: int) -> None:
    """Do nothing after a success."""


def _begin(
    group: Any,
    timeout: Timeout | None,
    async_op: bool,
    algorithm: Any,
    prepare: Callable[[int], Reduction],
    output: torch.Tensor,
    commit: Callable[[int], None] = _nothing,
) -> Work | None:
    """Run an algorithm over what prepare(size) returns, into `output`; then commit(size) after a success."""

    def prepare_all(size: int) -> Reduction:
        r = prepare(size)
        check_output(output, output.dtype, output.numel())
        return r

    def work(comm: Communicator) -> list[torch.Tensor]:
        def store(result: Array, r: Reduction) -> None:
            publish(result, r, output)
            commit(comm.channel.size)

        run_algorithm(comm, algorithm, prepare_all, store)
        return [output]

    return _work(start(algorithm.__name__, group, timeout, async_op, work))
