# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The framework is not installed where types are checked: its classes are unknown.
"""Checkpoint engine ``codec`` of verl: updates from the actor's rank 0 to the rollouts.

verl loads this module by ``checkpoint_engine.custom_backend_module=codec.integrations.verl``; the setting
``checkpoint_engine.backend=codec`` chooses the engine. ``checkpoint_engine.engine_kwargs.codec`` has its arguments.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from codec.errors import StateError
from codec.weight_sync import Publisher
from codec.weight_sync.receiver import WeightReceiver
from codec.weight_sync.store import Listed, chain, read_head, read_update

_POLL = 0.05  # seconds


@CheckpointEngineRegistry.register("codec")
class CodecCheckpointEngine(CheckpointEngine):
    """Engine of an actor's rank or of a rollout's worker.

    Parameters
    ----------
    bucket_size : int
        Given by verl; not used.
    is_master : bool
        Given by verl: True on rank 0 of the actor, which publishes.
    folder : str, optional
        Folder of the updates, which the master needs.
    host : str, optional
        Address to serve the folder on, over HTTP. Default: rollouts read the folder itself, on a shared disk.
    base : str, optional
        Folder for the master's base. Default: it is kept in memory.
    timeout : float
        Seconds that a rollout waits for an update.
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
        timeout: float = 600.0,
    ) -> None:
        self._timeout = timeout
        self._publisher: Publisher | None = None
        if is_master:
            if folder is None:
                raise StateError("set checkpoint_engine.engine_kwargs.codec.folder, the folder of the updates")
            self._publisher = Publisher(folder, host=host, base=base)
        self._receiver = WeightReceiver()
        self._source, self._after = "", -1

    def prepare(self) -> dict[str, Any]:
        """Return the store and the version that was published last, on the master."""
        if self._publisher is None:
            return {}
        version = self._publisher.version
        return {"source": self._publisher.source, "after": -1 if version is None else version}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Send the metadata that the master has prepared to all workers."""
        master = next(one for one in metadata if one)
        actor, rollouts = ({k: [v] * n for k, v in master.items()} for n in (actor_wg_world_size, rollout_world_size))
        return actor, rollouts

    def init_process_group(self, source: str, after: int) -> None:
        """Keep where updates are, and the version before the next one."""
        self._source, self._after = source, after

    def finalize(self) -> None:
        """Do nothing: files and weights are kept for the next update."""

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Publish the weights as an update. All ranks of the actor read them to their end."""
        rest = iter(weights)
        try:
            if self._publisher is not None:
                self._publisher.publish(rest)
        finally:
            for _ in rest:
                pass

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the tensors that have changed. The update is committed when all were taken."""
        receiver, like = self._receiver, torch.empty(0)
        names: set[str] = set()
        *before, last = await self._updates()
        for one in before:
            update = read_update(self._source, one)
            receiver.apply(update)
            names.update(update.changed)
        update = receiver.stage(read_update(self._source, last))
        names.update(update.changed)
        for name, tensor in receiver.updated([name for name in update.entries if name in names], like=like):
            yield name, tensor
        receiver.commit()

    async def _updates(self) -> list[Listed]:
        """Wait for a new version, and return the updates that lead to it."""
        end = time.monotonic() + self._timeout
        while time.monotonic() < end:
            listed = read_head(self._source)
            if listed and listed[-1].version > self._after:
                return chain(listed, self._receiver.version)
            await asyncio.sleep(_POLL)
        raise StateError(f"no update after version {self._after} was published in {self._timeout} seconds")
