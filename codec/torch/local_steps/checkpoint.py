"""Parse and check the states of LocalSteps in checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from codec import StateError
from codec.stateful.schema import STEPS, Field, Schema, WrongField, items, mapping, number, plain, read_fields
from codec.torch.feedback.checkpoint import parse
from codec.torch.feedback.feedback import Feedback
from codec.torch.replicas import residuals

STATE = Schema(
    "LocalSteps",
    {
        **dict.fromkeys(("rank", "world_size", "steps", "rounds", "start", "length"), STEPS),
        "apart": number(0, 1),
        "parameters": plain(str),
        **dict.fromkeys(("anchors", "bases", "residuals", "outer", "pending"), mapping()),
    },
)
_WHAT, _REMEDY = "the LocalSteps state", "load the model and the state that this rank saved"


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
    fields = STATE.read(state)
    if (fields["rank"], fields["world_size"]) != place:
        raise StateError(
            f"the state is of rank {fields['rank']} of {fields['world_size']}, but this is rank {place[0]} of "
            f"{place[1]}: load the state that this rank saved. To continue with another number of ranks, call "
            "synchronize(exact=True) before the model is saved, and create a new LocalSteps for the loaded model"
        )
    return LocalState(
        fields["steps"],
        fields["rounds"],
        bool(fields["apart"]),
        fields["start"],
        fields["length"],
        fields["parameters"],
        _tensors("anchors", fields["anchors"], anchors),
        _tensors("bases", fields["bases"], anchors, partial=True),
        _feedback(fields["residuals"], anchors, feedback, place),
        fields["outer"],
        _pending(fields["pending"], anchors, fragments),
    )


def check_outer(outer: torch.optim.Optimizer | None, state: Mapping[str, Any]) -> None:
    """Raise StateError unless `state` fits the outer optimizer; without one, `state` must be {}."""
    if outer is None:
        if state:
            raise StateError("the state was saved with an outer optimizer, but LocalSteps has none: pass outer=")
        return
    shapes = [p.shape for group in outer.param_groups for p in group["params"]]
    what, remedy = "the state of the outer optimizer", "load a state that was saved with this outer="
    entries = read_fields(what, remedy, {"param_groups": items(mapping()), "state": mapping(mapping())}, state)
    groups = [read_fields(what, remedy, {"params": items(STEPS)}, group) for group in entries["param_groups"]]
    places: dict[Any, dict[str, Any]] = entries["state"]
    if (
        [len(group["params"]) for group in groups] != [len(group["params"]) for group in outer.param_groups]
        or not all(type(i) is int and 0 <= i < len(shapes) for i in places)
        or not all(_fits(x, shapes[i]) for i, entry in places.items() for x in entry.values())
    ):
        raise StateError(f"{what} is of other parameters: {remedy}")


def _fits(x: Any, shape: torch.Size) -> bool:
    """Return True if `x` may be an entry in the optimizer state of a parameter with this shape."""
    return not isinstance(x, torch.Tensor) or (not x.is_meta and (x.shape == shape or x.numel() == 1))


def _tensors(
    part: str, given: Mapping[str, Any], expected: Mapping[str, torch.Tensor], *, partial: bool = False
) -> dict[str, torch.Tensor]:
    """Return the tensors of a part of a state, which must have the names, shapes and dtypes of `expected`.

    If `partial`, some tensors may be missing. Other tensors are a StateError.
    """
    if wrong := sorted(map(str, set(given) - set(expected) if partial else set(given) ^ set(expected))):
        raise StateError(
            f"the parameters of the state and of the model, or their fragments, differ: only one of both has "
            f"{wrong[0]!r}; pass the model and the fragments= of the saved LocalSteps"
        )
    return read_fields(f"{part!r} of {_WHAT}", _REMEDY, {name: _like(expected[name]) for name in given}, given)


def _like(expected: torch.Tensor) -> Field:
    """Return the kind of finite tensors with the shape and dtype of a tensor."""

    def read(x: Any) -> torch.Tensor:
        if x.layout != torch.strided or x.shape != expected.shape or x.dtype != expected.dtype:
            raise WrongField
        if not bool(x.isfinite().all()):
            raise WrongField("NaN or Inf")
        return x

    return Field(f"a tensor of {expected.dtype} with shape {tuple(expected.shape)}", read)


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
    if parse(state)[0][:2] not in (place, (-1, -1)):
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
    names: dict[str, Field] = {"fragment": number(0, len(fragments) - 1), "due": STEPS}
    found = read_fields(f"'pending' of {_WHAT}", _REMEDY, names | dict.fromkeys(("mine", "mean"), mapping()), given)
    place: int = found["fragment"]
    expected = {name: anchors[name].to("meta", torch.float32) for name in fragments[place]}
    return found | {key: _tensors(f"pending.{key}", found[key], expected) for key in ("mine", "mean")}
