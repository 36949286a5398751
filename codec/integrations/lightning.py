"""Compressed gradients with Lightning.

Provisional: may change in any version.
"""

from collections.abc import Mapping
from typing import Any

from codec.integrations.attach import Given, WithHook, attach, hook_of, host, restore, state_of
from codec.specs import Lossless

__all__ = ["GradientCompression"]

_Callback: Any = host("lightning.pytorch", "pytorch_lightning").Callback


class GradientCompression(WithHook, _Callback):
    """Callback that compresses the gradients of a Trainer with ``strategy="ddp"``.

    The hook is registered when training begins. Checkpoints of the trainer contain the hook states of all ranks, which
    ``ckpt_path=`` restores, also if the number of ranks has changed. As without compression,
    ``accumulate_grad_batches`` sends gradients only in the last batch of an optimizer step, and ``gradient_clip_val``
    applies to the mean gradient over all ranks.

    Parameters
    ----------
    spec : Spec, str or Hook
        Codec, name of a preset, or hook that :func:`codec.torch.ddp_hook` returned. Default: lossless.
    **how
        Keyword arguments of :func:`codec.torch.ddp_hook`. Defaults: `optimizer` is a list of the trainer's optimizers;
        `grad_scaler` is the trainer's scaler with ``precision="16-mixed"``.

    Raises
    ------
    ArgumentError, SpecError
        Raised when training begins: the strategy does not wrap the model in a DistributedDataParallel. Also the errors
        of :func:`codec.torch.ddp_hook`.

    Examples
    --------
    >>> compression = codec.integrations.lightning.GradientCompression("small")
    >>> trainer = lightning.Trainer(strategy="ddp", callbacks=[compression])  # doctest: +SKIP
    >>> trainer.fit(module)  # doctest: +SKIP
    >>> print(compression.hook.stats())  # doctest: +SKIP
    """

    def __init__(self, spec: Given = Lossless(), **how: Any) -> None:  # noqa: B008 - immutable
        self._given: Given = spec
        self._how = how
        self._saved: Mapping[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Register the hook, and restore its state if the trainer has loaded a checkpoint."""
        if self._hook is None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            self._hook = hook_of(self._given, self._how, trainer.optimizers, scaler)
        attach(self._hook, trainer.strategy.model, trainer.world_size)
        if self._saved is not None:
            restore(self._hook, self._saved)
            self._saved = None

    def state_dict(self) -> dict[str, Any]:
        """Return the hook states of all ranks; all ranks must call this."""
        return state_of(self._hook)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Store a state, which is loaded into the hook when training begins."""
        self._saved = state_dict
