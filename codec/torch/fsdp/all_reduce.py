"""Compressed all-reduce of FSDP2's gradients between replicas."""

import functools
from typing import Any

import torch
import torch.distributed as dist

from codec import ArgumentError, CallOptions
from codec.specs import Lossless, Preset, Spec
from codec.torch._compat import leave_replicas_to_hook
from codec.torch.feedback.pair import owned_values
from codec.torch.fsdp.base import GradientCollective, modules_of
from codec.torch.fsdp.layout import gradient_segments
from codec.torch.fsdp.passes import Pass
from codec.torch.group.communicator import Communicator
from codec.torch.group.levels import all_ranks
from codec.torch.reduction.arguments import NAMES, OpLike, check_output, op_of, publish, reduction_of
from codec.torch.reduction.execution import algorithm_of, run_all_reduce
from codec.torch.reduction.host import Reduction
from codec.torch.reduction.table import Algorithm, check_request
from codec.torch.transport.collective import Collective
from codec.torch.transport.levels import Levels


class FsdpAllReduce(GradientCollective):
    """Compressed all-reduce of FSDP2's gradients between replicas (HSDP), usually over a slow link.

    After each reduce-scatter, FSDP2 calls this object, which all-reduces this rank's shard over `group`, the ranks with
    the same shard in all replicas. Pass ``fully_shard`` a mesh that has only the sharding dimension, or the mesh of two
    dimensions of HSDP, whose all-reduce this object replaces. All replicas must start with the same parameters.

    Parameters
    ----------
    spec : Spec or str
        Codec, or name of a preset, for the gradients. Default: lossless.
    group : ProcessGroup, DeviceMesh or pair of ProcessGroup
        Ranks that hold the same shard, ``mesh["replicate"]``; in two levels as for :func:`all_reduce`.
    op : {"mean", "avg", "sum"} or ReduceOp
        Reduction over the replicas. FSDP2 averages gradients, so the default is "mean"; use "sum" together with FSDP2's
        ``set_gradient_divide_factor``.
    feedback : bool or float
        Error feedback: the encoding errors of a rank are added to its next gradients. It needs 8 bytes of memory per
        value of this rank's shards. As for :class:`ReduceScatter`, a gradient must have the same number of values in
        each pass. A number below 1, such as 0.95, is the decay, by which residuals are multiplied before they are
        added. TopK needs error feedback.
    options : CallOptions, optional
        ``codec.options(algorithm=, timeout=, engine=, threads=)``, as for :func:`all_reduce`. Options that are not set
        are those of the ``with`` blocks in which this object is created.

    Raises
    ------
    ArgumentError, SpecError
        An argument has an invalid type or value, or `spec`, `op`, `feedback` and the algorithm cannot be combined.

    Notes
    -----
    As for :class:`ReduceScatter`, values that share a scale are in the same row of a shard.

    ``set_requires_all_reduce(False)`` affects only FSDP2's built-in all-reduce. To accumulate gradients without calling
    this object, use ``set_requires_gradient_sync(False)``.

    Examples
    --------
    >>> mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    >>> model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(100, 100), mesh=mesh["shard"])
    >>> replicas = mesh.get_group("replicate")
    >>> between = codec.torch.FsdpAllReduce(codec.Float8(group_size=100), group=replicas).register(model)
    >>> model(torch.ones(8, 100)).sum().backward()
    >>> between.stats().frame_collectives
    1
    """

    def __init__(
        self,
        spec: Spec | Preset = Lossless(),  # noqa: B008 - immutable
        *,
        group: Any,
        op: OpLike = dist.ReduceOp.AVG,
        feedback: bool | float = False,
        options: CallOptions | None = None,
    ) -> None:
        super().__init__(spec, group, feedback, options)
        kind = op_of(op)
        if kind == "max":
            raise ArgumentError(f"op must be a sum or a mean of gradients, got {op}")
        self._algorithm = algorithm_of(self._settings)
        check_request(self._algorithm, self._spec, kind, feedback=bool(feedback))
        self._op = kind

    def register(self, model: torch.nn.Module) -> "FsdpAllReduce":
        """Make all FSDP2 modules in `model` all-reduce their gradients with this object. Return this object.

        Raises
        ------
        ArgumentError
            The model has no FSDP2 module, or `group` has the ranks of the shards.
        """
        from torch.distributed.tensor import DTensor

        modules = modules_of(model)
        mine = set(dist.get_process_group_ranks(all_ranks(self._group)))
        meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
        groups = [group for mesh in meshes for group in mesh.get_all_groups()]
        replicated = len(mine) > 1 and any(set(dist.get_process_group_ranks(group)) == mine for group in groups)
        if replicated and not all([leave_replicas_to_hook(module) for module in modules.values()]):
            raise ArgumentError(
                "FSDP2 itself reduces gradients over the ranks of group=, which hold different shards, or this version "
                "of torch does not let codec replace the all-reduce of HSDP: pass the group of replicas, and "
                'fully_shard(mesh=mesh["shard"])'
            )
        for name, module in modules.items():
            module.set_all_reduce_hook(functools.partial(self.all_reduce, name, module=module))
        self._names = list(modules)
        return self

    def __call__(self, tensor: torch.Tensor) -> None:
        """All-reduce a shard of gradients in place; can be passed to ``set_all_reduce_hook``."""
        self.all_reduce(None, tensor)

    def all_reduce(self, name: str | None, tensor: torch.Tensor, *, module: Any = None) -> None:
        """All-reduce the gradients of a module in place; `name` and `module` are None if they are not known."""
        if tensor.dtype not in NAMES:
            self._count_plain()
            op = dist.ReduceOp.AVG if self._op == "mean" else dist.ReduceOp.SUM
            dist.all_reduce(tensor, op, all_ranks(self._group))  # pyright: ignore[reportUnknownMemberType] - torch's stubs lack types
            return
        now = Pass.current()

        async def work(comm: Communicator, collective: Collective, stream: int) -> None:
            def prepare() -> Reduction:
                segments = gradient_segments(module, tensor.numel(), 1)
                r = reduction_of(tensor, self._spec, self._op, stream, segments=segments, settings=self._settings)
                check_output(tensor, tensor.dtype, tensor.numel(), "the tensor")
                return r

            def feed(r: Reduction, algorithm: Algorithm, window: tuple[int, int]) -> None:
                peers = collective.levels.between
                owned = owned_values(r, algorithm, peers.rank, peers.size)
                self._feed(r, now, name, owned, collective.levels, window[0])

            await run_all_reduce(
                comm, collective, self._algorithm, prepare, lambda result, r: publish(result, r, tensor), feed
            )

        def copies(levels: Levels) -> float:
            return 2 * (levels.between.size - 1) / levels.all.size

        begin = functools.partial(self._run, "all_reduce", self._group, tensor, copies, work, tensor)
        now.run(lambda: begin(False), tensor, self._group)
