"""Compressed collectives for torch.distributed.

Each collective defines a function work(comm, collective), which the thread of the group runs. Within it, prepare()
checks the arguments; if it raises an error, all ranks raise an error. store() stores the result after all ranks have
succeeded.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from codec import ArgumentError, CallOptions
from codec._options import settings_of
from codec.specs import Lossless, SpecLike
from codec.tensors.segments import pack
from codec.torch.collectives.outputs import prepare_output, store_output
from codec.torch.feedback.feedback import Feedback
from codec.torch.feedback.turn import FeedbackTurn, spec_or_default
from codec.torch.group.communicator import Communicator, start
from codec.torch.group.levels import all_ranks
from codec.torch.group.work import Work
from codec.torch.reduction.arguments import (
    OpLike,
    check_output,
    check_sizes,
    publish,
    reduction_of,
    unwrapped,
)
from codec.torch.reduction.execution import algorithm_of, run, run_all_reduce
from codec.torch.reduction.host import Reduction, Values
from codec.torch.reduction.table import ALL_TO_ALL, GATHER, REDUCE_SCATTER, Algorithm, check_request
from codec.torch.transport.collective import Collective


def all_reduce(
    tensor: Any,
    spec: SpecLike | None = None,
    *,
    op: OpLike = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    out: torch.Tensor | None = None,
    feedback: Feedback | Literal[False] | None = None,
    stream: int = 0,
    options: CallOptions | None = None,
) -> Work | None:
    """Reduce a tensor over all ranks of a group, in place, like ``dist.all_reduce``; ranks exchange frames.

    Values are added in float32, in rank order (with the ring, in ring order). All ranks get bit-identical results; with
    a lossless codec, the result is exactly that float32 sum. After an error on any rank, all ranks raise an error, and
    all tensors are unchanged.

    Parameters
    ----------
    tensor : torch.Tensor or View
        Tensor of float32, bfloat16 or float16 on any device; dtype and shape must be equal on all ranks. For a flat
        bucket of parameters, pass ``codec.view(bucket, segments={name: shape, ...})``, so that values which share a
        scale are in the same row of a parameter.
    spec : Spec, BoundSpec or str, optional
        Codec, or the name of a preset. Default: the codec of `feedback`, or lossless. Bind :class:`codec.Truncate` to
        an optimizer and its state, ``codec.Truncate().bind(optimizer, theta=..., m=..., v=...)``, with arrays of as
        many values as `tensor`.
    op : ReduceOp or {"sum", "mean", "avg", "max"}
        Operation: ``ReduceOp.SUM`` (the default, as for ``dist.all_reduce``), ``ReduceOp.AVG`` or ``ReduceOp.MAX``.
    group : ProcessGroup, DeviceMesh or pair of ProcessGroup, optional
        Group of ranks. Default: all ranks. For several ranks a machine: a DeviceMesh of two dimensions, between
        machines and within them, or (between, within). Ranks of a machine then add their values uncompressed, and
        reduce one part each with the other machines, N in all: one tensor leaves a machine.
    async_op : bool
        True: return at once, and reduce in the background, in the order of calls.
    out : torch.Tensor, optional
        Tensor for the result; `tensor` is then unchanged. It must be contiguous, have the dtype and size of `tensor`,
        be in host memory or on the device of `tensor`, and not share memory with `tensor`. Passing `out` is faster,
        because the result is written to it directly; for the same reason, `out` is undefined after an error.
    feedback : Feedback or False, optional
        Error feedback for a lossy codec, for sums and means by any algorithm except "ring". The encoding errors of this
        rank are added to its values in the next call with the same parameter names. The errors of the sums that this
        rank encodes are added to its next sums. Errors from rounding results to bfloat16 or float16 are not included.
        After an error, residuals are unchanged on all ranks. Default: no error feedback; :class:`codec.TopK` needs an
        explicit False for that.
    stream : int
        Number of the random stream for codecs with random rounding. Use different numbers for the tensors of a step.
    options : CallOptions, optional
        ``codec.options(algorithm=, timeout=, engine=, threads=)``. Options that are not set are those of the ``with``
        blocks around the call:

        * ``algorithm``: "two_shot": each rank sums one slice over all ranks, and sends frames of 2 (N - 1) / N tensors;
          "all_gather": one phase, in which each rank sends N - 1 frames; "ring": a rank sends as many bytes as with
          two-shot, but only to one neighbour, and values are encoded N - 1 times; "raw": two-shot with uncompressed
          values; "shared_scale": two-shot for :class:`codec.Ternary` with exact sums, since all ranks share one scale
          per parameter. Default "auto": all-gather for two ranks and for small tensors, otherwise two-shot; or raw, if
          the first calls with tensors of that size have measured that raw is faster. With "auto", results of lossy
          codecs can therefore depend on timing; name an algorithm for reproducible results.
        * ``timeout``: longest time, in seconds, that a rank may keep others waiting. The group's first collective sets
          it. Default: the group's timeout.

    Returns
    -------
    Work or None
        Handle of the collective if `async_op`; its result is ``[tensor]``, or ``[out]``.

    Raises
    ------
    ArgumentError
        An argument is invalid, or the values contain NaN or Inf, which most lossy codecs refuse.
    SpecError
        `spec` is not a spec, or cannot be combined with the other arguments.
    FrameError
        Another rank has sent a damaged frame.
    PeerError
        Another rank has raised one of these errors, has started another collective, is lost, or did not answer in time.
        If the message says so, make a new group.

    Examples
    --------
    >>> x = torch.ones(1000)
    >>> codec.torch.all_reduce(x, codec.Float8(group_size=100), op="mean")
    >>> bool(x.eq(1).all())
    True
    >>> codec.torch.all_reduce(x, options=codec.options(algorithm="two_shot", timeout=60))
    >>> work = codec.torch.all_reduce(x, "balanced", async_op=True)
    >>> work.wait()
    True
    >>> feedback = codec.torch.Feedback(codec.Quantize(4))  # keep it from step to step
    >>> codec.torch.all_reduce(x, feedback=feedback)
    """
    settings = settings_of(options)
    requested = algorithm_of(settings)

    async def work(comm: Communicator, collective: Collective) -> list[torch.Tensor]:
        async with FeedbackTurn(feedback, comm.channel) as turn:

            def prepare() -> Reduction:
                values, segments = unwrapped(tensor)
                if segments is None and len(getattr(values, "shape", ())) > 1:
                    segments = pack([(0, tuple(values.shape))])
                r = reduction_of(
                    values, spec_or_default(spec, feedback), op, stream, segments=segments, settings=settings
                )
                check_request(requested, r.spec, r.op, feedback=isinstance(feedback, Feedback))
                prepare_output(r, values, out, settings)
                turn.begin(r, tensor)
                return r

            def feed(r: Reduction, algorithm: Algorithm, window: tuple[int, int]) -> None:
                turn.feed(r, tensor, window, algorithm)

            def store(result: Values, r: Reduction) -> None:
                store_output(result, r, unwrapped(tensor)[0], out)
                turn.commit()

            await run_all_reduce(comm, collective, requested, prepare, store, feed)
        return [unwrapped(tensor)[0] if out is None else out]

    return _begin("all_reduce", work, group, async_op, settings)


def _begin(
    name: str,
    work: Callable[[Communicator, Collective], Awaitable[list[torch.Tensor]]],
    group: Any,
    async_op: bool,
    settings: CallOptions,
) -> Work | None:
    """Run work(comm, collective) in the thread of the group; return its handle if `async_op`, else None."""
    # One line: an interrupt between two lines would be an error on this rank alone, after all ranks have succeeded.
    return started if isinstance(started := start(name, group, settings, async_op, work), Work) else None


def reduce_scatter(
    output: torch.Tensor,
    tensor: Any,
    spec: SpecLike | None = None,
    *,
    op: OpLike = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    feedback: Feedback | Literal[False] | None = None,
    stream: int = 0,
    options: CallOptions | None = None,
) -> Work | None:
    """Reduce a tensor over all ranks, and store one part of the result on each rank.

    The function is like ``dist.reduce_scatter_tensor``.

    Parameters
    ----------
    output : torch.Tensor
        Tensor for this rank's part, the `rank`-th of N equal parts of the flattened result. It may be a part of
        `tensor`.
    tensor : torch.Tensor or View
        Tensor of float32, bfloat16 or float16, with N times as many values as `output` and the same dtype. Segments of
        a view name the parameters for `feedback`; they do not affect which values share a scale.
    spec, op, group, async_op, feedback, stream, options
        As for :func:`all_reduce`; ``codec.options(algorithm=)`` is ignored.

    Returns
    -------
    Work or None
        As for :func:`all_reduce`; the result is ``[output]``.

    Raises
    ------
    ArgumentError, SpecError, FrameError, PeerError
        As for :func:`all_reduce`.

    Examples
    --------
    >>> part = torch.empty(1000)
    >>> codec.torch.reduce_scatter(part, torch.ones(1000))  # with one rank
    >>> bool(part.eq(1).all())
    True
    """
    settings = settings_of(options)

    async def work(comm: Communicator, collective: Collective) -> list[torch.Tensor]:
        async with FeedbackTurn(feedback, comm.channel, comm.channel.levels.flattened()) as turn:

            def prepare() -> Reduction:
                values, _ = unwrapped(tensor)
                check_sizes(values, comm.channel.size, output)
                r = reduction_of(values, spec_or_default(spec, feedback), op, stream, settings=settings)
                check_output(output, output.dtype, output.numel())
                turn.begin(r, tensor)
                turn.feed(r, tensor, (0, r.n), REDUCE_SCATTER)
                return r

            def store(result: Values, r: Reduction) -> None:
                publish(result, r, output)
                turn.commit()

            await run(comm, collective, REDUCE_SCATTER, prepare, store)
        return [output]

    return _begin("reduce_scatter", work, all_ranks(group), async_op, settings)


def all_gather(
    output: torch.Tensor,
    tensor: torch.Tensor,
    spec: SpecLike = Lossless(),  # noqa: B008 - immutable
    *,
    group: Any = None,
    async_op: bool = False,
    stream: int = 0,
    options: CallOptions | None = None,
) -> Work | None:
    """Gather the tensors of all ranks on all ranks, like ``dist.all_gather_into_tensor``.

    With a lossy codec, too, results are bit-identical on all ranks, because each rank also decodes its own tensor.

    Parameters
    ----------
    output : torch.Tensor
        Tensor for the result, with N times as many values as `tensor`; the values of rank 0 come first.
    tensor : torch.Tensor
        Tensor of this rank: float32, bfloat16 or float16.
    spec : Spec, BoundSpec or str
        Codec, or the name of a preset. Default: lossless.
    group, async_op, stream, options
        As for :func:`all_reduce`; ``codec.options(algorithm=)`` is ignored.

    Returns
    -------
    Work or None
        As for :func:`all_reduce`; the result is ``[output]``.

    Raises
    ------
    ArgumentError, SpecError, FrameError, PeerError
        As for :func:`all_reduce`.

    Examples
    --------
    >>> output = torch.empty(1000)
    >>> codec.torch.all_gather(output, torch.ones(1000))  # with one rank
    >>> bool(output.eq(1).all())
    True
    """
    settings = settings_of(options)

    async def work(comm: Communicator, collective: Collective) -> list[torch.Tensor]:
        def prepare() -> Reduction:
            check_sizes(output, comm.channel.size, tensor)
            check_output(output, output.dtype, output.numel())
            return reduction_of(tensor, spec, "sum", stream, settings=settings)

        await run(comm, collective, GATHER, prepare, lambda result, r: publish(result, r, output))
        return [output]

    return _begin("all_gather", work, all_ranks(group), async_op, settings)


def all_to_all(
    output: torch.Tensor,
    tensor: torch.Tensor,
    spec: SpecLike = Lossless(),  # noqa: B008 - immutable
    *,
    group: Any = None,
    async_op: bool = False,
    stream: int = 0,
    options: CallOptions | None = None,
) -> Work | None:
    """Send the i-th of N equal parts of a flattened tensor to rank i, like ``dist.all_to_all_single``.

    Parameters
    ----------
    output : torch.Tensor
        Tensor for the received parts, with as many values as `tensor`; the part from rank 0 comes first.
    tensor : torch.Tensor
        Tensor of this rank: float32, bfloat16 or float16. The number of values must be a multiple of N.
    spec : Spec, BoundSpec or str
        Codec, or the name of a preset. Default: lossless.
    group, async_op, stream, options
        As for :func:`all_reduce`; ``codec.options(algorithm=)`` is ignored.

    Returns
    -------
    Work or None
        As for :func:`all_reduce`; the result is ``[output]``.

    Raises
    ------
    ArgumentError, SpecError, FrameError, PeerError
        As for :func:`all_reduce`.

    Examples
    --------
    >>> output = torch.empty(1000)
    >>> codec.torch.all_to_all(output, torch.ones(1000))
    >>> bool(output.eq(1).all())
    True
    """
    settings = settings_of(options)

    async def work(comm: Communicator, collective: Collective) -> list[torch.Tensor]:
        def prepare() -> Reduction:
            check_sizes(output, 1, tensor)
            if tensor.numel() % comm.channel.size:
                raise ArgumentError(
                    f"the number of values must be a multiple of the number of ranks, {comm.channel.size}, got "
                    f"{tensor.numel()}"
                )
            check_output(output, output.dtype, output.numel())
            return reduction_of(tensor, spec, "sum", stream, settings=settings)

        await run(comm, collective, ALL_TO_ALL, prepare, lambda result, r: publish(result, r, output))
        return [output]

    return _begin("all_to_all", work, all_ranks(group), async_op, settings)
