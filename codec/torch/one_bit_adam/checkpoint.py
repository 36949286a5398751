"""State dicts of OneBitAdam: the layout of torch.optim.Adam, and an entry ``one_bit`` in the first parameter group.

The entry is in a parameter group because torch.distributed.checkpoint does not save other top-level entries. It holds
only integers, strings and bytes, so that the state of a new optimizer can be the template into which a state is loaded.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from codec import StateError
from codec.arguments import shown
from codec.torch._compat import local
from codec.torch.ddp.checkpoint import packed, unpacked
from codec.torch.ddp.hook import Hook
from codec.torch.feedback.checkpoint import signed
from codec.torch.one_bit_adam import parameters
from codec.torch.one_bit_adam.link import SENT, Link
from codec.torch.one_bit_adam.phase import Phase
from codec.torch.one_bit_adam.schedule import Kind

KEY = "one_bit"
VERSION = 1
_RANK = re.compile("rank ([0-9]{1,9}) of ([0-9]{1,9})(?:, shard ([0-9]{1,9}) of ([0-9]{1,9}))?")
Place = tuple[int, int]  # index of a rank's shard, and number of shards
_NUMBERS = ("lr", "eps", "weight_decay")  # entries of a parameter group that are numbers
_LARGEST = 2.0**53  # upper bound of these numbers


@dataclass(frozen=True)
class HookStates:
    """Serialized states of the hooks of some ranks, by rank and shard.

    `size` is the number of ranks over which these hooks average, or 0 if there were no hooks.
    """

    size: int = 0
    ranks: Mapping[tuple[int, Place], bytes] = field(default_factory=dict[tuple[int, Place], bytes])

    def of(self, rank: int, size: int, place: Place) -> Mapping[Kind, Any]:
        """Return the hook states of rank `rank` of `size`, redistributed if they were saved by another number of ranks.

        Raises
        ------
        StateError
            A state is missing or damaged.
        """
        mine = {r: data for (r, its), data in self.ranks.items() if its == place}
        if not mine and self.ranks:
            raise StateError(
                f"the state has no residuals of shard {place[0]} of {place[1]}: it must be loaded with as many shards "
                "as it was saved with"
            )
        if size == self.size and rank in mine:
            return self._unpacked(rank, mine)
        if size == self.size:
            raise StateError(
                f"the state has residuals of {len(mine)} of {self.size} ranks, but none of rank {rank}: load the state "
                "that this rank saved, or one of all ranks, optimizer.state_dict(gather=True). For "
                "torch.distributed.checkpoint, call optimizer.register(model) before state_dict()"
            )
        if len(mine) != self.size:
            raise StateError(
                f"the state is that of one of {self.size} ranks, but the group has {size} ranks: save the state of all "
                "ranks, optimizer.state_dict(gather=True), which any number of ranks can load"
            )
        old = [self._unpacked(r, mine) for r in range(self.size)]
        return {kind: Hook.reshard([states[kind] for states in old], size)[rank] for kind in SENT}

    def _unpacked(self, rank: int, ranks: Mapping[int, bytes]) -> Mapping[Kind, Any]:
        try:
            states = cast(Mapping[Kind, Any], unpacked(ranks[rank]))
        except (StateError, RecursionError, KeyError) as e:
            raise StateError(f"'rank {rank} of {self.size}' of {KEY!r} is damaged: {shown(e)}") from e
        if sorted(states) != sorted(SENT):
            raise StateError(
                f"'rank {rank} of {self.size}' of {KEY!r} must have the states {sorted(SENT)}, got {sorted(states)}"
            )
        return states


def hook_states(link: Link | None, gather: bool, waiting: HookStates) -> HookStates:
    """Return the states of the hooks of this rank, or of all ranks if `gather`; without a link, return `waiting`."""
    if link is None:
        if gather:
            raise StateError(
                "no model is registered, so that there are no ranks: call register(model) before "
                "state_dict(gather=True)"
            )
        return waiting
    rank, size, place = link.group.rank(), link.group.size(), link.shards.place
    if not gather:
        return HookStates(size, {(rank, place): packed({kind: link.hooks[kind].state_dict() for kind in SENT})})
    if place[1] > 1:
        raise StateError(
            "gather=True cannot be used with sharded parameters: save them by torch.distributed.checkpoint"
        )
    gathered = {kind: link.hooks[kind].state_dict(gather=True)["ranks"] for kind in SENT}
    return HookStates(size, {(r, place): packed({kind: gathered[kind][r] for kind in SENT}) for r in range(size)})


def moved(link: Link, group: Any) -> HookStates:
    """Return the states of this rank's hooks, relabeled with its rank in another group."""
    here = {"rank": group.rank(), "world_size": group.size()}
    states = {kind: signed(hook.state_dict() | here) for kind, hook in link.hooks.items()}
    return HookStates(group.size(), {(group.rank(), link.shards.place): packed(states)})


