"""States of codec.torch.Feedback for checkpoints: entries, checks, and conversion to another number of ranks."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from codec import StateError
from codec.arguments import shown, whole
from codec.stateful import ErrorFeedback
from codec.stateful.checkpoint import ROLES
from codec.stateful.schema import Schema, mapping, number, one_of
from codec.torch import _compat

UNKNOWN = -1  # rank and world size of residuals that belong to no group yet
PLACE = dict.fromkeys(("rank", "world_size"), number(UNKNOWN, 1 << 30))  # fields with the rank, and number of ranks
FEEDBACK = Schema(
    "Feedback", {**PLACE, "op": one_of("", "mean", "sum"), **dict.fromkeys(ROLES, mapping())}, signed=True
)


def of_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the NumPy arrays of a state by tensors, so that ``torch.load(weights_only=True)`` accepts it."""
    return {name: _compat.from_numpy(cast(Any, x)) if isinstance(x, np.ndarray) else x for name, x in state.items()}


def save(rank: int, world_size: int, op: str, residuals: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state; `residuals` are the state dicts of both roles."""
    return FEEDBACK.save({"rank": rank, "world_size": world_size, "op": op, **residuals})


def check_place(entries: Mapping[str, Any]) -> None:
    """Raise StateError unless the fields PLACE are those of a rank, or both unknown."""
    rank, world_size = entries["rank"], entries["world_size"]
    if not 0 <= rank < world_size and (rank, world_size) != (UNKNOWN, UNKNOWN):
        raise StateError(f"the state is damaged: it names rank {rank} of {world_size} ranks")


def parse(state: Any) -> tuple[int, int, str, dict[str, Any]]:
    """Return rank, number of ranks, op and residuals of a state; raise StateError if it is no state of a Feedback."""
    entries = FEEDBACK.read(state)
    check_place(entries)
    return entries["rank"], entries["world_size"], entries["op"], {role: entries[role] for role in ROLES}


def check_order(places: Sequence[tuple[int, int]]) -> None:
    """Raise StateError unless the ranks of states are those of all ranks, in the order of ranks, or unknown."""
    for i, (rank, size) in enumerate(places):
        if rank != UNKNOWN and (rank, size) != (i, len(places)):
            raise StateError(
                f"item {i} of the {len(places)} states is of rank {rank} of {size}: pass the states of all ranks, in "
                "the order of ranks"
            )


def reshard(states: Any, world_size: int) -> list[dict[str, Any]]:
    """Return states for `world_size` ranks; see :meth:`codec.torch.Feedback.reshard`."""
    world_size = whole("world_size", world_size, 1, 1 << 20)
    if not isinstance(states, Sequence) or isinstance(states, str | bytes) or not states:
        raise StateError(
            f"states must be a list of the states of all ranks, in the order of ranks, got {shown(cast(Any, states))}"
        )
    found = [parse(state) for state in cast(Sequence[Any], states)]
    ops = {op for _, _, op, _ in found if op}
    if len(ops) > 1:
        raise StateError(f"the states must have the same op, got {' and '.join(sorted(ops))}")
    check_order([each[:2] for each in found])
    op = ops.pop() if ops else ""
    how: Any = {"op": op or "mean"}
    parts = [ErrorFeedback.reshard([p[role] for *_, p in found], world_size, **how) for role in ROLES]
    return [
        save(rank, world_size, op, {role: of_tensors(p[rank]) for role, p in zip(ROLES, parts, strict=True)})
        for rank in range(world_size)
    ]
