"""Parse and check the states of LocalSteps in checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from codec import StateError
from codec.arguments import shown
from codec.stateful.checkpoint import plain
from codec.torch.feedback.checkpoint import parse
from codec.torch.feedback.feedback import Feedback
from codec.torch.replicas import residuals

VERSION = 2
_NUMBERS = ("rank", "world_size", "steps", "rounds", "apart", "start", "length")
_PARTS = ("anchors", "residuals", "outer", "bases", "pending")
_PENDING = ["due", "fragment", "mean", "mine"]
_MOST = 1 << 48


@dataclass
class LocalState:
    """Parsed and checked state of LocalSteps."""

    steps: int  # number of optimizer steps so far
    rounds: int  # number of synchronizations so far
    apart: bool  # True if the rank had taken steps since the last synchronization of all parameters
    start: int  # step after which the round of the schedule began
    length: int  # number of steps of this round
    parameters: str  # digest of the parameters to which the state belongs
    anchors: dict[str, torch.Tensor]  # values of the last synchronization, by name of a parameter or its rows
    bases: dict[str, torch.Tensor]  # anchors after the last step of the outer optimizer, if others were set since
    feedback: Feedback | None
    outer: dict[str, Any]  # state of the outer optimizer; {} if there is none
    pending: dict[str, Any]  # synchronization in flight; {} if there is none


def parsed(
    state: Any,
    anchors: Mapping[str, torch.Tensor],
    fragments: Sequence[Sequence[str]],
    feedback: Feedback | None,
    place: tuple[int, int],
) -> LocalState:
    """Parse and check a state of this rank.

    Parameters
    ----------
    state : dict
        Return value of :meth:`LocalSteps.state_dict`.
    anchors : dict of str to tensor
        Current anchors by name. The state must have the same names, shapes and dtypes.
    fragments : sequence of sequence of str
        Names of the anchors of each fragment.
    feedback : Feedback or None
        Current error feedback; the state must have residuals if and only if it is not None. It is not changed.
    place : (int, int)
        Number of this rank, and number of ranks; the state must have the same.

    Raises
    ------
    StateError
        The state is damaged, or belongs to another rank, model or other arguments.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"the state of LocalSteps must be a dict, got {shown(state)}")
    entries = cast(Mapping[str, Any], state)
    expected = {"version", "parameters", *_NUMBERS, *_PARTS}
    if wrong := sorted(map(str, set(entries) ^ expected)):
        raise StateError(
            f"the state of LocalSteps must have the entries {sorted(expected)}, but {wrong[0]!r} is missing or unknown"
        )
    if plain(entries, "version", int) != VERSION:
        raise StateError(f"the state has version {shown(entries['version'])}, but this library reads version {VERSION}")
    numbers = {name: plain(entries, name, int) for name in _NUMBERS}
    if not all(0 <= x < _MOST for x in numbers.values()) or numbers["apart"] > 1:
        raise StateError(f"the state of LocalSteps is damaged: a number is out of range in {shown(numbers)}")
    if (numbers["rank"], numbers["world_size"]) != place:
        raise StateError(
            f"the state is of rank {numbers['rank']} of {numbers['world_size']}, but this is rank {place[0]} of "
            f"{place[1]}: load the state that this rank saved. To continue with another number of ranks, call "
            "synchronize(exact=True) before the model is saved, and create a new LocalSteps for the loaded model"
        )
    for name in _PARTS:
        if not isinstance(entries[name], Mapping):
            raise StateError(f"{name!r} of the state must be a dict, got {shown(entries[name])}")
    return LocalState(
        numbers["steps"],
        numbers["rounds"],
        bool(numbers["apart"]),
        numbers["start"],
        numbers["length"],
        plain(entries, "parameters", str),
        _tensors(entries["anchors"], anchors),
        _tensors(entries["bases"], anchors, "base", partial=True),
        _feedback(entries["residuals"], anchors, feedback, place),
        dict(entries["outer"]),
        _pending(entries["pending"], anchors, fragments),
    )


