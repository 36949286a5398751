"""States of codec.torch.Feedback for checkpoints: entries, checks, conversion to another number of ranks, and bytes."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from codec import StateError
from codec.arguments import shown, whole
from codec.readable import count
from codec.stateful import ErrorFeedback, schema
from codec.stateful import checkpoint as residuals
from codec.stateful.checkpoint import ROLES
from codec.stateful.ranges import scaled
from codec.stateful.schema import Schema, mapping, number, one_of, optional
from codec.torch import _compat

UNKNOWN = -1  # rank and world size of residuals that belong to no group yet
PLACE = dict.fromkeys(("rank", "world_size"), number(UNKNOWN, 1 << 30))  # fields with the rank, and number of ranks
# Field with the number of ranks of a machine, over which values are reduced before encoding; default: 1
WITHIN = {"within": optional(number(1, 1 << 30))}
FEEDBACK = Schema(
    "Feedback",
    {**PLACE, **WITHIN, "op": one_of("", "mean", "sum"), **dict.fromkeys(ROLES, mapping())},
    signed=True,
)


class ResidualOwner(NamedTuple):
    """Owner of residuals."""

    rank: int = UNKNOWN
    world_size: int = UNKNOWN
    within: int = 1  # number of ranks of a machine, over which values are reduced before they are encoded

    @property
    def machines(self) -> float:
        """Number of machines, each of which counts equally in a mean; 1 / `within` if ranks are unknown."""
        return max(1, self.world_size) / self.within

    @property
    def levels(self) -> str:
        """Text such as "8 ranks" or "2 x 4 ranks" (machines, and ranks of each)."""
        size = max(1, self.world_size)
        return count(size, "rank") if self.within == 1 else f"{size // self.within} x {self.within} ranks"

    def entries(self) -> dict[str, int]:
        """Return the entries PLACE and WITHIN of a state."""
        return self._asdict()


def of_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the NumPy arrays of a state by tensors, so that ``torch.load(weights_only=True)`` accepts it."""
    return {name: _compat.from_numpy(cast(Any, x)) if isinstance(x, np.ndarray) else x for name, x in state.items()}


def save(place: ResidualOwner, op: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state; `parts` are the state dicts of the residuals of both roles."""
    return FEEDBACK.save({**place.entries(), "op": op, **parts})


def place_in(entries: Mapping[str, Any]) -> ResidualOwner:
    """Return the owner that a state names; raise StateError unless the owner is a rank, or unknown."""
    rank, world_size, within = entries["rank"], entries["world_size"], entries["within"] or 1
    if not 0 <= rank < world_size and (rank, world_size) != (UNKNOWN, UNKNOWN):
        raise StateError(f"the state is damaged: it names rank {rank} of {world_size} ranks")
    return ResidualOwner(rank, world_size, within)


def parse(state: Any) -> tuple[ResidualOwner, str, dict[str, Any]]:
    """Return owner, op and residuals of a state; raise StateError if it is no state of a Feedback."""
    entries = FEEDBACK.read(state)
    return place_in(entries), entries["op"], {role: entries[role] for role in ROLES}


def check_order(places: Sequence[ResidualOwner]) -> None:
    """Raise StateError unless the ranks of states are those of all ranks, in the order of ranks, or unknown."""
    for i, (rank, size, within) in enumerate(places):
        if within != places[0].within:
            raise StateError(
                f"item 0 of the states is of machines with {places[0].within} ranks, but item {i} of machines with "
                f"{within}: pass states that were saved at the same step"
            )
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
    ops = {op for _, op, _ in found if op}
    if len(ops) > 1:
        raise StateError(f"the states must have the same op, got {' and '.join(sorted(ops))}")
    check_order([place for place, _, _ in found])
    op = ops.pop() if ops else ""
    parts = resharded([(place.within, p) for place, _, p in found], world_size, op or "mean", ROLES)
    return [save(ResidualOwner(rank, world_size), op, part) for rank, part in enumerate(parts)]


def resharded(
    old: Sequence[tuple[int, Mapping[str, Any]]], world_size: int, op: Any, roles: Iterable[str]
) -> list[dict[str, Any]]:
    """Return the residuals of each rank of a flat group with the total effect of the given ones.

    Parameters
    ----------
    old : sequence of (int, mapping)
        Number of ranks of a machine, and state dicts of the residuals by role, of each old rank.
    world_size : int
        Number of new ranks.
    op : {"mean", "sum"}
        Reduction of the collectives.
    roles : iterable of str
        Roles of the residuals, the keys of the mappings and of the returned dicts.
    """
    new: list[dict[str, Any]] = [{} for _ in range(world_size)]
    for role in roles:
        # a worker's residual belongs to the mean of a machine, so it counts as often as the machine has ranks
        counts = (role, op) == ("worker", "mean")
        states = [_times(within if counts else 1, parts[role]) for within, parts in old]
        for state, part in zip(new, ErrorFeedback.reshard(states, world_size, op=op), strict=True):
            state[role] = of_tensors(part)
    return new


def _times(factor: int, state: Any) -> Any:
    """Return a state dict of residuals whose values are multiplied by `factor`."""
    if factor == 1:
        return state
    role, store = residuals.load(state)
    return residuals.save(role, scaled(store, factor))


def packed(state: Mapping[str, Any]) -> bytes:
    """Serialize a state of one rank without pickle: the length of a table (8 bytes), the table in JSON, the arrays."""
    table: list[Any] = []
    arrays: list[bytes] = []

    def put(path: list[str], value: Any) -> None:
        if isinstance(value, Mapping):
            for name, each in cast(Mapping[str, Any], value).items():
                put([*path, name], each)
        elif isinstance(value, int | str):
            table.append([path, value])
        else:
            array = np.asarray(value)
            arrays.append(array.tobytes())
            table.append([path, [array.dtype.str, len(array)]])

    put([], state)
    text = json.dumps(table).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *arrays])


def unpacked(data: bytes) -> dict[str, Any]:
    """Return the state that :func:`packed` has serialized.

    Raises
    ------
    StateError
        `data` is no serialized state.
    """
    return schema.read_field("the bytes that another rank has sent", "all ranks must use this library", PACKED, data)


def _unpacked(data: bytes) -> dict[str, Any]:
    state: dict[str, Any] = {}
    at = 8 + int.from_bytes(data[:8], "little")
    for path, value in json.loads(data[8:at]):
        *folders, name = path
        place = state
        for folder in folders:
            place = place.setdefault(folder, {})
        if isinstance(value, list):
            dtype, length = cast(list[Any], value)
            kind, count = np.dtype(dtype), whole("a length", length, 0)
            place[name] = _compat.from_numpy(np.frombuffer(data, kind, count, at).copy())
            at += kind.itemsize * count
        else:
            place[name] = value
    return state


PACKED = schema.Field("a serialized state", _unpacked)
