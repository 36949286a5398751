"""Gather the residuals of several ranks, or add them to the values of an exact mean."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from codec.stateful.checkpoint import ROLES, load, save
from codec.stateful.ranges import Range, gather, pieces
from codec.torch._compat import from_numpy
from codec.torch.feedback.checkpoint import ResidualOwner, of_tensors, parse
from codec.torch.feedback.checkpoint import save as save_feedback
from codec.torch.feedback.feedback import Feedback


def ranges(state: Mapping[str, Any]) -> Iterator[tuple[str, Range, torch.Tensor]]:
    """Yield the role, the range of a parameter, and the values of each residual in a Feedback's state."""
    for role in ROLES:
        for r, values in pieces(load(state[role])[1]):
            yield role, r, from_numpy(values)


def are_within(state: Mapping[str, Any], windows: Iterable[Range]) -> bool:
    """Return True if all residuals in a Feedback's state belong to values in some ranges."""
    inside = {name: (start, stop) for name, start, stop in windows}
    held = (r for _, r, _ in ranges(state))
    return all(n in inside and inside[n][0] <= start and stop <= inside[n][1] for n, start, stop in held)


def gathered(
    feedback: Feedback, states: Sequence[Mapping[str, Any]], windows: Sequence[Range], place: tuple[int, int]
) -> Feedback:
    """Return a Feedback with the sum of the residuals in the states of several ranks, for the values in some ranges.

    Parameters
    ----------
    feedback : Feedback
        Feedback of this rank, which is not changed.
    states : sequence of dict
        States of the Feedbacks of the ranks of a site.
    windows : sequence of Range
        The ranges.
    place : (int, int)
        Number of this rank, and number of ranks.
    """
    found, layout = Feedback(feedback.spec, decay=feedback.decay), tuple(windows)
    parsed = [parse(state) for state in states]
    parts: dict[str, Any] = {}
    for role in ROLES:
        total = gather({}, layout)
        for _, _, each in parsed:
            total += gather(load(each[role])[1], layout)
        parts[role] = of_tensors(save(role, {layout: total}))
    found.load_state_dict(save_feedback(ResidualOwner(*place), next((op for _, op, _ in parsed if op), ""), parts))
    return found


def add_to(feedback: Feedback, parts: Mapping[str, torch.Tensor], size: int) -> None:
    """Add the residuals to the values that this rank contributes to a mean over `size` ranks.

    Parameters
    ----------
    feedback : Feedback
        Residuals. This object is not changed, because the mean may fail.
    parts : dict of str to tensor
        Values of each parameter, by name; changed in place.
    size : int
        Number of ranks. A residual of encoded sums is an error of the mean, so it is multiplied by `size`.
    """
    for role, (name, start, stop), values in ranges(feedback.state_dict()):
        place = parts[name].view(-1)[start:stop]
        place.add_(values.to(place.device), alpha=size if role == "server" else 1)
