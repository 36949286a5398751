"""Models whose gradients OneBitAdam averages: a DistributedDataParallel, a module, or parameters without a module."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from codec import ArgumentError, StateError
from codec.torch._compat import leave_replicas_to_hook
from codec.torch.ddp import lifetime
from codec.torch.ddp.policy import names_of
from codec.torch.group.levels import all_ranks, group_of

logger = logging.getLogger("codec.torch")


@dataclass(frozen=True)
class Model:
    """Parameters whose gradients the ranks average."""

    names: Mapping[torch.nn.Parameter, str]
    module: torch.nn.Module  # module whose layers the policy searches for embeddings; empty if there is none
    # DistributedDataParallel that averages in the backward pass; None: step() averages.
    ddp: DistributedDataParallel | None = None
    shards: Any = None  # process group among whose ranks FSDP2 shards the parameters; None: not sharded

    def group(self, group: Any) -> Any:
        """Return the group of an argument; for None, that of the DistributedDataParallel, or of all ranks."""
        ddp: Any = self.ddp  # torch does not type its attributes
        if group is None and ddp is not None:
            return ddp.process_group
        return group_of(group if self.shards is None else _replicas(group, self.shards))

    def take_replicas(self) -> None:
        """If FSDP2 averages gradients over the replicas of this model itself (HSDP), make it leave this to step().

        Raises
        ------
        ArgumentError
            The second dimension of the mesh is not that of replicas, or this version of torch does not support this.
        """
        mesh = None if self.shards is None else cast(Any, next(iter(self.names))).device_mesh
        if mesh is None or mesh.ndim == 1:
            return
        from torch.distributed.fsdp import FSDPModule  # imported here because it takes one second

        if not all([leave_replicas_to_hook(m) for m in self.module.modules() if isinstance(m, FSDPModule)]):
            raise _wrong_mesh(mesh)

    def lacks(self, p: torch.Tensor) -> bool:
        """Return True if a parameter that requires a gradient is missing here, and no DDP averages its gradient."""
        return self.ddp is None and p.requires_grad and p not in self.names

    def extended(self, named: Sequence[tuple[str, torch.Tensor]]) -> "Model":
        """Return a copy of this model that also has its missing parameters, such as those of a new parameter group.

        Raises
        ------
        ArgumentError
            The registered module does not have these parameters, or FSDP2 does not shard them.
        """
        new = [(name, p) for name, p in named if self.lacks(p)]
        own = {cast(torch.Tensor, p): name for name, p in self.module.named_parameters()}
        if own and (others := [name for name, p in new if p not in own]):
            raise ArgumentError(
                f"the registered module lacks parameters of the optimizer: {', '.join(others[:5])}. Register a module "
                "with all parameters of the optimizer"
            )
        if self.shards is not None and (plain := [name for name, p in new if not hasattr(p, "device_mesh")]):
            raise ArgumentError(
                f"FSDP2 does not shard {', '.join(plain[:5])}, whose gradients no rank would average: call fully_shard "
                "on them"
            )
        both = [(name, cast(torch.Tensor, p)) for p, name in self.names.items()]
        return replace(self, names=names_of([*both, *((own.get(p, name), p) for name, p in new)]))


def check_model(model: Any, named: Sequence[tuple[str, torch.Tensor]], group: Any) -> Model:
    """Check the argument of ``register``; return the model.

    Parameters
    ----------
    model : DistributedDataParallel or torch.nn.Module
        The argument, or the return value of torch.compile for it.
    named : sequence of (str, torch.Tensor)
        Names and parameters of the optimizer.
    group : ProcessGroup or None
        Argument ``group=`` of the caller.

    Raises
    ------
    ArgumentError
        `model` is not a module, has parameters that the optimizer lacks, or is sharded in a way that is not supported.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model must be a DistributedDataParallel or a torch.nn.Module, got {type(model).__name__}")
    ddp = model if isinstance(model, DistributedDataParallel) else None
    wrapper: Any = ddp  # torch does not type its attributes
    module = cast(torch.nn.Module, model if ddp is None else wrapper.module)
    ignored: set[str] = set() if ddp is None else wrapper.parameters_to_ignore
    served = {p: name for name, p in module.named_parameters() if name not in ignored}
    mine = {p for _, p in named}
    if lacking := [name for p, name in served.items() if p.requires_grad and p not in mine]:
        raise ArgumentError(
            f"the optimizer lacks parameters of the model: {', '.join(lacking[:5])}. Pass them to OneBitAdam, too"
        )
    if not any(p in mine for p in served):
        raise ArgumentError(
            "the model has none of the optimizer's parameters: register the model whose parameters the optimizer has"
        )
    others = {name: p for name, p in named if p not in served and p.requires_grad}
    if ddp is None:
        names = names_of((name, p) for p, name in served.items() if p in mine and p.requires_grad)
        return Model(names, module, shards=_shard_group(names, group)).extended(list(others.items()))
    _report(others, ddp)
    return Model(names_of((name, p) for p, name in served.items()), module, ddp)


