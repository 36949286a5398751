# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The framework is not installed where types are checked: its classes are unknown.
"""Trainer side of the weight transfer engine ``codec`` for vLLM.

On every rank of the trainer, create the engine with
``WeightTransferTrainerFactory.trainer_init(CodecTrainerInitInfo(folder, rank=rank), client=client, source=source)``.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource

from codec.errors import ArgumentError
from codec.integrations.weights import synchronize
from codec.weight_sync import Publisher


@dataclass
class CodecTrainerInitInfo(TrainerInitInfo):
    """Folder of the updates, and the address to serve it on.

    Workers on other machines need `host`, or must share the folder's disk. `base` and `worker_folder` are the folders
    in which trainer and workers store their weights; None: they store them in memory.
    """

    backend: ClassVar[str] = "codec"
    folder: str
    host: str | None = None
    port: int = 0
    base: str | None = None
    worker_folder: str | None = None


class CodecTrainerWeightTransferEngine(TrainerWeightTransferEngine[CodecTrainerInitInfo]):
    """Engine of one trainer rank. Rank 0 publishes updates and makes the server's workers load them."""

    init_info_cls = CodecTrainerInitInfo
    _publisher: Publisher | None = None

    @classmethod
    def trainer_init(
        cls, init_info: CodecTrainerInitInfo, *, client: Any, source: WeightSource | None = None
    ) -> "CodecTrainerWeightTransferEngine":
        """Create the engine. Rank 0 also opens the store of updates, and sends its location to the workers."""
        if source is None:
            raise ArgumentError("the codec weight transfer needs source=, a WeightSource such as ModuleSource(model)")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            engine._publisher = Publisher(
                init_info.folder, host=init_info.host, port=init_info.port, base=init_info.base
            )
            info = {"source": engine._publisher.source, "folder": init_info.worker_folder}
            client.init_weight_transfer_engine(info)
        return engine

    def send_weights(self) -> None:
        """Send the weights of the source as an update: workers check it, then load it. All ranks must call this."""
        assert self.source is not None
        if self._publisher is not None:
            synchronize(self._publisher, self.client, self.source)
            return
        for _ in self.source:  # iterating runs the collectives that gather each tensor on rank 0
            pass

    def shutdown(self) -> None:
        """Close the store of updates."""
        if self._publisher is not None:
            self._publisher.close()
