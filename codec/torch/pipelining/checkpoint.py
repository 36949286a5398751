"""Save and load the state of deltas of a CompressedStage."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from codec import StateError
from codec.torch.pipelining.end import End
from codec.torch.pipelining.envelope import MOST_TENSORS

_VERSION = 1


def save(ends: Sequence[End]) -> dict[str, Any]:
    """Return the state of the deltas on the edges of a stage. Arrays are tensors, as torch.load requires."""
    like = torch.empty(0, dtype=torch.uint8, device="cpu")
    return {"version": _VERSION, "edges": {_name(end): [d.state_dict(like=like) for d in end.deltas] for end in ends}}


def load(ends: Sequence[End], saved: Any) -> None:
    """Replace the state of the deltas on all edges of a stage.

    Raises
    ------
    StateError
        `saved` is not the state of the same edges. Some edges may already have the new state; the sides of an edge
        detect if their states differ.
    """
    state = cast(Mapping[Any, Any], saved if isinstance(saved, Mapping) else {})
    if state.get("version") != _VERSION or not isinstance(state.get("edges"), Mapping):
        raise StateError("the state must be one that CompressedStage.state_dict() returned, of the same version")
    edges: Mapping[Any, Any] = state["edges"]
    if set(edges) != {_name(end) for end in ends}:
        raise StateError(
            f"the state is of edges {sorted(edges)}, but the stage has the edges {sorted(map(_name, ends))}"
        )
    for end in ends:
        states: Any = edges[_name(end)]
        if not isinstance(states, list) or not 0 < len(cast(list[Any], states)) <= MOST_TENSORS:
            raise StateError("the state must be one that CompressedStage.state_dict() returned, of the same version")
        for i, each in enumerate(cast(list[Any], states)):
            end.delta(i).load_state_dict(each)


def _name(end: End) -> str:
    return f"{end.edge} {end.role}"
