"""Compressed gradients with the Trainer of Hugging Face Transformers, and packed files in ``from_pretrained``.

Provisional: may change in any version.

Once this module is imported, ``from_pretrained`` of transformers reads packed model files (``codec pack``) as well as
.safetensors files, whole or sharded, tensor by tensor. The weights are bit-identical. Weights that are offloaded to
disk must be unpacked.
"""

import importlib
import logging
from pathlib import Path
from typing import Any

import torch

from codec.integrations import safetensors
from codec.integrations.attach import Given, WithHook, attach, hook_of, host, restore, state_of, wrapper_of
from codec.specs import Lossless

__all__ = ["CompressionCallback"]

_TrainerCallback: Any = host("transformers").TrainerCallback
_FILE = "codec.pt"  # name of the file for hook states in the folder of a checkpoint

logger = logging.getLogger("codec.torch")


class CompressionCallback(WithHook, _TrainerCallback):
    """Callback that compresses the gradients of a Trainer that runs several processes.

    The hook is registered when training begins. Its states on all ranks are saved to a file ``codec.pt`` in each
    checkpoint folder; ``train(resume_from_checkpoint=)`` restores them, also if the number of ranks has changed. As
    without compression, ``gradient_accumulation_steps`` sends gradients only in the last batch of an optimizer step,
    and ``max_grad_norm`` applies to the mean gradient over all ranks.

    Parameters
    ----------
    spec : Spec, str or Hook
        Codec, name of a preset, or hook that :func:`codec.torch.ddp_hook` returned. Default: lossless.
    resume : str or path, optional
        Folder of the checkpoint that is passed to ``train(resume_from_checkpoint=)``. Default: the folder
        ``checkpoint-STEP`` in ``output_dir``. Set it for any other folder: the Trainer does not report it to callbacks.
    **how
        Keyword arguments of :func:`codec.torch.ddp_hook`. Default: `optimizer` is that of the Trainer.

    Raises
    ------
    ArgumentError, SpecError
        Raised when training begins: the model is not wrapped in a DistributedDataParallel. Also the errors of
        :func:`codec.torch.ddp_hook`.

    Examples
    --------
    >>> compression = codec.integrations.transformers.CompressionCallback("small")
    >>> trainer = transformers.Trainer(model, args, callbacks=[compression])  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    >>> print(compression.hook.stats())  # doctest: +SKIP
    """

    _train = "trainer.train()"

    def __init__(self, spec: Given = Lossless(), *, resume: Any = None, **how: Any) -> None:  # noqa: B008 - immutable
        self._given: Given = spec
        self._how, self._resume = how, resume

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Register the hook, and restore its state if the Trainer resumes."""
        if self._hook is None:
            optimizer = kwargs.get("optimizer")
            self._hook = hook_of(self._given, self._how, [] if optimizer is None else [optimizer])
        attached = attach(self._hook, wrapper_of(kwargs["model"]), args.world_size)
        if attached and state.global_step:
            folder = self._resume or Path(args.output_dir) / f"checkpoint-{state.global_step}"
            file = Path(folder) / _FILE
            restore(self._hook, torch.load(file, map_location="cpu", weights_only=True) if file.exists() else {})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the hook states of all ranks to the folder of a checkpoint."""
        saved = state_of(self._hook)  # all ranks must call state_of(); one rank saves the result
        if saved and args.should_save:
            torch.save(saved, Path(args.output_dir) / f"checkpoint-{state.global_step}" / _FILE)


def _read_packed_files() -> None:
    """Let the module of transformers that loads weights open packed files with this library."""
    loading: Any = importlib.import_module("transformers.modeling_utils")
    open_plain: Any = loading.safe_open
    load_plain: Any = getattr(loading, "_safe_load_bytes", None)  # since transformers 5

    def open_any(filename: Any, framework: str, device: Any = "cpu", **how: Any) -> Any:
        if safetensors.is_packed(filename):
            return safetensors.safe_open(filename, framework, device)
        return open_plain(filename, framework=framework, device=device, **how)

    def load_any(data: bytes) -> Any:
        return safetensors.load(data) if safetensors.is_packed(data) else load_plain(data)

    loading.safe_open = open_any
    if load_plain is not None:
        loading._safe_load_bytes = load_any


_read_packed_files()
