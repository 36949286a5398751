"""Compressed all-gather of FSDP2's parameters."""

from typing import Any

import torch
import torch.distributed as dist

from codec import CallOptions
from codec.specs import Lossless, Preset, Spec
from codec.torch import _compat
from codec.torch.fsdp.base import ModuleCollective, modules_of
from codec.torch.fsdp.layout import parameter_segments
from codec.torch.fsdp.machines import Machines
from codec.torch.group.communicator import Communicator
from codec.torch.reduction.arguments import NAMES, check_output, check_sizes, publish, reduction_of
from codec.torch.transport.collective import Collective
from codec.torch.transport.levels import Levels


class FsdpAllGather(ModuleCollective):
    """Compressed all-gather of FSDP2's parameters: ranks exchange frames.

    Parameters
    ----------
    spec : Spec or str
        Codec, or name of a preset, for the parameters. Default: lossless. A lossy codec changes the parameters that the
        forward and backward passes use, equally on all ranks. The shards that the optimizer updates stay exact.
    group, options
        As for :class:`ReduceScatter`. In two levels, each machine sends the shards of its ranks once to every other
        machine, as frames; the shards are sent uncompressed within machines. With P ranks a machine,
        ``fully_shard(reshard_after_forward=P)`` makes the backward pass gather within machines only.

    Notes
    -----
    If :meth:`register` was used, values that share a scale of a lossy codec are in the same row of a shard.

    Examples
    --------
    >>> model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(100, 100))
    >>> parameters = codec.torch.FsdpAllGather().register(model)
    >>> y = model(torch.ones(8, 100))  # FSDP2 of one rank needs no collectives
    >>> parameters.stats().frame_collectives
    0
    """

    def __init__(
        self,
        spec: Spec | Preset = Lossless(),  # noqa: B008 - immutable
        *,
        group: Any = None,
        options: CallOptions | None = None,
    ) -> None:
        super().__init__(spec, group, options)

    def register(self, model: torch.nn.Module) -> "FsdpAllGather":
        """Make all FSDP2 modules in `model` gather their parameters with this object. Return this object."""
        for module in modules_of(model).values():
            module.set_custom_all_gather(_ModuleAllGather(self, module))
        return self

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Gather a tensor, with the arguments of ``dist.all_gather_single``; FSDP2 calls this."""
        return self.all_gather(None, output_tensor, input_tensor, group, async_op)

    def all_gather(
        self, module: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool
    ) -> dist.Work | None:
        """Gather the parameters of `module`; None if the module is not known."""
        if input_tensor.dtype not in NAMES or self._stays_in_machine(group):
            self._count_plain()
            return _compat.all_gather_single(output_tensor, input_tensor, group, async_op)

        group = self._in_levels(group)

        async def work(comm: Communicator, collective: Collective, stream: int) -> None:
            check_sizes(output_tensor, comm.channel.size, input_tensor)
            check_output(output_tensor, output_tensor.dtype, output_tensor.numel())
            segments = parameter_segments(module, input_tensor.numel())
            r = reduction_of(input_tensor, self._spec, "sum", stream, segments=segments, settings=self._settings)
            await Machines(comm, collective).all_gather(r, lambda result, r: publish(result, r, output_tensor))

        def copies(levels: Levels) -> int:
            return levels.between.size - 1

        return self._run("all_gather", group, input_tensor, copies, work, output_tensor, async_op)


class _ModuleAllGather:
    """All-gather function of one module, which FSDP2 calls."""

    def __init__(self, comm: FsdpAllGather, module: Any) -> None:
        self.allocate = comm.allocate
        self._comm, self._module = comm, module

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        return self._comm.all_gather(self._module, output_tensor, input_tensor, group, async_op)
