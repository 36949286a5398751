# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The framework is not installed where types are checked: its classes are unknown.
"""Checkpoint engine for verl in which every rank of the actor sends its shards, and no rank gathers weights.

Provisional: may change in any version.

The settings ``checkpoint_engine.custom_backend_module=codec.integrations.verl_shards`` and
``checkpoint_engine.backend=delta_sharded`` select the engine. Its arguments are in
``checkpoint_engine.engine_kwargs.delta_sharded``. verl passes its training engine, which has the shards, only to a
checkpoint engine of this name; importing this module replaces verl's own one.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # as verl's ShardSpec does
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from codec.errors import ArgumentError
from codec.integrations.verl import CodecCheckpointEngine, given_folder
from codec.weight_sync import Publisher

__all__ = ["CodecShardsCheckpointEngine"]


class CodecShardsCheckpointEngine(CodecCheckpointEngine):
    """Engine on one rank of the actor or on one rollout worker.

    Parameters
    ----------
    bucket_size : int
        Set by verl; not used.
    is_master : bool, optional
        Set by verl on ranks of the actor.
    folder : str, optional
        Folder for the updates; required on ranks of the actor. Without `host`, all ranks and rollout workers share it.
    host : str, optional
        Address on which each rank of the actor serves its part of the updates over HTTP: ``0.0.0.0`` if ranks run on
        several machines.
    base : str, optional
        Folder for the base, which is a copy of the published weights. Default: each rank stores its part in memory.
    worker_folder : str, optional
        As in :class:`codec.integrations.verl.CodecCheckpointEngine`.
    timeout : float
        Maximum time that a rollout worker waits for an update, in seconds.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool | None = None,
        *,
        folder: str | None = None,
        host: str | None = None,
        base: str | None = None,
        worker_folder: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        super().__init__(bucket_size, worker_folder=worker_folder, timeout=timeout)
        if is_master is not None:
            group = torch.distributed.group.WORLD
            self._publisher = Publisher(given_folder(folder, "delta_sharded"), group=group, host=host, base=base)

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Publish the shards of all ranks as an update. `weights` is verl's training engine of this rank."""
        assert self._publisher is not None
        self._publisher.publish(_Shards(weights))


class _Shards:
    """Shards of a training engine of verl; read by the publisher, which reports an error to all ranks."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of this rank, as DTensors where they are sharded, in host memory."""
        shards, _ = self._engine.get_per_tensor_param_shard()
        return {name: _weight(name, values, spec) for name, values, spec in shards}

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """Return the weights of this rank with their names."""
        return self.state_dict().items()


def _weight(name: str, values: torch.Tensor, spec: Any) -> Any:
    """Return a weight from the flat values of a shard and verl's ``ShardSpec``."""
    if spec.to_hf_chunk is not None or spec.place is not None or getattr(spec, "hf_slots", None) is not None:
        raise ArgumentError(
            f"the training engine exports {name!r} in a layout of its own, which is not that of a DTensor: use "
            "custom_backend_module=codec.integrations.verl with backend=codec"
        )
    values, shape = values.detach().cpu(), torch.Size(spec.full_shape)
    if spec.mesh is None:
        return values.view(shape)
    local, _ = compute_local_shape_and_global_offset(shape, spec.mesh, spec.placements)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(values.view(local), spec.mesh, spec.placements, shape=shape, stride=stride)


CheckpointEngineRegistry.register("delta_sharded")(CodecShardsCheckpointEngine)
