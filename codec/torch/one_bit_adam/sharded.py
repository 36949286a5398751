"""Agreements among the ranks that hold the shards of one replica. Each rank sees only its own shards."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from codec import CallOptions, CodecError
from codec.torch.collectives.calls import all_reduce
from codec.torch.group.communicator import close_communicator


class Shards:
    """Ranks among which FSDP2 shards the parameters of a replica. All of them must call the same methods.

    Parameters
    ----------
    group : ProcessGroup or None
        Group of these ranks. None: parameters are not sharded, and methods return this rank's own values.
    options : CallOptions or None
        Timeout of the agreements.
    """

    def __init__(self, group: Any = None, options: CallOptions | None = None) -> None:
        self._group = None if group is None or group.size() == 1 else group
        self._options = options

    @property
    def place(self) -> tuple[int, int]:
        """Index of this rank's shard, and number of shards."""
        return (0, 1) if self._group is None else (self._group.rank(), self._group.size())

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return, for each flag, True if it is True on any of the ranks."""
        if self._group is None or not flags:
            return list(flags)
        votes = torch.tensor(flags, dtype=torch.float32, device="cpu")
        all_reduce(votes, op="max", group=self._group, options=self._options)
        return [bool(vote) for vote in votes]

    def total(self, value: float) -> float:
        """Return the sum of `value` over the ranks; the sum is bit-identical on all of them."""
        if self._group is None:
            return value
        found = torch.tensor([value], dtype=torch.float32, device="cpu")
        all_reduce(found, op="sum", group=self._group, options=self._options)
        return found.item()

    def norm(self, value: float) -> float:
        """Return the Euclidean norm over all shards, given the norm `value` of this rank's shards."""
        return value if self._group is None else math.sqrt(self.total(value * value))

    def confirm(self, succeeded: bool) -> bool:
        """Return True if a step has succeeded on all ranks, each of which averages its shards with other replicas.

        Raises
        ------
        PeerError
            The step has succeeded on this rank, but another rank is lost.
        """
        with suppress(*() if succeeded else (CodecError,)):
            return not self.any([not succeeded])[0]
        return False

    def cancel(self) -> None:
        """Close the connections, because this rank cannot end a step and the others must not wait for it."""
        if self._group is not None:
            close_communicator(self._group, cancel=True)


WHOLE = Shards()
