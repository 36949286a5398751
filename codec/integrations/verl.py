# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The framework is not installed where types are checked: its classes are unknown.
"""Checkpoint engine ``codec`` for verl: sends weight updates from the actor's rank 0 to the rollout workers.

Provisional: may change in any version.

The setting ``checkpoint_engine.custom_backend_module=codec.integrations.verl`` loads this module, and
``checkpoint_engine.backend=codec`` selects the engine. Its arguments are in ``checkpoint_engine.engine_kwargs.codec``.
With ``codec.integrations.verl_shards`` all ranks of the actor send their shards.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from functools import cached_property
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from codec.errors import StateError
from codec.integrations.weights import worker_receiver
from codec.weight_sync import Publisher
from codec.weight_sync.receiver import WeightReceiver
from codec.weight_sync.store.source import read_head, read_update
from codec.weight_sync.updates.listing import Listed, chain

__all__ = ["CodecCheckpointEngine"]

_POLL = 0.05  # seconds between checks for a new update


class CodecCheckpointEngine(CheckpointEngine):
    """Engine on one rank of the actor or on one rollout worker.

    Parameters
    ----------
    bucket_size : int
        Set by verl; not used.
    is_master : bool
        Set by verl: True on rank 0 of the actor, which publishes updates.
    folder : str, optional
        Folder for the updates, or URL of one in a bucket; required on the master.
    host : str, optional
        Address on which to serve the folder over HTTP. Default: rollout workers read the folder from a shared disk.
    base : str, optional
        Folder for the base on the master, which is a copy of the published weights. Default: it is stored in memory.
    worker_folder : str, optional
        Folder in which the rollout workers of each machine share a copy of the weights, on a disk of the machine.
        Default: each worker stores one in its memory.
    timeout : float
        Maximum time that a rollout worker waits for an update, in seconds.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        folder: str | None = None,
        host: str | None = None,
        base: str | None = None,
        worker_folder: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        self._timeout = timeout
        self._publisher: Publisher | None = None
        if is_master:
            self._publisher = Publisher(given_folder(folder, "codec"), host=host, base=base)
        self._worker_folder = worker_folder
        self._source, self._after = "", -1

    @cached_property
    def _receiver(self) -> WeightReceiver:
        """Receiver of a rollout worker; ranks of the actor open none."""
        return worker_receiver(self._worker_folder)

    def prepare(self) -> dict[str, Any]:
        """Return the location of the store and the last published version on the master, {} on other ranks."""
        if self._publisher is None:
            return {}
        version = self._publisher.version
        return {"source": self._publisher.source, "after": -1 if version is None else version}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the master's metadata from :meth:`prepare`, repeated for all actor and all rollout ranks."""
        master = next(one for one in metadata if one)
        actor, rollouts = ({k: [v] * n for k, v in master.items()} for n in (actor_wg_world_size, rollout_world_size))
        return actor, rollouts

    def init_process_group(self, source: str, after: int) -> None:
        """Store the location of updates, and the last version that is already published."""
        self._source, self._after = source, after

    def finalize(self) -> None:
        """Do nothing: files and weights stay, because the next update needs them."""

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Publish the weights as an update. Every actor rank exhausts `weights`, which may run collectives."""
        rest = iter(weights)
        try:
            if self._publisher is not None:
                self._publisher.publish(rest)
        finally:
            for _ in rest:
                pass

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the tensors that the rollout lacks. The update is committed once the generator is exhausted.

        If it is not, the next call yields these tensors again, with their newest values.
        """
        receiver = self._receiver
        receiver.discard()
        updates = await self._updates()
        while updates:
            if receiver.staged is not None:
                receiver.commit()
            count = receiver.stage_next(updates, lambda one: read_update(self._source, one, key=receiver.key))
            updates = updates[count:]
        if receiver.staged is None:  # the receiver has the last version, but the rollout may lack tensors of it
            for name, tensor in receiver.tensors(sorted(receiver.unloaded), like=torch.empty(0)):
                yield name, tensor
            return
        for name, tensor in receiver.updated(like=torch.empty(0)):
            yield name, tensor
        receiver.commit()

    async def _updates(self) -> list[Listed]:
        """Wait for a new version, and return the updates from this worker's version to the new one."""
        end, key = time.monotonic() + self._timeout, self._receiver.key
        while time.monotonic() < end:
            listing = read_head(self._source, key=key)
            if listing.last is not None and listing.last.version > self._after:
                return chain(listing, self._receiver.identity, newer=key is not None)
            await asyncio.sleep(_POLL)
        raise StateError(
            f"no version after {self._after} was published within {self._timeout} seconds: check the trainer, or raise "
            "timeout="
        )


def given_folder(folder: str | None, backend: str) -> str:
    """Return the folder for updates; raise StateError if it is not set."""
    if folder is None:
        raise StateError(
            f"checkpoint_engine.engine_kwargs.{backend}.folder is not set: it must be the folder for updates"
        )
    return folder


CheckpointEngineRegistry.register("codec")(CodecCheckpointEngine)
