# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The framework is not installed where types are checked: its classes are unknown.
"""Trainer side of the weight transfer engine ``codec`` for vLLM.

Provisional: may change in any version.

On every rank of the trainer, create the engine with
``WeightTransferTrainerFactory.trainer_init(CodecTrainerInitInfo(folder, rank=rank), client=client, source=source)``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource

from codec.errors import ArgumentError
from codec.integrations.weights import synchronize
from codec.weight_sync import Publisher

__all__ = ["CodecTrainerInitInfo", "CodecTrainerWeightTransferEngine"]


@dataclass
class CodecTrainerInitInfo(TrainerInitInfo):
    """Folder of the updates, or URL of one in a bucket, and the address to serve a folder on.

    Workers on other machines need `host`, or must share the folder's disk, or read the bucket. The trainer stores its
    copy of the weights in `base`; the workers of each machine share one in `worker_folder`, on a disk of the machine.
    None: trainer and each worker store a copy in memory. `token`, `tls` and `sign` are as in
    :class:`codec.weight_sync.Publisher`; workers get theirs by environment variables.
    """

    backend: ClassVar[str] = "codec"
    folder: str
    host: str | None = None
    port: int = 0
    base: str | None = None
    worker_folder: str | None = None
    token: str | None = field(default=None, repr=False)
    tls: Any = None
    sign: Any = field(default=None, repr=False)


class CodecTrainerWeightTransferEngine(TrainerWeightTransferEngine[CodecTrainerInitInfo]):
    """Engine of one trainer rank. Rank 0 publishes updates and makes the server's workers load them."""

    init_info_cls = CodecTrainerInitInfo
    _publisher: Publisher | None = None

    @classmethod
    def trainer_init(
        cls, init_info: CodecTrainerInitInfo, *, client: Any, source: "WeightSource | None" = None
    ) -> "CodecTrainerWeightTransferEngine":
        """Create the engine. Rank 0 also opens the store of updates, and sends its location to the workers."""
        if source is None:
            raise ArgumentError("the codec weight transfer needs source=, a WeightSource such as ModuleSource(model)")
        _check_source(source)
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            given = {name: getattr(init_info, name) for name in ("host", "port", "base", "token", "tls", "sign")}
            engine._publisher = Publisher(init_info.folder, **given)
            info = {"source": engine._publisher.source, "folder": init_info.worker_folder}
            client.init_weight_transfer_engine(info)
        return engine

    def send_weights(self) -> None:
        """Send the weights of the source as an update: workers check it, then load it. All ranks must call this."""
        assert self.source is not None
        weights = full_weights(self.source)
        if self._publisher is not None:
            synchronize(self._publisher, self.client, weights)
            return
        for _ in weights:  # iterating runs the collectives that gather each tensor on rank 0
            pass

    def shutdown(self) -> None:
        """Close the store of updates."""
        if self._publisher is not None:
            self._publisher.close()


def full_weights(source: Any) -> Iterator[tuple[str, Any]]:
    """Return an iterator of the names and full tensors of a source: before vLLM 0.33, sources are iterable."""
    return source.iter_full() if hasattr(source, "iter_full") else iter(source)


def _check_source(source: Any) -> None:
    """Raise ArgumentError, equally on all ranks, unless rank 0 receives the full tensors of all parameters."""
    if not hasattr(source, "iter_full"):  # before vLLM 0.33, all ranks own all parameters
        return
    if not source.implements_iter_full():
        raise ArgumentError(
            f"source= must implement iter_full(), which yields full tensors, but {type(source).__name__} has only "
            "iter_local()"
        )
    missing = [m.name for m in source.metadata if m.owners is not None and 0 not in m.owners]
    if missing:
        raise ArgumentError(
            f"rank 0 sends all weights, but source= has {len(missing)} parameters that rank 0 does not own, the first "
            f"{missing[0]!r}: add rank 0 to the owners of all parameters"
        )
