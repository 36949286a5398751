"""Models whose gradients an optimizer averages: a DistributedDataParallel, a module, or parameters alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from codec import ArgumentError, StateError
from codec.torch.ddp import lifetime
from codec.torch.ddp.policy import names_of


@dataclass(frozen=True)
class Model:
    """Parameters whose gradients the ranks average."""

    names: Mapping[torch.nn.Parameter, str]  # of parameters that require gradients
    module: torch.nn.Module  # module whose layers the policy knows; an empty one if they are unknown
    ddp: DistributedDataParallel | None = None  # calls hooks in backward(); None: step() averages

    @property
    def group(self) -> Any:
        """Ranks of the DistributedDataParallel, or all."""
        ddp: Any = self.ddp  # torch does not type its attributes
        return dist.group.WORLD if ddp is None else ddp.process_group


def check_model(model: Any, mine: Mapping[torch.Tensor, int]) -> Model:
    """Check the argument of ``register``; return the model.

    Parameters
    ----------
    model : DistributedDataParallel or torch.nn.Module
        The argument, maybe inside of what torch.compile returned.
    mine : mapping
        Parameters of the optimizer.

    Raises
    ------
    ArgumentError
        It is no model, is sharded by FSDP, or has parameters that the optimizer lacks.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"register needs a DistributedDataParallel or a module, got {type(model).__name__}")
    ddp = model if isinstance(model, DistributedDataParallel) else None
    wrapper: Any = ddp  # torch does not type its attributes
    module = cast(torch.nn.Module, model if ddp is None else wrapper.module)
    named = {p: name for name, p in module.named_parameters() if p.requires_grad}
    if lacking := [name for p, name in named.items() if p not in mine]:
        raise ArgumentError(f"the optimizer lacks parameters of the model: {', '.join(lacking[:5])}")
    if not any(p in mine for p in named):
        raise ArgumentError("the model has none of the optimizer's parameters")
    others = [p for p in mine if p not in named and p.requires_grad]
    if ddp is None and others:
        raise ArgumentError(
            f"the optimizer has {len(others)} parameters that are not the model's: register a module that has them all"
        )
    return Model(names_of((name, p) for p, name in named.items()), module, ddp)


def model_of(named: Sequence[tuple[str, torch.Tensor]]) -> Model:
    """Return a model of named parameters alone, for which no module was registered.

    Raises
    ------
    StateError
        The first parameter belongs to a DistributedDataParallel.
    """
    first = named[0][1]
    if any(p is first for model in lifetime.models() for p in model.parameters()):
        raise StateError(
            "the parameters belong to a DistributedDataParallel, which averages gradients itself: call "
            "optimizer.register(model) with it before the first step"
        )
    return Model(names_of((name, p) for name, p in named if p.requires_grad), torch.nn.Module())