def _shard_group(names: Mapping[torch.nn.Parameter, str], group: Any) -> Any:
    """Return the process group among whose ranks FSDP2 shards the parameters; None if parameters are not sharded.

    Raises
    ------
    ArgumentError
        `group` is not a group of replicas, or parameters are sharded over different meshes.
    """
    meshes = {p: getattr(p, "device_mesh", None) for p in names}
    mesh = next((m for m in meshes.values() if m is not None), None)
    if mesh is None:
        return None
    if mesh.ndim > 2:
        raise _wrong_mesh(mesh)
    if others := [name for p, name in names.items() if meshes[p] != mesh]:
        raise ArgumentError(
            f"FSDP2 does not shard {', '.join(others[:5])} over the mesh of the other parameters, so that gradients "
            "differ between shards: call fully_shard with the same mesh for all, or requires_grad_(False)"
        )
    shards = mesh.get_group(mesh.ndim - 1)
    ranks = dist.get_process_group_ranks(shards)
    replicas = [] if group is None else dist.get_process_group_ranks(all_ranks(_replicas(group, shards)))
    known = mesh.ndim == 1 or replicas == dist.get_process_group_ranks(mesh.get_group(0))
    if replicas and known and len({*ranks} & {*replicas}) < 2:
        return shards
    if len(ranks) == dist.get_world_size():
        raise ArgumentError(
            f"FSDP2 shards this model over all {len(ranks)} ranks, and OneBitAdam averages between its replicas, of "
            'which there is one: shard it within each machine, fully_shard(model, mesh=mesh["shard"]), and pass '
            "register(model, group=mesh); or use torch.optim.AdamW, FsdpReduceScatter(group=mesh) and "
            "FsdpAllGather(group=mesh)"
        )
    raise ArgumentError(
        "FSDP2 shards this model, and OneBitAdam averages between its replicas: pass register(model, group=mesh) with "
        'the mesh of replicas and shards, or group=mesh.get_group("replicate")'
    )


def _wrong_mesh(mesh: DeviceMesh) -> ArgumentError:
    return ArgumentError(
        f"the mesh of the parameters has {mesh.ndim} dimensions, but must have that of shards, or those of replicas "
        "and shards if codec can replace the all-reduce of HSDP in this version of torch: use fully_shard(model, "
        'mesh=mesh["shard"])'
    )


def _replicas(group: Any, shards: Any) -> Any:
    """Return the first level of an argument ``group=`` whose second level are the ranks of a replica's shards."""
    levels: tuple[Any, ...] = ()
    if isinstance(group, DeviceMesh) and group.ndim == 2 and group.get_coordinate() is not None:
        levels = group.get_group(0), group.get_group(1)
    elif isinstance(group, tuple):
        levels = cast(tuple[Any, ...], group)
    if len(levels) != 2 or not isinstance(levels[1], dist.ProcessGroup):
        return cast(Any, group)
    within, ranks = map(dist.get_process_group_ranks, (levels[1], shards))
    return levels[0] if within == ranks else cast(Any, group)


def _report(others: Mapping[str, torch.Tensor], ddp: DistributedDataParallel) -> None:
    """Log a warning about `others`, parameters outside `ddp`, that no other DistributedDataParallel averages either."""
    elsewhere = {p for model in lifetime.models() if model is not ddp for p in model.parameters()}
    if alone := [name for name, p in others.items() if p not in elsewhere]:
        logger.warning(
            "OneBitAdam has %d parameters that no DistributedDataParallel averages, such as %s: this rank steps them "
            "by its own gradients. If these gradients differ between ranks, average them before step().",
            len(alone),
            ", ".join(alone[:5]),
        )


def model_of(named: Sequence[tuple[str, torch.Tensor]]) -> Model:
    """Return the model of an optimizer's named parameters, if no module was registered.

    Raises
    ------
    StateError
        A parameter belongs to a DistributedDataParallel, or FSDP2 shards it.
    """
    if any(hasattr(p, "device_mesh") for _, p in named):
        raise StateError(
            'FSDP2 shards the parameters: call optimizer.register(model, group=mesh.get_group("replicate")) before the '
            "first step"
        )
    averaged = {p for model in lifetime.models() for p in model.parameters()}
    if served := [name for name, p in named if p in averaged]:
        raise StateError(
            f"{len(served)} parameters, such as {served[0]}, belong to a DistributedDataParallel, which averages "
            "gradients itself: call optimizer.register(model) with it before the first step"
        )
    return Model(names_of((name, p) for name, p in named if p.requires_grad), torch.nn.Module())
