# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The framework is not installed where types are checked: its classes are unknown.
"""Trainer side of the weight transfer engine ``codec`` for vLLM.

Provisional: may change in any version.

On every rank of the trainer, create the engine with
``WeightTransferTrainerFactory.trainer_init(CodecTrainerInitInfo(folder, rank=rank), client=client, source=source)``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource

from codec.errors import ArgumentError
from codec.integrations.weights import synchronize, synchronize_shards
from codec.weight_sync import Publisher
from codec.weight_sync.updates.shards import Shard

__all__ = ["CodecTrainerInitInfo", "CodecTrainerWeightTransferEngine"]


@dataclass
class CodecTrainerInitInfo(TrainerInitInfo):
    """Folder of the updates, or URL of one in a bucket, and the address to serve a folder on.

    Workers on other machines need `host`, or must share the folder's disk, or read the bucket. The trainer stores its
    copy of the weights in `base`; the workers of each machine share one in `worker_folder`, on a disk of the machine.
    None: trainer and each worker store a copy in memory. `token`, `tls` and `sign` are as in
    :class:`codec.weight_sync.Publisher`; workers get theirs by environment variables.

    With `shards` and vLLM 0.33 or later, each rank sends the shards that it holds, if torch.distributed has several
    ranks and the source implements ``iter_local()``. `host` is then an address of the rank's own machine, and the port
    is `port` + rank. False: rank 0 gathers each tensor and sends all weights.
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
    shards: bool = True


class CodecTrainerWeightTransferEngine(TrainerWeightTransferEngine[CodecTrainerInitInfo]):
    """Engine of one trainer rank. Rank 0 makes the server's workers load the updates that it or all ranks publish."""

    init_info_cls = CodecTrainerInitInfo
    _publisher: Publisher | None = None
    _rank: int | None = None  # rank of this process if all ranks send their shards

    @classmethod
    def trainer_init(
        cls, init_info: CodecTrainerInitInfo, *, client: Any, source: "WeightSource | None" = None
    ) -> "CodecTrainerWeightTransferEngine":
        """Create the engine. Rank 0 also sends the location of the updates to the workers."""
        if source is None:
            raise ArgumentError("the codec weight transfer needs source=, a WeightSource such as ModuleSource(model)")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        given = {name: getattr(init_info, name) for name in ("host", "port", "base", "token", "tls", "sign")}
        if init_info.shards and _sends_shards(source):
            engine._rank = init_info.rank
            given["group"] = _trainers(init_info.rank)
        else:
            _check_source(source)
        if engine.is_sender or engine._rank is not None:
            publisher = engine._publisher = Publisher(init_info.folder, **given)
            if engine.is_sender:
                info = {"source": publisher.source, "folder": init_info.worker_folder}
                client.init_weight_transfer_engine(info)
        return engine

    def send_weights(self) -> None:
        """Send the weights of the source as an update: workers check it, then load it. All ranks must call this."""
        assert self.source is not None
        if self._publisher is not None and self._rank is not None:
            client = self.client if self.is_sender else None
            synchronize_shards(self._publisher, client, _LocalShards(self.source, self._rank))
            return
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


class _LocalShards:
    """Shards that ``iter_local()`` of a source yields on this rank; read by the publisher, which reports errors."""

    def __init__(self, source: Any, rank: int) -> None:
        self._source, self._rank = source, rank

    def state_dict(self) -> dict[Shard, Any]:
        """Return the shards by their place in the whole tensors."""
        metadata = {meta.name: meta for meta in self._source.metadata}
        shards: dict[Shard, Any] = {}
        for name, local in self._source.iter_local():
            meta = metadata[name]
            offsets, shape = shard_box(meta, self._rank)
            if tuple(local.shape) != shape:
                raise ArgumentError(
                    f"source= has a shard of {name!r} of shape {tuple(local.shape)}, but its metadata says {shape}"
                )
            if local.numel() or not math.prod(meta.shape):
                shards[Shard(name, tuple(meta.shape), offsets)] = local.detach()
        return shards


def shard_box(meta: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and shape of the shard of a parameter that a rank owns, from vLLM's ``ParamMeta``.

    Each axis of the mesh splits its dimension as ``torch.chunk`` does; the axes are applied from the first to the last.
    """
    offsets, shape = [0] * len(meta.shape), list(meta.shape)
    if meta.placements is not None:
        rest = meta.owners.index(rank)
        for k, placement in enumerate(meta.placements):
            inner = math.prod(meta.mesh_shape[k + 1 :])
            coordinate, rest = divmod(rest, inner)
            if (dim := getattr(placement, "dim", None)) is not None:  # Shard; Replicate has no dim
                each = -(-shape[dim] // meta.mesh_shape[k])
                begin = min(coordinate * each, shape[dim])
                offsets[dim] += begin
                shape[dim] = min(each, shape[dim] - begin)
    return tuple(offsets), tuple(shape)


def _sends_shards(source: Any) -> bool:
    """Return True, equally on all ranks, if each rank can send the shards that it holds."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return False
    if not hasattr(source, "implements_iter_local") or not source.implements_iter_local():
        return False
    # iter_local() of a ModuleSource gathers tensors whose layout ParamMeta cannot state: all would be in memory at once
    sizes = {meta.name: math.prod(meta.shape) * meta.dtype.itemsize for meta in source.metadata}
    gathered = [m.name for m in source.metadata if m.owners is not None and len(m.owners) > 1 and m.placements is None]
    return not source.implements_iter_full() or 8 * sum(sizes[name] for name in gathered) <= sum(sizes.values())


def _trainers(rank: int) -> Any:
    """Return the default process group, whose ranks must be those of vLLM's trainer."""
    if torch.distributed.get_rank() != rank:
        raise ArgumentError(
            f"rank={rank} is not the rank in the default process group, {torch.distributed.get_rank()}: pass this one, "
            "or shards=False"
        )
    return torch.distributed.group.WORLD


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
