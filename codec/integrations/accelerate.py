"""Compressed gradients with Hugging Face Accelerate.

Provisional: may change in any version.
"""

from collections.abc import Mapping
from typing import Any

from codec.integrations.attach import Given, attach, hook_of, host, restore, state_of
from codec.specs import Lossless
from codec.torch import Hook

__all__ = ["compress"]

host("accelerate")


class _HookState:
    """State of a hook in Accelerate's checkpoints, which store only the state dict that rank 0 returns."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def state_dict(self) -> dict[str, Any]:
        """Return the hook states of all ranks; all ranks must call this."""
        return state_of(self._hook)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a state dict of all ranks."""
        restore(self._hook, state)


def compress(accelerator: Any, model: Any, spec: Given = Lossless(), **how: Any) -> Hook:  # noqa: B008 - immutable
    """Compress the gradients of a model that ``accelerator.prepare()`` has wrapped.

    Call this after ``prepare()`` and before ``load_state()``. ``save_state()`` then saves the hook states of all
    ranks, and ``load_state()`` restores them, also if the number of ranks has changed. As without compression,
    ``accumulate()`` sends gradients only in the last batch of an optimizer step, and ``clip_grad_norm_()`` clips the
    mean gradient over all ranks.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
        Accelerator that has wrapped the model in a DistributedDataParallel. In a run of one process, the model is not
        wrapped, and the hook is not registered, since no gradients are sent.
    model : torch.nn.Module
        Model that ``accelerator.prepare()`` returned.
    spec : Spec, str or Hook
        Codec, name of a preset, or hook that :func:`codec.torch.ddp_hook` returned. Default: lossless.
    **how
        Keyword arguments of :func:`codec.torch.ddp_hook`. Defaults: `optimizer` is a list of the accelerator's
        optimizers; `grad_scaler` is the accelerator's scaler with ``mixed_precision="fp16"``.

    Returns
    -------
    Hook
        The hook; ``print(hook.stats())`` shows the bytes that it has sent.

    Raises
    ------
    ArgumentError, SpecError
        The model is not a DistributedDataParallel, or already has a communication hook. Also the errors of
        :func:`codec.torch.ddp_hook`.

    Examples
    --------
    >>> accelerator = accelerate.Accelerator(cpu=True)
    >>> net = torch.nn.Linear(64, 64)
    >>> model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    >>> hook = codec.integrations.accelerate.compress(accelerator, model, "small")
    """
    hook = hook_of(spec, how, getattr(accelerator, "_optimizers", ()), accelerator.scaler)
    attach(hook, model, accelerator.num_processes)
    accelerator.register_for_checkpointing(_HookState(hook))
    return hook
