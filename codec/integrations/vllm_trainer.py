# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The framework is not installed where types are checked: its classes are unknown.
"""Trainer's side of the weight transfer engine ``codec`` of vLLM.

``WeightTransferTrainerFactory.trainer_init(CodecTrainerInitInfo(folder, rank=rank), client=client, source=source)``
makes it, on every rank of the trainer.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource

from codec.errors import ArgumentError
from codec.integrations.weights import synchronize
from codec.weight_sync import Publisher


@dataclass
class CodecTrainerInitInfo(TrainerInitInfo):
    """Folder of the updates, with the address to serve it on; workers on other machines need `host`, or a shared disk.

    `base` and `worker_folder` are folders for the weights of trainer and workers; None: they are kept in memory.
    """

    backend: ClassVar[str] = "codec"
    folder: str
    host: str | None = None
    port: int = 0
    base: str | None = None
    worker_folder: str | None = None


class CodecTrainerWeightTransferEngine(TrainerWeightTransferEngine[CodecTrainerInitInfo]):
    """Engine of a trainer's rank. Rank 0 publishes updates and drives the server."""

    init_info_cls = CodecTrainerInitInfo
    _publisher: Publisher | None = None

    @classmethod
    def trainer_init(
        cls, init_info: CodecTrainerInitInfo, *, client: Any, source: WeightSource | None = None
    ) -> "CodecTrainerWeightTransferEngine":
        """Open the store, and send its location to the workers."""
        if source is None:
            raise ArgumentError("the codec weight transfer needs a WeightSource: source=ModuleSource(model)")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            engine._publisher = Publisher(
                init_info.folder, host=init_info.host, port=init_info.port, base=init_info.base
            )
            info = {"source": engine._publisher.source, "folder": init_info.worker_folder}
            client.init_weight_transfer_engine(info)
        return engine

    def send_weights(self) -> None:
        """Send the weights of the source as an update, in two phases. All ranks call this."""
        assert self.source is not None
        if self._publisher is not None:
            synchronize(self._publisher, self.client, self.source)
            return
        for _ in self.source:  # takes part in the collectives that gather each tensor
            pass

    def shutdown(self) -> None:
        """Close the store."""
        if self._publisher is not None:
            self._publisher.close()
