"""States of DDP hooks for checkpoints: entries, checks, serialization, and conversion to another number of ranks."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from codec import StateError
from codec.arguments import whole
from codec.stateful import schema
from codec.stateful.checkpoint import ROLES
from codec.stateful.ranges import Range, shown
from codec.torch._compat import local
from codec.torch.ddp.buckets import n_values
from codec.torch.feedback.checkpoint import (
    PLACE,
    UNKNOWN,
    WITHIN,
    ResidualOwner,
    check_order,
    place_in,
    resharded,
    unpacked,
)
from codec.torch.group.levels import LeveledGroup

_NAMES = schema.items(schema.plain(str))
_PARTS = (*ROLES, "refresher", "auto")  # states of objects that not all hooks have
HOOK = schema.Schema(
    "Hook",
    {
        **PLACE,
        **WITHIN,
        "steps": schema.STEPS,
        "sparse": schema.in_json(_NAMES),
        "dense": schema.in_json(_NAMES),
        "buckets": schema.in_json(schema.items(_NAMES)),
        "shapes": schema.in_json(schema.items(schema.row(schema.plain(str), schema.items(schema.number(0, 1 << 60))))),
        **dict.fromkeys((*ROLES, "refresher"), schema.optional(schema.mapping())),
        "auto": schema.optional(schema.plain(str)),
    },
    signed=True,
)
_GATHERED = schema.Schema("Hook", {"ranks": schema.items(schema.mapping())})

Shapes = Mapping[str, tuple[int, ...]]  # shapes of parameters, by name


def place_of(group: Any) -> ResidualOwner:
    """Return this rank in a ProcessGroup or LeveledGroup, as owner of residuals."""
    within = group.levels.within.size if isinstance(group, LeveledGroup) else 1
    return ResidualOwner(group.rank(), group.size(), within)


def entries_of(
    place: ResidualOwner,
    steps: int,
    zeros: Mapping[str, bool],
    buckets: Sequence[Sequence[str]],
    shapes: Shapes,
) -> dict[str, Any]:
    """Return the entries that the state of every hook has, with or without residuals.

    Parameters
    ----------
    place : ResidualOwner
        Owner of the state.
    steps : int
        Number of steps that have succeeded.
    zeros : mapping of str to bool
        By parameter name: True if its gradient is mostly zero. Parameters that were not measured yet have no entry.
    buckets : sequence of sequences of str
        Names of the parameters in each bucket of the last step.
    shapes : mapping of str to tuple of int
        Shape of each parameter.
    """
    names = {True: "sparse", False: "dense"}
    lists = {entry: json.dumps(sorted(name for name in zeros if zeros[name] is kind)) for kind, entry in names.items()}
    lists |= {"buckets": json.dumps(buckets), "shapes": json.dumps(list(shapes.items()))}
    return {**place.entries(), "steps": steps, **lists}


def gathered(states: Sequence[bytes]) -> dict[str, Any]:
    """Return the state of all ranks from the states that :func:`packed` has serialized."""
    # A tuple: torch.distributed.checkpoint loads it as a whole, but of a list only entries that exist before.
    return _GATHERED.save({"ranks": tuple(unpacked(each) for each in states)})


class HookState:
    """Parsed and validated state of a hook.

    Parameters
    ----------
    state : mapping
        State of one rank, as ``Hook.state_dict()`` returns it, or of all ranks (``gather=True``).
    rank : int
        Rank whose state to read, if `state` is of all ranks.
    world_size : int
        Required number of ranks, if `state` is of all ranks.

    Raises
    ------
    StateError
        `state` is damaged, or is no state of a hook.
    """

    def __init__(self, state: Any, rank: int, world_size: int) -> None:
        if isinstance(state, Mapping) and "ranks" in state:
            state = _one_of(_GATHERED.read(state)["ranks"], rank, world_size)
        entries = HOOK.read(state)
        self.place, self.steps = place_in(entries), entries["steps"]
        self.zeros = dict.fromkeys(entries["dense"], False) | dict.fromkeys(entries["sparse"], True)
        self.buckets: list[list[str]] = entries["buckets"]
        self.shapes = {name: tuple(shape) for name, shape in entries["shapes"]}
        self.parts: dict[str, Any] = {name: entries[name] for name in _PARTS if entries[name] is not None}

    def check_parts(self, expected: Iterable[str]) -> None:
        """Raise StateError unless `parts` has exactly the `expected` keys, such as ``worker`` or ``refresher``."""
        lacking, extra = sorted(set(expected) - set(self.parts)), sorted(set(map(str, self.parts)) - set(expected))
        if lacking or extra:
            raise StateError(
                f"the state was saved by a hook with other arguments: it lacks {lacking}, and has the unexpected "
                f"{extra}; create the hook with the feedback= and refresher= with which the state was saved"
            )


def check_rank(owner: ResidualOwner, here: ResidualOwner) -> None:
    """Raise StateError if rank or number of ranks of residuals, `owner`, differ from `here`, unless unknown."""
    if UNKNOWN not in (*owner, *here) and owner[:2] != here[:2]:
        raise StateError(
            f"these residuals belong to rank {owner[0]} of {owner[1]}, but this is rank {here[0]} of {here[1]}: load "
            "the state that this rank saved, one of all ranks (state_dict(gather=True)), or one that "
            "Hook.reshard(states, world_size) returned for this number of ranks"
        )


def check_ranges(ranges: Iterable[Range], saved: Shapes, names: Mapping[torch.nn.Parameter, str]) -> None:
    """Raise StateError if residuals belong to parameters that the model lacks, or whose shapes differ.

    Parameters
    ----------
    ranges : iterable of (str, int, int)
        Ranges of parameters that have residuals.
    saved : mapping of str to tuple of int
        Shape that each parameter had when the residuals were saved.
    names : mapping
        Name of each parameter of the model.
    """
    ranges = list(ranges)
    here = {name: p for p, name in names.items()}
    if unknown := sorted({name for name, _, _ in ranges if name not in here}):
        some = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} others" if len(unknown) > 5 else "")
        raise StateError(
            f"the state has residuals of parameters that the model lacks: {some}. Load the state of the same model"
        )
    for r in ranges:
        p, was = here[r[0]], saved.get(r[0], "unknown")
        if was != (shape := tuple(local(p).shape)):
            raise StateError(
                f"the state has a residual of {r[0]} with shape {was}, but this parameter of the model has shape "
                f"{shape}: load the state of the same model, or continue without a state"
            )
        if r[2] > n_values(p):
            raise StateError(f"the state has a residual of {shown(r)}, but {r[0]} has {n_values(p)} values")


def shapes_of(names: Mapping[torch.nn.Parameter, str]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter, or of its shard, by name."""
    return {name: tuple(local(p).shape) for p, name in names.items()}


