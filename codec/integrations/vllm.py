# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The framework is not installed where types are checked: its classes are unknown.
"""Weight transfer engine for vLLM, registered as ``codec`` by an entry point of the group ``vllm.general_plugins``.

Provisional: may change in any version.

``vllm serve MODEL --weight-transfer-config '{"backend": "codec"}'`` selects this engine for the workers; the trainer's
engine is in :mod:`codec.integrations.vllm_trainer`. Each worker stores a copy of the weights in host memory, or all
workers of a machine share one in a folder. Updates are applied to the copy, from which workers load whole tensors into
vLLM. So every dtype is supported.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from codec.integrations.adapter_folders import version_path
from codec.integrations.peft import AdapterReceiver
from codec.integrations.weights import worker_receiver
from codec.weight_sync.pulling import pull
from codec.weight_sync.receiver import WeightReceiver
from codec.weight_sync.store.source import read_update
from codec.weight_sync.updates.identity import Identity
from codec.weight_sync.updates.listing import Listed
from codec.weight_sync.updates.update import Update

__all__ = ["CodecInitInfo", "CodecUpdateInfo", "CodecWeightTransferEngine", "register"]


def register() -> None:
    """Register the engines of worker and trainer with vLLM. A second call changes nothing."""
    with suppress(ValueError):  # already registered
        WeightTransferEngineFactory.register_engine("codec", __name__, "CodecWeightTransferEngine")
    with suppress(ValueError):
        trainer = ("codec.integrations.vllm_trainer", "CodecTrainerWeightTransferEngine")
        WeightTransferTrainerFactory.register_engine("codec", *trainer)


@dataclass
class CodecInitInfo(base.WeightTransferInitInfo):
    """Location of the trainer's updates, and of the weights of workers.

    The workers of each machine share the weights in `folder`, on a disk of the machine. None: each worker stores them
    in its memory.
    """

    source: str
    folder: str | None = None


@dataclass
class CodecUpdateInfo(base.WeightTransferUpdateInfo):
    """Entry of an update in the store, which workers check (phase "stage") or load (phase "load").

    In the phase "adapters", workers write the LoRA adapters of the update to their disks; `adapters` has the ``source``
    of the adapters, the ``folder`` of the workers, and how many older versions to ``keep`` there.
    """

    phase: str
    update: dict[str, Any]
    adapters: dict[str, Any] | None = None


class CodecWeightTransferEngine(base.WeightTransferEngine[CodecInitInfo, CodecUpdateInfo]):
    """Engine of a vLLM worker. If an update fails, the worker keeps serving its old weights."""

    init_info_cls = CodecInitInfo
    update_info_cls = CodecUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._receiver: WeightReceiver | None = None
        self._source = ""
        self._adapters: AdapterReceiver | None = None

    def init_transfer_engine(self, init_info: CodecInitInfo) -> None:
        """Open the copy of the weights. A copy that is open already, as after a trainer restart, stays open."""
        self._source = init_info.source
        if self._receiver is None:
            self._receiver = worker_receiver(init_info.folder)

    def start_weight_update(self) -> None:
        """Do nothing: :meth:`receive_weights` prepares the layers after it has checked the update."""

    def finish_weight_update(self) -> None:
        """Do nothing: :meth:`receive_weights` has committed the update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check or load the update that `update_info` describes, and wait for the device."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: CodecUpdateInfo) -> None:
        """Check the update if its phase is "stage"; load and commit it if the phase is "load"."""
        if update_info.adapters is not None:
            self._write_adapters(Listed.read(update_info.update).head.after, **update_info.adapters)
            return
        receiver = self._receiver
        if receiver is None:
            raise RuntimeError("the weight transfer is not initialized: call init_weight_transfer_engine first")
        one = Listed.read(update_info.update)
        if update_info.phase == "stage":
            if one.head.before is not None and not one.head.before.matches(receiver.identity):
                pull(receiver, self._source)
            receiver.stage_next([one], lambda one: read_update(self._source, one, key=receiver.key))
        elif receiver.staged is None or receiver.staged.head != one.head:
            raise RuntimeError(f"the update to version {one.head.version} was not staged: send it again")
        else:
            self._load_staged(receiver, receiver.staged)

    def _write_adapters(self, identity: Identity, source: str, folder: str, keep: int) -> None:
        """Write the adapters of a version, which the server then loads by its call ``load_lora_adapter``."""
        if self._adapters is None or self._adapters.folder != Path(folder):
            self._adapters = AdapterReceiver(folder)
        self._adapters.keep = keep
        self._adapters.pull(source)
        if not version_path(Path(folder), identity).exists():
            raise RuntimeError(
                f"version {identity.version} of the adapters is not the last one in {source}: send it again"
            )

    def _load_staged(self, receiver: WeightReceiver, update: Update) -> None:
        names, like = list(update.tensors if update.base is None else receiver.kinds), torch.empty(0)
        if not self._drop_cpu_kernels():
            names = whole_groups(names, {*update.tensors, *receiver.unloaded})
        try:
            self._load(receiver.updated(names, like=like))
        except BaseException:
            receiver.discard()
            if receiver.version is not None:
                self._drop_cpu_kernels()
                receiver.reload(self._load, like=like)
            raise
        receiver.commit()

    def _drop_cpu_kernels(self) -> bool:
        """Remove the MoE kernels of a CPU model, so that vLLM rebuilds them; return True if there were any.

        On CPUs, vLLM packs expert weights only while it builds the kernel. To rebuild the kernels, all layers must be
        reloaded.
        """
        if self.device.type != "cpu":
            return False
        methods: list[Any] = [getattr(layer, "quant_method", None) for layer in self.model.modules()]
        packed = [method for method in methods if getattr(method, "moe_kernel", None) is not None]
        for method in packed:
            method.moe_kernel = None
        return bool(packed)

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load whole layers. If only some weights of a layer are loaded, vLLM leaves its other weights undefined."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        try:
            with disable_mtp_completeness_check():
                self.model.load_weights(tensors)
        finally:
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Release the weights in host memory."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = self._adapters = None


def whole_groups(names: list[str], changed: set[str]) -> list[str]:
    """Return all tensor names of each group, such as a decoder layer, that contains a name in `changed`."""
    return [name for group in base.layerwise_groups(names) if changed.intersection(group) for name in group]
