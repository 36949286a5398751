"""Residuals of a Feedback: conversion for another number of ranks, and addition to an exact mean."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from codec.stateful.checkpoint import load
from codec.stateful.ranges import Range, pieces
from codec.torch._compat import from_numpy
from codec.torch.feedback.checkpoint import ROLES, UNKNOWN
from codec.torch.feedback.feedback import Feedback


def ranges(state: Mapping[str, Any]) -> Iterator[tuple[str, Range, torch.Tensor]]:
    """Yield the role, the range of a parameter, and the values of each residual in a Feedback's state."""
    for role in ROLES:
        for r, values in pieces(load(state[role])[1]):
            yield role, r, from_numpy(values)


def moved(feedback: Feedback, rank: int, size: int) -> Feedback:
    """Return the residuals of this rank for another group.

    A mean over N ranks takes 1 / N of a worker's residual. The residual is multiplied by M / N for M ranks, so that the
    same part of it reaches the parameters. Residuals of encoded sums, which are errors of the mean, do not change.

    Parameters
    ----------
    feedback : Feedback
        Residuals, which are unchanged.
    rank, size : int
        This rank in the new group, and the number of ranks there.
    """
    state, found = feedback.state_dict(), Feedback(feedback.spec, decay=feedback.decay)
    if state["world_size"] != UNKNOWN:
        factor = size / state["world_size"]
        worker = {name: x * factor if isinstance(x, torch.Tensor) else x for name, x in state["worker"].items()}
        found.load_state_dict(state | {"rank": rank, "world_size": size, "worker": worker})
    return found


def add_to(feedback: Feedback, parts: Mapping[str, torch.Tensor], size: int) -> None:
    """Add the residuals to this rank's values of a mean over `size` ranks.

    Parameters
    ----------
    feedback : Feedback
        Residuals, which are unchanged: they are part of the mean only if that succeeds.
    parts : dict of str to tensor
        Values of each parameter.
    size : int
        Number of ranks. A residual of encoded sums is an error of the mean, so it counts `size` times.
    """
    for role, (name, start, stop), values in ranges(feedback.state_dict()):
        place = parts[name].view(-1)[start:stop]
        place.add_(values.to(place.device), alpha=size if role == "server" else 1)