def reshard(states: Any, world_size: int) -> list[dict[str, Any]]:
    """Return states for `world_size` ranks, whose residuals have the same total effect; see Hook.reshard."""
    world_size = whole("world_size", world_size, 1, 1 << 20)
    if isinstance(states, Mapping) and "ranks" in states:
        states = _GATHERED.read(states)["ranks"]
    if not isinstance(states, Sequence) or not states:
        raise StateError(
            "states must be a list of the states of all ranks, in the order of ranks, or one of state_dict(gather=True)"
        )
    saved = [HookState(state, UNKNOWN, UNKNOWN) for state in cast(Sequence[Any], states)]
    check_order([each.place for each in saved])
    for each in saved:
        each.check_parts(saved[0].parts)
    first = saved[0]
    known = first.steps, first.zeros, first.buckets, first.shapes
    new = [entries_of(ResidualOwner(rank, world_size), *known) | first.parts for rank in range(world_size)]
    roles = set(ROLES) & set(first.parts)
    residuals = resharded([(each.place.within, each.parts) for each in saved], world_size, "mean", roles)
    return [HOOK.save(state | parts) for state, parts in zip(new, residuals, strict=True)]


def _one_of(states: Sequence[Any], rank: int, world_size: int) -> Any:
    """Return the state of `rank` from the states of all ranks."""
    if rank == UNKNOWN:
        raise StateError(
            "the hook is not registered, so that its rank is not known: register it before a state of all ranks is "
            "loaded"
        )
    if len(states) != world_size:
        raise StateError(
            f"the state is of {len(states)} ranks, but the group has {world_size}: call Hook.reshard(state, "
            f"{world_size}), and load the item of this rank"
        )
    return states[rank]
