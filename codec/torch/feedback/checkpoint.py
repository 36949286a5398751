"""States of codec.torch.Feedback for checkpoints: entries, checks, and conversion to another number of ranks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

import codec
from codec import StateError
from codec.arguments import shown, whole
from codec.stateful import ErrorFeedback
from codec.stateful.checkpoint import VERSION, opened, plain
from codec.torch import _compat
from codec.torch.network.version import hash64

ROLES = ("worker", "server")
UNKNOWN = -1  # rank and world size of residuals that belong to no group yet
DIGEST = "digest"
_KEYS = frozenset({"version", "rank", "world_size", "op", *ROLES, DIGEST})


def of_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the NumPy arrays of a state by tensors, so that ``torch.load(weights_only=True)`` accepts it."""
    return {name: _compat.from_numpy(cast(Any, x)) if isinstance(x, np.ndarray) else x for name, x in state.items()}


def head(rank: int, world_size: int, op: str) -> dict[str, Any]:
    """Return the entries of a state, except for the residuals."""
    return {"version": VERSION, "rank": rank, "world_size": world_size, "op": op}


def signed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with a digest of all its entries, which :func:`check_complete` compares.

    Tools such as torch.distributed.checkpoint may load only some of a state's tensors, or those of several ranks.
    """
    plain_state = {name: value for name, value in state.items() if name != DIGEST}
    return plain_state | {DIGEST: hash64(sorted(_leaves("", plain_state)))}


def check_complete(state: Mapping[str, Any], what: str) -> None:
    """Raise StateError unless a state has exactly the entries and values with which it was saved."""
    if state.get(DIGEST) != signed(state)[DIGEST]:
        raise StateError(
            f"the state of the {what} is incomplete or damaged, or has entries of several ranks, as after "
            f"torch.distributed.checkpoint, which saves entries of equal name once: save codec.torch.per_rank({what}) "
            "with it"
        )


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Return the path of each number, string or array of a nested dict, and a text that identifies its value."""
    if isinstance(value, Mapping):
        for name, each in cast(Mapping[Any, Any], value).items():
            yield from _leaves(f"{path}/{name}", each)
    elif isinstance(value, np.ndarray | torch.Tensor):
        array = cast(Any, value)
        yield path, f"{str(array.dtype).removeprefix('torch.')} {tuple(array.shape)} {codec.digest(array)}"
    else:
        yield path, repr(value)


def parse(state: Any) -> tuple[int, int, str, dict[str, Any]]:
    """Return rank, number of ranks, op and residuals of a state; raise StateError if it is no state of a Feedback."""
    if not isinstance(state, Mapping):
        raise StateError(f"the state of a Feedback must be a dict, got {shown(state)}")
    entries = opened(cast(Mapping[str, Any], state))
    if wrong := sorted(map(str, set(entries) ^ _KEYS)):
        raise StateError(
            f"the state of a Feedback must have the entries {sorted(_KEYS)}, but {wrong[0]!r} is missing or unknown"
        )
    check_complete(entries, "feedback")
    rank, world_size, op = plain(entries, "rank", int), plain(entries, "world_size", int), plain(entries, "op", str)
    known = 0 <= rank < world_size or (rank, world_size) == (UNKNOWN, UNKNOWN)
    if not known or op not in ("", "mean", "sum"):
        raise StateError(
            f"the state of the Feedback is damaged: it names rank {rank} of {world_size} ranks, with op {op!r}"
        )
    return rank, world_size, op, {role: entries[role] for role in ROLES}


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
    for i, (rank, size, _, _) in enumerate(found):
        if rank != UNKNOWN and (rank, size) != (i, len(found)):
            raise StateError(
                f"item {i} of the {len(found)} states is of rank {rank} of {size}: pass the states of all ranks, in "
                "the order of ranks"
            )
    op = ops.pop() if ops else ""
    how: Any = {"op": op or "mean"}
    parts = [ErrorFeedback.reshard([p[role] for *_, p in found], world_size, **how) for role in ROLES]
    return [
        signed(head(rank, world_size, op) | {role: of_tensors(p[rank]) for role, p in zip(ROLES, parts, strict=True)})
        for rank in range(world_size)
    ]
