"""Entry ``one_bit`` of a state dict: phase, measured drift, and the states of the hooks of one rank or of all."""

from collections.abc import Mapping
from typing import Any, cast

from codec import StateError
from codec.torch.ddp.hook import Hook
from codec.torch.one_bit_adam.link import SENT, Link
from codec.torch.one_bit_adam.schedule import Kind

KEY = "one_bit"
VERSION = 1


class Saved:
    """Parsed entry of a state dict.

    Parameters
    ----------
    entry : mapping or None
        The entry; None for the state of torch.optim.Adam or AdamW.

    Raises
    ------
    StateError
        It is no such entry.
    """

    def __init__(self, entry: Any) -> None:
        if entry is None:
            self.frozen, self.drift, self.hooks = False, None, dict[Kind, Any]()
            return
        if not isinstance(entry, Mapping):
            raise StateError(f"{KEY!r} of the state is a dict, not {type(entry).__name__}")
        entries = cast(Mapping[str, Any], entry)
        if entries.get("version") != VERSION:
            raise StateError(
                f"{KEY!r} of the state has version {entries.get('version')!r}; this library reads {VERSION}"
            )
        if entries.get("frozen") not in (0, 1) or not isinstance(entries.get("hooks"), Mapping):
            raise StateError(f"{KEY!r} of the state is damaged: it lacks 'frozen' or 'hooks'")
        self.frozen, self.drift = bool(entries["frozen"]), entries.get("drift")
        hooks = cast(Mapping[Any, Any], entries["hooks"])
        if unknown := [kind for kind in hooks if kind not in SENT]:
            raise StateError(f"{KEY!r} of the state has hooks of unknown kinds: {unknown}")
        self.hooks = dict(hooks)


def hook_states(link: Link | None, gather: bool, waiting: Mapping[Kind, Any]) -> dict[Kind, Any]:
    """Return the states of the hooks; those that wait for a link if there is none."""
    if link is None:
        if gather:
            raise StateError("register the model before the states of all ranks are gathered")
        return dict(waiting)
    return {kind: link.hooks[kind].state_dict(gather=gather) for kind in SENT}


def new_hooks(link: Link, saved: Mapping[Kind, Any]) -> dict[Kind, Hook]:
    """Return hooks with saved states, redistributed if they are those of another number of ranks.

    Raises
    ------
    StateError
        A state is damaged, belongs to another rank or another model, or is that of one of another number of ranks.
    """
    hooks = link.new_hooks()
    rank, size = link.group.rank(), link.group.size()
    for kind, state in saved.items():
        hooks[kind].load_state_dict(_state_of(state, rank, size))
    return hooks


def _state_of(state: Any, rank: int, size: int) -> Any:
    """Return the state of a rank's hook, from one that may hold the states of all ranks."""
    if not isinstance(state, Mapping):
        return state  # which the hook refuses
    entries = cast(Mapping[str, Any], state)
    if "ranks" in entries:
        ranks = entries["ranks"]
        others = isinstance(ranks, list) and len(cast(list[Any], ranks)) != size
        return Hook.reshard(entries, size)[rank] if others else entries
    if entries.get("world_size") not in (-1, size):
        raise StateError(
            f"the state is that of one of {entries.get('world_size')} ranks, and there are {size}: save "
            "optimizer.state_dict(gather=True) of all ranks, which can be loaded by any number of ranks"
        )
    return entries
