"""Find and check the parameters and buffers of a model that LocalSteps synchronizes, and copies of the parameters.

Copies are entries in the states of optimizers, such as float32 masters of bfloat16 parameters. An optimizer that
computes its steps from such a copy overwrites the parameter with the rounded copy. So whoever sets a parameter must set
the copies, too.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from codec import ArgumentError
from codec.arguments import shown
from codec.optimizers.from_torch import unwrapped
from codec.torch._compat import local
from codec.torch.replicas.holders import is_sharded

Parameters = dict[str, torch.nn.Parameter]
Masters = Mapping[torch.nn.Parameter, Sequence[torch.Tensor]]  # copies by parameter, the most precise one first


def module_of(model: Any) -> torch.nn.Module:
    """Return the module whose parameters are synchronized; the wrapper of ``torch.compile`` is removed.

    Raises
    ------
    ArgumentError
        `model` is not a module, or is a DistributedDataParallel.
    """
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, DistributedDataParallel):
        raise ArgumentError(
            "model must not be a DistributedDataParallel, which averages gradients in every step: pass the module "
            "itself. To average gradients within each site and parameters between sites, pass model.module, and as "
            "group= a DeviceMesh of two dimensions, between sites and within them"
        )
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, got {shown(model)}")
    return model


def optimizers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers of an argument, which is an optimizer or a list of them.

    Wrappers of Accelerate and Lightning are removed.

    Raises
    ------
    ArgumentError
        There is no optimizer, or an item is none, or is there twice.
    """
    given = list(cast(Sequence[Any], optimizer)) if isinstance(optimizer, list | tuple) else [optimizer]
    found = [unwrapped(each) for each in given]
    for each, inner in zip(given, found, strict=True):
        if not isinstance(inner, torch.optim.Optimizer):
            raise ArgumentError(f"optimizer must be a torch.optim.Optimizer, or a list of them, got {shown(each)}")
    if not found or len({id(each) for each in found}) < len(found):
        raise ArgumentError(f"optimizer must name at least one optimizer, and each only once, got {shown(given)}")
    return found


def trainable(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, all_stepped: bool = False
) -> Parameters:
    """Return the parameters that require gradients, by name. Tied parameters appear once, under their first name.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    optimizers : sequence of Optimizer
        Optimizers of the module.
    all_stepped : bool
        True: each of these parameters must be in one of the optimizers.

    Raises
    ------
    ArgumentError
        No parameter requires a gradient, a parameter cannot be synchronized, or the parameters of the optimizers do not
        fit those of the module.
    """
    named = {name: p for name, p in module.named_parameters() if p.requires_grad and p.numel()}
    if not named:
        raise ArgumentError("the model has no parameter that requires a gradient: there is nothing to synchronize")
    for name, p in named.items():
        x = local(p)
        if x.is_complex() or x.layout != torch.strided or x.is_meta:
            raise ArgumentError(
                f"parameter {name!r} must be dense and real, and not on meta, got {x.dtype} of layout {x.layout} on "
                f"{x.device}"
            )
    mine = {p for each in optimizers for p in parameters_of(each) if p.requires_grad}
    if others := [tuple(p.shape) for p in mine - set(module.parameters())]:
        raise ArgumentError(
            f"the optimizer has {len(others)} parameters that the model lacks, such as one of shape {others[0]}, which "
            "would differ between ranks: pass a module with all parameters of the optimizer"
        )
    if not mine & set(named.values()):
        raise ArgumentError(
            "the optimizer has none of the model's parameters that require gradients: pass the optimizer of this model"
        )
    if all_stepped and (left := [name for name, p in named.items() if p not in mine]):
        raise ArgumentError(
            f"the optimizer lacks {len(left)} parameters of the model that require gradients, such as {left[0]!r}, "
            "whose gradients would not be averaged in the warm-up: pass a list of all optimizers of the model, call "
            "requires_grad_(False) for the others, or pass warmup=0"
        )
    return named


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of all groups of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return, by name, the parameters and buffers of a module whose values ranks can send to each other.

    These are dense tensors with memory of their own, or shards of DTensors. Tied parameters appear once.
    """
    every = every_tensor(module).items()
    return {name: local(x).detach() for name, x in every if _has_values(local(x)) and x.numel()}


def every_tensor(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _has_values(x: torch.Tensor) -> bool:
    if x.layout != torch.strided or x.is_meta or x.is_quantized or is_lazy(x):
        return False
    return all(stride or size <= 1 for stride, size in zip(x.stride(), x.shape, strict=True))


def averaged_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are averaged: float32, bfloat16 and float16 buffers in the module's state dict."""
    kinds, saved = (torch.float32, torch.bfloat16, torch.float16), module.state_dict().keys()
    named = {name: b for name, b in module.named_buffers() if name in saved and not is_sharded(b)}
    return {name: b for name, b in named.items() if b.dtype in kinds and b.numel()}


def reshard(module: torch.nn.Module) -> None:
    """Free the whole parameters that FSDP2 has gathered and kept, which later calls would use instead of the shards."""
    if "torch.distributed.fsdp" in sys.modules:  # slow to import
        from torch.distributed.fsdp import FSDPModule

        for m in module.modules():
            if isinstance(m, FSDPModule):
                m.reshard()


def change_of(module: torch.nn.Module, known: Mapping[str, torch.nn.Parameter]) -> str:
    """Return a message about a parameter that was replaced or added since `known` was recorded; "" if there is none."""
    now = dict(module.named_parameters())
    for name, p in known.items():
        if now.get(name) is not p or not p.numel():
            return f"parameter {name!r} was replaced or removed after LocalSteps was created: create a new LocalSteps"
    for name, p in now.items():
        if p.requires_grad and p.numel() and name not in known:
            return (
                f"parameter {name!r} requires a gradient now, but did not when LocalSteps was created: call "
                "local.synchronize(), and create a new LocalSteps"
            )
    return ""


def masters_of(parameters: Iterable[torch.nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> Masters:
    """Return the entries of optimizer states that equal the parameters, rounded to the dtypes of the parameters.

    An entry counts as a copy if it equals the parameter for all parameters that have this entry, and is not zero
    everywhere: a momentum may be zero for a parameter that is zero.
    """
    found: dict[torch.nn.Parameter, list[torch.Tensor]] = {}
    some = list(parameters)
    for optimizer in optimizers:
        entries: dict[str, list[tuple[torch.nn.Parameter, torch.Tensor]]] = {}
        for p in some:
            for key, x in optimizer.state.get(p, {}).items():
                if isinstance(x, torch.Tensor) and x.shape == p.shape:
                    entries.setdefault(str(key), []).append((p, local(x)))
        for pairs in entries.values():
            if all(_is_copy(x, local(p)) for p, x in pairs) and any(bool(local(p).any()) for p, _ in pairs):
                for p, x in pairs:
                    found.setdefault(p, []).append(x.detach())
    return {p: sorted(copies, key=lambda x: torch.finfo(x.dtype).eps) for p, copies in found.items()}


def _is_copy(x: torch.Tensor, p: torch.Tensor) -> bool:
    """Return True if a tensor with the shape of a parameter has its values, in a dtype of at least its precision."""
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided and not x.is_meta
    if (
        not plain
        or x.data_ptr() == p.data_ptr()
        or not x.dtype.is_floating_point
        or torch.finfo(x.dtype).eps > torch.finfo(p.dtype).eps
    ):
        return False
    return torch.equal(x.detach().to(p.dtype).to(p.device), p.detach())
