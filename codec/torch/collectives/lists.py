"""Collectives over lists of tensors, for the backend `codec`. All tensors of a list are sent in one collective."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch

from codec import ArgumentError, CallOptions
from codec._options import settings_of
from codec.specs import Spec, require_feedback
from codec.tensors.segments import pack, segments
from codec.torch.group.communicator import Communicator, start
from codec.torch.group.work import Work
from codec.torch.reduction.arguments import check_dense, check_output, publish, reduction_of
from codec.torch.reduction.execution import algorithm_of, run, run_all_reduce
from codec.torch.reduction.host import Reduction, Values
from codec.torch.reduction.table import GATHER, REDUCE_SCATTER, check_request
from codec.torch.transport.collective import Collective

Tensors = Sequence[torch.Tensor]


def all_reduce(tensors: Tensors, spec: Spec, *, group: Any, op: Any, stream: int, options: CallOptions) -> Work:
    """Reduce tensors of one dtype over all ranks, in place. After an error, no tensor is changed."""
    settings = settings_of(options)
    requested = algorithm_of(settings)

    async def work(comm: Communicator, collective: Collective) -> Tensors:
        def prepare() -> Reduction:
            for t in tensors:
                check_output(t, tensors[0].dtype, t.numel(), "a tensor")
            flat = torch.cat([t.detach().reshape(-1) for t in tensors])
            require_feedback(
                spec, "reduce lists of tensors with another codec, or use codec.torch.all_reduce(feedback=)"
            )
            r = reduction_of(flat, spec, op, stream, segments=pack(segments(tensors)), settings=settings)
            check_request(requested, r.spec, r.op, feedback=False)
            return r

        await run_all_reduce(comm, collective, requested, prepare, lambda result, r: _store_each(result, r, tensors))
        return tensors

    return _begin("all_reduce", work, group)


def reduce_scatter(outputs: Tensors, inputs: Tensors, spec: Spec, *, group: Any, op: Any, stream: int) -> Work:
    """Reduce tensors of one dtype over all ranks; rank i receives the i-th part of each result."""
    settings = settings_of(None)

    async def work(comm: Communicator, collective: Collective) -> Tensors:
        size = comm.channel.size

        def prepare() -> Reduction:
            _check_pairs(inputs, outputs)
            for t, part in zip(inputs, outputs, strict=True):
                check_dense(t)
                check_output(part, inputs[0].dtype, t.numel() // size)
                if t.numel() % size:
                    raise ArgumentError(
                        f"the number of values must be a multiple of the number of ranks, {size}, got {t.numel()}"
                    )
            flat = torch.cat([t.detach().reshape(size, -1) for t in inputs], 1)
            require_feedback(spec, "reduce lists of tensors with another codec")
            return reduction_of(flat, spec, op, stream, settings=settings)

        await run(comm, collective, REDUCE_SCATTER, prepare, lambda result, r: _store_each(result, r, outputs))
        return outputs

    return _begin("reduce_scatter", work, group)


def all_gather(outputs: Tensors, inputs: Tensors, spec: Spec, *, group: Any, stream: int) -> Work:
    """Gather tensors: output i is the concatenation of input i of all ranks, in rank order."""
    settings = settings_of(None)

    async def work(comm: Communicator, collective: Collective) -> Tensors:
        def prepare() -> Reduction:
            _check_pairs(inputs, outputs)
            for t, everyones in zip(inputs, outputs, strict=True):
                check_output(everyones, inputs[0].dtype, t.numel() * comm.channel.size)
            return _joined(inputs, spec, stream, settings)

        def store(result: Values, r: Reduction) -> None:
            rows, begin = result.reshape(-1, r.n), 0
            for t, everyones in zip(inputs, outputs, strict=True):
                publish(rows[:, begin : begin + t.numel()], r, everyones)
                begin += t.numel()

        await run(comm, collective, GATHER, prepare, store)
        return outputs

    return _begin("all_gather", work, group)


def all_gather_list(outputs: Tensors, tensor: torch.Tensor, spec: Spec, *, group: Any, stream: int) -> Work:
    """Gather one tensor from each rank: output i is the tensor of rank i."""
    settings = settings_of(None)

    async def work(comm: Communicator, collective: Collective) -> Tensors:
        def prepare() -> Reduction:
            if len(outputs) != comm.channel.size:
                raise ArgumentError(
                    f"outputs must have one tensor for each of the {comm.channel.size} ranks, got {len(outputs)}"
                )
            for theirs in outputs:
                check_output(theirs, tensor.dtype, tensor.numel())
            return _joined([tensor], spec, stream, settings)

        await run(comm, collective, GATHER, prepare, lambda result, r: _store_each(result, r, outputs))
        return outputs

    return _begin("all_gather", work, group)


def _joined(tensors: Tensors, spec: Spec, stream: int, settings: CallOptions) -> Reduction:
    for t in tensors:
        check_dense(t)
    flat = tensors[0] if len(tensors) == 1 else torch.cat([t.detach().reshape(-1) for t in tensors])
    return reduction_of(flat, spec, "sum", stream, settings=settings)


def _check_pairs(inputs: Tensors, outputs: Tensors) -> None:
    if len(inputs) != len(outputs):
        raise ArgumentError(f"outputs must have as many tensors as inputs, {len(inputs)}, got {len(outputs)}")


def _store_each(result: Values, r: Reduction, tensors: Tensors) -> None:
    """Store consecutive parts of a result in tensors."""
    begin = 0
    for t in tensors:
        publish(result[begin : begin + t.numel()], r, t)
        begin += t.numel()


def _begin(name: str, work: Callable[[Communicator, Collective], Awaitable[Tensors]], group: Any) -> Work:
    """Run work(comm, collective) in the thread of the group; return its handle."""
    started = start(name, group, None, True, work)
    assert isinstance(started, Work)
    return started