def new_hooks(link: Link, saved: HookStates) -> dict[Kind, Hook]:
    """Create hooks with saved states, which are redistributed if they were saved by another number of ranks.

    Raises
    ------
    StateError
        A state is missing or damaged, or belongs to another rank or another model.
    """
    hooks = link.new_hooks()
    if saved.size:
        states = saved.of(link.group.rank(), link.group.size(), link.shards.place)
        for kind, hook in hooks.items():
            hook.load_state_dict(states[kind])
    return hooks


def _name(rank: int, place: Place, size: int) -> str:
    """Return the key of a rank's hook states in the entry; it is unique among all ranks of a run."""
    shard, shards = place
    return f"rank {rank} of {size}" + (f", shard {shard} of {shards}" if shards > 1 else "")


def with_entry(state: dict[str, Any], phase: Phase, hooks: HookStates) -> dict[str, Any]:
    """Add the entry ``one_bit``, with the optimizer's phase and hook states, to a state of torch.optim.Adam."""
    entry = {"version": VERSION, "steps": phase.steps, "frozen": int(phase.frozen), "drift": phase.drift.state()}
    entry |= {"ranks": hooks.size} | {_name(*which, hooks.size): data for which, data in hooks.ranks.items()}
    first, *others = state["param_groups"]
    return state | {"param_groups": [first | {KEY: entry}, *others]}


class Saved:
    """Parsed and checked state dict of OneBitAdam, or of torch's Adam or AdamW.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer that will load the state.
    state_dict : mapping
        State of OneBitAdam, torch.optim.AdamW or torch.optim.Adam.

    Attributes
    ----------
    adam : dict
        State for torch.optim.Adam's ``load_state_dict``, to which ``variance_step`` of each parameter is added.
    steps : int
        Number of steps.
    frozen : bool
        True if second moments are frozen.
    drift : str or None
        Measurements of the second moments' drift, in JSON.
    hooks : HookStates
        States of the hooks for gradients and momenta, by rank.
    refreshed : bool
        True if all steps have updated the second moments. In 0/1 Adam, only some steps do.

    Raises
    ------
    StateError
        `state_dict` is no such state, or is incomplete.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
        groups, states = _parsed(state_dict)
        numbers = [i for group in groups for i in group["params"]]
        for i, p in zip(numbers, parameters.of(optimizer), strict=False):  # torch checks their number later
            if i in states:
                _check_parameter(i, p, states[i])
        counts = {i: int(state["step"]) for i, state in states.items()}
        entries = [group[KEY] for group in groups if KEY in group]
        taken = max(counts.values(), default=0)
        if not entries and any("variance_step" in state for state in states.values()):
            raise StateError(
                f"the state of OneBitAdam lacks the entry {KEY!r} of the first parameter group, which has the phase "
                "and the residuals: save and load all entries of optimizer.state_dict()"
            )
        entry = _checked_entry(entries[0]) if entries else None
        if entry is None or entry["steps"] < taken:  # torch.optim.AdamW loaded this entry, and then took more steps
            entry = {"steps": taken, "frozen": 0, "ranks": 0}
            states = {i: state | {"variance_step": counts[i]} for i, state in states.items()}
        if lacking := [i for i, state in states.items() if "variance_step" not in state]:
            raise StateError(
                f"variance_step of parameter {lacking[0]} is missing: save and load all entries of "
                "optimizer.state_dict()"
            )
        for group, own in zip(groups, optimizer.param_groups, strict=False):
            if "bias_correction" in own:  # a state of torch.optim.AdamW lacks this option
                group.setdefault("bias_correction", own["bias_correction"])
        self.adam = {"state": states, "param_groups": [{k: g[k] for k in g if k != KEY} for g in groups]}
        self.steps, self.frozen, self.drift = entry["steps"], bool(entry["frozen"]), entry.get("drift")
        self.hooks = _hooks_of(entry)
        self.refreshed = all(state["variance_step"] == counts[i] for i, state in states.items())


def _parsed(state_dict: Any) -> tuple[list[dict[str, Any]], dict[Any, dict[str, Any]]]:
    """Return copies of the groups of a state dict, and of the state of each parameter that has one."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(cast(Any, state_dict)):
        raise StateError(
            f"the state of an optimizer must have 'state' and 'param_groups', got {shown(cast(Any, state_dict))}"
        )
    entries = cast(Mapping[str, Any], state_dict)
    try:
        groups = [dict(group) for group in entries["param_groups"]]
        numbers: list[Any] = [i for group in groups for i in group["params"]]
        given: dict[Any, Any] = {i: entries["state"][i] for i in numbers if i in entries["state"]}
    except (TypeError, AttributeError, ValueError, LookupError, RuntimeError) as e:
        raise StateError(f"the state of an optimizer is damaged: {shown(e)}") from e
    for group in groups:
        _check_group(group)
    for i, state in given.items():
        if not isinstance(state, Mapping):
            raise StateError(f"the state of parameter {i} must be a dict, got {shown(state)}: the state is damaged")
    return groups, {i: dict(state) for i, state in given.items() if state}


