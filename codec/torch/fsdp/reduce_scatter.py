"""Compressed reduce-scatter of FSDP2's gradients."""

import functools
from typing import Any

import torch
import torch.distributed as dist

from codec import CallOptions
from codec.specs import Lossless, Preset, Spec
from codec.torch import _compat
from codec.torch.fsdp.base import GradientCollective, modules_of
from codec.torch.fsdp.layout import gradient_segments
from codec.torch.fsdp.machines import Machines
from codec.torch.fsdp.passes import Pass
from codec.torch.group.communicator import Communicator
from codec.torch.reduction.arguments import NAMES, check_output, check_sizes, publish, reduction_of
from codec.torch.reduction.host import Reduction
from codec.torch.transport.collective import Collective
from codec.torch.transport.levels import Levels


class FsdpReduceScatter(GradientCollective):
    """Compressed reduce-scatter of FSDP2's gradients: ranks exchange frames, and add gradients in rank order.

    Parameters
    ----------
    spec : Spec or str
        Codec, or name of a preset, for the gradients. Default: lossless.
    feedback : bool or float
        Error feedback: the encoding errors of a rank are added to its next gradients. It needs 8 bytes of memory per
        parameter value of the whole model, on each rank. A gradient must have the same number of values in each pass;
        if some parameters get no gradient, call ``set_reduce_scatter_unused_params(True)``. A number below 1, such as
        0.95, is the decay, by which residuals are multiplied before they are added. TopK needs error feedback.
    group : DeviceMesh or pair of ProcessGroup, optional
        Levels of the ranks over which ``fully_shard`` shards the parameters: a mesh of these ranks whose first
        dimension is between machines and whose second is within them, or the groups (between, within). The P ranks of a
        machine, which must be consecutive, then add gradients uncompressed, and only frames of 1/P of them leave a
        rank. Error feedback needs 1/P of the memory. Default: all ranks exchange frames.
    options : CallOptions, optional
        ``codec.options(timeout=, engine=, threads=)``, as for :func:`all_reduce`. Options that are not set are those of
        the ``with`` blocks in which this object is created.

    Raises
    ------
    ArgumentError, SpecError
        An argument has an invalid type or value, or `spec` cannot be used with this `feedback`.

    Notes
    -----
    As in the DDP hook, values that share a scale of a lossy codec are in the same row of a shard. FSDP2 passes
    gradients as flat tensors, so only objects with :meth:`register` know the rows. Rows are also unknown in a pass in
    which a trained parameter of the module gets no gradient. ``Float8()`` then uses one scale per 1,024 values, across
    rows. To avoid this, call ``set_reduce_scatter_unused_params(True)``, or limit the values per scale with
    ``Float8(group_size=64)``.

    If a rank fails, all ranks raise an error, and the residuals stay as they were before that backward pass. Gradients
    of dtypes that codecs do not support are reduced by torch.distributed.

    Examples
    --------
    >>> model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(100, 100))
    >>> gradients = codec.torch.FsdpReduceScatter(codec.Quantize(4), feedback=True).register(model)
    >>> model(torch.ones(8, 100)).sum().backward()  # FSDP2 of one rank needs no collectives
    >>> gradients.stats().frame_collectives
    0
    """

    def __init__(
        self,
        spec: Spec | Preset = Lossless(),  # noqa: B008 - immutable
        *,
        feedback: bool | float = False,
        group: Any = None,
        options: CallOptions | None = None,
    ) -> None:
        super().__init__(spec, group, feedback, options)

    def register(self, model: torch.nn.Module) -> "FsdpReduceScatter":
        """Make all FSDP2 modules in `model` reduce their gradients with this object. Return this object."""
        modules = modules_of(model)
        for name, module in modules.items():
            module.set_custom_reduce_scatter(_ModuleReduceScatter(self, name, module))
        self._names = list(modules)
        return self

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce a tensor, with the arguments of ``dist.reduce_scatter_single``; FSDP2 calls this."""
        return self.reduce_scatter(None, output_tensor, input_tensor, group, op, async_op)

    def reduce_scatter(
        self,
        name: str | None,
        output: torch.Tensor,
        tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool,
        *,
        module: Any = None,
    ) -> dist.Work | None:
        """Reduce-scatter the gradients of a module; `name` and `module` are None if they are not known."""
        if tensor.dtype not in NAMES:
            self._count_plain()
            return _compat.reduce_scatter_single(output, tensor, op, group, async_op)
        if getattr(op, "op", op) == dist.ReduceOp.PREMUL_SUM:
            _, factor = op.__getstate__()  # torch 2.9 exposes the factor only in the pickled state
            tensor, op = tensor * factor, dist.ReduceOp.SUM
        now, group = Pass.current(), self._in_levels(group)

        async def work(comm: Communicator, collective: Collective, stream: int) -> None:
            now.check()
            check_sizes(tensor, comm.channel.size, output)
            machines = Machines(comm, collective)
            whole = reduction_of(tensor, self._spec, op, stream, settings=self._settings)
            check_output(output, output.dtype, output.numel())
            segments = gradient_segments(module, machines.count * output.numel(), machines.count)

            def feed(r: Reduction) -> None:
                self._feed(r, now, name, (0, 0), collective.levels)

            await machines.reduce_scatter(whole, segments, feed, lambda result, r: publish(result, r, output))

        def copies(levels: Levels) -> float:
            return (levels.between.size - 1) / levels.all.size

        begin = functools.partial(self._run, "reduce_scatter", group, tensor, copies, work, output)
        if not async_op:
            now.run(lambda: begin(False), output, group)
            return None
        handle = begin(True)
        # With error feedback, wait now, so that Pass.run catches an error: the pass then fails, and keeps its
        # residuals.
        if handle is not None and self._residuals is not None:
            now.run(handle.wait, output, group)
        return handle


class _ModuleReduceScatter:
    """Reduce-scatter function of one module, which FSDP2 calls."""

    def __init__(self, comm: FsdpReduceScatter, name: str, module: Any) -> None:
        self.allocate = comm.allocate
        self._comm, self._name, self._module = comm, name, module

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        return self._comm.reduce_scatter(
            self._name, output_tensor, input_tensor, group, op, async_op, module=self._module
        )
