"""Models whose gradients an optimizer averages: a DistributedDataParallel, a module, or parameters alone."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from codec import ArgumentError, StateError
from codec.torch.ddp import lifetime
from codec.torch.ddp.policy import names_of
from codec.torch.group.communicator import key_of

logger = logging.getLogger("codec.torch")


@dataclass(frozen=True)
class Model:
    """Parameters whose gradients the ranks average."""

    names: Mapping[torch.nn.Parameter, str]
    module: torch.nn.Module  # module whose layers the policy knows; an empty one if they are unknown
    ddp: DistributedDataParallel | None = None  # calls hooks in backward(); None: step() averages
    shards: Any = None  # ranks among which FSDP2 shards the parameters; None: they are whole

    def group(self, group: Any) -> Any:
        """Return the given ranks; None: those of the DistributedDataParallel, or all."""
        ddp: Any = self.ddp  # torch does not type its attributes
        return key_of(group) if group is not None or ddp is None else ddp.process_group

    def lacks(self, p: torch.Tensor) -> bool:
        """Return True if step() would not average the gradient of a parameter, but the model has no DDP that does."""
        return self.ddp is None and p.requires_grad and p not in self.names

    def extended(self, named: Sequence[tuple[str, torch.Tensor]]) -> "Model":
        """Return the model with those parameters of an optimizer that it lacks, such as of a new parameter group.

        Raises
        ------
        ArgumentError
            The registered module does not have them.
        """
        new = [(name, p) for name, p in named if self.lacks(p)]
        own = {cast(torch.Tensor, p): name for name, p in self.module.named_parameters()}
        if own and (others := [name for name, p in new if p not in own]):
            raise ArgumentError(
                f"the registered module lacks parameters of the optimizer: {', '.join(others[:5])}; register a module "
                "that has them all"
            )
        if self.shards is not None and (plain := [name for name, p in new if not hasattr(p, "device_mesh")]):
            raise ArgumentError(f"FSDP2 does not shard {', '.join(plain[:5])}: no rank would average its gradient")
        both = [(name, cast(torch.Tensor, p)) for p, name in self.names.items()]
        return replace(self, names=names_of([*both, *((own.get(p, name), p) for name, p in new)]))


def check_model(model: Any, named: Sequence[tuple[str, torch.Tensor]], group: Any) -> Model:
    """Check the argument of ``register``; return the model.

    Parameters
    ----------
    model : DistributedDataParallel or torch.nn.Module
        The argument, maybe inside of what torch.compile returned.
    named : sequence of (str, torch.Tensor)
        Parameters of the optimizer.
    group : ProcessGroup or None
        Ranks that the caller has given.

    Raises
    ------
    ArgumentError
        It is no model, has parameters that the optimizer lacks, or is sharded in a way that is not supported.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"register needs a DistributedDataParallel or a module, got {type(model).__name__}")
    ddp = model if isinstance(model, DistributedDataParallel) else None
    wrapper: Any = ddp  # torch does not type its attributes
    module = cast(torch.nn.Module, model if ddp is None else wrapper.module)
    ignored: set[str] = set() if ddp is None else wrapper.parameters_to_ignore
    served = {p: name for name, p in module.named_parameters() if name not in ignored}
    mine = {p for _, p in named}
    if lacking := [name for p, name in served.items() if p.requires_grad and p not in mine]:
        raise ArgumentError(f"the optimizer lacks parameters of the model: {', '.join(lacking[:5])}")
    if not any(p in mine for p in served):
        raise ArgumentError("the model has none of the optimizer's parameters")
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
        `group` does not consist of replicas, or parameters are sharded over different meshes.
    """
    meshes = {p: getattr(p, "device_mesh", None) for p in names}
    mesh = next((m for m in meshes.values() if m is not None), None)
    if mesh is None:
        return None
    if mesh.ndim != 1:
        raise ArgumentError(
            f"the parameters have a mesh of {mesh.ndim} dimensions, but OneBitAdam supports a mesh of shards only: "
            'use fully_shard(model, mesh=mesh["shard"])'
        )
    if others := [name for p, name in names.items() if meshes[p] != mesh]:
        raise ArgumentError(
            f"FSDP2 does not shard {', '.join(others[:5])} over the mesh of the other parameters, so that gradients "
            "differ between shards: call fully_shard with the same mesh for all, or requires_grad_(False)"
        )
    shards = mesh.get_group()
    if group is None or len({*dist.get_process_group_ranks(shards)} & {*dist.get_process_group_ranks(group)}) > 1:
        raise ArgumentError(
            "FSDP2 shards this model, and OneBitAdam averages between its replicas: pass "
            'register(model, group=mesh.get_group("replicate")). With one replica, use torch.optim.AdamW and '
            "codec.torch.ReduceScatter"
        )
    return shards


def _report(others: Mapping[str, torch.Tensor], ddp: DistributedDataParallel) -> None:
    """Log the parameters of an optimizer that neither its DistributedDataParallel nor another one averages."""
    elsewhere = {p for model in lifetime.models() if model is not ddp for p in model.parameters()}
    if alone := [name for name, p in others.items() if p not in elsewhere]:
        logger.warning(
            "OneBitAdam has %d parameters that no DistributedDataParallel averages, such as %s: this rank steps them "
            "by its own gradients. If these differ between ranks, average them before step().",
            len(alone),
            ", ".join(alone[:5]),
        )


def model_of(named: Sequence[tuple[str, torch.Tensor]]) -> Model:
    """Return a model of named parameters alone, for which no module was registered.

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
