"""State dicts of OneBitAdam: the layout of torch.optim.Adam, and an entry ``one_bit`` in the first parameter group.

The entry is in a parameter group because torch.distributed.checkpoint does not save other top-level entries. It holds
only integers, strings and bytes, so that the state of a new optimizer can be the template into which a state is loaded.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from codec import StateError
from codec.stateful import schema
from codec.torch._compat import local
from codec.torch.ddp.hook import Hook
from codec.torch.feedback.checkpoint import PACKED, packed
from codec.torch.one_bit_adam import parameters
from codec.torch.one_bit_adam.link import SENT, AdamLink
from codec.torch.one_bit_adam.phase import AdamPhase
from codec.torch.one_bit_adam.schedule import Kind

KEY = "one_bit"
_REMEDY = "load a state that optimizer.state_dict() returned"
_RANK = re.compile("rank ([0-9]{1,9}) of ([0-9]{1,9})(?:, shard ([0-9]{1,9}) of ([0-9]{1,9}))?")
Place = tuple[int, int]  # index of a rank's shard, and number of shards

ONE_BIT = schema.Schema(
    "OneBitAdam",
    {
        "steps": schema.STEPS,
        "frozen": schema.number(0, 1),
        "drift": schema.optional(schema.in_json(schema.items(schema.row(schema.STEPS, schema.plain(float))))),
        "ranks": schema.number(0, 1 << 30),
    },
    (_RANK, schema.plain(bytes)),
)


def _index(value: Any) -> Any:
    return value if type(value) is str else schema.STEPS.read(value)


_FLAGS = ("foreach", "decoupled_weight_decay", "bias_correction")
_GROUP = {
    "params": schema.items(schema.Field("an int or a str", _index)),
    **dict.fromkeys(parameters.UNSUPPORTED, schema.optional(schema.one_of(None, False))),
    **dict.fromkeys(_FLAGS, schema.optional(schema.one_of(None, False, True))),
    **dict.fromkeys(("lr", "eps", "weight_decay"), schema.real(2.0**53)),
    "betas": schema.row(schema.real(1.0), schema.real(1.0)),
}


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
        states = schema.read_field(f"'rank {rank} of {self.size}' of {KEY!r}", _REMEDY, PACKED, ranks[rank])
        if set(states) != set(SENT):
            raise StateError(
                f"'rank {rank} of {self.size}' of {KEY!r} must have the states {sorted(SENT)}, got "
                f"{sorted(map(str, states))}"
            )
        return states


def hook_states(link: AdamLink | None, gather: bool, waiting: HookStates) -> HookStates:
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


def moved(link: AdamLink, group: Any) -> HookStates:
    """Return the states of this rank's hooks, relabeled with its rank in another group."""
    here = {"rank": group.rank(), "world_size": group.size()}
    states = {kind: schema.signed(hook.state_dict() | here) for kind, hook in link.hooks.items()}
    return HookStates(group.size(), {(group.rank(), link.shards.place): packed(states)})


def new_hooks(link: AdamLink, saved: HookStates) -> dict[Kind, Hook]:
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


def with_entry(state: dict[str, Any], phase: AdamPhase, hooks: HookStates) -> dict[str, Any]:
    """Add the entry ``one_bit``, with the optimizer's phase and hook states, to a state of torch.optim.Adam."""
    entry = {"steps": phase.steps, "frozen": int(phase.frozen), "drift": phase.drift.state()}
    entry |= {"ranks": hooks.size} | {_name(*which, hooks.size): data for which, data in hooks.ranks.items()}
    first, *others = state["param_groups"]
    return state | {"param_groups": [first | {KEY: ONE_BIT.save(entry)}, *others]}


class AdamState:
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
    drift : list of (int, float)
        Measurements of the second moments' drift.
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
                states[i] |= _read_parameter(i, p, states[i])
        counts = {i: int(state["step"]) for i, state in states.items()}
        entries = [group[KEY] for group in groups if KEY in group]
        taken = max(counts.values(), default=0)
        if not entries and any("variance_step" in state for state in states.values()):
            raise StateError(
                f"the state of OneBitAdam lacks the entry {KEY!r} of the first parameter group, which has the phase "
                "and the residuals: save and load all entries of optimizer.state_dict()"
            )
        entry: dict[str, Any] | None = ONE_BIT.read(entries[0]) if entries else None
        if entry is None or entry["steps"] < taken:  # torch.optim.AdamW loaded this entry, and then took more steps
            entry = {"steps": taken, "frozen": 0, "ranks": 0, "drift": None, schema.REST: []}
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
        self.steps, self.frozen = entry["steps"], bool(entry["frozen"])
        self.drift: list[tuple[int, float]] = entry["drift"] or []
        others: list[tuple[re.Match[str], bytes]] = entry[schema.REST]
        found = [(name, data) for name, data in others if int(name[2]) == entry["ranks"]]
        ranks = {(int(r[1]), (int(r[3] or 0), int(r[4] or 1))): data for r, data in found}
        self.hooks = HookStates(entry["ranks"], ranks)
        self.refreshed = all(state["variance_step"] == counts[i] for i, state in states.items())


def _parsed(state_dict: Any) -> tuple[list[dict[str, Any]], dict[Any, dict[str, Any]]]:
    """Return copies of the groups of a state dict, and of the state of each parameter that has one."""
    what = "the state of an optimizer"
    fields = {"state": schema.mapping(), "param_groups": schema.items(schema.mapping())}
    entries = schema.read_fields(what, _REMEDY, fields, schema.read_field(what, _REMEDY, schema.mapping(), state_dict))
    groups: list[dict[str, Any]] = entries["param_groups"]
    for i, group in enumerate(groups):
        group |= {"params": schema.read_fields(f"group {i} of {what}", _REMEDY, _GROUP, group)["params"]}
    numbers = [i for group in groups for i in group["params"] if i in entries["state"]]
    states = schema.read_fields(what, _REMEDY, dict.fromkeys(numbers, schema.mapping()), entries["state"])
    return groups, {i: state for i, state in states.items() if state}


def _read_parameter(index: Any, p: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of variance updates of a parameter, if `state` has it.

    Raises
    ------
    StateError
        The saved state of the parameter is damaged, or has other shapes than the parameter.
    """

    def moment(x: Any) -> torch.Tensor:
        if not isinstance(x, torch.Tensor) or x.shape != p.shape or local(x).shape != local(p).shape:
            raise schema.WrongField
        return x

    def step(x: Any) -> int:
        if not (found := float(x)).is_integer():
            raise schema.WrongField
        return schema.STEPS.read(int(found))

    tensor = schema.Field(f"a tensor of shape {tuple(p.shape)}, sharded as the parameter", moment)
    fields = {"step": schema.Field("a number of steps", step), "variance_step": schema.optional(schema.STEPS)}
    what = f"the state of parameter {index}"
    found = schema.read_fields(what, _REMEDY, fields | {"exp_avg": tensor, "exp_avg_sq": tensor}, state)
    updates = found["variance_step"]
    if updates is not None and updates > found["step"]:
        raise StateError(f"'variance_step' of {what} must be at most 'step', got {updates}: {_REMEDY}")
    return {} if updates is None else {"variance_step": updates}
