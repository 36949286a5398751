"""Compressed gradients with Hugging Face Accelerate."""

from collections.abc import Mapping
from typing import Any

from codec.integrations.attach import Given, attach, hook_of, host, restore, state_of
from codec.specs import Lossless
from codec.torch import Hook

host("accelerate")


class _HookState:
    """State of a hook, for checkpoints of Accelerate, which keep what rank 0 returns."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks."""
        return state_of(self._hook)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's state."""
        restore(self._hook, state)


def compress(accelerator: Any, model: Any, spec: Given = Lossless(), **how: Any) -> Hook:  # noqa: B008 - immutable
    """Compress the gradients of a model that ``accelerator.prepare()`` has wrapped.

    Call this after ``prepare()`` and before ``load_state()``. ``save_state()`` then saves the hook's state of all
    ranks, and ``load_state()`` restores it, also for another number of ranks. ``accumulate()`` sends no gradients
    before the last batch, and ``clip_grad_norm_()`` sees the mean over all ranks, as without compression.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
        Accelerator that has wrapped the model in a DistributedDataParallel, or that runs one process. Then nothing is
        sent, and the hook is not registered.
    model : torch.nn.Module
        Model that ``accelerator.prepare()`` returned.
    spec : Spec, str or Hook
        Codec, or name of a preset; or a hook that :func:`codec.torch.ddp_hook` made. Default: lossless.
    **how
        Keyword arguments of :func:`codec.torch.ddp_hook`. Defaults: `optimizer` is the accelerator's optimizer, if
        there is one; `grad_scaler` is the accelerator's scaler with ``mixed_precision="fp16"``.

    Returns
    -------
    Hook
        The hook; ``print(hook.stats())`` shows what it has sent.

    Raises
    ------
    ArgumentError, SpecError
        The model is no DistributedDataParallel, or has a communication hook already; or as for
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
