"""Find and check the parameters and buffers of a model that LocalSteps synchronizes."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from codec import ArgumentError
from codec.arguments import shown
from codec.optimizers.from_torch import unwrapped

Parameters = dict[str, torch.nn.Parameter]


def parts_of(flat: torch.Tensor, sizes: Iterable[int]) -> list[torch.Tensor]:
    """Split a flat tensor into views of the given numbers of values."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return [flat[begin:end] for begin, end in itertools.pairwise(ends)]


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
            "itself. To average gradients within each host and parameters between hosts, pass model.module, and as "
            "group= one rank of each group of DistributedDataParallel"
        )
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, got {shown(model)}")
    return model


def optimizer_of(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer, without wrappers of Accelerate or Lightning; raise ArgumentError if there is none."""
    inner = unwrapped(optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer must be a torch.optim.Optimizer, got {shown(optimizer)}")
    return inner


def trainable(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Parameters:
    """Return the parameters that require gradients, by name. Tied parameters appear once, under their first name.

    Raises
    ------
    ArgumentError
        No parameter requires a gradient, a parameter cannot be synchronized, or the optimizer has parameters that the
        module does not have.
    """
    named = {name: p for name, p in module.named_parameters() if p.requires_grad and p.numel()}
    if not named:
        raise ArgumentError("the model has no parameter that requires a gradient: there is nothing to synchronize")
    for name, p in named.items():
        if any(kind.__name__ == "DTensor" for kind in type(p).__mro__):
            raise ArgumentError(
                f"parameter {name!r} is sharded (DTensor), but LocalSteps needs whole parameters on each rank"
            )
        if p.is_complex() or p.layout != torch.strided or p.is_meta:
            raise ArgumentError(
                f"parameter {name!r} must be dense and real, and not on meta, got {p.dtype} of layout {p.layout} on "
                f"{p.device}"
            )
    mine = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if others := [tuple(p.shape) for p in mine - set(module.parameters())]:
        raise ArgumentError(
            f"the optimizer has {len(others)} parameters that the model lacks, such as one of shape {others[0]}, which "
            "would differ between ranks: pass a module with all parameters of the optimizer"
        )
    if not mine & set(named.values()):
        raise ArgumentError(
            "the optimizer has none of the model's parameters that require gradients: pass the optimizer of this model"
        )
    return named


def averaged_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are averaged: float32, bfloat16 and float16 buffers in the module's state dict."""
    kinds, saved = (torch.float32, torch.bfloat16, torch.float16), module.state_dict().keys()
    return {name: b for name, b in module.named_buffers() if name in saved and b.dtype in kinds and b.numel()}


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