def check_outer(outer: torch.optim.Optimizer | None, state: Mapping[str, Any]) -> None:
    """Raise StateError unless `state` fits the outer optimizer; without one, `state` must be {}."""
    if outer is None:
        if state:
            raise StateError("the state was saved with an outer optimizer, but LocalSteps has none: pass outer=")
        return
    shapes = [p.shape for group in outer.param_groups for p in group["params"]]
    groups, entries = state.get("param_groups"), state.get("state")
    fits = isinstance(groups, list) and isinstance(entries, Mapping)
    if fits:
        here = [len(group["params"]) for group in outer.param_groups]
        given = [_length(group) for group in cast(list[Any], groups)]
        places = cast(Mapping[Any, Any], entries)
        fits = here == given and all(type(i) is int and 0 <= i < len(shapes) for i in places)
        fits = fits and all(
            isinstance(entry, Mapping) and all(_fits(x, shapes[i]) for x in cast(Mapping[str, Any], entry).values())
            for i, entry in places.items()
        )
    if not fits:
        raise StateError(
            "the state lacks the state of an outer optimizer for these parameters: load a state that was saved with "
            "outer="
        )


def _length(group: Any) -> int:
    """Return the number of parameters in an entry of ``param_groups``; -1 if `group` is not such an entry."""
    params: Any = cast(Mapping[str, Any], group).get("params") if isinstance(group, Mapping) else None
    return len(cast(list[Any], params)) if isinstance(params, list) else -1


def _fits(x: Any, shape: torch.Size) -> bool:
    """Return True if `x` may be an entry in the optimizer state of a parameter with this shape."""
    return not isinstance(x, torch.Tensor) or x.shape == shape or x.numel() == 1


def _tensors(
    given: Mapping[str, Any], expected: Mapping[str, torch.Tensor], what: str = "anchor", *, partial: bool = False
) -> dict[str, torch.Tensor]:
    """Return the tensors of a state; raise StateError unless names, shapes and dtypes are those of `expected`.

    If `partial`, some tensors may be missing.
    """
    if wrong := sorted(map(str, set(given) - set(expected) if partial else set(given) ^ set(expected))):
        raise StateError(
            f"the parameters of the state and of the model, or their fragments, differ: only one of both has "
            f"{wrong[0]!r}; pass the model and the fragments= of the saved LocalSteps"
        )
    for name, x in given.items():
        _check(f"the {what} of {name!r}", x, expected[name].shape, expected[name].dtype)
    return dict(given)


def _check(what: str, x: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    if (
        not isinstance(x, torch.Tensor)
        or x.layout != torch.strided
        or tuple(x.shape) != tuple(shape)
        or x.dtype != dtype
    ):
        found = f"{tuple(x.shape)}, {x.dtype}" if isinstance(x, torch.Tensor) else shown(x)
        raise StateError(f"{what} in the state must have shape {tuple(shape)} and dtype {dtype}, got {found}")
    if not bool(x.isfinite().all()):
        raise StateError(f"{what} in the state holds NaN or Inf")


def _feedback(
    state: Mapping[str, Any], anchors: Mapping[str, torch.Tensor], feedback: Feedback | None, place: tuple[int, int]
) -> Feedback | None:
    """Return a new Feedback with the residuals of a state; None if `feedback` is None."""
    if feedback is None:
        if state:
            raise StateError(
                "the state has residuals, but LocalSteps has no error feedback with its spec: use the spec of the "
                "saved LocalSteps"
            )
        return None
    loaded = Feedback(feedback.spec, decay=feedback.decay)
    loaded.load_state_dict(state)
    if parse(state)[:2] not in (place, (-1, -1)):
        raise StateError("the residuals of the state belong to another rank: load the state that this rank saved")
    for _, (name, _, stop), _ in residuals.ranges(state):
        if name not in anchors or stop > anchors[name].numel():
            raise StateError(
                f"the state has a residual of {stop} values of {name!r}, but the model has fewer values or no such "
                "parameter"
            )
    return loaded


def _pending(
    given: Mapping[str, Any], anchors: Mapping[str, torch.Tensor], fragments: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return the synchronization that was in flight when the state was saved; {} if there was none."""
    if not given:
        return {}
    if (names := sorted(map(str, given))) != _PENDING:
        raise StateError(f"'pending' of the state must have the entries {_PENDING}, got {names}")
    number: int = plain(given, "fragment", int)
    due: int = plain(given, "due", int)
    if not 0 <= number < len(fragments) or not 0 <= due < _MOST:
        raise StateError(
            f"'pending' of the state is damaged: it names fragment {number} of {len(fragments)}, due after step {due}"
        )
    expected = {name: anchors[name].to("meta", torch.float32) for name in fragments[number]}
    for key in ("mine", "mean"):
        if not isinstance(given[key], Mapping):
            raise StateError(f"{key!r} of 'pending' must be a dict, got {shown(given[key])}")
        _tensors(given[key], expected, f"entry {key!r} of 'pending'")
    return {"fragment": number, "due": due, "mine": given["mine"], "mean": given["mean"]}
