"""Send and receive activations and gradients in pipelines without torch's schedules, as point-to-point messages."""

from collections.abc import Iterable
from typing import Any

import torch

from codec import ActivationDelta, ArgumentError, CallOptions
from codec.arguments import shown
from codec.torch.group.work import Work
from codec.torch.pipelining.host import on_host, write
from codec.torch.point_to_point.send_recv import recv, send


def send_activation(
    activation: torch.Tensor,
    dst: int,
    *,
    delta: ActivationDelta,
    samples: Iterable[int] | None,
    group: Any = None,
    tag: int = 0,
    async_op: bool = False,
    options: CallOptions | None = None,
) -> Work | None:
    """Send the activations of a micro-batch to the next stage, which calls :func:`recv_activation`.

    Provisional: may change in any version.

    Call ``delta.commit()`` on both sides after the optimizer's step, or ``delta.rollback()`` if the step failed, as for
    :class:`codec.ActivationDelta`. :class:`CompressedStage` does this automatically.

    Parameters
    ----------
    activation : torch.Tensor
        float32, bfloat16 or float16 tensor on any device. The first dimension counts samples.
    dst : int
        Receiving rank of the group.
    delta : ActivationDelta
        State of this side of the edge.
    samples : iterable of int, or None
        Id of each sample. None: the state of `delta` is neither used nor changed, as for evaluation.
    group, tag, async_op
        As for :func:`codec.torch.send`.
    options : CallOptions, optional
        ``codec.options(timeout=, engine=, threads=)``.

    Returns
    -------
    Work or None
        Work if `async_op`.

    Raises
    ------
    ArgumentError, SpecError, EngineError
        As for :meth:`codec.ActivationDelta.encode`. Nothing is sent, so the receiver waits until its timeout.
    PeerError
        As for :func:`codec.torch.send`.

    Examples
    --------
    >>> from codec.torch.pipelining import send_activation, recv_activation
    >>> ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    >>> delta, a = codec.ActivationDelta(), torch.randn(4, 100)
    >>> if ranks > 1 and rank == 0:
    ...     send_activation(a, 1, delta=delta, samples=[3, 1, 4, 5])
    >>> if rank == 1:
    ...     recv_activation(a, 0, delta=delta, samples=[3, 1, 4, 5])
    >>> delta.commit()
    """
    _check(activation, delta)
    message = delta.encode(on_host(activation), samples, options=options)
    return send(message, dst, group=group, tag=tag, async_op=async_op, options=options)


def recv_activation(
    out: torch.Tensor,
    src: int,
    *,
    delta: ActivationDelta,
    samples: Iterable[int] | None = None,
    group: Any = None,
    tag: int = 0,
    options: CallOptions | None = None,
) -> None:
    """Receive the activations of a micro-batch from the previous stage.

    Provisional: may change in any version.

    Parameters
    ----------
    out : torch.Tensor
        Tensor to overwrite, with the shape and dtype of the activations, on any device. It is unchanged after an error.
    src : int
        Sending rank of the group.
    delta : ActivationDelta
        State of this side of the edge.
    samples : iterable of int, optional
        Expected sample ids. Default: accept the ids that the sender has passed.
    group, tag, options
        As for :func:`send_activation`.

    Raises
    ------
    ArgumentError, EngineError, FrameError, StateError
        As for :meth:`codec.ActivationDelta.decode`. Both sides must roll back.
    PeerError
        As for :func:`codec.torch.recv`.

    Examples
    --------
    See :func:`send_activation`.
    """
    _check(out, delta)
    message = recv(src, group=group, tag=tag, max_nbytes=delta.bound(out.shape, out.dtype), options=options)
    write(out, lambda t: delta.decode(message, samples, out=t, options=options))


def send_gradient(
    gradient: torch.Tensor,
    dst: int,
    *,
    delta: ActivationDelta,
    group: Any = None,
    tag: int = 0,
    async_op: bool = False,
    options: CallOptions | None = None,
) -> Work | None:
    """Send the gradient of activations to the previous stage, which calls :func:`recv_gradient`.

    Provisional: may change in any version.

    If the gradient contains NaN or Inf, which the codec refuses, the receiver raises PeerError.

    Parameters
    ----------
    gradient : torch.Tensor
        float32, bfloat16 or float16 tensor on any device.
    dst, delta, group, tag, async_op, options
        As for :func:`send_activation`.

    Returns
    -------
    Work or None
        Work if `async_op`.

    Raises
    ------
    ArgumentError, SpecError, EngineError, PeerError
        As for :func:`send_activation`.

    Examples
    --------
    >>> from codec.torch.pipelining import recv_gradient, send_gradient
    >>> delta, gradient = codec.ActivationDelta(), torch.randn(4, 100)
    >>> if torch.distributed.get_rank() == 1:
    ...     send_gradient(gradient, 0, delta=delta)
    >>> if torch.distributed.get_world_size() > 1 and torch.distributed.get_rank() == 0:
    ...     recv_gradient(gradient, 1, delta=delta)
    """
    _check(gradient, delta)
    message = delta.encode_gradient(on_host(gradient), options=options)
    return send(message, dst, group=group, tag=tag, async_op=async_op, options=options)


def recv_gradient(
    out: torch.Tensor,
    src: int,
    *,
    delta: ActivationDelta,
    group: Any = None,
    tag: int = 0,
    options: CallOptions | None = None,
) -> None:
    """Receive the gradient of activations from the next stage.

    Provisional: may change in any version.

    Parameters
    ----------
    out, src, delta, group, tag, options
        As for :func:`recv_activation`.

    Raises
    ------
    ArgumentError, EngineError, FrameError, StateError
        As for :meth:`codec.ActivationDelta.decode_gradient`.
    PeerError
        As for :func:`codec.torch.recv`; or the gradient contains NaN or Inf.

    Examples
    --------
    See :func:`send_gradient`.
    """
    _check(out, delta)
    message = recv(src, group=group, tag=tag, max_nbytes=delta.bound(out.shape, out.dtype), options=options)
    write(out, lambda t: delta.decode_gradient(message, out=t, options=options))


def _check(tensor: object, delta: object) -> None:
    """Raise ArgumentError unless `tensor` is a torch tensor and `delta` an ActivationDelta."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"activations and gradients must be torch tensors, got {shown(tensor)}")
    if not isinstance(delta, ActivationDelta):
        raise ArgumentError(f"delta must be a codec.ActivationDelta, got {shown(delta)}")
