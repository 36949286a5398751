"""Save and load the state of deltas of a CompressedStage."""

from collections.abc import Sequence
from typing import Any

import torch

from codec import StateError
from codec.stateful.activation.delta import load_all
from codec.stateful.schema import Schema, items, mapping, number, optional
from codec.torch.pipelining.end import End
from codec.torch.pipelining.envelope import MOST_TENSORS

_STAGE = Schema("CompressedStage", {"edges": mapping(items(mapping())), "auto": optional(number(0, 1 << 30))})


def save(ends: Sequence[End]) -> dict[str, Any]:
    """Return the state of the deltas on the edges of a stage. Arrays are tensors, as torch.load requires."""
    like = torch.empty(0, dtype=torch.uint8, device="cpu")
    return _STAGE.save({"edges": {_name(end): [d.state_dict(like=like) for d in end.deltas] for end in ends}})


def load(ends: Sequence[End], saved: Any) -> int | None:
    """Replace the state of the deltas on all edges of a stage; return the level of "auto", if `saved` has one.

    Raises
    ------
    StateError
        `saved` is not the state of the same edges. Nothing is changed.
    """
    fields = _STAGE.read(saved)
    edges: dict[str, list[Any]] = fields["edges"]
    if set(edges) != {_name(end) for end in ends}:
        raise StateError(
            f"the state is of edges {sorted(map(str, edges))}, but the stage has the edges {sorted(map(_name, ends))}"
        )
    if not all(0 < len(states) <= MOST_TENSORS for states in edges.values()):
        raise StateError(f"each edge of the state must have from 1 to {MOST_TENSORS} tensors: the state is damaged")
    load_all((end.delta(i), each) for end in ends for i, each in enumerate(edges[_name(end)]))
    return fields["auto"]


def _name(end: End) -> str:
    return f"{end.edge} {end.role}"