def _check_group(group: Mapping[str, Any]) -> None:
    """Raise StateError if an option of a saved group is not supported, or has an invalid value."""
    if on := [name for name in parameters.UNSUPPORTED if not _is_flag(group.get(name), False)]:
        raise StateError(f"the state was saved by an optimizer with {', '.join(on)}, which OneBitAdam does not support")
    for name in ("foreach", "decoupled_weight_decay", "bias_correction"):
        if not _is_flag(group.get(name), False, True):
            raise StateError(f"{name} of a saved group must be True, False or None, got {shown(group.get(name))}")
    betas = group.get("betas")
    if not isinstance(betas, tuple | list) or len(cast(Any, betas)) != 2:
        raise StateError(f"betas of a saved group must be two numbers, got {shown(cast(Any, betas))}")
    values = [(name, group.get(name), _LARGEST) for name in _NUMBERS]
    for name, value, limit in [*values, *(("betas", b, 1.0) for b in cast(Any, betas))]:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < limit:
            raise StateError(f"{name} of a saved group must be a number from 0 to below {limit}, got {shown(value)}")


def _is_flag(value: Any, *values: bool) -> bool:
    """Return True if `value` is None, or is one of the allowed bools, which are the arguments `values`."""
    return value is None or any(value is each for each in values)


def _check_parameter(number: Any, p: torch.Tensor, state: Mapping[str, Any]) -> None:
    """Raise StateError if the saved state of a parameter is damaged, or has other shapes than the parameter."""
    try:
        step = float(state["step"])
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
        step = -1.0
    if not (step >= 0 and step.is_integer() and step < 1 << 48):
        raise StateError(
            f"step of parameter {number} must be a number of steps, got {shown(state.get('step'))}: the state is "
            "damaged"
        )
    updates = state.get("variance_step", 0)
    if type(updates) is not int or not 0 <= updates <= step:
        raise StateError(
            f"variance_step of parameter {number} must be an int from 0 to step, got {shown(updates)}: the state is "
            "damaged"
        )
    for name in ("exp_avg", "exp_avg_sq"):
        x = state.get(name)
        if not isinstance(x, torch.Tensor) or x.shape != p.shape:
            found = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise StateError(
                f"{name} of parameter {number} must have the shape of the parameter, {tuple(p.shape)}, got {found}"
            )
        if local(x).shape != local(p).shape:
            raise StateError(
                f"{name} of parameter {number} must be sharded as the parameter is: load it by "
                "torch.distributed.checkpoint"
            )


def _checked_entry(entry: Any) -> Mapping[str, Any]:
    """Return the entry ``one_bit``; raise StateError if its version or numbers are invalid."""
    if not isinstance(entry, Mapping):
        raise StateError(f"{KEY!r} of the state must be a dict, got {type(entry).__name__}")
    entries = cast(Mapping[str, Any], entry)
    if type(entries.get("version")) is not int or entries["version"] != VERSION:
        raise StateError(
            f"{KEY!r} of the state has version {entries.get('version')!r}, but this library reads version {VERSION}"
        )
    for name, limit in (("steps", 1 << 48), ("frozen", 2), ("ranks", 1 << 30)):
        value = entries.get(name)
        if type(value) is not int or not 0 <= value < limit:
            raise StateError(f"{name!r} in {KEY!r} of the state is out of range, {shown(value)}: the state is damaged")
    return entries


def _hooks_of(entry: Mapping[str, Any]) -> HookStates:
    """Return the states of hooks in an entry ``one_bit``."""
    found: dict[tuple[int, Place], bytes] = {}
    for name, data in entry.items():
        match = _RANK.fullmatch(str(name))
        if match and int(match[2]) == entry["ranks"]:
            if not isinstance(data, bytes):
                raise StateError(f"{name!r} in {KEY!r} of the state must be bytes, got {type(data).__name__}")
            found[int(match[1]), (int(match[3] or 0), int(match[4] or 1))] = data
    return HookStates(entry["ranks"], found)
